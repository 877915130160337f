//! From a template and a launch to CUDA text.

use std::collections::BTreeMap;
use std::error::Error as _;

use infernum_ir::expr::ScalarFn;
use infernum_ir::{
    Attr, DType, Dim, OpSet, SourceError, StateKind, StateType, Sym, TensorType, Type, nearest,
};
use minijinja::value::{Rest, Value as Jinja};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, context};

use super::scan::Scan;
use super::template::Kind;
use super::{Device, Library, Template, Variant, abi, c_expr, decode, lines};
use crate::{Bucket, Launch};

/// What the text of one kernel is made from.
pub(super) struct Site<'a> {
    pub(super) launch: &'a Launch,
    pub(super) template: &'a Template,
    pub(super) variant: &'a Variant,
    pub(super) block: u32,
    pub(super) has_scratch: bool,
    pub(super) bucket: Bucket,
    pub(super) device: &'a Device,
}

/// Reads templates and what they include.
pub(super) fn environment(library: &Library) -> Environment<'static> {
    let mut env = Environment::new();
    let library = library.clone();
    env.set_loader(move |name| match library.file(name) {
        Ok(found) => Ok(found.map(|(_, text)| lines::marked(name, &text))),
        Err(error) => Err(Error::new(ErrorKind::BadInclude, error.to_string())),
    });
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.add_filter("f32", |x: f64| c_expr::literal(x));
    env
}

/// Why a text could not be made.
pub(super) enum TextError {
    /// At a place in a template's file.
    Placed(Box<SourceError>),
    /// At no place that is known.
    Other(Error),
}

/// The kernel's text, in which it is called `name`.
pub(super) fn render(
    (env, library): (&Environment<'_>, &Library),
    site: &Site<'_>,
    ops: &OpSet,
    name: &str,
) -> Result<String, TextError> {
    let launch = site.launch;
    let mut scope: BTreeMap<String, Jinja> = BTreeMap::new();
    let mut operands = Vec::new();
    for (i, (name, value)) in launch.named_values().enumerate() {
        let described = value.map_or(Jinja::from(()), |v| described(name, &v.ty));
        if i < launch.operands.len() {
            operands.push(described.clone());
        }
        scope.insert(name.to_owned(), described);
    }
    for (name, value) in &launch.attrs {
        scope.insert(name.clone(), attr(launch, ops, name, value));
    }
    if let Some(scan) = Scan::of(launch).or_else(|| Scan::within(launch, ops)) {
        let columns = site.variant.params.get("columns").map_or(1, |n| *n as usize);
        scope.insert("scan".to_owned(), scan.described(columns));
    }
    let params: BTreeMap<&str, Jinja> =
        site.variant.params.iter().map(|(k, v)| (k.as_str(), number(*v))).collect();
    let Bucket { min, max, decode } = site.bucket;
    scope.extend(
        [
            ("operands", Jinja::from(operands)),
            ("op", Jinja::from(launch.op.as_str())),
            ("kernel", Jinja::from(name)),
            ("variant", Jinja::from(site.variant.name.as_str())),
            ("params", Jinja::from(parameters(site))),
            ("block", Jinja::from(site.block)),
            ("looks_ahead", Jinja::from(site.variant.looks_ahead())),
            ("page", Jinja::from(abi::PAGE)),
            ("abi", Jinja::from(abi::declarations())),
            ("p", Jinja::from_pairs(params)),
            ("tokens", context! { min, max, decode }),
            ("device", context! { sm => site.device.sm, sms => site.device.sms }),
            ("body", body(launch, ops)),
        ]
        .map(|(k, v)| (k.to_owned(), v)),
    );
    let template = env.get_template(&format!("{}.cu.j2", site.template.name));
    template.and_then(|t| t.render(&scope)).map_err(|e| placed((env, library), &scope, e))
}

/// An error of a template, where it is written. Of a name that is not defined minijinja may only say what
/// cannot be done with it: which one it is follows from the line.
fn placed(
    (env, library): (&Environment<'_>, &Library),
    scope: &BTreeMap<String, Jinja>,
    error: Error,
) -> TextError {
    // An included file's error is the cause of one in the file that includes it.
    let (mut cause, mut found) = (Some(&error), None);
    while let Some(e) = cause {
        found = e.name().zip(e.line()).map(|(name, n)| (e, name, n)).or(found);
        cause = e.source().and_then(|e| e.downcast_ref::<Error>());
    }
    let Some((cause, name, n)) = found else { return TextError::Other(error) };
    let Ok(Some((path, text))) = library.file(name) else { return TextError::Other(error) };
    let n = lines::unmarked(&lines::marked(name, &text), n);
    let line = text.lines().nth(n.saturating_sub(1)).unwrap_or_default();
    let names = env.get_template(name).map(|t| t.undeclared_variables(true)).unwrap_or_default();
    let defined = |path: &str| {
        let mut parts = path.split('.');
        let value = parts.next().and_then(|first| scope.get(first)).cloned();
        parts.try_fold(value?, |value, key| value.get_attr(key).ok().filter(|v| !v.is_undefined()))
    };
    let globals: Vec<&str> = env.globals().map(|(name, _)| name).collect();
    let is_unknown = |name: &&String| {
        let first = name.split('.').next().unwrap_or_default();
        !globals.contains(&first) && defined(name).is_none()
    };
    let mut unknown: Vec<(usize, &String)> =
        names.iter().filter(is_unknown).filter_map(|n| Some((line.find(n.as_str())?, n))).collect();
    unknown.sort_unstable_by_key(|(at, n)| (*at, std::cmp::Reverse(n.len())));
    let (column, len, message) = if let Some((at, unknown)) = unknown.first() {
        let known: Vec<&str> = scope.keys().map(String::as_str).collect();
        let (hint, known) = (nearest(unknown, known.iter().copied()), known.join(", "));
        (*at, unknown.len(), format!("`{unknown}` is not defined{hint}; the text sees {known}"))
    } else {
        let column = line.len() - line.trim_start().len();
        let detail = cause.detail().map(|d| format!(": {d}")).unwrap_or_default();
        (column, line.trim().len(), format!("{}{detail}", cause.kind()))
    };
    let start = SourceError::offset(&text, n, 1) + column;
    TextError::Placed(Box::new(SourceError::new(&path, &text, start..start + len, message)))
}

/// Operands in declared order and then results, those that are there. A plane of the cache is one
/// parameter, however many versions of it the op deals with.
pub fn arguments(launch: &Launch) -> impl Iterator<Item = (&str, &crate::Value)> {
    let operands = launch.operands.len();
    launch.named_values().enumerate().filter_map(move |(i, (name, value))| {
        let value = value?;
        let again = i >= operands && matches!(value.ty, Type::State(_));
        (!again).then_some((name, value))
    })
}

fn parameters(site: &Site<'_>) -> String {
    let operands = site.launch.operands.iter().flatten().count();
    let mut list: Vec<String> = arguments(site.launch)
        .enumerate()
        .map(|(i, (name, value))| match &value.ty {
            // See `slot_at` in the prelude.
            Type::State(s) if s.is_slot() => {
                format!("{}* {name}, u64 {name}_place", c_type(s.dtype))
            }
            Type::State(s) => format!("{}* {name}", plane_type(s)),
            Type::Tensor(t) if i < operands => format!("const {}* {name}", stored_type(t)),
            Type::Tensor(t) => format!("{}* {name}", stored_type(t)),
        })
        .collect();
    if site.has_scratch {
        list.push("u8* scratch".to_owned());
    }
    if site.variant.looks_ahead() {
        list.push("const u8* ahead, u64 ahead_bytes".to_owned());
    }
    list.push("const Step* step".to_owned());
    if let Kind::Kernel { tiles, .. } = &site.variant.kind {
        list.extend(
            tiles.iter().map(|t| format!("const __grid_constant__ TileMap {}_tiles", t.operand)),
        );
    }
    list.join(", ")
}

/// What is encoded is bytes.
fn stored_type(ty: &TensorType) -> &'static str {
    if ty.encoding.is_some() { "u8" } else { c_type(ty.dtype) }
}

/// As [`stored_type`], of a plane of the cache.
fn plane_type(ty: &StateType) -> &'static str {
    if ty.encoding.is_some() { "u8" } else { c_type(ty.dtype) }
}

fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
        DType::I32 => "int",
        DType::U32 => "u32",
        _ => "u8",
    }
}

/// A whole number prints as one.
fn number(n: f64) -> Jinja {
    if n.fract() == 0.0 && n.abs() < 2f64.powi(53) { Jinja::from(n as i64) } else { Jinja::from(n) }
}

fn dim(d: Dim) -> Jinja {
    match d {
        Dim::Const(n) => Jinja::from(n),
        Dim::Sym { sym, times: 1 } => Jinja::from(symbol(sym)),
        Dim::Sym { sym, times } => Jinja::from(format!("({} * {times})", symbol(sym))),
    }
}

fn symbol(sym: Sym) -> &'static str {
    match sym {
        Sym::T => "step->T",
        Sym::B => "step->B",
        Sym::S => "step->S",
    }
}

fn described(name: &str, ty: &Type) -> Jinja {
    let tensor = match ty {
        Type::Tensor(tensor) => tensor,
        Type::State(s) => {
            let ring = match s.kind {
                StateKind::Ring(window) => Some(window),
                StateKind::Paged | StateKind::Slot => None,
            };
            return context! {
                name, type => plane_type(s), dtype => s.dtype.name(), heads => s.heads(), dim => s.dim(),
                shape => s.shape.clone(), window => ring, quantised => s.encoding.is_some(),
            };
        }
    };
    let shape = &tensor.shape[..];
    let (cols, rows) =
        shape.split_last().map_or((Dim::Const(1), &[][..]), |(last, rows)| (*last, rows));
    let product = |dims: &[Dim]| Dim::product_of(dims).map_or(Jinja::from(()), dim);
    let size = if tensor.is_ragged() {
        let heads: u64 = shape[..shape.len() - 2].iter().filter_map(|d| d.as_const()).product();
        Jinja::from(format!("(step->pairs * {heads})"))
    } else {
        product(shape)
    };
    let decoder = decode::decoder(name, tensor).map(|d| {
        context! {
            text => d.text, function => d.function, bytes => d.bytes, rows => d.rows, columns => d.columns,
        }
    });
    let packing = decode::packing(name, tensor).map(|p| {
        context! {
            text => p.text, name => p.name, unit => p.unit, bytes => p.bytes, rows => p.rows, columns => p.columns,
            repack => p.repack,
        }
    });
    context! {
        name,
        decoder,
        packing,
        type => stored_type(tensor),
        dtype => tensor.dtype.name(),
        quantised => tensor.encoding.is_some() && !tensor.constant,
        const => tensor.constant,
        ragged => tensor.is_ragged(),
        rank => shape.len(),
        shape => shape.iter().map(|d| dim(*d)).collect::<Vec<_>>(),
        rows => product(rows),
        cols => dim(cols),
        size,
    }
}

fn attr(launch: &Launch, ops: &OpSet, name: &str, attr: &Attr) -> Jinja {
    match attr {
        Attr::None | Attr::Recurrence(_) => Jinja::from(()),
        Attr::Expr(e) => {
            let op = ops.find(&launch.op);
            c_function(op.and_then(|op| {
                ScalarFn::compile(e, &op.scalar_names(name)).map_err(|e| e.to_string())
            }))
        }
        Attr::Bool(b) => Jinja::from(*b),
        Attr::Int(n) => Jinja::from(*n),
        Attr::Float(x) => Jinja::from(*x),
        Attr::Enum(s) => Jinja::from(s.as_str()),
        Attr::DType(d) => Jinja::from(d.name()),
        Attr::Dims(dims) => dims.iter().map(|d| dim(*d)).collect(),
    }
}

/// `body(names)`: an elementwise op's expression, in C, over those names for its operands.
fn body(launch: &Launch, ops: &OpSet) -> Jinja {
    let attrs: Vec<Attr> = launch.attrs.iter().map(|(_, a)| a.clone()).collect();
    let compiled = ops.find(&launch.op).ok().and_then(|op| op.pointwise_fn(&attrs));
    let none = || Err(format!("`{}` is not elementwise: it has no body", launch.op));
    c_function(compiled.unwrap_or_else(none))
}

/// A function of names that yields an expression over them, in C.
fn c_function(compiled: Result<ScalarFn, String>) -> Jinja {
    Jinja::from_function(move |names: Rest<Vec<String>>| -> Result<String, Error> {
        let names = names.first().map_or(&[][..], |n| n);
        let fail = |message: &String| Error::new(ErrorKind::InvalidOperation, message.clone());
        compiled.as_ref().map(|f| c_expr::c_text(f, names)).map_err(fail)
    })
}
