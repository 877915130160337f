//! Linear layers of a TinyLlama-1.1B shape, without the rest of the model.
//!
//! `cargo run --release -p infernum-runtime --example linear_bench [-- OPTIONS]`
//!
//! - `--dtype bf16|f16|f32` of weights (bf16), `--act bf16|f16|f32` of activations (bf16)
//! - `--level portable|avx2|avx512|avx512bf16`, at most (the best)
//! - `--file FILE`: map the weights from FILE, which is written if it is not there
//! - `--shift N`: bytes by which the weights are off alignment (0)
//! - `--fused`: q, k, v as one weight of three segments, and gate, up as one of two

use std::error::Error;
use std::time::Instant;

use half::{bf16, f16};
use infernum_runtime::cpu::simd::{
    Act, ActMut, Float, Isa, Level, Weights, for_each_block, linear, sum_squares, with_team,
};

const LAYERS: usize = 22;
const HIDDEN: usize = 2048;
const KV: usize = 256;
const FFN: usize = 5632;
const VOCAB: usize = 32000;
const ROUNDS: usize = 5;

/// A weight's shape `[rows, columns]`, in one segment or more, and where its bytes begin.
struct Layer {
    offset: usize,
    segments: Vec<usize>,
    columns: usize,
}

fn model(dtype: Float, fused: bool) -> (Vec<Layer>, usize) {
    let groups: [(&[usize], usize); 4] =
        [(&[HIDDEN, KV, KV], HIDDEN), (&[HIDDEN], HIDDEN), (&[FFN, FFN], HIDDEN), (&[HIDDEN], FFN)];
    let mut shapes: Vec<(Vec<usize>, usize)> = Vec::new();
    for _ in 0..LAYERS {
        for (rows, columns) in groups {
            if fused {
                shapes.push((rows.to_vec(), columns));
            } else {
                shapes.extend(rows.iter().map(|&r| (vec![r], columns)));
            }
        }
    }
    shapes.push((vec![VOCAB], HIDDEN));
    let mut offset = 0;
    let layers = shapes.into_iter().map(|(segments, columns)| {
        let layer = Layer { offset, segments, columns };
        offset += layer.segments.iter().sum::<usize>() * columns * dtype.size();
        layer
    });
    (layers.collect(), offset)
}

struct Options {
    dtype: Float,
    act: Float,
    isa: Isa,
    file: Option<String>,
    shift: usize,
    fused: bool,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let float = |name: &str| match name {
        "bf16" => Ok(Float::Bf16),
        "f16" => Ok(Float::F16),
        "f32" => Ok(Float::F32),
        _ => Err(format!("no dtype {name}")),
    };
    let mut o = Options {
        dtype: Float::Bf16,
        act: Float::Bf16,
        isa: Isa::best(),
        file: None,
        shift: 0,
        fused: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--dtype" => o.dtype = float(&value()?)?,
            "--act" => o.act = float(&value()?)?,
            "--level" => {
                o.isa = Isa::at_most(match value()?.as_str() {
                    "portable" => Level::Portable,
                    "avx2" => Level::Avx2,
                    "avx512" => Level::Avx512,
                    _ => Level::Avx512Bf16,
                });
            }
            "--file" => o.file = Some(value()?),
            "--shift" => o.shift = value()?.parse()?,
            "--fused" => o.fused = true,
            _ => return Err(format!("no option {arg}").into()),
        }
    }
    Ok(o)
}

/// Small pseudo-random weights; a period of 1 MiB is as good as none to a cache.
fn fill(dtype: Float, memory: &mut [u8]) {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.05
    };
    let pattern: Vec<u8> = (0..(1 << 20) / dtype.size())
        .flat_map(|_| match dtype {
            Float::F32 => next().to_le_bytes().to_vec(),
            Float::Bf16 => bf16::from_f32(next()).to_le_bytes().to_vec(),
            Float::F16 => f16::from_f32(next()).to_le_bytes().to_vec(),
        })
        .collect();
    for chunk in memory.chunks_mut(pattern.len()) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
}

/// Activations of one type.
struct Buffer {
    dtype: Float,
    f32: Vec<f32>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl Buffer {
    fn new(dtype: Float, len: usize) -> Self {
        let values = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0);
        Buffer {
            dtype,
            f32: values.clone().collect(),
            bf16: values.clone().map(bf16::from_f32).collect(),
            f16: values.map(f16::from_f32).collect(),
        }
    }
    fn read(&self, len: usize) -> Act<'_> {
        match self.dtype {
            Float::F32 => Act::F32(&self.f32[..len]),
            Float::Bf16 => Act::Bf16(&self.bf16[..len]),
            Float::F16 => Act::F16(&self.f16[..len]),
        }
    }
    fn write(&mut self, len: usize) -> ActMut<'_> {
        match self.dtype {
            Float::F32 => ActMut::F32(&mut self.f32[..len]),
            Float::Bf16 => ActMut::Bf16(&mut self.bf16[..len]),
            Float::F16 => ActMut::F16(&mut self.f16[..len]),
        }
    }
}

/// The fastest of some runs, in seconds.
fn best(mut run: impl FnMut()) -> f64 {
    let times = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// Reads all memory once, on all threads.
fn stream(isa: Isa, memory: &[u8]) {
    let (_, memory, _) = bytemuck::pod_align_to::<u8, f32>(memory);
    let chunk = 1 << 16;
    for_each_block(memory.len() / chunk, |i| {
        std::hint::black_box(sum_squares(isa, Act::F32(&memory[i * chunk..][..chunk])));
    });
}

fn main() -> Result<(), Box<dyn Error>> {
    let o = options()?;
    let (layers, bytes) = model(o.dtype, o.fused);
    let memory: Box<dyn AsRef<[u8]> + Send + Sync> = if let Some(file) = &o.file {
        if !std::path::Path::new(file).exists() {
            let mut memory = vec![0; bytes + 64];
            fill(o.dtype, &mut memory);
            std::fs::write(file, memory)?;
        }
        map(file)?
    } else {
        let mut memory = vec![0; bytes + 64];
        fill(o.dtype, &mut memory);
        Box::new(memory)
    };
    let weights =
        (*memory).as_ref().get(o.shift..o.shift + bytes).ok_or("the file is too short")?;
    let pool = rayon::ThreadPoolBuilder::new().build()?;
    pool.install(|| with_team(|| bench(&o, &layers, weights)));
    Ok(())
}

#[allow(unsafe_code, reason = "a file of this bench's own, which nothing writes meanwhile")]
fn map(file: &str) -> Result<Box<dyn AsRef<[u8]> + Send + Sync>, Box<dyn Error>> {
    // SAFETY: see the reason above.
    let map = unsafe { memmap2::Mmap::map(&std::fs::File::open(file)?)? };
    #[cfg(unix)]
    map.advise(memmap2::Advice::WillNeed)?;
    Ok(Box::new(map))
}

fn bench(o: &Options, layers: &[Layer], weights: &[u8]) {
    let gb = weights.len() as f64 / 1e9;
    let macs = gb * 1e9 / o.dtype.size() as f64;
    println!("{:?}, {gb:.2} GB of {:?}, {:?} activations", o.isa.level(), o.dtype, o.act);
    let calls = 10_000;
    let fork = best(|| (0..calls).for_each(|_| for_each_block(2, |i| _ = std::hint::black_box(i))));
    println!("fork: {:.2} us", fork / f64::from(calls) * 1e6);
    let ceiling = gb / best(|| stream(o.isa, weights));
    println!("read ceiling: {ceiling:.1} GB/s");
    for tokens in [1, 2, 4, 8, 128] {
        let mut x = Buffer::new(o.act, tokens * FFN);
        let mut y = Buffer::new(o.act, tokens * VOCAB);
        x.f32.shrink_to_fit();
        let seconds = best(|| {
            for layer in layers {
                let row = layer.columns * o.dtype.size();
                let mut rest = &weights[layer.offset..];
                let mut segments = Vec::new();
                for rows in &layer.segments {
                    let (segment, after) = rest.split_at(rows * row);
                    segments.push(segment);
                    rest = after;
                }
                let Ok(w) = Weights::new(o.dtype, layer.columns, &segments) else { continue };
                let (n, k) = (w.rows(), w.columns());
                linear(o.isa, x.read(tokens * k), tokens, &w, None, y.write(tokens * n));
            }
        });
        let rate = gb / seconds;
        println!(
            "T = {tokens:3}: {:7.1} tok/s, {rate:5.1} GB/s ({:.2} of the ceiling), {:6.1} GFLOP/s",
            tokens as f64 / seconds,
            rate / ceiling,
            2e-9 * macs * tokens as f64 / seconds,
        );
    }
}
