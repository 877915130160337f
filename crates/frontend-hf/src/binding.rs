//! Whether a checkpoint is what a module wants: which encodings its weights are in, and what does not fit.

use infernum_ir::encoding::StoredTensor;
use infernum_ir::expr::Value;
use infernum_ir::{CallSite, Encoding, Module, NodeKind, Param, TensorType};

use crate::checkpoint::{Checkpoint, TensorView, part_of};
use crate::model::matches;

/// How the weight of that name is stored: of the encodings whose tensors are all there the one that has the most.
/// Where none is there whole, the one of which the most is there: codes without scales are not taken for numbers, and what
/// is missing, or of another type or shape, is told when weights are bound. A weight's own name alone is one of plain numbers, too.
pub(crate) fn stored_as<'e>(
    checkpoint: &Checkpoint,
    encodings: &'e [Encoding],
    name: &str,
    shape: &[u64],
) -> Option<&'e Encoding> {
    let best = |first_fits: bool| {
        let mut best: Option<(&Encoding, _)> = None;
        for encoding in encodings.iter().filter(|e| e.is_for(name)) {
            let tensors = encoding.tensors_of(name, shape).unwrap_or_default();
            if first_fits && !tensors.first().is_some_and(|t| fits(t, checkpoint.tensor(&t.name))) {
                continue;
            }
            let found: Vec<_> =
                tensors.iter().filter_map(|t| Some((t, checkpoint.tensor(&t.name)?))).collect();
            let is_coded = found.iter().any(|(t, _)| t.name != name);
            let fit = found.iter().filter(|(t, found)| fits(t, Some(*found))).count();
            let alike = found.iter().map(|(t, found)| likeness(t, found)).sum::<usize>();
            // Whole ones before all others.
            let score = (fit > 0 && fit == tensors.len(), fit, alike);
            if (first_fits || is_coded) && best.is_none_or(|(_, most)| score > most) {
                best = Some((encoding, score));
            }
        }
        best.map(|(encoding, _)| encoding)
    };
    // Nearly always its codes are what they should be, and of most encodings nothing is there.
    best(true).or_else(|| best(false))
}

fn fits(wanted: &StoredTensor, found: Option<TensorView<'_>>) -> bool {
    found.is_some_and(|f| f.dtype.element().is_some_and(|e| wanted.is_held_by(e, f.shape)))
}

/// How much of what is known of a tensor is as it is wanted: its name, its type and each of its dimensions.
fn likeness(wanted: &StoredTensor, found: &TensorView<'_>) -> usize {
    let dims = wanted.shape.iter().zip(found.shape).filter(|(a, b)| a == b).count();
    1 + usize::from(found.dtype.element() == Some(wanted.element)) + dims
}

/// How many problems a message lists before it only counts.
const LISTED: usize = 40;

/// What checkpoints call the scales and zeros that a KV cache in few bits would have.
const CACHE_SCALES: [&str; 6] =
    ["*.k_scale", "*.v_scale", "*.q_scale", "*.kv_scale", "*.k_zero_point", "*.v_zero_point"];
/// The keys of `quantization_config` that say how the cache is stored.
const CACHE_KEYS: [&str; 3] = ["kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant"];

/// Whether a tensor is a scale of the cache: rows are cached with scales that follow from what they are, so that it changes
/// nothing.
fn is_cache_scale(name: &str) -> bool {
    CACHE_SCALES.iter().any(|pattern| matches(pattern, name))
}

/// What a checkpoint says of how its cache is stored: a key of its config, or the tensors of scales.
pub(crate) fn cache_scheme(checkpoint: &Checkpoint, quantisation: &Value) -> Option<String> {
    let mut scales = checkpoint.names().filter(|name| is_cache_scale(name));
    if let Some(first) = scales.next() {
        return Some(format!("`{first}` and {} more scales of the KV cache", scales.count()));
    }
    let Value::Map(_) = quantisation else { return None };
    let said = CACHE_KEYS.iter().find(|key| quantisation.member(key) != Value::Null);
    said.map(|key| format!("`{key}` of quantization_config"))
}

/// Everything about a checkpoint that does not fit the module.
pub(crate) fn binding_problems(
    checkpoint: &Checkpoint,
    module: &Module,
    ignore: &[&String],
) -> Vec<String> {
    let mut used = std::collections::HashSet::new();
    let mut problems = Vec::new();
    for CallSite { graph, layer } in &module.schedule {
        for (_, node) in module.graphs[*graph].nodes() {
            let (NodeKind::Param(Param::Weight(weight)), Ok(ty)) =
                (&node.kind, node.types[0].tensor())
            else {
                continue;
            };
            let shape: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
            let shape = &shape[usize::from(weight.stack.is_some())..];
            let tensors = weight.tensors(*layer).into_iter();
            let shape = &shape.to_vec();
            let all = tensors.flat_map(|name| wanted(name, ty, shape));
            for stored in all {
                if !used.insert(stored.name.clone()) {
                    continue;
                }
                if let Some((whole, _)) = part_of(&stored.name) {
                    used.insert(whole.to_owned());
                }
                let wrong = match checkpoint.tensor(&stored.name) {
                    None => Some("missing".to_owned()),
                    Some(t) => misfit(&t, &stored, shape, ty),
                };
                let place = node.loc.as_ref().map(|l| format!(" ({l})")).unwrap_or_default();
                let name = found_in(checkpoint, &stored.name);
                problems.extend(wrong.map(|w| format!("  {name}: {w}{place}")));
            }
        }
    }
    let is_ignored = |n: &str| is_cache_scale(n) || ignore.iter().any(|p| matches(p, n));
    let left_over = checkpoint.names().filter(|n| !used.contains(*n) && !is_ignored(n));
    problems.extend(left_over.map(|n| format!("  `{n}`: unexpected; the spec does not use it")));
    let more = problems.len().saturating_sub(LISTED);
    if more > 0 {
        problems.truncate(LISTED);
        problems.push(format!("  and {more} more"));
    }
    problems
}

/// A tensor's name and the file that holds it, if one does.
fn found_in(checkpoint: &Checkpoint, name: &str) -> String {
    match checkpoint.tensor(name) {
        Some(found) => format!("`{name}` in {}", found.file),
        None => format!("`{name}`"),
    }
}

/// Why a tensor is not the one that is wanted: a part of a weight of type `ty` and of this shape.
fn misfit(
    found: &TensorView<'_>,
    wanted: &StoredTensor,
    shape: &[u64],
    ty: &TensorType,
) -> Option<String> {
    let blocks = found.blocks.is_some();
    if let (Some(number), None) = (found.blocks, &ty.encoding) {
        return Some(format!(
            "is of GGUF type {number}, and no encoding that is known (`infernum encodings`) has that number for a \
             weight of shape {shape:?}; one can be added with --data"
        ));
    }
    let is_held = |e| wanted.is_held_by(e, found.shape);
    if !found.is_loose && found.dtype.element().is_some_and(is_held) {
        return None;
    }
    // The shape of what is in blocks counts values; that of any other encoding what its tensor holds.
    let shape = if blocks { shape } else { &wanted.shape };
    let is_type = |e| wanted.is_held_by(e, &wanted.shape);
    if !found.is_stored_as(wanted) && !found.dtype.element().is_some_and(is_type) {
        let (element, found) = (wanted.element, found.stored_as());
        return Some(format!("expected element type {element}, found {found}"));
    }
    if !found.has_shape(shape) {
        return Some(format!("expected shape {shape:?}, found {:?}", found.shape));
    }
    if blocks && found.place(wanted.bytes).is_none() {
        let (needed, room) = (wanted.bytes, found.location.len);
        return Some(format!(
            "its blocks need {needed} bytes (of each part), and {room} are there before the next tensor or the end of \
             the file; the file is corrupt"
        ));
    }
    let element = if blocks { None } else { found.dtype.element() };
    found.change.and_then(|change| change.check(found.shape, element).err())
}

/// The tensors that hold a weight of this name, type and shape.
fn wanted(name: String, ty: &TensorType, shape: &[u64]) -> Vec<StoredTensor> {
    if let Some(encoding) = &ty.encoding {
        return encoding.tensors_of(&name, shape).unwrap_or_default();
    }
    let shape = shape.to_vec();
    vec![StoredTensor::plain(name, ty.dtype.into(), shape)]
}
