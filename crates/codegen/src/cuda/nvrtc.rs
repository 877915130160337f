//! NVRTC, found and loaded at run time: CUDA text to machine code, with no GPU and no toolkit.

#![allow(unsafe_code, reason = "NVRTC is a C library, loaded at run time")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

/// NVRTC is missing, or refuses.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum NvrtcError {
    #[error(
        "NVRTC was not found: looked for libnvrtc.so.13 and .12 in {looked}; install the CUDA \
         toolkit or `pip install nvidia-cuda-nvrtc`, and point CUDA_HOME or INFERNUM_NVRTC at it"
    )]
    NotFound { looked: String },
    #[error("{path}: {message}")]
    Load { path: String, message: String },
    #[error("NVRTC: {call}: {message}")]
    Call { call: &'static str, message: String },
    #[error("`{kernel}` does not compile for {arch}:\n{log}")]
    Compile { kernel: String, arch: String, log: String },
}

type Program = *mut c_void;
type Status = c_int;

/// NVRTC's functions. Their signatures have been the same since CUDA 11.1.
struct Api {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    message: unsafe extern "C" fn(Status) -> *const c_char,
}

/// A loaded NVRTC.
pub struct Compiler {
    api: Api,
    /// Where it was found.
    pub path: PathBuf,
    /// Major and minor.
    pub version: (i32, i32),
    /// Keep the code that the functions are in.
    _libraries: Vec<Library>,
}

impl Compiler {
    /// Finds and loads NVRTC: `INFERNUM_NVRTC` (a file or a folder), `CUDA_HOME`, `CUDA_PATH`,
    /// `/usr/local/cuda`, pip's packages in `VIRTUAL_ENV`, then the loader's own path.
    pub fn find() -> Result<Compiler, NvrtcError> {
        let folders = folders();
        for folder in &folders {
            for name in ["libnvrtc.so.13", "libnvrtc.so.12"] {
                let path = folder.join(name);
                if path.is_file() {
                    return Compiler::load(&path);
                }
            }
        }
        for name in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
            if let Ok(found) = Compiler::load(Path::new(name)) {
                return Ok(found);
            }
        }
        let looked: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        Err(NvrtcError::NotFound { looked: looked.join(", ") + ", the loader's path" })
    }

    /// Loads this file.
    pub fn load(path: &Path) -> Result<Compiler, NvrtcError> {
        let fail = |e: libloading::Error| NvrtcError::Load {
            path: path.display().to_string(),
            message: e.to_string(),
        };
        let mut libraries = Vec::new();
        // NVRTC loads its builtins by name: they must be known to the loader by then.
        if let Some(builtins) = path.parent().and_then(builtins) {
            // SAFETY: NVIDIA's libraries run no code of consequence when loaded.
            libraries.extend(unsafe { Library::open(Some(builtins), RTLD_NOW | RTLD_GLOBAL) });
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(fail)?;
        // SAFETY: the types are those of nvrtc.h, and the library outlives the functions.
        let api = unsafe {
            Api {
                create: *get(&library, c"nvrtcCreateProgram").map_err(fail)?,
                destroy: *get(&library, c"nvrtcDestroyProgram").map_err(fail)?,
                compile: *get(&library, c"nvrtcCompileProgram").map_err(fail)?,
                log_size: *get(&library, c"nvrtcGetProgramLogSize").map_err(fail)?,
                log: *get(&library, c"nvrtcGetProgramLog").map_err(fail)?,
                cubin_size: *get(&library, c"nvrtcGetCUBINSize").map_err(fail)?,
                cubin: *get(&library, c"nvrtcGetCUBIN").map_err(fail)?,
                message: *get(&library, c"nvrtcGetErrorString").map_err(fail)?,
            }
        };
        let mut version = (0, 0);
        // SAFETY: the signature is that of nvrtc.h; both pointers are valid.
        unsafe {
            let get_version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status> =
                get(&library, c"nvrtcVersion").map_err(fail)?;
            get_version(&raw mut version.0, &raw mut version.1);
        }
        libraries.push(library);
        Ok(Compiler { api, path: path.to_owned(), version, _libraries: libraries })
    }

    /// Options that every kernel is compiled with, but for the architecture.
    pub const OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

    /// Compiles `text` for an architecture (`sm_90a`): machine code, and what the assembler says of
    /// registers and spills if `verbose`.
    pub fn compile(
        &self,
        kernel: &str,
        text: &str,
        arch: &str,
        verbose: bool,
    ) -> Result<(Vec<u8>, String), NvrtcError> {
        let invalid = |_| NvrtcError::Call {
            call: "nvrtcCreateProgram",
            message: "the text has a NUL byte".to_owned(),
        };
        let source = CString::new(text).map_err(invalid)?;
        let name = CString::new(format!("{kernel}.cu")).map_err(invalid)?;
        let mut options: Vec<String> = vec![format!("--gpu-architecture={arch}")];
        options.extend(Compiler::OPTIONS.map(str::to_owned));
        if verbose {
            options.push("--ptxas-options=-v".to_owned());
        }
        let options: Vec<CString> =
            options.into_iter().map(CString::new).collect::<Result<_, _>>().map_err(invalid)?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = Handle { program: null_mut(), api: &self.api };
        // SAFETY: all pointers are to memory that outlives the calls; the text and the options end
        // in NUL, and there are no headers.
        unsafe {
            let create = (self.api.create)(
                &raw mut program.program,
                source.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            );
            self.ok("nvrtcCreateProgram", create)?;
            let n = pointers.len() as c_int;
            let status = (self.api.compile)(program.program, n, pointers.as_ptr());
            let log =
                self.bytes("nvrtcGetProgramLog", &program, self.api.log_size, self.api.log)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            if status != 0 {
                let (kernel, arch) = (kernel.to_owned(), arch.to_owned());
                return Err(NvrtcError::Compile { kernel, arch, log });
            }
            let cubin =
                self.bytes("nvrtcGetCUBIN", &program, self.api.cubin_size, self.api.cubin)?;
            Ok((cubin, log))
        }
    }

    /// What a pair of NVRTC's functions gives: a size, and as many bytes.
    ///
    /// # Safety
    /// `program` is valid, and `get` writes what `size` says.
    unsafe fn bytes(
        &self,
        call: &'static str,
        program: &Handle<'_>,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut n = 0usize;
        // SAFETY: as promised by the caller.
        self.ok(call, unsafe { size(program.program, &raw mut n) })?;
        let mut bytes = vec![0u8; n];
        if n > 0 {
            // SAFETY: `bytes` has room for the `n` bytes that are written.
            self.ok(call, unsafe { get(program.program, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }

    fn ok(&self, call: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC gives a static text for every status, known or not.
        let message = unsafe { CStr::from_ptr((self.api.message)(status)) };
        Err(NvrtcError::Call { call, message: message.to_string_lossy().into_owned() })
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVRTC {}.{} ({})", self.version.0, self.version.1, self.path.display())
    }
}

/// A program that is destroyed when done with.
struct Handle<'a> {
    program: Program,
    api: &'a Api,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: it was created and is destroyed once.
            unsafe { (self.api.destroy)(&raw mut self.program) };
        }
    }
}

/// # Safety
/// The function of that name has type `T`.
unsafe fn get<T>(library: &Library, name: &CStr) -> Result<Symbol<T>, libloading::Error> {
    // SAFETY: as promised by the caller.
    unsafe { library.get(name.to_bytes_with_nul()) }
}

fn builtins(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let mut names = entries.map(|e| e.path()).filter(|p| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        name.starts_with("libnvrtc-builtins.so") && !name.ends_with(".alt.so")
    });
    names.next()
}

/// Where NVRTC may lie.
fn folders() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut folders = Vec::new();
    if let Some(given) = var("INFERNUM_NVRTC") {
        let folder = if given.is_file() { given.parent().map(Path::to_owned) } else { Some(given) };
        folders.extend(folder);
    }
    let homes = [var("CUDA_HOME"), var("CUDA_PATH"), Some("/usr/local/cuda".into())];
    for home in homes.into_iter().flatten() {
        folders.push(home.join("lib64"));
        folders.push(home.join("targets/x86_64-linux/lib"));
    }
    if let Some(env) = var("VIRTUAL_ENV") {
        let pythons =
            std::fs::read_dir(env.join("lib")).into_iter().flatten().filter_map(Result::ok);
        for python in pythons {
            let nvidia = python.path().join("site-packages/nvidia");
            folders.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|sub| nvidia.join(sub)));
        }
    }
    folders
}
