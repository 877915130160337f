//! A GGUF file.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use half::{bf16, f16};
use infernum_frontend_hf::gguf::{
    AsGguf, Change, Datum, Metadata, Stored, TensorLine, TensorSource, as_gguf, write_gguf,
};
use infernum_frontend_hf::safetensors::StoredType;
use infernum_frontend_hf::tokenizer::{Tokenizer, gguf_metadata};
use infernum_frontend_hf::{Checkpoint, LowerOptions, Model, ModelFiles, TensorView, chat};
use infernum_ir::encoding::Element;
use infernum_ir::{DType, Encoding, Sym};
use infernum_passes::data::Kernels;

use super::importance::{Importance, whole};
use super::{Args, Loss, Target, Written, is_left, matrices, on_all_cores, values};
use crate::report::Outcome;

const FILE_TYPE: &str = "general.file_type";
const DTYPE: &str = "infernum.dtype";
const NAME: &str = "general.name";
/// Rows that are encoded at a time at least, where there are so many.
const BAND: u64 = 64;
/// A text that shows whether two tokenizers are one.
const PROBE: &str = "Hello, world! It's 12345 o'clock;  the\tquick\nbrown fox's \"naïve\" 日本語 — über 3.14 {x_y}\r\n\n  éè 👍🏽 don't WE'LL";

/// How a tensor is written.
enum Kind<'e> {
    /// As it lies in a GGUF file.
    Copied,
    Plain(Element),
    Encoded(&'e Encoding),
}

/// A tensor to write.
struct Tensor<'e> {
    line: TensorLine,
    kind: Kind<'e>,
    source: Source,
    matrix: bool,
}

enum Source {
    /// Numbers that are no weight.
    Numbers(Vec<f32>),
    /// Tensors of the checkpoint: rows and columns of each.
    Parts { names: Vec<String>, size: (u64, u64), swapped: bool, change: Option<Change> },
}

pub(super) fn run(
    args: &Args,
    model: &Model,
    kernels: &Kernels,
    target: &Target<'_>,
    importance: &Importance,
) -> Outcome {
    let Some(checkpoint) = &model.checkpoint else {
        return Err("--model: expected weights".into());
    };
    if let Target::Encoded(encoding) = target
        && encoding.def().gguf.is_none()
    {
        let known = kernels.ops.encodings().filter(|e| e.def().gguf.is_some());
        let known: Vec<&str> = known.map(Encoding::name).collect();
        return Err(format!(
            "--to: GGUF files have no type for {encoding}; they have f32, f16, bf16, {}",
            known.join(", ")
        )
        .into());
    }
    let (metadata, tensors) = if model.files.gguf().is_some() {
        copied(args, model, checkpoint, kernels, target)?
    } else {
        converted(args, model, checkpoint, target)?
    };
    if !tensors.iter().any(|t| t.matrix) {
        return Err(
            format!("{}: no matrix of this model's layers can be stored so", args.to).into()
        );
    }
    let lines: Vec<TensorLine> = tensors.iter().map(|t| t.line.clone()).collect();
    let mut written = Written { losses: Vec::new(), plain: 0, coded: 0 };
    let writer = Writer { checkpoint, kernels, importance };
    let data = |i: usize| {
        let (bytes, plain, loss) = writer.bytes(&tensors[i])?;
        if tensors[i].matrix {
            written.losses.push((tensors[i].line.name.clone(), loss));
            written.plain += plain;
            written.coded += bytes.len();
        }
        Ok(bytes)
    };
    write_gguf(&args.out, &metadata, &lines, data, |path| check(path, model, kernels))?;
    written.report(args)
}

type Plan<'e> = (Metadata, Vec<Tensor<'e>>);

/// What a file holds of a checkpoint in Hugging Face's format.
fn converted<'e>(
    args: &Args,
    model: &Model,
    checkpoint: &Checkpoint,
    target: &Target<'e>,
) -> Result<Plan<'e>, Box<dyn Error>> {
    let AsGguf { mut metadata, tensors, constants } = as_gguf(model)?;
    metadata.retain(|(key, _)| key != FILE_TYPE);
    let name = args.out.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    metadata.push((NAME.to_owned(), Datum::Text(name)));
    metadata.extend(file_type(target));
    let embedding = tensors.iter().find(|t| t.name.starts_with("token_embd."));
    let rows = embedding.and_then(|t| t.shape.first()).copied().unwrap_or_default();
    metadata.extend(gguf_metadata(&model.files, model.library(), rows, &metadata)?);
    metadata.extend(chat::gguf_metadata(&model.files)?);
    let mut all = Vec::new();
    for (name, numbers) in constants {
        let line = plain_line(name, vec![numbers.len() as u64], Element::F32)?;
        let (kind, source) = (Kind::Plain(Element::F32), Source::Numbers(numbers));
        all.push(Tensor { line, kind, source, matrix: false });
    }
    for tensor in tensors {
        all.push(from_source(args, checkpoint, target, tensor)?);
    }
    Ok((metadata, all))
}

fn from_source<'e>(
    args: &Args,
    checkpoint: &Checkpoint,
    target: &Target<'e>,
    tensor: TensorSource,
) -> Result<Tensor<'e>, Box<dyn Error>> {
    let TensorSource { name, shape, parts, swapped, change, wide, matrix } = tensor;
    let views = parts
        .iter()
        .map(|part| checkpoint.tensor(part).ok_or_else(|| format!("`{part}`: missing")));
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let stored = views.first().and_then(|t| t.dtype.element()).unwrap_or(Element::F32);
    let left = parts.iter().any(|part| is_left(&args.skip, part)) || is_left(&args.skip, &name);
    let kind = match (matrix.filter(|_| !left && !wide), target) {
        (Some((rows, columns)), Target::Encoded(encoding))
            if encoding.layout(rows, columns).is_ok() =>
        {
            Kind::Encoded(encoding)
        }
        _ if wide || shape.len() < 2 => Kind::Plain(Element::F32),
        (_, Target::Plain(element)) if !left => Kind::Plain(*element),
        _ => Kind::Plain(stored),
    };
    let columns = *shape.last().unwrap_or(&1);
    let rows = shape.iter().product::<u64>() / columns.max(1) / (parts.len() as u64).max(1);
    // What is done to rows is done to those of vectors, too.
    let size = if shape.len() < 2 { (columns, 1) } else { (rows, columns) };
    let line = line(name, shape, &kind, size, parts.len())?;
    let matrix = matrix.is_some()
        && !wide
        && !left
        && match target {
            Target::Encoded(_) => matches!(kind, Kind::Encoded(_)),
            Target::Plain(_) => true,
        };
    let source = Source::Parts { names: parts, size, swapped, change };
    Ok(Tensor { line, kind, source, matrix })
}

/// What a file holds of another GGUF file: its metadata as it is, and its tensors, but for the layers' matrices.
fn copied<'e>(
    args: &Args,
    model: &Model,
    checkpoint: &Checkpoint,
    kernels: &Kernels,
    target: &Target<'e>,
) -> Result<Plan<'e>, Box<dyn Error>> {
    let (gguf, bytes) = checkpoint.gguf().ok_or("--model: expected a GGUF file")?;
    let mut metadata = gguf.copied(bytes);
    // Files are of one type by what they say, and of one part.
    let gone =
        |key: &str| key == FILE_TYPE || key.starts_with("split.") || key == "general.alignment";
    metadata.retain(|(key, _)| !gone(key));
    if gguf.get(bytes, DTYPE).is_none() {
        let dtype = match model.dtype()? {
            DType::F32 => "float32",
            DType::F16 => "float16",
            _ => "bfloat16",
        };
        metadata.push((DTYPE.to_owned(), Datum::Text(dtype.to_owned())));
    }
    metadata.extend(file_type(target));
    let fits = |name: &str, rows, columns| {
        let holds = match target {
            Target::Encoded(encoding) => encoding.layout(rows, columns).is_ok(),
            Target::Plain(_) => true,
        };
        holds && !model.is_wide(name)
    };
    let wanted = matrices(model, kernels.ops.encodings(), &args.skip, fits)?;
    // Experts are parts of one tensor.
    let wanted: BTreeMap<String, (u64, u64)> =
        wanted.into_iter().map(|(name, size)| (whole(&name).to_owned(), size)).collect();
    let mut all = Vec::new();
    for tensor in checkpoint.tensors() {
        let matrix = wanted.contains_key(tensor.name);
        let kind = match target {
            Target::Encoded(encoding) if matrix => Kind::Encoded(encoding),
            Target::Plain(element) if matrix => Kind::Plain(*element),
            _ => Kind::Copied,
        };
        let columns = *tensor.shape.last().unwrap_or(&1);
        let size = (tensor.shape.iter().product::<u64>() / columns.max(1), columns);
        let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
        let line = match kind {
            Kind::Copied => {
                let bytes = stored_bytes(&tensor, kernels, size)?.len() as u64;
                let plain = || Stored::number(tensor.dtype).unwrap_or_default();
                TensorLine { name, shape, kind: tensor.blocks.unwrap_or_else(plain), bytes }
            }
            _ => line(name, shape, &kind, size, 1)?,
        };
        let names = vec![tensor.name.to_owned()];
        let source = Source::Parts { names, size, swapped: false, change: None };
        all.push(Tensor { line, kind, source, matrix });
    }
    Ok((metadata, all))
}

/// What a file says it is of, where that is one type; readers find out what else it may be.
fn file_type(target: &Target<'_>) -> Option<(String, Datum)> {
    let number = match target {
        Target::Plain(Element::F32) => 0,
        Target::Plain(Element::F16) => 1,
        Target::Plain(Element::Bf16) => 32,
        _ => return None,
    };
    Some((FILE_TYPE.to_owned(), Datum::U32(number)))
}

fn line(
    name: String,
    shape: Vec<u64>,
    kind: &Kind<'_>,
    (rows, columns): (u64, u64),
    parts: usize,
) -> Result<TensorLine, String> {
    match kind {
        Kind::Encoded(encoding) => {
            let bytes = encoding.layout(rows, columns)?.bytes * parts as u64;
            let kind = encoding.def().gguf.unwrap_or_default();
            Ok(TensorLine { name, shape, kind, bytes })
        }
        Kind::Plain(element) => plain_line(name, shape, *element),
        Kind::Copied => Err(format!("`{name}`: is not copied")),
    }
}

fn plain_line(name: String, shape: Vec<u64>, element: Element) -> Result<TensorLine, String> {
    let stored = StoredType::of(element);
    let none = || format!("`{name}`: GGUF files have no type for {element}");
    let kind = Stored::number(stored).ok_or_else(none)?;
    let bytes = stored.byte_len(&shape).ok_or_else(none)?;
    Ok(TensorLine { name, shape, kind, bytes })
}

/// The bytes of a tensor as it lies in its file: of blocks those that its encoding says.
fn stored_bytes<'a>(
    tensor: &TensorView<'a>,
    kernels: &Kernels,
    (rows, columns): (u64, u64),
) -> Result<&'a [u8], String> {
    let Some(number) = tensor.blocks else { return Ok(tensor.data) };
    let encoding = of_number(kernels, number)?;
    let bytes = encoding.layout(rows, columns)?.bytes as usize;
    tensor.data.get(..bytes).ok_or_else(|| format!("`{}`: is cut", tensor.name))
}

fn of_number(kernels: &Kernels, number: u32) -> Result<&Encoding, String> {
    let found = kernels.ops.encodings().find(|e| e.def().gguf == Some(number));
    found.ok_or_else(|| {
        format!(
            "GGUF type {number} is not known (`infernum encodings`); one can be added with --data"
        )
    })
}

struct Writer<'a> {
    checkpoint: &'a Checkpoint,
    kernels: &'a Kernels,
    importance: &'a Importance,
}

impl Writer<'_> {
    /// The bytes of a tensor, how many it has where it is stored, and what is lost.
    fn bytes(&self, tensor: &Tensor<'_>) -> Result<(Vec<u8>, usize, Loss), String> {
        let (names, size, swapped, change) = match &tensor.source {
            Source::Numbers(numbers) => {
                return Ok((plain(Element::F32, numbers)?, 0, Loss::default()));
            }
            Source::Parts { names, size, swapped, change } => (names, *size, *swapped, change),
        };
        let (mut all, mut plain_bytes, mut loss) = (Vec::new(), 0, Loss::default());
        for name in names {
            let view = self.checkpoint.tensor(name).ok_or_else(|| format!("`{name}`: missing"))?;
            let stored = stored_bytes(&view, self.kernels, size)?;
            plain_bytes += stored.len();
            if let Kind::Copied = tensor.kind {
                all.extend(stored);
                continue;
            }
            let mut values = self.values(&view, stored, size)?;
            if swapped {
                values = transposed(&values, size);
            }
            if let Some(change) = change {
                values = changed(change, &values, size.0)?;
            }
            match tensor.kind {
                Kind::Encoded(encoding) => {
                    let (bytes, lost) =
                        encode(encoding, size, &values, self.importance.of(name, size.1))?;
                    all.extend(bytes);
                    loss = loss.and(lost);
                }
                Kind::Plain(element) => all.extend(plain(element, &values)?),
                Kind::Copied => {}
            }
        }
        Ok((all, plain_bytes, loss))
    }

    fn values(
        &self,
        view: &TensorView<'_>,
        stored: &[u8],
        (rows, columns): (u64, u64),
    ) -> Result<Vec<f32>, String> {
        let Some(number) = view.blocks else { return values(view) };
        let encoding = of_number(self.kernels, number)?;
        let decoder = encoding.decoder(rows, columns, vec![stored])?;
        let mut values = vec![0.0; (rows * columns) as usize];
        for (n, row) in values.chunks_exact_mut(columns as usize).enumerate() {
            decoder.row(n as u64, 0, row);
        }
        Ok(values)
    }
}

/// Encodes rows on all cores: blocks hold values of one row.
fn encode(
    encoding: &Encoding,
    (rows, columns): (u64, u64),
    values: &[f32],
    importance: &[f32],
) -> Result<(Vec<u8>, Loss), String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let most = rows.div_ceil(2 * cores).max(BAND);
    let done = on_all_cores(rows.div_ceil(most) as usize, |band| {
        let from = band as u64 * most;
        let height = most.min(rows - from);
        let values = &values[(from * columns) as usize..((from + height) * columns) as usize];
        let bytes = encoding.encode_for(height, columns, values, importance)?;
        let loss = Loss::of(encoding, (height, columns), values, &bytes)?;
        Ok((bytes.concat(), loss))
    })?;
    let loss = done.iter().fold(Loss::default(), |sum, (_, loss)| sum.and(*loss));
    Ok((done.into_iter().flat_map(|(bytes, _)| bytes).collect(), loss))
}

/// Values as elements; an error where one is too large for them.
fn plain(element: Element, values: &[f32]) -> Result<Vec<u8>, String> {
    let bytes: Vec<u8> = match element {
        Element::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Element::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        other => return Err(format!("expected f32, f16 or bf16, found {other}")),
    };
    let mut stored = bytes.chunks_exact(element.size() as usize).zip(values);
    match stored.find(|(b, x)| x.is_finite() && !element.read(b).float().is_finite()) {
        Some((_, x)) => Err(format!("{x} is too large for {element}: expected f32")),
        None => Ok(bytes),
    }
}

/// A matrix `[columns, rows]` as `[rows, columns]`.
fn transposed(values: &[f32], (rows, columns): (u64, u64)) -> Vec<f32> {
    let (rows, columns) = (rows as usize, columns as usize);
    (0..rows * columns).map(|i| values[i % columns * rows + i / columns]).collect()
}

fn changed(change: &Change, values: &[f32], rows: u64) -> Result<Vec<f32>, String> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bytes = change.apply(&bytes, rows, Element::F32)?;
    Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Reads a file that was written: what does not come back is an error before the file is there.
fn check(path: &Path, model: &Model, kernels: &Kernels) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let files = ModelFiles::open(path).map_err(|e| text(&e))?;
    let read = Model::open(files, None, model.library()).map_err(|e| text(&e))?;
    let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
    read.lower(options, kernels.ops.encodings()).map_err(|e| text(&e))?;
    let dtypes = (model.dtype().map_err(|e| text(&e))?, read.dtype().map_err(|e| text(&e))?);
    if dtypes.0 != dtypes.1 {
        return Err(format!("activations would be {} in place of {}", dtypes.1, dtypes.0));
    }
    let ends = |model: &Model| model.config.eos_ids(None).map_err(|e| text(&e));
    let read_ends = ends(&read)?;
    if let Some(end) = ends(model)?.iter().find(|end| !read_ends.contains(end)) {
        return Err(format!("token {end}, which ends texts, would not do so"));
    }
    // A model without a tokenizer has none to compare, as a file whose own is not known here is copied.
    let Ok(own) = Tokenizer::open_with(&model.files, model.library()) else { return Ok(()) };
    let other = Tokenizer::open_with(&read.files, model.library()).map_err(|e| text(&e))?;
    for special in [true, false] {
        let tokens = |t: &Tokenizer| t.encode(PROBE, special).map_err(|e| text(&e));
        if tokens(&own)? != tokens(&other)? {
            return Err("its tokenizer would split texts otherwise".to_owned());
        }
    }
    Ok(())
}
