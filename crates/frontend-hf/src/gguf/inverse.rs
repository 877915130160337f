//! A checkpoint in Hugging Face's format as what a GGUF file would say of it: a file of `models/gguf/` read the other way
//! round.
//!
//! What metadata there must be is found by solving that file's expressions for what config.json says; what tensors are
//! called, by lowering the family's spec with both names. Neither is trusted: what was found is read as a file would be,
//! and must give the same module.

use std::collections::BTreeMap;

use infernum_ir::expr::{Expr, ScalarFn, Value};
use infernum_ir::{
    CallSite, Graph, Module, NodeKind, Param, SourceError, Sym, Type, ValueId, nearest,
};

use super::alike::compare;
use super::map::{Metadata as Read, Tree, sources};
use super::solve::{Solver, inverse};
use super::{Change, ChangeDecl, ContainerMap, Datum, MapError, Mapped, Metadata};
use crate::checkpoint::part_of;
use crate::config::{ConfigError, expr_value};
use crate::lower::{LowerError, family_defaults};
use crate::model::{LowerOptions, Model, ModelError, matches};
use crate::spec::{Arg, Argument, LibraryError, Source, read_ron};
use crate::tokenizer::gguf::TABLE;

const ARCHITECTURE: &str = "general.architecture";
/// Keys of metadata that are no architecture's own.
const GENERAL: [&str; 3] = ["general.", "tokenizer.", "infernum."];

/// A model cannot be said in a GGUF file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum InverseError {
    #[error(transparent)]
    Model(#[from] Box<ModelError>),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Spec(#[from] Box<SourceError>),
    #[error(
        "{place}: no file of models/gguf/ reads the architecture {found}{hint}; without one there is no GGUF file that \
         could hold it"
    )]
    NoMap { place: String, found: String, hint: String },
    #[error(
        "{map} cannot be written for {place}: {message}{}",
        if unsaid.is_empty() { String::new() } else { format!("; it has no metadata for {}", unsaid.join(", ")) }
    )]
    Inverse { map: String, place: String, message: String, unsaid: Vec<String> },
}

/// What a GGUF file says of a model, but for its tokenizer.
#[derive(Debug)]
pub struct AsGguf {
    /// Metadata.
    pub metadata: Metadata,
    /// Tensors of weights, by their names there.
    pub tensors: Vec<TensorSource>,
    /// Tensors of numbers that come of the config.
    pub constants: Vec<(String, Vec<f32>)>,
}

/// What a tensor of the file is made of.
#[derive(Clone, Debug)]
pub struct TensorSource {
    /// Its name there.
    pub name: String,
    /// Its shape there, outermost first, without dimensions of 1.
    pub shape: Vec<u64>,
    /// The tensors that it is made of, one after the other.
    pub parts: Vec<String>,
    /// Whether these have their axes swapped.
    pub swapped: bool,
    /// What is done to each.
    pub change: Option<Change>,
    /// Whether it is f32 whatever others are.
    pub wide: bool,
    /// Of a matrix of a layer: rows and columns of each part.
    pub matrix: Option<(u64, u64)>,
}

/// What a GGUF file would say of a model that is opened from Hugging Face's format.
pub fn as_gguf(model: &Model) -> Result<AsGguf, InverseError> {
    let place = model.files.name().to_owned();
    let own = model.config.architectures()?;
    let library = model.library();
    let (mut known, mut wanted) = (Vec::new(), Vec::new());
    for source in library.folder("gguf")?.iter().filter(|s| !s.file.ends_with(TABLE)) {
        let map: ContainerMap<'_> = read_ron(source).map_err(Box::new)?;
        let Some(Argument::One(Arg::Text(served))) = map.config.get("architectures") else {
            continue;
        };
        // The texts in quotes of an expression that chooses among names.
        let quoted = || served.split('\'').skip(1).step_by(2);
        known.extend(quoted().filter(|text| text.ends_with("ForCausalLM")).map(str::to_owned));
        if let Some(architecture) = map.architectures.first()
            && own.iter().any(|name| quoted().any(|text| text == *name))
        {
            wanted.push((*architecture).to_owned());
        }
    }
    let mut first = None;
    for architecture in wanted {
        match (Writer { model, place: &place }).write(&architecture) {
            Ok(found) => return Ok(found),
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    Err(first.unwrap_or_else(|| {
        let found = own.join(", ");
        let hint = nearest(&found, known.iter().map(String::as_str));
        InverseError::NoMap { place, found, hint }
    }))
}

struct Writer<'a> {
    model: &'a Model,
    place: &'a str,
}

/// What is being written.
struct Draft<'a> {
    map: &'a ContainerMap<'a>,
    solver: Solver,
    /// Keys of config.json that no metadata says.
    unsaid: Vec<String>,
}

impl Writer<'_> {
    fn write(&self, architecture: &str) -> Result<AsGguf, InverseError> {
        let sources = sources(self.place, architecture, self.model.library())?;
        let map = ContainerMap::read(&sources).map_err(Box::new)?;
        let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
        let stored = self.model.lower(options, []).map_err(Box::new)?.module;
        let length = self.model.context_length().map_err(Box::new)?;
        let wanted = self.model.lower_in(&sources, true, length)?;
        let refused = |message: String, unsaid: &[String]| InverseError::Inverse {
            map: sources[0].file.to_string(),
            place: self.place.to_owned(),
            message,
            unsaid: unsaid.to_vec(),
        };
        let mut tensors = tensors(&stored, &wanted).map_err(|m| refused(m, &[]))?;
        let solver =
            Solver { found: BTreeMap::new(), config: BTreeMap::new(), tensors: shapes(&tensors) };
        let mut draft = Draft { map: &map, solver, unsaid: Vec::new() };
        self.solve(&mut draft)?;
        // Tables that differ are of frequencies, which some files have factors of.
        let mut mapped = self.read(architecture, &sources, &draft)?;
        let tables = self.compared(&mapped, &wanted, length);
        let tables = tables.map_err(|m| refused(m, &draft.unsaid))?;
        if !tables.is_empty() {
            let message = || "its rotary frequencies cannot be said".to_owned();
            let factors = map.factors.and_then(|name| Some((name, factors(&tables)?)));
            let (name, factors) = factors.ok_or_else(|| refused(message(), &draft.unsaid))?;
            draft.solver.found.insert(name.to_owned(), factors);
            mapped = self.read(architecture, &sources, &draft)?;
            let tables = self.compared(&mapped, &wanted, length);
            if !tables.map_err(|m| refused(m, &draft.unsaid))?.is_empty() {
                return Err(refused(message(), &draft.unsaid));
            }
        }
        let folded: Vec<_> = map.folded.iter().flat_map(|(_, folds)| folds).collect();
        for tensor in &mut tensors {
            if let Some((_, text)) = folded.iter().find(|(p, _)| matches(p, &tensor.name)) {
                let f = ScalarFn::compile(&expression(Arg::Text(text))?, &["x"]);
                let f = f.map_err(|e| refused(format!("`{text}`: {}", e.message), &[]))?;
                tensor.change = Some(Change::Values(f));
                continue;
            }
            let change = mapped.changes.iter().find(|(pattern, _)| matches(pattern, &tensor.name));
            if let Some((pattern, change)) = change {
                let undone = undone(change, map.changes.get(pattern));
                let message = || format!("what is done to `{}` cannot be undone", tensor.name);
                tensor.change = Some(undone.ok_or_else(|| refused(message(), &[]))?);
            }
            tensor.wide = map.wide.iter().any(|pattern| matches(pattern, &tensor.name));
        }
        Ok(draft.finish(architecture, tensors))
    }

    /// Finds metadata for what config.json says.
    fn solve(&self, draft: &mut Draft<'_>) -> Result<(), InverseError> {
        let defaults = family_defaults(&self.model.spec, self.model.library())?;
        let ends = self.model.config.eos_ids(None)?;
        let ends = Value::List(ends.into_iter().map(|id| Value::Num(id.into())).collect());
        let generation = |key: &str| match key {
            "eos_token_id" => ends.clone(),
            key => self.model.config.generation(key).map_or(Value::Null, expr_value),
        };
        let key = |name: &str| {
            if name == "generation" {
                let keys = draft.map.generation.iter().map(|(key, _)| key);
                let all = keys.chain(["do_sample"]).map(|key| (key.to_owned(), generation(key)));
                return Some(Value::Map(all.collect()));
            }
            let default = || defaults.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone());
            Some(self.model.config.value(name).or_else(default).unwrap_or(Value::Null))
        };
        let written = |name: &str| {
            let mut all: Vec<_> = draft.map.written.iter().collect();
            // The nearest first.
            all.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
            let of = |prefix: &str| match name.strip_prefix(prefix)? {
                "" => Some(String::new()),
                rest => rest.strip_prefix('.').map(str::to_owned),
            };
            let found = all.into_iter().find_map(|(prefix, arg)| Some((of(prefix)?, *arg)));
            let Some((rest, arg)) = found else { return Ok(None) };
            let value = literal(arg, &key)?;
            let parts = rest.split('.').filter(|part| !part.is_empty());
            Ok::<_, Box<SourceError>>(Some(parts.fold(value, |value, part| value.member(part))))
        };
        for (name, arg) in draft.map.config.iter().filter(|(name, _)| *name != "architectures") {
            let Argument::One(arg) = arg else { continue };
            let expr = expression(*arg)?;
            let wish = match written(name)? {
                Some(value) => value,
                None => key(name).unwrap_or(Value::Null),
            };
            if wish != Value::Null && !draft.solver.solve(&expr, &wish) {
                draft.unsaid.push(format!("`{name}`"));
            }
            if let Some(value) = draft.solver.eval(&expr).filter(|v| *v != Value::Null) {
                draft.solver.config.insert(name.to_owned(), value);
            }
        }
        for (path, arg) in draft.map.beside.iter() {
            let value = draft.solver.eval(&expression(*arg)?).filter(|v| *v != Value::Null);
            if let Some(value) = value {
                draft.solver.found.entry(path.to_owned()).or_insert(value);
            }
        }
        for (name, arg) in draft.map.generation.iter() {
            let wish = match written(&format!("generation.{name}"))? {
                Some(value) => value,
                None => generation(name),
            };
            match (arg, wish) {
                (_, Value::Null) | (Argument::Names(_), _) => {}
                (Argument::One(arg), wish) => {
                    draft.solver.solve(&expression(*arg)?, &wish);
                }
                (Argument::List(args), wish) => {
                    let wishes = if let Value::List(items) = wish { items } else { vec![wish] };
                    for (arg, wish) in args.iter().zip(wishes) {
                        draft.solver.solve(&expression(*arg)?, &wish);
                    }
                }
            }
        }
        Ok(())
    }

    /// What a file of this metadata would be read as.
    fn read(
        &self,
        architecture: &str,
        sources: &[Source],
        draft: &Draft<'_>,
    ) -> Result<Mapped, InverseError> {
        let mut root = Tree::default();
        for (path, value) in &draft.solver.found {
            root.insert(path, value.clone());
        }
        root.insert(ARCHITECTURE, Value::Str(architecture.to_owned()));
        let read = Read::from(root).with("tensors", draft.solver.tensors.clone());
        Ok(Mapped::of(self.place, sources.to_vec(), read)?)
    }

    /// Compares what a file would be read as with what it is to be.
    fn compared(
        &self,
        mapped: &Mapped,
        wanted: &Module,
        length: u64,
    ) -> Result<super::alike::Tables, String> {
        let read = Model::from_config(mapped.config.clone(), None, self.model.library());
        let read = read.map_err(|e| e.to_string())?;
        let module = read.lower_in(&mapped.sources, false, length).map_err(|e| e.to_string())?;
        compare(wanted, &module)
    }
}

impl Draft<'_> {
    /// What a file says.
    fn finish(&self, architecture: &str, tensors: Vec<TensorSource>) -> AsGguf {
        let Draft { map, solver, .. } = self;
        let key = |path: &str| {
            let own = !GENERAL.iter().any(|general| path.starts_with(general));
            if own { format!("{architecture}.{path}") } else { path.to_owned() }
        };
        let datum = |path: &str, value: &Value| {
            let float = map.floats.iter().any(|pattern| matches(pattern, path));
            datum(value, float).map(|datum| (key(path), datum))
        };
        let text = Datum::Text(architecture.to_owned());
        let mut metadata = vec![(ARCHITECTURE.to_owned(), text)];
        let mut constants = Vec::new();
        for (path, value) in &solver.found {
            match (map.lists.get(path), value) {
                (Some(name), Value::List(items)) => {
                    let number = |v: &Value| if let Value::Num(n) = v { *n as f32 } else { 0.0 };
                    constants.push(((*name).to_owned(), items.iter().map(number).collect()));
                }
                _ => metadata.extend(datum(path, value)),
            }
        }
        AsGguf { metadata, tensors, constants }
    }
}

fn expression(arg: Arg<'_>) -> Result<Expr, Box<SourceError>> {
    Ok(match arg {
        Arg::Num(n) => Expr::Lit(Value::Num(n)),
        Arg::Bool(b) => Expr::Lit(Value::Bool(b)),
        Arg::Null => Expr::Lit(Value::Null),
        Arg::Text(text) => {
            let parsed: Result<Expr, _> = text.parse();
            parsed
                .map_err(|e| Box::new(SourceError::new("", text, 0..text.len(), e.to_string())))?
        }
    })
}

fn literal(
    arg: Arg<'_>,
    lookup: &dyn Fn(&str) -> Option<Value>,
) -> Result<Value, Box<SourceError>> {
    let fault = |e: infernum_ir::expr::ExprError| {
        let text = if let Arg::Text(text) = arg { text } else { "" };
        Box::new(SourceError::new("", text, 0..text.len(), e.message))
    };
    expression(arg)?.eval(lookup).map_err(fault)
}

/// A value as files have it; `None` of what they cannot have.
fn datum(value: &Value, float: bool) -> Option<Datum> {
    let whole = |n: f64| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n);
    Some(match value {
        Value::Num(n) if !float && whole(*n) => Datum::U32(*n as u32),
        Value::Num(n) if !float && n.fract() == 0.0 => Datum::I32(*n as i32),
        Value::Num(n) => Datum::F32(*n as f32),
        Value::Bool(b) => Datum::Bool(*b),
        Value::Str(s) => Datum::Text(s.clone()),
        Value::List(items) => {
            let numbers: Option<Vec<f64>> =
                items.iter().map(|v| if let Value::Num(n) = v { Some(*n) } else { None }).collect();
            let flags: Option<Vec<bool>> = items
                .iter()
                .map(|v| if let Value::Bool(b) = v { Some(*b) } else { None })
                .collect();
            match (numbers, flags) {
                (Some(n), _) if !float && n.iter().all(|n| whole(*n)) => {
                    Datum::U32s(n.into_iter().map(|n| n as u32).collect())
                }
                (Some(n), _) => Datum::F32s(n.into_iter().map(|n| n as f32).collect()),
                (None, Some(flags)) => Datum::Bools(flags),
                (None, None) => return None,
            }
        }
        Value::Null | Value::Map(_) => return None,
    })
}

/// What makes each table that is there the one that is wanted, by division; the same for all.
fn factors(tables: &super::alike::Tables) -> Option<Value> {
    let of = |(wanted, found): &(Vec<f64>, Vec<f64>)| {
        let same = wanted.len() == found.len() && wanted.iter().all(|w| *w != 0.0);
        let ratio = found.iter().zip(wanted).map(|(f, w)| f64::from((f / w) as f32));
        same.then(|| Value::List(ratio.map(Value::Num).collect()))
    };
    let all: Option<Vec<Value>> = tables.iter().map(of).collect();
    let all = all?;
    let first = all.first()?.clone();
    all.iter().all(|v| *v == first).then_some(first)
}

/// What undoes a change.
fn undone(change: &Change, declared: Option<&ChangeDecl<'_>>) -> Option<Change> {
    match (change, declared) {
        (Change::Rows(order), _) => Some(Change::Rows(order.inverse())),
        (Change::Values(_), Some(ChangeDecl::Values(text))) => {
            let back = inverse(&text.parse().ok()?, Expr::Var("x".to_owned()))?;
            ScalarFn::compile(&back, &["x"]).ok().map(Change::Values)
        }
        (Change::Values(_), _) => None,
    }
}

/// Shapes of tensors by the parts of their names, as expressions see them.
fn shapes(tensors: &[TensorSource]) -> Value {
    let mut root = Tree::default();
    for tensor in tensors {
        let shape = tensor.shape.iter().map(|d| Value::Num(*d as f64)).collect();
        root.insert(&tensor.name, Value::List(shape));
    }
    root.value()
}

/// A weight as two modules call it.
struct Both {
    stored: String,
    named: String,
    shape: Vec<u64>,
    swapped: bool,
    in_layer: bool,
}

/// The tensors of a file, from one module's names and the other's.
fn tensors(stored: &Module, named: &Module) -> Result<Vec<TensorSource>, String> {
    let mut all: Vec<Both> = Vec::new();
    for (a, b) in stored.schedule.iter().zip(&named.schedule) {
        let graphs = (&stored.graphs[a.graph], &named.graphs[b.graph]);
        let (left, right) = (weights(graphs.0, *a), weights(graphs.1, *b));
        if left.len() != right.len() {
            return Err(format!("`{}` has other weights there", graphs.0.name));
        }
        for ((stored, own, turned), (named, shape, _)) in left.into_iter().zip(right) {
            let back = {
                let mut back = own.clone();
                back.reverse();
                back
            };
            let swapped = turned && shape.len() == 2 && back == shape;
            if !swapped && own != shape {
                return Err(format!("`{stored}` is {own:?}, and would be {shape:?}"));
            }
            all.push(Both { stored, named, shape, swapped, in_layer: a.layer.is_some() });
        }
    }
    let mut found: Vec<TensorSource> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for Both { stored, named, shape, swapped, in_layer } in all {
        let (name, part) = match part_of(&named) {
            Some((whole, part)) => (whole.to_owned(), Some(part)),
            None => (named.clone(), None),
        };
        let place = *places.entry(name.clone()).or_insert_with(|| {
            let matrix = match shape[..] {
                [rows, columns] if in_layer && rows > 1 && columns > 1 => Some((rows, columns)),
                _ => None,
            };
            let mut shape: Vec<u64> = shape.iter().copied().filter(|d| *d != 1).collect();
            if shape.is_empty() {
                shape.push(1);
            }
            let (parts, change, wide) = (Vec::new(), None, false);
            found.push(TensorSource { name, shape, parts, swapped, change, wide, matrix });
            found.len() - 1
        });
        let tensor = &mut found[place];
        let index = part.unwrap_or(0) as usize;
        match tensor.parts.get(index) {
            // Used twice, as an embedding is that is the head, too.
            Some(known) if *known == stored => {}
            None if tensor.parts.len() == index => tensor.parts.push(stored),
            _ => return Err(format!("`{}` would stand for several tensors", tensor.name)),
        }
    }
    for tensor in &mut found {
        if tensor.parts.len() > 1 {
            tensor.shape.insert(0, tensor.parts.len() as u64);
        }
    }
    Ok(found)
}

/// Names of the tensors of a graph's weights in a layer, their shapes, and whether axes are swapped before they are used.
pub fn weights(graph: &Graph, site: CallSite) -> Vec<(String, Vec<u64>, bool)> {
    let mut all = Vec::new();
    for (value, param, ty) in graph.params() {
        let (Param::Weight(weight), Type::Tensor(ty)) = (param, ty) else { continue };
        let shape: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
        let shape = &shape[usize::from(weight.stack.is_some())..];
        let turned = is_turned(graph, value);
        let names = weight.tensors(site.layer).into_iter();
        all.extend(names.map(|name| (name, shape.to_vec(), turned)));
    }
    all
}

fn is_turned(graph: &Graph, value: ValueId) -> bool {
    let mut users = graph.users(value);
    users.any(|(user, _)| {
        matches!(&graph.node(user).kind, NodeKind::Op { op, .. } if op.name == "transpose")
    })
}
