//! A GGUF file is read or refused in memory that its size bounds; what is read lies inside of it, and its metadata becomes a config and
//! a tokenizer, or an error.

#![no_main]

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_frontend_hf::gguf::{Gguf, Value};
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_frontend_hf::{LowerOptions, Model, ModelFiles};
use infernum_ir::Sym;
use libfuzzer_sys::fuzz_target;

/// A key takes 13 bytes of a file at least, a tensor 24, and their entries four times as much.
const TABLES: Bound = Bound { factor: 8, slack: 16 << 10 };
/// Maps, specs and graphs, whatever the file is; metadata as expressions and JSON have it.
const MODEL: Bound = Bound { factor: 256, slack: 16 << 20 };

static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    std::env::temp_dir().join(format!("infernum-fuzz-{}.gguf", std::process::id()))
});

fuzz_target!(|data: &[u8]| {
    let read =
        bounded("parse", data.len(), TABLES, || Gguf::parse(data).map_err(|e| e.to_string()));
    let Ok(read) = read else { return };
    for tensor in read.tensors() {
        assert!(tensor.offset() + tensor.room() <= data.len() as u64, "outside the file");
        assert!(read.find(data, read.name(data, tensor)).is_some(), "not found by its name");
        std::hint::black_box(tensor.shape());
    }
    for (key, value) in read.entries(data) {
        assert!(read.get(data, key).is_some(), "not found by its key");
        if let Value::List(list) = value {
            assert_eq!(list.iter().count(), list.len(), "a list that ends early");
        }
    }
    std::fs::write(&*FILE, data).expect("a file");
    let files = ModelFiles::open(&*FILE).expect("a GGUF file");
    bounded("a model", data.len(), MODEL, || {
        let model =
            Model::open(files.clone(), None, &Library::default()).map_err(|e| e.to_string());
        if let Ok(model) = model {
            let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
            let _ = std::hint::black_box(model.lower(options, []).map_err(|e| e.to_string()));
        }
        match Tokenizer::open(&files) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("Once upon a time, <|x|> 3 é", true).unwrap_or_default();
                let _ = std::hint::black_box(tokenizer.decode(&ids, false));
            }
            Err(e) => drop(std::hint::black_box(e.to_string())),
        }
    });
});
