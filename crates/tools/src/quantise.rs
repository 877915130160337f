//! `infernum quantise`.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use infernum::ModelOptions;
use infernum_frontend_hf::safetensors::{StoredType, TensorData, TensorOut, write_safetensors};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model, OWN_METHOD};
use infernum_ir::encoding::StoredTensor;
use infernum_ir::{Encoding, Graph, NodeKind, Param, Sym, Type};
use infernum_passes::data::Kernels;
use serde_json::json;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Encoding of the layers' matrices: a name of `infernum encodings`.
    #[arg(long, value_name = "NAME")]
    to: String,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Weights to leave as they are, `*` standing for any text, as `*.gate.weight` of routers; may be given often.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,
    #[command(flatten)]
    model: ModelOptions,
}

/// An encoded weight.
struct Done {
    name: String,
    parts: Vec<(StoredTensor, Vec<u8>)>,
    /// Squared differences over squared values.
    error: f64,
}

/// Writes the model with its layers' matrices encoded; everything else is as it was.
pub fn run(args: &Args) -> Outcome {
    let model = args.model.open_with_progress(&report::progress())?;
    let kernels = Kernels::load(args.model.data.as_deref(), &[])?;
    let encoding = kernels.ops.encoding(&args.to).ok_or_else(|| {
        let hint = infernum_ir::nearest(&args.to, kernels.ops.encodings().map(Encoding::name));
        format!("--to: no encoding is named `{}`{hint}; `infernum encodings` lists them", args.to)
    })?;
    let (Some(checkpoint), Some(folder)) = (&model.checkpoint, model.files.path()) else {
        return Err("--model: expected a folder with config.json and safetensors".into());
    };
    if model.files.gguf().is_some() || model.config.value("quantization_config").is_some() {
        return Err("--model: expected a checkpoint of plain floats in safetensors".into());
    }
    if same_folder(folder, &args.out) {
        return Err("--out: expected another folder than the model's".into());
    }
    let wanted = matrices(&model, encoding, &args.skip)?;
    if wanted.is_empty() {
        return Err(format!("{encoding}: no matrix of this model's layers can be stored so").into());
    }
    let done = encode_all(checkpoint, encoding, &wanted)?;
    let worst = done.iter().max_by(|a, b| a.error.total_cmp(&b.error));
    let (plain, coded): (usize, usize) = done.iter().fold((0, 0), |(plain, coded), d| {
        let view = checkpoint.tensor(&d.name).map_or(0, |t| t.data.len());
        (plain + view, coded + d.parts.iter().map(|(_, b)| b.len()).sum::<usize>())
    });
    write(&model, checkpoint, &done, encoding, &args.out)?;
    let worst = worst.map_or_else(String::new, |w| format!("; worst: {} {:.2e}", w.name, w.error));
    report::line(&format!(
        "{}: {} matrices as {encoding}, {plain} bytes become {coded}; relative squared error {:.2e}{worst}",
        args.out.display(),
        done.len(),
        done.iter().map(|d| d.error).sum::<f64>() / done.len() as f64,
    ))
}

fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The matrices of layers that may be encoded: names, rows and columns.
fn matrices(
    model: &Model,
    encoding: &Encoding,
    skip: &[String],
) -> Result<BTreeMap<String, (u64, u64)>, Box<dyn Error>> {
    let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
    let module = model.lower(options, [])?.module;
    let mut all = BTreeMap::new();
    for site in module.schedule.iter().filter(|s| s.layer.is_some()) {
        let graph = &module.graphs[site.graph];
        let turned = turned(graph);
        for (value, param, ty) in graph.params() {
            let (Param::Weight(weight), Type::Tensor(ty)) = (param, ty) else { continue };
            let shape: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
            let &[rows, columns] = &shape[usize::from(weight.stack.is_some())..] else { continue };
            let fits = !turned.contains(&value.node)
                && rows > 1
                && columns > 1
                && encoding.layout(rows, columns).is_ok();
            for name in weight.tensors(site.layer) {
                let left = skip.iter().any(|p| infernum_frontend_hf::matches(p, &name));
                if fits && !left && encoding.is_for(&name) {
                    all.insert(name, (rows, columns));
                }
            }
        }
    }
    Ok(all)
}

/// Weights that are stored with their axes swapped: encoded ones are as products read them.
fn turned(graph: &Graph) -> BTreeSet<usize> {
    let mut turned = BTreeSet::new();
    for (index, node) in graph.nodes() {
        if matches!(&node.kind, NodeKind::Op { op, .. } if op.name == "transpose") {
            turned.extend(graph.operands(index).into_iter().flatten().map(|v| v.node));
        }
    }
    turned
}

/// Encodes matrices on all cores.
fn encode_all(
    checkpoint: &Checkpoint,
    encoding: &Encoding,
    wanted: &BTreeMap<String, (u64, u64)>,
) -> Result<Vec<Done>, Box<dyn Error>> {
    let wanted: Vec<_> = wanted.iter().collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<Done>, String> {
        let mut done = Vec::new();
        while let Some((name, size)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push(encode(checkpoint, encoding, name, **size)?);
        }
        Ok(done)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(wanted.len());
    let all: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut done = Vec::new();
    for part in all {
        done.extend(part.map_err(|_| "a thread that encodes has panicked")??);
    }
    done.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(done)
}

fn encode(
    checkpoint: &Checkpoint,
    encoding: &Encoding,
    name: &str,
    (rows, columns): (u64, u64),
) -> Result<Done, String> {
    let at = |e: String| format!("`{name}`: {e}");
    let tensor = checkpoint.tensor(name).ok_or_else(|| at("missing".to_owned()))?;
    let element = tensor.dtype.element().filter(|e| !e.is_whole());
    let element = element.ok_or_else(|| at(format!("expected floats, found {}", tensor.dtype)))?;
    let elements = tensor.data.chunks_exact(element.size() as usize);
    let values: Vec<f32> = elements.map(|x| element.read(x).float()).collect();
    let bytes = encoding.encode(rows, columns, &values).map_err(at)?;
    let decoder = encoding.decoder(rows, columns, bytes.iter().map(|b| &b[..]).collect());
    let decoder = decoder.map_err(at)?;
    let (mut row, mut error, mut whole) = (vec![0.0; columns as usize], 0.0, 0.0);
    for (n, values) in values.chunks_exact(columns as usize).enumerate() {
        decoder.row(n as u64, 0, &mut row);
        error += row.iter().zip(values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        whole += values.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
    }
    let tensors = encoding.tensors(name, rows, columns).map_err(at)?;
    let parts = tensors.into_iter().zip(bytes).collect();
    Ok(Done { name: name.to_owned(), parts, error: error / whole.max(f64::MIN_POSITIVE) })
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
