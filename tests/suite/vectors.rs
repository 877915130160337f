//! Models that yield a vector or scores for a text, against what sentence-transformers computes in float64.

use std::ops::ControlFlow;
use std::path::PathBuf;

use infernum::{Capacity, CompileOptions, Loader, RunOptions};
use infernum_frontend_hf::{Model, ModelFiles};
use infernum_ir::{DType, Task};
use infernum_runtime::{EngineOptions, Event, FinishReason, Request};

use crate::parity::f32_bound;
use crate::support::{library, machine, nmse, numbers, root};

/// A checkpoint with texts and what is computed of them.
struct Texts {
    name: String,
    model: Model,
    prompts: Vec<Vec<u32>>,
    /// Where each prompt's second text begins, if they are pairs that the model tells apart.
    seconds: Option<Vec<usize>>,
    /// Of all texts, one after the other.
    exact: Vec<f64>,
    bf16: Vec<f64>,
}

fn folder() -> PathBuf {
    root().join("vectors")
}

fn all() -> Vec<Texts> {
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .expect("the fixtures are committed")
        .map(|entry| entry.expect("a readable folder").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(names.len() >= 10, "fixtures are missing: found {names:?}");
    let wanted = std::env::var("INFERNUM_TEST_FIXTURES").unwrap_or_default();
    let is_wanted = |name: &&String| {
        wanted.is_empty() || wanted.split_whitespace().any(|word| name.starts_with(word))
    };
    names.iter().filter(is_wanted).map(|name| Texts::open(name)).collect()
}

impl Texts {
    fn open(name: &str) -> Texts {
        let dir = folder().join(name);
        let files = ModelFiles::folder(&dir).expect("a fixture's folder");
        let model = Model::open(files, None, &library()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bytes = std::fs::read(dir.join("expected.safetensors")).expect("expected values");
        let expected = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
        let tensor = |n: &str| numbers(&expected.tensor(n).expect("a tensor of the fixture"));
        let tokens: Vec<u32> = tensor("tokens").into_iter().map(|t| t as u32).collect();
        let mut prompts = Vec::new();
        for length in tensor("lengths") {
            let start = prompts.iter().map(Vec::len).sum::<usize>();
            prompts.push(tokens[start..start + length as usize].to_vec());
        }
        let (exact, bf16) = (tensor("f64"), tensor("bf16"));
        let seconds = expected.tensor("seconds").ok();
        let seconds = seconds.map(|t| numbers(&t).into_iter().map(|row| row as usize).collect());
        Texts { name: name.to_owned(), model, prompts, seconds, exact, bf16 }
    }

    /// What an engine gives for all texts together, in chunks of at most so many tokens.
    fn run(&self, dtype: DType, passes: &str, chunk: usize, options: EngineOptions) -> Vec<f64> {
        let compile = CompileOptions {
            passes: passes.to_owned(),
            dtype: Some(dtype),
            ..CompileOptions::default()
        };
        let run = RunOptions { chunk: Some(chunk), ..RunOptions::default() };
        let machine = machine();
        let loader = Loader::new(&self.model, &compile, &run, &machine);
        let mut engine = loader
            .start(Capacity::new(3, 80), options)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let submit = |(i, prompt): (usize, &Vec<u32>)| {
            let second = self.seconds.as_ref().map(|rows| rows[i]);
            let request = Request { second, ..Request::new(prompt.clone(), 0) };
            engine.submit(request).expect("a request")
        };
        let ids: Vec<_> = self.prompts.iter().enumerate().map(submit).collect();
        let mut rows = vec![Vec::new(); ids.len()];
        let driven = engine.drive(|_, events| {
            for event in events {
                let place = ids.iter().position(|id| *id == event.request()).expect("one of them");
                match event {
                    Event::Vector(_, row) => {
                        assert!(rows[place].is_empty(), "{}: told twice", self.name);
                        rows[place].extend(row.iter().map(|v| f64::from(*v)));
                    }
                    Event::Finished(_, reason) => assert_eq!(reason, FinishReason::Length),
                    Event::Started(..) => {}
                    other => panic!("{other:?}"),
                }
            }
            ControlFlow::Continue(())
        });
        driven.unwrap_or_else(|e| panic!("{}: {e}", self.name));
        rows.concat()
    }
}

fn check(of: impl Fn(&Texts) -> Vec<(String, f64, f64)>) {
    let mut failures = Vec::new();
    for texts in all() {
        for (what, found, bound) in of(&texts) {
            // A NaN is a failure, too.
            let ok = found <= bound;
            if !ok {
                failures.push(format!(
                    "{}: {what}: expected at most {bound:.2e}, found {found:.2e}",
                    texts.name
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Batches, chunks that cut texts anywhere, and what the passes do change nothing.
#[test]
fn f32_vectors_match_float64() {
    check(|texts| {
        let runs = [("default", 256), ("none", 256), ("default", 7), ("default", 1)];
        let run = |(passes, chunk)| {
            let found = texts.run(DType::F32, passes, chunk, EngineOptions::default());
            (
                format!("NMSE with passes {passes}, chunks of {chunk}"),
                nmse(&found, &texts.exact),
                f32_bound(),
            )
        };
        runs.into_iter().map(run).collect()
    });
}

#[test]
fn bf16_vectors_are_as_close_as_the_peers_own() {
    check(|texts| {
        let found = texts.run(DType::Bf16, "default", 256, EngineOptions::default());
        let peer = nmse(&texts.bf16, &texts.exact);
        // Of a handful of scores the peer's error is luck as much as ours.
        let times = if texts.model.task == Task::Score { 4.0 } else { 1.5 };
        vec![("NMSE in bf16".to_owned(), nmse(&found, &texts.exact), times * peer)]
    });
}

/// A text that comes again, whole or as the beginning of another, has the vector that it had.
#[test]
fn what_the_cache_holds_changes_no_vector() {
    check(|texts| {
        let mut again = Texts::open(&texts.name);
        let long = again.prompts.iter().max_by_key(|p| p.len()).expect("texts").clone();
        let size = texts.exact.len() / texts.prompts.len();
        let place = texts.prompts.iter().position(|p| *p == long).expect("it is one of them");
        let row = &texts.exact[place * size..][..size];
        again.prompts = vec![long; 5];
        again.seconds = texts.seconds.as_ref().map(|rows| vec![rows[place]; 5]);
        again.exact = row.repeat(5);
        let run = |prefix_cache| {
            let options =
                EngineOptions { prefix_cache, max_running: 1, ..EngineOptions::default() };
            let found = again.run(DType::F32, "default", 16, options);
            (format!("NMSE, cache {prefix_cache}"), nmse(&found, &again.exact), f32_bound())
        };
        vec![run(true), run(false)]
    });
}

#[test]
fn what_a_checkpoint_is_for_is_read_from_it() {
    for (name, task) in [
        ("vectors/qwen3_last", Task::Embed),
        ("vectors/qwen2_plain", Task::Embed),
        ("vectors/mistral_last", Task::Embed),
        ("vectors/qwen3_score", Task::Score),
        ("vectors/bert_mean", Task::Embed),
        ("vectors/bert_pairs", Task::Score),
        ("qwen3/gqa3_tied", Task::Generate),
    ] {
        let files = ModelFiles::folder(root().join(name)).expect("a fixture's folder");
        let model = Model::open(files, None, &library()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(model.task, task, "{name}");
    }
}
