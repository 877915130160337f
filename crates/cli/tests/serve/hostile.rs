//! What clients may do to a server, by malice or by accident, without others noticing.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{CHAT, PATIENCE, Server, TEXT, chat, endless, story, wait, with};

/// Bodies that are as much work as a body of 4 MB can be, and the statuses they may be answered with.
fn worst() -> Vec<(&'static str, &'static str, String, &'static [u16])> {
    const REFUSED: &[u16] = &[400, 422, 503];
    let digits = "0123456789".repeat(400_000);
    let asked = |more| with(story(1), more).to_string();
    let mut fields = story(1).to_string();
    fields.pop();
    (0..250_000).for_each(|i| write!(fields, ",\"f{i}\":1").expect("a string takes all"));
    fields.push('}');
    let bias = (0..250_000).map(|i| (format!("{i:08}"), json!(1))).collect();
    let bias = serde_json::Value::Object(bias);
    let message = json!({"role": "user", "content": "x"});
    let deep = format!("{{\"model\":\"ember\",\"prompt\":{}", "[".repeat(4_000_000));
    vec![
        ("unknown fields", TEXT, fields, &[200, 503]),
        (
            "long stop strings",
            TEXT,
            asked(json!({"stop": vec!["a".repeat(1_000_000); 4]})),
            REFUSED,
        ),
        ("many stop strings", TEXT, asked(json!({"stop": vec!["ab"; 700_000]})), REFUSED),
        ("digits", TEXT, asked(json!({"prompt": digits})), REFUSED),
        ("spaces", TEXT, asked(json!({"prompt": " ".repeat(4_000_000)})), REFUSED),
        ("one word", CHAT, chat(&"a".repeat(4_000_000)).to_string(), REFUSED),
        ("many texts", TEXT, asked(json!({"prompt": vec!["ab"; 700_000]})), REFUSED),
        ("many tokens", TEXT, asked(json!({"prompt": vec![5; 1_900_000]})), REFUSED),
        (
            "many messages",
            CHAT,
            with(chat(""), json!({"messages": vec![message; 100_000]})).to_string(),
            REFUSED,
        ),
        ("biases", TEXT, asked(json!({"logit_bias": bias})), REFUSED),
        ("depth", TEXT, deep, REFUSED),
        ("digits to count", "/tokenize", json!({"prompt": digits}).to_string(), REFUSED),
        (
            "tokens to spell",
            "/detokenize",
            json!({"tokens": vec![5; 1_900_000]}).to_string(),
            REFUSED,
        ),
    ]
}

/// Asks until told to stop; gives how long each answer took.
fn timed(done: &AtomicBool, ask: impl Fn()) -> Vec<Duration> {
    let mut times = Vec::new();
    while !done.load(Ordering::Acquire) {
        let start = Instant::now();
        ask();
        times.push(start.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    times.sort_unstable();
    times
}

fn middle(times: &[Duration]) -> Duration {
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// A server that does a little work for each byte, and nothing else: how long it takes is the machine's doing, and that of whoever
/// else runs on it.
struct Bystander(RefCell<TcpStream>);

impl Bystander {
    fn start() -> Bystander {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket =
            TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        std::thread::spawn(move || {
            let (mut other, _) = listener.accept().expect("a connection");
            let mut byte = [0];
            while other.read_exact(&mut byte).is_ok() {
                let work = (0..500_000u64).fold(0, |sum, i| std::hint::black_box(sum ^ (i << 7)));
                let answered = other.write_all(&[work as u8]);
                if answered.is_err() {
                    return;
                }
            }
        });
        Bystander(RefCell::new(socket))
    }

    fn ask(&self) {
        let (mut socket, mut byte) = (self.0.borrow_mut(), [0]);
        socket.write_all(&byte).and_then(|()| socket.read_exact(&mut byte)).expect("an answer");
    }
}

/// With many of each kind under way, health and another client are answered about as fast as ever, as far as the machine is: what
/// a bystander waits for beyond what it needs alone is not the server's doing.
#[test]
fn the_worst_bodies_hold_up_nobody() {
    let server = Server::start(&["--api-key", "victim", "--api-key", "other"]);
    let asks = |key: &'static str, path: &str, body: &str| {
        let request =
            server.agent.post(server.url(path)).header("content-type", "application/json");
        let answer = request.header("authorization", format!("Bearer {key}")).send(body);
        answer.map(|a| a.status().as_u16())
    };
    let small = story(1).to_string();
    let victim = || assert_eq!(asks("victim", TEXT, &small).expect("an answer"), 200);
    let healthy = || assert_eq!(server.get("/health").status, 200);
    let alone = |ask: &dyn Fn()| {
        let times = (0..20).map(|_| {
            let start = Instant::now();
            ask();
            start.elapsed()
        });
        times.min().expect("some")
    };
    let bystander = Bystander::start();
    let (by_itself, first_alone, health_alone) =
        (alone(&|| bystander.ask()), alone(&victim), alone(&healthy));
    for (name, path, body, expected) in worst() {
        let done = AtomicBool::new(false);
        let start = Instant::now();
        let (health, first, beside, statuses) = std::thread::scope(|scope| {
            let health = scope.spawn(|| timed(&done, healthy));
            let first = scope.spawn(|| timed(&done, victim));
            let beside = Bystander::start();
            let beside = scope.spawn(|| timed(&done, move || beside.ask()));
            let crowd: Vec<_> =
                (0..8).map(|_| scope.spawn(|| asks("other", path, &body))).collect();
            let crowd: Vec<_> = crowd.into_iter().map(|c| c.join().expect("it ends")).collect();
            done.store(true, Ordering::Release);
            let ended = [health, first, beside].map(|thread| thread.join().expect("it"));
            let [health, first, beside] = ended;
            (health, first, beside, crowd)
        });
        for status in statuses {
            let status = status.expect("an answer");
            assert!(expected.contains(&status), "{name}: {status}");
        }
        // An answer goes through some threads, each of which waits for its turn. This is wide; a freeze is far beyond it.
        let delay = middle(&beside).saturating_sub(by_itself);
        let slower = (middle(&beside).as_secs_f64() / by_itself.as_secs_f64()).max(1.0);
        let most = |alone: Duration| 10 * (alone + delay) + Duration::from_millis(100);
        let (health, first, took) = (middle(&health), middle(&first), start.elapsed());
        assert!(
            health < most(health_alone),
            "{name}: health after {health:?}, not {health_alone:?}; {delay:?}"
        );
        assert!(first < most(first_alone), "{name}: {first:?}, not {first_alone:?}; {delay:?}");
        assert!(
            took < Duration::from_secs(20).mul_f64(slower),
            "{name}: {took:?}, {slower} times as slow"
        );
    }
}

fn connect(server: &Server) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", server.port)).expect("a connection");
    socket.set_read_timeout(Some(PATIENCE)).expect("it can");
    socket
}

fn head(path: &str, length: usize) -> String {
    let kind = "content-type: application/json";
    format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{kind}\r\ncontent-length: {length}\r\n\r\n")
}

/// Sends a request, and reads nothing of its answer.
fn send(server: &Server, body: &serde_json::Value) -> TcpStream {
    let (mut socket, body) = (connect(server), body.to_string());
    socket.write_all((head(TEXT, body.len()) + &body).as_bytes()).expect("sent");
    socket
}

/// Waits for the other side to hang up.
fn hangs_up(mut socket: &TcpStream) -> bool {
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == ErrorKind::ConnectionReset,
    }
}

/// Whether the other side, which sends nothing else, has hung up by now.
fn has_hung_up(mut socket: &TcpStream) -> bool {
    socket.set_nonblocking(true).expect("a socket");
    let end = socket.read(&mut [0]);
    end.map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |bytes| bytes == 0)
}

#[test]
fn idle_connections_make_room() {
    let server = Server::start(&["--max-connections", "4"]);
    let idle: Vec<TcpStream> = (0..40).map(|_| connect(&server)).collect();
    assert_eq!(server.get("/v1/models").status, 200);
    assert!(idle[..32].iter().all(hangs_up), "the oldest had to go");
    assert!(server.metric("infernum:connections_ended_total{reason=\"room\"}") >= 36.0);
    // Those who have sent half a request go next, and those who are served stay.
    let running = send(&server, &endless());
    wait("it runs", || server.metric("infernum:num_requests_running") == 1.0);
    let mut halves = Vec::new();
    for _ in 0..8 {
        let mut half = connect(&server);
        half.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n").expect("sent");
        halves.push(half);
    }
    assert_eq!(server.get("/v1/models").status, 200);
    // Which of them the server has read from is known to it alone: how many go is asked, not which.
    let gone = || halves.iter().filter(|half| has_hung_up(half)).count();
    wait("most of them are gone", || gone() >= 5);
    assert_eq!(server.metric("infernum:num_requests_running"), 1.0);
    drop(running);
}

#[test]
fn health_is_told_when_all_connections_are_taken() {
    let server = Server::start(&["--max-connections", "2", "--max-sequences", "2"]);
    let whole = with(endless(), json!({"stream": false, "n": 2, "max_tokens": 1500}));
    let first = send(&server, &whole);
    wait("it runs", || server.metric("infernum:num_requests_running") == 2.0);
    // The connection that asked for metrics is idle, and makes room. The server reads what came
    // before anything else would have to make room for the next ones.
    let running = [first, send(&server, &whole)];
    std::thread::sleep(Duration::from_millis(500));
    let fresh = |path: &str| {
        let mut socket = connect(&server);
        let head = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n");
        socket.write_all(head.as_bytes()).expect("sent");
        let mut text = String::new();
        socket.read_to_string(&mut text).expect("text");
        text
    };
    wait("both are taken", || fresh("/version").starts_with("HTTP/1.1 503"));
    assert!(fresh("/version").contains("too_many_connections"));
    for _ in 0..50 {
        let start = Instant::now();
        assert!(fresh("/health").starts_with("HTTP/1.1 200"));
        assert!(start.elapsed() < Duration::from_secs(2));
    }
    drop(running);
    wait("there is room again", || fresh("/version").starts_with("HTTP/1.1 200"));
}

#[test]
fn output_that_is_not_read_ends_its_request() {
    let server = Server::start(&["--max-unread-bytes", "4096"]);
    let stalled = send(&server, &with(endless(), json!({"n": 16, "logprobs": 20})));
    wait("it is noticed", || {
        server.metric("infernum:unread_requests_total{model_name=\"ember\"}") >= 1.0
    });
    wait("its blocks are free", || server.metric("infernum:kv_cache_usage_perc") == 0.0);
    assert_eq!(server.metric("infernum:num_requests_running"), 0.0);
    drop(stalled);
    // Whoever reads gets all.
    let all = crate::support::frames(server.stream(TEXT, &with(endless(), json!({"n": 4}))));
    assert!(all.iter().all(|frame| frame.get("error").is_none()));
}

#[test]
fn who_drips_is_cut_off() {
    let mut server = Server::start(&[]);
    let silent = connect(&server);
    let (mut slow_head, mut slow_body) = (connect(&server), connect(&server));
    slow_head.write_all(b"POST /v1/completions HTTP/1.1\r\n").expect("sent");
    slow_body.write_all(head(TEXT, 1000).as_bytes()).expect("sent");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(14) {
        // Either may be closed already.
        let _ = slow_head.write_all(b"x: y\r\n");
        let _ = slow_body.write_all(b" ");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(hangs_up(&silent) && hangs_up(&slow_head));
    let mut text = [0; 12];
    slow_body.read_exact(&mut text).expect("an answer");
    assert_eq!(&text, b"HTTP/1.1 408");
    for reason in ["no_request", "head"] {
        let name = format!("infernum:connections_ended_total{{reason=\"{reason}\"}}");
        assert_eq!(server.metric(&name), 1.0, "{reason}");
    }
    // And a server that is told to stop waits for none of them.
    let _rest: Vec<TcpStream> = (0..20)
        .map(|i| {
            let mut socket = connect(&server);
            let part = if i % 2 == 0 { "POST /v1/comp".to_owned() } else { head(TEXT, 1000) };
            socket.write_all(part.as_bytes()).expect("sent");
            socket
        })
        .collect();
    let start = Instant::now();
    server.signal("TERM");
    assert_eq!(server.ended().code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
