//! The engine on real models: however it schedules, each request's tokens are what they are alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use infernum_codegen::Limits;
use infernum_ir::{DType, Sym};
use infernum_passes::KvDtype;
use infernum_passes::data::Kernels;
use infernum_runtime::{
    Allowed, Batching, Constraint, Cursor, Engine, EngineLimits, EngineOptions, Event, GroupKind,
    KvMode, Next, PlanExecutor, Policy, Request, SamplingParams, Stats, StepInputs, most_blocks,
};

use crate::support::{Fixture, Launches};

const FIXTURES: [&str; 4] = ["llama/gqa3", "mistral/window", "qwen2/windows", "qwen3/gqa3_tied"];

/// Those whose layers keep states of a fixed size, beside rows and alone.
const RECURRENT: [&str; 3] = ["lfm2/tied", "qwen3_5/dense", "mamba2/groups"];

/// Those that are tried with a cache of codes, too: paged rows, and rings beside them.
const CODES: [&str; 2] = ["qwen3/gqa3_tied", "qwen2/windows"];

/// Tokens of prompts in a step.
const CHUNK: u64 = 24;

/// An engine with memory for `sequences` of the longest.
fn engine(f: &Fixture, sequences: usize, options: EngineOptions) -> Engine<Box<dyn PlanExecutor>> {
    engine_of(f, "default", sequences, options)
}

fn engine_of(
    f: &Fixture,
    passes: &str,
    sequences: usize,
    options: EngineOptions,
) -> Engine<Box<dyn PlanExecutor>> {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let limits = Limits { chunk: CHUNK, sequences: 8, max_length: f.max_length };
    let plan = f.plan_of(DType::F32, passes, &kernels, limits, Sym::B);
    let (groups, longest) = (GroupKind::of_plan(&plan), f.max_length as usize);
    // A contiguous cache holds all rows of rings, too.
    let run = longest.div_ceil(StepInputs::BLOCK_SIZE);
    let in_runs = |g: &GroupKind| {
        g.most_blocks(longest, StepInputs::BLOCK_SIZE, CHUNK as usize).next_multiple_of(run)
    };
    let whole = groups.iter().map(in_runs).sum();
    let each = match options.kv {
        KvMode::Contiguous => whole,
        _ => most_blocks(&groups, longest, StepInputs::BLOCK_SIZE, CHUNK as usize),
    };
    let blocks = sequences * each;
    let limits = EngineLimits {
        step: plan.limits,
        max_length: f.max_length as usize,
        chunk: CHUNK as usize,
        blocks,
        block_size: StepInputs::BLOCK_SIZE,
        vocab: f.logits.len() / f.tokens.len(),
    };
    let executor = f.executor(plan, blocks, Launches::Graphs);
    Engine::new(executor, limits, options).expect("options that agree")
}

/// Two thirds of a vocabulary, by all tokens before. Some answers are not there when they are asked for first, and some
/// texts have their next token forced.
#[derive(Clone, Copy, Debug)]
struct Thirds {
    vocab: u32,
    hash: u32,
    jumps: bool,
    /// How often it was asked for what comes next.
    asked: u32,
}

impl Constraint for Thirds {
    fn begin(&self, jumps: bool) -> Box<dyn Cursor> {
        Box::new(Thirds { jumps, ..*self })
    }
}

impl Cursor for Thirds {
    fn next(&mut self, wait: bool) -> Option<Next> {
        self.asked += 1;
        if !wait && self.asked == 1 && self.hash.is_multiple_of(5) {
            return None;
        }
        let mut forced = Vec::new();
        if self.jumps && self.hash % 4 == 1 {
            forced.push(self.hash % self.vocab);
            self.take(forced[0]);
        }
        let mut words = vec![0; self.vocab.div_ceil(32) as usize];
        for token in (0..self.vocab).filter(|t| t % 3 != self.hash % 3) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Some(Next { forced, then: Allowed::Tokens(words), took: Duration::ZERO })
    }

    fn advance(&mut self, token: u32) {
        self.take(token);
    }
}

impl Thirds {
    fn take(&mut self, token: u32) {
        (self.hash, self.asked) = (self.hash.wrapping_mul(31).wrapping_add(token + 7) >> 1, 0);
    }
}

/// Prompts that begin alike in part, greedy and not, some under a constraint.
fn requests(f: &Fixture) -> Vec<Request> {
    let request = |i: usize| {
        let length = 1 + (i * 13) % (f.tokens.len() - 1);
        let mut tokens = f.tokens[..length].to_vec();
        if i.is_multiple_of(3) {
            *tokens.last_mut().expect("a token") = f.tokens[i];
        }
        let seed = i as u64;
        let sampling = match i % 4 {
            1 => SamplingParams { temperature: 0.8, seed, ..SamplingParams::default() },
            2 => SamplingParams { repetition_penalty: 1.4, ..SamplingParams::default() },
            _ => SamplingParams::default(),
        };
        let bias = vec![(f.tokens[0], 1.5); usize::from(i % 5 == 4)];
        // The first two grow long, together.
        let most = if i < 2 { 30 } else { 6 + i % 7 };
        let logprobs = (i % 3 < 2).then_some(2);
        let vocab = (f.logits.len() / f.tokens.len()) as u32;
        let thirds = Thirds { vocab, hash: seed as u32, jumps: false, asked: 0 };
        let constraint: Option<Arc<dyn Constraint>> =
            (i % 4 >= 2).then(|| Arc::new(thirds) as Arc<dyn Constraint>);
        Request { sampling, bias, logprobs, constraint, ..Request::new(tokens, most) }
    };
    (0..14).map(request).collect()
}

/// What came of a request: its tokens, and their log-probabilities if it asked for them.
#[derive(Default)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
}

/// The answer to each request, submitted in two halves.
fn outputs(
    engine: &mut Engine<Box<dyn PlanExecutor>>,
    requests: &[Request],
) -> (Vec<Answer>, Stats) {
    let mut outputs: BTreeMap<_, Answer> = BTreeMap::new();
    let mut events = Vec::new();
    let (first, second) = requests.split_at(requests.len() / 2);
    for half in [first, second] {
        for request in half {
            let id = engine.submit(request.clone()).expect("a request that fits");
            outputs.insert(id, Answer::default());
        }
        for _ in 0..5 {
            engine.step(&mut events).expect("a step");
        }
    }
    events.extend(engine.run_until_idle().expect("steps"));
    for event in events {
        if let Event::Token(id, token, logprobs) = event {
            let answer = outputs.get_mut(&id).expect("a request of ours");
            answer.tokens.push(token);
            answer.logprobs.extend(logprobs.map(|l| l.logprob));
        }
    }
    let (free, total) = engine.blocks();
    assert_eq!(free, total, "memory was lost");
    (outputs.into_values().collect(), engine.stats())
}

#[test]
fn no_way_of_scheduling_changes_an_output() {
    let plain = EngineOptions { prefix_cache: false, ahead: false, ..EngineOptions::default() };
    let ways = [
        ("all", 8, EngineOptions::default()),
        ("little memory", 1, EngineOptions::default()),
        ("prefixes", 8, EngineOptions { prefix_cache: true, ..plain }),
        ("ahead", 8, EngineOptions { ahead: true, ..plain }),
        ("contiguous", 3, EngineOptions { kv: KvMode::Contiguous, ahead: true, ..plain }),
        ("no cache", 8, EngineOptions { kv: KvMode::Off, ..plain }),
        ("static", 8, EngineOptions { batching: Batching::Static, ..plain }),
        (
            "prompts first",
            3,
            EngineOptions { policy: Policy::PrefillFirst, ..EngineOptions::default() },
        ),
        (
            "in turn",
            3,
            EngineOptions { policy: Policy::DecodeRoundRobin, ..EngineOptions::default() },
        ),
    ];
    let plain_caches = FIXTURES.into_iter().chain(RECURRENT).map(Fixture::open);
    for f in plain_caches.chain(CODES.map(Fixture::with_codes)) {
        let name = format!("{}, {}", f.name, f.kv_dtype);
        // What is cached may be the next code where it was summed in another order.
        let most = if f.kv_dtype == KvDtype::Auto { 1e-4 } else { 1e-2 };
        let requests = requests(&f);
        let alone = EngineOptions { batching: Batching::None, ..plain };
        let (expected, _) = outputs(&mut engine(&f, 1, alone), &requests);
        for (way, sequences, options) in ways {
            let mut engine = engine(&f, sequences, options);
            let (found, stats) = outputs(&mut engine, &requests);
            for ((found, expected), request) in found.iter().zip(&expected).zip(&requests) {
                assert_eq!(found.tokens, expected.tokens, "{name}, {way}");
                let told = if request.logprobs.is_some() { found.tokens.len() } else { 0 };
                assert_eq!(found.logprobs.len(), told, "{name}, {way}");
                let pairs = found.logprobs.iter().zip(&expected.logprobs);
                let error = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < most, "{name}, {way}: log-probabilities differ by {error}");
            }
            // States of a fixed size are kept for others where there is room.
            let groups = engine.executor().groups();
            let has_slots = groups.iter().any(|g| matches!(g, GroupKind::Slot { .. }));
            let may_miss = sequences < 8 && has_slots;
            let hits = stats.prefix_hits > 0;
            assert!(hits == options.prefix_cache || may_miss, "{name}, {way}: {stats:?}");
            // What rings hold does not grow: room for the longest may be room for all.
            let grows = way == "little memory" && engine.executor().groups() == [GroupKind::Paged];
            let may_grow = way == "little memory";
            assert!(stats.preemptions > 0 || !grows, "{name}, {way}: {stats:?}");
            assert!(stats.preemptions == 0 || may_grow, "{name}, {way}: {stats:?}");
            assert!(stats.constrained > 20 && stats.forced > 0, "{name}, {way}: {stats:?}");
        }
    }
}

/// Where memory runs out, a sequence's state of a fixed size is given up with its rows, and computed again.
#[test]
fn preemption_changes_no_output_of_a_recurrence() {
    for name in ["lfm2/tied", "qwen3_5/dense"] {
        let f = Fixture::open(name);
        // Short prompts that all grow.
        let request = |i: usize| Request::new(f.tokens[..2 + i].to_vec(), 30);
        let requests: Vec<Request> = (0..6).map(request).collect();
        let (expected, _) = outputs(&mut engine(&f, 6, EngineOptions::default()), &requests);
        let mut preempted = 0;
        for sequences in 1..4 {
            let mut engine = engine(&f, sequences, EngineOptions::default());
            let (found, stats) = outputs(&mut engine, &requests);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.tokens, expected.tokens, "{name}, {sequences}: {stats:?}");
            }
            preempted += stats.preemptions;
        }
        assert!(preempted > 0, "{name}: nothing was given up");
    }
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_its_logits() {
    for name in FIXTURES {
        let f = Fixture::open(name);
        let mut engine = engine(&f, 2, EngineOptions::default());
        let prompt = f.tokens.clone();
        // The cache holds the prompt already: it must not be passed over. Others run beside it at last.
        for (round, others) in [0, 0, 3].into_iter().enumerate() {
            for i in 0..others {
                let request = Request::new(prompt[..=9 * i].to_vec(), 8);
                engine.submit(request).expect("a request that fits");
                engine.step(&mut Vec::new()).expect("a step");
            }
            let request = Request { prompt_logprobs: Some(3), ..Request::new(prompt.clone(), 0) };
            engine.submit(request).expect("a request that fits");
            let events = engine.run_until_idle().expect("steps");
            let found: Vec<_> = events
                .iter()
                .filter_map(|e| if let Event::Prompt(_, l) = e { Some(l) } else { None })
                .collect();
            if others == 0 {
                // In one pass, as any prompt.
                let passes = (round as u64 + 1) * prompt.len().div_ceil(CHUNK as usize) as u64;
                assert_eq!(engine.stats().steps, passes, "{name}");
            }
            assert_eq!(found.len() + 1, prompt.len(), "{name}");
            let vocab = f.logits.len() / prompt.len();
            for (i, logprobs) in found.iter().enumerate() {
                let row = &f.logits[i * vocab..(i + 1) * vocab];
                let log_sum = row.iter().map(|l| l.exp()).sum::<f64>().ln();
                let expected = row[prompt[i + 1] as usize] - log_sum;
                let error = (f64::from(logprobs.logprob) - expected).abs();
                assert!(error < 1e-4, "{name}, token {}: {logprobs:?}, not {expected}", i + 1);
                assert_eq!((logprobs.token, logprobs.top.len()), (prompt[i + 1], 3));
                assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
            }
        }
    }
}

/// Layers that see a window hold the blocks of that window, and the text is what it is where nothing is given back.
#[test]
fn windows_hold_no_more_than_they_show() {
    // The second has three groups of a layer each, two of which keep all: blocks of a third of the size.
    for (name, held, all) in [("mistral/window_long", 7, 13), ("qwen2/old_windows", 3 * 4, 4)] {
        let f = Fixture::open(name);
        let long = Request::new(f.tokens.clone(), 24);
        let requests = [Request { max_tokens: 60, ..long.clone() }, long];
        let (mut rings, mut paged) = (
            engine_of(&f, "default", 1, EngineOptions::default()),
            engine_of(&f, "none", 1, EngineOptions::default()),
        );
        assert_eq!((rings.blocks().1, paged.blocks().1), (held, all), "{name}");
        assert_eq!(paged.executor().groups(), [GroupKind::Paged], "{name}");
        let is_ring = |g: &GroupKind| matches!(g, GroupKind::Ring { .. });
        assert!(rings.executor().groups().iter().any(is_ring), "{name}");
        let (found, _) = outputs(&mut rings, &requests);
        let (expected, _) = outputs(&mut paged, &requests);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.tokens, expected.tokens, "{name}");
        }
    }
}
