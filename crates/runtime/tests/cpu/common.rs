//! Random weights for any module, and the interpreter on the same ones.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use half::{bf16, f16};
use infernum_codegen::{TargetKind, plan};
use infernum_ir::interp::{Carried, Interpreter, Rounding, States, StepShape, Tensor};
use infernum_ir::{DType, Dims, Encoding, Module, NodeKind, Param, Type, random, text, verify};
use infernum_passes::data::Kernels;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{TensorBytes, WeightSource};

/// Blocks of an executor's cache: no multiple of 7.
pub(crate) const BLOCKS: u32 = 2000;

/// Parses and verifies.
pub(crate) fn module(text: &str) -> Module {
    static KERNELS: LazyLock<Kernels> =
        LazyLock::new(|| Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}")));
    let module = text::parse_with(text, "test.ir", &KERNELS.ops);
    let module = module.unwrap_or_else(|e| panic!("{e}\n{text}"));
    verify(&module).unwrap_or_else(|e| panic!("{e}"));
    module
}

/// Numbers in -1..1 that depend on a name only.
pub(crate) fn noise(name: &str, n: usize) -> Vec<f64> {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let mut state = hasher.finish() | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let f32s = || values.iter().flat_map(|v| (*v as f32).to_le_bytes());
    match dtype {
        DType::F32 => f32s().collect(),
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f64(*v).to_le_bytes()).collect(),
        other => panic!("no test weights of {other}"),
    }
}

/// What the bytes of [`encode`] stand for.
fn rounded(dtype: DType, v: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(v as f32),
        DType::Bf16 => bf16::from_f64(v).to_f64(),
        DType::F16 => f16::from_f64(v).to_f64(),
        other => panic!("no test weights of {other}"),
    }
}

/// A checkpoint with a random tensor for every weight of a module.
#[derive(Default)]
pub(crate) struct Checkpoint {
    pub(crate) tensors: HashMap<String, TensorBytes>,
    values: HashMap<String, Vec<f64>>,
}

impl Checkpoint {
    pub(crate) fn random(module: &Module) -> Checkpoint {
        let mut checkpoint = Checkpoint::default();
        for site in &module.schedule {
            for (_, param, ty) in module.graphs[site.graph].params() {
                let (Param::Weight(w), Type::Tensor(ty)) = (param, ty) else { continue };
                let sizes = ty.sizes(&Dims::default());
                let shape = if w.stack.is_some() { &sizes[1..] } else { &sizes[..] };
                if let Some(encoding) = &ty.encoding {
                    let names = w.tensors(site.layer);
                    names.iter().for_each(|name| checkpoint.encoded(name, encoding, shape));
                    continue;
                }
                // Wide enough that attention is far from uniform, small enough not to saturate.
                let gain = if shape.len() > 1 {
                    3.0 / (shape[shape.len() - 1] as f64).sqrt()
                } else {
                    1.0
                };
                for name in w.tensors(site.layer) {
                    let n = shape.iter().product();
                    let values: Vec<f64> = noise(&name, n).into_iter().map(|v| v * gain).collect();
                    let bytes = encode(ty.dtype, &values).into();
                    let shape = shape.iter().map(|&d| d as u64).collect();
                    let tensor = TensorBytes { element: ty.dtype.into(), shape, bytes };
                    checkpoint.tensors.insert(name.clone(), tensor);
                    let values = values.into_iter().map(|v| rounded(ty.dtype, v)).collect();
                    checkpoint.values.insert(name, values);
                }
            }
        }
        checkpoint
    }

    /// Adds an encoded weight `[N, K]`.
    fn encoded(&mut self, name: &str, encoding: &Encoding, shape: &[usize]) {
        let size = (shape[0] as u64, shape[1] as u64);
        let all = encoding
            .random(size, Some(Encoding::TAME), &mut random::named(name, 1))
            .expect("a size of it");
        let bytes = all.iter().map(|(_, bytes)| &bytes[..]).collect();
        let decoder = encoding.decoder(size.0, size.1, bytes).expect("its own tensors");
        let mut values = vec![0.0; shape[0] * shape[1]];
        values.chunks_mut(shape[1]).zip(0..).for_each(|(row, n)| decoder.row(n, 0, row));
        self.values.insert(name.to_owned(), values.into_iter().map(f64::from).collect());
        let named = encoding.tensors(name, size.0, size.1).expect("a size of it");
        for (named, (stored, bytes)) in named.into_iter().zip(all) {
            let (element, shape) = (stored.element, stored.shape);
            self.tensors.insert(named.name, TensorBytes { element, shape, bytes: bytes.into() });
        }
    }

    /// One step of the interpreter; what every call carries.
    pub(crate) fn interpret(
        &self,
        module: &Module,
        step: &StepShape,
        tokens: &[u32],
        states: &mut States,
        rounding: Rounding,
    ) -> Vec<Carried> {
        let weights = |w: &infernum_ir::WeightRef, layer: Option<u32>, ty: &Type| {
            let shape = ty.tensor()?.sizes(&Dims::default());
            let data = w.tensors(layer).iter().flat_map(|n| self.values[n].clone()).collect();
            Ok(Tensor { shape, data })
        };
        let mut carried = Vec::new();
        let mut observe = |_: usize, c: &Carried| carried.push(c.clone());
        Interpreter::new(&weights, rounding)
            .step(module, step, tokens, states, &mut observe)
            .unwrap_or_else(|e| panic!("{e}"));
        carried
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        self.tensors.get(name).cloned()
    }
}

/// An executor; with `poison`, one that shows reads of dead memory.
pub(crate) fn executor(
    module: &Module,
    checkpoint: &Checkpoint,
    limits: Dims,
    poison: bool,
) -> CpuExecutor {
    let plan = plan(module, TargetKind::Cpu, limits).unwrap_or_else(|e| panic!("{e}"));
    let options = CpuOptions {
        kv_blocks: BLOCKS as usize,
        block_size: 4,
        threads: 2,
        poison,
        ..CpuOptions::default()
    };
    CpuExecutor::new(plan, checkpoint, options).unwrap_or_else(|e| panic!("{e}"))
}

/// Normalised mean squared error.
pub(crate) fn nmse(found: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let error: f64 = found.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = exact.iter().map(|b| b * b).sum();
    match error / norm {
        _ if error == 0.0 => 0.0,
        nan if nan.is_nan() => f64::INFINITY, // comparisons and maxima would pass over it
        error => error,
    }
}

/// Ops launched or folded, by name.
pub(crate) fn ops(module: &Module) -> Vec<&'static str> {
    let nodes = module.graphs.iter().flat_map(|g| g.nodes().map(|(_, n)| n));
    nodes
        .filter_map(|n| match &n.kind {
            NodeKind::Op { op, .. } => Some(op.name),
            NodeKind::Param(_) => None,
        })
        .collect()
}
