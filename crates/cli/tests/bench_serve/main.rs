//! `bench serve` against a server whose times and mistakes are known.
#![allow(missing_docs, reason = "tests")]

mod fake;

use std::process::{Command, Output};
use std::time::Duration;

use fake::{Fake, Manners};
use serde_json::Value;

fn bench(url: &str, args: &[&str]) -> (Output, Value, String) {
    let out = tempfile::tempdir().expect("a temporary folder");
    let (json, html) = (out.path().join("report.json"), out.path().join("report.html"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.args(["bench", "serve", "--url", url, "--gaps"]).args(args);
    let output =
        command.arg("--json").arg(&json).arg("--html").arg(&html).output().expect("it runs");
    let text = std::fs::read_to_string(json).unwrap_or_else(|_| "null".to_owned());
    let page = std::fs::read_to_string(html).unwrap_or_default();
    (output, serde_json::from_str(&text).expect("JSON"), page)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

const SMALL: [&str; 8] =
    ["--input", "5-9", "--output", "6", "--requests", "12", "--concurrency", "3"];

#[test]
fn times_and_tokens_are_those_of_the_server() {
    let (first, between) = (Duration::from_millis(60), Duration::from_millis(10));
    let fake = Fake::start(Manners { first, between, usage: true, ..Manners::default() });
    let (output, report, page) = bench(&fake.url, &SMALL);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let run = &report["runs"][0];
    let figures = &run["figures"];
    assert_eq!((&figures["ok"], &figures["output_tokens"]), (&12.into(), &72.into()), "{said}");
    assert_eq!((&figures["cached_tokens"], &figures["other_length"]), (&48.into(), &0.into()));
    assert_eq!(fake.most_running(), 3);
    // No time is shorter than the server took; how much longer is the machine's affair.
    for (of, part, least) in [
        ("ttft", "p50", 0.060),
        ("itl", "mean", 0.010),
        ("tpot", "p50", 0.010),
        ("latency", "p50", 0.110),
    ] {
        let found = number(&figures[of][part]);
        assert!(found >= least && found < least + 5.0, "{of} {part}: {found}");
    }
    assert_eq!(figures["itl"]["samples"], 12 * 5);
    assert_eq!(figures["ttft"]["samples"], 12);
    let seconds = number(&figures["seconds"]);
    assert!(seconds >= 4.0 * 0.110, "four in a row: {seconds}");
    assert!((number(&figures["output_tokens_per_second"]) - 72.0 / seconds).abs() < 1e-6);
    // The fake counts every request since its start, the probe and the warm-up too.
    let wait = &figures["queue_wait"];
    assert_eq!((number(&wait["requests"]), number(&wait["mean"])), (12.0, 0.5));
    assert_eq!(number(&wait["p99_at_most"]), 0.8);
    for record in list(&run["records"]) {
        let gaps: f64 = list(&record["gaps"]).iter().map(number).sum();
        let (ttft, last) = (number(&record["ttft"]), number(&record["last_text"]));
        assert!((ttft + gaps - last).abs() < 1e-5 && last <= number(&record["latency"]));
    }
    assert!(said.contains("12 ok") && said.contains("first token") && said.contains("cached"));
    assert!(page.contains("<svg") && !page.contains("NaN"));
    for outside in ["http:", "https:", " src=", " href=", "url(", "@import", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn prompts_are_as_long_as_asked_and_the_same_for_a_seed() {
    let prompts = |seed: &str| {
        let fake = Fake::start(Manners { usage: true, ..Manners::default() });
        let more = ["--shared", "3", "--warmup", "0", "--seed", seed, "--vocab", "50"];
        let (output, ..) = bench(&fake.url, &[&SMALL[..], &more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut prompts: Vec<String> =
            fake.bodies().iter().map(|b| b["prompt"].to_string()).skip(1).collect();
        for body in &fake.bodies()[1..] {
            let ids = list(&body["prompt"]);
            assert!((8..=12).contains(&ids.len()) && ids.iter().all(|i| i.as_u64() < Some(50)));
            assert_eq!(ids[..3], list(&fake.bodies()[1]["prompt"])[..3], "shared");
            assert_eq!((&body["ignore_eos"], &body["stream"]), (&true.into(), &true.into()));
        }
        prompts.sort();
        prompts
    };
    assert_eq!(prompts("4"), prompts("4"));
    assert_ne!(prompts("4"), prompts("5"));
}

#[test]
fn refusals_failures_and_hangups_are_counted_apart() {
    let manners = Manners { refuse_each: 4, break_each: 5, ..Manners::default() };
    let fake = Fake::start(manners);
    let rate = ["--rate", "500", "--warmup", "0", "--requests", "39"];
    let (output, report, _) = bench(&fake.url, &[&SMALL[..4], &rate].concat());
    let figures = &report["runs"][0]["figures"];
    // Completions 2 to 40, after the probe: 10 are the fourth of something, 6 more the fifth.
    assert_eq!(
        (&figures["ok"], &figures["refused"], &figures["failed"]),
        (&23.into(), &10.into(), &6.into())
    );
    assert_eq!(figures["refused_without_retry_after"], 0);
    assert!(!output.status.success(), "failures are told by the exit code");
    let errors = figures["errors"].to_string();
    assert!(errors.contains("429 full"), "{errors}");
    assert_eq!(figures["counted_by_server"], false);
    assert_eq!(figures["output_tokens"], 23 * 6 + 6, "pieces of text count");
}

#[test]
fn a_refused_request_is_sent_again_when_asked_to() {
    let fake = Fake::start(Manners { refuse_each: 2, ..Manners::default() });
    let (output, report, _) = bench(&fake.url, &[&SMALL[..], &["--retry", "30"]].concat());
    let figures = &report["runs"][0]["figures"];
    assert!(output.status.success());
    assert_eq!((&figures["ok"], &figures["refused"]), (&12.into(), &0.into()));
    assert!(figures["retries"].as_u64() > Some(0));
    assert!(figures["errors"].as_object().is_some_and(serde_json::Map::is_empty));
}

#[test]
fn clients_that_hang_up_are_gone_from_the_server() {
    let between = Duration::from_millis(5);
    let fake = Fake::start(Manners { between, first: between, ..Manners::default() });
    let args = ["--disconnect", "1", "--output", "50", "--input", "4", "--requests", "8"];
    let (output, report, _) = bench(&fake.url, &[&args[..], &["--concurrency", "8"]].concat());
    assert!(output.status.success());
    let run = &report["runs"][0];
    assert_eq!(run["figures"]["disconnected"], 8);
    assert!(list(&run["records"]).iter().all(|r| r["pieces"].as_u64() < Some(50)));
    // The server notices at one of its next writes.
    let gone = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        fake.hung_up() == 8
    });
    assert!(gone, "{} of 8", fake.hung_up());
}

#[test]
fn chat_and_servers_that_take_no_ids_get_text() {
    let fake = Fake::start(Manners { text_only: true, usage: true, ..Manners::default() });
    let (output, report, _) = bench(&fake.url, &SMALL);
    assert!(output.status.success());
    assert_eq!(report["ask"]["prompt"], "text");
    assert!(fake.bodies()[3]["prompt"].as_str().is_some_and(|p| p.split(' ').count() >= 5));
    let fake = Fake::start(Manners { together: 2, usage: true, ..Manners::default() });
    let (_, report, _) = bench(&fake.url, &[&SMALL[..], &["--endpoint", "chat"]].concat());
    let run = &report["runs"][0];
    assert_eq!((&run["figures"]["ok"], &run["figures"]["output_tokens"]), (&12.into(), &72.into()));
    assert!(list(&run["records"]).iter().all(|r| r["pieces"] == 3), "two tokens in each");
    assert!(fake.bodies()[3]["messages"].is_array());
}

#[test]
fn what_cannot_be_driven_is_refused_with_the_reason() {
    let fails = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
        let output = command.args(["bench", "serve"]).args(args).output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !told.contains("panicked"), "{told}");
        told
    };
    assert!(fails(&[]).contains("--url"));
    assert!(fails(&["--url", "https://x"]).contains("http://HOST:PORT"));
    assert!(fails(&["--url", "http://127.0.0.1:1"]).contains("connect"));
    let fake = Fake::start(Manners::default());
    assert!(fails(&["--url", &fake.url, "--disconnect", "2"]).contains("disconnect"));
    let long = fails(&["--url", &fake.url, "--workload", "w1"]);
    assert!(
        long.contains("512 tokens") && long.contains("400") && long.contains("--scale"),
        "{long}"
    );
}

#[test]
fn a_sweep_starts_each_server_and_stops_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (file, json) = (dir.path().join("sweep.toml"), dir.path().join("out.json"));
    let server = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench_serve/server.py");
    let text = format!(
        "repeats = 2\n\
         [[configuration]]\nname = \"quick\"\ncommand = [\"python3\", \"{server}\", \"{{port}}\", \"0\"]\n\
         [[configuration]]\nname = \"slow\"\ncommand = [\"python3\", \"{server}\", \"{{port}}\", \"20\"]\n\
         [[configuration]]\nname = \"broken\"\ncommand = [\"python3\", \"-c\", \"exit('no memory')\"]\n\
         [[load]]\nconcurrency = [1, 2]\nrequests = 4\ninput = 3\noutput = 4\nwarmup = 0\n"
    );
    std::fs::write(&file, text).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.args(["bench", "serve", "--sweep"]).arg(&file).arg("--json").arg(&json);
    let output = command.output().expect("it runs");
    let (said, told) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("broken: it ended") && told.contains("no memory"), "{told}");
    assert!(!output.status.success(), "a server that failed is told");
    let report: Value =
        serde_json::from_slice(&std::fs::read(json).expect("a report")).expect("JSON");
    let names: Vec<_> = list(&report["runs"]).iter().map(|r| r["configuration"].clone()).collect();
    assert_eq!(names, ["quick", "quick", "slow", "slow", "quick", "quick", "slow", "slow"]);
    for run in list(&report["runs"]) {
        assert_eq!(run["figures"]["ok"], 4);
        assert!(run["records"][0].get("gaps").is_none(), "gaps are kept on request only");
        let slow = run["configuration"] == "slow";
        assert_eq!(number(&run["figures"]["same_text"]) == 1.0, slow, "{}", run["figures"]);
        assert!(!slow || number(&run["figures"]["itl"]["p50"]) >= 0.020);
    }
    assert_eq!(said.matches("\nquick ").count(), 2, "a table for each load: {said}");
}
