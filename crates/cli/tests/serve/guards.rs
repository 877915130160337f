//! What web pages cannot do, and what operators see of refusals.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;
use ureq::http::{HeaderName, HeaderValue};

use crate::support::{Answer, CHAT, Server, TEXT, story};

/// Sends these headers and no others but the length, which an HTTP client would not let one choose.
fn ask(server: &Server, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    let own = format!("127.0.0.1:{}", server.port);
    let host = ("host", own.as_str());
    let named = headers.iter().any(|(name, _)| *name == "host");
    let length = body.len().to_string();
    let more = [("connection", "close"), ("content-length", length.as_str())];
    for (name, value) in headers.iter().chain(&more).chain((!named).then_some(&host)) {
        head.extend([name, ": ", value, "\r\n"]);
    }
    let mut socket = TcpStream::connect(("127.0.0.1", server.port)).expect("a connection");
    socket.write_all((head + "\r\n" + body).as_bytes()).expect("sent");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let header = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        Some((name, HeaderValue::from_str(value).ok()?))
    };
    let headers = lines.filter_map(header).collect();
    Answer { status: status.expect("a status"), headers, text: body.to_owned() }
}

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn a_page_of_another_origin_cannot_drive_a_keyless_server() {
    let server =
        Server::start(&["--cors-origin", "http://app.example", "--allowed-host", "box.lan"]);
    let body = story(2).to_string();
    let post = |headers: &[(&str, &str)]| ask(&server, "POST", TEXT, headers, &body);
    // What a form or a plain fetch can send.
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
    ] {
        post(&[("content-type", kind)]).error(415, None, Some("unsupported_media_type"));
    }
    for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
        let plain = [("content-type", "text/plain")];
        ask(&server, "POST", path, &plain, "{}").error(415, None, Some("unsupported_media_type"));
    }
    post(&[("content-type", "Application/JSON; charset=utf-8")]).ok();
    // A page whose name was bound to this machine.
    for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.1.7"] {
        let headers = [JSON, ("host", host)];
        post(&headers).error(403, None, Some("host_not_allowed"));
        ask(&server, "GET", "/metrics", &headers[1..], "").error(
            403,
            None,
            Some("host_not_allowed"),
        );
        assert_eq!(ask(&server, "GET", "/health", &headers[1..], "").status, 200);
    }
    for host in ["localhost", "localhost:1234", "127.0.0.1", "[::1]:8000", "BOX.lan:80"] {
        post(&[JSON, ("host", host)]).ok();
    }
    // One that a browser says is another's.
    for origin in ["http://evil.example", "null", "http://localhost:1"] {
        post(&[JSON, ("origin", origin)]).error(403, None, Some("origin_not_allowed"));
    }
    let own = server.url("");
    for headers in [
        vec![JSON, ("origin", own.as_str())],
        vec![JSON, ("origin", "http://app.example")],
        vec![JSON, ("origin", "http://elsewhere.example"), ("sec-fetch-site", "same-origin")],
    ] {
        post(&headers).ok();
    }
    for path in ["/", "/docs", "/openapi.json"] {
        assert_eq!(ask(&server, "GET", path, &[("origin", own.as_str())], "").status, 200);
    }
}

#[test]
fn a_server_with_keys_or_for_others_is_called_as_they_like() {
    let mut server = Server::launch(&["--api-key", "one"]);
    server.key = Some("one");
    crate::support::wait("it is ready", || server.get("/health").status == 200);
    let key = ("authorization", "Bearer one");
    assert_eq!(ask(&server, "GET", "/version", &[("host", "any.example"), key], "").status, 200);
}

#[test]
fn statuses_and_refusals_are_counted() {
    let server = Server::start(&["--max-body-bytes", "1000"]);
    server.post(TEXT, &story(2)).ok();
    server.post(TEXT, &json!({"prompt": "x", "temperature": 9}));
    server.post(TEXT, &json!({"prompt": "x", "temperature": "x"}));
    server.send(TEXT, &"x".repeat(1001));
    server.get("/nope");
    server.get("/nope/too");
    server.post(CHAT, &json!({"model": "x", "messages": [{"role": "user", "content": "x"}]}));
    ask(&server, "BREW", "/version", &[], "");
    let requests = |handler: &str, method: &str, status: u16| {
        let labels = format!("handler=\"{handler}\",method=\"{method}\",status=\"{status}\"");
        server.metric(&format!("infernum:http_requests_total{{{labels}}}"))
    };
    assert_eq!(requests(TEXT, "POST", 200), 1.0);
    assert_eq!(requests(TEXT, "POST", 422), 1.0);
    assert_eq!(requests(TEXT, "POST", 400), 1.0);
    assert_eq!(requests(TEXT, "POST", 413), 1.0);
    assert_eq!(requests("none", "GET", 404), 2.0, "made-up paths make no labels");
    assert_eq!(requests("/version", "other", 405), 1.0, "nor do made-up methods");
    let refused =
        |code: &str| server.metric(&format!("infernum:http_refusals_total{{code=\"{code}\"}}"));
    assert_eq!(refused("invalid_value"), 1.0);
    assert_eq!(refused("malformed"), 1.0);
    assert_eq!(refused("body_too_large"), 1.0);
    assert_eq!(refused("not_found"), 2.0);
    assert_eq!(refused("model_not_found"), 1.0);
    assert_eq!(refused("method_not_allowed"), 1.0);
}
