//! The whole compiler, as one list of named steps.

use infernum_frontend_hf::{LowerOptions, Model, ModelError};
use infernum_ir::{Dims, Module, SourceWarning, Sym, Type, VerifyError, takes_whole, verify};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{self, CostTable, FuseOptions, Report};
use infernum_passes::{Adapters, Context, KvDtype, Pipeline};

use crate::check::MAX_ROWS;
use crate::cuda::{Choices, CudaError, Device, Library, TunedVariants, attach, meant_for};
use crate::{Bucket, ExpandError, Plan, PlanError, TargetKind, expand, plan_buckets};

/// What a compilation is of and for.
pub struct Options<'a> {
    /// The model, with or without its checkpoint.
    pub model: &'a Model,
    /// Element type, length and rows.
    pub lower: LowerOptions,
    /// The passes to run.
    pub pipeline: &'a Pipeline,
    /// Fused ops and rules.
    pub kernels: &'a Kernels,
    /// Name of the target's cost table, and the table: it says which fused ops have kernels.
    pub costs: (&'a str, &'a CostTable),
    /// Rules to use, by name; all when `None`.
    pub rules: Option<Vec<String>>,
    /// Whether to look for near misses and for what lost on cost.
    pub explain: bool,
    /// What adapters it is to have room for.
    pub adapters: Option<&'a Adapters>,
    /// What rows of its KV cache are stored in.
    pub kv_dtype: KvDtype,
    /// The largest step.
    pub limits: Limits,
    /// The templates of kernels.
    pub templates: &'a Library,
    /// The GPU to make kernels for, and what is known of which are fast. Without it, a plan of a GPU's costs can be
    /// looked at but not run.
    pub device: Option<(&'a Device, &'a TunedVariants)>,
}

/// The largest step that a plan must hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens computed at once.
    pub chunk: u64,
    /// Sequences.
    pub sequences: u64,
    /// Tokens of the longest sequence.
    pub max_length: u64,
}

/// What the ragged scores of one layer may take. Prompts are computed in chunks that fit.
const RAGGED_BYTES: u64 = 32 << 20;

/// What the rows of output of a step may take, where several tokens of a sequence yield one.
const OUTPUT_BYTES: u64 = 64 << 20;

impl Limits {
    /// The step's sizes for this module: as many token-context pairs as its ragged values leave
    /// room for, but never fewer than one token of every sequence needs; and as many rows of output as
    /// there is room for, but never fewer than one of every sequence. Where sequences are computed whole, the longest fits.
    pub fn within(&self, module: &Module) -> Dims {
        if takes_whole(module) {
            return self.of_whole(module);
        }
        let s = self.max_length.saturating_mul(self.sequences).min(MAX_ROWS);
        let nodes = || module.graphs.iter().flat_map(infernum_ir::Graph::nodes);
        let types = || nodes().flat_map(|(_, n)| &n.types);
        let most = self.chunk.saturating_mul(s);
        let fitting = fitting_pairs(module).unwrap_or(most);
        let pairs = fitting.clamp(s.min(most), most.max(s));
        let output = |ty: &Type| {
            let ty = ty.tensor().ok().filter(|t| t.shape.first() == Some(&Sym::B.into()))?;
            Some(ty.bytes(&Dims { b: 1, ..Dims::default() }))
        };
        let (t, seqs) = (self.chunk.max(self.sequences), self.sequences);
        let widest = types().filter_map(output).max();
        let b = widest.map_or(seqs, |bytes| (OUTPUT_BYTES / bytes.max(1)).clamp(seqs, t));
        Dims { t, b, s, pairs, seqs }
    }

    /// The same of a module that computes sequences whole: a step's rows of context are its tokens.
    fn of_whole(&self, module: &Module) -> Dims {
        let t = self.chunk.max(self.max_length).max(self.sequences).min(MAX_ROWS);
        let (one, most) = (self.max_length.saturating_mul(self.max_length), t.saturating_mul(t));
        let pairs = fitting_pairs(module).unwrap_or(most).clamp(one.max(t).min(most), most);
        Dims { t, b: self.sequences, s: t, pairs, seqs: self.sequences }
    }
}

/// Token-context pairs for which a module's ragged values have room; `None` if it has no such value.
fn fitting_pairs(module: &Module) -> Option<u64> {
    let nodes = module.graphs.iter().flat_map(infernum_ir::Graph::nodes);
    let row = |ty: &Type| {
        let ty = ty.tensor().ok().filter(|t| t.is_ragged())?;
        Some(ty.bytes(&Dims { pairs: 1, ..Dims::default() }))
    };
    let widest = nodes.flat_map(|(_, n)| &n.types).filter_map(row).max()?;
    Some(RAGGED_BYTES / widest.max(1))
}

/// What a compilation yields.
#[derive(Debug)]
pub struct Compiled {
    /// What each kind of step runs; where there is room for adapters, of steps that have some.
    pub buckets: Vec<CompiledBucket>,
    /// The plan of all of them.
    pub plan: Plan,
    /// Which variants of kernels its launches run, and why; nothing where it has no kernels.
    pub choices: Choices,
    /// What is likely a mistake in the model's spec.
    pub warnings: Vec<SourceWarning>,
}

/// A module compiled for one kind of step.
#[derive(Debug)]
pub struct CompiledBucket {
    /// The steps.
    pub bucket: Bucket,
    /// The module, as the last pass left it.
    pub module: Module,
    /// What fusion did.
    pub report: Report,
}

/// A compilation failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "named after the steps")]
pub enum CompileError {
    #[error(transparent)]
    Lower(#[from] ModelError),
    #[error("after `{step}`: {error}")]
    Verify { step: String, error: VerifyError },
    #[error("pass `{pass}`: {message}")]
    Pass { pass: &'static str, message: String },
    #[error(transparent)]
    Expand(#[from] ExpandError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Sees the module after each step, by the step's or pass's name; `None` while all steps of the
/// model share it.
pub type Observer<'a> = &'a mut dyn FnMut(&str, Option<Bucket>, &Module);

/// A compilation in progress.
struct Session<'a, 'o> {
    options: &'a Options<'a>,
    observe: Observer<'o>,
    costs: CostTable,
    /// What is compiled now; `fused` once it is that of one bucket.
    module: Module,
    /// As it would be without adapters, where it has some: steps run it whose tokens have none.
    plain: Option<Module>,
    bucket: Option<Bucket>,
    /// Whether nothing is observed or explained.
    unseen: bool,
    report: Report,
    warnings: Vec<SourceWarning>,
}

/// A part of compilation.
struct Stage {
    name: &'static str,
    run: fn(&mut Session<'_, '_>) -> Result<(), CompileError>,
}

/// What is done once for a model.
static SHARED: &[Stage] = &[
    Stage { name: "lower", run: lower },
    Stage { name: "verify", run: |s| check(&s.module, "lower") },
    Stage { name: "adapters", run: adapters },
    Stage { name: "kv_dtype", run: kv_dtype },
    Stage { name: "pick", run: pick },
];

/// What is done for each kind of step. The pipeline's passes run inside `passes`, each observed by
/// its own name. The plan is made of what the last step leaves.
static PER_BUCKET: &[Stage] =
    &[Stage { name: "passes", run: run_passes }, Stage { name: "expand", run: expand_rest }];

/// Names that a module can be dumped after: those of the steps and of the pipeline's passes.
pub fn step_names(pipeline: &Pipeline) -> Vec<&'static str> {
    let shared = SHARED.iter().map(|s| s.name);
    let passes = pipeline.passes.iter().map(|p| p.name);
    let mut names: Vec<&str> =
        shared.chain(passes).chain(PER_BUCKET.iter().map(|s| s.name)).collect();
    let mut seen = std::collections::HashSet::new();
    names.retain(|n| seen.insert(*n));
    names
}

/// Compiles a model.
pub fn compile(options: &Options<'_>, observe: Observer<'_>) -> Result<Compiled, CompileError> {
    let module = Module { name: String::new(), graphs: Vec::new(), schedule: Vec::new() };
    let report = Report::default();
    let warnings = Vec::new();
    let costs = usable(options)?;
    let (plain, bucket, unseen) = (None, None, false);
    let mut session =
        Session { options, observe, costs, module, plain, bucket, unseen, report, warnings };
    session.run(SHARED)?;
    let lowered = session.module.clone();
    let plain = session.plain.take().filter(|_| !options.pipeline.reproducible);
    let mut limits = options.limits.within(&lowered);
    let mut pairs = u64::MAX;
    let mut buckets = Vec::new();
    let reproducible = options.pipeline.reproducible;
    let all = || options.pipeline.buckets.iter().filter_map(|kind| most(*kind, limits.t));
    let kinds: Vec<Bucket> = if reproducible { vec![Bucket::ALL] } else { all().collect() };
    for kind in &kinds {
        session.module = lowered.clone();
        session.bucket = Some(meant_for(*kind, &limits));
        session.run(PER_BUCKET)?;
        // What is left ragged, if anything, says how large a step may be.
        pairs = pairs.min(options.limits.within(&session.module).pairs);
        let (bucket, report) = (meant_for(*kind, &limits), std::mem::take(&mut session.report));
        buckets.push(CompiledBucket { bucket, module: session.module.clone(), report });
    }
    // A row has the same bits in all steps of a reproducible plan: there all of them run what has adapters.
    let mut without = Vec::new();
    for (kind, plain) in kinds.iter().filter_map(|kind| Some((kind, plain.as_ref()?))) {
        session.module = plain.clone();
        session.bucket = Some(meant_for(*kind, &limits));
        session.run_unseen(PER_BUCKET)?;
        pairs = pairs.min(options.limits.within(&session.module).pairs);
        without.push((session.module.clone(), kind));
    }
    let mut modules = Vec::new();
    let with = buckets.iter().map(|b| &b.module).zip(&kinds);
    for (module, kind) in with.chain(without.iter().map(|(module, kind)| (module, *kind))) {
        let greedy = infernum_passes::greedy_steps(module);
        // Steps of all kinds compute the same in a reproducible plan; which kernels do it may differ. The plan keeps kinds as
        // they are meant, so that what is tuned for one fits plans of other limits.
        for kind in if reproducible { all().collect() } else { vec![*kind] } {
            let modules_of = [Some(module), greedy.as_ref()].into_iter().flatten();
            modules.extend(modules_of.map(|module| (kind, module.clone())));
        }
    }
    limits.pairs = pairs;
    let mut plan = plan_buckets(&modules, options.target(), limits)?;
    (plan.reproducible, plan.task) = (reproducible, options.model.task);
    if plan.banks().next().is_some() {
        plan.adapters = options.adapters.map_or(0, |adapters| adapters.slots);
    }
    let mut choices = Choices::default();
    if let Some((device, tuned)) = options.device {
        choices = attach(&mut plan, &options.kernels.ops, options.templates, device, tuned)?;
    }
    Ok(Compiled { buckets, plan, choices, warnings: session.warnings })
}

/// A kind of steps of at most so many tokens; `None` if it has none of them.
fn most(bucket: Bucket, tokens: u64) -> Option<Bucket> {
    let bucket = Bucket { max: bucket.max.min(tokens), ..bucket };
    (bucket.min <= bucket.max).then_some(bucket)
}

/// The target's costs. A reproducible plan has the kernels of those fused ops alone that declare orders of
/// summation, and has them for steps of any size: what is faster for some is of no use to it.
fn usable(options: &Options<'_>) -> Result<CostTable, CompileError> {
    let mut costs = options.costs.1.clone();
    if options.target() == TargetKind::Cuda && options.pipeline.reproducible {
        let mut names = Vec::new();
        for (op, template) in options.kernels.ops.fused().filter_map(|op| Some((op, op.cuda?))) {
            let template = options.templates.template(template).map_err(CudaError::from)?;
            if template.variants.iter().any(|v| v.order.is_some()) {
                names.push(op.name.to_owned());
            }
        }
        costs.kernels = fuse::Kernels::Only(names);
        costs.ops.values_mut().for_each(|op| op.when.clear());
    }
    Ok(costs)
}

impl Options<'_> {
    fn target(&self) -> TargetKind {
        if self.costs.1.kind == "cuda" { TargetKind::Cuda } else { TargetKind::Cpu }
    }
}

impl Session<'_, '_> {
    fn run(&mut self, steps: &[Stage]) -> Result<(), CompileError> {
        for step in steps {
            (step.run)(self)?;
            (self.observe)(step.name, self.bucket, &self.module);
        }
        Ok(())
    }

    /// The same, with nothing observed.
    fn run_unseen(&mut self, steps: &[Stage]) -> Result<(), CompileError> {
        self.unseen = true;
        let ran = steps.iter().try_for_each(|step| (step.run)(self));
        (self.unseen, self.report) = (false, Report::default());
        ran
    }
}

fn lower(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    let lowered = s.options.model.lower(s.options.lower, s.options.kernels.ops.encodings())?;
    (s.module, s.warnings) = (lowered.module, lowered.warnings);
    Ok(())
}

/// Products that adapters may change have a low-rank part; of what has no adapters nothing changes.
fn adapters(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    let Some(wanted) = s.options.adapters else { return Ok(()) };
    let published = s.options.model.published_names()?;
    let adapted = infernum_passes::adapters(&s.module, wanted, &published);
    let adapted = adapted.map_err(|message| CompileError::Pass { pass: "adapters", message })?;
    check(&adapted, "adapters")?;
    if adapted != s.module {
        s.plain = Some(std::mem::replace(&mut s.module, adapted));
    }
    Ok(())
}

/// Rows of the cache are stored in the type that is wanted.
fn kv_dtype(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    for module in std::iter::once(&mut s.module).chain(&mut s.plain) {
        let stored = infernum_passes::store_rows(module, s.options.kv_dtype);
        *module = stored.map_err(|message| CompileError::Pass { pass: "kv_dtype", message })?;
        check(module, "kv_dtype")?;
    }
    Ok(())
}

/// A GPU picks the tokens of its sequences itself; a CPU's logits are at hand for the host.
fn pick(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    let picks = s.options.model.task.generates() && s.options.lower.rows == Sym::B;
    if s.options.target() != TargetKind::Cuda || !picks {
        return Ok(());
    }
    for module in std::iter::once(&mut s.module).chain(&mut s.plain) {
        let picked = infernum_passes::pick(module);
        *module = picked.map_err(|message| CompileError::Pass { pass: "pick", message })?;
        check(module, "pick")?;
    }
    Ok(())
}

fn run_passes(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    let Options { pipeline, kernels, costs: (device, _), rules, explain, .. } = s.options;
    let mut fuse = FuseOptions::new(device, s.costs.clone(), s.bucket.unwrap_or(Bucket::ALL));
    fuse.rules.clone_from(rules);
    fuse.disabled.clone_from(&pipeline.disabled);
    fuse.numerics = pipeline.numerics;
    fuse.context = pipeline.context;
    fuse.explain = *explain && !s.unseen;
    let mut cx = Context { kernels, fuse, report: Report::default() };
    for pass in &pipeline.passes {
        let run = (pass.run)(&s.module, &mut cx);
        s.module = run.map_err(|message| CompileError::Pass { pass: pass.name, message })?;
        check(&s.module, pass.name)?;
        if !s.unseen {
            (s.observe)(pass.name, s.bucket, &s.module);
        }
    }
    s.report = cx.report;
    Ok(())
}

/// Fused ops for which the target has no kernel become their bodies.
fn expand_rest(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    let bucket = s.bucket.unwrap_or(Bucket::ALL);
    s.module = expand(&s.module, &|call| s.costs.has_kernel(call, bucket))?;
    check(&s.module, "expand")
}

fn check(module: &Module, step: &str) -> Result<(), CompileError> {
    verify(module).map_err(|error| CompileError::Verify { step: step.to_owned(), error })
}
