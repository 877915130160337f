//! `infernum bench`: prefill and decode speed, against this machine's read ceiling.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use infernum_codegen::Plan;
use infernum_frontend_hf::{Config, Model};
use infernum_ir::Sym;
use infernum_runtime::{CheckpointWeights, Executor, RandomWeights, StepInputs};
use serde::Serialize;

use crate::args::ModelArgs;
use crate::report::{self, Outcome};
use crate::session::{self, RunArgs, Speed};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    run: RunArgs,
    /// A config.json to run with random weights, instead of a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Tokens of prompt.
    #[arg(long, value_name = "N", default_value_t = 128)]
    prompt: usize,
    /// Tokens to decode, one at a time, after the prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    generate: usize,
    /// Measured repetitions, after one to warm up; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Show the time spent in each op, over all runs.
    #[arg(long)]
    profile: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Figures {
    model: String,
    weights: &'static str,
    threads: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    decode_ms_per_token: f64,
    /// Bytes that decoding one token must read: the weights, and the cache at mid-length.
    bytes_per_token: u64,
    decode_gb_per_second: f64,
    read_ceiling_gb_per_second: f64,
    decode_fraction_of_ceiling: f64,
    weight_bytes: u64,
    kv_bytes: u64,
    peak_memory_bytes: Option<u64>,
    load_seconds: f64,
    runs: Vec<Run>,
    /// Seconds spent in each op over all runs, the longest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    profile: Vec<(String, f64)>,
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct Run {
    pub(super) prefill_tokens_per_second: f64,
    pub(super) decode_tokens_per_second: f64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let ceiling = read_ceiling();
    let model = model(args.config.as_deref(), &args.model)?;
    let max_length = args.prompt + args.generate;
    if args.prompt == 0 || args.generate == 0 {
        return Err("--prompt and --generate: expected at least 1".into());
    }
    let plan = session::plan(&model, &args.model, &args.run, Sym::B, max_length as u64)?;
    let figures = measure(args, &model, plan, max_length, ceiling)?;
    if args.json {
        return report::json(&figures);
    }
    print(&figures)
}

/// The model to measure: a bare config with random weights to come, or a folder.
pub(super) fn model(config: Option<&Path>, args: &ModelArgs) -> Result<Model, Box<dyn Error>> {
    let Some(path) = config else { return args.open() };
    let shown = path.display().to_string();
    let json = std::fs::read(path).map_err(|e| format!("{shown}: {e}"))?;
    let config = Config::parse(&shown, &json)?;
    Ok(Model::from_config(config, args.spec.as_deref(), &args.library())?)
}

fn measure(
    args: &Args,
    model: &Model,
    plan: Plan,
    max_length: usize,
    ceiling: f64,
) -> Result<Figures, Box<dyn Error>> {
    let start = Instant::now();
    let summary = plan.summary();
    let (kv_row, vocab) = (plan.kv_bytes_per_token(), vocab(&plan));
    let bytes_per_token =
        decode_weight_bytes(&plan) + kv_row * (args.prompt + args.generate / 2) as u64;
    let weights = if model.checkpoint.is_some() { "checkpoint" } else { "random" };
    let mut executor = if let Some(checkpoint) = &model.checkpoint {
        session::warm(checkpoint);
        let weights = CheckpointWeights::new(checkpoint);
        session::executor(plan, &weights, &args.run, max_length, args.profile)?
    } else {
        let random = RandomWeights::of(&plan, 1);
        session::executor(plan, &random, &args.run, max_length, args.profile)?
    };
    let load_seconds = start.elapsed().as_secs_f64();
    let lengths = Lengths {
        prompt: args.prompt,
        generate: args.generate,
        chunk: args.run.chunk.max(1),
        vocab,
    };
    let mut runs = Vec::new();
    for i in 0..=args.runs.max(1) {
        let run = once(&mut executor, &lengths)?;
        if i > 0 {
            runs.push(run); // the first one warms up
        }
    }
    let prefill = median(runs.iter().map(|r| r.prefill_tokens_per_second));
    let decode = median(runs.iter().map(|r| r.decode_tokens_per_second));
    let gb = bytes_per_token as f64 * decode / 1e9;
    Ok(Figures {
        model: args
            .config
            .as_ref()
            .map_or_else(|| model.files.name().to_owned(), |path| path.display().to_string()),
        weights,
        threads: executor.threads(),
        prompt_tokens: args.prompt,
        generated_tokens: args.generate,
        prefill_tokens_per_second: prefill,
        decode_tokens_per_second: decode,
        decode_ms_per_token: 1e3 / decode,
        bytes_per_token,
        decode_gb_per_second: gb,
        read_ceiling_gb_per_second: ceiling,
        decode_fraction_of_ceiling: gb / ceiling,
        weight_bytes: summary.weight_bytes,
        kv_bytes: kv_row * (max_length.next_multiple_of(StepInputs::BLOCK_SIZE)) as u64,
        peak_memory_bytes: peak_memory(),
        load_seconds,
        runs,
        profile: executor.profile().into_iter().map(|(op, t)| (op, t.as_secs_f64())).collect(),
    })
}

/// What is measured: tokens of prompt, computed in chunks, and tokens decoded.
pub(super) struct Lengths {
    pub(super) prompt: usize,
    pub(super) generate: usize,
    pub(super) chunk: usize,
    pub(super) vocab: u64,
}

impl Lengths {
    /// Token `i` of the prompt and the answer: spread over the vocabulary.
    pub(super) fn token(&self, i: usize) -> u32 {
        (i as u64 * 7919 % self.vocab.max(1)) as u32
    }
}

/// One prompt and one answer.
pub(super) fn once<E: Executor>(
    executor: &mut E,
    lengths: &Lengths,
) -> Result<Run, Box<dyn Error>> {
    let length = lengths.prompt + lengths.generate;
    let blocks: Vec<u32> = (0..length.div_ceil(StepInputs::BLOCK_SIZE) as u32).collect();
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    let mut step = |from: usize, to: usize| -> Result<(), Box<dyn Error>> {
        let tokens: Vec<u32> = (from..to).map(|i| lengths.token(i)).collect();
        inputs.clear();
        inputs.push(&tokens, to, &blocks)?;
        let ticket = executor.submit(&inputs)?;
        std::hint::black_box(executor.wait(ticket)?);
        Ok(())
    };
    let start = Instant::now();
    let mut done = 0;
    while done < lengths.prompt {
        let next = (done + lengths.chunk).min(lengths.prompt);
        step(done, next)?;
        done = next;
    }
    let prefill = Speed::since(start, lengths.prompt);
    let start = Instant::now();
    for i in lengths.prompt..length {
        step(i, i + 1)?;
    }
    let decode = Speed::since(start, lengths.generate);
    Ok(Run { prefill_tokens_per_second: prefill.rate(), decode_tokens_per_second: decode.rate() })
}

pub(super) fn vocab(plan: &Plan) -> u64 {
    plan.vocabulary().max(1)
}

/// Weights that a decode step reads whole: all but the tables from which rows are picked.
fn decode_weight_bytes(plan: &Plan) -> u64 {
    let mut read = vec![false; plan.weights.len()];
    let decode = plan.schedule(1, true).map_or(&[][..], |s| &plan.schedules[s].calls);
    for call in decode {
        for launch in &plan.programs[call.program as usize].launches {
            if launch.op == "embedding" {
                continue;
            }
            for operand in launch.operands.iter().flatten() {
                if let infernum_codegen::Arg::Weight(slot) = operand.arg {
                    read[call.weights[slot as usize] as usize] = true;
                }
            }
        }
    }
    let bytes = plan.weights.iter().zip(read).filter(|(_, read)| *read);
    bytes.map(|(w, _)| w.ty.bytes(&infernum_ir::Dims::default())).sum()
}

pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// GB/s at which all cores together read memory that no cache holds.
fn read_ceiling() -> f64 {
    const WORDS: usize = 1 << 27; // 1 GiB
    let data = vec![1u64; WORDS];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(WORDS.div_ceil(threads)) {
                scope.spawn(|| {
                    std::hint::black_box(part.iter().fold(0u64, |a, b| a.wrapping_add(*b)))
                });
            }
        });
        (WORDS * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..4).map(|_| pass()).fold(0.0, f64::max)
}

/// The most memory this process has held, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn print(f: &Figures) -> Outcome {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    report::line(&format!("{} ({} weights, {} threads)", f.model, f.weights, f.threads))?;
    report::line(&format!(
        "prefill  {:>8.1} tok/s  ({} tokens)",
        f.prefill_tokens_per_second, f.prompt_tokens
    ))?;
    report::line(&format!(
        "decode   {:>8.1} tok/s  ({} tokens, {:.2} ms each)",
        f.decode_tokens_per_second, f.generated_tokens, f.decode_ms_per_token
    ))?;
    report::line(&format!(
        "reading  {:>8.1} GB/s   ({:.0}% of the {:.1} GB/s that this machine reads)",
        f.decode_gb_per_second,
        f.decode_fraction_of_ceiling * 100.0,
        f.read_ceiling_gb_per_second
    ))?;
    let peak =
        f.peak_memory_bytes.map_or_else(String::new, |b| format!(", peak {:.0} MiB", mib(b)));
    report::line(&format!(
        "memory   weights {:.0} MiB, KV cache {:.0} MiB{peak}; loaded in {:.2} s",
        mib(f.weight_bytes),
        mib(f.kv_bytes),
        f.load_seconds
    ))?;
    let total: f64 = f.profile.iter().map(|(_, t)| t).sum();
    for (op, time) in &f.profile {
        report::line(&format!(
            "  {op:<14} {:>9.1} ms  {:>5.1}%",
            time * 1e3,
            time / total * 100.0
        ))?;
    }
    Ok(())
}
