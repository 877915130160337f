//! Compiled kernels, kept by the hash of what they were made from.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use super::{Compiler, NvrtcError, TunedFile};
use crate::plan::Kernel;

/// Kernels could not be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum CacheError {
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
}

/// Machine code of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin(pub Vec<u8>);

/// A folder of compiled kernels. It may be shared by any number of processes: files are written
/// whole under another name and then renamed, each begins with a hash of the rest, and a file that
/// is not what it says is compiled anew. A folder that cannot be written only costs time.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// In this folder.
    pub fn new(folder: &Path) -> Cache {
        Cache { folder: Some(folder.to_owned()) }
    }

    /// None: every kernel is compiled.
    pub fn off() -> Cache {
        Cache { folder: None }
    }

    /// `$XDG_CACHE_HOME/infernum/cubins`, or `~/.cache/infernum/cubins`.
    pub fn user() -> Cache {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")));
        Cache { folder: base.map(|b| b.join("infernum").join("cubins")) }
    }

    /// Where the variants are kept that were found to be fastest on a device; `None` if nothing is.
    pub fn tuned_file(&self, device: &str) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join("tuned").join(TunedFile::name(device)))
    }

    /// Machine code for every kernel, in order, and how many had to be compiled; `compiler` is only
    /// asked for one when a kernel is missing.
    pub fn cubins(
        &self,
        kernels: &[Kernel],
        arch: &str,
        compiler: &mut dyn FnMut() -> Result<Compiler, NvrtcError>,
    ) -> Result<(Vec<Cubin>, usize), CacheError> {
        let keys: Vec<String> = kernels.iter().map(|k| key(&k.text, arch)).collect();
        let known = |(kernel, key): (&Kernel, &String)| {
            // The driver reads PTX up to its NUL.
            let ptx = || Cubin([kernel.text.as_bytes(), &[0]].concat());
            if kernel.is_ptx { Some(ptx()) } else { self.read(key) }
        };
        let mut cubins: Vec<Option<Cubin>> = kernels.iter().zip(&keys).map(known).collect();
        let missing: Vec<usize> = (0..kernels.len()).filter(|i| cubins[*i].is_none()).collect();
        if !missing.is_empty() {
            let compiler = compiler()?;
            for (i, cubin) in missing.iter().zip(compile_all(&compiler, kernels, &missing, arch)) {
                let cubin = cubin?;
                self.write(&keys[*i], &cubin);
                cubins[*i] = Some(cubin);
            }
        }
        Ok((cubins.into_iter().flatten().collect(), missing.len()))
    }

    fn read(&self, key: &str) -> Option<Cubin> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(key)).ok()?;
        let (hash, cubin) = bytes.split_at_checked(32)?;
        (Sha256::digest(cubin).as_slice() == hash).then(|| Cubin(cubin.to_vec()))
    }

    fn write(&self, key: &str, cubin: &Cubin) {
        let Some(folder) = &self.folder else { return };
        // Of what goes wrong here nothing matters: the kernel is there, and is compiled next time.
        let _ = std::fs::create_dir_all(folder);
        let Ok(mut file) = tempfile::NamedTempFile::new_in(folder) else { return };
        let hash = Sha256::digest(&cubin.0);
        if file.write_all(&hash).and_then(|()| file.write_all(&cubin.0)).is_ok() {
            let _ = file.persist(folder.join(key));
        }
    }
}

/// What a kernel's file is called. NVRTC's version is left out: kernels of an older one still run.
fn key(text: &str, arch: &str) -> String {
    let mut hash = Sha256::new();
    for part in [text, arch].iter().chain(&Compiler::OPTIONS) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{:x}.cubin", hash.finalize())
}

/// Compiles the kernels of these indices on all cores.
fn compile_all(
    compiler: &Compiler,
    kernels: &[Kernel],
    which: &[usize],
    arch: &str,
) -> Vec<Result<Cubin, NvrtcError>> {
    let results: Vec<Mutex<Option<Result<Cubin, NvrtcError>>>> =
        which.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((i, slot)) = {
            let n = next.fetch_add(1, Ordering::Relaxed);
            which.get(n).zip(results.get(n))
        } {
            let Kernel { name, text, .. } = &kernels[*i];
            let compiled = compiler.compile(name, text, arch, false).map(|(cubin, _)| Cubin(cubin));
            if let Ok(mut slot) = slot.lock() {
                *slot = Some(compiled);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(which.len());
    std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    let stopped = || NvrtcError::Call { call: "compile", message: "a thread stopped".to_owned() };
    let result = |slot: Mutex<Option<_>>| slot.into_inner().ok().flatten();
    results.into_iter().map(|slot| result(slot).unwrap_or_else(|| Err(stopped()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_what_was_damaged_is_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = Cache::new(dir.path());
        let (key, cubin) = (key("text", "sm_80"), Cubin(vec![1, 2, 3]));
        assert_eq!(cache.read(&key), None);
        cache.write(&key, &cubin);
        assert_eq!(cache.read(&key), Some(cubin));
        for damage in [&b""[..], b"short", &[7; 40]] {
            std::fs::write(dir.path().join(&key), damage).expect("a file");
            assert_eq!(cache.read(&key), None);
        }
        // A folder that cannot be made is no error.
        Cache::new(&dir.path().join(&key).join("sub")).write(&key, &Cubin(vec![1]));
    }

    #[test]
    fn keys_tell_texts_and_architectures_apart() {
        let keys = [key("a", "sm_80"), key("a", "sm_90a"), key("as", "m_80")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
