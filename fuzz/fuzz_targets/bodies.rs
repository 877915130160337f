//! A body is sent to every route that takes one: it is read, checked, rendered and encoded in bounded memory, and
//! refused in a few words or passed on to an engine that is not there.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_server::Rehearsal;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// An empty object of a few bytes takes some hundreds as JSON; each of 128 choices has a prompt of its own. A grammar may
/// have so many states of a lexer.
const BOUND: Bound = Bound { factor: 256, slack: 256 << 20 };

static SERVER: LazyLock<Rehearsal> =
    LazyLock::new(|| Rehearsal::new(1024).expect("the demo model"));

fuzz_target!(|data: &[u8]| {
    let server = &*SERVER;
    for path in server.paths() {
        let answer = bounded(path, data.len(), BOUND, || server.post(path, data));
        let (status, answer) = answer.expect("an answer");
        assert!(status != 500, "{path}: {}", String::from_utf8_lossy(&answer));
        let answer: Value = serde_json::from_slice(&answer).expect("JSON");
        // Ollama has it bare.
        let error = &answer["error"];
        let message = error["message"].as_str().or(error.as_str()).unwrap_or_default();
        assert!((status == 200) == message.is_empty() && message.len() <= 1000, "{path}: {answer}");
    }
});
