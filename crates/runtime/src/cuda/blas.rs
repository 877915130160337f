//! Matrix products by cuBLASLt.

#![allow(unsafe_code, reason = "cuBLASLt is a C library")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use infernum_ir::DType;

use super::driver::{DeviceMemory, Event, Gpu, Result, Stream};
use crate::exec::GpuError;

/// Bytes of workspace: what NVIDIA recommends for Hopper.
const WORKSPACE: u64 = 32 << 20;

/// Algorithms that compete for a shape, and how often each runs.
const CANDIDATES: usize = 12;
const ROUNDS: usize = 3;

/// A product's sizes and types: `y [m, n] = x [m, k] · w [n, k]ᵀ + bias [n] + add [m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) m: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) input: DType,
    pub(super) output: DType,
    pub(super) bias: Option<DType>,
    pub(super) add: bool,
}

impl Shape {
    /// A product of so many rows, whatever else it is.
    pub(super) fn of_rows(m: u64) -> Shape {
        Shape { m, n: 1, k: 1, input: DType::F32, output: DType::F32, bias: None, add: false }
    }

    /// Shapes of about as many rows, for which the same algorithm is fastest, as one of them: the
    /// largest.
    pub(super) fn class(self) -> Shape {
        let step = match self.m {
            0..=512 => 64,
            513..=4096 => 256,
            _ => 2048,
        };
        Shape { m: self.m.next_multiple_of(step), ..self }
    }
}

/// Where the tensors of a product lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) bias: u64,
    pub(super) add: u64,
    pub(super) y: u64,
}

/// A product that is ready to run: chosen once, so that every run is the same.
struct Ready {
    desc: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algo: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt on one GPU.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    // Filled as products are first run.
    ready: RefCell<HashMap<Shape, Ready>>,
    /// What was fastest for the shapes of a class.
    tuned: RefCell<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: the handle may be used from any thread, one at a time.
unsafe impl Send for Blas {}

fn of<T>(result: std::result::Result<T, result::CublasError>, call: &'static str) -> Result<T> {
    result.map_err(|e| GpuError::Call { call, message: format!("{:?}", e.0) })
}

impl Blas {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Blas> {
        preload();
        // SAFETY: asking whether a library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            let message = "libcublasLt was not found: install the CUDA toolkit, or add its folder \
                           to LD_LIBRARY_PATH";
            return Err(GpuError::Call { call: "cublasLt", message: message.to_owned() });
        }
        gpu.bind()?;
        let handle = of(result::create_handle(), "cublasLtCreate")?;
        let workspace = DeviceMemory::zeroed(gpu, "matrix products", WORKSPACE)?;
        Ok(Blas { handle, workspace, ready: RefCell::default(), tuned: RefCell::default() })
    }

    pub(super) fn run(&self, stream: &Stream, shape: Shape, places: Places) -> Result<()> {
        self.prepare(shape)?;
        self.launch(stream, &self.ready.borrow()[&shape], shape, places)
    }

    fn launch(&self, stream: &Stream, ready: &Ready, shape: Shape, places: Places) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if shape.add { &one } else { &zero };
        let c = if shape.add { places.add } else { places.y };
        // SAFETY: the descriptions are alive, and the addresses are those of allocations of at
        // least the described sizes.
        unsafe {
            if shape.bias.is_some() {
                attribute(
                    ready.desc,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    &places.bias,
                )?;
            }
            of(
                result::matmul(
                    self.handle,
                    ready.desc,
                    (&raw const one).cast(),
                    std::ptr::from_ref(beta).cast(),
                    places.w as *const c_void,
                    ready.w,
                    places.x as *const c_void,
                    ready.x,
                    c as *const c_void,
                    ready.y,
                    places.y as *mut c_void,
                    ready.y,
                    &raw const ready.algo,
                    self.workspace.address() as *mut c_void,
                    self.workspace.bytes() as usize,
                    stream.raw.cast(),
                ),
                "cublasLtMatmul",
            )
        }
    }

    /// Chooses how to compute products of a shape; the first run does it otherwise.
    pub(super) fn prepare(&self, shape: Shape) -> Result<()> {
        if !self.ready.borrow().contains_key(&shape) {
            let ready = self.choose(shape)?;
            self.ready.borrow_mut().insert(shape, ready);
        }
        Ok(())
    }

    /// Has the library's candidates for a shape, and for all of its class, compete; each writes the
    /// result. Microseconds of the library's first choice and of the winner; `None` if it is known.
    pub(super) fn tune(
        &self,
        gpu: &Arc<Gpu>,
        stream: &Stream,
        shape: Shape,
        places: Places,
    ) -> Result<Option<(f64, f64)>> {
        let class = shape.class();
        if self.tuned.borrow().contains_key(&class) {
            return Ok(None);
        }
        let candidates = self.candidates(&Ready::describe(shape)?, CANDIDATES)?;
        let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
        let mut times: Vec<f64> = vec![f64::INFINITY; candidates.len()];
        for (algo, best) in candidates.iter().zip(&mut times) {
            let mut ready = Ready::describe(shape)?;
            ready.algo = *algo;
            for round in 0..=ROUNDS {
                stream.record(&start)?;
                if self.launch(stream, &ready, shape, places).is_err() {
                    break; // a candidate may be refused
                }
                stream.record(&end)?;
                end.synchronize()?;
                if round > 0 {
                    *best = best.min(f64::from(start.until(&end)?) * 1e3);
                }
            }
        }
        let fastest = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b]));
        let Some(fastest) = fastest else { return Ok(None) };
        // What is not clearly faster is noise.
        let chosen = if times[fastest] < 0.98 * times[0] { fastest } else { 0 };
        self.tuned.borrow_mut().insert(class, candidates[chosen]);
        self.ready.borrow_mut().retain(|known, _| known.class() != class);
        Ok(Some((times[0], times[chosen])))
    }

    /// What is to run for a shape: what was found for its class, where that can do it, or the
    /// library's first choice.
    fn choose(&self, shape: Shape) -> Result<Ready> {
        let mut ready = Ready::describe(shape)?;
        let tuned = self.tuned.borrow().get(&shape.class()).copied();
        ready.algo = match tuned.filter(|algo| self.takes(&ready, algo)) {
            Some(algo) => algo,
            None => self.candidates(&ready, 1)?[0],
        };
        Ok(ready)
    }

    /// The library's best guesses, at least one.
    fn candidates(&self, ready: &Ready, most: usize) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let pref = of(result::create_matmul_pref(), "cublasLtMatmulPreferenceCreate")?;
        let bytes = self.workspace.bytes() as usize;
        // SAFETY: all descriptions are alive; the attribute has the size that it is given, and `found`
        // has room for `most` results, which are plain data.
        unsafe {
            let set = result::set_matmul_pref_attribute(
                pref,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            );
            of(set, "cublasLtMatmulPreferenceSetAttribute")?;
            let mut found = vec![std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>(); most];
            let mut count = 0;
            let Ready { desc, w, x, y, .. } = *ready;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc,
                w,
                x,
                y,
                y,
                pref,
                most as i32,
                found.as_mut_ptr(),
                &raw mut count,
            );
            _ = result::destroy_matmul_pref(pref);
            of(status.result(), "cublasLtMatmulAlgoGetHeuristic")?;
            found.truncate(count.max(0) as usize);
            found.retain(|f| f.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
            if found.is_empty() {
                let message = "it has no way to compute this product".to_owned();
                return Err(GpuError::Call { call: "cublasLtMatmulAlgoGetHeuristic", message });
            }
            Ok(found.into_iter().map(|f| f.algo).collect())
        }
    }

    /// Whether an algorithm found for another shape can compute this one.
    fn takes(&self, ready: &Ready, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        let Ready { desc, w, x, y, .. } = *ready;
        // SAFETY: all descriptions are alive; the result is plain data.
        unsafe {
            let mut found = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let status = sys::cublasLtMatmulAlgoCheck(
                self.handle,
                desc,
                w,
                x,
                y,
                y,
                std::ptr::from_ref(algo),
                &raw mut found,
            );
            status.result().is_ok() && found.workspaceSize as u64 <= self.workspace.bytes()
        }
    }
}

impl Ready {
    /// The descriptions of a product; no algorithm yet. cuBLASLt is column-major: it is asked for
    /// `yᵀ = w · xᵀ`.
    fn describe(shape: Shape) -> Result<Ready> {
        use sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        use sys::cublasLtMatmulDescAttributes_t as Attr;
        use sys::cudaDataType_t::CUDA_R_32F;
        let Shape { m, n, k, .. } = shape;
        let (input, output) = (data_type(shape.input)?, data_type(shape.output)?);
        let layout = |ty, rows: u64, cols: u64| {
            let made = result::create_matrix_layout(ty, rows, cols, rows as i64);
            of(made, "cublasLtMatrixLayoutCreate")
        };
        let desc = result::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F);
        let desc = of(desc, "cublasLtMatmulDescCreate")?;
        let (w, x, y) = (layout(input, k, n)?, layout(input, k, m)?, layout(output, n, m)?);
        // SAFETY: all descriptions are alive; each attribute has the size that it is given. The
        // algorithm is plain data.
        unsafe {
            let transposed = 1i32; // CUBLAS_OP_T
            attribute(desc, Attr::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
            if let Some(dtype) = shape.bias {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                attribute(desc, Attr::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
                let ty = data_type(dtype)?;
                attribute(desc, Attr::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &ty)?;
            }
            Ok(Ready { desc, w, x, y, algo: std::mem::zeroed() })
        }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        // SAFETY: each was created once and is destroyed once.
        unsafe {
            _ = result::destroy_matmul_desc(self.desc);
            for layout in [self.w, self.x, self.y] {
                _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.ready.borrow_mut().clear();
        // SAFETY: created once, destroyed once.
        _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// # Safety
/// The attribute has type `T`.
unsafe fn attribute<T>(
    desc: sys::cublasLtMatmulDesc_t,
    which: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<()> {
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: as promised by the caller; the value is copied.
    let set = unsafe { result::set_matmul_desc_attribute(desc, which, value, size_of::<T>()) };
    of(set, "cublasLtMatmulDescSetAttribute")
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType_t> {
    use sys::cudaDataType_t as Ty;
    match dtype {
        DType::F32 => Ok(Ty::CUDA_R_32F),
        DType::F16 => Ok(Ty::CUDA_R_16F),
        DType::Bf16 => Ok(Ty::CUDA_R_16BF),
        other => {
            let message = format!("expected f32, f16 or bf16, found {other}");
            Err(GpuError::Call { call: "cublasLt", message })
        }
    }
}

/// Loads cuBLASLt from the toolkit's folder: it is found by its name from then on.
fn preload() {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    for home in homes.chain(std::iter::once("/usr/local/cuda".into())) {
        let folder = std::path::Path::new(&home).join("lib64");
        for name in ["libcublasLt.so.13", "libcublasLt.so.12"] {
            // SAFETY: NVIDIA's library runs no code of consequence when loaded.
            if let Ok(library) =
                unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_GLOBAL) }
            {
                std::mem::forget(library); // stays loaded
                return;
            }
        }
    }
}
