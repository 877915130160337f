//! A model.safetensors.index.json is read or refused, in bounded memory, beside one small file of tensors.

#![no_main]

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_frontend_hf::{Checkpoint, ModelFiles};
use libfuzzer_sys::fuzz_target;

const BOUND: Bound = Bound { factor: 64, slack: 1 << 20 };

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("infernum-fuzz-index-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = include_bytes!("../seeds/safetensors/one.bin");
    std::fs::write(folder.join("model-00001-of-00001.safetensors"), file).expect("a file");
    folder
});

fuzz_target!(|data: &[u8]| {
    let folder = &*FOLDER;
    std::fs::write(folder.join("model.safetensors.index.json"), data).expect("a file");
    let files = ModelFiles::folder(folder).expect("a folder");
    match bounded("open", data.len(), BOUND, || Checkpoint::open(&files)) {
        Ok(checkpoint) => {
            for tensor in checkpoint.tensors() {
                std::hint::black_box((tensor.shape, tensor.data.len()));
            }
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
