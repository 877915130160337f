//! The size of a launch, as expressions over its operands and the step.

use std::collections::BTreeMap;

use infernum_ir::encoding::Packing;
use infernum_ir::expr::{Expr, Value as Known};
use infernum_ir::{Attr, Dim, Dims, Type, nearest};
use serde::{Deserialize, Serialize};

use crate::{Bucket, Launch};

use super::Device;
use super::scan::Scan;

/// How large a launch is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Geometry {
    /// Blocks, for up to three dimensions.
    pub grid: Vec<Expr>,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: Expr,
    /// The variant's parameters, which the expressions may name.
    pub params: BTreeMap<String, f64>,
    /// The steps that the kernel was chosen for, if the expressions name `tokens`.
    pub tokens: Option<Bucket>,
}

impl Geometry {
    /// Blocks in three dimensions, and bytes of shared memory, for a step of `dims`.
    pub fn eval(
        &self,
        launch: &Launch,
        dims: &Dims,
        device: &Device,
    ) -> Result<([u32; 3], u32), String> {
        let (params, bucket) = (&self.params, self.tokens);
        let scope = Scope { launch, params, device, dims: Some(dims), bucket };
        let mut grid = [1; 3];
        for (size, expr) in grid.iter_mut().zip(&self.grid) {
            *size = whole(scope.number(expr)?, expr)?;
        }
        Ok((grid, whole(scope.number(&self.shared)?, &self.shared)?))
    }
}

impl Geometry {
    /// The value of another expression over the same names.
    pub fn number(
        &self,
        expr: &Expr,
        launch: &Launch,
        dims: &Dims,
        device: &Device,
    ) -> Result<f64, String> {
        let (params, bucket) = (&self.params, self.tokens);
        Scope { launch, params, device, dims: Some(dims), bucket }.number(expr)
    }
}

pub(super) fn whole(n: f64, expr: &Expr) -> Result<u32, String> {
    let ok = n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n);
    if ok { Ok(n as u32) } else { Err(format!("`{expr}`: expected a size, found {n}")) }
}

/// What expressions of templates may name.
#[derive(Clone, Copy)]
pub(super) struct Scope<'a> {
    pub(super) launch: &'a Launch,
    pub(super) params: &'a BTreeMap<String, f64>,
    pub(super) device: &'a Device,
    /// The step; when it is not known yet, what depends on it is not either.
    pub(super) dims: Option<&'a Dims>,
    /// The steps that the kernel is chosen for.
    pub(super) bucket: Option<Bucket>,
}

impl Scope<'_> {
    pub(super) fn value(&self, expr: &Expr) -> Result<Known, String> {
        let value = expr.eval(&|name| self.lookup(name));
        value.map_err(|e| format!("`{expr}`: {e}"))
    }

    pub(super) fn number(&self, expr: &Expr) -> Result<f64, String> {
        match self.value(expr)? {
            Known::Num(n) => Ok(n),
            other => Err(format!("`{expr}`: expected a number, found {}", other.kind())),
        }
    }

    pub(super) fn holds(&self, expr: &Expr) -> Result<bool, String> {
        match self.value(expr)? {
            Known::Bool(b) => Ok(b),
            other => Err(format!("`{expr}`: expected true or false, found {}", other.kind())),
        }
    }

    /// The first name of `expr` that means nothing here, and what would: evaluation takes a missing key for
    /// null, and so might not miss it.
    pub(super) fn unknown<'e>(&self, expr: &'e Expr) -> Option<(&'e str, String)> {
        match expr {
            Expr::Lit(_) => None,
            Expr::Var(name) => self.lookup(name).is_none().then(|| (&**name, self.no_name(name))),
            Expr::Member(of, key) => self.unknown(of).or_else(|| {
                let Expr::Var(name) = &**of else { return None };
                let Some(Known::Map(entries)) = self.lookup(name) else { return None };
                let keys: Vec<&str> = entries.iter().map(|(k, _)| k.as_str()).collect();
                let none = || (&**key, no_key(name, key, &keys));
                (!keys.contains(&key.as_str())).then(none)
            }),
            Expr::Unary(_, a) => self.unknown(a),
            Expr::Binary(_, a, b) | Expr::Index(a, b) => {
                self.unknown(a).or_else(|| self.unknown(b))
            }
            Expr::Cond(c, a, b) => [c, a, b].into_iter().find_map(|e| self.unknown(e)),
            Expr::Call(_, args) => args.iter().find_map(|e| self.unknown(e)),
        }
    }

    fn no_name(&self, name: &str) -> String {
        if self.dims.is_none() && STEP.contains(&name) {
            return format!("`{name}` is the step's, and not known when a kernel is chosen");
        }
        let values: Vec<&str> = self.launch.named_values().map(|(n, _)| n).collect();
        let attrs: Vec<&str> = self.launch.attrs.iter().map(|(n, _)| n.as_str()).collect();
        let known = values.iter().chain(&attrs).copied().chain(EVERYWHERE);
        let hint = nearest(name, known);
        let values = values.join(", ");
        let attrs = match &attrs[..] {
            [] => String::new(),
            attrs => format!(", attributes {}", attrs.join(", ")),
        };
        format!("unknown name `{name}`{hint}; operands and results are {values}{attrs}")
    }

    fn lookup(&self, name: &str) -> Option<Known> {
        let number = |n: u64| Known::Num(n as f64);
        let map = |entries: Vec<(&str, Known)>| {
            Known::Map(entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
        };
        match (name, self.dims, self.bucket) {
            ("T", Some(d), _) => return Some(number(d.t)),
            ("B", Some(d), _) => return Some(number(d.b)),
            ("S", Some(d), _) => return Some(number(d.s)),
            ("pairs", Some(d), _) => return Some(number(d.pairs)),
            ("seqs", Some(d), _) => return Some(number(d.seqs)),
            ("p", ..) => {
                let params = self.params.iter().map(|(k, v)| (k.clone(), Known::Num(*v)));
                return Some(Known::Map(params.collect()));
            }
            ("scan", ..) => {
                let scan = Scan::of(self.launch)?;
                let (columns, depth) = (scan.columns() as u64, scan.depth() as u64);
                return Some(map(vec![("columns", number(columns)), ("depth", number(depth))]));
            }
            ("device", ..) => {
                let (sm, sms) = (self.device.sm.into(), self.device.sms.into());
                return Some(map(vec![("sm", number(sm)), ("sms", number(sms))]));
            }
            ("tokens", _, Some(b)) => {
                return Some(map(vec![
                    ("min", number(b.min)),
                    ("max", number(b.max)),
                    ("decode", Known::Bool(b.decode)),
                ]));
            }
            _ => {}
        }
        for (known, value) in self.launch.named_values() {
            if known == name {
                return Some(value.map_or(Known::Null, |v| self.described(&v.ty)));
            }
        }
        self.launch.attr(name).map(attr)
    }

    fn described(&self, ty: &Type) -> Known {
        let size = |d: Option<Dim>| match (d, self.dims) {
            (Some(Dim::Const(n)), _) => Known::Num(n as f64),
            (Some(d), Some(dims)) => Known::Num(d.eval(dims) as f64),
            _ => Known::Null,
        };
        let text = |s: &str| Known::Str(s.to_owned());
        let entries = match ty {
            Type::State(s) => vec![
                ("dtype", text(if s.encoding.is_some() { "quantised" } else { s.dtype.name() })),
                ("quantised", Known::Bool(s.encoding.is_some())),
                ("heads", Known::Num(s.heads() as f64)),
                ("dim", Known::Num(s.dim() as f64)),
                ("shape", Known::List(s.shape.iter().map(|n| Known::Num(*n as f64)).collect())),
            ],
            Type::Tensor(t) => {
                let shape = &t.shape[..];
                let rows = &shape[..shape.len().saturating_sub(1)];
                let elements = match self.dims {
                    Some(dims) => Known::Num(t.elements(dims) as f64),
                    None => size(Dim::product_of(shape)),
                };
                let packing = t.encoding.as_ref().and_then(|e| e.packing());
                let quantised = t.encoding.is_some() && !t.constant;
                let bytes = t.bytes(&Dims::default());
                let number = |n: Option<u64>| Known::Num(n.unwrap_or(0) as f64);
                vec![
                    // Of what is encoded elements are of no type that kernels of others could read.
                    (
                        "dtype",
                        text(match t.encoding {
                            None => t.dtype.name(),
                            Some(_) if quantised => "quantised",
                            Some(_) => "encoded",
                        }),
                    ),
                    ("const", Known::Bool(t.constant)),
                    ("ragged", Known::Bool(t.is_ragged())),
                    ("rank", Known::Num(shape.len() as f64)),
                    ("rows", size(Dim::product_of(rows))),
                    ("cols", size(shape.last().copied())),
                    ("size", elements),
                    ("shape", Known::List(shape.iter().map(|d| size(Some(*d))).collect())),
                    ("packed", Known::Bool(packing.is_some())),
                    ("quantised", Known::Bool(quantised)),
                    ("minimums", Known::Bool(packing.is_some_and(|p| p.minimum.is_some()))),
                    ("unit", number(packing.map(|p| p.bytes))),
                    ("units", number(packing.map(|p| bytes / p.bytes))),
                    ("unit_columns", number(packing.map(|p| p.columns))),
                    ("unit_scales", number(packing.map(Packing::scale_bytes))),
                ]
            }
        };
        Known::Map(entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
    }
}

/// Names of the step's sizes, and of what expressions see besides these and a launch's own values.
pub(super) const STEP: [&str; 5] = ["T", "B", "S", "pairs", "seqs"];
pub(super) const EVERYWHERE: [&str; 3] = ["p", "tokens", "device"];

fn no_key(name: &str, key: &str, keys: &[&str]) -> String {
    let hint = nearest(key, keys.iter().copied());
    match keys {
        [] => format!("`{name}` has no `{key}`: the variant has no `params`"),
        keys => format!("`{name}` has no `{key}`{hint}; it has {}", keys.join(", ")),
    }
}

pub(super) fn attr(attr: &Attr) -> Known {
    match attr {
        Attr::Bool(b) => Known::Bool(*b),
        Attr::Int(n) => Known::Num(*n as f64),
        Attr::Float(x) => Known::Num(*x),
        Attr::Enum(s) => Known::Str(s.clone()),
        Attr::DType(d) => Known::Str(d.name().to_owned()),
        Attr::None | Attr::Dims(_) | Attr::Expr(_) | Attr::Recurrence(_) => Known::Null,
    }
}
