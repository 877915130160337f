//! The executor: resolves each launch's places once, then replays.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use infernum_codegen::cuda::abi::Part;
use infernum_codegen::cuda::{Cubin, Device};
use infernum_codegen::{CacheLayout, KernelLaunch, Launch, Plan, ProgramCall, Run};
use infernum_ir::{Dims, StepInput, Sym, Task, TensorType};

use super::ahead::{LaunchPlace, Span};
use super::blas::Blas;
use super::code::{Code, reads, runs_parts, uses_library};
use super::deferred::{Launches, Unpicked};
use super::driver::{DeviceMemory, Extent, Function, Gpu, Stream};
use super::frame::Frame;
use super::graphs::Graphs;
use super::inputs::{Layout, Room};
use super::options::CudaOptions;
use super::parts::PartDims;
use super::picks::Picks;
use super::repack::repack;
use super::tiles::Tiles;
use super::timer::Timer;
use super::turn::{Left, Turn};
use super::upload::Weights;
use super::watch::{DeviceState, Watch};
use crate::exec::weights::load;
use crate::exec::{
    AdapterWeights, ExecError, Executor, GpuError, GroupKind, LoadError, LogitRows, Observed,
    Observer, PickedRows, PlanExecutor, StepInputs, StepOutput, Ticket, TunedProduct, WeightSource,
    elements,
};

/// Runs a plan on a GPU.
pub struct CudaExecutor {
    // Fields are dropped in order: what uses memory goes before it.
    pub(super) graphs: Graphs,
    pub(super) core: Core,
    output: StepOutput,
    pub(super) ticket: u64,
    /// The last step, while it is not said how its tokens are picked.
    pub(super) unpicked: Option<Unpicked>,
    waited: Duration,
}

/// All that launches need.
pub(super) struct Core {
    pub(super) plan: Plan,
    pub(super) device: Device,
    pub(super) stream: Stream,
    pub(super) functions: Vec<Function>,
    /// Each kernel's own memory.
    pub(super) scratch: Vec<Option<DeviceMemory>>,
    /// What kernels that read operands in tiles are given.
    tiles: Tiles,
    /// If any launch is a library's.
    pub(super) blas: Option<Blas>,
    weights: Weights,
    arena: DeviceMemory,
    /// How planes of the cache share its arrays, and these.
    cache: CacheLayout,
    arrays: Vec<DeviceMemory>,
    /// Bytes before and after activations and each plane of the cache.
    margin: u64,
    /// What stands around each launch, and the rows of the cache that the step's tokens have, in each group
    /// of layers, which only it asks for.
    watch: Option<Box<dyn Watch>>,
    slots: Vec<Vec<usize>>,
    /// The step's inputs on the GPU.
    inputs: DeviceMemory,
    pub(super) layout: Layout,
    /// Where the last step's tokens are.
    picked: u64,
    /// Of odd and of even steps.
    pub(super) turns: [Turn; 2],
    pub(super) options: CudaOptions,
    /// By op, if measured.
    times: BTreeMap<String, Duration>,
    pub(super) gpu: Arc<Gpu>,
}

impl CudaExecutor {
    /// Loads a plan's kernels and weights and takes its memory. `cubins` are the plan's kernels, in
    /// order, for this GPU.
    pub fn new(
        plan: Plan,
        cubins: &[Cubin],
        source: &dyn WeightSource,
        gpu: &Arc<Gpu>,
        options: CudaOptions,
    ) -> Result<CudaExecutor, LoadError> {
        CudaExecutor::watched(plan, cubins, source, gpu, options, None)
    }

    /// As [`CudaExecutor::new`], with `watch` around each launch.
    pub(crate) fn watched(
        plan: Plan,
        cubins: &[Cubin],
        source: &dyn WeightSource,
        gpu: &Arc<Gpu>,
        options: CudaOptions,
        watch: Option<Box<dyn Watch>>,
    ) -> Result<CudaExecutor, LoadError> {
        let Code { device, functions, scratch } = Code::load(&plan, cubins, gpu)?;
        let stream = Stream::new(gpu)?;
        let loaded = load(&plan, source)?;
        let repack = |stream: &Stream, from: &TensorType, at: u64, to: u64| {
            repack(&plan, (&device, &functions), stream, from, (at, to))
        };
        let weights = Weights::upload(gpu, &stream, &plan.weights, &loaded, &repack)?;
        drop(loaded);
        let margin = watch.as_ref().map_or(0, |w| w.margin());
        let rows = (options.kv_blocks * StepInputs::BLOCK_SIZE) as u64;
        let cache = CacheLayout::of(&plan, StepInputs::BLOCK_SIZE);
        let array = |bytes: &u64| {
            let bytes = bytes.saturating_mul(rows).saturating_add(2 * margin);
            DeviceMemory::zeroed(gpu, "the KV cache", bytes)
        };
        let arrays = cache.arrays.iter().map(array).collect::<Result<Vec<_>, _>>()?;
        let arena = DeviceMemory::zeroed(gpu, "activations", plan.arena_bytes + 2 * margin)?;
        let rows = plan.outputs().first().and_then(|o| o.ty.shape.first());
        let most_rows = rows.map_or(0, |d| d.eval(&plan.limits)) as usize;
        let told = plan.outputs().get(2).filter(|_| plan.picks());
        let told = told.and_then(|o| o.ty.last_const()).unwrap_or(0) as usize;
        let picks = if plan.picks() { most_rows } else { 0 };
        let contexts = reads(&plan, StepInput::ContextPositions);
        let read = (contexts, options.exchanges || runs_parts(&plan));
        // A ring's table has a place for the blocks that were given back, too.
        let rings =
            GroupKind::of_layout(&cache).iter().any(|g| matches!(g, GroupKind::Ring { .. }));
        let longest = options.max_length.unwrap_or(plan.limits.s as usize);
        let table = longest.div_ceil(StepInputs::BLOCK_SIZE);
        let table = if rings { table } else { table.min(options.kv_blocks) };
        let slots = 2 * cache.slot_blocks as usize;
        let per_token = |input| if reads(&plan, input) { plan.limits.t as usize } else { 0 };
        let (segments, adapters) = (per_token(StepInput::Segments), per_token(StepInput::Adapters));
        let room = Room { table, slots, groups: cache.groups.len(), picks, segments, adapters };
        let layout = Layout::new(&plan.limits, room, read);
        let inputs = DeviceMemory::zeroed(gpu, "the step's inputs", layout.bytes() as u64)?;
        let layout = layout.at(inputs.address());
        let turn = || Turn::new(gpu, [layout.bytes(), layout.picks_bytes()], most_rows, told);
        let turns = [turn()?, turn()?];
        let core = Core {
            blas: (options.exchanges || uses_library(&plan)).then(|| Blas::new(gpu)).transpose()?,
            device,
            stream,
            functions,
            scratch,
            tiles: Tiles::default(),
            weights,
            arena,
            cache,
            arrays,
            margin,
            watch,
            slots: Vec::new(),
            inputs,
            layout,
            picked: 0,
            turns,
            options,
            times: BTreeMap::new(),
            gpu: Arc::clone(gpu),
            plan,
        };
        if let Some(watch) = &core.watch {
            watch.begin(&core.state(0)).map_err(LoadError::Plan)?;
        }
        Ok(CudaExecutor {
            graphs: Graphs::default(),
            core,
            output: StepOutput::default(),
            ticket: 0,
            unpicked: None,
            waited: Duration::ZERO,
        })
    }

    /// Bytes of weights on the GPU.
    pub fn weight_bytes(&self) -> u64 {
        self.core.weights.bytes()
    }

    /// Runs on without what stood around launches.
    pub(crate) fn unwatch(&mut self) {
        self.core.watch = None;
    }

    /// A copy of the weights, as they are on the GPU.
    pub(crate) fn read_weights(&self) -> Result<Vec<u8>, GpuError> {
        self.core.weights.read(&self.core.stream)
    }

    /// Checks and copies the inputs; which schedule to run.
    fn begin(&mut self, inputs: &StepInputs) -> Result<(usize, PartDims), ExecError> {
        self.core.gpu.bind()?;
        self.forget_unpicked()?;
        let core = &mut self.core;
        inputs.check_groups(&core.cache)?;
        inputs.check_whole(&core.plan)?;
        inputs.check_adapters(&core.plan)?;
        core.check_picks(inputs)?;
        let (blocks, rows) = (core.options.kv_blocks, core.plan.output_rows);
        let turn = &mut core.turns[(self.ticket + 1) as usize % 2];
        turn.finish()?;
        let lists = if inputs.defers_picks() {
            0 // they come with the picks
        } else {
            turn.lists.stage(inputs, &core.gpu, &core.stream)?
        };
        let (dims, used) =
            core.layout.write(inputs, blocks, rows, lists, turn.staged.bytes_mut())?;
        let (tokens, decode_only) = (dims.all.t, inputs.is_decode_only());
        let schedule = core.plan.schedule_for(tokens, decode_only, inputs.asks());
        let schedule = schedule.ok_or(ExecError::Bucket { tokens, decode_only })?;
        core.stream.to_device(core.inputs.address(), &turn.staged.bytes()[..used])?;
        if inputs.is_fed() {
            core.feed(&dims.all)?;
        }
        if core.options.poison {
            let bytes = core.plan.arena_bytes as usize;
            core.stream.fill(core.arena_start(), POISON, bytes)?;
        }
        if core.watch.is_some() {
            let groups = 0..inputs.groups().len();
            core.slots = groups.map(|group| inputs.written_rows(group).collect()).collect();
        }
        Ok((schedule, dims))
    }

    /// Has the step's tokens brought to the host, and the logits and log-probabilities that are wanted.
    pub(super) fn finish(
        &mut self,
        schedule: usize,
        dims: &Dims,
        inputs: &StepInputs,
    ) -> Result<(), ExecError> {
        let core = &mut self.core;
        let left = Left::of(&core.plan, core.arena_start(), schedule, dims);
        core.picked = left.tokens.unwrap_or(0);
        let turn = &mut core.turns[self.ticket as usize % 2];
        turn.ticket = self.ticket;
        // Sequences are asked for: where rows are tokens, all of them come.
        let by_token = core.plan.output_rows == Some(Sym::T);
        let wanted = if by_token { &LogitRows::All } else { inputs.logit_rows() };
        turn.bring(&core.gpu, &core.stream, left, wanted, inputs)?;
        Ok(())
    }
}

impl PlanExecutor for CudaExecutor {
    fn plan(&self) -> &Plan {
        &self.core.plan
    }

    /// Launch by launch, never as a graph.
    fn submit_observed(
        &mut self,
        inputs: &StepInputs,
        observer: &mut Observer<'_>,
    ) -> Result<Ticket, ExecError> {
        let (schedule, dims) = self.begin(inputs)?;
        for index in 0..self.core.plan.schedules[schedule].calls.len() {
            let all = 0..self.core.launches_of(schedule, index);
            self.core.call(schedule, index, &dims, all, index == 0)?;
            observer(index, self.core.observe(schedule, index, &dims.all)?);
        }
        self.ticket += 1;
        self.finish(schedule, &dims.all, inputs)?;
        Ok(Ticket(self.ticket))
    }

    fn picked_rows(&mut self, inputs: &StepInputs) -> Result<Option<Vec<PickedRows>>, ExecError> {
        let picks = Picks::default();
        let before = self.core.watch.replace(Box::new(picks.clone()));
        let ran = self.run(inputs).map(|_| ());
        self.core.watch = before;
        ran.map(|()| Some(picks.take()))
    }

    fn profile(&self) -> Vec<(String, Duration)> {
        let ops = self.core.times.iter().map(|(op, time)| (op.clone(), *time));
        let mut ops: Vec<_> = ops.collect();
        ops.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        ops
    }

    fn tune_products(&mut self) -> Result<Vec<TunedProduct>, ExecError> {
        self.compete_for_products()
    }

    fn kv_blocks(&self) -> usize {
        self.core.options.kv_blocks
    }

    fn describe(&self) -> String {
        self.core.gpu.name.clone()
    }
}

impl Executor for CudaExecutor {
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
        let (schedule, dims) = self.begin(inputs)?;
        let CudaOptions { graphs, poison, profile, .. } = self.core.options;
        let (asks, launches) = (inputs.asks(), Launches::submitted(inputs));
        let one_by_one = !graphs || poison || profile || self.core.watch.is_some();
        let recorded = (!one_by_one && inputs.is_decode_only())
            .then(|| self.key(dims.all.seqs, asks, launches))
            .flatten();
        if let Some(key) = recorded {
            self.record(key)?;
            self.core.stream.replay(&self.graphs.0[&key])?;
        } else {
            self.core.calls(schedule, &dims, launches)?;
        }
        self.ticket += 1;
        let ticket = Ticket(self.ticket);
        if launches == Launches::All {
            self.finish(schedule, &dims.all, inputs)?;
        } else {
            self.unpicked = Some(Unpicked::new(schedule, dims));
        }
        // While the GPU is busy: the next recording that a growing batch will want. That it fails
        // matters when it is wanted.
        if !self.core.options.exchanges
            && let Some(next) = recorded.and_then(|key| self.missing(key, asks))
        {
            let _ = self.record(next);
        }
        Ok(ticket)
    }

    fn yields_tokens(&self) -> bool {
        self.core.plan.yields_tokens()
    }

    fn samples(&self) -> bool {
        self.core.plan.picks()
    }

    fn feeds(&self) -> bool {
        self.core.plan.feed.is_some()
    }

    fn defers_picks(&self) -> bool {
        self.core.plan.picks()
    }

    fn pick(&mut self, ticket: Ticket, inputs: &StepInputs) -> Result<(), ExecError> {
        self.pick_now(ticket, inputs)
    }

    fn task(&self) -> Task {
        self.core.plan.task
    }

    fn takes_whole(&self) -> bool {
        self.core.plan.takes_whole
    }

    fn adapter_slots(&self) -> usize {
        self.core.plan.adapters as usize
    }

    fn set_adapter(&mut self, slot: usize, weights: &AdapterWeights) -> Result<(), ExecError> {
        let core = &self.core;
        weights.check(&core.plan, slot)?;
        core.gpu.bind()?;
        core.weights.set_rows(&core.gpu, &core.stream, slot, weights)?;
        Ok(())
    }

    fn is_reproducible(&self) -> bool {
        self.core.plan.reproducible
    }

    fn groups(&self) -> Vec<GroupKind> {
        GroupKind::of_layout(&self.core.cache)
    }

    fn computed(&self) -> Duration {
        self.waited
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError> {
        let turn = &self.core.turns[ticket.0 as usize % 2];
        if ticket.0 != turn.ticket {
            return Err(ExecError::Ticket);
        }
        self.core.gpu.bind()?;
        let start = Instant::now();
        turn.finish()?;
        self.waited += start.elapsed();
        turn.read(&mut self.output);
        Ok(&self.output)
    }
}

/// A NaN in every float type, and no token.
const POISON: u8 = 0xff;

impl Core {
    /// Launches some of a call's launches; the first of them is a step's `first`, or the first after its picks came.
    pub(super) fn call(
        &mut self,
        schedule: usize,
        index: usize,
        dims: &PartDims,
        range: Range<usize>,
        first: bool,
    ) -> Result<(), ExecError> {
        let plan = &self.plan;
        let call = &plan.schedules[schedule].calls[index];
        let program = &plan.programs[call.program as usize];
        let begin = range.start;
        for at in range {
            let launch = &program.launches[at];
            let fail = |message: String| {
                let layer = call.layer.map_or_else(String::new, |l| format!(" {l}"));
                let launch = format!("{}{layer}/%{} ({})", program.name, launch.name, launch.op);
                ExecError::Launch { launch, message }
            };
            let timer = self.options.profile.then(|| Timer::start(&self.gpu, &self.stream));
            let frame = self.frame(call);
            let first = first && at == begin;
            let place = LaunchPlace { schedule, call: index, launch: at };
            let mut run = || self.launch(launch, &frame, dims, first, place);
            let launched = match &self.watch {
                None => run(),
                Some(watch) => watch.around(
                    &self.state(frame.group(launch)),
                    launch,
                    &frame,
                    &dims.all,
                    &mut run,
                ),
            };
            launched.map_err(fail)?;
            if let Some(timer) = timer {
                let time = timer?.stop(&self.gpu, &self.stream)?;
                *self.times.entry(launch.op.clone()).or_default() += time;
            }
        }
        Ok(())
    }

    /// Launches a kernel or a library's product. A step's `first` kernel must not start early: it
    /// waits for the copy of the inputs.
    fn launch(
        &self,
        launch: &Launch,
        frame: &Frame<'_>,
        dims: &PartDims,
        first: bool,
        place: LaunchPlace,
    ) -> Result<(), String> {
        match &launch.run {
            None => Err("it has no kernel".to_owned()),
            Some(run @ (Run::Kernel(_) | Run::Parts { .. })) => {
                let mut parts = run.kernels().filter(|(part, _)| dims.of(*part).t > 0);
                parts.try_for_each(|kernel| {
                    self.launch_kernel(launch, kernel, frame, dims, first, place)
                })
            }
            Some(Run::Matmul(product)) => {
                let (shape, at) = frame.matmul(launch, product, &dims.all)?;
                let blas = self.blas.as_ref().ok_or("no library")?;
                blas.run(&self.stream, shape, at).map_err(|e| format!("{e} ({shape:?})"))
            }
        }
    }

    fn launch_kernel(
        &self,
        launch: &Launch,
        (part, k): (Part, &KernelLaunch),
        frame: &Frame<'_>,
        dims: &PartDims,
        first: bool,
        place: LaunchPlace,
    ) -> Result<(), String> {
        let rows = dims.of(part);
        let (grid, shared) = k.geometry.eval(launch, &rows, &self.device)?;
        let scratch = self.scratch[k.kernel as usize].as_ref().map(DeviceMemory::address);
        let mut arguments = if let Some(foreign) = &k.arguments {
            let number = |e: &_| k.geometry.number(e, launch, &rows, &self.device);
            frame.foreign(launch, foreign, scratch, &number)?
        } else {
            let mut own = frame.arguments(launch, &dims.before(part))?;
            own.extend(scratch);
            if let Some(most) = k.ahead {
                let Span { address, bytes } = self.ahead(place, most);
                own.extend([address, bytes]);
            }
            own.push(self.layout.view(frame.group(launch), part));
            own
        };
        if grid.contains(&0) {
            return Ok(());
        }
        let mut tiles = self.tiles.tensor_maps(launch, &k.tiles, frame, &self.plan.limits)?;
        let function = &self.functions[k.kernel as usize];
        // A foreign kernel does not know that it should wait for the one before it.
        let overlaps = self.options.overlap && self.device.sm >= 90;
        let overlaps = overlaps && !first && k.arguments.is_none();
        let block = k.geometry.block;
        let launched = function.allow(shared).and_then(|()| {
            let extent = Extent { grid, block, shared };
            self.stream.launch(function, extent, &mut arguments, &mut tiles, overlaps)
        });
        launched.map_err(|e| format!("{e} (grid {grid:?}, {block} threads, {shared} bytes)"))
    }

    /// The memory that launches of a group's layers work on.
    fn state(&self, group: usize) -> DeviceState<'_> {
        DeviceState {
            stream: &self.stream,
            arena: &self.arena,
            states: &self.arrays,
            inputs: &self.inputs,
            slots: self.slots.get(group).map_or(&[], Vec::as_slice),
        }
    }

    /// Where a call's values lie.
    pub(super) fn frame<'a>(&'a self, call: &'a ProgramCall) -> Frame<'a> {
        Frame {
            program: &self.plan.programs[call.program as usize],
            call,
            arena: self.arena_start(),
            margin: self.margin,
            weights: &self.weights,
            cache: &self.cache,
            arrays: &self.arrays,
            layout: &self.layout,
        }
    }

    /// Where activations begin.
    pub(super) fn arena_start(&self) -> u64 {
        self.arena.address() + self.margin
    }

    /// Puts the tokens of the step before where this step's inputs wait for them.
    fn feed(&mut self, dims: &Dims) -> Result<(), ExecError> {
        let Some(launch) = &self.plan.feed else { return Ok(()) };
        let Some(Run::Kernel(k)) = &launch.run else { return Ok(()) };
        let fail = |message| ExecError::Launch { launch: launch.name.clone(), message };
        let timer = self.options.profile.then(|| Timer::start(&self.gpu, &self.stream));
        let (grid, shared) = k.geometry.eval(launch, dims, &self.device).map_err(fail)?;
        let mut arguments = vec![self.picked, self.layout.input(StepInput::Tokens)];
        arguments.extend(self.scratch[k.kernel as usize].as_ref().map(DeviceMemory::address));
        arguments.push(self.inputs.address());
        let function = &self.functions[k.kernel as usize];
        let extent = Extent { grid, block: k.geometry.block, shared };
        self.stream.launch(function, extent, &mut arguments, &mut [], false)?;
        if let Some(timer) = timer {
            let time = timer?.stop(&self.gpu, &self.stream)?;
            *self.times.entry(launch.op.clone()).or_default() += time;
        }
        Ok(())
    }

    fn observe(
        &mut self,
        schedule: usize,
        index: usize,
        dims: &Dims,
    ) -> Result<Vec<Observed>, ExecError> {
        let call = &self.plan.schedules[schedule].calls[index];
        let program = &self.plan.programs[call.program as usize];
        let mut all = Vec::new();
        for carried in &program.results {
            let mut bytes = vec![0; carried.ty.bytes(dims) as usize];
            let at = self.arena_start() + program.buffers[carried.buffer as usize].offset;
            self.stream.to_host(&mut bytes, at)?;
            self.stream.synchronize()?;
            let (name, ty) = (carried.name.clone(), carried.ty.clone());
            let shape = ty.sizes(dims);
            let data = elements::values(&ty, &shape, &bytes)
                .map_err(|message| ExecError::Launch { launch: name.clone(), message })?;
            all.push(Observed { name, ty, shape, data });
        }
        Ok(all)
    }
}
