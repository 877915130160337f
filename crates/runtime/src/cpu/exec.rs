//! The executor: resolves each launch's places and runs its kernel.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use infernum_codegen::{
    Arg, Asks, CacheLayout, Launch, Plan, Program, ProgramCall, TargetKind, Value,
};
use infernum_ir::{DType, Dims, Task, TensorType, Type};
use rayon::ThreadPool;

use super::kernels::{self, Args, Kernel, Operand, Plane, RopeTables, View, ViewMut};
use super::memory::{HostMemory, MAX_ARGS, Parts};
use super::packed;
use super::simd::{self, Isa};
use super::state::StepState;
use crate::exec::weights::{Loaded, load};
use crate::exec::{
    AdapterWeights, ExecError, Executor, GroupKind, LoadError, Observed, Observer, PlanExecutor,
    StepInputs, StepOutput, Ticket, WeightSource, elements, plan_check,
};

/// How to set an executor up.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Threads; 0 for one a core.
    pub threads: usize,
    /// Fills memory with NaN before it is written and after it is last read, so that a wrong plan
    /// or kernel shows. Slow.
    pub poison: bool,
    /// Measures the time that each op takes: see [`PlanExecutor::profile`].
    pub profile: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions {
            kv_blocks: 64,
            block_size: StepInputs::BLOCK_SIZE,
            threads: 0,
            poison: false,
            profile: false,
        }
    }
}

/// Threads at most; more are a mistake, and take memory before they fail.
const MAX_THREADS: usize = 1024;

/// Puts something around a launch's kernel, as the checks of kernels do.
pub(crate) type WrapKernel<'a> = dyn Fn(&Launch, Box<dyn Kernel>) -> Box<dyn Kernel> + 'a;

/// Runs a plan on the host.
pub struct CpuExecutor {
    pool: ThreadPool,
    core: Core,
    output: StepOutput,
    ticket: u64,
    computed: Duration,
}

/// All that the pool's threads work on.
struct Core {
    plan: Plan,
    /// By program and launch.
    kernels: Vec<Vec<Box<dyn Kernel>>>,
    weights: Vec<Loaded>,
    arena: HostMemory,
    /// How planes of the cache share its memory, and the memory.
    layout: CacheLayout,
    arrays: Vec<HostMemory>,
    step: StepState,
    rope: RopeTables,
    isa: Isa,
    options: CpuOptions,
    /// Time spent by program and launch.
    times: Vec<Vec<Duration>>,
}

impl CpuExecutor {
    /// Loads a plan's weights, prepares its kernels and takes its memory.
    pub fn new(
        plan: Plan,
        source: &dyn WeightSource,
        options: CpuOptions,
    ) -> Result<CpuExecutor, LoadError> {
        CpuExecutor::with_kernels(plan, source, options, &|_, kernel| kernel)
    }

    /// As [`CpuExecutor::new`], with each kernel as `wrap` makes it.
    pub(crate) fn with_kernels(
        plan: Plan,
        source: &dyn WeightSource,
        options: CpuOptions,
        wrap: &WrapKernel<'_>,
    ) -> Result<CpuExecutor, LoadError> {
        plan_check::check(&plan, TargetKind::Cpu)?;
        let kernels = prepare(&plan, wrap)?;
        let mut weights = load(&plan, source)?;
        packed::pack(&plan, &mut weights)?;
        widen_weights(&plan, &kernels, &mut weights);
        let zeroed = |what, bytes: Option<u64>| {
            let bytes = bytes.unwrap_or(u64::MAX);
            let memory = usize::try_from(bytes).ok().and_then(HostMemory::zeroed);
            memory.ok_or(LoadError::Memory { what, bytes })
        };
        let rows = (options.kv_blocks as u64).checked_mul(options.block_size as u64);
        if rows.is_none_or(|r| r > u64::from(u32::MAX)) {
            return Err(LoadError::Memory { what: "the KV cache", bytes: u64::MAX });
        }
        let layout = CacheLayout::of(&plan, options.block_size);
        let array = |bytes: &u64| zeroed("the KV cache", rows.and_then(|n| bytes.checked_mul(n)));
        let mut arrays = layout.arrays.iter().map(array).collect::<Result<Vec<_>, _>>()?;
        let mut arena = zeroed("activations", Some(plan.arena_bytes))?;
        if options.poison {
            for array in &mut arrays {
                array.as_bytes_mut().fill(POISON);
            }
            arena.as_bytes_mut().fill(POISON);
        }
        if options.threads > MAX_THREADS {
            let message = format!("expected at most {MAX_THREADS}, found {}", options.threads);
            return Err(LoadError::Threads(message));
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build();
        let pool = pool.map_err(|e| LoadError::Threads(e.to_string()))?;
        let times = kernels.iter().map(|k| vec![Duration::ZERO; k.len()]).collect();
        let (step, rope, isa) = (StepState::default(), RopeTables::default(), Isa::best());
        let core =
            Core { plan, kernels, weights, arena, layout, arrays, step, rope, isa, options, times };
        Ok(CpuExecutor {
            pool,
            core,
            output: StepOutput::default(),
            ticket: 0,
            computed: Duration::ZERO,
        })
    }

    /// Threads that steps run on.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Launches for which there is no kernel: they run the op's reference, slowly.
    pub fn fallbacks(&self) -> Vec<String> {
        let programs = self.core.plan.programs.iter().zip(&self.core.kernels);
        let launches = programs.flat_map(|(p, k)| p.launches.iter().zip(k).map(move |l| (p, l)));
        launches
            .filter(|(_, (_, kernel))| kernel.is_reference())
            .map(|(p, (l, _))| format!("{}/%{}: {}", p.name, l.name, l.op))
            .collect()
    }

    fn compute(
        &mut self,
        inputs: &StepInputs,
        observer: Option<&mut Observer<'_>>,
    ) -> Result<Ticket, ExecError> {
        let (core, output) = (&mut self.core, &mut self.output);
        self.ticket += 1;
        let start = Instant::now();
        self.pool.install(|| simd::with_team(|| core.run(inputs, output, observer)))?;
        self.computed += start.elapsed();
        Ok(Ticket(self.ticket))
    }
}

impl PlanExecutor for CpuExecutor {
    fn plan(&self) -> &Plan {
        &self.core.plan
    }

    fn submit_observed(
        &mut self,
        inputs: &StepInputs,
        observer: &mut Observer<'_>,
    ) -> Result<Ticket, ExecError> {
        self.compute(inputs, Some(observer))
    }

    fn profile(&self) -> Vec<(String, Duration)> {
        let mut ops: BTreeMap<&str, Duration> = BTreeMap::new();
        for (program, times) in self.core.plan.programs.iter().zip(&self.core.times) {
            for (launch, time) in program.launches.iter().zip(times) {
                *ops.entry(&launch.op).or_default() += *time;
            }
        }
        let mut ops: Vec<_> = ops.into_iter().map(|(op, time)| (op.to_owned(), time)).collect();
        ops.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        ops
    }

    fn kv_blocks(&self) -> usize {
        self.core.options.kv_blocks
    }

    fn describe(&self) -> String {
        format!("CPU, {} thread(s)", self.threads())
    }
}

impl Executor for CpuExecutor {
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
        self.compute(inputs, None)
    }

    fn yields_tokens(&self) -> bool {
        self.plan().yields_tokens()
    }

    fn task(&self) -> Task {
        self.plan().task
    }

    fn takes_whole(&self) -> bool {
        self.plan().takes_whole
    }

    fn is_reproducible(&self) -> bool {
        self.plan().reproducible
    }

    fn groups(&self) -> Vec<GroupKind> {
        GroupKind::of_layout(&self.core.layout)
    }

    fn adapter_slots(&self) -> usize {
        self.plan().adapters as usize
    }

    fn set_adapter(&mut self, slot: usize, weights: &AdapterWeights) -> Result<(), ExecError> {
        weights.check(self.plan(), slot)?;
        for (weight, bytes) in weights.rows() {
            let set = self.core.weights.get_mut(weight).and_then(|w| w.set_rows(slot, bytes));
            set.ok_or_else(|| ExecError::adapter("the plan's banks are others"))?;
        }
        Ok(())
    }

    fn computed(&self) -> Duration {
        self.computed
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError> {
        if ticket.0 == self.ticket { Ok(&self.output) } else { Err(ExecError::Ticket) }
    }
}

/// A NaN in every float type, and no row of anything as an integer.
const POISON: u8 = 0xff;

impl Core {
    fn run(
        &mut self,
        inputs: &StepInputs,
        output: &mut StepOutput,
        mut observer: Option<&mut Observer<'_>>,
    ) -> Result<(), ExecError> {
        if inputs.block_size() != self.options.block_size {
            let (found, expected) = (inputs.block_size(), self.options.block_size);
            let message = format!("blocks of {found} tokens, the cache has blocks of {expected}");
            return Err(ExecError::Inputs(message));
        }
        inputs.check_groups(&self.layout)?;
        inputs.check_whole(&self.plan)?;
        inputs.check_adapters(&self.plan)?;
        let (limits, rows) = (self.plan.limits, self.plan.output_rows);
        self.step.fill(inputs, &limits, self.options.kv_blocks, rows)?;
        self.rope.begin_step();
        let (tokens, decode_only) = (self.step.dims.t, inputs.is_decode_only());
        // Logits are picked from by the host.
        let asks = Asks { greedy: false, ..inputs.asks() };
        let found = self.plan.schedule_for(tokens, decode_only, asks);
        let schedule = found.ok_or(ExecError::Bucket { tokens, decode_only })?;
        for i in 0..self.plan.schedules[schedule].calls.len() {
            self.call(schedule, i)?;
            if let Some(observer) = &mut observer {
                observer(i, self.observe(schedule, i));
            }
        }
        self.read_output(schedule, output);
        Ok(())
    }

    fn call(&mut self, schedule: usize, index: usize) -> Result<(), ExecError> {
        let call = &self.plan.schedules[schedule].calls[index];
        let program = &self.plan.programs[call.program as usize];
        let kernels = &self.kernels[call.program as usize];
        let times = &mut self.times[call.program as usize];
        for ((launch, kernel), time) in program.launches.iter().zip(kernels).zip(times) {
            self.step.enter(self.layout.group(call, launch));
            let start = self.options.profile.then(Instant::now);
            let frame = Frame {
                program,
                call,
                dims: &self.step.dims,
                step: &self.step,
                weights: &self.weights,
            };
            let planes = planes(launch, call, &self.layout, &mut self.arrays);
            let arena = self.arena.as_bytes_mut();
            if self.options.poison {
                frame.poison_results(launch, arena);
            }
            let args = frame.args(launch, arena, planes, &mut self.rope, self.isa);
            args.and_then(|mut args| kernel.run(&mut args)).map_err(|message| {
                let layer = call.layer.map_or_else(String::new, |l| format!(" {l}"));
                let launch = format!("{}{layer}/%{}", program.name, launch.name);
                ExecError::Launch { launch, message }
            })?;
            if self.options.poison {
                frame.poison_freed(launch, self.arena.as_bytes_mut());
            }
            *time += start.map_or(Duration::ZERO, |s| s.elapsed());
        }
        Ok(())
    }

    fn program(&self, schedule: usize, call: usize) -> Option<&Program> {
        let call = self.plan.schedules.get(schedule)?.calls.get(call)?;
        self.plan.programs.get(call.program as usize)
    }

    fn carried<'a>(
        &'a self,
        program: &'a Program,
        result: usize,
    ) -> Option<(&'a TensorType, &'a [u8])> {
        let carried = program.results.get(result)?;
        let bytes = carried.ty.bytes(&self.step.dims) as usize;
        let start = program.buffers[carried.buffer as usize].offset as usize;
        Some((&carried.ty, &self.arena.as_bytes()[start..start + bytes]))
    }

    fn observe(&self, schedule: usize, call: usize) -> Vec<Observed> {
        let Some(program) = self.program(schedule, call) else { return Vec::new() };
        let results = program.results.iter().enumerate().filter_map(|(i, carried)| {
            let (ty, bytes) = self.carried(program, i)?;
            let shape = ty.sizes(&self.step.dims);
            let data = elements::values(ty, &shape, bytes).ok()?;
            Some(Observed { name: carried.name.clone(), ty: ty.clone(), shape, data })
        });
        results.collect()
    }

    /// The first result of the last call: logits, or tokens; a plan without calls has none.
    fn read_output(&self, schedule: usize, output: &mut StepOutput) {
        output.logits.clear();
        output.tokens.clear();
        (output.rows, output.columns) = (0, 0);
        let last = self.plan.schedules[schedule].calls.len().wrapping_sub(1);
        let found = self.program(schedule, last).and_then(|p| self.carried(p, 0));
        if let Some((ty, bytes)) = found
            && ty.dtype == DType::U32
        {
            let ids = bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
            output.tokens.extend(ids);
            output.rows = output.tokens.len();
        } else if let Some((ty, bytes)) = found
            && let Some(dtype) = kernels::float(ty.dtype)
        {
            output.logits.resize(bytes.len() / dtype.size(), 0.0);
            simd::widen_bytes(self.isa, dtype, bytes, &mut output.logits);
            output.columns = ty.last_const().unwrap_or(1) as usize;
            output.rows = output.logits.len().checked_div(output.columns).unwrap_or(0);
        }
    }
}

/// The cache planes that a launch works on, each with the first operand that is one of its versions.
fn planes<'a>(
    launch: &Launch,
    call: &ProgramCall,
    layout: &CacheLayout,
    arrays: &'a mut [HostMemory],
) -> [Option<Plane<'a>>; MAX_ARGS] {
    let mut planes = [const { None }; MAX_ARGS];
    let state = |v: &Option<Value>| match v.as_ref()?.arg {
        Arg::State(slot) => Some(call.states[slot as usize] as usize),
        _ => None,
    };
    if !launch.operands.iter().any(|v| state(v).is_some()) {
        return planes;
    }
    for (i, memory) in arrays.iter_mut().enumerate() {
        let lies_there = |v| state(v).is_some_and(|s| layout.planes[s].array == i);
        let Some(operand) = launch.operands.iter().position(lies_there) else { continue };
        if let Some(plane) = state(&launch.operands[operand]) {
            let (row_bytes, first) = (layout.arrays[i] as usize, layout.planes[plane].first);
            planes[operand] =
                Some(Plane { bytes: memory.as_bytes_mut(), row_bytes, first: first as usize });
        }
    }
    planes
}

/// What a launch's places are resolved against.
struct Frame<'a> {
    program: &'a Program,
    call: &'a ProgramCall,
    dims: &'a Dims,
    step: &'a StepState,
    weights: &'a [Loaded],
}

impl<'a> Frame<'a> {
    /// Where a value lies in the arena, at this step's sizes.
    fn range(&self, value: &Value) -> Option<Range<usize>> {
        let (Arg::Buffer(b), Type::Tensor(ty)) = (value.arg, &value.ty) else { return None };
        let start = self.program.buffers[b as usize].offset as usize;
        Some(start..start + ty.bytes(self.dims) as usize)
    }

    fn args(
        &self,
        launch: &'a Launch,
        arena: &'a mut [u8],
        planes: [Option<Plane<'a>>; MAX_ARGS],
        rope: &'a mut RopeTables,
        isa: Isa,
    ) -> Result<Args<'a>, String> {
        let mut reads = [const { None }; MAX_ARGS];
        let mut writes = [const { None }; MAX_ARGS];
        for (range, value) in reads.iter_mut().zip(&launch.operands) {
            *range = value.as_ref().and_then(|v| self.range(v));
        }
        for (range, value) in writes.iter_mut().zip(&launch.results) {
            *range = self.range(value);
        }
        let parts = Parts::carve(arena, &reads, &writes);
        let mut parts = parts.ok_or("operands and results overlap in the arena")?;
        let mut operands = [const { None }; MAX_ARGS];
        for (i, value) in launch.operands.iter().enumerate() {
            let Some(value) = value else { continue };
            let dtype = dtype(&value.ty);
            operands[i] = Some(match value.arg {
                Arg::Weight(slot) => {
                    let index = self.call.weights[slot as usize];
                    Operand::Weight(&self.weights[index as usize], index)
                }
                Arg::State(_) => Operand::State,
                Arg::Step(input) => Operand::Tensor(View {
                    dtype,
                    bytes: self.step.input(input),
                    input: Some(input),
                }),
                Arg::Buffer(_) => {
                    let start = reads[i].as_ref().map_or(0, |r| r.start);
                    match parts.read(start) {
                        Some(bytes) => Operand::Tensor(View { dtype, bytes, input: None }),
                        None => Operand::InPlace,
                    }
                }
            });
        }
        let mut results = [const { None }; MAX_ARGS];
        for (i, value) in launch.results.iter().enumerate() {
            let dtype = dtype(&value.ty);
            results[i] = parts.write(i).map(|bytes| ViewMut { dtype, bytes });
        }
        Ok(Args { step: self.step, operands, results, planes, rope, isa })
    }

    fn poison_results(&self, launch: &Launch, arena: &mut [u8]) {
        let kept = launch.operands.iter().flatten().filter_map(|v| self.range(v));
        let kept: Vec<usize> = kept.map(|r| r.start).collect();
        for range in launch.results.iter().filter_map(|v| self.range(v)) {
            if !kept.contains(&range.start) {
                arena[range].fill(POISON);
            }
        }
    }

    fn poison_freed(&self, launch: &Launch, arena: &mut [u8]) {
        for &freed in &launch.frees {
            let region = self.program.buffers[freed as usize];
            arena[region.offset as usize..(region.offset + region.bytes) as usize].fill(POISON);
        }
    }
}

fn dtype(ty: &Type) -> DType {
    match ty {
        Type::Tensor(ty) => ty.dtype,
        Type::State(ty) => ty.dtype,
    }
}

fn prepare(plan: &Plan, wrap: &WrapKernel<'_>) -> Result<Vec<Vec<Box<dyn Kernel>>>, LoadError> {
    let program = |p: &Program| {
        let kernel = |l: &Launch| {
            kernels::prepare(l, plan.reproducible).map(|kernel| wrap(l, kernel)).map_err(
                |message| {
                    let launch = format!("{}/%{}", p.name, l.name);
                    LoadError::Kernel { launch, message }
                },
            )
        };
        p.launches.iter().map(kernel).collect()
    };
    plan.programs.iter().map(program).collect()
}

/// Constants that kernels use by value are widened once; matrices stay as they are.
fn widen_weights(plan: &Plan, kernels: &[Vec<Box<dyn Kernel>>], weights: &mut [Loaded]) {
    for call in plan.schedules.iter().flat_map(|s| &s.calls) {
        let program = call.program as usize;
        for (launch, kernel) in plan.programs[program].launches.iter().zip(&kernels[program]) {
            for (i, value) in launch.operands.iter().enumerate() {
                if let Some(Value { arg: Arg::Weight(slot), .. }) = value
                    && kernel.reads_values(i)
                {
                    weights[call.weights[*slot as usize] as usize].widen();
                }
            }
        }
    }
}
