//! Matrix products by cuBLASLt.

#![allow(unsafe_code, reason = "cuBLASLt is a C library")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use infernum_ir::DType;

use super::driver::{DeviceMemory, Gpu, GpuError, Result, Stream};

/// Bytes of workspace: what NVIDIA recommends for Hopper.
const WORKSPACE: u64 = 32 << 20;

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
    ready: HashMap<Shape, Ready>,
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
        Ok(Blas { handle, workspace, ready: HashMap::new() })
    }

    pub(super) fn run(&mut self, stream: &Stream, shape: Shape, places: Places) -> Result<()> {
        self.prepare(shape)?;
        let ready = &self.ready[&shape];
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
    pub(super) fn prepare(&mut self, shape: Shape) -> Result<()> {
        if !self.ready.contains_key(&shape) {
            let ready = self.choose(shape)?;
            self.ready.insert(shape, ready);
        }
        Ok(())
    }

    /// cuBLASLt is column-major: it is asked for `yᵀ = w · xᵀ`.
    fn choose(&self, shape: Shape) -> Result<Ready> {
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
        // SAFETY: all descriptions are alive; each attribute has the size that it is given.
        unsafe {
            let transposed = 1i32; // CUBLAS_OP_T
            attribute(desc, Attr::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
            if let Some(dtype) = shape.bias {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                attribute(desc, Attr::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
                let ty = data_type(dtype)?;
                attribute(desc, Attr::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &ty)?;
            }
            let pref = of(result::create_matmul_pref(), "cublasLtMatmulPreferenceCreate")?;
            let bytes = self.workspace.bytes() as usize;
            let set = result::set_matmul_pref_attribute(
                pref,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            );
            of(set, "cublasLtMatmulPreferenceSetAttribute")?;
            let found = result::get_matmul_algo_heuristic(self.handle, desc, w, x, y, y, pref);
            _ = result::destroy_matmul_pref(pref);
            let algo = of(found, "cublasLtMatmulAlgoGetHeuristic")?.algo;
            Ok(Ready { desc, w, x, y, algo })
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: each was created once and is destroyed once.
        unsafe {
            for r in self.ready.values() {
                _ = result::destroy_matmul_desc(r.desc);
                for layout in [r.w, r.x, r.y] {
                    _ = result::destroy_matrix_layout(layout);
                }
            }
            _ = result::destroy_handle(self.handle);
        }
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
