//! `infernum bench`: prefill and decode speed, against this machine's read ceiling.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use infernum::{Capacity, Loader, Machine, RunOptions};
use infernum_codegen::cuda::{Compiler, Device, Library, ceiling};
use infernum_codegen::{Arg, Plan, Weight};
use infernum_ir::{Dims, Sym};
use infernum_runtime::cuda::{self, CEILING_BYTES, Gpu};
use infernum_runtime::{PickedRows, PlanExecutor, StepInputs};
use serde::Serialize;

use crate::bench_serve;
use crate::process::peak_memory;
use crate::report::{self, Outcome};
use crate::steps::{Lengths, Run, median, once, picked_rows, vocab};
use crate::subject::Subject;

/// The command line.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Tokens of prompt; several to measure each.
    #[arg(long, value_name = "N", default_value = "128", value_delimiter = ',')]
    prompt: Vec<usize>,
    /// Tokens to decode, one at a time, after the prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    generate: usize,
    /// Sequences that are decoded together; several to measure each.
    #[arg(long, value_name = "N", default_value = "1", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Measured repetitions, after one to warm up; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Show the time spent in each op, over all runs.
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

#[derive(clap::Subcommand)]
enum Command {
    /// Drive an OpenAI server with many clients, and keep the time.
    Serve(Box<bench_serve::Args>),
}

/// What was measured.
#[derive(Serialize)]
struct Report {
    model: String,
    weights: &'static str,
    device: String,
    weight_bytes: u64,
    peak_memory_bytes: Option<u64>,
    load_seconds: f64,
    read_ceiling_gb_per_second: f64,
    cases: Vec<Figures>,
    /// Seconds spent in each op over all runs, the longest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    profile: Vec<(String, f64)>,
}

/// Figures of one size.
#[derive(Serialize)]
struct Figures {
    batch: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    prefill_ms: f64,
    prefill_tokens_per_second: f64,
    decode_ms_per_step: f64,
    decode_tokens_per_second: f64,
    /// Bytes that a decode step must read: the weights, of experts those that are hit, and the cache at
    /// mid-length.
    bytes_per_step: u64,
    /// Experts that a layer's tokens hit in the last step, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts_hit: Option<f64>,
    decode_gb_per_second: f64,
    /// Nothing where no ceiling was found.
    decode_fraction_of_ceiling: Option<f64>,
    kv_bytes: u64,
    runs: Vec<Run>,
}

/// Measures.
pub fn run(args: &Args) -> Outcome {
    if let Some(Command::Serve(args)) = &args.command {
        return bench_serve::run(args);
    }
    let machine = Machine::open(args.run.device)?;
    let ceiling = match &machine {
        Machine::Cpu => read_ceiling(),
        Machine::Gpu(gpu) => gpu_ceiling(gpu, args)?,
    };
    let model = args.subject.open()?;
    let most = |list: &[usize]| list.iter().copied().max().unwrap_or(1);
    if args.prompt.contains(&0) || args.batch.contains(&0) || args.generate == 0 {
        return Err("--prompt, --batch and --generate: expected at least 1".into());
    }
    let longest = most(&args.prompt).saturating_add(args.generate) as u64;
    let capacity = Capacity::new(most(&args.batch) as u64, longest);
    let run = RunOptions { profile: args.profile, ..args.run.clone() };
    let progress = report::progress();
    let loader = Loader::new(&model, &args.subject, &run, &machine).with_progress(&progress);
    let plan = loader.plan(Sym::B, capacity)?;
    let report = measure(args, &loader, plan, capacity, ceiling)?;
    if args.json {
        return report::json(&report);
    }
    lines(&report).iter().try_for_each(|line| report::line(line))
}

fn gpu_ceiling(gpu: &Arc<Gpu>, args: &Args) -> Result<f64, Box<dyn Error>> {
    let device = Device::of(gpu.sm, gpu.sms);
    let library = Library::new(args.subject.data.as_deref());
    let (launch, run, kernel) = ceiling(&library, &device, CEILING_BYTES)?;
    let name = kernel.name.clone();
    let (cubins, _) = args.run.kernels().cubins(&[kernel], &device.arch, &mut Compiler::find)?;
    let cubin = cubins.first().ok_or("no kernel was compiled")?;
    Ok(cuda::read_ceiling(gpu, (&launch, &run), (cubin, &name), &device)? / 1e9)
}

fn measure(
    args: &Args,
    loader: &Loader<'_>,
    plan: Plan,
    capacity: Capacity,
    ceiling: f64,
) -> Result<Report, Box<dyn Error>> {
    let (model, start) = (loader.model, Instant::now());
    let mut report = Report {
        model: args.subject.name(model),
        weights: if model.checkpoint.is_some() { "checkpoint" } else { "random" },
        device: String::new(),
        weight_bytes: plan.summary().weight_bytes,
        peak_memory_bytes: None,
        load_seconds: 0.0,
        read_ceiling_gb_per_second: ceiling,
        cases: Vec::new(),
        profile: Vec::new(),
    };
    let mut executor = loader.load(plan, capacity)?;
    report.device = executor.describe();
    report.load_seconds = start.elapsed().as_secs_f64();
    for &prompt in &args.prompt {
        for &batch in &args.batch {
            let case = case(args, loader, &mut *executor, prompt, batch, ceiling)?;
            report.cases.push(case);
        }
    }
    report.peak_memory_bytes = peak_memory(std::process::id());
    if args.profile {
        let profile = executor.profile().into_iter();
        report.profile = profile.map(|(op, t)| (op, t.as_secs_f64())).collect();
    }
    Ok(report)
}

fn case(
    args: &Args,
    loader: &Loader<'_>,
    executor: &mut dyn PlanExecutor,
    prompt: usize,
    batch: usize,
    ceiling: f64,
) -> Result<Figures, Box<dyn Error>> {
    let plan = executor.plan();
    let kv_row = plan.kv_bytes_per_token();
    let rows = (prompt.saturating_add(args.generate / 2)).saturating_mul(batch) as u64;
    let lengths = Lengths {
        prompt,
        generate: args.generate,
        batch,
        chunk: loader.chunk(),
        vocab: vocab(plan),
    };
    let mut runs = Vec::new();
    for i in 0..=args.runs.max(1) {
        let run = once(executor, &lengths)?;
        if i > 0 {
            runs.push(run); // the first one warms up
        }
    }
    let picked = picked_rows(executor, &lengths)?.unwrap_or_default();
    let bytes_per_step = decode_weight_bytes(executor.plan(), batch as u64, &picked)
        .saturating_add(kv_row.saturating_mul(rows));
    let prefill = median(runs.iter().map(|r| r.prefill_tokens_per_second));
    let decode = median(runs.iter().map(|r| r.decode_tokens_per_second));
    let gb = bytes_per_step as f64 * decode / batch as f64 / 1e9;
    let length = (prompt + args.generate).next_multiple_of(StepInputs::BLOCK_SIZE);
    Ok(Figures {
        batch,
        prompt_tokens: prompt,
        generated_tokens: args.generate,
        prefill_ms: 1e3 * (prompt * batch) as f64 / prefill,
        prefill_tokens_per_second: prefill,
        decode_ms_per_step: 1e3 * batch as f64 / decode,
        decode_tokens_per_second: decode,
        bytes_per_step,
        experts_hit: experts_hit(&picked),
        decode_gb_per_second: gb,
        decode_fraction_of_ceiling: Some(gb / ceiling).filter(|part| part.is_finite()),
        kv_bytes: kv_row * (length * batch) as u64,
        runs,
    })
}

/// Bytes of weights that a decode step reads: all rows, or those that were `picked`. Where that is not known,
/// experts count whole, and tables, of which a step reads few rows, nothing.
fn decode_weight_bytes(plan: &Plan, batch: u64, picked: &[PickedRows]) -> u64 {
    let mut read = vec![0.0f64; plan.weights.len()];
    let decode = plan.schedule(batch, true).map_or(&[][..], |s| &plan.schedules[s].calls);
    for call in decode {
        for launch in &plan.programs[call.program as usize].launches {
            let mut names = launch.names.iter().take(launch.operands.len());
            let by_number = names.any(|name| name == "ids");
            if by_number && (launch.op == "embedding" || !picked.is_empty()) {
                continue;
            }
            for operand in launch.operands.iter().flatten() {
                if let Arg::Weight(slot) = operand.arg {
                    read[call.weights[slot as usize] as usize] = 1.0;
                }
            }
        }
    }
    for p in picked {
        let part = p.rows as f64 / p.of.max(1) as f64;
        read[p.weight] = read[p.weight].max(part);
    }
    let bytes = |w: &Weight| w.ty.bytes(&Dims::default()) as f64;
    plan.weights.iter().zip(read).map(|(w, part)| bytes(w) * part).sum::<f64>() as u64
}

/// How many experts a layer's tokens hit, on average.
fn experts_hit(picked: &[PickedRows]) -> Option<f64> {
    let experts = || picked.iter().filter(|p| p.op != "embedding");
    let hit: usize = experts().map(|p| p.rows).sum();
    (hit > 0).then(|| hit as f64 / experts().count() as f64)
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

/// The report for people.
fn lines(r: &Report) -> Vec<String> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut lines = vec![format!("{} ({} weights) on {}", r.model, r.weights, r.device)];
    for f in &r.cases {
        lines.push(format!(
            "batch {}, {} tokens of prompt, {} generated",
            f.batch, f.prompt_tokens, f.generated_tokens
        ));
        lines.push(format!(
            "prefill  {:>9.1} tok/s  {:>9.2} ms",
            f.prefill_tokens_per_second, f.prefill_ms
        ));
        lines.push(format!(
            "decode   {:>9.1} tok/s  {:>9.3} ms a step",
            f.decode_tokens_per_second, f.decode_ms_per_step
        ));
        let (gb, ceiling) = (f.decode_gb_per_second, r.read_ceiling_gb_per_second);
        lines.push(format!(
            "reading  {gb:>9.1} GB/s   {:>10} of the {ceiling:.1} GB/s that this machine reads",
            report::percent(gb, ceiling, 0)
        ));
        let hit = |hit| format!("experts  {hit:>9.1} of each layer hit by a step");
        lines.extend(f.experts_hit.map(hit));
    }
    let peak =
        r.peak_memory_bytes.map_or_else(String::new, |b| format!(", host peak {:.0} MiB", mib(b)));
    let kv = r.cases.iter().map(|f| f.kv_bytes).max().unwrap_or(0);
    lines.push(format!(
        "memory   weights {:.0} MiB, KV cache {:.0} MiB{peak}; loaded in {:.2} s",
        mib(r.weight_bytes),
        mib(kv),
        r.load_seconds
    ));
    let total: f64 = r.profile.iter().map(|(_, t)| t).sum();
    lines.extend(r.profile.iter().map(|(op, time)| {
        let share = report::percent(*time, total, 1);
        format!("  {op:<24} {:>9.2} ms  {share:>6}", time * 1e3)
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clocks that tick too seldom, and ceilings that were not found, are no reason to print what is no number.
    #[test]
    fn a_report_of_zeros_has_only_numbers() {
        let figures = Figures {
            batch: 1,
            prompt_tokens: 1,
            generated_tokens: 1,
            prefill_ms: 0.0,
            prefill_tokens_per_second: 0.0,
            decode_ms_per_step: 0.0,
            decode_tokens_per_second: 0.0,
            bytes_per_step: 0,
            experts_hit: None,
            decode_gb_per_second: 0.0,
            decode_fraction_of_ceiling: None,
            kv_bytes: 0,
            runs: Vec::new(),
        };
        let report = Report {
            model: "m".to_owned(),
            weights: "random",
            device: "CPU".to_owned(),
            weight_bytes: 0,
            peak_memory_bytes: None,
            load_seconds: 0.0,
            read_ceiling_gb_per_second: 0.0,
            cases: vec![figures],
            profile: vec![("linear".to_owned(), 0.0), ("add".to_owned(), 0.0)],
        };
        let text = lines(&report).join("\n");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(text.contains("linear") && text.contains('–'), "{text}");
    }

    #[test]
    fn percents() {
        assert_eq!(report::percent(1.0, 8.0, 1), "12.5%");
        for whole in [0.0, f64::NAN] {
            assert_eq!(report::percent(1.0, whole, 0), "–");
            assert_eq!(report::percent(0.0, whole, 0), "–");
        }
    }
}
