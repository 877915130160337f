//! `infernum doctor`.

use infernum_codegen::cuda::Compiler;
use infernum_runtime::cpu::simd::{Isa, Level};
use infernum_runtime::cuda::{Gpu, GpuError};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Machine {
    version: &'static str,
    os: &'static str,
    architecture: &'static str,
    cpu: Option<String>,
    cores: usize,
    vector_kernels: &'static str,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    gpus: Vec<String>,
    cuda: String,
    nvrtc: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let machine = Machine {
        version: env!("CARGO_PKG_VERSION"),
        os: std::env::consts::OS,
        architecture: std::env::consts::ARCH,
        cpu: field("/proc/cpuinfo", "model name"),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        vector_kernels: match Isa::best().level() {
            Level::Portable => "portable",
            Level::Avx2 => "AVX2, FMA, F16C",
            Level::Avx512 => "AVX-512",
            Level::Avx512Bf16 => "AVX-512 with bf16 products",
        },
        memory_bytes: meminfo("MemTotal"),
        memory_available_bytes: meminfo("MemAvailable"),
        gpus: gpus().unwrap_or_default(),
        cuda: gpus().map_or_else(|e| e.to_string(), |found| format!("{} GPU(s)", found.len())),
        nvrtc: Compiler::find().map_or_else(|e| e.to_string(), |c| format!("{c:?}")),
    };
    if args.json {
        return report::json(&machine);
    }
    let gib = |bytes: Option<u64>| match bytes {
        Some(b) => format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
        None => "unknown".to_owned(),
    };
    report::line(&format!(
        "infernum   {} on {} {}",
        machine.version, machine.os, machine.architecture
    ))?;
    let cpu = machine.cpu.as_deref().unwrap_or("unknown processor");
    report::line(&format!("processor  {cpu}, {} core(s)", machine.cores))?;
    report::line(&format!("kernels    {}", machine.vector_kernels))?;
    let (total, free) = (gib(machine.memory_bytes), gib(machine.memory_available_bytes));
    report::line(&format!("memory     {total}, {free} available"))?;
    report::line(&format!("cuda       {}", machine.cuda))?;
    for gpu in &machine.gpus {
        report::line(&format!("           {gpu}"))?;
    }
    report::line(&format!("nvrtc      {}", machine.nvrtc))
}

/// Each GPU with its memory.
fn gpus() -> Result<Vec<String>, GpuError> {
    let describe = |n| {
        let gpu = Gpu::open(n)?;
        let (free, total) = gpu.memory()?;
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        Ok(format!(
            "{n}: {}, sm_{}, {} multiprocessors, {:.1} of {:.1} GiB free, driver for CUDA {}.{}",
            gpu.name,
            gpu.sm,
            gpu.sms,
            gib(free),
            gib(total),
            gpu.driver / 1000,
            gpu.driver % 1000 / 10
        ))
    };
    (0..Gpu::count()?).map(describe).collect()
}

/// The value of the first `name: value` line of a file.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let (_, value) = text.lines().find(|l| l.starts_with(name))?.split_once(':')?;
    Some(value.trim().to_owned())
}

fn meminfo(name: &str) -> Option<u64> {
    let kib: u64 = field("/proc/meminfo", name)?.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
