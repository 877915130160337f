//! Front ends and engines that are killed while many ask them: each request ends once, and nothing is left of it.
//!
//! A few kills in the ordinary tests; `cargo test --release -p infernum-cli --test serve killed -- --ignored --nocapture
//! --test-threads 1` kills 100 front ends and 20 engines, and tells how long it takes until all is well again.

use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::engines::*;
use super::support::*;

/// Clients at once.
const CLIENTS: usize = 12;
/// Memory that a process may have taken beyond what it had once all had been asked once, in KiB.
const GROWTH: u64 = 48 << 10;

/// A cache that is soon used up: its memory is taken when it is used first, and would look like a leak. Texts are compared whose
/// prompts are computed alone, and then taken from a cache that a crowd filled.
const CACHE: [&str; 3] = ["--kv-tokens", "8192", "--reproducible"];

/// How requests ended.
#[derive(Default)]
struct Ends {
    whole: AtomicUsize,
    refused: AtomicUsize,
    cut: AtomicUsize,
}

impl Ends {
    fn all(&self) -> [usize; 3] {
        [&self.whole, &self.refused, &self.cut].map(|count| count.load(Ordering::Acquire))
    }
}

/// Of each kind of work that a front end has for an engine.
fn request(kind: usize) -> Value {
    let wild = json!({"temperature": 1.5, "seed": kind, "ignore_eos": true});
    match kind % 6 {
        0 => with(story(12), json!({"n": 3, "temperature": 0.7})),
        1 => with(with(story(300), wild), json!({"stream": true})),
        2 => with(story(60), json!({"guided_regex": "(yes|no| ){20,40}", "temperature": 1.5})),
        3 => with(story(40), json!({"stream": true, "logprobs": 3})),
        4 => with(story(1), json!({"prompt": "and then ".repeat(60 + kind % 40), "max_tokens": 8})),
        _ => with(with(story(400), wild), json!({"stream": true, "n": 2})),
    }
}

/// Asks, and reads to the end, which there is one of. `dies`: the other side may go in between.
fn ask(server: &Server, kind: usize, ends: &Ends, dies: bool) {
    let body = request(kind);
    let asked = server.agent.post(server.url(TEXT)).header("content-type", "application/json");
    let count = |end: &AtomicUsize| {
        end.fetch_add(1, Ordering::AcqRel);
    };
    let answer = match asked.send(body.to_string()) {
        Ok(answer) => answer,
        Err(error) => {
            assert!(dies, "{error}");
            return count(&ends.cut);
        }
    };
    let (status, mut text) = (answer.status().as_u16(), String::new());
    if let Err(error) = answer.into_body().into_reader().read_to_string(&mut text) {
        assert!(dies, "{error}");
        return count(&ends.cut);
    }
    let json =
        |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    match status {
        200 if body["stream"] == true => {
            // What was not cut ends with [DONE], and an error stands right before that.
            let whole = text.strip_suffix("\n\ndata: [DONE]\n\n");
            let last = whole.and_then(|text| text.rsplit("data: ").next());
            match (last, text.matches("\"error\"").count()) {
                (Some(_), 0) => {
                    let ended = text.matches("\"finish_reason\":\"length\"").count();
                    assert_eq!(ended as u64, body["n"].as_u64().unwrap_or(1), "{text}");
                    count(&ends.whole);
                }
                // Of a front end that is killed a stream may end anywhere.
                (None, 0) if dies => count(&ends.cut),
                (Some(error), 1) => {
                    let error = json(error);
                    assert_eq!(error["error"]["code"], "engine_gone", "{text}");
                    count(&ends.refused);
                }
                _ => panic!("it ended otherwise: {text}"),
            }
        }
        200 => {
            let choices = json(&text)["choices"].as_array().expect("choices").len();
            assert_eq!(choices as u64, body["n"].as_u64().unwrap_or(1));
            count(&ends.whole);
        }
        503 => {
            assert_eq!(json(&text)["error"]["code"], "engine_gone", "{text}");
            count(&ends.refused);
        }
        _ => panic!("{status}: {text}"),
    }
}

/// Has clients ask until `done`; those that were refused come again after a while.
fn crowd(server: &Server, done: &AtomicBool, ends: &Ends, dies: bool) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    let [_, refused, cut] = ends.all();
                    ask(server, next.fetch_add(1, Ordering::Relaxed), ends, dies);
                    if ends.all()[1..] != [refused, cut] {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
    });
}

/// Open files and KiB of memory of a process.
fn held(id: u32) -> (usize, u64) {
    let files = std::fs::read_dir(format!("/proc/{id}/fd")).expect("it runs").count();
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("its memory");
    let memory = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    (files, memory)
}

/// Checks that a process has the files that it had, and no more memory than it may take.
fn nothing_leaks(what: &str, id: u32, before: (usize, u64)) {
    wait("its connections are closed", || held(id).0 <= before.0);
    let after = held(id);
    println!(
        "{what}: files {} before, {} after; KiB {} before, {} after",
        before.0, after.0, before.1, after.1
    );
    assert!(after.1 <= before.1 + GROWTH, "{what}: {} KiB, and {} before", after.1, before.1);
}

fn told(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    println!("{what}: P50 {:?}, P90 {:?}, at most {:?}", at(50), at(90), at(100));
}

/// Says that it is over, whatever happens: clients must not ask for ever.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The moments at which something is killed: some at once, some when all run.
fn moment(random: &mut fastrand::Rng) -> Duration {
    Duration::from_millis(random.u64(0..250))
}

fn front_ends_are_killed(kills: usize) {
    let engine = Engine::start(&CACHE);
    let stays = front_end(&[&engine], &[]);
    let expected = stays.post(TEXT, &story(60)).ok()["choices"].clone();
    let (ends, mut random) = (Ends::default(), fastrand::Rng::with_seed(3));
    let (mut cleared, mut again) = (Vec::new(), Vec::new());
    let before = Mutex::new(None);
    for kill in 0..kills {
        let start = Instant::now();
        let mut dies = front_end(&[&engine], &[]);
        dies.post(TEXT, &story(1)).ok();
        again.push(start.elapsed());
        let done = AtomicBool::new(false);
        let dead = std::thread::scope(|scope| {
            scope.spawn(|| crowd(&dies, &done, &ends, true));
            let _over = Over(&done);
            wait("its requests run", || load(&stays)[0] >= 3.0);
            std::thread::sleep(moment(&mut random));
            done.store(true, Ordering::Release);
            dies.signal("KILL");
            Instant::now()
        });
        dies.ended();
        idle("nothing is left of its requests", &stays);
        cleared.push(dead.elapsed());
        // What another front end asks is answered as ever.
        assert_eq!(stays.post(TEXT, &story(60)).ok()["choices"], expected, "kill {kill}");
        before
            .lock()
            .expect("no panic")
            .get_or_insert_with(|| (held(engine.id()), held(stays.id())));
    }
    let [whole, refused, cut] = ends.all();
    println!("{kills} front ends were killed: {whole} requests were answered, {cut} cut");
    assert!(whole > 0 && cut >= kills && refused == 0, "{whole}, {refused}, {cut}");
    told("from a front end's end until the engine has nothing of it", &mut cleared);
    told("from a front end's start to its first answer", &mut again);
    idle("nothing is left", &stays);
    let (of_engine, of_stays) = before.into_inner().expect("no panic").expect("at least one kill");
    nothing_leaks("the engine", engine.id(), of_engine);
    nothing_leaks("the front end that stays", stays.id(), of_stays);
}

fn engines_are_killed(kills: usize) {
    let mut engine = Engine::start(&CACHE);
    let server = front_end(&[&engine], &[]);
    let expected = server.post(TEXT, &story(60)).ok()["choices"].clone();
    let (ends, done, mut random) =
        (Ends::default(), AtomicBool::new(false), fastrand::Rng::with_seed(4));
    let (mut noticed, mut found, mut before) = (Vec::new(), Vec::new(), None);
    std::thread::scope(|scope| {
        scope.spawn(|| crowd(&server, &done, &ends, false));
        let _over = Over(&done);
        for _ in 0..kills {
            let answered = ends.all()[0];
            wait("some are answered", || ends.all()[0] >= answered + CLIENTS);
            wait("others run", || load(&server)[0] >= 3.0);
            std::thread::sleep(moment(&mut random));
            let start = Instant::now();
            engine.kill();
            wait("it is noticed", || server.get("/health").status == 503);
            noticed.push(start.elapsed());
            let start = Instant::now();
            engine.restart();
            wait("it is found again", || server.get("/health").status == 200);
            found.push(start.elapsed());
            before.get_or_insert_with(|| held(server.id()));
        }
        wait("all run", || load(&server)[0] >= 3.0);
    });
    let [whole, refused, cut] = ends.all();
    println!(
        "an engine was killed {kills} times: {whole} requests were answered, {refused} refused or ended with an error"
    );
    assert!(whole > 0 && refused >= kills && cut == 0, "{whole}, {refused}, {cut}");
    told("from an engine's end until it is told", &mut noticed);
    told("from an engine's start to its next request", &mut found);
    idle("nothing is left", &server);
    assert_eq!(server.post(TEXT, &story(60)).ok()["choices"], expected);
    // Those who asked have each a connection less.
    nothing_leaks("the front end", server.id(), before.expect("at least one kill"));
}

#[test]
fn a_front_end_may_die_under_load() {
    front_ends_are_killed(3);
}

#[test]
fn an_engine_may_die_under_load() {
    engines_are_killed(3);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_front_ends_die_under_load() {
    front_ends_are_killed(repeats(100));
}

#[test]
#[ignore = "takes minutes"]
fn an_engine_dies_twenty_times_under_load() {
    engines_are_killed(repeats(20));
}
