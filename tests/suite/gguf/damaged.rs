//! GGUF files with something wrong in them: each is refused with the file, the tensor, what was expected and what was found.

use std::path::Path;

use infernum_codegen::TargetKind;
use infernum_frontend_hf::{LowerOptions, Model, ModelFiles};
use infernum_ir::{DType, Encoding, Sym};
use infernum_passes::data::Kernels;
use infernum_runtime::CheckpointWeights;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};

use super::write::{Tensor, Written};
use crate::support::library;

const VALUES: &str = "blk.0.attn_v.weight";
const EXPERTS: &str = "blk.0.ffn_up_exps.weight";

fn encoding(kernels: &Kernels, name: &str) -> Encoding {
    kernels.ops.encoding(name).unwrap_or_else(|| panic!("no {name}")).clone()
}

/// Opens, lowers, plans and loads a file: what is said against it.
fn load(path: &Path, kernels: &Kernels) -> Result<(), String> {
    let files = ModelFiles::open(path).map_err(|e| e.to_string())?;
    let model = Model::open(files, None, &library()).map_err(|e| e.to_string())?;
    let options = LowerOptions { dtype: Some(DType::F32), max_length: Some(32), rows: Sym::T };
    let lowered = model.lower(options, kernels.ops.encodings()).map_err(|e| e.to_string())?;
    let limits = infernum_codegen::Limits { chunk: 8, sequences: 1, max_length: 32 };
    let limits = limits.within(&lowered.module);
    let plan = infernum_codegen::plan(&lowered.module, TargetKind::Cpu, limits);
    let plan = plan.map_err(|e| e.to_string())?;
    let weights = CheckpointWeights::new(model.checkpoint.as_ref().expect("a file has weights"));
    let options = CpuOptions { kv_blocks: 4, ..CpuOptions::default() };
    CpuExecutor::new(plan, &weights, options).map(|_| ()).map_err(|e| e.to_string())
}

/// What is said of a file of such blocks one tensor of which was changed.
fn refusal(name: &str, tensor: &str, change: &dyn Fn(&mut Tensor)) -> String {
    let kernels = Kernels::load(None, &[]).expect("the built-in data");
    let mut written = Written::mixture(&[encoding(&kernels, name)]);
    change(written.tensor(tensor));
    let found = load(&written.gguf(), &kernels).expect_err("a damaged tensor");
    assert!(found.contains(tensor) && found.contains("model.gguf"), "{found}");
    found
}

fn assert_says(found: &str, expected: &str) {
    assert!(found.contains(expected), "expected {expected:?} in: {found}");
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    // The block of 18, 34, 144, 210 and 17 bytes in which a float is, and where.
    for (name, size, at, bytes, field, number) in [
        ("q4_0", 18, 0, &[0x00, 0x7e][..], "d", "NaN"),
        ("q8_0", 34, 0, &[0x00, 0x7c], "d", "inf"),
        ("q4_k", 144, 2, &[0x00, 0xfc], "dmin", "-inf"),
        ("q6_k", 210, 208, &[0x01, 0x7c], "d", "NaN"),
        ("mxfp4_gguf", 17, 0, &[0xff], "e", "NaN"),
    ] {
        let blocks = |t: &Tensor| {
            t.bytes.len() / size / t.shape.iter().rev().nth(1).map_or(1, |rows| *rows as usize)
        };
        // The last block of the fourth row.
        let last = std::cell::Cell::new(0);
        let found = refusal(name, VALUES, &|t| {
            let row = blocks(t);
            last.set(row - 1);
            let block = (4 * row - 1) * size;
            t.bytes[block + at..block + at + bytes.len()].copy_from_slice(bytes);
        });
        let place = format!("`{field}` of block [3, {}]", last.get());
        assert_says(&found, &format!("{place}: expected a finite number, found {number}"));
    }
    // Of experts, which one: each is a weight of its own.
    let found = refusal("q4_0", EXPERTS, &|t| {
        let expert = t.bytes.len() / 3;
        t.bytes[2 * expert..2 * expert + 2].copy_from_slice(&[0x00, 0x7c]);
    });
    assert_says(
        &found,
        "ffn_up_exps.weight[2]` in model.gguf: `d` of block [0, 0]: expected a finite number, found inf",
    );
}

#[test]
fn tensors_of_another_type_or_shape_are_refused() {
    // Its blocks would reach beyond the file's end, or into the next tensor.
    let found = refusal("q4_0", VALUES, &|t| t.kind = 8);
    assert_says(&found, "its blocks need");
    let found = refusal("q4_0", VALUES, &|t| t.kind = 99);
    assert_says(&found, "is of GGUF type 99, and no encoding");
    let found = refusal("q4_0", VALUES, &|t| t.shape[0] -= 1);
    assert_says(&found, "expected shape [128, 256], found [127, 256]");
    // Whole numbers, which have a size, in place of blocks.
    let found = refusal("q4_0", VALUES, &|t| t.kind = 24);
    assert_says(&found, "needs 32768 bytes");
}

#[test]
fn a_file_that_was_cut_is_refused() {
    let kernels = Kernels::load(None, &[]).expect("the built-in data");
    let written = Written::mixture(&[encoding(&kernels, "q4_0")]);
    let path = written.gguf();
    load(&path, &kernels).expect("a whole file");
    let whole = std::fs::read(&path).expect("the file");
    for len in [whole.len() - 64, whole.len() / 2, 100, 20] {
        std::fs::write(&path, &whole[..len]).expect("a file");
        let found = load(&path, &kernels).expect_err("a file that was cut");
        assert!(found.contains("model.gguf"), "{len} bytes: {found}");
    }
}
