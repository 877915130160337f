//! Bodies: calls by name, to be applied to values.
//!
//! The reference of a fused op and both sides of a rule are bodies. [`apply`] runs one on whatever
//! builds nodes: a graph, or an e-graph.

use std::collections::HashMap;

use crate::attr::{Attr, AttrKind};
use crate::expr::{Expr, Value};
use crate::names::nearest;
use crate::{DType, Dim, Op, Recurrence, Sym, Type};

/// One call of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Stmt {
    /// A name for each result.
    pub results: Vec<String>,
    /// The op called.
    pub op: Op,
    /// The name of each operand declared; `None` where it is left out.
    pub operands: Vec<Option<String>>,
    /// Each attribute declared.
    pub attrs: Vec<AttrSource>,
    /// Where it is false, the call is left out and yields its first operand.
    pub when: Option<Expr>,
}

/// Where an attribute's value comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum AttrSource {
    /// It is written.
    Given(Attr),
    /// An expression over attributes, and over operands as maps of `dtype`, `shape`, `rank`,
    /// `const`; an operand that is left out is null.
    Value(Expr),
    /// One expression a dimension.
    Dims(Vec<Expr>),
    /// A scalar expression in which all names but these are substituted.
    Scalar(Expr, Vec<String>),
    /// A recurrence in which names of no value are substituted.
    Recurrence(Recurrence),
}

/// Builds nodes.
pub trait Emit {
    /// Names a result.
    type Value: Copy + PartialEq;

    /// A value's type.
    fn ty(&self, value: Self::Value) -> Type;

    /// Adds a call; one value a result.
    fn emit(
        &mut self,
        names: &[String],
        op: Op,
        operands: &[Option<Self::Value>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<Self::Value>, String>;
}

/// What the names of a body stand for.
#[derive(Clone, Debug)]
pub struct Env<V> {
    /// Operands and results; `None` for an operand that is left out.
    pub values: HashMap<String, Option<V>>,
    /// Attributes.
    pub attrs: HashMap<String, Attr>,
}

impl<V> Default for Env<V> {
    fn default() -> Self {
        Env { values: HashMap::new(), attrs: HashMap::new() }
    }
}

/// Adds a body's calls in order; `env` gains their results.
pub fn apply<E: Emit>(body: &[Stmt], emit: &mut E, env: &mut Env<E::Value>) -> Result<(), String> {
    for stmt in body {
        let operands = stmt
            .operands
            .iter()
            .map(|name| name.as_ref().map_or(Ok(None), |n| operand(env, n)))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(when) = &stmt.when
            && !truth(when, emit, env)?
        {
            let [result] = &stmt.results[..] else {
                return Err(format!(
                    "`{}`: only a call of one result may be left out",
                    stmt.op.name
                ));
            };
            env.values.insert(result.clone(), operands.first().copied().flatten());
            continue;
        }
        let attrs = stmt.op.attrs.iter().zip(&stmt.attrs).map(|(def, source)| {
            attr(source, def.kind, emit, env).map_err(|e| format!("attribute `{}`: {e}", def.name))
        });
        let attrs = attrs.collect::<Result<Vec<_>, _>>()?;
        let values = emit.emit(&stmt.results, stmt.op, &operands, attrs)?;
        if values.len() != stmt.results.len() {
            let (want, found) = (values.len(), stmt.results.len());
            return Err(format!("`{}` has {want} result(s), found {found} name(s)", stmt.op.name));
        }
        env.values.extend(stmt.results.iter().cloned().zip(values.into_iter().map(Some)));
    }
    Ok(())
}

fn operand<V: Copy>(env: &Env<V>, name: &str) -> Result<Option<V>, String> {
    env.values.get(name).copied().ok_or_else(|| {
        let hint = nearest(name, env.values.keys().map(String::as_str));
        format!("unknown value `{name}`{hint}")
    })
}

/// Evaluates a condition over the names of `env`.
pub fn truth<E: Emit>(e: &Expr, emit: &E, env: &Env<E::Value>) -> Result<bool, String> {
    match eval(e, emit, env)? {
        Value::Bool(b) => Ok(b),
        v => Err(format!("expected true or false from `{e}`, found {v}")),
    }
}

/// Evaluates an expression over the names of `env`.
pub fn eval<E: Emit>(e: &Expr, emit: &E, env: &Env<E::Value>) -> Result<Value, String> {
    e.eval(&|name| lookup(name, emit, env)).map_err(|e| e.to_string())
}

fn lookup<E: Emit>(name: &str, emit: &E, env: &Env<E::Value>) -> Option<Value> {
    if let Some(attr) = env.attrs.get(name) {
        return attr_value(attr);
    }
    match env.values.get(name)? {
        Some(v) => Some(type_value(&emit.ty(*v))),
        None => Some(Value::Null),
    }
}

/// An attribute as a value of the expression language; `None` for an expression.
pub fn attr_value(attr: &Attr) -> Option<Value> {
    Some(match attr {
        Attr::None => Value::Null,
        Attr::Bool(b) => Value::Bool(*b),
        Attr::Int(n) => Value::Num(*n as f64),
        Attr::Float(x) => Value::Num(*x),
        Attr::Enum(s) => Value::Str(s.clone()),
        Attr::DType(d) => Value::Str(d.name().to_owned()),
        Attr::Dims(dims) => Value::List(dims.iter().map(|d| dim_value(*d)).collect()),
        Attr::Expr(e) => Value::Str(e.to_string()),
        Attr::Recurrence(_) => return None,
    })
}

/// A type as a map of `dtype`, `shape`, `rank` and `const`, of what is encoded `encoding`, the kind of its `codes`, whether
/// kernels subtract `minimums` of groups, and whether `activations` may be such codes, too; constant dimensions are numbers,
/// others text such as `T` or `T*4`. A state's shape is that of a row, `[heads, dim]`, or of a slot.
pub fn type_value(ty: &Type) -> Value {
    let (dtype, shape, constant, encoding) = match ty {
        Type::Tensor(t) => (t.dtype, t.shape.clone(), t.constant, t.encoding.as_ref()),
        Type::State(s) => (s.dtype, s.dims(), false, s.encoding.as_ref()),
    };
    let codes = encoding.map_or(Value::Null, |e| Value::Str(e.def().code.kind.name().to_owned()));
    let activations = encoding.is_some_and(|e| e.activations().is_some());
    let minimums = encoding.and_then(|e| e.packing()).is_some_and(|p| p.minimum.is_some());
    let encoding = encoding.map_or(Value::Null, |e| Value::Str(e.to_string()));
    let shape: Vec<Value> = shape.into_iter().map(dim_value).collect();
    Value::Map(vec![
        ("dtype".to_owned(), Value::Str(dtype.name().to_owned())),
        ("rank".to_owned(), Value::Num(shape.len() as f64)),
        ("shape".to_owned(), Value::List(shape)),
        ("const".to_owned(), Value::Bool(constant)),
        ("encoding".to_owned(), encoding),
        ("codes".to_owned(), codes),
        ("minimums".to_owned(), Value::Bool(minimums)),
        ("activations".to_owned(), Value::Bool(activations)),
    ])
}

fn dim_value(dim: Dim) -> Value {
    match dim {
        Dim::Const(n) => Value::Num(n as f64),
        symbolic @ Dim::Sym { .. } => Value::Str(symbolic.to_string()),
    }
}

fn value_dim(value: &Value) -> Option<Dim> {
    match value {
        Value::Num(n) if *n >= 0.0 && n.fract() == 0.0 && *n < 1e15 => Some(Dim::Const(*n as u64)),
        Value::Str(s) => {
            let (name, times) = s.split_once('*').unwrap_or((s, "1"));
            let sym = Sym::ALL.into_iter().find(|sym| sym.name() == name)?;
            Some(Dim::Sym { sym, times: times.parse().ok().filter(|n| *n > 0)? })
        }
        _ => None,
    }
}

/// The value of an attribute of `kind` that is written as `source`.
pub fn attr<E: Emit>(
    source: &AttrSource,
    kind: AttrKind,
    emit: &E,
    env: &Env<E::Value>,
) -> Result<Attr, String> {
    match source {
        AttrSource::Given(attr) => Ok(attr.clone()),
        AttrSource::Value(Expr::Var(name)) if env.attrs.contains_key(name) => {
            Ok(env.attrs[name].clone())
        }
        AttrSource::Value(e) => value_attr(eval(e, emit, env)?, kind),
        AttrSource::Dims(dims) => {
            let dim = |e: &Expr| {
                // T, B and S stand for themselves.
                let symbol = |n: &str| Sym::ALL.iter().any(|s| s.name() == n);
                let value = e.eval(&|n| {
                    lookup(n, emit, env).or_else(|| symbol(n).then(|| Value::Str(n.to_owned())))
                });
                let value = value.map_err(|e| e.to_string())?;
                value_dim(&value)
                    .ok_or_else(|| format!("expected a dimension from `{e}`, found {value}"))
            };
            Ok(Attr::Dims(dims.iter().map(dim).collect::<Result<_, String>>()?))
        }
        AttrSource::Scalar(e, free) => {
            let lookup = |n: &str| {
                if free.iter().any(|f| f == n) { None } else { lookup(n, emit, env) }
            };
            Ok(Attr::Expr(e.fold(&lookup).map_err(|e| e.to_string())?))
        }
        AttrSource::Recurrence(body) => {
            let folded = body.fold(&|n| lookup(n, emit, env)).map_err(|e| e.to_string())?;
            Ok(Attr::Recurrence(folded))
        }
    }
}

fn value_attr(value: Value, kind: AttrKind) -> Result<Attr, String> {
    Ok(match (kind, value) {
        (_, Value::Null) => Attr::None,
        (AttrKind::Int, Value::Num(n)) if n.fract() == 0.0 && n.abs() < 1e15 => Attr::Int(n as i64),
        (AttrKind::Float, Value::Num(n)) => Attr::Float(n),
        (AttrKind::Bool, Value::Bool(b)) => Attr::Bool(b),
        (AttrKind::Enum(_), Value::Str(s)) => Attr::Enum(s),
        (AttrKind::DType, Value::Str(s)) => Attr::DType(s.parse::<DType>()?),
        (kind, value) => return Err(format!("expected {kind}, found {value}")),
    })
}
