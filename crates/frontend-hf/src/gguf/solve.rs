//! Expressions over metadata, the other way round: which metadata makes them what is wanted.

use std::collections::BTreeMap;

use infernum_ir::expr::{BinaryOp, Expr, Func, UnaryOp, Value};

use super::map::Tree;

/// Relative differences of numbers below it are none: metadata is f32.
const CLOSE: f64 = 1e-6;

/// What is known while metadata is being found.
pub(super) struct Solver {
    /// Metadata by its path, as expressions have it.
    pub(super) found: BTreeMap<String, Value>,
    /// Keys of config.json before the one that is looked for.
    pub(super) config: BTreeMap<String, Value>,
    /// Shapes of tensors.
    pub(super) tensors: Value,
}

impl Solver {
    /// Has `expr` come to `value`; false, and nothing changed, where no way is seen.
    pub(super) fn solve(&mut self, expr: &Expr, value: &Value) -> bool {
        // What is said is said by its own key, also where another would lead to it.
        let own = matches!(expr, Expr::Binary(BinaryOp::Coalesce, a, _) if self.eval(a) == Some(Value::Null));
        if !own && self.eval(expr).is_some_and(|found| alike(&found, value)) {
            return true;
        }
        let before = self.found.clone();
        let done = self.step(expr, value);
        let done = done && self.eval(expr).is_some_and(|found| alike(&found, value));
        if !done {
            self.found = before;
        }
        done
    }

    fn step(&mut self, expr: &Expr, value: &Value) -> bool {
        if let Some(path) = path(expr) {
            return *value != Value::Null && self.found.insert(path, round(value)).is_none();
        }
        match expr {
            Expr::Binary(BinaryOp::Coalesce, a, b) => self.solve(a, value) || self.solve(b, value),
            Expr::Cond(c, a, b) => [(a, true), (b, false)].into_iter().any(|(branch, holds)| {
                let before = self.found.clone();
                let done = self.hold(c, holds) && self.solve(branch, value) && self.holds(c, holds);
                if !done {
                    self.found = before;
                }
                done
            }),
            Expr::Unary(UnaryOp::Neg, a) => match value {
                Value::Num(n) => self.solve(a, &Value::Num(-n)),
                _ => false,
            },
            Expr::Binary(op, a, b) => {
                let &Value::Num(wanted) = value else { return false };
                let number = |v: Option<Value>| match v {
                    Some(Value::Num(n)) => Some(n),
                    _ => None,
                };
                if let Some(b) = number(self.eval(b)) {
                    return left(*op, wanted, b).is_some_and(|n| self.solve(a, &Value::Num(n)));
                }
                let Some(a) = number(self.eval(a)) else { return false };
                right(*op, wanted, a).is_some_and(|n| self.solve(b, &Value::Num(n)))
            }
            _ => false,
        }
    }

    fn holds(&self, condition: &Expr, wanted: bool) -> bool {
        self.eval(condition) == Some(Value::Bool(wanted))
    }

    /// Has a condition be true or false.
    fn hold(&mut self, condition: &Expr, wanted: bool) -> bool {
        if self.holds(condition, wanted) {
            return true;
        }
        match condition {
            Expr::Binary(BinaryOp::Eq, a, b) if wanted => {
                self.eval(b).is_some_and(|value| self.solve(a, &value))
            }
            // What is not there yet may come with the branch.
            _ => true,
        }
    }

    pub(super) fn eval(&self, expr: &Expr) -> Option<Value> {
        let lookup = |name: &str| {
            Some(match name {
                "config" => tree(&self.config, ""),
                "tensors" => self.tensors.clone(),
                name => self.metadata(name),
            })
        };
        expr.eval(&lookup).ok()
    }

    /// What is known under a name, before its dots.
    fn metadata(&self, name: &str) -> Value {
        let own = self.found.get(name).cloned();
        own.unwrap_or_else(|| match tree(&self.found, &format!("{name}.")) {
            Value::Map(entries) if entries.is_empty() => Value::Null,
            value => value,
        })
    }
}

/// Values by what is behind a prefix of their keys, dots taken apart.
fn tree(values: &BTreeMap<String, Value>, prefix: &str) -> Value {
    let mut tree = Tree::default();
    for (key, value) in values {
        if let Some(rest) = key.strip_prefix(prefix) {
            tree.insert(rest, value.clone());
        }
    }
    tree.value()
}

/// The metadata that an expression is, where it is nothing else.
fn path(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Var(name) => Some(name.clone()).filter(|n| n != "config" && n != "tensors"),
        Expr::Member(of, key) => Some(format!("{}.{key}", path(of)?)),
        _ => None,
    }
}

/// `a` of `a op b = wanted`.
fn left(op: BinaryOp, wanted: f64, b: f64) -> Option<f64> {
    Some(match op {
        BinaryOp::Add => wanted - b,
        BinaryOp::Sub => wanted + b,
        BinaryOp::Mul => wanted / b,
        BinaryOp::Div => wanted * b,
        _ => return None,
    })
}

/// `b` of `a op b = wanted`.
fn right(op: BinaryOp, wanted: f64, a: f64) -> Option<f64> {
    Some(match op {
        BinaryOp::Add => wanted - a,
        BinaryOp::Sub => a - wanted,
        BinaryOp::Mul => wanted / a,
        BinaryOp::Div => a / wanted,
        _ => return None,
    })
}

/// The expression of `y` that is `x` where `expr` of `x` is `y`.
pub(super) fn inverse(expr: &Expr, y: Expr) -> Option<Expr> {
    let number = |e: &Expr| matches!(e, Expr::Lit(Value::Num(_)));
    let binary = |op, a: Expr, b: &Expr| Expr::Binary(op, Box::new(a), Box::new(b.clone()));
    match expr {
        Expr::Var(_) => Some(y),
        Expr::Unary(UnaryOp::Neg, a) => inverse(a, Expr::Unary(UnaryOp::Neg, Box::new(y))),
        Expr::Call(Func::Log, args) => inverse(args.first()?, Expr::Call(Func::Exp, vec![y])),
        Expr::Call(Func::Exp, args) => inverse(args.first()?, Expr::Call(Func::Log, vec![y])),
        Expr::Binary(op, a, b) if number(b) => {
            let back = match op {
                BinaryOp::Add => BinaryOp::Sub,
                BinaryOp::Sub => BinaryOp::Add,
                BinaryOp::Mul => BinaryOp::Div,
                BinaryOp::Div => BinaryOp::Mul,
                _ => return None,
            };
            inverse(a, binary(back, y, b))
        }
        _ => None,
    }
}

/// A number that is whole but for rounding, as that.
fn round(value: &Value) -> Value {
    match value {
        Value::Num(n) if (n - n.round()).abs() < CLOSE * 1e-3 * n.abs() => Value::Num(n.round()),
        value => value.clone(),
    }
}

/// Whether two numbers are the same but for what an f32 does not hold.
pub(super) fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= CLOSE * a.abs().max(b.abs())
}

fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Num(a), Value::Num(b)) => close(*a, *b),
        (Value::List(a), Value::List(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b))
        }
        (a, b) => a == b,
    }
}

/// Whether two expressions are the same but for such numbers.
pub(super) fn same(a: &Expr, b: &Expr) -> bool {
    let all =
        |a: &[Expr], b: &[Expr]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b));
    match (a, b) {
        (Expr::Lit(a), Expr::Lit(b)) => alike(a, b),
        (Expr::Unary(p, a), Expr::Unary(q, b)) => p == q && same(a, b),
        (Expr::Binary(p, a, b), Expr::Binary(q, c, d)) => p == q && same(a, c) && same(b, d),
        (Expr::Cond(a, b, c), Expr::Cond(d, e, f)) => same(a, d) && same(b, e) && same(c, f),
        (Expr::Call(f, a), Expr::Call(g, b)) => f == g && all(a, b),
        (Expr::Index(a, i), Expr::Index(b, j)) => same(a, b) && same(i, j),
        (Expr::Member(a, k), Expr::Member(b, l)) => k == l && same(a, b),
        (a, b) => a == b,
    }
}
