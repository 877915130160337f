//! `infernum check-reproducible`: whether requests get the bits that they get alone.
//!
//! The same requests run alone, one after the other, and then in crowds: with arrivals and cancellations at random,
//! chunks of several sizes, policies, prefixes from the cache, and so little memory that sequences give theirs up.
//! Tokens and the bits of their log-probabilities, which depend on every logit of a row, must be the same.

use std::collections::BTreeMap;

use fastrand::Rng;
use infernum::{Capacity, Loader, Machine, RunOptions, engine_limits};
use infernum_ir::Sym;
use infernum_runtime::{
    Batching, Engine, EngineOptions, Event, PlanExecutor, Policy, Request, RequestId,
    SamplingParams, Stats,
};
use serde::Serialize;

use crate::report::{self, Outcome};
use crate::subject::Subject;

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Requests.
    #[arg(long, value_name = "N", default_value_t = 200)]
    requests: usize,
    /// Requests that run together at most.
    #[arg(long, value_name = "N", default_value_t = 16)]
    sequences: u64,
    /// Tokens of the longest prompt, and to generate at most.
    #[arg(long, value_name = "N", default_value_t = 96)]
    input: usize,
    #[arg(long, value_name = "N", default_value_t = 32)]
    output: usize,
    /// Fixes the random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Try the pipeline of --passes, which does not promise it, to see that the check finds something.
    #[arg(long)]
    as_it_is: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    run: RunOptions,
}

/// A way to run a crowd.
#[derive(Clone, Copy, Debug, Serialize)]
struct Way {
    name: &'static str,
    chunk: usize,
    policy: Policy,
    prefix_cache: bool,
    /// Part of the memory that all sequences would take at their longest.
    memory: f64,
}

const WAYS: [Way; 4] = [
    Way {
        name: "as served",
        chunk: usize::MAX,
        policy: Policy::Fcfs,
        prefix_cache: true,
        memory: 1.0,
    },
    Way {
        name: "small chunks",
        chunk: 7,
        policy: Policy::DecodeRoundRobin,
        prefix_cache: false,
        memory: 1.0,
    },
    Way {
        name: "little memory",
        chunk: 40,
        policy: Policy::Fcfs,
        prefix_cache: true,
        memory: 0.05,
    },
    Way {
        name: "prompts first",
        chunk: 64,
        policy: Policy::PrefillFirst,
        prefix_cache: true,
        memory: 0.5,
    },
];

/// What came of a request: each token, and the bits of its log-probability and of the likeliest ones.
type Answer = Vec<(u32, Vec<u32>)>;

/// The answer to each request, in order, and whether it ended by itself.
type Answers = Vec<(Answer, bool)>;

#[derive(Serialize)]
struct Verdict {
    way: Way,
    requests: usize,
    tokens: usize,
    cancelled: usize,
    preemptions: u64,
    prefix_hits: u64,
    steps: u64,
    differing: usize,
}

/// Most requests: all of them and what they generate are kept.
const MAX_REQUESTS: usize = 1 << 16;

/// Checks; an error where a request's bits depended on others.
pub fn run(args: &Args) -> Outcome {
    if !(1..=MAX_REQUESTS).contains(&args.requests) || args.input == 0 || args.output == 0 {
        let message = format!(
            "--requests, --input and --output: expected at least 1, and at most {MAX_REQUESTS} requests"
        );
        return Err(message.into());
    }
    let machine = Machine::open(args.run.device)?;
    let model = args.subject.open()?;
    let mut compile = args.subject.model.compile.clone();
    compile.reproducible |= !args.as_it_is;
    let capacity = Capacity::new(args.sequences, args.input.saturating_add(args.output) as u64);
    let progress = report::progress();
    let loader = Loader::new(&model, &compile, &args.run, &machine).with_progress(&progress);
    let mut executor = loader.load(loader.plan(Sym::B, capacity)?, capacity)?;
    let requests = requests(args, executor.plan().vocabulary() as u32);

    let alone =
        EngineOptions { batching: Batching::None, prefix_cache: false, ..EngineOptions::default() };
    let limits = engine_limits(&*executor, loader.chunk(), capacity);
    let mut engine = Engine::new(executor, limits, alone)?;
    let mut calm = Rng::with_seed(args.seed);
    let (expected, _) = crowd(&mut engine, &requests, &mut calm, false)?;
    executor = engine.into_executor();

    let mut verdicts = Vec::new();
    for way in WAYS {
        let mut limits = engine_limits(&*executor, loader.chunk().min(way.chunk), capacity);
        let least = Capacity::one(capacity.max_length).blocks(&executor.groups(), loader.chunk());
        limits.blocks = ((limits.blocks as f64 * way.memory) as usize).max(least);
        let Way { policy, prefix_cache, .. } = way;
        let options = EngineOptions { policy, prefix_cache, ..EngineOptions::default() };
        let mut engine = Engine::new(executor, limits, options)?;
        let mut rng = Rng::with_seed(args.seed);
        let (found, stats) = crowd(&mut engine, &requests, &mut rng, true)?;
        executor = engine.into_executor();
        let verdict = compare(way, &expected, &found, stats);
        if !args.json {
            report::line(&verdict.to_string())?;
        }
        verdicts.push(verdict);
    }
    if args.json {
        report::json(&verdicts)?;
    }
    let differing: usize = verdicts.iter().map(|v| v.differing).sum();
    if differing > 0 {
        return Err(format!("{differing} request(s) got other bits than alone").into());
    }
    Ok(())
}

/// Prompts of all lengths, some of which begin alike; greedy, sampled and with penalties.
fn requests(args: &Args, vocab: u32) -> Vec<Request> {
    let mut rng = Rng::with_seed(args.seed);
    let shared: Vec<u32> = (0..args.input).map(|_| rng.u32(..vocab)).collect();
    let request = |i: usize| {
        let length = rng.usize(1..=args.input);
        let same = if i.is_multiple_of(3) { rng.usize(..=length) } else { 0 };
        let mut tokens = shared[..same].to_vec();
        tokens.extend((same..length).map(|_| rng.u32(..vocab)));
        let mut sampling = SamplingParams { seed: i as u64, ..SamplingParams::default() };
        match i % 4 {
            1 => sampling.temperature = 0.8,
            2 => sampling.frequency_penalty = 0.5,
            _ => {}
        }
        let max_tokens = rng.usize(1..=args.output);
        Request { sampling, logprobs: Some(4), ..Request::new(tokens, max_tokens) }
    };
    (0..args.requests).map(request).collect()
}

/// Runs the requests, which arrive a few at a time; some are cancelled where the crowd is `rough`.
fn crowd(
    engine: &mut Engine<Box<dyn PlanExecutor>>,
    requests: &[Request],
    rng: &mut Rng,
    rough: bool,
) -> Result<(Answers, Stats), Box<dyn std::error::Error>> {
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let (mut arrived, mut ended) = (Vec::new(), BTreeMap::new());
    let mut events = Vec::new();
    while arrived.len() < requests.len() || !engine.is_idle() {
        let coming = if rough { rng.usize(..4) } else { requests.len() };
        for request in requests.iter().skip(arrived.len()).take(coming) {
            let id = engine.submit(request.clone())?;
            answers.insert(id, Answer::new());
            arrived.push(id);
        }
        if rough && !arrived.is_empty() && rng.usize(..40) == 0 {
            let id = arrived[rng.usize(..arrived.len())];
            if let std::collections::btree_map::Entry::Vacant(end) = ended.entry(id) {
                engine.cancel(id);
                end.insert(false);
            }
        }
        engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token(id, token, logprobs) => {
                    let told = logprobs.iter().flat_map(|l| {
                        let top = l.top.iter().map(|(_, p)| *p);
                        top.chain([l.logprob]).map(f32::to_bits).collect::<Vec<_>>()
                    });
                    answers.entry(id).or_default().push((token, told.collect()));
                }
                Event::Finished(id, _) => {
                    ended.insert(id, true);
                }
                _ => {}
            }
        }
    }
    let whole = |id: &RequestId| ended.get(id).copied().unwrap_or(false);
    Ok((answers.into_iter().map(|(id, answer)| (answer, whole(&id))).collect(), engine.stats()))
}

fn compare(
    way: Way,
    expected: &[(Answer, bool)],
    found: &[(Answer, bool)],
    stats: Stats,
) -> Verdict {
    let same = |((expected, _), (found, whole)): &(&(Answer, bool), &(Answer, bool))| {
        expected.starts_with(found) && (!whole || found.len() == expected.len())
    };
    Verdict {
        way,
        requests: found.len(),
        tokens: found.iter().map(|(answer, _)| answer.len()).sum(),
        cancelled: found.iter().filter(|(_, whole)| !whole).count(),
        preemptions: stats.preemptions,
        prefix_hits: stats.prefix_hits,
        steps: stats.steps,
        differing: expected.iter().zip(found).filter(|pair| !same(pair)).count(),
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Verdict {
            way,
            requests,
            tokens,
            cancelled,
            preemptions,
            prefix_hits,
            steps,
            differing,
        } = self;
        let word = if *differing == 0 { "ok  " } else { "FAIL" };
        write!(
            f,
            "{word} {}: {differing} of {requests} requests differ; {tokens} tokens in {steps} steps, {cancelled} cancelled, \
             {preemptions} preemptions, {prefix_hits} prompt tokens found in the cache",
            way.name
        )
    }
}
