//! From a family's spec and a checkpoint's config to an IR module.

mod attrs;
mod body;
mod lint;
mod scope;
mod weights;

use std::collections::{BTreeMap, HashMap};

use infernum_ir::expr::{Expr, Value};
use infernum_ir::{
    CallSite, DType, Dim, Encoding, Finding, Graph, Indices, Module, Param, SourceError,
    SourceWarning, StepInput, Sym, Task, TensorType, Type, ValueId, WeightRef, nearest, row_picks,
    takes_whole, token_rows, verify,
};

use crate::gguf::ContainerMap;
use crate::spec::{
    Arg, BlockSource, Family, Layers, Library, LibraryError, Part, Source, parse_block,
    parse_family,
};
use body::{Blocks, Builder, check_name};
use scope::{Context, Scope, brief};
use weights::Names;
pub(crate) use weights::replaced;

/// Layers a model may have: more is a mistake in a config, not a model.
const MAX_LAYERS: u64 = 4096;

/// Other names and patterns of a family's tensors: each is tried on each of them.
const MAX_NAMES: usize = 256;
const LAYER_COUNT: &str = "at most 4096 layers";
/// Files a family may be made of.
const MAX_BASES: usize = 8;
const MAX_FILES: usize = 64;

/// The values that one part gives to the next: names and types.
type Given<'a> = Vec<(&'a str, Type)>;

/// What a spec is lowered with.
#[derive(Clone, Copy)]
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
    /// How the checkpoint stores the weight of that name and shape, unless as its elements.
    pub encoding: &'a dyn Fn(&str, &[u64]) -> Option<Encoding>,
    /// Logits for tokens that yield, as the last of each sequence does (`B`), or for every token (`T`).
    pub rows: Sym,
    /// What the rows of output are.
    pub task: Task,
    /// Of a checkpoint in another container than the specs are written for: how that is read, before what this is
    /// based on.
    pub container: &'a [Source],
    /// Whether of that only the names of tensors count.
    pub names_only: bool,
}

/// A lowered model.
#[derive(Debug)]
pub struct Lowered {
    /// The module.
    pub module: Module,
    /// Patterns of checkpoint tensors that the model does not use.
    pub ignore: Vec<String>,
    /// What is likely a mistake in the spec.
    pub warnings: Vec<SourceWarning>,
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

/// Lowers the family in `source`.
pub fn lower(
    source: &Source,
    library: &Library,
    request: &Request<'_>,
) -> Result<Lowered, LowerError> {
    let mut lowered = lower_once(source, library, request)?;
    if request.dtype == DType::F32 {
        // A cast that is missing changes nothing in f32, and everything in any other type.
        let half = Request { dtype: DType::Bf16, ..*request };
        if let Err(LowerError::Spec(mut error)) = lower_once(source, library, &half) {
            error.message = format!("f32 hides this error of {}: {}", half.dtype, error.message);
            lowered.warnings.push(SourceWarning(*error));
        }
    }
    Ok(lowered)
}

fn lower_once(
    source: &Source,
    library: &Library,
    request: &Request<'_>,
) -> Result<Lowered, LowerError> {
    let bases = bases(source, library)?;
    let mut family = over_bases(source, &bases)?;
    if !request.container.is_empty() {
        let map = ContainerMap::read(request.container)?;
        family = if request.names_only { map.naming(family) } else { map.onto(family) };
    }
    let families = std::iter::once(source).chain(&bases).chain(request.container).collect();
    let places = Context::new(request, families);
    let files = block_files(&places, &family, library)?;
    let mut parsed = HashMap::new();
    for (key, file) in &files {
        parsed.insert(*key, parse_block(file)?);
    }
    let mut blocks = Blocks::new();
    for (name, block) in family.blocks.iter() {
        let block = match block {
            BlockSource::File(path) => parsed.get(&file_key(&places, path)),
            BlockSource::Inline(block) => Some(block),
        };
        blocks.extend(block.map(|b| (name, b)));
    }

    let sources =
        std::iter::once(source).chain(&bases).chain(request.container).chain(files.values());
    let sources = sources.collect();
    let mut cx = Context::new(request, sources);
    cx.defaults = defaults(&cx, &family)?;
    cx.params = family.params.iter().map(|(name, _)| name).collect();
    let scope = family_scope(&cx, &family)?;
    let mut lowered = lower_parts(&family, &blocks, &scope)?;
    verified(&cx, &lowered.module)?;
    lowered.warnings = lint::lint(&cx, &family, source, &blocks);
    Ok(lowered)
}

/// What the verifier finds in a graph is told where the spec says it. A finding that has no place in a spec
/// is left to the compiler's own check, which shows the module.
fn verified(cx: &Context<'_>, module: &Module) -> Result<(), SourceError> {
    let Err(error) = verify(module) else { return Ok(()) };
    let place = |finding: &Finding| {
        let (graph, node) = (&module.graphs[finding.graph?], finding.node?);
        // What is no call, such as a weight, is placed by the first call that uses it.
        let results = 0..graph.node(node).types.len();
        let users = results.flat_map(|result| graph.users(ValueId { node, result }));
        let mut nodes = std::iter::once(node).chain(users.map(|(user, _)| user));
        let loc = nodes.find_map(|n| graph.node(n).loc.as_ref())?;
        cx.at_loc(loc, finding.message.clone())
    };
    error.findings.iter().find_map(place).map_or(Ok(()), Err)
}

/// The families that `source` is based on, nearest first.
pub(crate) fn bases(source: &Source, library: &Library) -> Result<Vec<Source>, LowerError> {
    let mut bases: Vec<Source> = Vec::new();
    loop {
        let last = bases.last().unwrap_or(source);
        let Some(name) = parse_family(last)?.base else { return Ok(bases) };
        let at = |message: String| last.at(name, message);
        let base = library.included(name, last).map_err(|e| at(e.to_string()))?;
        let seen = bases.iter().chain([source]).any(|b| b.file == base.file);
        if seen || bases.len() == MAX_BASES {
            return Err(at(format!("`{}` is based on itself", base.file)).into());
        }
        bases.push(base);
    }
}

/// The family in `source` over what it is based on.
pub(crate) fn over_bases<'a>(
    source: &'a Source,
    bases: &'a [Source],
) -> Result<Family<'a>, SourceError> {
    bases
        .iter()
        .try_fold(parse_family(source)?, |family, base| Ok(family.over(parse_family(base)?)))
}

/// Where a block's file is named, and by which path: a base names its blocks as seen from its own
/// folder.
fn file_key<'a>(cx: &Context<'a>, path: &'a str) -> (&'a str, &'a str) {
    (cx.place(path).map_or("", |(source, _)| &source.file), path)
}

/// The files of the family's blocks, each once.
fn block_files<'a>(
    cx: &Context<'a>,
    family: &Family<'a>,
    library: &Library,
) -> Result<BTreeMap<(&'a str, &'a str), Source>, SourceError> {
    let mut files = BTreeMap::new();
    for (_, block) in family.blocks.iter() {
        let BlockSource::File(path) = block else { continue };
        let (Some((from, _)), key) = (cx.place(path), file_key(cx, path)) else { continue };
        if files.contains_key(&key) {
            continue;
        }
        if files.len() == MAX_FILES {
            return Err(cx.at(path, format!("a family has at most {MAX_FILES} block files")));
        }
        let file = library.included(path, from).map_err(|e| cx.at(path, e.to_string()))?;
        files.insert(key, file);
    }
    Ok(files)
}

/// What stands for keys that the config lacks.
fn defaults<'a>(
    cx: &Context<'a>,
    family: &Family<'a>,
) -> Result<Vec<(&'a str, Value)>, SourceError> {
    let literals = Scope::empty(cx);
    let mut defaults = Vec::new();
    for (key, default) in family.defaults.iter() {
        cx.spend(key, 64)?;
        defaults.push((key, literals.eval(*default)?));
    }
    Ok(defaults)
}

/// What a family takes keys to be that a config lacks.
pub(crate) fn family_defaults(
    source: &Source,
    library: &Library,
) -> Result<Vec<(String, Value)>, LowerError> {
    let bases = bases(source, library)?;
    let family = over_bases(source, &bases)?;
    let literal = |arg: &Arg<'_>| match arg {
        Arg::Num(n) => Value::Num(*n),
        Arg::Bool(b) => Value::Bool(*b),
        Arg::Null => Value::Null,
        Arg::Text(text) => {
            let value = text.parse().ok().and_then(|e: Expr| e.eval(&|_| None).ok());
            value.unwrap_or(Value::Null)
        }
    };
    Ok(family.defaults.iter().map(|(key, arg)| (key.to_owned(), literal(arg))).collect())
}

/// Evaluates the family's parameters and checks.
fn family_scope<'a>(cx: &'a Context<'a>, family: &Family<'a>) -> Result<Scope<'a>, SourceError> {
    let mut scope = Scope::engine(cx);
    for (name, arg) in family.params.iter() {
        scope.define(name, *arg)?;
    }
    scope.check(&family.checks)?;
    Ok(scope)
}

fn lower_parts(
    family: &Family<'_>,
    blocks: &Blocks<'_>,
    scope: &Scope<'_>,
) -> Result<Lowered, SourceError> {
    let cx = scope.cx;
    check_name(cx, family.name)?;
    let needs =
        |what| cx.at(family.name, format!("the family has no `{what}`, and no base with one"));
    let embed = family.embed.as_ref().ok_or_else(|| needs("embed"))?;
    let layers = family.layers.as_ref().ok_or_else(|| needs("layers"))?;
    let end = match cx.request.task {
        Task::Generate => ("head", &family.head),
        Task::Embed => ("pool", &family.pool),
        Task::Score => ("score", &family.score),
    };
    let (name, head) = (end.0, end.1.as_ref().ok_or_else(|| needs(end.0))?);
    let named = family.names.len() + family.also_named.len() + family.transposed.len();
    if named > MAX_NAMES {
        let message = format!(
            "expected at most {MAX_NAMES} entries of `names`, `also_named` and `transposed`, found {named}"
        );
        return Err(cx.at(family.name, message));
    }
    for (from, to) in family.names.iter().chain(&family.also_named) {
        if from.is_empty() {
            return Err(cx.at(to, "expected the name that this stands for, found an empty one"));
        }
    }
    let parts = Parts { family, layers, blocks };

    let mut module =
        Module { name: family.name.to_owned(), graphs: Vec::new(), schedule: Vec::new() };
    let (graph, carried) = parts.lower("embed", embed, scope, None, &[])?;
    add(&mut module, graph, None);
    let place = layers.kinds.iter().next().map_or(family.name, |(kind, _)| kind);
    let count = layer_count(layers.count, scope, place)?;
    let mut graphs = KindGraphs::new();
    for layer in 0..count {
        parts.add_layer((&mut module, &mut graphs), layer, place, scope, &carried)?;
    }
    let (graph, output) = parts.lower(name, head, scope, None, &carried)?;
    if output.len() != 1 {
        let place = head.gives.get(1).copied().unwrap_or(family.name);
        let message = format!("expected `gives` of `{name}` to be one name, that of the output");
        return Err(cx.at(place, message));
    }
    // What a pooling keeps of a sequence is kept as a layer's planes are: of one behind the last.
    let keeps = graph.params().any(|(_, param, _)| param.plane().is_some());
    add(&mut module, graph, keeps.then_some(count));
    check_output(cx, &module, head.gives.first().copied().unwrap_or(family.name), &output[0].1)?;
    check_positions(cx, &module, family.name)?;
    check_segments(cx, &module, family.name)?;
    let mut ignore: Vec<String> = family.ignore.iter().map(|s| (*s).to_owned()).collect();
    if let Some(head) = family.head.as_ref().filter(|_| !cx.request.task.generates()) {
        // A checkpoint may hold the head that stands for another task.
        let (graph, _) = parts.lower("head", head, scope, None, &carried)?;
        ignore.extend(graph.params().filter_map(|(_, param, _)| match param {
            Param::Weight(weight) => Some(weight.name.clone()),
            _ => None,
        }));
    }
    Ok(Lowered { module, ignore, warnings: Vec::new() })
}

/// The last part gives a row for each that is wanted and, of logits, none of a token that cannot come back in.
fn check_output(
    cx: &Context<'_>,
    module: &Module,
    place: &str,
    found: &Type,
) -> Result<(), SourceError> {
    let rows = Dim::sym(cx.request.rows);
    let columns = match found {
        Type::Tensor(t) if matches!(t.dtype, DType::F32 | DType::Bf16 | DType::F16) => {
            match t.shape[..] {
                [first, Dim::Const(columns)] if first == rows => Some(columns),
                _ => None,
            }
        }
        _ => None,
    };
    let columns = columns.ok_or_else(|| {
        let (name, expected) = match cx.request.task {
            Task::Generate => ("head", "logits, f32, bf16 or f16 [ROWS, vocabulary]"),
            Task::Embed => ("pooling", "vectors, f32, bf16 or f16 [ROWS, size]"),
            Task::Score => ("classifier", "scores, f32, bf16 or f16 [ROWS, labels]"),
        };
        let expected = expected.replace("ROWS", &rows.to_string());
        cx.at(place, format!("expected the {name} to give {expected}, found {found}"))
    })?;
    match token_rows(module).filter(|_| cx.request.task.generates()) {
        Some(known) if columns > known => Err(cx.at(
            place,
            format!(
                "the head has logits of {columns} tokens, but ids of tokens pick from a table of {known} \
                 row(s): expected at most as many logits"
            ),
        )),
        _ => Ok(()),
    }
}

/// Rows that are shared as prefixes know their tokens alone: which text these are of, only sequences that are computed whole
/// can tell.
fn check_segments(cx: &Context<'_>, module: &Module, place: &str) -> Result<(), SourceError> {
    let mut params = module.graphs.iter().flat_map(Graph::params);
    if takes_whole(module) || !params.any(|(_, p, _)| *p == Param::Step(StepInput::Segments)) {
        return Ok(());
    }
    let message = "`segments` tells texts apart: expected attention over whole sequences (`context_rows`), found none";
    Err(cx.at(place, message))
}

/// Tables that positions pick from have a row for each.
fn check_positions(cx: &Context<'_>, module: &Module, place: &str) -> Result<(), SourceError> {
    let longest = cx.request.max_length;
    let short = row_picks(module).into_iter().find_map(|pick| {
        let rows = pick.rows.as_const().filter(|rows| *rows < longest)?;
        (pick.by == Indices::Positions).then_some((pick, rows))
    });
    let Some((pick, rows)) = short else { return Ok(()) };
    let node = module.graphs[pick.graph].node(pick.node);
    let at = node.loc.as_ref().map(|loc| format!(" at {loc}")).unwrap_or_default();
    let message = format!(
        "`{}`{at} picks a row of {rows} by position, and sequences may be {longest} tokens long: expected a \
         --max-length of at most {rows}",
        node.names[0]
    );
    Err(cx.at(place, message))
}

/// Adds a graph and a call of it.
fn add(module: &mut Module, graph: Graph, layer: Option<u32>) -> usize {
    let index = module.graphs.len();
    module.graphs.push(graph);
    module.schedule.push(CallSite { graph: index, layer });
    index
}

/// How many layers; errors are at `place` where the number is written as one.
fn layer_count(count: Arg<'_>, scope: &Scope<'_>, place: &str) -> Result<u32, SourceError> {
    match scope.eval_int(place, count)? {
        n if n <= MAX_LAYERS => Ok(n as u32),
        n => Err(scope.unexpected(place, count, LAYER_COUNT, &Value::Num(n as f64))),
    }
}

/// What the checkpoint says of a weight.
enum StoredAs {
    Plain(DType),
    Encoded(Encoding),
}

impl Request<'_> {
    /// How one layer's weight is stored; `None` where nothing is known. A stack is as its first tensor.
    fn stored_as(&self, weight: &WeightRef, layer: Option<u32>, shape: &[u64]) -> Option<StoredAs> {
        let one = WeightRef { stack: weight.stack.map(|_| 1), ..weight.clone() };
        let name = one.tensors(layer).into_iter().next()?;
        let shape = &shape[usize::from(weight.stack.is_some())..];
        let encoded = (self.encoding)(&name, shape).map(StoredAs::Encoded);
        encoded.or_else(|| (self.weight_dtype)(&name).map(StoredAs::Plain))
    }

    /// Whether a layer's weights are stored as a graph of its kind expects.
    fn fits(&self, graph: &Graph, layer: u32) -> bool {
        graph.params().all(|(_, param, ty)| {
            let (Param::Weight(weight), Type::Tensor(ty)) = (param, ty) else { return true };
            let TensorType { dtype, encoding, shape, .. } = ty;
            let shape: Vec<u64> = shape.iter().filter_map(|d| d.as_const()).collect();
            match self.stored_as(weight, Some(layer), &shape) {
                Some(StoredAs::Plain(found)) => encoding.is_none() && found == *dtype,
                Some(StoredAs::Encoded(found)) => encoding.as_ref() == Some(&found),
                None => true,
            }
        })
    }
}

/// What the graphs of a family are lowered from.
#[derive(Clone, Copy)]
struct Parts<'a> {
    family: &'a Family<'a>,
    layers: &'a Layers<'a>,
    blocks: &'a Blocks<'a>,
}

/// The graphs of each kind of layer: one for each value of the parameters that differ by layer, and for each way in
/// which weights are stored.
type KindGraphs<'a> = HashMap<&'a str, Vec<(Vec<Value>, usize)>>;

impl<'a> Parts<'a> {
    /// Adds a layer: a call, and before the first of its kind the graph. Layers of a kind whose parameters differ, or
    /// whose weights are stored in different ways, have a graph each: the second is named `kind_2`.
    fn add_layer(
        self,
        (module, graphs): (&mut Module, &mut KindGraphs<'a>),
        layer: u32,
        place: &str,
        scope: &Scope<'_>,
        carried: &[(&str, Type)],
    ) -> Result<(), SourceError> {
        let values = scope.layer_values(&self.family.layer_params, layer)?;
        let mut own = scope.child();
        for ((name, _), value) in self.family.layer_params.iter().zip(&values) {
            own.set(name, value.clone());
        }
        let (kind, part) = layer_kind(self.layers, &own, layer, place)?;
        let known = graphs.entry(kind).or_default();
        let fits = |graph: usize| scope.cx.request.fits(&module.graphs[graph], layer);
        if let Some((_, graph)) = known.iter().find(|(v, g)| *v == values && fits(*g)) {
            module.schedule.push(CallSite { graph: *graph, layer: Some(layer) });
            return Ok(());
        }
        check_name(scope.cx, kind)?;
        if ["embed", "head", "pool", "score"].contains(&kind) {
            return Err(scope.cx.at(kind, format!("`{kind}` is the name of another part")));
        }
        let (mut graph, given) = self.lower(kind, part, &own, Some(layer), carried)?;
        check_given(scope.cx, kind, part, carried, &given)?;
        let taken = |name: &str| {
            module.graph(name).is_some() || self.layers.kinds.iter().any(|(other, _)| other == name)
        };
        if !known.is_empty() {
            let names = (known.len() + 1..).map(|i| format!("{kind}_{i}"));
            graph.name = names.into_iter().find(|name| !taken(name)).unwrap_or_default();
        }
        values.iter().try_for_each(|value| scope.cx.spend(kind, scope::weight(value)))?;
        known.push((values, add(module, graph, Some(layer))));
        Ok(())
    }
}

/// A layer must give what it takes, so that any may follow any.
fn check_given(
    cx: &Context<'_>,
    kind: &str,
    part: &Part<'_>,
    carried: &[(&str, Type)],
    given: &[(&str, Type)],
) -> Result<(), SourceError> {
    if carried == given {
        return Ok(());
    }
    let show = |values: &[(&str, Type)]| {
        let values = values.iter().map(|(n, t)| format!("{n}: {t}"));
        values.collect::<Vec<_>>().join(", ")
    };
    let (expected, found) = (show(carried), show(given));
    let place = part.gives.first().copied().unwrap_or(kind);
    let message = format!(
        "expected layers of kind `{kind}` to give what embed gives, {expected}; found {found}"
    );
    Err(cx.at(place, message))
}

/// The kind of a layer, with its name.
fn layer_kind<'a>(
    layers: &'a Layers<'a>,
    scope: &Scope<'_>,
    layer: u32,
    place: &str,
) -> Result<(&'a str, &'a Part<'a>), SourceError> {
    let kinds = &layers.kinds.0;
    let Some(kind) = layers.kind else {
        let [(name, part)] = &kinds[..] else {
            let message = "expected one kind, or `kind`, an expression over `layer` that names one";
            return Err(scope.cx.at(place, message));
        };
        return Ok((name, part));
    };
    let mut inner = scope.child();
    inner.set("layer", Value::Num(f64::from(layer)));
    let name = match inner.eval(kind)? {
        Value::Str(name) => name,
        v => return Err(inner.unexpected(place, kind, "the name of a kind", &v)),
    };
    let found = kinds.iter().find(|(k, _)| *k == name);
    found.map(|(k, part)| (*k, part)).ok_or_else(|| {
        let known: Vec<&str> = kinds.iter().map(|(k, _)| *k).collect();
        let (hint, known) = (nearest(&name, known.iter().copied()), known.join(", "));
        let name = brief(&Value::Str(name));
        let message = format!("layer {layer} is of kind {name}{hint}; expected one of {known}");
        scope.cx.at_arg(kind, place, message)
    })
}

impl Parts<'_> {
    /// Lowers one part to a graph; returns it with the names and types it gives.
    fn lower<'p>(
        self,
        name: &str,
        part: &'p Part<'_>,
        scope: &Scope<'_>,
        layer: Option<u32>,
        carried: &[(&str, Type)],
    ) -> Result<(Graph, Given<'p>), SourceError> {
        let cx = scope.cx;
        let Family { names: always, also_named: also, transposed, .. } = self.family;
        let names = Names { always, also, transposed };
        let mut builder = Builder::new(name, scope, self.blocks, names, layer);
        let mut frame = builder.frame(part.prefix, carried)?;
        builder.declare_weights(&mut frame, &part.weights)?;
        builder.body(&mut frame, &part.body)?;
        let mut results = Vec::new();
        let mut given = Vec::new();
        for name in &part.gives {
            let value = builder.resolve(&frame, name)?;
            let value = value.ok_or_else(|| cx.at(name, "this weight is left out here"))?;
            results.push(value);
            given.push((*name, builder.graph.ty(value).clone()));
        }
        Ok((builder.finish(results), given))
    }
}
