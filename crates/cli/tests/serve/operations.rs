//! What operators need: probes, a port for metrics, limits of keys, encryption, sockets, HTTP/2, and an end in order.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use ureq::tls::{RootCerts, TlsConfig};

use crate::support::{Answer, CHAT, Server, TEXT, chat, endless, frames, story, wait, with};

/// What a server on a Unix socket answers to `GET path`: status line, headers and body.
fn get(socket: &Path, path: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn probes_and_metrics_have_an_address_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("metrics");
    let address = format!("unix:{}", text(&socket));
    let mut server = Server::launch(&["--api-key", "one", "--metrics-listen", &address]);
    for path in ["/livez", "/readyz", "/health"] {
        wait("it is ready", || server.get(path).status == 200);
        assert!(get(&socket, path).starts_with("HTTP/1.1 200 "), "{path}");
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert!(get(&socket, "/metrics").contains("infernum:num_requests_running"));
    assert!(get(&socket, "/v1/models").starts_with("HTTP/1.1 404 "));
    server.signal("TERM");
    assert_eq!(server.ended().code(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn it_listens_on_a_socket_of_the_file_system() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("api");
    let _server = Server::launch(&["--listen", &format!("unix:{}", text(&socket))]);
    wait("it is ready", || get(&socket, "/health").starts_with("HTTP/1.1 200 "));
    let mut stream = UnixStream::connect(&socket).expect("a connection");
    let body = story(4).to_string();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: \
         close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("text_completion"), "{answer}");
}

#[test]
fn a_key_may_use_so_much_a_minute() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "free\nfew requests=2\nshort tokens=20\n").expect("written");
    let mut server = Server::launch(&["--api-key-file", text(&file)]);
    wait("it is ready", || server.get("/health").status == 200);
    server.key = Some("few");
    let left = |answer: &Answer| answer.header("x-ratelimit-remaining-requests").to_owned();
    assert_eq!(left(&server.get("/v1/models")), "2", "who only looks pays nothing");
    assert_eq!(left(&server.post(TEXT, &story(1))), "1");
    assert_eq!(left(&server.post(TEXT, &story(1))), "0");
    let refused = server.post(TEXT, &story(1));
    refused.error(429, None, Some("rate_limit_exceeded"));
    assert_eq!(refused.header("x-ratelimit-limit-requests"), "2");
    let after: u64 = refused.header("retry-after").parse().expect("seconds");
    assert!((20..=31).contains(&after), "{after}");
    // Tokens are charged as they come, so that a request may go beyond what is left.
    server.key = Some("short");
    let first = server.post(TEXT, &with(story(40), json!({"ignore_eos": true})));
    assert_eq!(first.status, 200, "{}", first.text);
    assert_eq!(first.header("x-ratelimit-remaining-tokens"), "0");
    server.post(CHAT, &chat("Hi")).error(429, None, Some("rate_limit_exceeded"));
    server.key = Some("free");
    let free = server.post(TEXT, &story(1));
    assert_eq!((free.status, free.header("x-ratelimit-limit-requests")), (200, ""));

    // A file with a fault changes nothing; one without does.
    std::fs::write(&file, "new\nfew requests=many\n").expect("written");
    server.signal("HUP");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(server.get("/v1/models").status, 200, "the old keys are kept");
    std::fs::write(&file, "new\nfew requests=4\n").expect("written");
    server.signal("HUP");
    wait("the old key is gone", || server.get("/v1/models").status == 401);
    server.key = Some("few");
    assert_eq!(left(&server.post(TEXT, &story(1))), "1", "what was used stays used");
}

/// The certificate that a test server has, and its key.
fn certificate(name: &str) -> [PathBuf; 2] {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/tls");
    ["pem", "key"].map(|ending| folder.join(format!("{name}.{ending}")))
}

/// Whether a server shows that certificate; its answer to `GET /health`.
fn trusts(server: &Server, name: &str) -> Result<u16, ureq::Error> {
    let pem = std::fs::read(&certificate(name)[0]).expect("a certificate");
    let root = ureq::tls::Certificate::from_pem(&pem)?;
    let roots = RootCerts::new_with_certs(&[root]);
    let tls = TlsConfig::builder().root_certs(roots).build();
    let config = ureq::Agent::config_builder().tls_config(tls).http_status_as_error(false);
    let agent: ureq::Agent = config.max_idle_connections(0).build().into();
    let answer = agent.get(format!("https://localhost:{}/health", server.port)).call()?;
    Ok(answer.status().as_u16())
}

#[test]
fn connections_are_encrypted_with_certificates_that_can_be_changed() {
    let folder = tempfile::tempdir().expect("a folder");
    let [pem, key] = ["pem", "key"].map(|name| folder.path().join(name));
    let install = |name: &str| {
        let [from_pem, from_key] = certificate(name);
        std::fs::copy(from_pem, &pem).and(std::fs::copy(from_key, &key)).expect("copied");
    };
    install("one");
    let server = Server::launch(&["--tls-cert", text(&pem), "--tls-key", text(&key)]);
    wait("it is ready", || trusts(&server, "one").is_ok_and(|status| status == 200));
    assert!(trusts(&server, "two").is_err(), "it is who it says");
    let plain = server.agent.get(server.url("/health")).call();
    assert!(plain.is_err(), "nothing is said without encryption");
    // A key that is not the certificate's changes nothing.
    std::fs::copy(&certificate("two")[1], &key).expect("copied");
    server.signal("HUP");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(trusts(&server, "one").expect("still that"), 200);
    install("two");
    server.signal("HUP");
    wait("the other one", || trusts(&server, "two").is_ok_and(|status| status == 200));
    assert!(trusts(&server, "one").is_err());
}

#[test]
fn whoever_comes_while_it_drains_is_told() {
    let mut server = Server::start(&[]);
    let stream = server.stream(TEXT, &with(endless(), json!({"max_tokens": 1500})));
    wait("it runs", || server.metric("infernum:num_requests_running") == 1.0);
    server.signal("TERM");
    wait("it drains", || server.get("/readyz").status == 503);
    let refused = server.post(TEXT, &story(4));
    refused.error(503, None, Some("shutting_down"));
    assert!(!refused.header("retry-after").is_empty());
    assert_eq!(refused.header("connection"), "close");
    assert_eq!(server.get("/livez").status, 200);
    assert_eq!(frames(stream).last().expect("frames")["choices"][0]["finish_reason"], "length");
    assert_eq!(server.ended().code(), Some(0));
}

#[test]
fn prefixes_can_be_forgotten() {
    let server = Server::start(&[]);
    let request = with(story(1), json!({"prompt": "Once upon a time there was a fox. ".repeat(8)}));
    let cached = || {
        let answer = server.post(TEXT, &request).ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
    };
    assert_eq!(cached(), 0);
    assert!(cached() > 0);
    let answer = server.agent.post(server.url("/reset_prefix_cache")).send_empty();
    assert_eq!(answer.expect("an answer").status(), 200);
    assert_eq!(cached(), 0);
    assert!(cached() > 0);
    // A page that is not the server's own cannot.
    let foreign = server.agent.post(server.url("/reset_prefix_cache"));
    let foreign = foreign.header("origin", "http://evil.example").send_empty();
    assert_eq!(foreign.expect("an answer").status(), 403);
}

/// A client of HTTP/2 that does as it likes.
mod multiplexed {
    use bytes::Bytes;
    use h2::client::{Builder, SendRequest};
    use tokio::net::TcpStream;

    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(work)
    }

    /// A connection, and what tells that it has ended.
    async fn connect(
        server: &Server,
        window: u32,
    ) -> (SendRequest<Bytes>, tokio::task::JoinHandle<()>) {
        let stream = TcpStream::connect(("127.0.0.1", server.port)).await.expect("a connection");
        let builder = Builder::new().initial_window_size(window).handshake(stream).await;
        let (sender, connection) = builder.expect("HTTP/2");
        let driver = tokio::spawn(async move { drop(connection.await) });
        (sender, driver)
    }

    fn post(server: &Server) -> http::Request<()> {
        let request =
            http::Request::post(server.url(TEXT)).header("content-type", "application/json");
        request.body(()).expect("a request")
    }

    #[test]
    fn many_requests_share_a_connection() {
        let server = Server::start(&[]);
        let expected = server.post(TEXT, &story(12)).ok()["choices"][0]["text"].clone();
        let found = run(async {
            let (mut sender, _driver) = connect(&server, 1 << 20).await;
            let mut answers = Vec::new();
            for _ in 0..16 {
                sender = sender.ready().await.expect("room");
                let (answer, mut body) = sender.send_request(post(&server), false).expect("sent");
                body.send_data(story(12).to_string().into(), true).expect("sent");
                answers.push(answer);
            }
            let mut texts = Vec::new();
            for answer in answers {
                let mut body = answer.await.expect("an answer").into_body();
                let mut bytes = Vec::new();
                while let Some(data) = body.data().await {
                    let data = data.expect("bytes");
                    let _ = body.flow_control().release_capacity(data.len());
                    bytes.extend_from_slice(&data);
                }
                let json: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
                texts.push(json["choices"][0]["text"].clone());
            }
            texts
        });
        assert!(found.len() == 16 && found.iter().all(|text| *text == expected), "{found:?}");
    }

    #[test]
    fn requests_taken_back_as_fast_as_they_come_end_the_connection() {
        let server = Server::start(&[]);
        let sent = run(async {
            let (mut sender, driver) = connect(&server, 1 << 20).await;
            let mut sent = 0;
            while sent < 5000 && !driver.is_finished() {
                let Ok(ready) = sender.clone().ready().await else { break };
                sender = ready;
                let Ok((answer, mut body)) = sender.send_request(post(&server), false) else {
                    break;
                };
                body.send_reset(h2::Reason::CANCEL);
                drop(answer);
                sent += 1;
                tokio::task::yield_now().await;
            }
            sent
        });
        assert!(sent < 5000, "{sent}");
        assert_eq!(server.post(TEXT, &story(4)).status, 200, "others are served");
        wait("nothing runs", || server.metric("infernum:num_requests_running") == 0.0);
    }

    #[test]
    fn answers_that_are_not_taken_end_the_connection() {
        let server = Server::start(&[]);
        let start = Instant::now();
        run(async {
            // No byte of an answer may be sent; the connection itself is read all the time.
            let (sender, driver) = connect(&server, 0).await;
            let mut sender = sender.ready().await.expect("room");
            let (answer, mut body) = sender.send_request(post(&server), false).expect("sent");
            body.send_data(story(400).to_string().into(), true).expect("sent");
            let answer = answer.await.expect("a head");
            assert_eq!(answer.status(), 200);
            let ended = tokio::time::timeout(Duration::from_secs(50), driver).await;
            assert!(ended.is_ok(), "it is ended");
        });
        assert!(start.elapsed() > Duration::from_secs(25), "{:?}", start.elapsed());
        let ended = "infernum:connections_ended_total{reason=\"unread\"}";
        wait("it is told", || server.metric(ended) >= 1.0);
    }
}
