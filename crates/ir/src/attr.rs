//! Attributes: the compile-time parameters of an op.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::expr::{Expr, Number};
use crate::types::Shape;
use crate::{DType, Dim, Recurrence};

/// One attribute's value.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the variants are those of `AttrKind`")]
pub enum Attr {
    /// An optional attribute that is absent.
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Enum(String),
    DType(DType),
    Dims(Vec<Dim>),
    Expr(Expr),
    Recurrence(Recurrence),
}

/// What an attribute may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as usual")]
pub enum AttrKind {
    Bool,
    /// A non-negative integer.
    Int,
    /// A finite number.
    Float,
    Enum(&'static [&'static str]),
    DType,
    Dims,
    /// A scalar expression over the op's operand names.
    Expr,
    /// What one token does to a state.
    Recurrence,
}

/// What stands for an attribute that a spec does not write. The IR always has every attribute.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "named as usual")]
pub enum Default {
    /// It must be written.
    Required,
    /// It may be absent.
    Absent,
    Bool(bool),
    Int(i64),
    Float(f64),
    Enum(&'static str),
}

/// What a name that stands for a number in a recurrence is, which is no op's attribute.
pub static NUMBER: AttrDef =
    AttrDef { name: "number", kind: AttrKind::Float, default: Default::Required, doc: "" };

/// Declares one attribute of an op.
#[derive(Clone, Copy, Debug)]
pub struct AttrDef {
    /// Its name.
    pub name: &'static str,
    /// What it may hold.
    pub kind: AttrKind,
    /// What it is when not written.
    pub default: Default,
    /// One line for the documentation.
    pub doc: &'static str,
}

impl AttrDef {
    /// The default as a value; `None` when the attribute must be written.
    pub fn default_value(&self) -> Option<Attr> {
        Some(match self.default {
            Default::Required => return None,
            Default::Absent => Attr::None,
            Default::Bool(b) => Attr::Bool(b),
            Default::Int(n) => Attr::Int(n),
            Default::Float(x) => Attr::Float(x),
            Default::Enum(s) => Attr::Enum(s.to_owned()),
        })
    }

    /// Checks that `attr` is one of the values this attribute may hold.
    pub fn check(&self, attr: &Attr) -> Result<(), String> {
        let ok = match (self.kind, attr) {
            (_, Attr::None) => matches!(self.default, Default::Absent),
            (AttrKind::Bool, Attr::Bool(_))
            | (AttrKind::DType, Attr::DType(_))
            | (AttrKind::Dims, Attr::Dims(_))
            | (AttrKind::Expr, Attr::Expr(_))
            | (AttrKind::Recurrence, Attr::Recurrence(_)) => true,
            (AttrKind::Int, Attr::Int(n)) => *n >= 0,
            (AttrKind::Float, Attr::Float(x)) => x.is_finite(),
            (AttrKind::Enum(names), Attr::Enum(s)) => names.contains(&s.as_str()),
            _ => false,
        };
        if ok {
            Ok(())
        } else {
            Err(format!("attribute `{}`: expected {}, found {attr}", self.name, self.kind))
        }
    }
}

impl fmt::Display for AttrKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttrKind::Bool => f.write_str("true or false"),
            AttrKind::Int => f.write_str("a non-negative integer"),
            AttrKind::Float => f.write_str("a finite number"),
            AttrKind::Enum(names) => write!(f, "one of {}", names.join(", ")),
            AttrKind::DType => f.write_str("an element type"),
            AttrKind::Dims => f.write_str("a list of dimensions"),
            AttrKind::Expr => f.write_str("an expression"),
            AttrKind::Recurrence => f.write_str("a recurrence"),
        }
    }
}

impl Attr {
    // Floats compare by bits, so that equality is an equivalence and agrees with `Hash`.
    fn bits(&self) -> Option<u64> {
        match self {
            Attr::Float(x) => Some(x.to_bits()),
            _ => None,
        }
    }
}

impl PartialEq for Attr {
    fn eq(&self, other: &Attr) -> bool {
        match (self, other) {
            (Attr::None, Attr::None) => true,
            (Attr::Bool(a), Attr::Bool(b)) => a == b,
            (Attr::Int(a), Attr::Int(b)) => a == b,
            (Attr::Float(_), Attr::Float(_)) => self.bits() == other.bits(),
            (Attr::Enum(a), Attr::Enum(b)) => a == b,
            (Attr::DType(a), Attr::DType(b)) => a == b,
            (Attr::Dims(a), Attr::Dims(b)) => a == b,
            (Attr::Expr(a), Attr::Expr(b)) => a == b,
            (Attr::Recurrence(a), Attr::Recurrence(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Attr {}

impl Hash for Attr {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Attr::None => {}
            Attr::Bool(b) => b.hash(state),
            Attr::Int(n) => n.hash(state),
            Attr::Float(x) => x.to_bits().hash(state),
            Attr::Enum(s) => s.hash(state),
            Attr::DType(d) => d.hash(state),
            Attr::Dims(d) => d.hash(state),
            Attr::Expr(e) => e.hash(state),
            Attr::Recurrence(r) => r.hash(state),
        }
    }
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::None => f.write_str("none"),
            Attr::Bool(b) => write!(f, "{b}"),
            Attr::Int(n) => write!(f, "{n}"),
            Attr::Float(x) => write!(f, "{}", Number(*x)),
            Attr::Enum(s) => f.write_str(s),
            Attr::DType(d) => write!(f, "{d}"),
            Attr::Dims(dims) => write!(f, "{}", Shape(dims)),
            Attr::Expr(e) => write!(f, "{:?}", e.to_string()),
            Attr::Recurrence(r) => write!(f, "{:?}", r.to_string()),
        }
    }
}
