//! A folder of safetensors.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;

use infernum_frontend_hf::safetensors::{StoredType, TensorData, TensorOut, write_safetensors};
use infernum_frontend_hf::{Checkpoint, Model, OWN_METHOD};
use infernum_ir::Encoding;
use infernum_ir::encoding::StoredTensor;
use serde_json::json;

use super::importance::Importance;
use super::{Args, Loss, Written, matrices, on_all_cores, values};
use crate::report::Outcome;

/// An encoded weight.
struct Done {
    name: String,
    parts: Vec<(StoredTensor, Vec<u8>)>,
    loss: Loss,
}

pub(super) fn run(
    args: &Args,
    model: &Model,
    encoding: &Encoding,
    importance: &Importance,
) -> Outcome {
    let (Some(checkpoint), Some(folder)) = (&model.checkpoint, model.files.path()) else {
        return Err("--model: expected a folder with config.json and safetensors".into());
    };
    if model.files.gguf().is_some() {
        return Err(
            "--out: expected the name of a .gguf file: a GGUF file is not written as safetensors"
                .into(),
        );
    }
    if same_folder(folder, &args.out) {
        return Err("--out: expected another folder than the model's".into());
    }
    let fits =
        |name: &str, rows, columns| encoding.is_for(name) && encoding.layout(rows, columns).is_ok();
    let wanted: Vec<_> = matrices(model, [], &args.skip, fits)?.into_iter().collect();
    if wanted.is_empty() {
        return Err(format!("{encoding}: no matrix of this model's layers can be stored so").into());
    }
    let done = on_all_cores(wanted.len(), |i| {
        let (name, size) = &wanted[i];
        encode(checkpoint, encoding, importance, name, *size).map_err(|e| format!("`{name}`: {e}"))
    })?;
    write(model, checkpoint, &done, encoding, &args.out)?;
    let plain = done.iter().filter_map(|d| checkpoint.tensor(&d.name)).map(|t| t.data.len());
    let coded = done.iter().flat_map(|d| &d.parts).map(|(_, bytes)| bytes.len());
    let (plain, coded) = (plain.sum(), coded.sum());
    let losses = done.into_iter().map(|d| (d.name, d.loss)).collect();
    Written { losses, plain, coded }.report(args)
}

fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn encode(
    checkpoint: &Checkpoint,
    encoding: &Encoding,
    importance: &Importance,
    name: &str,
    (rows, columns): (u64, u64),
) -> Result<Done, String> {
    let tensor = checkpoint.tensor(name).ok_or("missing")?;
    let values = values(&tensor)?;
    let bytes = encoding.encode_for(rows, columns, &values, importance.of(name, columns))?;
    let loss = Loss::of(encoding, (rows, columns), &values, &bytes)?;
    let tensors = encoding.tensors(name, rows, columns)?;
    Ok(Done { name: name.to_owned(), parts: tensors.into_iter().zip(bytes).collect(), loss })
}

/// The folder: one file of tensors, the config with the encoding's name, and what else the model's folder has.
fn write(
    model: &Model,
    checkpoint: &Checkpoint,
    done: &[Done],
    encoding: &Encoding,
    out: &Path,
) -> Result<(), Box<dyn Error>> {
    let io = |e: std::io::Error| format!("--out: {}: {e}", out.display());
    std::fs::create_dir_all(out).map_err(io)?;
    let encoded: BTreeSet<&str> = done.iter().map(|d| d.name.as_str()).collect();
    let plain = checkpoint.tensors().filter(|t| !encoded.contains(t.name)).map(|t| TensorOut {
        name: t.name,
        shape: t.shape,
        data: TensorData::Bytes(t.dtype, t.data),
    });
    let coded = done.iter().flat_map(|d| &d.parts).map(|(stored, bytes)| TensorOut {
        name: &stored.name,
        shape: &stored.shape,
        data: TensorData::Bytes(StoredType::of(stored.element), bytes),
    });
    write_safetensors(&out.join("model.safetensors"), &plain.chain(coded).collect::<Vec<_>>())?;
    for name in model.files.list()? {
        let kept = !name.contains("safetensors") && name != "config.json";
        if let Some(bytes) = model.files.read(&name).ok().flatten().filter(|_| kept) {
            std::fs::write(out.join(&name), &*bytes).map_err(io)?;
        }
    }
    let config = model.files.read("config.json")?.ok_or("config.json is gone")?;
    let mut config: serde_json::Value = serde_json::from_slice(&config)?;
    config["quantization_config"] =
        json!({ "quant_method": OWN_METHOD, "encodings": [encoding.name()] });
    std::fs::write(out.join("config.json"), serde_json::to_vec_pretty(&config)?).map_err(io)?;
    Ok(())
}
