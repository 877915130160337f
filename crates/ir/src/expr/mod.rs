//! The expression language shared by specs, tables and pointwise ops.
//!
//! One grammar serves both uses. In a spec an expression ranges over config keys and parameters
//! and may yield any [`Value`]; in `map`, `table` and the pointwise ops it must reduce to
//! arithmetic on numbers, which [`ScalarFn`] compiles for execution and printing.
//!
//! ```text
//! expr  := cond
//! cond  := or ('?' expr ':' cond)?
//! or    := and ('||' and)*           and   := coal ('&&' coal)*
//! coal  := cmp ('??' cmp)*           cmp   := bor (('=='|'!='|'<'|'<='|'>'|'>=') bor)?
//! bor   := xor ('|' xor)*            xor   := band ('^' band)*
//! band  := shift ('&' shift)*        shift := sum (('<<'|'>>') sum)*
//! sum   := term (('+'|'-') term)*    term  := unary (('*'|'/'|'%') unary)*
//! unary := ('-'|'!') unary | power   power := postfix ('**' unary)?
//! postfix := atom ('[' expr ']' | '.' name)*
//! atom  := number | 'text' | true | false | null | name | name '(' expr,* ')' | '(' expr ')'
//! ```

mod fold;
mod parse;
mod scalar;

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

pub use scalar::{Instr, ScalarFn};

/// A value that an expression may yield.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "JSON's own kinds")]
pub enum Value {
    Null,
    Bool(bool),
    Num(f64),
    Str(String),
    List(Vec<Value>),
    Map(Vec<(String, Value)>),
}

/// Why an expression could not be parsed or evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExprError {
    /// Byte offset in the expression's text, when parsing.
    pub at: usize,
    /// What was expected and found.
    pub message: String,
}

impl ExprError {
    pub(crate) fn new(at: usize, message: impl Into<String>) -> ExprError {
        ExprError { at, message: message.into() }
    }
}

/// A parsed expression.
#[derive(Clone, Debug, PartialEq, Hash, Serialize, Deserialize)]
pub enum Expr {
    /// A literal, or a value substituted for a name.
    Lit(Value),
    /// A name still to be resolved.
    Var(String),
    /// `-x`, `!x`.
    Unary(UnaryOp, Box<Expr>),
    /// `a op b`.
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
    /// `c ? a : b`.
    Cond(Box<Expr>, Box<Expr>, Box<Expr>),
    /// `f(a, ..)`.
    Call(Func, Vec<Expr>),
    /// `list[i]`.
    Index(Box<Expr>, Box<Expr>),
    /// `map.key`; null when the key is absent or the map is null.
    Member(Box<Expr>, String),
}

// Floats compare by value and no NaN literal can be written, so equality is total.
impl Eq for Expr {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Value::Null => {}
            Value::Bool(b) => b.hash(state),
            // 0 equals -0, so they must hash alike.
            Value::Num(n) => (n + 0.0).to_bits().hash(state),
            Value::Str(s) => s.hash(state),
            Value::List(items) => items.hash(state),
            Value::Map(entries) => entries.hash(state),
        }
    }
}

/// Prefix operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as usual")]
pub enum UnaryOp {
    Neg,
    Not,
}

/// Infix operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as usual")]
pub enum BinaryOp {
    Or,
    And,
    Coalesce,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// Of bits, as are the four that follow: of whole numbers of 64 bits in two's complement.
    BitOr,
    BitXor,
    BitAnd,
    /// `a << b`: what leaves 64 bits is lost. `b` outside 0 to 63 is the nearest inside.
    Shl,
    /// `a >> b` keeps the sign.
    Shr,
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Pow,
}

impl BinaryOp {
    /// Binding strength (larger binds tighter) and spelling.
    pub const TABLE: [(BinaryOp, u8, &'static str); 20] = [
        (BinaryOp::Or, 1, "||"),
        (BinaryOp::And, 2, "&&"),
        (BinaryOp::Coalesce, 3, "??"),
        (BinaryOp::Eq, 4, "=="),
        (BinaryOp::Ne, 4, "!="),
        (BinaryOp::Le, 4, "<="),
        (BinaryOp::Ge, 4, ">="),
        (BinaryOp::Shl, 8, "<<"),
        (BinaryOp::Shr, 8, ">>"),
        (BinaryOp::Lt, 4, "<"),
        (BinaryOp::Gt, 4, ">"),
        (BinaryOp::BitOr, 5, "|"),
        (BinaryOp::BitXor, 6, "^"),
        (BinaryOp::BitAnd, 7, "&"),
        (BinaryOp::Add, 9, "+"),
        (BinaryOp::Sub, 9, "-"),
        (BinaryOp::Pow, 12, "**"),
        (BinaryOp::Mul, 10, "*"),
        (BinaryOp::Div, 10, "/"),
        (BinaryOp::Rem, 10, "%"),
    ];
    /// Binding strength of comparisons, which do not chain.
    pub(crate) const COMPARISON: u8 = 4;

    /// What an operator of bits makes of two whole numbers; `None` of any other operator.
    pub fn bits(self, a: i64, b: i64) -> Option<i64> {
        let by = b.clamp(0, 63) as u32;
        Some(match self {
            BinaryOp::BitOr => a | b,
            BinaryOp::BitXor => a ^ b,
            BinaryOp::BitAnd => a & b,
            BinaryOp::Shl => a.wrapping_shl(by),
            BinaryOp::Shr => a.wrapping_shr(by),
            _ => return None,
        })
    }

    pub(crate) fn strength(self) -> u8 {
        Self::TABLE.iter().find(|row| row.0 == self).map_or(0, |row| row.1)
    }

    pub(crate) fn spelling(self) -> &'static str {
        Self::TABLE.iter().find(|row| row.0 == self).map_or("?", |row| row.2)
    }
}

/// How tightly what is no infix operator binds, on the scale of [`BinaryOp::TABLE`]; `**` stands between.
const UNARY: u8 = 11;
const POSTFIX: u8 = 13;
const ATOM: u8 = 14;

/// Built-in functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as in mathematics")]
pub enum Func {
    Exp,
    Log,
    Sqrt,
    Tanh,
    Erf,
    Sin,
    Cos,
    Abs,
    Floor,
    Ceil,
    /// To the nearest whole number, halves to the even one, as processors round.
    Round,
    Min,
    Max,
    /// Length of a list or text, or entries of a map.
    Len,
    /// `contains(list, x)`, or `contains('text', 'part')`.
    Contains,
    /// `first(list, n)`: its first `n` items, or all of them.
    First,
    /// `last(list, x)`: where the last item that is `x` stands, from 0; null if there is none.
    Last,
    /// `places(list, x)`: where the items that are `x` stand, in order.
    Places,
}

impl Func {
    /// Name and number of arguments of every function.
    pub const TABLE: [(&'static str, Func, usize); 18] = [
        ("exp", Func::Exp, 1),
        ("log", Func::Log, 1),
        ("sqrt", Func::Sqrt, 1),
        ("tanh", Func::Tanh, 1),
        ("erf", Func::Erf, 1),
        ("sin", Func::Sin, 1),
        ("cos", Func::Cos, 1),
        ("abs", Func::Abs, 1),
        ("floor", Func::Floor, 1),
        ("ceil", Func::Ceil, 1),
        ("round", Func::Round, 1),
        ("min", Func::Min, 2),
        ("max", Func::Max, 2),
        ("len", Func::Len, 1),
        ("contains", Func::Contains, 2),
        ("first", Func::First, 2),
        ("last", Func::Last, 2),
        ("places", Func::Places, 2),
    ];

    fn name(self) -> &'static str {
        Self::TABLE.iter().find(|row| row.1 == self).map_or("?", |row| row.0)
    }

    /// The function on numbers; `b` is ignored by the unary ones.
    pub fn apply(self, a: f64, b: f64) -> f64 {
        match self {
            Func::Exp => a.exp(),
            Func::Log => a.ln(),
            Func::Sqrt => a.sqrt(),
            Func::Tanh => a.tanh(),
            Func::Erf => scalar::erf(a),
            Func::Sin => a.sin(),
            Func::Cos => a.cos(),
            Func::Abs => a.abs(),
            Func::Floor => a.floor(),
            Func::Ceil => a.ceil(),
            Func::Round => a.round_ties_even(),
            Func::Min => a.min(b),
            Func::Max => a.max(b),
            // Not numeric: refused when compiled.
            Func::Len | Func::Contains | Func::First | Func::Last | Func::Places => f64::NAN,
        }
    }
}

impl Value {
    /// The value of a key; null where there is none.
    #[must_use]
    pub fn member(&self, key: &str) -> Value {
        match self {
            Value::Map(entries) => {
                entries.iter().find(|(k, _)| k == key).map_or(Value::Null, |(_, v)| v.clone())
            }
            _ => Value::Null,
        }
    }

    /// What kind of value this is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Num(_) => "a number",
            Value::Str(_) => "text",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Num(n) => write!(f, "{}", Number(*n)),
            Value::Str(s) => write!(f, "'{}'", s.replace('\\', "\\\\").replace('\'', "\\'")),
            Value::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str("]")
            }
            Value::Map(_) => f.write_str("{..}"),
        }
    }
}

/// Prints a float so that it reads back exactly: `12`, `0.5`, `1e-6`.
pub(crate) struct Number(pub(crate) f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        if n != 0.0 && n.is_finite() && !(1e-4..1e16).contains(&n.abs()) {
            write!(f, "{n:e}")
        } else {
            write!(f, "{n}")
        }
    }
}

impl Expr {
    /// Calls `visit` with every name the expression mentions.
    pub fn names<'a>(&'a self, visit: &mut dyn FnMut(&'a str)) {
        match self {
            Expr::Lit(_) => {}
            Expr::Var(name) => visit(name),
            Expr::Unary(_, a) | Expr::Member(a, _) => a.names(visit),
            Expr::Binary(_, a, b) | Expr::Index(a, b) => {
                a.names(visit);
                b.names(visit);
            }
            Expr::Cond(c, a, b) => {
                c.names(visit);
                a.names(visit);
                b.names(visit);
            }
            Expr::Call(_, args) => args.iter().for_each(|a| a.names(visit)),
        }
    }

    /// Puts an expression in the place of each name that `find` knows.
    #[must_use]
    pub fn substitute(&self, find: &dyn Fn(&str) -> Option<Expr>) -> Expr {
        let go = |e: &Expr| Box::new(e.substitute(find));
        match self {
            Expr::Lit(_) => self.clone(),
            Expr::Var(name) => find(name).unwrap_or_else(|| self.clone()),
            Expr::Unary(op, a) => Expr::Unary(*op, go(a)),
            Expr::Binary(op, a, b) => Expr::Binary(*op, go(a), go(b)),
            Expr::Cond(c, a, b) => Expr::Cond(go(c), go(a), go(b)),
            Expr::Call(f, args) => {
                Expr::Call(*f, args.iter().map(|a| a.substitute(find)).collect())
            }
            Expr::Index(a, i) => Expr::Index(go(a), go(i)),
            Expr::Member(a, key) => Expr::Member(go(a), key.clone()),
        }
    }

    fn strength(&self) -> u8 {
        match self {
            Expr::Cond(..) => 0,
            Expr::Binary(op, ..) => op.strength(),
            Expr::Unary(..) => UNARY,
            // A negative literal prints as a negation.
            Expr::Lit(Value::Num(n)) if n.is_sign_negative() => UNARY,
            Expr::Index(..) | Expr::Member(..) => POSTFIX,
            _ => ATOM,
        }
    }

    fn print(&self, f: &mut fmt::Formatter<'_>, min: u8) -> fmt::Result {
        let parens = self.strength() < min;
        if parens {
            f.write_str("(")?;
        }
        match self {
            Expr::Lit(v) => write!(f, "{v}")?,
            Expr::Var(name) => f.write_str(name)?,
            Expr::Unary(op, a) => {
                f.write_str(if *op == UnaryOp::Neg { "-" } else { "!" })?;
                a.print(f, UNARY)?;
            }
            Expr::Binary(op, a, b) => {
                let s = op.strength();
                // Everything associates to the left but `**`; comparisons do not chain.
                let (left, right) = match op {
                    BinaryOp::Pow => (POSTFIX, UNARY),
                    _ if s == BinaryOp::COMPARISON => (s + 1, s + 1),
                    _ => (s, s + 1),
                };
                a.print(f, left)?;
                write!(f, " {} ", op.spelling())?;
                b.print(f, right)?;
            }
            Expr::Cond(c, a, b) => {
                c.print(f, 1)?;
                f.write_str(" ? ")?;
                a.print(f, 0)?;
                f.write_str(" : ")?;
                b.print(f, 0)?;
            }
            Expr::Call(func, args) => {
                write!(f, "{}(", func.name())?;
                for (i, a) in args.iter().enumerate() {
                    f.write_str(if i > 0 { ", " } else { "" })?;
                    a.print(f, 0)?;
                }
                f.write_str(")")?;
            }
            Expr::Index(a, i) => {
                a.print(f, POSTFIX)?;
                f.write_str("[")?;
                i.print(f, 0)?;
                f.write_str("]")?;
            }
            Expr::Member(a, key) => {
                // `2.x` would read as the number `2.` and a stray name.
                let number = matches!(**a, Expr::Lit(Value::Num(_)));
                a.print(f, if number { ATOM + 1 } else { POSTFIX })?;
                write!(f, ".{key}")?;
            }
        }
        if parens { f.write_str(")") } else { Ok(()) }
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, 0)
    }
}
