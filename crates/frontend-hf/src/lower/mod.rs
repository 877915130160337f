//! From a family's spec and a checkpoint's config to an IR module.

mod attrs;
mod body;
mod scope;

use std::collections::HashMap;

use infernum_ir::expr::Value;
use infernum_ir::{
    CallSite, DType, Graph, Module, SourceError, StepInput, Sym, TensorType, Type, nearest,
};

use crate::spec::{
    Block, BlockSource, Call, Entries, Family, Library, LibraryError, Part, Source, parse_block,
    parse_family,
};
use body::{Builder, Frame};
use scope::{Scope, at};

/// Layers a model may have: more is a mistake in a config, not a model.
const MAX_LAYERS: u64 = 10_000;

/// What a spec is lowered with.
pub struct Request<'a> {
    /// The config's value for a key; explicit nulls are absent.
    pub config: &'a dyn Fn(&str) -> Option<Value>,
    /// Every key of the config, for hints.
    pub config_keys: &'a [&'a str],
    /// Element type of activations and of the KV cache.
    pub dtype: DType,
    /// The longest sequence the engine will hold; length-dependent `RoPE` kinds read it.
    pub max_length: u64,
    /// The element type of a checkpoint tensor; `dtype` where it is unknown.
    pub weight_dtype: &'a dyn Fn(&str) -> Option<DType>,
    /// Logits for each sequence's last token (`B`) or for every token (`T`).
    pub rows: Sym,
}

/// A lowered model.
#[derive(Debug)]
pub struct Lowered {
    /// The module; not yet verified.
    pub module: Module,
    /// The family's parameters, in order.
    pub params: Vec<(String, Value)>,
    /// Patterns of checkpoint tensors that the model does not use.
    pub ignore: Vec<String>,
}

/// A spec could not be lowered.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    /// A mistake at a place in a spec.
    #[error(transparent)]
    Spec(#[from] Box<SourceError>),
    /// A file could not be found or read.
    #[error(transparent)]
    Library(#[from] LibraryError),
}

impl From<SourceError> for LowerError {
    fn from(e: SourceError) -> Self {
        LowerError::Spec(Box::new(e))
    }
}

/// A block with the file it is written in.
type Blocks<'a> = HashMap<&'a str, (&'a Source, &'a Block<'a>)>;

/// Lowers the family in `source`.
pub fn lower(
    source: &Source,
    library: &Library,
    request: &Request<'_>,
) -> Result<Lowered, LowerError> {
    let family = parse_family(source)?;
    let mut files: Vec<(&str, Source)> = Vec::new();
    for (name, block) in family.blocks.iter() {
        if let BlockSource::File(path) = block {
            let file =
                library.included(path, source).map_err(|e| at(source, path, e.to_string()))?;
            files.push((name, file));
        }
    }
    let mut parsed = Vec::new();
    for (name, file) in &files {
        parsed.push((*name, file, parse_block(file)?));
    }
    let mut blocks: Blocks<'_> = parsed.iter().map(|(n, file, b)| (*n, (*file, b))).collect();
    for (name, block) in family.blocks.iter() {
        if let BlockSource::Inline(block) = block {
            blocks.insert(name, (source, block));
        }
    }
    let scope = family_scope(source, &family, request)?;
    lower_parts(source, &family, &blocks, &scope, request).map_err(Into::into)
}

/// Evaluates the family's parameters and checks.
fn family_scope<'a>(
    source: &Source,
    family: &Family<'_>,
    request: &'a Request<'a>,
) -> Result<Scope<'a>, SourceError> {
    let mut scope = Scope::new(request);
    let literals = Scope::empty(request);
    for (key, default) in family.defaults.iter() {
        let value = literals.eval(source, key, *default)?;
        scope.defaults.insert(key.to_owned(), value);
    }
    for (name, arg) in family.params.iter() {
        let value = scope.eval_param(source, name, *arg)?;
        scope.params.push((name.to_owned(), value));
    }
    scope.check(source, &family.checks)?;
    Ok(scope)
}

fn lower_parts(
    source: &Source,
    family: &Family<'_>,
    blocks: &Blocks<'_>,
    scope: &Scope<'_>,
    request: &Request<'_>,
) -> Result<Lowered, SourceError> {
    let order = layer_order(source, family, scope)?;
    let mut module =
        Module { name: family.name.to_owned(), graphs: Vec::new(), schedule: Vec::new() };
    let lower_part = |name: &str, part: &Part<'_>, layer, carried: &[(String, Type)]| {
        graph(source, name, part, blocks, scope, request, layer, carried)
    };

    let (embed, carried) = lower_part("embed", &family.embed, None, &[])?;
    module.graphs.push(embed);
    module.schedule.push(CallSite { graph: 0, layer: None });
    let mut lowered: HashMap<&str, usize> = HashMap::new();
    for (layer, kind) in order.iter().enumerate() {
        let layer = layer as u32;
        let index = match lowered.get(kind) {
            Some(&index) => index,
            None => {
                let part = family.layers.kinds.get(kind).unwrap_or(&family.embed);
                if part.gives != family.embed.gives {
                    let expected = family.embed.gives.join(", ");
                    let message = format!(
                        "expected `gives` of kind `{kind}` to be that of embed: {expected}"
                    );
                    let place = part.gives.first().copied().unwrap_or(kind);
                    return Err(at(source, place, message));
                }
                let (graph, _) = lower_part(kind, part, Some(layer), &carried)?;
                module.graphs.push(graph);
                lowered.insert(kind, module.graphs.len() - 1);
                module.graphs.len() - 1
            }
        };
        module.schedule.push(CallSite { graph: index, layer: Some(layer) });
    }
    let (head, _) = lower_part("head", &family.head, None, &carried)?;
    module.graphs.push(head);
    module.schedule.push(CallSite { graph: module.graphs.len() - 1, layer: None });
    Ok(Lowered {
        module,
        params: scope.params.clone(),
        ignore: family.ignore.iter().map(|s| (*s).to_owned()).collect(),
    })
}

/// The kind of each layer.
fn layer_order<'a>(
    source: &Source,
    family: &'a Family<'_>,
    scope: &Scope<'_>,
) -> Result<Vec<&'a str>, SourceError> {
    let layers = &family.layers;
    let count = scope.eval_int(source, family.name, layers.count)?;
    if count > MAX_LAYERS {
        let message = format!("{count} layers: expected at most {MAX_LAYERS}");
        return Err(scope::at_arg(source, layers.count, family.name, message));
    }
    let kinds = || layers.kinds.iter().map(|(k, _)| k);
    (0..count)
        .map(|layer| {
            let Some(kind) = layers.kind else {
                return kinds().next().filter(|_| layers.kinds.0.len() == 1).ok_or_else(|| {
                    at(source, family.name, "`layers` has several kinds (or none): expected `kind`, an expression over `layer`")
                });
            };
            let mut scope = scope.child();
            scope.params.push(("layer".to_owned(), Value::Num(layer as f64)));
            let name = match scope.eval(source, family.name, kind.0)? {
                Value::Str(name) => name,
                v => {
                    let message = format!("expected the name of a kind for layer {layer}, found {}", v.kind());
                    return Err(scope::at_arg(source, kind.0, family.name, message));
                }
            };
            kinds().find(|k| *k == name).ok_or_else(|| {
                let message = format!("layer {layer} is of kind `{name}`, which `kinds` lacks{}", nearest(&name, kinds()));
                scope::at_arg(source, kind.0, family.name, message)
            })
        })
        .collect()
}

/// Lowers one part to a graph; returns it with the names and types it gives.
#[allow(clippy::too_many_arguments, reason = "called through one closure")]
fn graph(
    source: &Source,
    name: &str,
    part: &Part<'_>,
    blocks: &Blocks<'_>,
    scope: &Scope<'_>,
    request: &Request<'_>,
    layer: Option<u32>,
    carried: &[(String, Type)],
) -> Result<(Graph, Vec<(String, Type)>), SourceError> {
    let mut builder = Builder::new(Graph::new(name), blocks, request, layer);
    let mut frame = Frame::new(source, scope.child(), String::new());
    for (i, (name, ty)) in carried.iter().enumerate() {
        frame.values.insert(name.clone(), builder.carry(i as u32, name, ty));
    }
    builder.declare_weights(&mut frame, &part.weights, part.prefix)?;
    builder.body(&mut frame, &part.body, part.prefix)?;
    let mut results = Vec::new();
    let mut given = Vec::new();
    for name in &part.gives {
        let value =
            builder.resolve(&frame, name)?.ok_or_else(|| at(source, name, "is left out here"))?;
        results.push(value);
        given.push(((*name).to_owned(), builder.graph.ty(value).clone()));
    }
    Ok((builder.finish(results), given))
}

/// The step inputs that bodies may name, with their types.
fn step_input(name: &str, rows: Sym) -> Option<(StepInput, TensorType)> {
    let (input, _) = StepInput::ALL.into_iter().find(|(_, n)| *n == name)?;
    let (dtype, sym) = match input {
        StepInput::Tokens => (DType::U32, Sym::T),
        StepInput::Positions => (DType::I32, Sym::T),
        StepInput::ContextPositions => (DType::I32, Sym::S),
        StepInput::OutputRows => (DType::U32, rows),
    };
    Some((input, TensorType::act(dtype, [sym.into()])))
}

/// A body in a spec: names to calls.
type Body<'a> = Entries<'a, Call<'a>>;
