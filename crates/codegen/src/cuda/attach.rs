//! Gives each launch of a plan its kernel.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::RangeInclusive;

use infernum_ir::expr::Expr;
use infernum_ir::{Dims, Op, OpSet, SourceError};

use super::apart;
use super::geometry::{Scope, whole};
use super::template::{Foreign, Kind, Tiles};
use super::text::{self, TextError};
use super::tuned::{Choices, Site};
use super::{Device, Geometry, Library, Template, TemplateError, TunedVariants, Variant};
use crate::TileMap;
use crate::buckets::MAX_ARENA;
use crate::plan::{Argument, Kernel, KernelLaunch, Launch, Matmul, Plan, Program, Run, Value};
use infernum_passes::Bucket;

/// A launch has no kernel.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum CudaError {
    #[error(
        "`{launch}`: `{op}` has no CUDA kernel: expected a template to be named in its definition"
    )]
    NoTemplate { launch: String, op: String },
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Source(#[from] Box<SourceError>),
    #[error("`{launch}`: no variant of {path} is for it: {reasons}")]
    NoVariant { launch: String, path: String, reasons: String },
    #[error(
        "`{launch}`: {path} has no variants of one `order` for steps of every kind, which a reproducible plan needs"
    )]
    NoOrder { launch: String, path: String },
    #[error("`{launch}`: variant `{variant}` of {path}: {message}")]
    Variant { launch: String, path: String, variant: String, message: String },
    #[error("`{launch}`: variant `{variant}` of {path}: {error:#}")]
    Render { launch: String, path: String, variant: String, error: minijinja::Error },
}

/// Chooses a kernel for every launch of `plan` and renders it: the first variant that is admitted,
/// unless `tuned` prefers another. Launches of the same text share one.
pub fn attach(
    plan: &mut Plan,
    ops: &OpSet,
    library: &Library,
    device: &Device,
    tuned: &TunedVariants,
) -> Result<Choices, CudaError> {
    let mut attach = Attach::new(ops, library, device, plan.limits, tuned.clone());
    attach.keep_orders(plan);
    let programs = std::mem::take(&mut plan.programs);
    for schedule in 0..plan.schedules.len() {
        attach.schedule(plan, schedule, &programs)?;
    }
    plan.feed = apart::feed(plan);
    if let Some(launch) = &mut plan.feed {
        let name = launch.name.clone();
        launch.run = Some(attach.launch(launch, Bucket::ALL, &name)?);
    }
    plan.repacks = apart::repacks(plan);
    for launch in &mut plan.repacks {
        let name = launch.name.clone();
        launch.run = Some(attach.launch(launch, Bucket::ALL, &name)?);
    }
    plan.kernels = attach.kernels;
    plan.device = Some(device.clone());
    Ok(attach.choices)
}

/// As [`attach`], for the launches of one schedule of a plan that has kernels already, which it keeps.
pub fn reattach(
    plan: &mut Plan,
    schedule: usize,
    ops: &OpSet,
    library: &Library,
    device: &Device,
    tuned: &TunedVariants,
) -> Result<Choices, CudaError> {
    let mut attach = Attach::new(ops, library, device, plan.limits, tuned.clone());
    attach.keep_orders(plan);
    attach.kernels = std::mem::take(&mut plan.kernels);
    let texts = attach.kernels.iter().enumerate().filter(|(_, k)| !k.is_ptx);
    attach.known = texts.map(|(i, k)| (k.text.clone(), i as u32)).collect();
    let programs = plan.programs.clone();
    attach.schedule(plan, schedule, &programs)?;
    plan.kernels = attach.kernels;
    Ok(attach.choices)
}

/// The bucket's steps that a plan holds: a decode step has a token a sequence.
pub(crate) fn within(bucket: Bucket, limits: &Dims) -> Bucket {
    let most = if bucket.decode { limits.t.min(limits.seqs) } else { limits.t };
    Bucket { max: bucket.max.min(most), ..bucket }
}

/// The steps that a bucket's graph and kernels are chosen for: those that the plan holds or, where it has too few sequences
/// for any, the bucket's least, which never come.
pub(crate) fn meant_for(bucket: Bucket, limits: &Dims) -> Bucket {
    let held = within(bucket, limits);
    Bucket { max: held.max.max(held.min), ..held }
}

/// The variants that launches of `op` in a plan could run, in their template's order; `plan` has no
/// kernels yet.
pub fn admitted(
    plan: &Plan,
    op: &str,
    ops: &OpSet,
    library: &Library,
    device: &Device,
) -> Result<Vec<String>, CudaError> {
    let mut attach = Attach::new(ops, library, device, plan.limits, TunedVariants::default());
    let (mut found, mut order) = (HashSet::new(), Vec::new());
    for schedule in &plan.schedules {
        let bucket = meant_for(schedule.bucket, &plan.limits);
        let programs = schedule.calls.iter().map(|c| &plan.programs[c.program as usize]);
        for launch in programs.flat_map(|p| &p.launches).filter(|l| l.op == op) {
            let template = attach.template(launch, &launch.name)?;
            let parts = attach.parts(launch, bucket, &template);
            for bucket in parts.into_iter().flatten().chain([bucket]) {
                let variants = attach.admitted(launch, bucket, &template)?;
                found.extend(variants.into_iter().map(|v| v.name.clone()));
            }
            order = template.variants;
        }
    }
    Ok(order.into_iter().map(|v| v.name).filter(|v| found.contains(v)).collect())
}

pub(super) struct Attach<'a> {
    ops: &'a OpSet,
    library: &'a Library,
    device: &'a Device,
    env: minijinja::Environment<'static>,
    templates: HashMap<String, Template>,
    /// Kernels by their text, the name left open.
    known: HashMap<String, u32>,
    pub(super) kernels: Vec<Kernel>,
    pub(super) limits: Dims,
    pub(super) tuned: TunedVariants,
    pub(super) choices: Choices,
    /// The sites that `choices` has.
    pub(super) told: BTreeSet<Site>,
    /// The kinds of steps in all of which a launch must sum in one order, if it must.
    pub(super) one_order: Option<Vec<Bucket>>,
}

impl<'a> Attach<'a> {
    pub(super) fn new(
        ops: &'a OpSet,
        library: &'a Library,
        device: &'a Device,
        limits: Dims,
        tuned: TunedVariants,
    ) -> Attach<'a> {
        Attach {
            ops,
            library,
            device,
            env: text::environment(library),
            templates: HashMap::new(),
            known: HashMap::new(),
            kernels: Vec::new(),
            limits,
            tuned,
            choices: Choices::default(),
            told: BTreeSet::new(),
            one_order: None,
        }
    }

    /// Has launches of a reproducible plan sum in one order in steps of every kind.
    fn keep_orders(&mut self, plan: &Plan) {
        if plan.reproducible {
            let kinds = plan.schedules.iter().map(|s| meant_for(s.bucket, &plan.limits));
            self.one_order = Some(kinds.collect());
        }
    }

    /// Gives the launches of a schedule, whose calls are of `programs`, their kernels.
    fn schedule(
        &mut self,
        plan: &mut Plan,
        schedule: usize,
        programs: &[Program],
    ) -> Result<(), CudaError> {
        let schedule = &mut plan.schedules[schedule];
        // What is the same in two buckets may run on different kernels.
        let mut chosen: HashMap<u32, u32> = HashMap::new();
        let bucket = meant_for(schedule.bucket, &plan.limits);
        for call in &mut schedule.calls {
            if let Some(&known) = chosen.get(&call.program) {
                call.program = known;
                continue;
            }
            let mut program = programs[call.program as usize].clone();
            for launch in &mut program.launches {
                let shown = format!("{}/%{}", program.name, launch.name);
                launch.run = Some(self.launch_in_parts(launch, bucket, &shown)?);
            }
            let same = plan.programs.iter().position(|p| *p == program);
            let index = same.unwrap_or(plan.programs.len()) as u32;
            if same.is_none() {
                plan.programs.push(program);
            }
            chosen.insert(call.program, index);
            call.program = index;
        }
        Ok(())
    }

    /// Kernels made so far.
    pub(super) fn into_kernels(self) -> Vec<Kernel> {
        self.kernels
    }

    pub(super) fn template(&mut self, launch: &Launch, shown: &str) -> Result<Template, CudaError> {
        let name = self.template_of(launch, shown)?;
        if !self.templates.contains_key(&name) {
            self.templates.insert(name.clone(), self.library.template(&name)?);
        }
        Ok(self.templates[&name].clone())
    }

    /// Why a variant is not for a launch; `None` if it is.
    pub(super) fn refusal(
        &self,
        launch: &Launch,
        bucket: Bucket,
        template: &Template,
        variant: &Variant,
        shown: &str,
    ) -> Result<Option<String>, CudaError> {
        let params = &variant.params;
        let scope = Scope { launch, params, device: self.device, dims: None, bucket: Some(bucket) };
        let places = Places { template, variant, shown };
        for expr in &variant.when {
            places.known(&scope, expr)?;
            if !scope.holds(expr).map_err(|message| places.fault(expr, message))? {
                return Ok(Some(format!("`{}` wants {expr}", variant.name)));
            }
        }
        Ok(None)
    }

    /// What runs a launch in the steps of a bucket.
    pub(super) fn launch(
        &mut self,
        launch: &Launch,
        bucket: Bucket,
        shown: &str,
    ) -> Result<Run, CudaError> {
        let template = self.template(launch, shown)?;
        match self.choose(launch, bucket, &template, shown)? {
            Ok(choice) => {
                let run = self.launch_as(choice.variant, launch, bucket, &template, shown)?;
                self.tell(launch, bucket, &choice);
                Ok(run)
            }
            Err(reasons) => {
                let (launch, path) = (shown.to_owned(), template.path);
                Err(CudaError::NoVariant { launch, path, reasons })
            }
        }
    }

    /// A launch of a variant that is admitted.
    pub(super) fn launch_as(
        &mut self,
        variant: &Variant,
        launch: &Launch,
        bucket: Bucket,
        template: &Template,
        shown: &str,
    ) -> Result<Run, CudaError> {
        let fail = |message| CudaError::Variant {
            launch: shown.to_owned(),
            path: template.path.clone(),
            variant: variant.name.clone(),
            message,
        };
        let (params, device) = (&variant.params, self.device);
        let scope = Scope { launch, params, device, dims: None, bucket: Some(bucket) };
        let (grid, shared, ptx, tiles) = match &variant.kind {
            Kind::Matmul(roles) => return matmul(launch, roles).map(Run::Matmul).map_err(fail),
            Kind::Kernel { grid, shared, ptx, tiles, .. } => (grid, shared, ptx, tiles),
        };
        let places = Places { template, variant, shown };
        let Sizes { block, scratch, ahead } = self.sizes(&places, &scope, bucket)?;
        // Only then: launches that differ in nothing else are one program.
        let named = grid.iter().chain([shared]).any(|e| e.to_string().contains("tokens."));
        let geometry = Geometry {
            tokens: named.then_some(bucket),
            grid: grid.clone(),
            block,
            shared: shared.clone(),
            params: params.clone(),
        };
        if let Some(foreign) = ptx {
            let scope = Scope { dims: Some(&self.limits), ..scope };
            let arguments = Some(arguments(&scope, foreign).map_err(fail)?);
            let kernel = self.foreign(foreign, template, variant, scratch)?;
            return Ok(Run::Kernel(KernelLaunch {
                kernel,
                geometry,
                arguments,
                tiles: Vec::new(),
                ahead: None,
            }));
        }
        let has_scratch = scratch > 0;
        let site = text::Site { launch, template, variant, block, has_scratch, bucket, device };
        let tiles = tiles.iter().map(|tiles| tile_map(&scope, tiles));
        let tiles = tiles.collect::<Result<_, _>>().map_err(fail)?;
        let kernel = self.kernel(&site, scratch, shown)?;
        Ok(Run::Kernel(KernelLaunch { kernel, geometry, arguments: None, tiles, ahead }))
    }

    /// The sizes that do not depend on the step. Those of a launch are looked at as they are at the
    /// plan's limits, so that what no GPU can launch is no plan.
    fn sizes(
        &self,
        places: &Places<'_>,
        scope: &Scope<'_>,
        bucket: Bucket,
    ) -> Result<Sizes, CudaError> {
        let Kind::Kernel { grid, block, shared, scratch, ahead, tiles, .. } = &places.variant.kind
        else {
            return Ok(Sizes::default());
        };
        let most = Dims { t: self.limits.t.min(bucket.max), ..self.limits };
        let most = Dims {
            t: most.t.max(1),
            b: most.b.max(1),
            s: most.s.max(1),
            seqs: most.seqs.max(1),
            ..most
        };
        let largest = Scope { dims: Some(&most), ..*scope };
        let at_limits = Scope { dims: Some(&self.limits), ..*scope };
        [block]
            .into_iter()
            .chain(tiles.iter().map(|t| &t.rows))
            .chain(ahead)
            .try_for_each(|e| places.known(scope, e))?;
        grid.iter().chain([shared, scratch]).try_for_each(|e| places.known(&largest, e))?;
        let size = |scope: &Scope<'_>, expr: &Expr, what: &str, range: RangeInclusive<u64>| {
            let found = scope.number(expr).map_err(|message| places.fault(expr, message))?;
            let is_size = found.fract() == 0.0 && found >= 0.0 && range.contains(&(found as u64));
            let (least, most) = (range.start(), range.end());
            let message = || format!("{found} {what}: expected {least} to {most}");
            if is_size { Ok(found as u64) } else { Err(places.fault(expr, message())) }
        };
        let threads = size(scope, block, "threads in a block", 1..=Device::BLOCK_THREADS.into())?;
        let most_shared = self.device.block_shared().unwrap_or(u32::MAX);
        let what = format!("bytes of shared memory for a block of {}", self.device.arch);
        size(&largest, shared, &what, 0..=most_shared.into())?;
        if let Some(fourth) = grid.get(GRID.len()) {
            return Err(places.fault(fourth, "expected at most three dimensions of blocks"));
        }
        for (expr, most) in grid.iter().zip(GRID) {
            size(&largest, expr, "blocks in a dimension of the grid", 1..=most)?;
        }
        let bytes = at_limits.number(scratch).map_err(|message| places.fault(scratch, message))?;
        if !(0.0..=MAX_ARENA as f64).contains(&bytes) {
            let message = format!("{bytes} bytes of scratch memory: expected 0 to {MAX_ARENA}");
            return Err(places.fault(scratch, message));
        }
        let bytes_ahead = |expr: &Expr| size(scope, expr, "bytes to look ahead", 0..=MAX_ARENA);
        let ahead = ahead.as_ref().map(bytes_ahead).transpose()?;
        Ok(Sizes { block: threads as u32, scratch: bytes.ceil() as u64, ahead })
    }

    fn template_of(&self, launch: &Launch, shown: &str) -> Result<String, CudaError> {
        if [Launch::COPY, apart::FEED, apart::CEILING].contains(&launch.op.as_str()) {
            return Ok(launch.op.clone());
        }
        let op = self.ops.find(&launch.op).or_else(|_| Op::find(&launch.op));
        let template = op.ok().and_then(|op| op.cuda);
        let none = || CudaError::NoTemplate { launch: shown.to_owned(), op: launch.op.clone() };
        template.map(str::to_owned).ok_or_else(none)
    }

    /// The index of the site's kernel.
    fn kernel(
        &mut self,
        site: &text::Site<'_>,
        scratch: u64,
        shown: &str,
    ) -> Result<u32, CudaError> {
        let fail = |error| match error {
            TextError::Placed(error) => CudaError::Source(error),
            TextError::Other(error) => CudaError::Render {
                launch: shown.to_owned(),
                path: site.template.path.clone(),
                variant: site.variant.name.clone(),
                error,
            },
        };
        // The same text under the same name is the same kernel, wherever it is launched.
        let name = format!("{}_{}", site.launch.op, site.variant.name);
        let text = text::render((&self.env, self.library), site, self.ops, &name).map_err(fail)?;
        if let Some(&known) = self.known.get(&text) {
            let kernel = &mut self.kernels[known as usize];
            kernel.scratch = kernel.scratch.max(scratch);
            return Ok(known);
        }
        let index = self.kernels.len() as u32;
        let (template, variant) = (site.template.name.clone(), site.variant.name.clone());
        self.known.insert(text.clone(), index);
        self.kernels.push(Kernel { name, template, variant, text, is_ptx: false, scratch });
        Ok(index)
    }

    /// The index of a kernel that comes as PTX.
    fn foreign(
        &mut self,
        foreign: &Foreign,
        template: &Template,
        variant: &Variant,
        scratch: u64,
    ) -> Result<u32, CudaError> {
        let (_, text) = self.library.file(&foreign.file)?.ok_or_else(|| TemplateError::Io {
            path: format!("kernels/templates/{}", foreign.file),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        let same = |k: &Kernel| k.name == foreign.function && k.text == *text;
        if let Some(known) = self.kernels.iter().position(same) {
            self.kernels[known].scratch = self.kernels[known].scratch.max(scratch);
            return Ok(known as u32);
        }
        self.kernels.push(Kernel {
            name: foreign.function.clone(),
            template: template.name.clone(),
            variant: variant.name.clone(),
            text: text.into_owned(),
            is_ptx: true,
            scratch,
        });
        Ok(self.kernels.len() as u32 - 1)
    }
}

/// Blocks that a grid may have in each dimension.
const GRID: [u64; 3] = [i32::MAX as u64, 65535, 65535];

/// What an error is about, to place it in the template.
struct Places<'a> {
    template: &'a Template,
    variant: &'a Variant,
    shown: &'a str,
}

impl Places<'_> {
    /// Refuses an expression with a name that means nothing.
    fn known(&self, scope: &Scope<'_>, expr: &Expr) -> Result<(), CudaError> {
        match scope.unknown(expr) {
            Some((word, message)) => {
                Err(Box::new(self.template.fault(&self.variant.name, (expr, word), message)).into())
            }
            None => Ok(()),
        }
    }

    /// An error about an expression's value.
    fn fault(&self, expr: &Expr, message: impl fmt::Display) -> CudaError {
        let message =
            format!("{message} (variant `{}`, launch `{}`)", self.variant.name, self.shown);
        Box::new(self.template.fault(&self.variant.name, (expr, ""), message)).into()
    }
}

/// What a foreign kernel is given, from what its header says.
fn arguments(scope: &Scope<'_>, foreign: &Foreign) -> Result<Vec<Argument>, String> {
    let launch = scope.launch;
    let one = |text: &String| {
        if let Some((kind, expr)) = text.split_once(':') {
            let expr: Expr = expr.trim().parse().map_err(|e| format!("`{text}`: {e}"))?;
            if let Some((_, message)) = scope.unknown(&expr) {
                return Err(format!("`{text}`: {message}"));
            }
            return match kind.trim() {
                "i32" => Ok(Argument::I32(expr)),
                "i64" => Ok(Argument::I64(expr)),
                "f32" => Ok(Argument::F32(expr)),
                other => Err(format!("`{text}`: expected i32, i64 or f32, found {other}")),
            };
        }
        match text.as_str() {
            "scratch" => Ok(Argument::Scratch),
            "null" => Ok(Argument::Null),
            name => {
                let found = launch.named_values().position(|(n, v)| n == name && v.is_some());
                let found = found.ok_or_else(|| format!("there is no operand or result `{name}`"));
                found.map(|i| Argument::Value(i as u32))
            }
        }
    };
    foreign.args.iter().map(one).collect()
}

/// Sizes of a launch, whatever the step: threads of a block, and bytes of the kernel's own memory and of weights that it
/// may look ahead to.
#[derive(Default)]
struct Sizes {
    block: u32,
    scratch: u64,
    ahead: Option<u64>,
}

/// How the copy engine is to read an operand.
fn tile_map(scope: &Scope<'_>, tiles: &Tiles) -> Result<TileMap, String> {
    let Tiles { operand: name, rows, dealt } = tiles;
    let mut all = scope.launch.named_values();
    let found = all.position(|(known, value)| known == *name && value.is_some());
    let value = found.ok_or_else(|| format!("`tiles`: there is no operand `{name}`"))? as u32;
    match whole(scope.number(rows)?, rows)? {
        rows @ 1..=TileMap::MOST_ROWS => Ok(TileMap { value, rows, dealt: *dealt }),
        n => Err(format!("`{rows}`: expected 1 to {} rows, found {n}", TileMap::MOST_ROWS)),
    }
}

fn matmul(launch: &Launch, roles: &super::template::MatmulRoles) -> Result<Matmul, String> {
    let find = |name: &String| -> Result<Option<Value>, String> {
        let mut all = launch.named_values();
        let found = all.find(|(known, _)| known == name);
        let (_, value) = found.ok_or_else(|| format!("there is no operand `{name}`"))?;
        Ok(value.cloned())
    };
    let needed = |name: &String| find(name)?.ok_or_else(|| format!("operand `{name}` is left out"));
    let optional = |name: &Option<String>| name.as_ref().map_or(Ok(None), find);
    Ok(Matmul {
        x: needed(&roles.x)?,
        w: needed(&roles.w)?,
        add: optional(&roles.add)?,
        bias: optional(&roles.bias)?,
    })
}

#[cfg(test)]
mod tests;
