//! `infernum bench-engine`: many requests through the engine, without a server, and what the host
//! takes of each step.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use infernum::{Capacity, Loader, Machine, RunOptions, engine_limits, named};
use infernum_ir::Sym;
use infernum_runtime::{
    AdapterBanks, AdapterId, AdapterWeights, Engine, EngineOptions, Event, ExecError, Executor,
    GroupKind, PlanExecutor, Policy, Request, SamplingParams, StepInputs, StepOutput, Ticket,
};
use serde::Serialize;

use crate::report::{self, Outcome};
use crate::subject::Subject;

/// The command line.
#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Args {
    /// Requests, all there from the start.
    #[arg(long, value_name = "N", default_value_t = 64)]
    requests: usize,
    /// Tokens of each prompt, and to generate.
    #[arg(long, value_name = "N", default_value_t = 128)]
    input: usize,
    #[arg(long, value_name = "N", default_value_t = 64)]
    output: usize,
    /// Requests that run together at most; several to measure each.
    #[arg(long, value_name = "N", default_value = "32", value_delimiter = ',')]
    sequences: Vec<usize>,
    /// Prompt tokens of a step at most; several to measure each.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    chunks: Vec<usize>,
    /// Who goes first, as for `infernum serve`; several to measure each.
    #[arg(long, value_name = "NAME", default_value = "fcfs", value_delimiter = ',',
          value_parser = named::<Policy>)]
    policy: Vec<Policy>,
    /// So many of the requests have a frequency penalty and tell five log-probabilities of each token;
    /// several to measure each.
    #[arg(long, value_name = "N", default_value = "0", value_delimiter = ',')]
    observed: Vec<usize>,
    /// Low-rank adapters of random numbers that requests take in turn, of the highest rank that there is room for
    /// (--max-loras, --max-lora-rank); several to measure each.
    #[arg(long, value_name = "N", default_value = "0", value_delimiter = ',')]
    adapters: Vec<usize>,
    /// Run the first algorithm that cuBLASLt names for each product instead of the fastest.
    #[arg(long)]
    no_tune_products: bool,
    /// Wait for each step before the next is scheduled.
    #[arg(long)]
    no_ahead: bool,
    /// Tell the time spent in each op, measured launch by launch, which slows all of them down.
    #[arg(long)]
    profile: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    run: RunOptions,
}

/// What was measured.
#[derive(Serialize)]
struct Figures {
    sequences: usize,
    chunk: usize,
    policy: Policy,
    observed: usize,
    adapters: usize,
    ahead: bool,
    blocks: usize,
    seconds: f64,
    /// Until the last of those that are not observed ended.
    unobserved_seconds: f64,
    output_tokens_per_second: f64,
    steps: u64,
    preemptions: u64,
    /// By kind of step: decodes of the full batch, other decodes, with prompts.
    full_decode: Kind,
    other_decode: Kind,
    mixed: Kind,
    /// Seconds spent in each op, the longest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    profile: Vec<(String, f64)>,
}

/// Steps of a kind: how many, their time, and what of it the host does not wait.
#[derive(Default, Serialize)]
struct Kind {
    steps: usize,
    ms_median: f64,
    seconds: f64,
    /// Scheduling, filling the inputs, submitting, and settling the step before.
    host_us_median: f64,
    host_us_p99: f64,
    /// Of that: what the executor takes to submit.
    submit_us_median: f64,
    #[serde(skip)]
    samples: Vec<(Duration, Duration, Duration)>,
}

/// A combination of what is varied.
#[derive(Clone, Copy)]
struct Setting {
    sequences: usize,
    chunk: usize,
    policy: Policy,
    observed: usize,
    adapters: usize,
}

/// An executor with a stopwatch.
struct Timed {
    inner: Box<dyn PlanExecutor>,
    submit: Duration,
    wait: Duration,
    tokens: usize,
    sequences: usize,
}

impl Executor for Timed {
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
        (self.tokens, self.sequences) = (inputs.tokens().len(), inputs.step().seqs.len());
        let start = Instant::now();
        let ticket = self.inner.submit(inputs);
        self.submit += start.elapsed();
        ticket
    }

    fn yields_tokens(&self) -> bool {
        self.inner.yields_tokens()
    }

    fn samples(&self) -> bool {
        self.inner.samples()
    }

    fn feeds(&self) -> bool {
        self.inner.feeds()
    }

    fn defers_picks(&self) -> bool {
        self.inner.defers_picks()
    }

    fn pick(&mut self, ticket: Ticket, inputs: &StepInputs) -> Result<(), ExecError> {
        self.inner.pick(ticket, inputs)
    }

    fn is_reproducible(&self) -> bool {
        self.inner.is_reproducible()
    }

    fn adapter_slots(&self) -> usize {
        self.inner.adapter_slots()
    }

    fn set_adapter(&mut self, slot: usize, weights: &AdapterWeights) -> Result<(), ExecError> {
        self.inner.set_adapter(slot, weights)
    }

    fn groups(&self) -> Vec<GroupKind> {
        self.inner.groups()
    }

    fn takes_whole(&self) -> bool {
        self.inner.takes_whole()
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError> {
        let start = Instant::now();
        let output = self.inner.wait(ticket);
        self.wait += start.elapsed();
        output
    }
}

/// Requests at most: all of them are there from the start.
const MAX_REQUESTS: usize = 1 << 20;

/// Measures.
pub fn run(args: &Args) -> Outcome {
    let machine = Machine::open(args.run.device)?;
    let model = args.subject.open()?;
    if !(1..=MAX_REQUESTS).contains(&args.requests) || args.input == 0 || args.output == 0 {
        let (expected, found) = (MAX_REQUESTS, args.requests);
        return Err(format!(
            "--requests, --input and --output: expected at least 1, and at most {expected} requests, \
             found {found} request(s)"
        )
        .into());
    }
    let most = args.sequences.iter().copied().max().unwrap_or(1).max(1);
    let capacity = Capacity::new(most as u64, args.input.saturating_add(args.output) as u64);
    let progress = report::progress();
    let run = RunOptions { profile: args.profile, ..args.run.clone() };
    let loader = Loader::new(&model, &args.subject, &run, &machine).with_progress(&progress);
    let plan = loader.plan(Sym::B, capacity)?;
    let banks = AdapterBanks::of(&plan);
    let mut executor = loader.load(plan, capacity)?;
    if !args.no_tune_products {
        let start = Instant::now();
        let tuned = executor.tune_products()?;
        let seconds = start.elapsed().as_secs_f64();
        let better: Vec<_> = tuned.iter().filter(|t| t.best_us < t.first_us).collect();
        if !args.json {
            let (all, better) = (tuned.len(), better.len());
            report::text(&format!("{better} of {all} products run faster ({seconds:.1} s)\n"))?;
        }
        for t in better.iter().filter(|_| !args.json) {
            let line = format!("  {:?} {:.1} -> {:.1} us\n", t.shape, t.first_us, t.best_us);
            report::text(&line)?;
        }
    }
    let own = [loader.chunk()];
    let chunks = if args.chunks.is_empty() { &own[..] } else { &args.chunks };
    let mut all = Vec::new();
    let mut profile = BTreeMap::new();
    for (i, setting) in settings(args, chunks, most).iter().enumerate() {
        let options = EngineOptions {
            policy: setting.policy,
            prefix_cache: false,
            ahead: !args.no_ahead,
            max_running: setting.sequences,
            ..EngineOptions::default()
        };
        let limits = engine_limits(&*executor, setting.chunk, capacity);
        let timed = Timed {
            inner: executor,
            submit: Duration::ZERO,
            wait: Duration::ZERO,
            tokens: 0,
            sequences: 0,
        };
        let mut engine = Engine::new(timed, limits, options)?;
        let random = |i| engine.load_adapter(&banks.random(i as u64));
        let adapters = (0..setting.adapters).map(random).collect::<Result<Vec<_>, _>>()?;
        let mut figures = measure(args, &mut engine, setting, &adapters)?;
        executor = engine.into_executor().inner;
        let spent: BTreeMap<String, Duration> = executor.profile().into_iter().collect();
        let own = |(op, time): (&String, &Duration)| {
            let before = profile.get(op).copied().unwrap_or_default();
            (op.clone(), time.saturating_sub(before).as_secs_f64())
        };
        figures.profile = spent.iter().map(own).filter(|(_, seconds)| *seconds > 0.0).collect();
        figures.profile.sort_by(|a, b| b.1.total_cmp(&a.1));
        profile = spent;
        if i == 0 {
            continue; // to warm up
        }
        if !args.json {
            print(&figures)?;
        }
        all.push(figures);
    }
    if args.json { report::json(&all) } else { Ok(()) }
}

/// All combinations, after one of the most sequences that warms up.
fn settings(args: &Args, chunks: &[usize], most: usize) -> Vec<Setting> {
    let mut all = Vec::new();
    for &sequences in &args.sequences {
        for &chunk in chunks {
            for &policy in &args.policy {
                for &observed in &args.observed {
                    let each = args.adapters.iter();
                    let setting =
                        |&adapters| Setting { sequences, chunk, policy, observed, adapters };
                    all.extend(each.map(setting));
                }
            }
        }
    }
    let warm_up = all.first().map(|first| Setting { sequences: most, ..*first });
    warm_up.into_iter().chain(all).collect()
}

fn measure(
    args: &Args,
    engine: &mut Engine<Timed>,
    setting: &Setting,
    adapters: &[AdapterId],
) -> Result<Figures, Box<dyn std::error::Error>> {
    let Setting { sequences, chunk, policy, observed, .. } = *setting;
    let vocab = engine.limits().vocab as u32;
    let sampling = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    let mut unobserved = HashSet::new();
    for i in 0..args.requests {
        let token = |j: usize| (i * 7919 + j * 104_729) as u32 % vocab;
        let mut request = Request::new((0..args.input).map(token).collect(), args.output);
        request.adapter = adapters.get(i % adapters.len().max(1)).copied();
        if i < observed {
            engine.submit(Request { sampling, logprobs: Some(5), ..request })?;
        } else {
            unobserved.insert(engine.submit(request)?);
        }
    }
    let mut kinds: [Kind; 3] = Default::default();
    let (mut tokens, mut unobserved_seconds, start) = (0, 0.0, Instant::now());
    // When the step under way began, and what the executor had taken until then.
    let (mut began, mut submit, mut wait) =
        (start, engine.executor().submit, engine.executor().wait);
    engine.drive(|engine, events| {
        let (time, timed) = (began.elapsed(), engine.executor());
        let kind = match (timed.tokens == timed.sequences, timed.sequences == sequences) {
            (true, true) => 0,
            (true, false) => 1,
            (false, _) => 2,
        };
        let waited = timed.wait.saturating_sub(wait);
        let submitted = timed.submit.saturating_sub(submit);
        kinds[kind].samples.push((time, time.saturating_sub(waited), submitted));
        for event in events {
            tokens += usize::from(matches!(event, Event::Token(..)));
            if matches!(event, Event::Finished(id, _) if unobserved.contains(&id)) {
                unobserved_seconds = start.elapsed().as_secs_f64();
            }
        }
        (began, submit, wait) = (Instant::now(), timed.submit, timed.wait);
        ControlFlow::Continue(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    kinds.iter_mut().for_each(Kind::close);
    let [full_decode, other_decode, mixed] = kinds;
    let stats = engine.stats();
    Ok(Figures {
        sequences,
        chunk,
        policy,
        observed,
        adapters: adapters.len(),
        ahead: engine.options().ahead,
        blocks: stats.total_blocks,
        seconds,
        unobserved_seconds,
        output_tokens_per_second: tokens as f64 / seconds,
        steps: stats.steps,
        preemptions: stats.preemptions,
        full_decode,
        other_decode,
        mixed,
        profile: Vec::new(),
    })
}

impl Kind {
    fn close(&mut self) {
        self.steps = self.samples.len();
        if self.samples.is_empty() {
            return;
        }
        let sorted = |pick: fn(&(Duration, Duration, Duration)) -> Duration| {
            let mut all: Vec<f64> = self.samples.iter().map(|s| pick(s).as_secs_f64()).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (times, host, submit) = (sorted(|s| s.0), sorted(|s| s.1), sorted(|s| s.2));
        let middle = self.samples.len() / 2;
        self.seconds = times.iter().sum();
        self.ms_median = times[middle] * 1e3;
        self.host_us_median = host[middle] * 1e6;
        self.host_us_p99 = host[self.samples.len() * 99 / 100] * 1e6;
        self.submit_us_median = submit[middle] * 1e6;
    }
}

fn print(f: &Figures) -> Outcome {
    report::text(&format!(
        "{} sequences, chunks of {}, {:?}, {} observed, {} adapters: {:.0} output tok/s ({:.2} s, the others {:.2} s, {} steps, {} \
         preemptions, {} blocks)\n",
        f.sequences,
        f.chunk,
        f.policy,
        f.observed,
        f.adapters,
        f.output_tokens_per_second,
        f.seconds,
        f.unobserved_seconds,
        f.steps,
        f.preemptions,
        f.blocks
    ))?;
    let kinds = [("full decode", &f.full_decode), ("decode", &f.other_decode), ("mixed", &f.mixed)];
    for (name, k) in kinds {
        report::text(&format!(
            "  {name:12} {:5} steps {:7.2} s, median {:8.3} ms, host {:5.0} us (P99 {:5.0}), of it \
             submit {:4.0}\n",
            k.steps, k.seconds, k.ms_median, k.host_us_median, k.host_us_p99, k.submit_us_median
        ))?;
    }
    for (op, seconds) in &f.profile {
        report::text(&format!("  {op:<36} {:9.2} ms\n", seconds * 1e3))?;
    }
    Ok(())
}
