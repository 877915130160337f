//! From a template and a launch to CUDA text.

use std::collections::BTreeMap;

use infernum_ir::expr::ScalarFn;
use infernum_ir::{Attr, DType, Dim, OpSet, Sym, TensorType, Type};
use minijinja::value::{Rest, Value as Jinja};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, context};

use super::template::Kind;
use super::{Device, Library, Template, Variant, abi, c_expr, decode};
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
        Ok(found) => Ok(found.map(|(_, text)| text.into_owned())),
        Err(error) => Err(Error::new(ErrorKind::BadInclude, error.to_string())),
    });
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.add_filter("f32", |x: f64| c_expr::literal(x));
    env
}

/// The kernel's text, in which it is called `name`.
pub(super) fn render(
    env: &Environment<'_>,
    site: &Site<'_>,
    ops: &OpSet,
    name: &str,
) -> Result<String, Error> {
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
        scope.insert(name.clone(), attr(value));
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
            ("page", Jinja::from(abi::PAGE)),
            ("abi", Jinja::from(abi::declarations())),
            ("p", Jinja::from_pairs(params)),
            ("tokens", context! { min, max, decode }),
            ("device", context! { sm => site.device.sm, sms => site.device.sms }),
            ("body", body(launch, ops)),
        ]
        .map(|(k, v)| (k.to_owned(), v)),
    );
    env.get_template(&format!("{}.cu.j2", site.template.name))?.render(scope)
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
            Type::State(s) => format!("{}* {name}", c_type(s.dtype)),
            Type::Tensor(t) if i < operands => format!("const {}* {name}", stored_type(t)),
            Type::Tensor(t) => format!("{}* {name}", stored_type(t)),
        })
        .collect();
    if site.has_scratch {
        list.push("u8* scratch".to_owned());
    }
    list.push("const Step* step".to_owned());
    if let Kind::Kernel { tiles, .. } = &site.variant.kind {
        list.extend(
            tiles.iter().map(|(name, _)| format!("const __grid_constant__ TileMap {name}_tiles")),
        );
    }
    list.join(", ")
}

/// What is encoded is bytes.
fn stored_type(ty: &TensorType) -> &'static str {
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
            return context! {
                name, type => c_type(s.dtype), dtype => s.dtype.name(), heads => s.heads, dim => s.dim,
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
    context! {
        name,
        decoder,
        type => stored_type(tensor),
        dtype => tensor.dtype.name(),
        const => tensor.constant,
        ragged => tensor.is_ragged(),
        rank => shape.len(),
        shape => shape.iter().map(|d| dim(*d)).collect::<Vec<_>>(),
        rows => product(rows),
        cols => dim(cols),
        size,
    }
}

fn attr(attr: &Attr) -> Jinja {
    match attr {
        Attr::None | Attr::Expr(_) => Jinja::from(()),
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
    let compiled: Option<Result<ScalarFn, String>> =
        ops.find(&launch.op).ok().and_then(|op| op.pointwise_fn(&attrs));
    let op = launch.op.clone();
    Jinja::from_function(move |names: Rest<Vec<String>>| -> Result<String, Error> {
        let fail = |message: String| Error::new(ErrorKind::InvalidOperation, message);
        match &compiled {
            Some(Ok(f)) => Ok(c_expr::c_text(f, names.first().map_or(&[][..], |n| n))),
            Some(Err(message)) => Err(fail(message.clone())),
            None => Err(fail(format!("`{op}` is not elementwise: it has no body"))),
        }
    })
}
