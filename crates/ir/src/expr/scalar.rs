//! Expressions reduced to arithmetic on numbers: the form that executors run.

use super::fold::arithmetic;
use super::{BinaryOp, Expr, ExprError, Func, UnaryOp, Value};

/// One instruction of a stack machine.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the operations are those of the language")]
pub enum Instr {
    Num(f64),
    /// Pushes argument `i`.
    Arg(usize),
    Neg,
    Not,
    Binary(BinaryOp),
    Call(Func),
    /// Pops `else`, `then`, `condition`.
    Select,
    /// Pops an index into a constant list (clamped to it).
    Lookup(Vec<f64>),
}

/// A compiled scalar expression.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalarFn {
    code: Vec<Instr>,
    depth: usize,
}

impl ScalarFn {
    /// Compiles `expr` over the named arguments.
    pub fn compile(expr: &Expr, args: &[&str]) -> Result<ScalarFn, ExprError> {
        let mut code = Vec::new();
        emit(expr, args, &mut code)?;
        let (mut depth, mut max) = (0usize, 0);
        for instr in &code {
            depth = match instr {
                Instr::Num(_) | Instr::Arg(_) => depth + 1,
                Instr::Neg | Instr::Not | Instr::Lookup(_) => depth,
                Instr::Call(f) => depth + 1 - arity(*f),
                Instr::Binary(_) => depth - 1,
                Instr::Select => depth - 2,
            };
            max = max.max(depth);
        }
        Ok(ScalarFn { code, depth: max })
    }

    /// The instructions, in order.
    pub fn code(&self) -> &[Instr] {
        &self.code
    }

    /// Stack slots that evaluation needs.
    pub fn stack_depth(&self) -> usize {
        self.depth
    }

    /// Evaluates at one point; `args` in the order given to [`ScalarFn::compile`].
    pub fn eval(&self, args: &[f64]) -> f64 {
        let mut stack: Vec<f64> = Vec::with_capacity(self.depth);
        let pop = |stack: &mut Vec<f64>| stack.pop().unwrap_or(f64::NAN);
        for instr in &self.code {
            let value = match instr {
                Instr::Num(n) => *n,
                Instr::Arg(i) => args[*i],
                Instr::Neg => -pop(&mut stack),
                Instr::Not => f64::from(u8::from(pop(&mut stack) == 0.0)),
                Instr::Binary(op) => {
                    let b = pop(&mut stack);
                    arithmetic(*op, pop(&mut stack), b)
                }
                Instr::Call(f) => {
                    let b = if arity(*f) == 2 { pop(&mut stack) } else { 0.0 };
                    f.apply(pop(&mut stack), b)
                }
                Instr::Select => {
                    let (b, a) = (pop(&mut stack), pop(&mut stack));
                    if pop(&mut stack) == 0.0 { b } else { a }
                }
                Instr::Lookup(list) => {
                    list[(pop(&mut stack).max(0.0) as usize).min(list.len() - 1)]
                }
            };
            stack.push(value);
        }
        pop(&mut stack)
    }
}

fn arity(f: Func) -> usize {
    Func::TABLE.iter().find(|row| row.1 == f).map_or(1, |row| row.2)
}

fn refuse(e: &Expr, why: &str) -> ExprError {
    ExprError::new(0, format!("`{e}` {why}"))
}

fn emit(e: &Expr, args: &[&str], code: &mut Vec<Instr>) -> Result<(), ExprError> {
    match e {
        Expr::Lit(Value::Num(n)) => code.push(Instr::Num(*n)),
        Expr::Lit(Value::Bool(b)) => code.push(Instr::Num(f64::from(u8::from(*b)))),
        Expr::Lit(v) => return Err(refuse(e, &format!("is {}, expected a number", v.kind()))),
        Expr::Var(name) => {
            let i = args.iter().position(|a| a == name).ok_or_else(|| {
                refuse(e, &format!("is not an argument here; known: {}", args.join(", ")))
            })?;
            code.push(Instr::Arg(i));
        }
        Expr::Unary(op, a) => {
            emit(a, args, code)?;
            code.push(if *op == UnaryOp::Neg { Instr::Neg } else { Instr::Not });
        }
        Expr::Binary(BinaryOp::Coalesce, ..) => {
            return Err(refuse(e, "uses `??`, which has no meaning on numbers"));
        }
        Expr::Binary(op, a, b) => {
            emit(a, args, code)?;
            emit(b, args, code)?;
            code.push(Instr::Binary(*op));
        }
        Expr::Cond(c, a, b) => {
            emit(c, args, code)?;
            emit(a, args, code)?;
            emit(b, args, code)?;
            code.push(Instr::Select);
        }
        Expr::Call(Func::Len | Func::Contains | Func::First | Func::Last | Func::Places, _) => {
            return Err(refuse(e, "does not yield a number at run time"));
        }
        Expr::Call(f, list) if list.len() != arity(*f) => {
            return Err(refuse(
                e,
                &format!("has {} argument(s), expected {}", list.len(), arity(*f)),
            ));
        }
        Expr::Call(f, list) => {
            for a in list {
                emit(a, args, code)?;
            }
            code.push(Instr::Call(*f));
        }
        Expr::Index(list, i) => {
            emit(i, args, code)?;
            code.push(Instr::Lookup(numbers(list)?));
        }
        Expr::Member(..) => return Err(refuse(e, "is not a number")),
    }
    Ok(())
}

fn numbers(e: &Expr) -> Result<Vec<f64>, ExprError> {
    let Expr::Lit(Value::List(items)) = e else {
        return Err(refuse(e, "is not a constant list"));
    };
    if items.is_empty() {
        return Err(refuse(e, "is an empty list"));
    }
    items
        .iter()
        .map(|v| match v {
            Value::Num(n) => Ok(*n),
            v => Err(refuse(e, &format!("holds {}, expected numbers", v.kind()))),
        })
        .collect()
}

/// The error function, by its Maclaurin series for small arguments and the continued fraction of
/// its complement otherwise (Abramowitz & Stegun 7.1.5, 7.1.14); about 1e-15 absolute.
pub(super) fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() || a == 0.0 {
        return x;
    }
    let two_over_root_pi = std::f64::consts::FRAC_2_SQRT_PI;
    if a < 2.5 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-17 * sum.abs() {
            n += 1.0;
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        return two_over_root_pi * sum;
    }
    if a > 6.0 {
        return x.signum();
    }
    let mut tail = a;
    for k in (1..=80).rev() {
        tail = a + f64::from(k) / 2.0 / tail;
    }
    x.signum() * (1.0 - (-a * a).exp() / tail * two_over_root_pi / 2.0)
}
