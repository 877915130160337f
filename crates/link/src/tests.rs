//! Both ends of a socket, before an engine whose steps fail: a request is taken, and ends.

mod adapters;

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use infernum_ir::Dims;
use infernum_runtime::{
    AdapterWeights, Allowed, Constraint, Cursor, Engine, EngineLimits, EngineOptions, Event,
    ExecError, Executor, FinishReason, Logprobs, Next, Request, StepInputs, StepOutput, Ticket,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::client::{Dial, FrontEnd};
use super::driver::Port;
use super::host::{Credit, Host, Listener, Outgoing};
use super::*;

/// Every step fails; there is room for two adapters.
struct Broken;

impl Executor for Broken {
    fn submit(&mut self, _: &StepInputs) -> Result<Ticket, ExecError> {
        Err(ExecError::Inputs("nonsense".to_owned()))
    }

    fn wait(&mut self, _: Ticket) -> Result<&StepOutput, ExecError> {
        Err(ExecError::Ticket)
    }

    fn adapter_slots(&self) -> usize {
        2
    }

    fn set_adapter(&mut self, _: usize, _: &AdapterWeights) -> Result<(), ExecError> {
        Ok(())
    }
}

fn broken() -> Engine<Broken> {
    let step = Dims { t: 8, b: 4, s: 64, pairs: 512, seqs: 4 };
    let (max_length, chunk, blocks, block_size, vocab) = (16, 8, 16, 4, 50);
    let limits = EngineLimits { step, max_length, chunk, blocks, block_size, vocab };
    Engine::new(Broken, limits, EngineOptions::default()).expect("options that agree")
}

fn offer() -> Offer {
    let facts = Facts {
        max_length: 16,
        vocab: 50,
        width: 1,
        blocks: 16,
        sequences: 4,
        queue: 4,
        family: "f".to_owned(),
        format: "safetensors".to_owned(),
        bytes: 7,
        on: "nothing".to_owned(),
    };
    let (instance, name, digest) = (3, "m".to_owned(), "d".to_owned());
    Offer { instance, name, model: None, digest, facts, most_bytes: 8192 }
}

/// An engine that runs, as its front ends meet it.
fn host(secret: Option<&str>, silence: Duration) -> Arc<Host> {
    let (handle, driver) = engine();
    std::thread::spawn(move || driver.run(broken(), None));
    let secret = secret.map(|text| Secret::new(text).expect("long enough"));
    Arc::new(Host { handle, offer: offer(), secret, grammars: None, silence })
}

/// The same, open to all, with adapters that come from there.
fn host_with(files: AdapterFiles) -> Arc<Host> {
    let (handle, driver) = engine();
    std::thread::spawn(move || driver.with_adapters(files).run(broken(), None));
    Arc::new(Host { handle, offer: offer(), secret: None, grammars: None, silence: PATIENCE })
}

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef";

/// A connection to a host, and how that ends.
fn connected(host: &Arc<Host>) -> (UnixStream, tokio::task::JoinHandle<Result<(), LinkError>>) {
    let (here, there) = UnixStream::pair().expect("a pair");
    let host = host.clone();
    (here, tokio::spawn(async move { host.converse(Box::new(there)).await }))
}

async fn send(stream: &mut UnixStream, message: &ToEngine) {
    let mut bytes = Vec::new();
    frame::push(&mut bytes, message).expect("it can be written");
    stream.write_all(&bytes).await.expect("it is taken");
}

/// The next report that is no mere sign of life.
async fn heard(stream: &mut UnixStream) -> Report {
    loop {
        let mut bytes = Vec::new();
        frame::read(stream, &mut bytes, 1 << 20).await.expect("a frame");
        let report: Report = frame::parse(&bytes).expect("a report");
        if report.says_something() {
            return report;
        }
    }
}

/// The next that says something else than which adapters there are.
async fn told(stream: &mut UnixStream) -> Report {
    loop {
        let report = Report { adapters: None, ..heard(stream).await };
        if report.says_something() {
            return report;
        }
    }
}

fn submit(key: u64) -> ToEngine {
    let request = Request::new(vec![1, 2], 4);
    let (grammar, adapter) = (None, None);
    ToEngine::Command(Command::Submit(Box::new(Submission { key, request, grammar, adapter })))
}

/// Asks for something and hears how it ends.
async fn served(stream: &mut UnixStream, key: u64) {
    send(stream, &submit(key)).await;
    let (mut id, mut ended) = (None, None);
    while ended.is_none() {
        let report = told(stream).await;
        id = id.or(report.accepted.first().map(|(found, id)| {
            assert_eq!(*found, key);
            *id
        }));
        ended = report.events.into_iter().find_map(|event| match event {
            Event::Finished(of, why) => Some((of, why)),
            _ => None,
        });
    }
    assert_eq!(ended, id.map(|id| (id, FinishReason::Failed)));
}

#[tokio::test]
async fn both_sides_must_have_the_secret_and_the_version() {
    let try_with = async |engine: Option<&str>, own: Option<&str>| {
        let host = host(engine, PATIENCE);
        let (mut stream, talk) = connected(&host);
        let own = own.map(|text| Secret::new(text).expect("long enough"));
        let found = handshake::introduce(&mut stream, own.as_ref(), 1 << 20).await;
        drop(stream);
        (found, talk.await.expect("no panic"))
    };
    let other = Some("another secret of sixteen");
    assert_eq!(try_with(None, None).await.0.expect("let in"), offer());
    assert_eq!(try_with(Some(SECRET), Some(SECRET)).await.0.expect("let in"), offer());
    let (here, there) = try_with(Some(SECRET), other).await;
    assert!(matches!((here, there), (Err(LinkError::Secret), Err(LinkError::Secret))));
    let (here, there) = try_with(Some(SECRET), None).await;
    assert!(matches!((here, there), (Err(LinkError::NoSecret), Err(LinkError::Ended))));
    // An engine that does not have it, neither.
    assert!(matches!(try_with(None, Some(SECRET)).await.0, Err(LinkError::Secret)));
    assert!(Secret::new("short").is_none());
    for (greeting, version) in [(*b"INFERNUM\x63\0\0\0", Some(99)), (*b"GET / HTTP/1", None)] {
        let (mut stream, talk) = connected(&host(None, PATIENCE));
        stream.write_all(&greeting).await.expect("it is taken");
        match (talk.await.expect("no panic"), version) {
            (Err(LinkError::Version { found: 99 }), Some(99))
            | (Err(LinkError::Stranger), None) => {}
            other => panic!("{other:?}"),
        }
        // It says its own version first, so that the other side can tell as well.
        let mut found = [0; 12];
        stream.read_exact(&mut found).await.expect("a greeting");
        assert_eq!(&found[..8], b"INFERNUM");
    }
}

#[tokio::test]
async fn what_cannot_be_read_is_dropped_and_counted_until_it_is_too_much() {
    let host = host(None, PATIENCE);
    let (mut stream, talk) = connected(&host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    let garbage =
        [&[3, 0, 0, 0, 0xc1, 0xc1, 0xc1][..], &[0, 0, 0, 0], &[1, 0, 0, 0, 0x93]].concat();
    for _ in 0..5 {
        stream.write_all(&garbage).await.expect("it is taken");
    }
    served(&mut stream, 1).await;
    assert_eq!(host.handle.standing().malformed, 15);
    stream.write_all(&garbage).await.expect("it is taken");
    assert!(matches!(talk.await.expect("no panic"), Err(LinkError::Malformed(17))));
    // A length without an end is not waited for.
    let (mut stream, talk) = connected(&host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    stream.write_all(&[0xff; 8]).await.expect("it is taken");
    assert!(matches!(talk.await.expect("no panic"), Err(LinkError::Frame { .. })));
    assert_eq!(host.handle.standing().malformed, 18);
}

#[tokio::test]
async fn requests_are_checked_and_bounded() {
    let host = host(None, PATIENCE);
    let (mut stream, _talk) = connected(&host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    let refused = async |stream: &mut UnixStream, key, change: &dyn Fn(&mut Submission)| {
        let ToEngine::Command(Command::Submit(mut submission)) = submit(key) else {
            panic!("it is")
        };
        change(&mut submission);
        send(stream, &ToEngine::Command(Command::Submit(submission))).await;
        let (found, refusal) = told(stream).await.rejected.pop().expect("a refusal");
        assert_eq!(found, key);
        refusal.cause
    };
    let cause = refused(&mut stream, 1, &|s| s.request.bias.push((50, 1.0))).await;
    assert_eq!(cause, Cause::Value("logit_bias".to_owned()));
    let cause = refused(&mut stream, 2, &|s| s.request.second = Some(3)).await;
    assert_eq!(cause, Cause::Value("prompt".to_owned()));
    assert_eq!(refused(&mut stream, 3, &|s| s.request.tokens = vec![1; 17]).await, Cause::TooLong);
    let cause = refused(&mut stream, 4, &|s| s.request.sampling.temperature = f32::NAN).await;
    assert_eq!(cause, Cause::Value("temperature".to_owned()));
    // Without a tokenizer nothing can be held to a grammar.
    assert_eq!(refused(&mut stream, 5, &|s| s.grammar = Some("x".to_owned())).await, Cause::Model);
    host.handle.drain();
    assert_eq!(refused(&mut stream, 6, &|_| ()).await, Cause::Draining);
}

/// Makes engines, as long as it may; counts what it is told.
#[derive(Default)]
struct Made {
    put_away: Arc<std::sync::Mutex<Vec<(bool, Depth)>>>,
    fails: Arc<std::sync::atomic::AtomicBool>,
}

impl Source<Broken> for Made {
    fn put_away(&mut self, engine: Option<Engine<Broken>>, depth: Depth) {
        self.put_away.lock().expect("no panic").push((engine.is_some(), depth));
    }

    fn make(&mut self) -> Result<Engine<Broken>, String> {
        let fails = self.fails.load(std::sync::atomic::Ordering::Acquire);
        if fails { Err("no memory".to_owned()) } else { Ok(broken()) }
    }
}

#[tokio::test]
async fn an_engine_that_sleeps_is_gone_and_another_one_wakes() {
    let (handle, driver) = engine();
    let source = Made::default();
    let (put_away, fails) = (source.put_away.clone(), source.fails.clone());
    std::thread::spawn(move || driver.run(broken(), source));
    let host = Host { handle, offer: offer(), secret: None, grammars: None, silence: PATIENCE };
    let host = Arc::new(host);
    let (mut stream, _talk) = connected(&host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    let done = async |stream: &mut UnixStream, command: Command| {
        let key = command.key().expect("it is waited for");
        send(stream, &ToEngine::Command(command)).await;
        let report = told(stream).await;
        let [(found, done)] = &report.done[..] else { panic!("{report:?}") };
        assert_eq!(*found, key);
        (done.clone(), report.asleep)
    };
    let sleep = |key, depth| Command::Sleep(key, Sleep { depth, abort: false });
    served(&mut stream, 1).await;
    let steps = host.handle.standing().stats.prefix_queries;
    assert_eq!(done(&mut stream, sleep(2, Depth::Light)).await, (Ok(()), true));
    let standing = host.handle.standing();
    assert!(standing.asleep);
    assert_eq!((standing.stats.prefix_queries, standing.stats.total_blocks), (steps, 0));
    send(&mut stream, &submit(3)).await;
    let (key, refusal) = told(&mut stream).await.rejected.pop().expect("a refusal");
    assert_eq!((key, refusal.cause), (3, Cause::Asleep));
    assert_eq!(done(&mut stream, sleep(4, Depth::Deep)).await, (Ok(()), true), "deeper");
    let all = put_away.lock().expect("no panic").clone();
    assert_eq!(all, [(true, Depth::Light), (false, Depth::Deep)]);
    fails.store(true, std::sync::atomic::Ordering::Release);
    let why = Err(Refusal { cause: Cause::Internal, message: "no memory".to_owned() });
    assert_eq!(done(&mut stream, Command::Wake(5)).await, (why, true));
    fails.store(false, std::sync::atomic::Ordering::Release);
    assert_eq!(done(&mut stream, Command::Wake(6)).await, (Ok(()), false));
    assert_eq!(done(&mut stream, Command::Wake(7)).await, (Ok(()), false), "it is awake");
    served(&mut stream, 8).await;
    let standing = host.handle.standing().stats;
    assert!(standing.prefix_queries > steps && standing.total_blocks == 16, "{standing:?}");
}

#[tokio::test]
async fn a_silent_front_end_is_let_go() {
    let host = host(None, Duration::from_millis(300));
    let (mut stream, talk) = connected(&host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    assert!(matches!(talk.await.expect("no panic"), Err(LinkError::Silent(_))));
    let (_stream, talk) = connected(&host);
    assert!(
        matches!(talk.await.expect("no panic"), Err(LinkError::Silent(_))),
        "says nothing at all"
    );
}

#[test]
fn a_front_end_that_takes_nothing_is_given_up() {
    let (reports, mut waiting) = tokio::sync::mpsc::unbounded_channel();
    let credit = Arc::new(Credit::default());
    let mut port = Outgoing { reports, credit: credit.clone(), window: 100_000 };
    let report = || {
        let top = vec![(1, 0.5); 20];
        let id = broken().submit(Request::new(vec![1], 1)).expect("well formed");
        let logprobs = Logprobs { token: 1, logprob: 0.5, rank: 1, top };
        Report {
            events: vec![Event::Token(id, 1, Some(Box::new(logprobs))); 10],
            ..Report::default()
        }
    };
    let size = report().size();
    assert!((3000..5000).contains(&size), "{size}");
    for _ in 0..1000 {
        assert!(port.send(report()), "what is taken can go on for ever");
        credit.pay(waiting.try_recv().expect("it is there").size() as u64);
    }
    let sent = (0..1000).take_while(|_| port.send(report())).count();
    assert_eq!(sent, 100_000 / size);
}

#[tokio::test]
async fn who_may_connect_follows_from_the_address() {
    let bind = async |text: &str, secret: Option<&str>| {
        let secret = secret.map(|text| Secret::new(text).expect("long enough"));
        Listener::bind(&text.parse().expect(text), secret.as_ref()).await
    };
    assert!(matches!(bind("tcp://0.0.0.0:0", None).await, Err(LinkError::Open(_))));
    assert!(bind("tcp://0.0.0.0:0", Some(SECRET)).await.is_ok());
    assert!(bind("tcp://127.0.0.1:0", None).await.is_ok());
    let dial = Dial {
        address: "tcp://192.0.2.1:9".parse().expect("an address"),
        secret: None,
        silence: PATIENCE,
    };
    assert!(matches!(dial.offer().await, Err(LinkError::Open(_))), "it is not even tried");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("e.sock");
    let address = format!("ipc://{}", path.display());
    let listener = bind(&address, None).await.expect("a socket");
    let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(bind(&address, None).await.is_err(), "somebody listens");
    drop(listener);
    assert!(!path.exists());
    // One that a process left behind that died is taken over; what is no socket is not.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    drop(bind(&address, None).await.expect("nobody listens"));
    std::fs::write(&path, "a file").expect("written");
    assert!(bind(&address, None).await.is_err() && path.exists());
}

/// What a front end hears, in words.
struct Noted(Sender<String>);

impl FrontEnd for Noted {
    fn offered(&mut self, offer: &Offer) -> Result<(), String> {
        let _ = self.0.send(format!("offered {}", offer.name)); // the test may have ended
        Ok(())
    }

    fn reported(&mut self, report: Report) {
        for (key, _) in report.accepted {
            let _ = self.0.send(format!("accepted {key}")); // as above
        }
        for event in report.events {
            if let Event::Finished(_, why) = event {
                let _ = self.0.send(format!("finished {why:?}")); // as above
            }
        }
    }

    fn unsent(&mut self, key: u64, refusal: Option<Refusal>) {
        let why = refusal.map(|r| format!("{:?}", r.cause));
        let _ = self.0.send(format!("unsent {key} {}", why.unwrap_or_default())); // as above
    }

    fn lost(&mut self) {
        let _ = self.0.send("lost".to_owned()); // as above
    }

    fn malformed(&mut self) {
        let _ = self.0.send("malformed".to_owned()); // as above
    }
}

/// What can be followed in this process alone.
#[derive(Debug)]
struct Unwritten;

impl Constraint for Unwritten {
    fn begin(&self, _: bool) -> Box<dyn Cursor> {
        struct Done;
        impl Cursor for Done {
            fn next(&mut self, _: bool) -> Option<Next> {
                Some(Next { forced: Vec::new(), then: Allowed::Nothing, took: Duration::ZERO })
            }
            fn advance(&mut self, _: u32) {}
        }
        Box::new(Done)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_lost_and_found_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let address: Address =
        format!("ipc://{}/e", folder.path().display()).parse().expect("it is one");
    let (sender, heard) = channel();
    let dial = Dial { address: address.clone(), secret: None, silence: PATIENCE };
    let (remote, follow) = dial.follow(Noted(sender));
    let following = tokio::spawn(follow);
    let ask = |key, constraint: Option<Arc<dyn Constraint>>, tokens| {
        let request = Request { constraint, ..Request::new(vec![1; tokens], 4) };
        let submission = Submission { key, request, grammar: None, adapter: None };
        remote.send(Command::Submit(Box::new(submission))).expect("it is followed");
    };
    let next = |heard: &Receiver<String>| heard.recv_timeout(PATIENCE).expect("something");
    ask(1, None, 2);
    assert_eq!(next(&heard), "unsent 1 ", "there is no engine yet");
    for _ in 0..3 {
        let listener = Listener::bind(&address, None).await.expect("a socket");
        let host = host(None, PATIENCE);
        let serving = tokio::spawn(host.clone().serve(listener));
        assert_eq!(next(&heard), "offered m");
        ask(2, None, 2);
        assert_eq!(next(&heard), "accepted 2");
        assert_eq!(next(&heard), "finished Failed");
        ask(3, Some(Arc::new(Unwritten)), 2);
        assert_eq!(next(&heard), "unsent 3 Grammar");
        ask(4, None, 10_000);
        assert_eq!(next(&heard), "unsent 4 TooLong");
        // Nobody listens any more when the engine ends, so that what comes next is the next engine's.
        serving.abort();
        assert!(serving.await.is_err_and(|ended| ended.is_cancelled()));
        host.handle.stop();
        assert_eq!(next(&heard), "lost");
    }
    drop(remote);
    following.await.expect("it ends when nobody asks any more");
}
