//! The CUDA driver: what we use of it, each thing once.

#![allow(unsafe_code, reason = "the driver is a C library")]

use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use crate::exec::GpuError;

/// Held while a stream is recorded and while memory or code is taken or given back: those calls wait
/// for the whole GPU, which would spoil a recording that another executor of this process makes.
static RECORDING: Mutex<()> = Mutex::new(());

fn not_recording() -> MutexGuard<'static, ()> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) type Result<T> = std::result::Result<T, GpuError>;

/// Names the call that failed.
trait Named<T> {
    fn named(self, call: &'static str) -> Result<T>;
}

impl<T> Named<T> for std::result::Result<T, result::DriverError> {
    fn named(self, call: &'static str) -> Result<T> {
        self.map_err(|e| GpuError::Call { call, message: e.to_string() })
    }
}

/// A GPU and a context on it. All that is made from it keeps it.
#[derive(Debug)]
pub struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// As the driver calls it.
    pub name: String,
    /// Compute capability: major times ten plus minor.
    pub sm: u32,
    /// Multiprocessors.
    pub sms: u32,
    /// Version of CUDA that the driver supports: 13000 is 13.0.
    pub driver: i32,
}

// SAFETY: a context may be used from any thread that makes it current, which every use does.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// How many GPUs there are; an error without a driver, and where the driver fails.
    pub fn count() -> Result<i32> {
        // SAFETY: asking whether a library can be loaded; NVIDIA's does nothing when it is.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        // A driver on a machine without a GPU does not start.
        match result::init() {
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
            started => started.named("cuInit")?,
        }
        result::device::get_count().named("cuDeviceGetCount")
    }

    /// Opens a GPU by its number.
    pub fn open(ordinal: i32) -> Result<Arc<Gpu>> {
        use sys::CUdevice_attribute_enum as Attr;
        let count = Gpu::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(GpuError::NoDevice { ordinal, count });
        }
        let device = result::device::get(ordinal).named("cuDeviceGet")?;
        // SAFETY: the device exists, and so do the attributes.
        let attr =
            |a| unsafe { result::device::get_attribute(device, a) }.named("cuDeviceGetAttribute");
        let major = attr(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
        let minor = attr(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
        let sms = attr(Attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let name = result::device::get_name(device).named("cuDeviceGetName")?;
        let mut driver = 0;
        // SAFETY: the pointer is valid.
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().named("cuDriverGetVersion")?;
        // SAFETY: the device exists; the context is released when the last user drops it.
        let context =
            unsafe { result::primary_ctx::retain(device) }.named("cuDevicePrimaryCtxRetain")?;
        let gpu = Gpu { device, context, name, sm: major * 10 + minor, sms, driver };
        gpu.bind()?;
        Ok(Arc::new(gpu))
    }

    /// Makes its context this thread's.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.named("cuCtxSetCurrent")
    }

    /// Free and all bytes of its memory.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (free, total) = result::mem_get_info().named("cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Memory of a GPU: a type of its own, with no bytes that the host could read, so that it cannot be
/// mixed up with memory of the host.
///
/// ```
/// use infernum_runtime::cuda::DeviceMemory;
///
/// fn argument(of_a_kernel: &DeviceMemory) -> u64 {
///     of_a_kernel.address()
/// }
/// ```
///
/// Memory of the host in its place does not compile:
///
/// ```compile_fail,E0308
/// use infernum_runtime::{cpu::HostMemory, cuda::DeviceMemory};
///
/// fn argument(of_a_kernel: &DeviceMemory) -> u64 {
///     of_a_kernel.address()
/// }
///
/// fn launch(on_the_host: &HostMemory) -> u64 {
///     argument(on_the_host)
/// }
/// ```
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// Zeroed memory.
    pub(super) fn zeroed(gpu: &Arc<Gpu>, what: &'static str, bytes: u64) -> Result<DeviceMemory> {
        let _guard = not_recording();
        gpu.bind()?;
        let size = usize::try_from(bytes.max(16)).unwrap_or(usize::MAX);
        // SAFETY: the memory is not read before it is set below.
        let Ok(address) = (unsafe { result::malloc_sync(size) }) else {
            let (free, total) = gpu.memory()?;
            return Err(GpuError::Memory { what, bytes, free, total });
        };
        let memory = DeviceMemory { gpu: Arc::clone(gpu), address, bytes };
        // SAFETY: the range was just allocated.
        unsafe { result::memset_d8_sync(address, 0, size) }.named("cuMemsetD8")?;
        // It only queues the work, in the null stream, for which ours do not wait: left alone, it
        // could wipe what they have written since.
        // SAFETY: the null stream is always there.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }
            .named("cuStreamSynchronize")?;
        Ok(memory)
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _guard = not_recording();
        // SAFETY: allocated once, freed once. The executor that owns it has waited for its stream.
        _ = self.gpu.bind().map(|()| unsafe { result::free_sync(self.address) });
    }
}

/// Host memory that the GPU reads and writes directly.
#[derive(Debug)]
pub(super) struct Pinned {
    gpu: Arc<Gpu>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it is plain memory, owned.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Pinned> {
        let _guard = not_recording();
        gpu.bind()?;
        // SAFETY: set to zero before anything reads it.
        let pointer = unsafe { result::malloc_host(bytes.max(16), 0) }.named("cuMemHostAlloc")?;
        let pointer = pointer.cast::<u8>();
        // SAFETY: the memory was just allocated, with that size.
        unsafe { pointer.write_bytes(0, bytes.max(16)) };
        Ok(Pinned { gpu: Arc::clone(gpu), pointer, bytes })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with that size and initialised; the GPU writes it only between a
        // submission and its wait, while nothing reads it.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _guard = not_recording();
        // SAFETY: allocated once, freed once.
        _ = self.gpu.bind().map(|()| unsafe { result::free_host(self.pointer.cast()) });
    }
}

/// A queue of work.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    pub(super) raw: sys::CUstream,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Stream> {
        gpu.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Stream { gpu: Arc::clone(gpu), raw: raw.named("cuStreamCreate")? })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.named("cuStreamSynchronize")
    }

    /// Copies `from` to the GPU; `from` must stay as it is until the copy is done.
    pub(super) fn to_device(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: callers give addresses inside allocations of theirs.
        unsafe { result::memcpy_htod_async(to, from, self.raw) }.named("cuMemcpyHtoDAsync")
    }

    /// Copies to the host; `to` holds it once the stream is done.
    pub(crate) fn to_host(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(to, from, self.raw) }.named("cuMemcpyDtoHAsync")
    }

    /// Sets bytes.
    pub(crate) fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { result::memset_d8_async(address, value, bytes, self.raw) }.named("cuMemsetD8Async")
    }

    /// A copy of memory, once all that was launched is done.
    pub(crate) fn read(&self, memory: &DeviceMemory) -> Result<Vec<u8>> {
        let mut bytes = vec![0; memory.bytes() as usize];
        self.to_host(&mut bytes, memory.address())?;
        self.synchronize()?;
        Ok(bytes)
    }

    /// Launches a kernel. If `overlaps`, its blocks may start before the kernel before it has
    /// ended; it waits where its text says.
    pub(super) fn launch(
        &self,
        function: &Function,
        Extent { grid, block, shared }: Extent,
        arguments: &mut [u64],
        tiles: &mut [sys::CUtensorMap],
        overlaps: bool,
    ) -> Result<()> {
        let numbers = arguments.iter_mut().map(|a| std::ptr::from_mut(a).cast());
        let maps = tiles.iter_mut().map(|t| std::ptr::from_mut(t).cast());
        let mut pointers: Vec<*mut c_void> = numbers.chain(maps).collect();
        // SAFETY: the union's variant is the one that the id below names.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.raw,
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlaps),
        };
        // SAFETY: the function is loaded; each argument is 8 bytes, and what follows are maps, as the
        // kernel declares.
        let status = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        status.result().named("cuLaunchKernelEx")
    }

    pub(super) fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { result::graph::launch(graph.exec, self.raw) }.named("cuGraphLaunch")
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { result::event::record(event.raw, self.raw) }.named("cuEventRecord")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        _ = self.gpu.bind().map(|()| unsafe { result::stream::destroy(self.raw) });
    }
}

/// How much of a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Blocks, in three dimensions.
    pub(super) grid: [u32; 3],
    /// Threads of a block.
    pub(super) block: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared: u32,
}

/// Records what `work` launches in a stream instead of running it.
pub(super) fn capture<E: From<GpuError>>(
    gpu: &Arc<Gpu>,
    stream: sys::CUstream,
    work: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Graph, E> {
    let _guard = not_recording();
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is alive; the capture ends below, whatever `work` says.
    unsafe { result::stream::begin_capture(stream, mode) }.named("cuStreamBeginCapture")?;
    let worked = work();
    // SAFETY: a capture was begun.
    let graph = unsafe { result::stream::end_capture(stream) }.named("cuStreamEndCapture");
    worked?;
    let graph = graph?;
    // SAFETY: the graph was just made, and is destroyed once.
    let exec = unsafe {
        let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0));
        result::graph::destroy(graph).named("cuGraphDestroy")?;
        exec.named("cuGraphInstantiate")?
    };
    Ok(Graph { gpu: Arc::clone(gpu), exec })
}

/// A recorded sequence of launches.
#[derive(Debug)]
pub(super) struct Graph {
    gpu: Arc<Gpu>,
    exec: sys::CUgraphExec,
}

// SAFETY: it may be launched from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        _ = self.gpu.bind().map(|()| unsafe { result::graph::exec_destroy(self.exec) });
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(super) struct Event {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Event> {
        gpu.bind()?;
        let raw = result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT);
        Ok(Event { gpu: Arc::clone(gpu), raw: raw.named("cuEventCreate")? })
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.named("cuEventSynchronize")
    }

    /// Milliseconds from `self` to `end`; both are done.
    pub(super) fn until(&self, end: &Event) -> Result<f32> {
        // SAFETY: both are alive and were recorded.
        unsafe { result::event::elapsed(self.raw, end.raw) }.named("cuEventElapsedTime")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        _ = self.gpu.bind().map(|()| unsafe { result::event::destroy(self.raw) });
    }
}

/// A kernel that is loaded.
#[derive(Debug)]
pub(super) struct Function {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
    raw: sys::CUfunction,
    /// Dynamic shared memory that it has been allowed.
    allowed: std::sync::atomic::AtomicU32,
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Function {}

impl Function {
    /// Loads machine code and finds a function in it.
    pub(super) fn load(gpu: &Arc<Gpu>, cubin: &[u8], name: &str) -> Result<Function> {
        let _guard = not_recording();
        gpu.bind()?;
        let message = format!("`{name}` is no name of a kernel");
        let symbol = CString::new(name)
            .map_err(|_| GpuError::Call { call: "cuModuleGetFunction", message })?;
        // SAFETY: `cubin` is a whole image made by NVRTC; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) };
        let module = module.named("cuModuleLoadData")?;
        // SAFETY: the module is loaded, and unloaded when the function is dropped.
        let raw = unsafe { result::module::get_function(module, symbol) };
        let raw = raw.named("cuModuleGetFunction")?;
        // All kernels ask for the same share of a multiprocessor's memory as shared memory, the largest: where each asks for
        // what it needs the memory is parted anew between them, and steps of one token took 0.4 to 2.4 % longer on an H100.
        let share =
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(raw, share, 100) }
            .named("cuFuncSetAttribute")?;
        Ok(Function { gpu: Arc::clone(gpu), module, raw, allowed: 0.into() })
    }

    /// More than 48 KiB of shared memory, what the kernel declares itself counted, must be asked for,
    /// once.
    pub(super) fn allow(&self, shared: u32) -> Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        if shared <= self.allowed.load(Relaxed) {
            return Ok(());
        }
        let attr = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(self.raw, attr, shared as i32) }
            .named("cuFuncSetAttribute")?;
        self.allowed.store(shared, Relaxed);
        Ok(())
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        let _guard = not_recording();
        // SAFETY: loaded once, unloaded once.
        _ = self.gpu.bind().map(|()| unsafe { result::module::unload(self.module) });
    }
}
