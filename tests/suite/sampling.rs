//! Picking tokens from given logits: what an executor draws is what the host would. With
//! `INFERNUM_TEST_DEVICE=cuda` the GPU picks; on the CPU the host does.

use infernum_codegen::cuda::{self, Compiler, Device};
use infernum_codegen::{Plan, TargetKind};
use infernum_ir::{DType, Dims, NO_TOKEN, OpSet, text};
use infernum_runtime::{
    PlanExecutor, SamplingParams, SeenToken, StepInputs, TensorBytes, TokenPick, WeightSource,
};

use crate::support::{Launches, executor, machine};

const SEQUENCES: usize = 40;
/// Steps whose draws are counted.
const STEPS: usize = 150;

/// Logits for each token that a sequence may end in: a model that looks them up.
struct Table {
    vocab: usize,
    rows: Vec<Vec<f32>>,
}

impl WeightSource for Table {
    fn tensor(&self, _: &str) -> Option<TensorBytes> {
        let bytes: Vec<u8> = self.rows.iter().flatten().flat_map(|v| v.to_le_bytes()).collect();
        let shape = vec![self.rows.len() as u64, self.vocab as u64];
        Some(TensorBytes { element: DType::F32.into(), shape, bytes: bytes.into() })
    }
}

impl Table {
    fn executor(&self) -> Box<dyn PlanExecutor> {
        executor(self.plan(machine().device().as_ref()), self, SEQUENCES, Launches::wanted())
            .unwrap_or_else(|e| panic!("{e}"))
    }

    fn plan(&self, device: Option<&Device>) -> Plan {
        let (rows, vocab) = (self.rows.len(), self.vocab);
        let module = text::parse(
            &format!(
                "module lookup
graph g {{
  %ids = step tokens : u32[T]
  %rows = step output_rows : u32[B]
  %e = weight \"e\" : const f32[{rows}, {vocab}]
  %x = embedding(%ids, %e) : f32[T, {vocab}]
  %y = gather_rows(%x, %rows) : f32[B, {vocab}]
  return %y
}}

schedule g
"
            ),
            "lookup",
        );
        let module = module.unwrap_or_else(|e| panic!("{e}"));
        let n = SEQUENCES as u64;
        let limits = Dims { t: n, b: n, s: n * n, pairs: n * n * n, seqs: n };
        let target = if device.is_some() { TargetKind::Cuda } else { TargetKind::Cpu };
        let mut plan = infernum_codegen::plan(&module, target, limits).expect("a plan");
        if let Some(device) = device {
            let templates = cuda::Library::default();
            cuda::attach(
                &mut plan,
                &OpSet::default(),
                &templates,
                device,
                &cuda::TunedVariants::default(),
            )
            .unwrap_or_else(|e| panic!("{e}"));
        }
        plan
    }
}

/// Tokens after sequences that end in `row` and are picked by `choice`.
fn pick(
    table: &Table,
    executor: &mut dyn PlanExecutor,
    asked: &[(usize, TokenPick<'_>)],
) -> Vec<u32> {
    let samples = executor.samples();
    let size = StepInputs::BLOCK_SIZE;
    let mut inputs = if samples { StepInputs::asking(size) } else { StepInputs::new(size) };
    for (i, (row, choice)) in asked.iter().enumerate() {
        inputs.push(&[*row as u32], 1, &[i as u32]).expect("a well-formed step");
        inputs.set_pick(choice);
    }
    let output = executor.run(&inputs).expect("a step that fits");
    if samples {
        assert!(output.logits.is_empty(), "logits that nobody wants");
        return output.tokens.clone();
    }
    let rows = asked.iter().enumerate();
    rows.map(|(i, (row, choice))| {
        assert_eq!(output.row(i)[1].to_bits(), table.rows[*row][1].to_bits());
        choice.pick(output.row(i)).unwrap_or(NO_TOKEN)
    })
    .collect()
}

/// Rows from here on have no token.
const BROKEN: usize = 6;

/// Rows of several characters, reproducible.
fn table(vocab: usize) -> Table {
    let mut state = 1u64;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as f32 + 0.5) / (1u64 << 31) as f32
    };
    let mut normal = move || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    let mut row = |spread: f32| (0..vocab).map(|_| spread * normal()).collect::<Vec<f32>>();
    let mut rows = vec![row(2.0), row(6.0), row(0.01), vec![1.0; vocab]];
    // Ties, as logits of 16 bits have.
    rows.push(row(2.0).into_iter().map(f32::round).collect());
    let mut odd = row(3.0);
    (odd[0], odd[vocab / 2], odd[vocab - 1]) = (f32::NEG_INFINITY, f32::INFINITY, -0.0);
    rows.push(odd);
    // What is no distribution has no token.
    rows.push(vec![f32::NEG_INFINITY; vocab]);
    rows.push(vec![f32::NAN; vocab]);
    for at in [0, vocab / 2, vocab - 1] {
        let mut broken = row(1.0);
        broken[at] = f32::NAN;
        rows.push(broken);
    }
    Table { vocab, rows }
}

const GREEDY: SamplingParams = SamplingParams::GREEDY;

fn params() -> Vec<SamplingParams> {
    let warm = SamplingParams { temperature: 1.0, ..GREEDY };
    vec![
        GREEDY,
        warm,
        SamplingParams { temperature: 0.7, top_p: 0.9, ..GREEDY },
        SamplingParams { temperature: 0.8, top_k: 50, ..GREEDY },
        SamplingParams { temperature: 1.2, top_k: 40, top_p: 0.95, min_p: 0.02, ..GREEDY },
        SamplingParams { min_p: 0.1, ..warm },
        SamplingParams { top_k: 1, ..warm },
        SamplingParams { top_p: 1e-6, ..warm },
        SamplingParams { top_p: 0.3, ..warm },
        SamplingParams { top_k: 3000, top_p: 0.5, ..warm },
        SamplingParams { repetition_penalty: 1.3, ..GREEDY },
        SamplingParams { frequency_penalty: 0.4, presence_penalty: 0.2, top_p: 0.9, ..warm },
        SamplingParams { repetition_penalty: 1.5, temperature: 100.0, top_k: 5, ..GREEDY },
    ]
}

/// Sums of roundings differ between machines: a draw that turns on one may too, which is rare.
#[test]
fn executors_pick_what_the_host_would() {
    for vocab in [40, 8192, 20_001] {
        let table = table(vocab);
        let mut executor = table.executor();
        let seen: Vec<SeenToken> = (0..vocab as u32)
            .step_by(3)
            .map(|token| SeenToken { token, generated: token % 4 })
            .collect();
        let bans: Vec<SeenToken> = (0..vocab as u32)
            .step_by(5)
            .map(|token| SeenToken { token, generated: SeenToken::BANNED })
            .collect();
        let cases =
            (0..8).flat_map(|seed| params().into_iter().map(move |p| SamplingParams { seed, ..p }));
        let asked: Vec<(usize, TokenPick<'_>)> = (0..table.rows.len())
            .flat_map(|row| cases.clone().map(move |p| (row, p)))
            .map(|(row, params)| {
                let penalties = params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0;
                let seen = match (penalties, params.seed % 2) {
                    (true, _) => &seen[..],
                    (false, 0) => &[],
                    // What a row has wrong could be banned away.
                    (false, _) if row >= BROKEN => &[],
                    (false, _) => &bans[..],
                };
                (row, TokenPick { params, position: 11 + params.seed, seen })
            })
            .collect();
        let mut others = 0;
        for step in asked.chunks(SEQUENCES - 1) {
            let found = pick(&table, &mut *executor, step);
            for ((row, choice), token) in step.iter().zip(found) {
                let expected = choice.pick(&table.rows[*row]).unwrap_or(NO_TOKEN);
                assert_eq!(token == NO_TOKEN, *row >= BROKEN, "row {row}");
                let p = &choice.params;
                if p.temperature == 0.0 || p.top_k == 1 {
                    assert_eq!(token, expected, "vocabulary of {vocab}, row {row}: {p:?}");
                }
                let found = choice.seen.iter().find(|s| s.token == token);
                assert!(found.is_none_or(|s| s.generated != SeenToken::BANNED), "{p:?}");
                others += usize::from(token != expected);
            }
        }
        assert!(others * 200 <= asked.len(), "{vocab}: {others} of {} differ", asked.len());
    }
}

/// Pearson's test, which a right sampler fails once in ten thousand seeds; the seed is fixed.
#[test]
fn draws_have_the_right_frequencies() {
    let vocab = 20_001;
    let mut row = vec![-40.0; vocab];
    let likely: Vec<usize> = (0..10).map(|i| i * 1999 + 3).collect();
    for (i, token) in likely.iter().enumerate() {
        row[*token] = i as f32 * 0.3;
    }
    let table = Table { vocab, rows: vec![row] };
    let mut executor = table.executor();
    // All of them; the likeliest six by each limit.
    let warm = SamplingParams { temperature: 1.0, seed: 5, ..GREEDY };
    let limits = [
        (warm, 10),
        (SamplingParams { top_k: 6, ..warm }, 6),
        (SamplingParams { top_p: 0.85, ..warm }, 6),
        (SamplingParams { min_p: 0.2, ..warm }, 6),
    ];
    for (params, kept) in limits {
        let mut counts = vec![0.0; 10];
        let draws = STEPS * SEQUENCES;
        for step in 0..STEPS {
            let choice = |i: usize| {
                let position = (step * SEQUENCES + i) as u64;
                (0, TokenPick { params, position, seen: &[] })
            };
            let asked: Vec<_> = (0..SEQUENCES).map(choice).collect();
            for token in pick(&table, &mut *executor, &asked) {
                let at = likely.iter().position(|t| *t == token as usize);
                counts[at.unwrap_or_else(|| panic!("{params:?}: token {token}"))] += 1.0;
            }
        }
        let weights: Vec<f64> = (10 - kept..10).map(|i| (0.3 * i as f64).exp()).collect();
        let sum: f64 = weights.iter().sum();
        assert!(counts[..10 - kept].iter().all(|c| *c == 0.0), "{params:?}: {counts:?}");
        let chi2: f64 = weights
            .iter()
            .zip(&counts[10 - kept..])
            .map(|(w, found)| {
                let expected = w / sum * draws as f64;
                (found - expected).powi(2) / expected
            })
            .sum();
        // The quantile for 9 degrees of freedom; for fewer it is smaller.
        assert!(chi2 < 33.7, "{params:?}: {chi2} for {counts:?}");
    }
}

/// Needs NVRTC, but no GPU; without it, that the templates have a variant and can be read is left.
#[test]
fn kernels_compile_for_every_architecture() {
    let compiler = Compiler::find().ok();
    for (arch, ..) in Device::KNOWN {
        let device = Device::named(arch).expect("a known device");
        for vocab in [40, 20_001, 128_256] {
            let plan = Table { vocab, rows: vec![Vec::new()] }.plan(Some(&device));
            assert!(plan.pick.is_some() && plan.sample.is_some());
            let picks =
                plan.kernels.iter().filter(|k| ["argmax", "sample"].contains(&&*k.template));
            assert_eq!(picks.clone().count(), 2);
            for kernel in picks {
                let Some(compiler) = &compiler else { continue };
                let compiled = compiler.compile(&kernel.name, &kernel.text, arch, false);
                compiled.unwrap_or_else(|e| panic!("{} for {arch}: {e}", kernel.name));
            }
        }
    }
}

#[test]
fn a_choice_depends_neither_on_the_batch_nor_on_the_run() {
    let table = table(20_001);
    let mut executor = table.executor();
    let asked: Vec<(usize, TokenPick<'_>)> = params()
        .into_iter()
        .cycle()
        .take(SEQUENCES)
        .enumerate()
        .map(|(i, p)| {
            let params = SamplingParams { seed: i as u64, ..p };
            (i % 6, TokenPick { params, position: 3, seen: &[] })
        })
        .collect();
    let together = pick(&table, &mut *executor, &asked);
    assert_eq!(together, pick(&table, &mut *executor, &asked));
    for (i, one) in asked.iter().enumerate() {
        assert_eq!(pick(&table, &mut *executor, &[*one]), together[i..=i], "{one:?}");
    }
}
