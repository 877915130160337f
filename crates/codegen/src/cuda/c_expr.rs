//! Scalar expressions as C.

use infernum_ir::expr::{BinaryOp, Func, Instr, ScalarFn};

/// The text of `f` in `float` arithmetic, its arguments being the C expressions `args`.
pub(super) fn c_text(f: &ScalarFn, args: &[String]) -> String {
    let mut stack: Vec<String> = Vec::new();
    let pop = |stack: &mut Vec<String>| stack.pop().unwrap_or_else(|| "nanf(\"\")".to_owned());
    for instr in f.code() {
        let text = match instr {
            Instr::Num(n) => literal(*n),
            Instr::Arg(i) => args.get(*i).cloned().unwrap_or_default(),
            Instr::Neg => format!("(-{})", pop(&mut stack)),
            Instr::Not => format!("({} == 0.0f ? 1.0f : 0.0f)", pop(&mut stack)),
            Instr::Binary(op) => {
                let b = pop(&mut stack);
                binary(*op, &pop(&mut stack), &b)
            }
            Instr::Call(func @ (Func::Min | Func::Max)) => {
                let b = pop(&mut stack);
                format!("{}({}, {b})", function(*func), pop(&mut stack))
            }
            Instr::Call(func) => format!("{}({})", function(*func), pop(&mut stack)),
            Instr::Select => {
                let (b, a) = (pop(&mut stack), pop(&mut stack));
                format!("({} != 0.0f ? {a} : {b})", pop(&mut stack))
            }
            Instr::Lookup(list) => lookup(&pop(&mut stack), list),
        };
        stack.push(text);
    }
    pop(&mut stack)
}

/// A `float` literal that reads back exactly.
pub(super) fn literal(n: f64) -> String {
    let n = n as f32;
    if n.is_nan() {
        return "__int_as_float(0x7fc00000)".to_owned();
    }
    if n.is_infinite() {
        let bits = n.to_bits();
        return format!("__int_as_float(0x{bits:08x})");
    }
    // The shortest text that gives the same float; an exponent keeps it from being an integer.
    if n < 0.0 { format!("({n:e}f)") } else { format!("{n:e}f") }
}

fn binary(op: BinaryOp, a: &str, b: &str) -> String {
    let compare = |sign: &str| format!("({a} {sign} {b} ? 1.0f : 0.0f)");
    let bits = |sign: &str| format!("(float)((i64)({a}) {sign} (i64)({b}))");
    let shift = |sign: &str, ty: &str| {
        format!("(float)(i64)(({ty})(i64)({a}) {sign} min(max((i64)({b}), (i64)0), (i64)63))")
    };
    match op {
        BinaryOp::Add => format!("({a} + {b})"),
        BinaryOp::Sub => format!("({a} - {b})"),
        BinaryOp::Mul => format!("({a} * {b})"),
        BinaryOp::Div => format!("({a} / {b})"),
        BinaryOp::Rem => format!("fmodf({a}, {b})"),
        BinaryOp::Pow => format!("powf({a}, {b})"),
        BinaryOp::Eq => compare("=="),
        BinaryOp::Ne => compare("!="),
        BinaryOp::Lt => compare("<"),
        BinaryOp::Le => compare("<="),
        BinaryOp::Gt => compare(">"),
        BinaryOp::Ge => compare(">="),
        BinaryOp::Or => format!("({a} != 0.0f || {b} != 0.0f ? 1.0f : 0.0f)"),
        BinaryOp::And => format!("({a} != 0.0f && {b} != 0.0f ? 1.0f : 0.0f)"),
        BinaryOp::BitOr => bits("|"),
        BinaryOp::BitXor => bits("^"),
        BinaryOp::BitAnd => bits("&"),
        BinaryOp::Shl => shift("<<", "u64"),
        BinaryOp::Shr => shift(">>", "i64"),
        BinaryOp::Coalesce => a.to_owned(), // numbers are never null
    }
}

fn function(func: Func) -> &'static str {
    match func {
        Func::Exp => "expf",
        Func::Log => "logf",
        Func::Sqrt => "sqrtf",
        Func::Tanh => "tanhf",
        Func::Erf => "erff",
        Func::Sin => "sinf",
        Func::Cos => "cosf",
        Func::Abs => "fabsf",
        Func::Floor => "floorf",
        Func::Ceil => "ceilf",
        Func::Round => "rintf",
        Func::Min => "fminf",
        Func::Max => "fmaxf",
        // Refused when the expression is compiled.
        Func::Len | Func::Contains | Func::First | Func::Last | Func::Places => "",
    }
}

/// Entry `index` of a constant list, the nearest one outside.
fn lookup(index: &str, list: &[f64]) -> String {
    let last = list.last().map_or_else(|| literal(f64::NAN), |n| literal(*n));
    let head = list.iter().enumerate().take(list.len().saturating_sub(1));
    let cases =
        head.map(|(i, n)| format!("{index} < {} ? {} : ", literal(i as f64 + 1.0), literal(*n)));
    format!("({}{last})", cases.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_print_as_c() {
        let text = |expr: &str| {
            let expr = expr.parse().expect("an expression");
            let f = ScalarFn::compile(&expr, &["a", "b"]).expect("a scalar function");
            c_text(&f, &["x".to_owned(), "y[i]".to_owned()])
        };
        assert_eq!(text("a / (1 + exp(-a)) * b"), "((x / (1e0f + expf((-x)))) * y[i])");
        assert_eq!(text("round(a * 127) / 127"), "(rintf((x * 1.27e2f)) / 1.27e2f)");
        assert_eq!(
            text("max(a, 0) > b ? 0.1 : -2"),
            "((fmaxf(x, 0e0f) > y[i] ? 1.0f : 0.0f) != 0.0f ? 1e-1f : (-2e0f))"
        );
    }
}
