//! GGUF files that llama.cpp's converter made of fixtures, against the same float64 logits.

mod damaged;
mod write;

use std::path::{Path, PathBuf};

use infernum_frontend_hf::{Model, ModelFiles};
use infernum_ir::{DType, Encoding};
use infernum_passes::data::Kernels;

use crate::parity::f32_bound;
use crate::support::{Fixture, library, machine, nmse, root};
use write::Written;

/// The files: `FAMILY__VARIANT.gguf` is of the fixture `FAMILY/VARIANT`. Those of `INFERNUM_GGUF_FIXTURES` in place of the
/// committed ones, if it is set.
fn files() -> Vec<PathBuf> {
    let given = std::env::var_os("INFERNUM_GGUF_FIXTURES").map(PathBuf::from);
    let folder = given.unwrap_or_else(|| root().join("gguf"));
    let entries = std::fs::read_dir(folder).expect("the fixtures are committed");
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("a readable folder").path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "gguf"));
    files.sort();
    files
}

/// The fixture that a file is of, opened from the file.
fn open(path: &Path) -> Result<Fixture, String> {
    let name = path.file_stem().expect("a name").to_string_lossy();
    let fixture = Fixture::open(&name.replacen("__", "/", 1));
    let files = ModelFiles::open(path).map_err(|e| e.to_string())?;
    let model = Model::open(files, None, &library()).map_err(|e| e.to_string())?;
    Ok(Fixture { model, ..fixture })
}

#[test]
fn gguf_files_match_float64() {
    let wanted = std::env::var("INFERNUM_TEST_FIXTURES").unwrap_or_default();
    let mut failures = Vec::new();
    for path in files() {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if !wanted.is_empty() && !wanted.split_whitespace().any(|w| name.starts_with(w)) {
            continue;
        }
        let found = open(&path).and_then(|fixture| {
            let run = || nmse(&fixture.run(DType::F32, "default", usize::MAX), &fixture.logits);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            run.map_err(|e| {
                e.downcast::<String>().map_or_else(|_| "a panic".to_owned(), |text| *text)
            })
        });
        match found {
            Ok(error) if error <= f32_bound() => {}
            Ok(error) => failures.push(format!("{name}: NMSE {error:.1e}")),
            Err(message) => failures.push(format!("{name}: {message}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What a file says in other names, in another order and in f32 is the same model: not a bit differs.
#[test]
fn an_f32_file_gives_the_bits_of_the_same_safetensors() {
    let (name, path) = ("llama/f32", root().join("gguf/llama__f32.gguf"));
    let found =
        open(&path).unwrap_or_else(|e| panic!("{e}")).run(DType::F32, "default", usize::MAX);
    let expected = Fixture::open(name).run(DType::F32, "default", usize::MAX);
    assert!(machine().device().is_some() || found == expected, "bits differ");
    assert!(nmse(&found, &expected) <= f32_bound());
}

/// A mixture with permuted heads, whose every layer is stored in another type of blocks: its logits are those of the values that
/// the blocks stand for, as Hugging Face's checkpoints hold them.
#[test]
fn blocks_of_every_type_give_the_logits_of_their_values() {
    let kernels = Kernels::load(None, &[]).expect("the built-in data");
    let mut encodings: Vec<Encoding> =
        kernels.ops.encodings().filter(|e| e.def().gguf.is_some()).cloned().collect();
    encodings.sort_unstable();
    assert!(encodings.len() >= 4, "GGUF's types");
    // As many layers of graphs of their own as a model may well have.
    encodings.chunks(6).for_each(|layers| blocks_give_the_logits_of_their_values(&kernels, layers));
}

fn blocks_give_the_logits_of_their_values(kernels: &Kernels, layers: &[Encoding]) {
    let written = Written::mixture(layers);
    let fixture = |path: &Path| Fixture {
        name: path.display().to_string(),
        model: Model::open(ModelFiles::open(path).expect("a file"), None, &library())
            .unwrap_or_else(|e| panic!("{e}")),
        tokens: (0..19).map(|i| (i * 17 + 3) % 59).collect(),
        logits: Vec::new(),
        logits_bf16: Vec::new(),
        max_length: 64,
        kv_dtype: infernum_passes::KvDtype::Auto,
    };
    let [blocks, values] = [written.gguf(), written.safetensors()].map(|path| fixture(&path));
    for pipeline in ["none", "default"] {
        let [found, expected] = [&blocks, &values]
            .map(|f| f.run_plan(f.plan(DType::F32, pipeline, kernels), usize::MAX));
        assert!(expected.iter().all(|v| v.is_finite()) && expected.iter().any(|v| *v != 0.0));
        let error = nmse(&found, &expected);
        assert!(error <= f32_bound(), "{pipeline}: NMSE {error:e}");
    }
    // Without its encoding a type is a number, which is told with the tensor.
    let other = kernels.ops.encodings().filter(|e| e.def().gguf != layers[0].def().gguf);
    let error = blocks.model.lower(blocks.options(DType::F32), other).expect_err("an unknown type");
    let number = layers[0].def().gguf.expect("a number");
    let expected =
        format!("`blk.0.attn_q.weight` in model.gguf: is of GGUF type {number}, and no encoding");
    assert!(error.to_string().contains(&expected), "{error}");
}
