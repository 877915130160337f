//! The engine on an executor whose next token is a hash of the rows it was given: whatever reads a
//! wrong row, a row too early or another's row yields another text.

mod constraints;
mod fake;
mod memory;
mod vectors;
mod wishes;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use infernum_ir::{Dims, Task, random};
use proptest::prelude::*;

use constraints::Moody;
use fake::{CURSED, Fake, Text, VOCAB, hash, solo};

use super::schedule::fitting_chunk;
use super::*;
use crate::sampling::{Logprobs, SamplingParams};

const MAX_LENGTH: usize = 40;
const BLOCK: usize = 4;

fn engine_with(
    step: Dims,
    chunk: usize,
    blocks: usize,
    gpu: bool,
    options: EngineOptions,
) -> Engine<Fake> {
    engine_of(&[GroupKind::Paged], step, chunk, blocks, gpu, options)
}

fn engine_of(
    groups: &[GroupKind],
    step: Dims,
    chunk: usize,
    blocks: usize,
    gpu: bool,
    options: EngineOptions,
) -> Engine<Fake> {
    engine_on(fake(groups, step, blocks, gpu), chunk, options)
}

fn fake(groups: &[GroupKind], step: Dims, blocks: usize, gpu: bool) -> Fake {
    Fake {
        groups: groups.to_vec(),
        task: Task::Generate,
        takes_whole: false,
        samples: gpu,
        feeds: gpu,
        defers: gpu,
        unpicked: None,
        reproducible: false,
        rows: vec![None; blocks * BLOCK],
        block_size: BLOCK,
        limits: step,
        outputs: Default::default(),
        submitted: 0,
        waited: 0,
        brought: 0,
        fails_at: None,
        mixed: 0,
        several: 0,
        deferred: 0,
    }
}

fn engine_on(executor: Fake, chunk: usize, options: EngineOptions) -> Engine<Fake> {
    let (step, blocks) = (executor.limits, executor.rows.len() / BLOCK);
    let limits = EngineLimits {
        step,
        max_length: MAX_LENGTH,
        chunk,
        blocks,
        block_size: BLOCK,
        vocab: VOCAB,
    };
    let mut engine = Engine::new(executor, limits, options).expect("options that agree");
    if engine.options.prefix_cache {
        engine.groups.snapshot_every = 3 * BLOCK;
    }
    engine
}

fn engine(step: Dims, chunk: usize) -> Engine<Fake> {
    engine_with(step, chunk, 64, false, EngineOptions::default())
}

const STEP: Dims = Dims { t: 8, b: 4, s: 160, pairs: 300, seqs: 4 };

/// Random requests.
struct Random(random::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(random::named("engine", seed))
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    fn request(&mut self) -> Request {
        // Few beginnings, so that prefixes are shared; some prompts end differently.
        let (salt, length, alphabet) =
            (self.below(2) as u64, 1 + self.below(24), 1 + self.below(3));
        let mut tokens: Vec<u32> = (0..length).map(|i| (i % alphabet) as u32).collect();
        if self.below(3) == 0 {
            tokens.push(self.below(VOCAB) as u32);
        }
        if self.below(20) == 0 {
            tokens[0] = CURSED;
        }
        let sampling = match self.below(4) {
            0 => SamplingParams {
                temperature: 1.0,
                seed: self.below(9) as u64,
                ..SamplingParams::default()
            },
            1 => SamplingParams {
                temperature: 0.7,
                top_k: 3,
                repetition_penalty: 1.2,
                ..SamplingParams::default()
            },
            // A token that is counted too late comes again.
            2 => SamplingParams {
                frequency_penalty: 1.5,
                presence_penalty: 0.75,
                ..SamplingParams::default()
            },
            _ => SamplingParams::default(),
        };
        let min_tokens = if self.below(4) == 0 { self.below(9) as u32 } else { 0 };
        let sampling = SamplingParams { min_tokens, ..sampling };
        Request {
            max_tokens: self.below(18),
            stop: (0..self.below(3)).map(|_| self.below(VOCAB) as u32).collect(),
            tell_stop: self.below(4) == 0,
            // The same token may be named twice.
            bias: vec![(self.below(VOCAB) as u32, 1.5); self.below(20).saturating_sub(17)],
            constraint: (self.below(5) == 0).then(|| {
                let (seed, late) = (self.below(512) as u32, self.below(4) as u32);
                std::sync::Arc::new(Moody { seed, late }) as std::sync::Arc<dyn Constraint>
            }),
            logprobs: (self.below(6) == 0).then_some(2),
            prompt_logprobs: (self.below(8) == 0).then_some(1),
            priority: self.below(4) as i32,
            salt,
            sampling,
            ..Request::new(tokens, 0)
        }
    }
}

/// What is known of a request that has not ended.
struct Live {
    request: Request,
    started: bool,
    prompt: usize,
    output: Vec<u32>,
    logprobs: Vec<Logprobs>,
    since: u64,
}

/// Requests that live at once at most.
const LIVE: usize = 16;

/// Steps within which each of them must end: twice the work of all, a row at a time.
fn bound(options: &EngineOptions) -> u64 {
    let tokens = if options.kv == KvMode::Off { 18 } else { 1 };
    (2 * LIVE * MAX_LENGTH * tokens + 400) as u64
}

/// Random arrivals and cancellations, so many steps; panics at anything that must not be. How the engine
/// stands then, the steps that had rows of both parts, and those in which a sequence yielded several rows.
fn stress(seed: u64, steps: u64, mut engine: Engine<Fake>) -> (Stats, [u64; 2]) {
    let reproducible = engine.executor.reproducible;
    let again = if reproducible && engine.options().kv == KvMode::Off { 18 } else { 1 };
    let (mut random, bound) = (Random::new(seed), again * bound(engine.options()));
    let groups = &engine.executor.groups.clone();
    let mut live: BTreeMap<RequestId, Live> = BTreeMap::new();
    let (mut events, mut failed) = (Vec::new(), 0);
    for now in 0..steps {
        // In waves, so that it is full at times and empty at others.
        let arrivals = if now / 300 % 3 == 2 { 12 } else { 3 };
        if live.len() < LIVE && random.below(arrivals) == 0 {
            let request = random.request();
            let id = match engine.submit(request.clone()) {
                Ok(id) => id,
                Err(EngineError::CacheTooSmall { .. }) => continue,
                Err(other) => panic!("{other}"),
            };
            let new = Live {
                request,
                started: false,
                prompt: 1,
                output: Vec::new(),
                logprobs: Vec::new(),
                since: now,
            };
            assert!(live.insert(id, new).is_none(), "a name given twice");
        }
        if random.below(40) == 0 && !live.is_empty() {
            let id = *live.keys().nth(random.below(live.len())).expect("one of them");
            engine.cancel(id);
            live.remove(&id);
            engine.audit_held();
        }
        if random.below(30) == 0 && !live.is_empty() {
            let id = *live.keys().nth(random.below(live.len())).expect("one of them");
            let rows = random.below(MAX_LENGTH);
            engine.truncate(id, rows);
            engine.check_truncated(id, rows);
            engine.audit_held();
        }
        engine.step(&mut events).expect("a step");
        let census = engine.pool.census();
        assert_eq!(census.iter().sum::<usize>(), engine.pool.total(), "used, kept and free");
        engine.check_flight(&live);
        for event in events.drain(..) {
            match event {
                Event::Started(id, found) => {
                    let l = live.get_mut(&id).expect("an event of one that lives");
                    assert!(!std::mem::replace(&mut l.started, true), "started twice");
                    assert!(found < l.request.tokens.len());
                }
                Event::Prompt(id, logprobs) => {
                    let l = live.get_mut(&id).expect("an event of one that lives");
                    let (mut text, mut row) = (Text::new(groups), Vec::new());
                    l.request.tokens[..l.prompt].iter().for_each(|t| row = text.push(*t));
                    let expected = Logprobs::new(&row, l.request.tokens[l.prompt], 1);
                    assert_eq!(*logprobs, expected, "row {}", l.prompt);
                    l.prompt += 1;
                }
                Event::Token(id, token, logprobs) => {
                    let l = live.get_mut(&id).expect("an event of one that lives");
                    assert!(l.started);
                    assert_eq!(logprobs.is_some(), l.request.logprobs.is_some());
                    l.output.push(token);
                    l.logprobs.extend(logprobs.map(|l| *l));
                }
                Event::Vector(..) => panic!("logits are no vectors"),
                Event::Finished(id, reason) => {
                    let l = live.remove(&id).expect("one that had not ended");
                    let mut expected = Vec::new();
                    let alone = solo(groups, reproducible, &l.request, |row, token| {
                        expected.extend(l.request.logprobs.map(|n| Logprobs::new(row, token, n)));
                    });
                    // That of a stop token which is not told is not, either.
                    expected.truncate(l.logprobs.len());
                    assert_eq!(l.logprobs, expected, "{:?}", l.request);
                    assert_eq!((l.output, reason), alone, "{:?}", l.request);
                    let told = if l.request.prompt_logprobs.is_some() {
                        l.request.tokens.len()
                    } else {
                        1
                    };
                    assert!(l.prompt == told || reason == FinishReason::Failed, "{:?}", l.request);
                    failed += u64::from(reason == FinishReason::Failed);
                }
            }
        }
        if now % 64 == 0 {
            engine.audit_held();
            let starved = live.values().find(|l| now - l.since > bound);
            assert!(starved.is_none(), "waits since long: {:?}", starved.map(|l| &l.request));
        }
    }
    assert_eq!(engine.stats().corrupted, failed, "logits that are no distribution are counted");
    finish_all(&mut engine, live, bound);
    (engine.stats(), [engine.executor.mixed, engine.executor.several])
}

/// Fails unless all that live end within so many steps and nothing is left of them.
fn finish_all(engine: &mut Engine<Fake>, mut live: BTreeMap<RequestId, Live>, bound: u64) {
    let mut events = Vec::new();
    for _ in 0..bound {
        engine.step(&mut events).expect("a step");
        events.drain(..).for_each(|e| {
            if let Event::Finished(id, _) = e {
                live.remove(&id);
            }
        });
    }
    assert!(
        live.is_empty() && engine.is_idle(),
        "some never ended: {:?} {:?} {:?}",
        engine.executor.groups,
        engine.options,
        engine.limits
    );
    engine.audit_held();
    assert_eq!(engine.blocks().0, engine.blocks().1, "memory was lost");
}

/// Every combination of options that is not refused.
fn all_options() -> Vec<EngineOptions> {
    let mut all = Vec::new();
    for policy in [Policy::Fcfs, Policy::PrefillFirst, Policy::DecodeRoundRobin, Policy::Priority] {
        for batching in [Batching::Continuous, Batching::Static, Batching::None] {
            for kv in [KvMode::Paged, KvMode::Contiguous, KvMode::Off] {
                for (prefix_cache, ahead) in
                    [(true, true), (true, false), (false, true), (false, false)]
                {
                    let options = EngineOptions {
                        policy,
                        batching,
                        kv,
                        prefix_cache,
                        ahead,
                        max_running: 0,
                        patience: 60,
                    };
                    if options.check().is_ok() {
                        all.push(options);
                    }
                }
            }
        }
    }
    all
}

/// More than one million steps in all.
#[test]
fn whatever_comes_every_request_ends_once_with_its_own_text() {
    let all = all_options();
    let steps = 1_200_000 / (2 * all.len()) as u64;
    let (mut totals, mut mixed, mut several) = (Stats::default(), 0, 0);
    for (i, options) in all.iter().enumerate() {
        for gpu in [false, true] {
            let mut random = Random::new(i as u64);
            let b = 1 + random.below(6) as u64;
            let t = b.max(1 + random.below(16) as u64);
            let outputs = b + random.below(8) as u64;
            let pairs = 40 * b + random.below(200) as u64;
            let step = Dims { t, b: outputs.min(t), s: 40 * b, pairs, seqs: b };
            // Room for one or two of the longest: it is full most of the time.
            let blocks = 10 + random.below(8);
            let engine = engine_with(step, 1 + random.below(16), blocks, gpu, *options);
            let (stats, [both, more]) = stress(2 * i as u64 + u64::from(gpu), steps, engine);
            (mixed, several) = (mixed + both, several + more);
            totals.steps += stats.steps;
            totals.preemptions += stats.preemptions;
            totals.prefix_hits += stats.prefix_hits;
            totals.constrained += stats.constrained;
            totals.forced += stats.forced;
            totals.awaited += stats.awaited;
        }
    }
    // The test would be worth little if these did not happen.
    assert!(totals.preemptions > 5_000, "{totals:?}");
    assert!(totals.prefix_hits > 100_000, "{totals:?}");
    assert!(totals.constrained > 20_000 && totals.forced > 10_000, "{totals:?}");
    assert!(totals.awaited > 20_000, "{totals:?}");
    assert!(totals.steps > 1_000_000, "{totals:?}");
    assert!(mixed > 100_000 && several > 10_000, "{mixed} and {several} steps");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// As above, on few steps, so that a failure is found small.
    #[test]
    fn any_sizes_and_options(
        seed in any::<u64>(), which in any::<prop::sample::Index>(), gpu in any::<bool>(),
        b in 1..6u64, t in 1..20u64, outputs in 0..8u64, pairs in 0..300u64, chunk in 1..16usize, blocks in 10..40usize,
        max_running in 0..8usize, steps in 1..400u64,
    ) {
        let all = all_options();
        let options = EngineOptions { max_running, ..all[which.index(all.len())] };
        let t = t.max(b);
        let outputs = (b + outputs).min(t);
        let step = Dims { t, b: outputs, s: 40 * b, pairs: 40 * b + pairs, seqs: b };
        stress(seed, steps, engine_with(step, chunk, blocks, gpu, options));
    }
}

/// Runs until nothing is left to do.
fn finish(engine: &mut Engine<Fake>) -> Vec<Event> {
    engine.run_until_idle().expect("steps")
}

#[test]
fn a_step_is_submitted_while_the_one_before_runs() {
    let mut engine = engine_with(STEP, 8, 64, true, EngineOptions::default());
    engine.submit(Request::new(vec![1, 2, 3], 5)).expect("a request");
    let mut events = Vec::new();
    for _ in 0..3 {
        engine.step(&mut events).expect("a step");
        assert_eq!(engine.executor.submitted, engine.executor.waited + 1);
    }
    // Nothing that a request may wish makes a step wait.
    let sampling = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    let request = Request { sampling, bias: vec![(7, 9.0)], ..Request::new(vec![4], 5) };
    let request = Request { logprobs: Some(1), prompt_logprobs: Some(1), ..request };
    engine.submit(request).expect("a request");
    for _ in 0..3 {
        engine.step(&mut events).expect("a step");
        assert_eq!(engine.executor.submitted, engine.executor.waited + 1);
    }
    assert_eq!(engine.executor.brought, 0, "logits that nobody asked for");
}

#[test]
fn stop_tokens_end_a_request_and_are_not_part_of_it() {
    let mut engine = engine(STEP, 8);
    let stop = vec![hash([1, 2, 3].into_iter())];
    let request = Request { stop, ..Request::new(vec![1, 2, 3], 5) };
    let id = engine.submit(request).expect("a request");
    let events = finish(&mut engine);
    assert_eq!(events, [Event::Started(id, 0), Event::Finished(id, FinishReason::Stop)]);
}

#[test]
fn a_prefix_is_computed_once_per_tenant() {
    let mut engine = engine(STEP, 8);
    let mut found = Vec::new();
    for (salt, end) in [(0, 1), (0, 2), (1, 1), (0, 1)] {
        let mut tokens = vec![7; 10];
        tokens.push(end);
        engine.submit(Request { salt, ..Request::new(tokens, 1) }).expect("a request");
        found.extend(finish(&mut engine).into_iter().filter_map(|e| match e {
            Event::Started(_, n) => Some(n),
            _ => None,
        }));
    }
    assert_eq!(found, [0, 8, 0, 8], "two blocks of four; nothing of another tenant's");
    let stats = engine.stats();
    assert_eq!((stats.prefix_queries, stats.prefix_hits), (44, 16));
}

#[test]
fn cancelled_requests_free_their_memory_at_once() {
    for gpu in [false, true] {
        let mut engine = engine_with(STEP, 8, 64, gpu, EngineOptions::default());
        let ids: Vec<_> = (0..6)
            .map(|i| engine.submit(Request::new(vec![i; 9], 20)).expect("a request"))
            .collect();
        let mut events = Vec::new();
        for _ in 0..4 {
            engine.step(&mut events).expect("a step");
        }
        assert!(engine.stats().used_blocks > 0 && engine.stats().waiting > 0);
        ids.iter().for_each(|id| engine.cancel(*id));
        assert_eq!((engine.stats().used_blocks, engine.stats().waiting), (0, 0));
        assert_eq!(finish(&mut engine), [], "no event of what was cancelled");
    }
}

#[test]
fn what_is_truncated_is_given_back_and_computed_again() {
    let expected = |request: &Request| solo(&[GroupKind::Paged], false, request, |_, _| {}).0;
    for gpu in [false, true] {
        let mut engine = engine_with(STEP, 8, 64, gpu, EngineOptions::default());
        let request = Request::new((0..9).collect(), 12);
        let id = engine.submit(request.clone()).expect("a request");
        let mut events = Vec::new();
        for _ in 0..4 {
            engine.step(&mut events).expect("a step");
        }
        // Within a block that is not kept, where it begins, within one that is, and nothing.
        for (rows, blocks) in [(10, 3), (8, 2), (6, 1), (4, 1), (3, 0), (40, 0)] {
            engine.truncate(id, rows);
            assert_eq!(engine.stats().used_blocks, blocks, "{rows} rows");
            engine.audit();
        }
        // What was kept is found again, and what is not is computed; others' rows stay as they are.
        let other = engine.submit(Request { max_tokens: 3, ..request.clone() }).expect("a request");
        events.extend(finish(&mut engine));
        for (id, request) in
            [(id, &request), (other, &Request { max_tokens: 3, ..request.clone() })]
        {
            let tokens = events.iter().filter_map(|e| match e {
                Event::Token(of, token, _) if *of == id => Some(*token),
                _ => None,
            });
            assert_eq!(tokens.collect::<Vec<_>>(), expected(request));
        }
        engine.audit();
        assert_eq!(engine.stats().used_blocks, 0);
    }
}

#[test]
fn a_failed_step_fails_its_requests_and_no_others() {
    let options = EngineOptions { max_running: 2, ..EngineOptions::default() };
    let mut engine = engine_with(STEP, 8, 64, true, options);
    let ids: Vec<_> =
        (0..3).map(|i| engine.submit(Request::new(vec![i], 4)).expect("a request")).collect();
    engine.executor.fails_at = Some(1);
    let mut events = Vec::new();
    engine.step(&mut events).expect("the first step");
    engine.step(&mut events).expect_err("the second step");
    events.extend(finish(&mut engine));
    let ends = events.iter().filter_map(|e| match e {
        Event::Finished(id, reason) => Some((*id, *reason)),
        _ => None,
    });
    let expected = [FinishReason::Failed, FinishReason::Failed, FinishReason::Length];
    assert_eq!(ends.collect::<Vec<_>>(), ids.into_iter().zip(expected).collect::<Vec<_>>());
    engine.audit();
}

#[test]
fn bad_requests_are_refused() {
    let mut engine = engine_with(STEP, 8, 5, false, EngineOptions::default());
    let mut refusal = |tokens: Vec<u32>, max| {
        engine.submit(Request::new(tokens, max)).expect_err("a bad request")
    };
    assert!(matches!(refusal(vec![], 1), EngineError::EmptyPrompt));
    assert!(matches!(refusal(vec![0; 41], 1), EngineError::TooLong { .. }));
    assert!(matches!(refusal(vec![99], 1), EngineError::Token { .. }));
    assert!(matches!(refusal(vec![0; 10], 11), EngineError::CacheTooSmall { .. }));
    let told = Request { logprobs: Some(MOST_TOLD + 1), ..Request::new(vec![0], 1) };
    let refused = engine.submit(told).expect_err("too many log-probabilities");
    assert!(matches!(refused, EngineError::Logprobs { found: 21 }));
}

#[test]
fn the_lowest_priority_ends_though_higher_ones_never_stop_coming() {
    for policy in [Policy::Priority, Policy::PrefillFirst, Policy::DecodeRoundRobin, Policy::Fcfs] {
        let options = EngineOptions { policy, patience: 50, ..EngineOptions::default() };
        let mut engine = engine_with(STEP, 8, 12, false, options);
        let low = Request { priority: 9, ..Request::new(vec![1; 12], 16) };
        let low = engine.submit(low).expect("a request");
        let mut events = Vec::new();
        for i in 0.. {
            while engine.stats().waiting < 2 {
                engine.submit(Request::new(vec![i % 40; 20], 20)).expect("a request");
            }
            engine.step(&mut events).expect("a step");
            if engine.state(low).is_none() {
                break;
            }
            assert!(i < 600, "{policy:?}: still {:?}", engine.state(low));
        }
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let none = EngineOptions::default();
    let refused = |options: EngineOptions| options.check().expect_err("a contradiction");
    let contiguous = EngineOptions { kv: KvMode::Contiguous, ..none };
    assert_eq!(refused(contiguous), OptionsError::PrefixContiguous);
    let off = EngineOptions { kv: KvMode::Off, ..none };
    assert_eq!(refused(off), OptionsError::PrefixOff);
    assert_eq!(refused(EngineOptions { prefix_cache: false, ..off }), OptionsError::AheadOff);
    assert_eq!(refused(EngineOptions { patience: 0, ..none }), OptionsError::NoPatience);
    let alone = EngineOptions { batching: Batching::None, policy: Policy::PrefillFirst, ..none };
    assert_eq!(refused(alone), OptionsError::PolicyAlone(Policy::PrefillFirst));
}

#[test]
fn chunks_fit() {
    let left = |t, s, pairs| Dims { t, b: 1, s, pairs, seqs: 1 };
    assert_eq!(fitting_chunk(100, 0, &left(64, 1000, 10_000)), 64);
    assert_eq!(fitting_chunk(100, 0, &left(64, 1000, 100)), 10);
    assert_eq!(fitting_chunk(100, 90, &left(64, 100, 10_000)), 10);
    assert_eq!(fitting_chunk(1, 99, &left(64, 100, 100)), 1);
    assert_eq!(fitting_chunk(1, 99, &left(64, 100, 99)), 0);
}
