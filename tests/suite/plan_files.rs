//! Plans that were damaged on their way through a file: each is refused with its place, or runs.

use infernum_codegen::Plan;
use infernum_ir::{DType, Sym};
use infernum_passes::data::Kernels;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{CheckpointWeights, Executor, StepInputs};
use serde_json::Value;

use crate::support::Fixture;

const BLOCKS: usize = 4;

fn written(fixture: &Fixture, kernels: &Kernels) -> Value {
    let limits = infernum_codegen::Limits { chunk: 16, sequences: 2, max_length: 32 };
    let plan = fixture.plan_of(DType::F32, "default", kernels, limits, Sym::B);
    serde_json::to_value(plan).expect("a plan can be written")
}

/// Reads a plan, loads it, and runs a prompt and a token on it: where that ended, and why.
fn outcome(fixture: &Fixture, kernels: &Kernels, plan: &Value) -> Result<(), String> {
    let json = serde_json::to_vec(plan).expect("JSON");
    let plan = Plan::read(&json, &kernels.ops).map_err(|e| e.to_string())?;
    let checkpoint = fixture.model.checkpoint.as_ref().expect("a fixture has weights");
    let options = CpuOptions { kv_blocks: BLOCKS, threads: 1, ..CpuOptions::default() };
    let executor = CpuExecutor::new(plan, &CheckpointWeights::new(checkpoint), options);
    let mut executor = executor.map_err(|e| e.to_string())?;
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    for (new, context) in [(5, 5), (1, 6)] {
        inputs.clear();
        let step = inputs.push(&fixture.tokens[context - new..context], context, &[3, 1]);
        step.map_err(|e| e.to_string())?;
        let ticket = executor.submit(&inputs).map_err(|e| e.to_string())?;
        executor.wait(ticket).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// The places of all numbers and lists, as JSON pointers.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| places(v, format!("{at}/{i}"), found));
            found.push(at);
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(k, v)| places(v, format!("{at}/{k}"), found));
        }
        _ => {}
    }
}

/// What is put in the place of a number, or of a list.
fn damages(value: &Value) -> Vec<Value> {
    match value {
        Value::Array(items) => {
            let fewer = items.get(1..).unwrap_or_default().to_vec();
            let more = [&items[..], items.get(..1).unwrap_or_default()].concat();
            vec![fewer.into(), more.into()]
        }
        number => {
            let n = number.as_u64().unwrap_or(1);
            let large = [u64::from(u32::MAX), 1 << 40, u64::MAX];
            let near = [0, n.wrapping_sub(1), n + 1, 2 * n + 64];
            let all = near.into_iter().chain(large).map(Value::from);
            all.chain([Value::from(-1), Value::from(0.5)]).collect()
        }
    }
}

/// Every number and every list of a real plan, each with another damage from one place to the next. No
/// damage may panic, and the memory that it takes stays that of the plan.
#[test]
fn a_damaged_plan_is_refused_or_runs() {
    let kernels = Kernels::load(None, &[]).expect("the built-in files");
    let fixture = Fixture::open("qwen3/gqa3_tied");
    let plan = written(&fixture, &kernels);
    outcome(&fixture, &kernels, &plan).unwrap_or_else(|e| panic!("undamaged: {e}"));
    let mut all = Vec::new();
    places(&plan, String::new(), &mut all);
    assert!(all.len() > 400, "{} places", all.len());
    let (mut refused, mut ran) = (0, 0);
    for (i, place) in all.iter().enumerate() {
        let mut damaged = plan.clone();
        let target = damaged.pointer_mut(place).expect("a place of the plan");
        let mut choices = damages(target);
        *target = choices.swap_remove(i % choices.len());
        let shown = format!("{place} = {target}");
        let run = || outcome(&fixture, &kernels, &damaged);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        match outcome.unwrap_or_else(|_| panic!("{shown} panics")) {
            Ok(()) => ran += 1,
            Err(message) => {
                assert!(message.len() < 4096 && !message.is_empty(), "{shown}: {message}");
                refused += 1;
            }
        }
    }
    // Names of values and numbers in messages may be anything; what is indexed or sized is not.
    assert!(refused > 2 * ran, "{refused} were refused, {ran} ran");
}

/// What an executor would index or allocate by, and the place that the error names.
#[test]
fn errors_name_the_place() {
    let kernels = Kernels::load(None, &[]).expect("the built-in files");
    let fixture = Fixture::open("qwen3/gqa3_tied");
    let plan = written(&fixture, &kernels);
    let huge = Value::from(1u64 << 60);
    let cases = [
        ("/limits/t", huge.clone(), "limits.t"),
        ("/arena_bytes", huge.clone(), "arena_bytes"),
        ("/token_rows", Value::from(u64::MAX), "token_rows"),
        ("/token_rows", Value::from(62), "programs[0] `embed`.launches[0] `%x.rows`"),
        ("/programs/0/buffers/0/offset", huge.clone(), "programs[0] `embed`.buffers[0]"),
        ("/programs/0/results/0/buffer", Value::from(77), "programs[0] `embed`.results[0]"),
        ("/schedules/0/calls/0/program", Value::from(99), "schedules[0].calls[0]"),
        ("/schedules/0/calls/1/weights/0", Value::from(9999), "schedules[0].calls[1]"),
        ("/states/0/ty/shape/0", huge.clone(), "states[0]"),
        ("/weights/0/ty/shape/0/Const", huge, "weights[0]"),
        ("/version", Value::from(1), "version"),
    ];
    for (place, value, named) in cases {
        let mut damaged = plan.clone();
        *damaged.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value;
        let json = serde_json::to_vec(&damaged).expect("JSON");
        let error = Plan::read(&json, &kernels.ops).expect_err(place);
        assert_eq!(error.place, named, "{place}: {error}");
    }
}
