//! A plan is read or refused, in bounded memory; what is read can be loaded, and run on the CPU. An input is
//! JSON, or else a list of damages to a real plan: which place (two bytes), and what is put there (eight).

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_codegen::{Plan, TargetKind, plan};
use infernum_ir::{Dims, OpSet, text};
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{Executor, RandomWeights, StepInputs};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// A plan as JSON takes some hundreds of bytes where its text has a few.
const PARSED: Bound = Bound { factor: 256, slack: 4 << 20 };

/// What a plan may take to be run here.
const MOST: u64 = 4 << 20;

static OPS: LazyLock<OpSet> = LazyLock::new(OpSet::default);

/// The plan of a small model, and the places of its numbers.
static REAL: LazyLock<(Value, Vec<String>)> = LazyLock::new(|| {
    let module =
        text::parse(include_str!("../seeds/ir_text/gemma2.ir"), "seed").expect("it parses");
    let limits = Dims { t: 16, b: 2, s: 64, pairs: 1024, seqs: 2 };
    let plan = plan(&module, TargetKind::Cpu, limits).expect("a plan");
    let value = serde_json::to_value(plan).expect("JSON");
    let mut places = Vec::new();
    find(&value, String::new(), &mut places);
    (value, places)
});

fn find(value: &Value, at: String, places: &mut Vec<String>) {
    match value {
        Value::Number(_) => places.push(at),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| find(v, format!("{at}/{i}"), places));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(k, v)| find(v, format!("{at}/{k}"), places));
        }
        _ => {}
    }
}

fuzz_target!(|data: &[u8]| {
    if data.first() == Some(&b'{') {
        return run(data);
    }
    let (real, places) = &*REAL;
    let mut damaged = real.clone();
    for damage in data.chunks_exact(10).take(8) {
        let place = usize::from(u16::from_le_bytes([damage[0], damage[1]])) % places.len();
        let mut number = [0; 8];
        number.copy_from_slice(&damage[2..]);
        if let Some(target) = damaged.pointer_mut(&places[place]) {
            // Small numbers are indices; others are sizes.
            let number = u64::from_le_bytes(number);
            *target = if number % 3 == 0 { number / 3 % 64 } else { number }.into();
        }
    }
    run(&serde_json::to_vec(&damaged).expect("JSON"));
});

fn run(json: &[u8]) {
    let ops = &*OPS;
    let plan = match bounded("read", json.len(), PARSED, || Plan::read(json, ops)) {
        Ok(plan) => plan,
        Err(e) => {
            std::hint::black_box(e.to_string());
            return;
        }
    };
    let rows = plan.kv_bytes_per_token().saturating_mul(64);
    let state = rows.saturating_add(plan.slot_bytes_per_sequence().saturating_mul(8));
    if plan.arena_bytes.max(plan.stored_bytes()).max(state) > MOST {
        return;
    }
    let options = CpuOptions { kv_blocks: 4, threads: 1, ..CpuOptions::default() };
    let weights = RandomWeights::for_plan(&plan, 1);
    let mut executor = match CpuExecutor::new(plan, &weights, options) {
        Ok(executor) => executor,
        Err(e) => {
            std::hint::black_box(e.to_string());
            return;
        }
    };
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    for (tokens, context) in [(&[1, 2, 3][..], 3), (&[4], 4)] {
        inputs.clear();
        inputs.push(tokens, context, &[2]).expect("a well-formed step");
        if let Ok(ticket) = executor.submit(&inputs) {
            let _ = std::hint::black_box(executor.wait(ticket));
        }
    }
}
