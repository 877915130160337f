//! Substitution of names and evaluation of everything that is then known.

use super::{BinaryOp, Expr, ExprError, Func, UnaryOp, Value};

impl Expr {
    /// Replaces each name for which `lookup` has a value and evaluates what can be evaluated.
    ///
    /// Branches not taken (`?:`, `&&`, `||`, `??`) are not looked at. Names that `lookup` does
    /// not know stay.
    pub fn fold(&self, lookup: &dyn Fn(&str) -> Option<Value>) -> Result<Expr, ExprError> {
        Ok(match self {
            Expr::Lit(v) => Expr::Lit(v.clone()),
            Expr::Var(name) => lookup(name).map_or_else(|| self.clone(), Expr::Lit),
            Expr::Unary(op, a) => match a.fold(lookup)? {
                Expr::Lit(v) => Expr::Lit(unary(*op, &v, a)?),
                a => Expr::Unary(*op, Box::new(a)),
            },
            Expr::Binary(op, a, b) => fold_binary(*op, a, b, lookup)?,
            Expr::Cond(c, a, b) => match c.fold(lookup)? {
                Expr::Lit(v) => if truth(&v, c)? { a } else { b }.fold(lookup)?,
                c => {
                    let (a, b) = (a.fold(lookup)?, b.fold(lookup)?);
                    Expr::Cond(Box::new(c), Box::new(a), Box::new(b))
                }
            },
            Expr::Call(func, args) => {
                let folded: Vec<Expr> =
                    args.iter().map(|a| a.fold(lookup)).collect::<Result<_, _>>()?;
                let values: Option<Vec<&Value>> = folded.iter().map(Expr::literal).collect();
                match values {
                    Some(values) => Expr::Lit(call(*func, &values, args)?),
                    None => Expr::Call(*func, folded),
                }
            }
            Expr::Index(list, i) => match (list.fold(lookup)?, i.fold(lookup)?) {
                (Expr::Lit(v), Expr::Lit(n)) => Expr::Lit(index(&v, &n, (list, i))?),
                (a, b) => Expr::Index(Box::new(a), Box::new(b)),
            },
            Expr::Member(map, key) => match map.fold(lookup)? {
                Expr::Lit(v) => Expr::Lit(member(v, key, map)?),
                a => Expr::Member(Box::new(a), key.clone()),
            },
        })
    }

    /// Evaluates completely: every name must be known to `lookup`.
    pub fn eval(&self, lookup: &dyn Fn(&str) -> Option<Value>) -> Result<Value, ExprError> {
        match self.fold(lookup)? {
            Expr::Lit(v) => Ok(v),
            rest => {
                let mut unknown = None;
                rest.names(&mut |n| {
                    unknown.get_or_insert_with(|| n.to_owned());
                });
                Err(failed(format!("unknown name `{}`", unknown.unwrap_or_default())))
            }
        }
    }

    fn literal(&self) -> Option<&Value> {
        match self {
            Expr::Lit(v) => Some(v),
            _ => None,
        }
    }
}

fn failed(message: String) -> ExprError {
    ExprError::new(0, message)
}

fn expected(what: &str, v: &Value, e: &Expr) -> ExprError {
    failed(format!("expected {what} from `{e}`, found {}", v.kind()))
}

fn truth(v: &Value, e: &Expr) -> Result<bool, ExprError> {
    match v {
        Value::Bool(b) => Ok(*b),
        _ => Err(expected("true or false", v, e)),
    }
}

fn num(v: &Value, e: &Expr) -> Result<f64, ExprError> {
    match v {
        Value::Num(n) => Ok(*n),
        _ => Err(expected("a number", v, e)),
    }
}

fn unary(op: UnaryOp, v: &Value, e: &Expr) -> Result<Value, ExprError> {
    Ok(match op {
        UnaryOp::Neg => Value::Num(-num(v, e)?),
        UnaryOp::Not => Value::Bool(!truth(v, e)?),
    })
}

fn fold_binary(
    op: BinaryOp,
    a: &Expr,
    b: &Expr,
    lookup: &dyn Fn(&str) -> Option<Value>,
) -> Result<Expr, ExprError> {
    let left = a.fold(lookup)?;
    if let Expr::Lit(v) = &left {
        match op {
            BinaryOp::Coalesce => {
                return if *v == Value::Null { b.fold(lookup) } else { Ok(left) };
            }
            BinaryOp::And if !truth(v, a)? => return Ok(left),
            BinaryOp::Or if truth(v, a)? => return Ok(left),
            _ => {}
        }
    }
    match (left, b.fold(lookup)?) {
        (Expr::Lit(x), Expr::Lit(y)) => Ok(Expr::Lit(binary(op, (&x, a), (&y, b))?)),
        (x, y) => Ok(Expr::Binary(op, Box::new(x), Box::new(y))),
    }
}

fn binary(
    op: BinaryOp,
    (x, a): (&Value, &Expr),
    (y, b): (&Value, &Expr),
) -> Result<Value, ExprError> {
    match op {
        BinaryOp::Eq => return Ok(Value::Bool(x == y)),
        BinaryOp::Ne => return Ok(Value::Bool(x != y)),
        BinaryOp::And | BinaryOp::Or => return Ok(Value::Bool(truth(y, b)?)),
        BinaryOp::Coalesce => return Ok(y.clone()),
        _ => {}
    }
    let (m, n) = (num(x, a)?, num(y, b)?);
    Ok(match op {
        BinaryOp::Lt => Value::Bool(m < n),
        BinaryOp::Le => Value::Bool(m <= n),
        BinaryOp::Gt => Value::Bool(m > n),
        BinaryOp::Ge => Value::Bool(m >= n),
        BinaryOp::BitOr | BinaryOp::BitXor | BinaryOp::BitAnd | BinaryOp::Shl | BinaryOp::Shr => {
            for (x, e) in [(m, a), (n, b)] {
                if x.fract() != 0.0 || x.abs() >= EXACT {
                    return Err(failed(format!("expected a whole number from `{e}`, found {x}")));
                }
            }
            Value::Num(arithmetic(op, m, n))
        }
        _ => {
            let value = arithmetic(op, m, n);
            if !value.is_finite() && m.is_finite() && n.is_finite() {
                return Err(failed(format!("`{a} {} {b}` is not finite", op.spelling())));
            }
            Value::Num(value)
        }
    })
}

/// From here on floats do not hold every whole number.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The numeric operators; comparisons yield 1 or 0.
pub(super) fn arithmetic(op: BinaryOp, m: f64, n: f64) -> f64 {
    let flag = |b: bool| f64::from(u8::from(b));
    // Rounded toward zero to whole numbers.
    if let Some(bits) = op.bits(m as i64, n as i64) {
        return bits as f64;
    }
    match op {
        BinaryOp::Add => m + n,
        BinaryOp::Sub => m - n,
        BinaryOp::Mul => m * n,
        BinaryOp::Div => m / n,
        BinaryOp::Rem => m % n,
        BinaryOp::Pow => m.powf(n),
        BinaryOp::Lt => flag(m < n),
        BinaryOp::Le => flag(m <= n),
        BinaryOp::Gt => flag(m > n),
        BinaryOp::Ge => flag(m >= n),
        BinaryOp::Eq => flag(m == n),
        BinaryOp::Ne => flag(m != n),
        BinaryOp::And => flag(m != 0.0 && n != 0.0),
        BinaryOp::Or => flag(m != 0.0 || n != 0.0),
        BinaryOp::Coalesce => m,
        // Of bits: above.
        BinaryOp::BitOr | BinaryOp::BitXor | BinaryOp::BitAnd | BinaryOp::Shl | BinaryOp::Shr => {
            f64::NAN
        }
    }
}

fn call(func: Func, values: &[&Value], args: &[Expr]) -> Result<Value, ExprError> {
    match (func, values) {
        (Func::Len, [Value::List(items)]) => Ok(Value::Num(items.len() as f64)),
        (Func::Len, [Value::Str(s)]) => Ok(Value::Num(s.len() as f64)),
        (Func::Len, [Value::Map(entries)]) => Ok(Value::Num(entries.len() as f64)),
        (Func::Contains, [Value::List(items), x]) => Ok(Value::Bool(items.contains(x))),
        (Func::Contains, [Value::Str(s), Value::Str(part)]) => {
            Ok(Value::Bool(s.contains(part.as_str())))
        }
        (Func::First, [Value::List(items), Value::Num(n)]) => {
            Ok(Value::List(items.iter().take(n.max(0.0) as usize).cloned().collect()))
        }
        (Func::First, [Value::List(_), v]) => Err(expected("a number", v, &args[1])),
        (Func::Last, [Value::List(items), x]) => {
            let place = items.iter().rposition(|item| item == *x);
            Ok(place.map_or(Value::Null, |i| Value::Num(i as f64)))
        }
        (Func::Places, [Value::List(items), x]) => {
            let places = items.iter().enumerate().filter(|(_, item)| item == x);
            Ok(Value::List(places.map(|(i, _)| Value::Num(i as f64)).collect()))
        }
        (Func::First | Func::Last | Func::Places, [v, ..]) => Err(expected("a list", v, &args[0])),
        (Func::Contains, [Value::Str(_), v]) => Err(expected("text", v, &args[1])),
        (Func::Len | Func::Contains, [v, ..]) => Err(expected("a list or text", v, &args[0])),
        (_, values) => {
            let mut numbers = [0.0; 2];
            for ((slot, v), e) in numbers.iter_mut().zip(values).zip(args) {
                *slot = num(v, e)?;
            }
            let value = func.apply(numbers[0], numbers[1]);
            if !value.is_finite() && numbers.iter().all(|n| n.is_finite()) {
                let e = Expr::Call(func, args.to_vec());
                return Err(failed(format!("`{e}` is not finite")));
            }
            Ok(Value::Num(value))
        }
    }
}

fn index(list: &Value, i: &Value, (e, at): (&Expr, &Expr)) -> Result<Value, ExprError> {
    let items = match (list, i) {
        (Value::List(items), _) => items,
        (Value::Map(_) | Value::Null, Value::Str(key)) => return member(list.clone(), key, e),
        // A character of a text, as patterns of layers have one for each.
        (Value::Str(text), _) => {
            let found = text.chars().nth(num(i, at)?.max(0.0) as usize).map(String::from);
            return found.map(Value::Str).ok_or_else(|| failed(format!("`{e}` is shorter")));
        }
        _ => return Err(expected("a list", list, e)),
    };
    let n = &num(i, at)?;
    items.get(*n as usize).filter(|_| *n >= 0.0).cloned().ok_or_else(|| {
        failed(format!("index {n} is outside `{e}`, which has {} item(s)", items.len()))
    })
}

fn member(map: Value, key: &str, e: &Expr) -> Result<Value, ExprError> {
    match map {
        Value::Null => Ok(Value::Null),
        Value::Map(entries) => {
            Ok(entries.into_iter().find(|(k, _)| k == key).map_or(Value::Null, |(_, v)| v))
        }
        v => Err(expected("a map", &v, e)),
    }
}
