//! The whole compiler, as one list of named steps.

use infernum_frontend_hf::{LowerOptions, Model, ModelError};
use infernum_ir::{Dims, Module, Type, VerifyError, verify};
use infernum_passes::Pipeline;

use crate::{Plan, PlanError, TargetKind, plan};

/// What a compilation is of and for.
pub struct Options<'a> {
    /// The model, with or without its checkpoint.
    pub model: &'a Model,
    /// Element type, length and rows.
    pub lower: LowerOptions,
    /// The passes to run.
    pub pipeline: &'a Pipeline,
    /// What the plan is for.
    pub target: TargetKind,
    /// The largest step.
    pub limits: Limits,
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

impl Limits {
    /// The step's sizes for this module: as many token-context pairs as its ragged values leave
    /// room for, but never fewer than one token of every sequence needs.
    pub fn of(&self, module: &Module) -> Dims {
        let s = self.max_length.saturating_mul(self.sequences);
        let row = |ty: &Type| {
            let ty = ty.tensor().ok().filter(|t| t.is_ragged())?;
            Some(ty.bytes(&Dims { pairs: 1, ..Dims::default() }))
        };
        let nodes = module.graphs.iter().flat_map(infernum_ir::Graph::nodes);
        let widest = nodes.flat_map(|(_, n)| &n.types).filter_map(row).max().unwrap_or(1).max(1);
        let most = self.chunk.saturating_mul(s);
        let pairs = (RAGGED_BYTES / widest).clamp(s.min(most), most.max(s));
        Dims { t: self.chunk.max(self.sequences), b: self.sequences, s, pairs }
    }
}

/// What a compilation yields.
#[derive(Debug)]
pub struct Compiled {
    /// The module, as the last step left it.
    pub module: Module,
    /// The plan.
    pub plan: Plan,
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
    Plan(#[from] PlanError),
}

/// Sees the module after each step, by the step's or pass's name.
pub type Observer<'a> = &'a mut dyn FnMut(&str, &Module);

/// A compilation in progress.
struct Session<'a, 'o> {
    options: &'a Options<'a>,
    observe: Observer<'o>,
    module: Module,
}

/// One step.
struct Step {
    name: &'static str,
    run: fn(&mut Session<'_, '_>) -> Result<(), CompileError>,
}

/// Every step on the module, in order; the plan is made of what the last one leaves. The pipeline's
/// passes run inside `passes`, each observed by its own name.
static STEPS: &[Step] = &[
    Step { name: "lower", run: lower },
    Step { name: "verify", run: |s| check(&s.module, "lower") },
    Step { name: "passes", run: passes },
];

/// Names that a module can be dumped after: those of the steps and of the pipeline's passes.
pub fn step_names(pipeline: &Pipeline) -> Vec<&'static str> {
    let passes = pipeline.passes.iter().map(|p| p.name);
    let mut names = Vec::new();
    for step in STEPS {
        if step.name == "passes" {
            names.extend(passes.clone());
        }
        names.push(step.name);
    }
    names
}

/// Compiles a model.
pub fn compile(options: &Options<'_>, observe: Observer<'_>) -> Result<Compiled, CompileError> {
    let module = Module { name: String::new(), graphs: Vec::new(), schedule: Vec::new() };
    let mut session = Session { options, observe, module };
    for step in STEPS {
        (step.run)(&mut session)?;
        (session.observe)(step.name, &session.module);
    }
    let plan = plan(&session.module, options.target, options.limits.of(&session.module))?;
    Ok(Compiled { module: session.module, plan })
}

fn lower(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    s.module = s.options.model.lower(s.options.lower)?.module;
    Ok(())
}

fn passes(s: &mut Session<'_, '_>) -> Result<(), CompileError> {
    for pass in &s.options.pipeline.passes {
        let run = (pass.run)(&s.module);
        s.module = run.map_err(|message| CompileError::Pass { pass: pass.name, message })?;
        check(&s.module, pass.name)?;
        (s.observe)(pass.name, &s.module);
    }
    Ok(())
}

fn check(module: &Module, step: &str) -> Result<(), CompileError> {
    verify(module).map_err(|error| CompileError::Verify { step: step.to_owned(), error })
}
