//! What several tests share: fixtures, running a model, and distances.

use std::path::{Path, PathBuf};

use infernum::{CompileOptions, DeviceId, Machine, prefill};
use infernum_codegen::compile::{Options, compile};
use infernum_codegen::cuda::{Cache, Compiler};
use infernum_codegen::{Limits, Plan, TargetKind};
use infernum_frontend_hf::spec::{Library, parse_family};
use infernum_frontend_hf::{LowerOptions, Model, ModelFiles};
use infernum_ir::{DType, Module, Sym};
use infernum_passes::data::{Kernels, Numerics};
use infernum_passes::{KvDtype, Pipeline};
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::cuda::{CudaExecutor, CudaOptions};
use infernum_runtime::{
    CheckpointWeights, GroupKind, LoadError, PlanExecutor, SequenceSteps, StepInputs, WeightSource,
    most_blocks, tables,
};

/// A model folder with what transformers makes of it.
pub(crate) struct Fixture {
    pub(crate) name: String,
    pub(crate) model: Model,
    pub(crate) tokens: Vec<u32>,
    /// `[tokens, vocab]`, computed in float64.
    pub(crate) logits: Vec<f64>,
    /// The same from transformers' own bf16 run.
    pub(crate) logits_bf16: Vec<f64>,
    pub(crate) max_length: u64,
    /// What rows of the cache are stored in.
    pub(crate) kv_dtype: KvDtype,
}

/// Folder of the fixtures: `INFERNUM_FIXTURES`, for a suite that runs elsewhere than it was built.
pub(crate) fn root() -> PathBuf {
    let given = std::env::var_os("INFERNUM_FIXTURES").map(PathBuf::from);
    given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"))
}

/// The specs that ship or, while they are written, those of the folder in `INFERNUM_TEST_DATA` on top, so that nothing
/// is built anew.
pub(crate) fn library() -> Library {
    Library::new(std::env::var_os("INFERNUM_TEST_DATA").as_deref().map(Path::new))
}

/// The names of all parity fixtures, `family/variant`.
pub(crate) fn names() -> Vec<String> {
    let mut names = Vec::new();
    for source in library().families().expect("the built-in families") {
        let family = Path::new(&*source.file).file_stem().expect("a name").to_string_lossy();
        let spec = parse_family(&source).expect("a family that ships");
        // What has no head has its fixtures in `vectors`.
        if spec.architectures.is_empty() {
            continue;
        }
        for entry in std::fs::read_dir(root().join(&*family)).expect("the fixtures are committed") {
            let entry = entry.expect("a readable folder");
            names.push(format!("{family}/{}", entry.file_name().to_string_lossy()));
        }
    }
    names.sort();
    names
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Fixture {
        Fixture::with_spec(name, None)
    }

    /// Opens a fixture under a spec that does not ship.
    pub(crate) fn with_spec(name: &str, spec: Option<&Path>) -> Fixture {
        let dir = root().join(name);
        let files = ModelFiles::folder(&dir).expect("a fixture's folder");
        let model = Model::open(files, spec, &library()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bytes = std::fs::read(dir.join("expected.safetensors")).expect("expected values");
        let expected = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
        let meta = std::fs::read(dir.join("fixture.json")).expect("fixture.json");
        let meta: serde_json::Value = serde_json::from_slice(&meta).expect("valid JSON");
        let tensor = |n: &str| expected.tensor(n).expect("a tensor of the fixture");
        Fixture {
            name: name.to_owned(),
            model,
            tokens: numbers(&tensor("tokens")).into_iter().map(|t| t as u32).collect(),
            logits: numbers(&tensor("logits_f64")),
            logits_bf16: numbers(&tensor("logits_bf16")),
            max_length: meta["max_length"].as_u64().expect("max_length"),
            kv_dtype: KvDtype::Auto,
        }
    }

    /// The same model, whose rows of the cache are codes.
    pub(crate) fn with_codes(name: &str) -> Fixture {
        Fixture { kv_dtype: KvDtype::Fp8, ..Fixture::open(name) }
    }

    pub(crate) fn options(&self, dtype: DType) -> LowerOptions {
        LowerOptions { dtype: Some(dtype), max_length: Some(self.max_length), rows: Sym::T }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits { chunk: self.tokens.len() as u64, sequences: 1, max_length: self.max_length }
    }

    /// The logits of every position, computed in steps of at most `chunk` tokens.
    pub(crate) fn run(&self, dtype: DType, pipeline: &str, chunk: usize) -> Vec<f64> {
        let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
        self.run_plan(self.plan(dtype, pipeline, &kernels), chunk)
    }

    /// A plan for [`machine`]. The pipeline `default` is held to what rounds no activation to fewer bits than it has; `lossy` is all
    /// of it.
    pub(crate) fn plan(&self, dtype: DType, pipeline: &str, kernels: &Kernels) -> Plan {
        self.plan_within(dtype, pipeline, kernels, self.limits())
    }

    /// A plan for [`machine`] that holds steps of `limits`.
    pub(crate) fn plan_within(
        &self,
        dtype: DType,
        pipeline: &str,
        kernels: &Kernels,
        limits: Limits,
    ) -> Plan {
        self.plan_of(dtype, pipeline, kernels, limits, Sym::T)
    }

    /// As [`Fixture::plan_within`]; it yields logits of these rows.
    pub(crate) fn plan_of(
        &self,
        dtype: DType,
        pipeline: &str,
        kernels: &Kernels,
        limits: Limits,
        rows: Sym,
    ) -> Plan {
        let machine = machine();
        let (pipeline, most) = match pipeline {
            "default" => (machine.pipeline(), Numerics::Rounds),
            "lossy" => (machine.pipeline(), Numerics::Lossy),
            name => (name, Numerics::Rounds),
        };
        let mut pipeline = Pipeline::named(pipeline, None).expect("a built-in pipeline");
        pipeline.numerics = pipeline.numerics.min(most);
        let (target, costs) =
            machine.costs(&CompileOptions::default()).expect("a built-in cost table");
        let device = machine.device();
        let templates = infernum_codegen::cuda::Library::default();
        let tuned = infernum_codegen::cuda::TunedVariants::default();
        let options = Options {
            model: &self.model,
            lower: LowerOptions { rows, ..self.options(dtype) },
            pipeline: &pipeline,
            kernels,
            costs: (&target, &costs),
            rules: None,
            adapters: None,
            kv_dtype: self.kv_dtype,
            explain: false,
            limits,
            templates: &templates,
            device: device.as_ref().map(|d| (d, &tuned)),
        };
        let compiled =
            compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        compiled.plan
    }

    /// The logits that a module gives, in one step.
    pub(crate) fn run_module(&self, module: &Module) -> Vec<f64> {
        let limits = self.limits().within(module);
        let plan = infernum_codegen::plan(module, TargetKind::Cpu, limits).expect("a plan");
        self.run_plan(plan, usize::MAX)
    }

    /// A plan ready to run on [`machine`], with so many blocks of cache.
    pub(crate) fn executor(
        &self,
        plan: Plan,
        blocks: usize,
        launches: Launches,
    ) -> Box<dyn PlanExecutor> {
        let checkpoint = self.model.checkpoint.as_ref().expect("a fixture has weights");
        executor(plan, &CheckpointWeights::new(checkpoint), blocks, launches)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    pub(crate) fn run_plan(&self, plan: Plan, chunk: usize) -> Vec<f64> {
        self.run_launched(plan, chunk, Launches::wanted())
    }

    pub(crate) fn run_launched(&self, plan: Plan, chunk: usize, launches: Launches) -> Vec<f64> {
        let (groups, tokens) = (GroupKind::of_plan(&plan), self.tokens.len());
        let (size, chunk) = (StepInputs::BLOCK_SIZE, chunk.min(tokens));
        let blocks = most_blocks(&groups, tokens, size, chunk);
        let mut executor = self.executor(plan, blocks, launches);
        // Not in order, as in a cache that has been in use.
        let tables = tables(&groups, tokens, size, chunk, (0..blocks as u32).rev());
        let mut logits = Vec::new();
        let sequence = SequenceSteps::new(size, tables).with_groups(&groups);
        prefill(&mut *executor, sequence, &self.tokens, chunk, |output| {
            logits.extend(output.logits.iter().map(|v| f64::from(*v)));
        })
        .expect("steps that fit");
        logits
    }
}

/// What plans are run on: the CPU, or the GPU if `INFERNUM_TEST_DEVICE` is `cuda`.
pub(crate) fn machine() -> Machine {
    let gpu = std::env::var("INFERNUM_TEST_DEVICE").is_ok_and(|d| d == "cuda");
    let device = if gpu { DeviceId::Cuda(0) } else { DeviceId::Cpu };
    Machine::open(Some(device)).unwrap_or_else(|e| panic!("{e}"))
}

/// How a GPU runs decode steps; the CPU always poisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launches {
    /// One by one, activations poisoned.
    Poisoned,
    /// As recorded graphs, which exclude poisoning.
    Graphs,
}

impl Launches {
    /// Graphs if `INFERNUM_TEST_GRAPHS` is set.
    pub(crate) fn wanted() -> Launches {
        let graphs = std::env::var_os("INFERNUM_TEST_GRAPHS").is_some();
        if graphs { Launches::Graphs } else { Launches::Poisoned }
    }
}

/// Loads a plan on [`machine`].
pub(crate) fn executor(
    plan: Plan,
    weights: &dyn WeightSource,
    kv_blocks: usize,
    launches: Launches,
) -> Result<Box<dyn PlanExecutor>, LoadError> {
    let Machine::Gpu(gpu) = machine() else {
        let options = CpuOptions { kv_blocks, poison: true, ..CpuOptions::default() };
        return Ok(Box::new(CpuExecutor::new(plan, weights, options)?));
    };
    let arch = plan.device.as_ref().map_or("", |d| &d.arch);
    let cubins = Cache::user().cubins(&plan.kernels, arch, &mut Compiler::find);
    let (cubins, _) = cubins.unwrap_or_else(|e| panic!("{e}"));
    let poison = launches == Launches::Poisoned;
    let options = CudaOptions { kv_blocks, poison, ..CudaOptions::default() };
    Ok(Box::new(CudaExecutor::new(plan, &cubins, weights, &gpu, options)?))
}

/// A tensor's elements.
pub(crate) fn numbers(t: &safetensors::tensor::TensorView<'_>) -> Vec<f64> {
    use safetensors::Dtype;
    let data = t.data();
    match t.dtype() {
        Dtype::F64 => {
            data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
        }
        Dtype::F32 => {
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        Dtype::BF16 => {
            let value =
                |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            data.chunks_exact(2).map(|b| value(b).into()).collect()
        }
        Dtype::I32 => {
            data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        Dtype::I64 => {
            data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect()
        }
        other => panic!("{other:?} in a fixture"),
    }
}

/// Mean squared error over mean square of the reference.
pub(crate) fn nmse(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let error: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    error / expected.iter().map(|b| b * b).sum::<f64>()
}

/// Mean over rows of `KL(softmax(expected) || softmax(found))`, in nats.
pub(crate) fn mean_kl(found: &[f64], expected: &[f64], vocab: usize) -> f64 {
    let all = kls(found, expected, vocab);
    all.iter().sum::<f64>() / all.len() as f64
}

/// As [`mean_kl`], of all rows but the worst.
pub(crate) fn mean_kl_but_one(found: &[f64], expected: &[f64], vocab: usize) -> f64 {
    let mut all = kls(found, expected, vocab);
    // A NaN comes first, and stays.
    all.sort_by(|a, b| b.is_nan().cmp(&a.is_nan()).then(a.total_cmp(b)));
    all.pop();
    all.iter().sum::<f64>() / all.len() as f64
}

/// `KL(softmax(expected) || softmax(found))` of each row.
fn kls(found: &[f64], expected: &[f64], vocab: usize) -> Vec<f64> {
    let log_softmax = |row: &[f64]| -> Vec<f64> {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = row.iter().map(|v| (v - max).exp()).sum::<f64>().ln() + max;
        row.iter().map(|v| v - log_sum).collect()
    };
    let kl = expected.chunks(vocab).zip(found.chunks(vocab)).map(|(p, q)| {
        let (p, q) = (log_softmax(p), log_softmax(q));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
    });
    kl.collect()
}
