//! What a sequence gets does not depend on how steps are made up: who else is in them, how large they
//! are, and how a GPU launches them. One fixture a family; others are in `parity`.

use infernum_codegen::Limits;
use infernum_ir::DType;
use infernum_passes::data::Kernels;
use infernum_runtime::{GroupKind, PlanExecutor, StepInputs, most_blocks, tables};

use crate::parity::f32_bound;
use crate::support::{Fixture, Launches, machine, nmse};

const FIXTURES: [&str; 4] = ["llama/gqa3", "mistral/window", "qwen2/windows", "qwen3/gqa3_tied"];

const SEQUENCES: usize = 64;

/// A sequence, the step it comes in, and how much of it comes at once; the rest follows token by token.
struct Sequence {
    tokens: Vec<u32>,
    start: usize,
    prompt: usize,
}

impl Sequence {
    /// Its new tokens in a step, and how many it has then.
    fn part(&self, step: usize) -> Option<(&[u32], usize)> {
        let age = step.checked_sub(self.start)?;
        let (from, to) =
            if age == 0 { (0, self.prompt) } else { (self.prompt + age - 1, self.prompt + age) };
        Some((self.tokens.get(from..to)?, to))
    }
}

/// Sequences of every length up to the fixture's, so that steps hold prompts and decodes.
fn sequences(f: &Fixture) -> Vec<Sequence> {
    let all = f.tokens.len();
    let sequence = |i: usize| {
        let length = 1 + (i * 11 + 5) % all;
        let tokens = (0..length).map(|j| f.tokens[(3 * i + j) % all]).collect();
        Sequence { tokens, start: i % 5, prompt: length.saturating_sub(i % 7).max(1) }
    };
    (0..SEQUENCES).map(sequence).collect()
}

fn run(executor: &mut dyn PlanExecutor, inputs: &StepInputs) -> Vec<f64> {
    let output = executor.run(inputs).expect("a step that fits");
    output.logits.iter().map(|v| f64::from(*v)).collect()
}

/// The logits of each sequence's tokens, all sequences in one batch.
fn together(
    f: &Fixture,
    dtype: DType,
    sequences: &[Sequence],
    launches: Launches,
) -> Vec<Vec<f64>> {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let most: usize = sequences.iter().map(|s| s.prompt).sum();
    let limits = Limits { chunk: most as u64, sequences: SEQUENCES as u64, ..f.limits() };
    let plan = f.plan_within(dtype, "default", &kernels, limits);
    let (groups, size) = (GroupKind::of_plan(&plan), StepInputs::BLOCK_SIZE);
    let (all, chunk) = (f.tokens.len(), sequences.iter().map(|s| s.prompt).max().unwrap_or(1));
    let each = most_blocks(&groups, all, size, chunk);
    let mut executor = f.executor(plan, each * SEQUENCES, launches);
    let mut logits = vec![Vec::new(); sequences.len()];
    let vocab = f.logits.len() / f.tokens.len();
    let mut step = 0;
    loop {
        let mut inputs = StepInputs::new(size).with_groups(&groups);
        let mut rows = Vec::new();
        // In another order in every other step; mostly with generated rows in front, which may then run apart.
        let turn = |i: usize| if step % 2 == 0 { i } else { SEQUENCES - 1 - i };
        let mut order: Vec<usize> = (0..SEQUENCES).map(turn).collect();
        if step % 3 < 2 {
            order.sort_by_key(|i| sequences[*i].part(step).map(|(tokens, _)| tokens.len() > 1));
        }
        for i in order {
            let Some((tokens, context)) = sequences[i].part(step) else { continue };
            let own = (0..each).map(|b| (b * SEQUENCES + i) as u32);
            let tables = tables(&groups, all, size, chunk, own);
            inputs.push(tokens, context, &tables).expect("a well-formed step");
            rows.push((i, tokens.len()));
        }
        if rows.is_empty() {
            assert!(sequences.iter().zip(&logits).all(|(s, l)| l.len() == s.tokens.len() * vocab));
            return logits;
        }
        let found = run(&mut *executor, &inputs);
        let mut found = found.as_slice();
        for (i, tokens) in rows {
            let (own, rest) = found.split_at(tokens * vocab);
            logits[i].extend(own);
            found = rest;
        }
        step += 1;
    }
}

/// The same, each sequence in one step of its own.
fn alone(f: &Fixture, dtype: DType, sequences: &[Sequence]) -> Vec<Vec<f64>> {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let plan = f.plan(dtype, "default", &kernels);
    let (groups, size, all) = (GroupKind::of_plan(&plan), StepInputs::BLOCK_SIZE, f.tokens.len());
    let blocks = most_blocks(&groups, all, size, all);
    let mut executor = f.executor(plan, blocks, Launches::Poisoned);
    let tables = tables(&groups, all, size, all, (0..blocks as u32).rev());
    let one = |s: &Sequence| {
        let mut inputs = StepInputs::new(size).with_groups(&groups);
        inputs.push(&s.tokens, s.tokens.len(), &tables).expect("a well-formed step");
        run(&mut *executor, &inputs)
    };
    sequences.iter().map(one).collect()
}

/// The worst NMSE of any sequence.
fn worst(found: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    let each = found.iter().zip(expected).map(|(a, b)| nmse(a, b));
    // NaN is the worst of all.
    each.fold(0.0, |worst, e| if e.is_nan() || e > worst { e } else { worst })
}

fn assert_same(what: &str, error: f64) {
    println!("{what}: NMSE {error:.2e}");
    assert!(error <= f32_bound(), "{what}: NMSE {error:.2e}, at most {:.0e}", f32_bound());
}

#[test]
fn sixty_four_sequences_of_mixed_lengths_are_as_each_alone() {
    for name in FIXTURES {
        let f = Fixture::open(name);
        let sequences = sequences(&f);
        let found = together(&f, DType::F32, &sequences, Launches::Poisoned);
        assert_same(name, worst(&found, &alone(&f, DType::F32, &sequences)));
    }
}

/// On a GPU generated rows run on other kernels than prompt rows, in steps of both as in steps of their own: they
/// are about as far from what they are in f32 as rows that are all computed in one step.
#[test]
fn in_bf16_rows_of_mixed_steps_are_as_good_as_alone() {
    for name in FIXTURES {
        let f = Fixture::open(name);
        let sequences = sequences(&f);
        let exact = alone(&f, DType::F32, &sequences);
        let of_alone = worst(&alone(&f, DType::Bf16, &sequences), &exact);
        let found = together(&f, DType::Bf16, &sequences, Launches::Poisoned);
        let of_mixed = worst(&found, &exact);
        println!("{name}: NMSE {of_mixed:.2e}, alone {of_alone:.2e}");
        assert!(of_mixed <= 4.0 * of_alone, "{name}: NMSE {of_mixed:.2e}, alone {of_alone:.2e}");
    }
}

/// On a GPU, token by token from recorded graphs against the same launched one by one, and the batch
/// likewise; on the CPU, which has no graphs, token by token against the whole.
#[test]
fn graphs_yield_what_streams_do() {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    for name in FIXTURES {
        let f = Fixture::open(name);
        let plan = f.plan(DType::F32, "default", &kernels);
        let chunk = if machine().device().is_some() { 1 } else { usize::MAX };
        let streamed = f.run_launched(plan.clone(), chunk, Launches::Poisoned);
        let recorded = f.run_launched(plan, 1, Launches::Graphs);
        assert_same(name, nmse(&recorded, &streamed));
        if machine().device().is_some() {
            let sequences = sequences(&f);
            let recorded = together(&f, DType::F32, &sequences, Launches::Graphs);
            let streamed = together(&f, DType::F32, &sequences, Launches::Poisoned);
            assert_same(&format!("{name}, batch"), worst(&recorded, &streamed));
        }
    }
}

#[test]
fn fused_and_unfused_agree_in_steps_of_any_size() {
    for name in FIXTURES {
        let f = Fixture::open(name);
        let unfused = f.run(DType::F32, "none", usize::MAX);
        for chunk in [1, 5, 17, usize::MAX] {
            let fused = f.run(DType::F32, "default", chunk);
            assert_same(&format!("{name} in steps of {chunk}"), nmse(&fused, &unfused));
        }
    }
}
