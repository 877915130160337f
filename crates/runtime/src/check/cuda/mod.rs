//! Holds every variant of every CUDA kernel against its op's definition, behind guards.

mod compiled;
mod guards;
mod setups;
mod shapes;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use infernum_codegen::cuda::{
    Cache, Compiler, Cubin, CudaError, Device, Library, TunedVariants, admitted, attach,
};
use infernum_codegen::{Kernel, Plan, TargetKind, plan_buckets};
use infernum_ir::{DType, Memory, Module, Op, OpSet};
use infernum_passes::data::Kernels;
use rayon::prelude::*;

use self::guards::Guards;
use self::setups::setups;
use super::cases::Tried;
use super::{Batch, Comparison, KernelVerdict, Trial, allowed};
use crate::cuda::{CudaExecutor, CudaOptions, Gpu};
use crate::exec::StepInputs;

pub use self::compiled::{CompiledKernel, Extent, compile};

const BLOCK: usize = StepInputs::BLOCK_SIZE;

/// What [`check`] is to try.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted<'a> {
    /// Fixes the random choices.
    pub seed: u64,
    /// Ops whose names contain this.
    pub op: &'a str,
    /// Of their templates' variants those whose names contain this.
    pub variant: &'a str,
}

/// What is tried: a call, in some steps.
#[derive(Clone)]
struct Setup {
    op: Op,
    call: Tried,
    dtype: DType,
    batch: &'static Batch,
    /// The variants that are tried; all that are admitted where none is named.
    variants: &'static [&'static str],
}

/// Ops with a template that [`check`] has no calls for. What repacks weights runs as those of `dequantise` are loaded.
pub fn unchecked(kernels: &Kernels, library: &Library) -> Vec<&'static str> {
    let setups = setups(kernels, library, "", &mut |_, _| {});
    let has_template = |op: &Op| op.cuda.is_some_and(|t| library.template(t).is_ok());
    let all = kernels.ops.all().filter(|op| op.memory != Memory::Repacked);
    let all = all.filter(|op| has_template(op) && !setups.iter().any(|s| s.op.name == op.name));
    all.map(|op| op.name).collect()
}

/// What is tried: a plan for each variant.
struct Job {
    setup: Setup,
    module: Module,
    trials: Vec<VariantPlan>,
}

/// A kernel's binary, or why there is none.
type Compiled = Result<Vec<Cubin>, String>;

/// Within this, every trial ends whose kernels do.
const STUCK: Duration = Duration::from_secs(60);

/// A plan that runs one variant.
struct VariantPlan {
    variant: String,
    /// The order of summation that all of the plan's kernels of the op declare.
    order: Option<String>,
    plan: Plan,
    /// Where each of the plan's kernels is in [`Texts::all`].
    kernels: Vec<usize>,
}

/// The kernels of many plans, each once. Plans keep none of the text.
#[derive(Default)]
struct Texts {
    all: Vec<Kernel>,
    known: HashMap<String, usize>,
}

impl Texts {
    /// Takes a plan's kernels: where each is.
    fn take(&mut self, plan: &mut Plan) -> Vec<usize> {
        let index = |kernel: &mut Kernel| {
            let text = std::mem::take(&mut kernel.text);
            *self.known.entry(text).or_insert_with_key(|text| {
                self.all.push(Kernel { text: text.clone(), ..kernel.clone() });
                self.all.len() - 1
            })
        };
        plan.kernels.iter_mut().map(index).collect()
    }
}

impl Setup {
    /// Its plan without kernels, and the names of the variants that a device admits for it.
    fn variants(
        &self,
        module: &Module,
        ops: &OpSet,
        library: &Library,
        device: &Device,
    ) -> Result<(Plan, Vec<String>), String> {
        let buckets: Vec<_> = self.batch.buckets.iter().map(|b| (*b, module.clone())).collect();
        let plan = plan_buckets(&buckets, TargetKind::Cuda, self.batch.limits);
        let plan = plan.map_err(|e| e.to_string())?;
        let mut variants =
            admitted(&plan, self.op.name, ops, library, device).map_err(|e| e.to_string())?;
        variants.retain(|v| self.variants.is_empty() || self.variants.contains(&v.as_str()));
        Ok((plan, variants))
    }

    /// Plans of the variants whose names contain `wanted`.
    fn job(
        &self,
        ops: &OpSet,
        library: &Library,
        device: &Device,
        wanted: &str,
    ) -> Result<Job, String> {
        let module = self.call.module(self.dtype, ops)?;
        let (plan, variants) = self.variants(&module, ops, library, device)?;
        let made = || -> Result<_, CudaError> {
            let template = library.template(self.op.cuda.unwrap_or_default())?;
            let variants = variants.into_iter().filter(|v| v.contains(wanted));
            let trials = variants.map(|variant| {
                let mut plan = plan.clone();
                let only = TunedVariants::everywhere(&template.name, &variant);
                let choices = attach(&mut plan, ops, library, device, &only)?;
                // Steps that a variant is not for run others, whose order may be another.
                let made = choices.made.iter().filter(|m| m.site.op == self.op.name);
                let mut orders = made.map(|m| {
                    template.variants.iter().find(|v| v.name == m.variant)?.order.as_deref()
                });
                let order =
                    orders.next().flatten().filter(|o| orders.all(|other| other == Some(o)));
                let order = order.map(str::to_owned);
                Ok(VariantPlan { variant, order, plan, kernels: Vec::new() })
            });
            trials.collect()
        };
        Ok(Job { setup: self.clone(), trials: made().map_err(|e| e.to_string())?, module })
    }

    /// The error that the op's tolerance allows, or that of an op through which its results are seen.
    fn allowed(&self) -> f64 {
        let own = allowed(self.op.tolerance, self.dtype);
        let (Tried::Written(case, _)
        | Tried::Cached(case, _)
        | Tried::Coded(case, ..)
        | Tried::Quantised(case, ..)) = &self.call
        else {
            return own;
        };
        let seen = case.after().map(|op| allowed(op.tolerance, self.dtype)).fold(own, f64::max);
        self.call.allowed(seen)
    }

    /// The call and the steps, as messages name them.
    fn case(&self) -> String {
        format!("{}, {}", self.call, self.batch.name)
    }

    /// A trial of a variant, as messages name it.
    fn named(&self, variant: &str) -> String {
        format!("{}.{variant} {} ({})", self.op.name, self.dtype, self.case())
    }

    fn verdict(&self, variant: &str, outcome: Result<Comparison, String>) -> KernelVerdict {
        KernelVerdict {
            op: self.op.name.to_owned(),
            variant: Some(variant.to_owned()),
            dtype: self.dtype,
            case: self.case(),
            allowed: self.allowed(),
            outcome,
        }
    }
}

/// Plans of all setups, and their kernels, each once.
fn jobs(
    setups: &[Setup],
    (ops, library, device): (&OpSet, &Library, &Device),
    variant: &str,
    problem: &mut dyn FnMut(&Setup, String),
) -> (Vec<Job>, Texts) {
    let (mut jobs, mut kernels) = (Vec::new(), Texts::default());
    // Some at a time, so that few texts are kept more than once.
    for part in setups.chunks(64) {
        let made: Vec<_> = part.par_iter().map(|s| s.job(ops, library, device, variant)).collect();
        for (setup, job) in part.iter().zip(made) {
            match job {
                // What no variant is for is not computed.
                Ok(job) if job.trials.is_empty() => {}
                Ok(mut job) => {
                    job.trials.iter_mut().for_each(|t| t.kernels = kernels.take(&mut t.plan));
                    jobs.push(job);
                }
                Err(message) => problem(setup, message),
            }
        }
    }
    (jobs, kernels)
}

/// The kernels that [`check`] would run on a device, each once; `problem` gets what has none, by op.
fn kernels(
    data: &Kernels,
    library: &Library,
    device: &Device,
    only: &str,
    problem: &mut dyn FnMut(&str, String),
) -> Vec<Kernel> {
    let setups = setups(data, library, only, problem);
    let mut failed = |setup: &Setup, message: String| problem(setup.op.name, message);
    jobs(&setups, (&data.ops, library, device), "", &mut failed).1.all
}

/// Runs every variant of every kernel of `data` that `gpu` admits at some size that is tried, in every
/// element type, over ragged batches on scattered blocks. A kernel that writes beside its results, to
/// an operand, a weight or another sequence's cache, or leaves an element unwritten, fails. `report`
/// gets each verdict as soon as it is there, and `stuck` is told of a trial that does not end: there is nothing left to do
/// then but to end the process.
pub fn check(
    data: &Kernels,
    library: &Library,
    gpu: &Arc<Gpu>,
    cache: &Cache,
    wanted: Wanted<'_>,
    report: &mut dyn FnMut(KernelVerdict),
    stuck: &(dyn Fn(&str) + Sync),
) {
    let device = Device::of(gpu.sm, gpu.sms);
    let ops = &data.ops;
    let setups = setups(data, library, wanted.op, &mut |op, problem| {
        report(KernelVerdict::problem(op, problem));
    });
    let mut failed = |setup: &Setup, problem| report(setup.verdict("?", Err(problem)));
    let (jobs, kernels) = jobs(&setups, (ops, library, &device), wanted.variant, &mut failed);
    // Each on its own: that one does not compile says nothing of the others.
    let compile = |kernel: &Kernel| {
        let cubin = cache.cubins(std::slice::from_ref(kernel), &device.arch, &mut Compiler::find);
        cubin.map(|(cubins, _)| cubins).map_err(|e| e.to_string())
    };
    let cubins: Vec<OnceLock<Compiled>> = kernels.all.iter().map(|_| OnceLock::new()).collect();
    let compiled = |index: usize| cubins[index].get_or_init(|| compile(&kernels.all[index]));
    // Kernels are compiled and references are computed on all cores while the GPU runs; few wait, since some are large.
    let (sender, receiver) = sync_channel(4);
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let receiver = receiver; // dropped if this thread panics, so that the others end
        for _ in 0..threads {
            let sender = sender.clone();
            let (jobs, next, compiled) = (&jobs, &next, &compiled);
            scope.spawn(move || {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for kernel in job.trials.iter().flat_map(|t| &t.kernels) {
                        compiled(*kernel);
                    }
                    let trial = Trial::new(&job.module, wanted.seed, job.setup.batch, BLOCK);
                    if sender.send((job, trial)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let (running, tell) = channel();
        scope.spawn(move || watch(&tell, stuck));
        for (job, trial) in receiver {
            // The first variant of each order, and its bits.
            let mut orders: HashMap<&str, (&str, u64)> = HashMap::new();
            for own in &job.trials {
                let outcome = trial.as_ref().map_err(Clone::clone).and_then(|trial| {
                    let cubins = own.kernels.iter().map(|i| compiled(*i).clone());
                    let cubins = cubins.collect::<Result<Vec<_>, _>>()?.concat();
                    _ = running.send(Some(job.setup.named(&own.variant)));
                    let found = compare(own, &cubins, trial, &job.setup, gpu);
                    _ = running.send(None);
                    let found = found?;
                    let Some(order) = own.order.as_deref() else { return Ok(found) };
                    let (first, bits) =
                        *orders.entry(order).or_insert((own.variant.as_str(), found.bits));
                    if bits != found.bits {
                        return Err(format!(
                            "other bits than `{first}`, which has the order `{order}` as well"
                        ));
                    }
                    Ok(found)
                });
                report(job.setup.verdict(&own.variant, outcome));
            }
        }
    });
}

/// Tells of a trial that does not end: a kernel that waits for what never comes holds the GPU, and this process, for good.
fn watch(running: &Receiver<Option<String>>, stuck: &(dyn Fn(&str) + Sync)) {
    let mut named: Option<String> = None;
    loop {
        match running.recv_timeout(STUCK) {
            Ok(next) => named = next,
            Err(RecvTimeoutError::Timeout) => {
                if let Some(name) = named.take() {
                    stuck(&format!("{name}: has not ended in {} s", STUCK.as_secs()));
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// A plan's steps against what they should yield: launch by launch behind guards, and then as steps run, each
/// kernel beginning while the one before it ends. A variant that declares an order must give the same bits each time.
fn compare(
    own: &VariantPlan,
    cubins: &[Cubin],
    trial: &Trial,
    setup: &Setup,
    gpu: &Arc<Gpu>,
) -> Result<Comparison, String> {
    let (kv_blocks, allowed) = (setup.batch.blocks(BLOCK), setup.allowed());
    let options = CudaOptions { kv_blocks, poison: true, ..CudaOptions::default() };
    let (plan, guards) = (own.plan.clone(), Some(Box::new(Guards) as _));
    let executor = CudaExecutor::watched(plan, cubins, &trial.weights, gpu, options, guards);
    let mut executor = executor.map_err(|e| e.to_string())?;
    let weights = executor.read_weights().map_err(|e| e.to_string())?;
    let guarded = trial.compare(&mut executor, allowed)?;
    let after = executor.read_weights().map_err(|e| e.to_string())?;
    if let Some(at) = weights.iter().zip(&after).position(|(a, b)| a != b) {
        return Err(format!("writes to byte {at} of the weights"));
    }
    executor.unwatch();
    let found = trial.compare(&mut executor, allowed)?;
    if own.order.is_some() && found.bits != guarded.bits {
        return Err("has an order, but other bits each time".to_owned());
    }
    Ok(guarded.join(found))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use infernum_codegen::cuda::CheckSizes;

    use super::*;

    fn is_directive(line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        matches!(words[..], ["#line", n, name] if n.parse::<u32>().is_ok() && name.ends_with('"'))
    }

    /// Every variant that a GPU can have is tried on it: on Hopper, or where only others have it on one of them.
    #[test]
    fn every_variant_is_tried() {
        let kernels = Kernels::load(None, &[]).expect("the built-in files");
        let ops = &kernels.ops;
        let (library, device) = (Library::default(), Device::named("sm_90a").expect("a device"));
        assert_eq!(unchecked(&kernels, &library), [""; 0]);
        let others = ["sm_75", "sm_80"].map(|arch| Device::named(arch).expect("a device"));
        let (mut all, mut tried) = (BTreeSet::new(), BTreeSet::new());
        let mut problem = |op: &str, why: String| panic!("{op}: {why}");
        let mut texts_of = BTreeSet::new();
        for setup in setups(&kernels, &library, "", &mut problem) {
            let name = setup.op.cuda.expect("a template");
            let template = library.template(name).expect("a template");
            let module = setup.call.module(setup.dtype, ops).expect("a module");
            let on = |device| {
                let found = setup.variants(&module, ops, &library, device);
                found.unwrap_or_else(|e| panic!("{}: {e}", setup.call)).1
            };
            tried.extend(on(&device).into_iter().map(|v| format!("{name}.{v}")));
            if template.check_sizes == CheckSizes::Products {
                let others = others.iter().flat_map(on);
                tried.extend(others.map(|v| format!("{name}.{v}")));
            }
            all.extend(template.variants.into_iter().map(|v| format!("{name}.{}", v.name)));
            // Directives stand at the beginning of lines, or they are none.
            if !texts_of.insert(name) {
                continue;
            }
            let job = setup
                .job(ops, &library, &device, "")
                .unwrap_or_else(|e| panic!("{}: {e}", setup.call));
            for kernel in job.trials.iter().flat_map(|t| &t.plan.kernels) {
                let text = if kernel.is_ptx { "" } else { kernel.text.as_str() };
                let wrong =
                    text.lines().find(|line| line.contains("#line ") && !is_directive(line));
                assert!(wrong.is_none(), "{}: {wrong:?}", kernel.name);
            }
        }
        // Which of nearly equal sums of codes is the largest cannot be said; the sums themselves are those of `linear`.
        let untried = all.difference(&tried).filter(|v| !v.contains("_argmax.codes"));
        let untried: Vec<_> = untried.collect();
        assert!(untried.is_empty(), "{untried:?}");
    }

    /// A list that cannot be read is a failure of every op whose kernels it lists.
    #[test]
    fn a_broken_list_of_variants_fails_its_ops() {
        let data = tempfile::tempdir().expect("a folder");
        let folder = data.path().join("kernels/templates/variants");
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("rows.ron"), "List(doc: \"d\")").expect("a file");
        let kernels = Kernels::load(None, &[]).expect("the built-in files");
        let mut failed = BTreeSet::new();
        setups(&kernels, &Library::new(Some(data.path())), "norm", &mut |op, why| {
            assert!(why.contains("rows.ron:1:") && why.contains("`variants` is missing"), "{why}");
            failed.insert(op.to_owned());
        });
        assert_eq!(
            failed,
            ["add_rmsnorm", "layernorm", "quantise_rmsnorm", "rmsnorm", "rmsnorm_add"]
                .map(str::to_owned)
                .into()
        );
    }
}
