//! How a GGUF file is read as a model: files of `models/gguf/`, one for each architecture, say which keys of config.json
//! come of which metadata, what tensors are called, and what converters change about them.

use std::collections::BTreeMap;

use infernum_ir::SourceError;
use infernum_ir::expr::{Expr, ScalarFn, Value};
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::{Change, Gguf, GgufError, RowOrder, Stored, Value as Found};
use crate::config::Config;
use crate::safetensors::{StoredType, shown};
use crate::spec::{
    Arg, Argument, BlockSource, Entries, Family, Library, LibraryError, Source, read_ron,
};
use crate::tokenizer::gguf::{TABLE, ends};

const ARCHITECTURE: &str = "general.architecture";
/// Files that a map may be based on, one after the other.
const MAX_BASES: usize = 8;
/// Layers that may stand behind those that run; known models have one.
const MAX_BEHIND: u64 = 8;
/// Values of a list, and tensors of a file, that expressions may see.
const MAX_LIST: usize = 1 << 16;

/// A GGUF file's metadata cannot be read as a model's.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum MapError {
    #[error("{file}: {error}")]
    Gguf { file: String, error: GgufError },
    #[error(
        "{file}: is of the architecture `{found}`, which no file of models/gguf/ reads (they read {known}); write \
         one, and give it with --data"
    )]
    Architecture { file: String, found: String, known: String },
    #[error("{file}: {error}")]
    Spec { file: String, error: Box<SourceError> },
    #[error(transparent)]
    Library(#[from] LibraryError),
}

/// A file of `models/gguf/`: a family's specs serve a container with what it says in place of theirs.
#[derive(Debug, Deserialize)]
#[serde(rename = "Gguf", deny_unknown_fields)]
pub struct ContainerMap<'a> {
    /// What it reads.
    pub doc: &'a str,
    /// A file to start from: what is written here goes before what is there.
    #[serde(default, borrow)]
    pub base: Option<&'a str>,
    /// Values of `general.architecture`.
    #[serde(default)]
    pub architectures: Vec<&'a str>,
    /// Keys of config.json, dots for objects within, by expressions over metadata, or lists of
    /// them; what is null is left out.
    #[serde(default)]
    pub config: Entries<'a, Argument<'a>>,
    /// The same of generation_config.json.
    #[serde(default)]
    pub generation: Entries<'a, Argument<'a>>,
    /// Tensors of numbers that these expressions read, by a name for each.
    #[serde(default)]
    pub lists: Entries<'a, &'a str>,
    /// What is done to tensors when they are read, by their names; `*` stands for any text.
    #[serde(default)]
    pub changes: Entries<'a, ChangeDecl<'a>>,
    /// Parameters in place of the family's.
    #[serde(default)]
    pub params: Entries<'a, Arg<'a>>,
    /// The same of those that differ by layer.
    #[serde(default)]
    pub layer_params: Entries<'a, Arg<'a>>,
    /// Blocks in place of the family's.
    #[serde(default)]
    pub blocks: Entries<'a, BlockSource<'a>>,
    /// What blocks call tensors and what these files do, in place of the family's names.
    #[serde(default)]
    pub names: Vec<(&'a str, &'a str)>,
    /// The same for files that were written otherwise.
    #[serde(default)]
    pub also_named: Vec<(&'a str, &'a str)>,
    /// Tensors that the model does not use. `{behind}` is the number of a layer behind those that run: such predict further
    /// tokens.
    #[serde(default)]
    pub ignore: Vec<&'a str>,
    /// For writing: what keys of `config` are by expressions over config.json, where that says it otherwise;
    /// `generation.KEY` the same of `generation`.
    #[serde(default)]
    pub written: Entries<'a, Arg<'a>>,
    /// For writing: metadata beside what `config` reads, by expressions over its keys.
    #[serde(default)]
    pub beside: Entries<'a, Arg<'a>>,
    /// For writing: patterns of keys of metadata that are floats, whatever they hold.
    #[serde(default)]
    pub floats: Vec<&'a str>,
    /// For writing: patterns of tensors that are f32 whatever others are.
    #[serde(default)]
    pub wide: Vec<&'a str>,
    /// For writing: parameters that are in weights there already, with the patterns of these and what is done to their
    /// values.
    #[serde(default)]
    pub folded: Entries<'a, Vec<(&'a str, &'a str)>>,
    /// For writing: which of `lists` holds what tables of frequencies are divided by.
    #[serde(default)]
    pub factors: Option<&'a str>,
}

/// A change, as a map says it.
#[derive(Debug, Deserialize)]
pub enum ChangeDecl<'a> {
    /// The rows taken apart into `dims`, one of which may be `None`, whose axes are put into the order `axes`.
    Rows {
        /// Sizes: expressions over keys of config.json.
        #[serde(borrow)]
        dims: Vec<Arg<'a>>,
        /// Numbers of those.
        axes: Vec<usize>,
    },
    /// Each value, by an expression of `x`.
    Values(&'a str),
}

impl<'a> ContainerMap<'a> {
    fn over(self, base: ContainerMap<'a>) -> ContainerMap<'a> {
        ContainerMap {
            config: self.config.over(base.config),
            generation: self.generation.over(base.generation),
            lists: self.lists.over(base.lists),
            changes: self.changes.over(base.changes),
            params: self.params.over(base.params),
            layer_params: self.layer_params.over(base.layer_params),
            blocks: self.blocks.over(base.blocks),
            names: [self.names, base.names].concat(),
            also_named: [self.also_named, base.also_named].concat(),
            ignore: [base.ignore, self.ignore].concat(),
            written: self.written.over(base.written),
            beside: self.beside.over(base.beside),
            floats: [base.floats, self.floats].concat(),
            wide: [base.wide, self.wide].concat(),
            folded: self.folded.over(base.folded),
            factors: self.factors.or(base.factors),
            ..self
        }
    }

    /// The map in `sources`, nearest first.
    pub fn read(sources: &'a [Source]) -> Result<ContainerMap<'a>, SourceError> {
        let mut maps = sources.iter().map(read_ron::<ContainerMap<'_>>);
        let first = maps.next().unwrap_or_else(|| Err(SourceError::new("", "", 0..0, "no map")))?;
        maps.try_fold(first, |map, base| Ok(map.over(base?)))
    }

    /// A family of which only the tensors are called as these files do, and hold what they do.
    #[must_use]
    pub fn naming(self, family: Family<'a>) -> Family<'a> {
        let ContainerMap { folded, params, .. } = self;
        let folds = |name: &str| folded.get(name).is_some();
        let params = Entries(params.0.into_iter().filter(|(name, _)| folds(name)).collect());
        let (layer_params, blocks) = (Entries::default(), Entries::default());
        ContainerMap { params, layer_params, blocks, folded, ..self }.onto(family)
    }

    /// A family as it serves these files: what is said here goes before what it says, and what it says of names in its
    /// own checkpoints is not for these.
    pub fn onto(self, family: Family<'a>) -> Family<'a> {
        Family {
            params: self.params.over(family.params),
            layer_params: self.layer_params.over(family.layer_params),
            blocks: self.blocks.over(family.blocks),
            ignore: self.ignore,
            names: self.names,
            also_named: self.also_named,
            transposed: Vec::new(),
            ..family
        }
    }
}

/// A GGUF file read as a model.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// What config.json and generation_config.json would say.
    pub config: Config,
    /// The map, before what it is based on.
    pub sources: Vec<Source>,
    /// What is done to tensors, by patterns of their names.
    pub changes: Vec<(String, Change)>,
    /// Tensors that the model does not use, beside those that its spec names.
    pub ignore: Vec<String>,
}

impl Mapped {
    /// Reads the metadata of `gguf`, the tables of the file `bytes` called `file`.
    pub fn read(
        file: &str,
        (gguf, bytes): (&Gguf, &[u8]),
        library: &Library,
    ) -> Result<Mapped, MapError> {
        let fault = |error| MapError::Gguf { file: file.to_owned(), error };
        let architecture = gguf.text(bytes, ARCHITECTURE).map_err(fault)?;
        let missing = || fault(GgufError::MissingKey { key: ARCHITECTURE.to_owned() });
        let architecture = architecture.ok_or_else(missing)?;
        let sources = sources(file, architecture, library)?;
        let lists = {
            let spec = |error| MapError::Spec { file: file.to_owned(), error: Box::new(error) };
            let map = ContainerMap::read(&sources).map_err(spec)?;
            Metadata::new((gguf, bytes), architecture, &map.lists)
        };
        let mut mapped = Mapped::of(file, sources, lists)?;
        mapped.config.add_ends(ends(file, gguf, bytes, library));
        Ok(mapped)
    }

    /// What `sources` make of metadata.
    pub(super) fn of(
        file: &str,
        sources: Vec<Source>,
        metadata: Metadata,
    ) -> Result<Mapped, MapError> {
        let spec =
            |error: SourceError| MapError::Spec { file: file.to_owned(), error: Box::new(error) };
        let map = ContainerMap::read(&sources).map_err(spec)?;
        let place = |slice: &str| {
            let holds = |s: &&Source| s.text.as_bytes().as_ptr_range().contains(&slice.as_ptr());
            sources.iter().find(holds)
        };
        let mut scope = Scope { place: &place, metadata, known: BTreeMap::new() };
        let config = scope.document(&map.config).map_err(spec)?;
        let changes = map
            .changes
            .iter()
            .map(|(pattern, change)| Ok((pattern.to_owned(), scope.change(pattern, change)?)));
        let changes = changes.collect::<Result<_, SourceError>>().map_err(spec)?;
        let ignore = behind(&map.ignore, &config);
        let generation = scope.document(&map.generation).map_err(spec)?;
        Ok(Mapped { config: Config::of(file, config, Some(generation)), changes, sources, ignore })
    }
}

/// The patterns of layers behind those that run.
fn behind(patterns: &[&str], config: &Map<String, Json>) -> Vec<String> {
    const BEHIND: &str = "{behind}";
    let layers = config.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(u64::MAX);
    let of = |n: u64| {
        let named = patterns.iter().filter(|p| p.contains(BEHIND));
        named.map(move |p| p.replace(BEHIND, &n.to_string()))
    };
    (layers..layers.saturating_add(MAX_BEHIND)).flat_map(of).collect()
}

/// The map of an architecture, and those that it is based on.
pub(super) fn sources(
    file: &str,
    architecture: &str,
    library: &Library,
) -> Result<Vec<Source>, MapError> {
    let spec = |error| MapError::Spec { file: file.to_owned(), error: Box::new(error) };
    let (mut found, mut known) = (Vec::<Source>::new(), Vec::new());
    for source in library.folder("gguf")? {
        if source.file.ends_with(TABLE) {
            continue;
        }
        let map: ContainerMap<'_> = read_ron(&source).map_err(spec)?;
        if found.is_empty() && map.architectures.contains(&architecture) {
            found.push(source.clone());
        }
        known.extend(map.architectures.iter().map(|a| (*a).to_owned()));
    }
    while let Some(last) = found.last().cloned() {
        let map: ContainerMap<'_> = read_ron(&last).map_err(spec)?;
        let Some(base) = map.base else { return Ok(found) };
        let at = |message: String| spec(last.at(base, message));
        let next = library.file(&format!("gguf/{base}")).map_err(|e| at(e.to_string()))?;
        if found.len() > MAX_BASES || found.iter().any(|s| s.file == next.file) {
            return Err(at(format!("`{}` is based on itself", next.file)));
        }
        found.push(next);
    }
    known.sort();
    let (found, known) = (shown(architecture), known.join(", "));
    Err(MapError::Architecture { file: file.to_owned(), found, known })
}

/// Metadata as expressions see it.
pub(super) struct Metadata {
    /// By the first part of its key; what is the architecture's own goes without its name.
    values: BTreeMap<String, Value>,
}

impl Metadata {
    fn new(
        (gguf, bytes): (&Gguf, &[u8]),
        architecture: &str,
        lists: &Entries<'_, &str>,
    ) -> Metadata {
        let mut root = Tree::default();
        let own = format!("{architecture}.");
        let (mine, others): (Vec<_>, Vec<_>) =
            gguf.entries(bytes).partition(|(key, _)| key.starts_with(&own));
        for (key, value) in mine.into_iter().chain(others) {
            if let Some(value) = expression_value(value) {
                root.insert(key.strip_prefix(&own).unwrap_or(key), value);
            }
        }
        for tensor in gguf.tensors().iter().take(MAX_LIST) {
            let shape = tensor.shape().iter().map(|d| Value::Num(*d as f64)).collect();
            root.insert(&format!("tensors.{}", gguf.name(bytes, tensor)), Value::List(shape));
        }
        for (name, tensor) in lists.iter() {
            if let Some(list) = numbers(gguf, bytes, tensor) {
                root.0.insert(name.to_owned(), Tree::leaf(Value::List(list)));
            }
        }
        root.into()
    }
}

impl Metadata {
    /// The same with the value of a name.
    pub(super) fn with(mut self, name: &str, value: Value) -> Metadata {
        self.values.insert(name.to_owned(), value);
        self
    }
}

impl From<Tree> for Metadata {
    fn from(root: Tree) -> Metadata {
        Metadata { values: root.0.into_iter().map(|(k, v)| (k, v.value())).collect() }
    }
}

/// The elements of an f32 tensor of one dimension.
fn numbers(gguf: &Gguf, bytes: &[u8], name: &str) -> Option<Vec<Value>> {
    let tensor = gguf.find(bytes, name).filter(|t| t.stored() == Stored::Plain(StoredType::F32))?;
    let [len] = tensor.shape() else { return None };
    let start = usize::try_from(tensor.offset()).ok()?;
    let data = bytes.get(start..)?.as_chunks().0.iter().take((*len).min(MAX_LIST as u64) as usize);
    Some(data.map(|b| Value::Num(f32::from_le_bytes(*b).into())).collect())
}

/// Keys with dots, taken apart.
#[derive(Default)]
pub(super) struct Tree(BTreeMap<String, Tree>, Option<Value>);

impl Tree {
    fn leaf(value: Value) -> Tree {
        Tree(BTreeMap::new(), Some(value))
    }

    pub(super) fn insert(&mut self, key: &str, value: Value) {
        // No known key has so many parts; a tree that is deeper would be costly to drop.
        let mut parts = key.splitn(8, '.').peekable();
        let mut node = self;
        while let Some(part) = parts.next() {
            node = node.0.entry(part.to_owned()).or_default();
            if parts.peek().is_none() {
                node.1.get_or_insert(value);
                return;
            }
        }
    }

    /// A value that is also the beginning of other keys is hidden by them.
    pub(super) fn value(self) -> Value {
        match self {
            Tree(parts, Some(value)) if parts.is_empty() => value,
            Tree(parts, _) => Value::Map(parts.into_iter().map(|(k, v)| (k, v.value())).collect()),
        }
    }
}

/// A value as expressions see it; lists of texts, which are vocabularies, they do not see.
fn expression_value(value: Found<'_>) -> Option<Value> {
    Some(match value {
        Found::Whole(n) => Value::Num(n as f64),
        Found::Real(x) => Value::Num(x),
        Found::Bool(b) => Value::Bool(b),
        Found::Text(text) if text.len() <= 1 << 10 => Value::Str(text.to_owned()),
        Found::List(list) if !list.is_text() && list.len() <= MAX_LIST => {
            Value::List(list.iter().filter_map(expression_value).collect())
        }
        Found::Text(_) | Found::Bytes(_) | Found::List(_) => return None,
    })
}

struct Scope<'a> {
    place: &'a dyn Fn(&str) -> Option<&'a Source>,
    metadata: Metadata,
    /// Keys of config.json that are known already.
    known: BTreeMap<String, Value>,
}

impl Scope<'_> {
    fn error(&self, slice: &str, message: impl Into<String>) -> SourceError {
        let message = message.into();
        (self.place)(slice).map_or_else(
            || SourceError::new("", "", 0..0, message.clone()),
            |s| s.at(slice, &message),
        )
    }

    /// The value of an argument written under `key`.
    fn eval(&self, key: &str, arg: Arg<'_>) -> Result<Value, SourceError> {
        let text = match arg {
            Arg::Num(n) => return Ok(Value::Num(n)),
            Arg::Bool(b) => return Ok(Value::Bool(b)),
            Arg::Null => return Ok(Value::Null),
            Arg::Text(text) => text,
        };
        let expr: Expr = match (self.place)(text) {
            Some(source) => source.expression(text)?,
            None => text.parse().map_err(|e| self.error(key, format!("{e}")))?,
        };
        let lookup = |name: &str| {
            if name == "config" {
                return Some(Value::Map(self.known.clone().into_iter().collect()));
            }
            Some(self.metadata.values.get(name).cloned().unwrap_or(Value::Null))
        };
        expr.eval(&lookup).map_err(|e| self.error(text, format!("`{key}`: {}", e.message)))
    }

    /// The keys whose expressions are not null, as JSON.
    fn document(
        &mut self,
        entries: &Entries<'_, Argument<'_>>,
    ) -> Result<Map<String, Json>, SourceError> {
        let mut root = Map::new();
        for (key, arg) in entries.iter() {
            let value = match arg {
                Argument::One(arg) => self.eval(key, *arg)?,
                Argument::List(args) => {
                    let values = args.iter().map(|arg| self.eval(key, *arg));
                    let all = values.collect::<Result<Vec<_>, _>>()?;
                    Value::List(all.into_iter().filter(|v| *v != Value::Null).collect())
                }
                Argument::Names(_) => {
                    return Err(
                        self.error(key, "expected an expression, or a list of them".to_owned())
                    );
                }
            };
            if value == Value::Null {
                continue;
            }
            let mut parts: Vec<&str> = key.split('.').collect();
            let last = parts.pop().unwrap_or(key);
            let mut object = &mut root;
            for part in parts {
                let inner = object.entry(part).or_insert_with(|| Json::Object(Map::new()));
                let Json::Object(inner) = inner else {
                    return Err(self.error(key, format!("`{part}` is both a value and an object")));
                };
                object = inner;
            }
            object.insert(last.to_owned(), json(&value));
            self.known.insert(key.to_owned(), value);
        }
        Ok(root)
    }

    fn change(&self, key: &str, change: &ChangeDecl<'_>) -> Result<Change, SourceError> {
        match change {
            ChangeDecl::Values(text) => {
                let expr: Expr = text.parse().map_err(|e| self.error(text, format!("{e}")))?;
                let compiled = ScalarFn::compile(&expr, &["x"]);
                Ok(Change::Values(compiled.map_err(|e| self.error(text, e.message))?))
            }
            ChangeDecl::Rows { dims, axes } => {
                let size = |dim: &Arg<'_>| match self.eval_config(key, *dim)? {
                    Value::Null => Ok(None),
                    Value::Num(n) if n >= 1.0 && n.fract() == 0.0 && n < 1e9 => Ok(Some(n as u64)),
                    v => Err(self.error(key, format!("expected a size, found {v}"))),
                };
                let dims = dims.iter().map(size).collect::<Result<Vec<_>, _>>()?;
                let mut sorted = axes.clone();
                sorted.sort_unstable();
                let rests = dims.iter().filter(|d| d.is_none()).count();
                if sorted.into_iter().ne(0..dims.len()) || rests > 1 {
                    let message =
                        "expected each of `dims` once in `axes`, and one of them None at most";
                    return Err(self.error(key, message.to_owned()));
                }
                Ok(Change::Rows(RowOrder { dims, axes: axes.clone() }))
            }
        }
    }

    /// As [`Scope::eval`], over keys of config.json.
    fn eval_config(&self, key: &str, arg: Arg<'_>) -> Result<Value, SourceError> {
        let Arg::Text(text) = arg else { return self.eval(key, arg) };
        let expr: Expr = text.parse().map_err(|e| self.error(text, format!("{e}")))?;
        let lookup = |name: &str| Some(self.known.get(name).cloned().unwrap_or(Value::Null));
        expr.eval(&lookup).map_err(|e| self.error(text, e.message))
    }
}

fn json(value: &Value) -> Json {
    match value {
        Value::Null => Json::Null,
        Value::Bool(b) => (*b).into(),
        Value::Num(n) if n.fract() == 0.0 && n.abs() < 9e15 => (*n as i64).into(),
        Value::Num(n) => (*n).into(),
        Value::Str(s) => s.as_str().into(),
        Value::List(items) => items.iter().map(json).collect(),
        Value::Map(entries) => {
            Json::Object(entries.iter().map(|(k, v)| (k.clone(), json(v))).collect())
        }
    }
}
