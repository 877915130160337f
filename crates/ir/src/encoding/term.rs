//! Expressions over stored elements, typed and reduced to what every target computes alike.
//!
//! A term is a whole number of 64 bits or a float of 32. Places, stored integers and what is made of
//! them by `+ - * % ** & | ^ << >>`, comparisons, `floor(a / b)` and `ceil(a / b)` are whole; whatever meets a
//! float becomes one. Float operations round one by one, and none is allowed whose result depends on
//! a library: so all targets decode a value to the same bits.

use crate::expr::{BinaryOp, Expr, Func, UnaryOp, Value};

/// What a term comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "named as usual")]
pub enum Number {
    Int(i64),
    Float(f32),
}

impl Number {
    /// As a float, rounded to nearest even.
    pub fn float(self) -> f32 {
        match self {
            Number::Int(i) => i as f32,
            Number::Float(x) => x,
        }
    }

    /// As a whole number; what is none is 0.
    pub fn int(self) -> i64 {
        match self {
            Number::Int(i) => i,
            Number::Float(_) => 0,
        }
    }
}

/// What stands for a position or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The value's row.
    N,
    /// Its column.
    K,
    /// Rows of the weight.
    Rows,
    /// Columns of the weight.
    Columns,
}

impl Place {
    /// Every place, with its name in files.
    pub const ALL: [(Place, &'static str); 4] =
        [(Place::N, "n"), (Place::K, "k"), (Place::Rows, "N"), (Place::Columns, "K")];
}

/// A typed expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
    /// A whole number.
    Int(i64),
    /// A float.
    Float(f32),
    /// A position or a size.
    Place(Place),
    /// Element `index` of a stored part; an index outside is the nearest inside.
    Read {
        /// Which part.
        part: usize,
        /// Whether its elements are whole numbers.
        whole: bool,
        /// One index for each of its dimensions.
        index: Vec<Term>,
    },
    /// Entry `index` of a table; an index outside is the nearest inside.
    Table {
        /// Which table.
        table: usize,
        /// Whether its entries are whole numbers.
        whole: bool,
        /// The entry.
        index: Box<Term>,
    },
    /// A whole number as a float.
    Widen(Box<Term>),
    /// `-a`.
    Neg(Box<Term>),
    /// `!a`: 1 for 0, else 0.
    Not(Box<Term>),
    /// Of two operands of one type. Comparisons yield whole numbers.
    Binary(BinaryOp, Box<Term>, Box<Term>),
    /// `floor(a / b)` of whole numbers, or with `up` `ceil(a / b)`; 0 where b is.
    Divide {
        /// Whether it rounds up.
        up: bool,
        /// The dividend.
        a: Box<Term>,
        /// The divisor.
        b: Box<Term>,
    },
    /// `floor`, `ceil`, `round` and `abs` of one, `min` and `max` of two of one type.
    Call(Func, Vec<Term>),
    /// Condition, then, else.
    Select(Box<[Term; 3]>),
}

/// The names that an expression may use besides places.
pub(super) struct Names<'a> {
    /// Parts: name, whether they hold whole numbers, and how many indices they take.
    pub(super) parts: &'a [(String, bool, usize)],
    /// Tables: name, and whether they hold whole numbers.
    pub(super) tables: &'a [(&'a str, bool)],
}

/// Where a term is evaluated.
pub(super) trait Memory {
    fn place(&self, place: Place) -> i64;
    fn read(&self, part: usize, index: &[Term]) -> Number;
    fn table(&self, table: usize, index: i64) -> Number;
}

impl Term {
    /// Types an expression.
    pub(super) fn compile(e: &Expr, names: &Names<'_>) -> Result<Term, String> {
        let term = |e| Term::compile(e, names);
        Ok(match e {
            Expr::Lit(Value::Num(n)) if n.fract() == 0.0 && n.abs() < 9e15 => Term::Int(*n as i64),
            Expr::Lit(Value::Num(n)) => Term::Float(*n as f32),
            Expr::Lit(Value::Bool(b)) => Term::Int(i64::from(*b)),
            Expr::Lit(v) => return Err(format!("expected a number, found {}", v.kind())),
            Expr::Var(_) | Expr::Index(..) => element(e, names)?,
            Expr::Unary(UnaryOp::Neg, a) => match term(a)? {
                Term::Int(i) => Term::Int(i.wrapping_neg()),
                a => Term::Neg(Box::new(a)),
            },
            Expr::Unary(UnaryOp::Not, a) => Term::Not(Box::new(whole(term(a)?, a)?)),
            Expr::Binary(op, a, b) => binary(*op, (term(a)?, a), (term(b)?, b), e)?,
            Expr::Cond(c, a, b) => {
                let (a, b) = alike(term(a)?, term(b)?);
                match whole(term(c)?, c)? {
                    Term::Int(0) => b,
                    Term::Int(_) => a,
                    c => Term::Select(Box::new([c, a, b])),
                }
            }
            Expr::Call(func, args) => call(*func, args, names, e)?,
            Expr::Member(..) => return Err(format!("`{e}` is not a number")),
        })
    }

    /// Whether it is a whole number in type.
    pub fn is_whole(&self) -> bool {
        match self {
            Term::Int(_) | Term::Place(_) | Term::Not(_) | Term::Divide { .. } => true,
            Term::Float(_) | Term::Widen(_) => false,
            Term::Read { whole, .. } | Term::Table { whole, .. } => *whole,
            Term::Neg(a) => a.is_whole(),
            Term::Binary(op, a, _) => is_test(*op) || a.is_whole(),
            Term::Call(_, args) => args.first().is_some_and(Term::is_whole),
            Term::Select(parts) => parts[1].is_whole(),
        }
    }

    /// As a float.
    pub(super) fn widened(self) -> Term {
        match self {
            Term::Int(i) => Term::Float(i as f32),
            a if a.is_whole() => Term::Widen(Box::new(a)),
            a => a,
        }
    }

    pub(super) fn eval(&self, at: &dyn Memory) -> Number {
        match self {
            Term::Int(i) => Number::Int(*i),
            Term::Float(x) => Number::Float(*x),
            Term::Place(place) => Number::Int(at.place(*place)),
            Term::Read { part, index, .. } => at.read(*part, index),
            Term::Table { table, index, .. } => at.table(*table, index.eval(at).int()),
            Term::Widen(a) => Number::Float(a.eval(at).float()),
            Term::Neg(a) => match a.eval(at) {
                Number::Int(i) => Number::Int(i.wrapping_neg()),
                Number::Float(x) => Number::Float(-x),
            },
            Term::Not(a) => Number::Int(i64::from(a.eval(at).int() == 0)),
            Term::Binary(op, a, b) => match (a.eval(at), b.eval(at)) {
                (Number::Int(a), Number::Int(b)) => Number::Int(ints(*op, a, b)),
                (a, b) => floats(*op, a.float(), b.float()),
            },
            Term::Divide { up, a, b } => {
                Number::Int(divide(a.eval(at).int(), b.eval(at).int(), *up))
            }
            Term::Call(func, args) => apply(*func, args.iter().map(|a| a.eval(at))),
            Term::Select(parts) => {
                let [c, a, b] = &**parts;
                if c.eval(at).int() == 0 { b.eval(at) } else { a.eval(at) }
            }
        }
    }
}

fn is_test(op: BinaryOp) -> bool {
    use BinaryOp::{And, Eq, Ge, Gt, Le, Lt, Ne, Or};
    matches!(op, Eq | Ne | Lt | Le | Gt | Ge | And | Or)
}

/// Both as floats, unless both are whole.
fn alike(a: Term, b: Term) -> (Term, Term) {
    if a.is_whole() && b.is_whole() { (a, b) } else { (a.widened(), b.widened()) }
}

fn whole(term: Term, e: &Expr) -> Result<Term, String> {
    if term.is_whole() { Ok(term) } else { Err(format!("expected a whole number, found `{e}`")) }
}

/// A place, an element of a part, or an entry of a table.
fn element(e: &Expr, names: &Names<'_>) -> Result<Term, String> {
    let (mut base, mut index) = (e, Vec::new());
    while let Expr::Index(list, i) = base {
        index.push(whole(Term::compile(i, names)?, i)?);
        base = list;
    }
    index.reverse();
    let Expr::Var(name) = base else { return Err(format!("`{base}` has no elements")) };
    let place = Place::ALL.iter().find(|(_, known)| known == name);
    if let (Some((place, _)), true) = (place, index.is_empty()) {
        return Ok(Term::Place(*place));
    }
    if let Some(part) = names.parts.iter().position(|(known, ..)| known == name) {
        let (_, whole, wanted) = names.parts[part];
        if wanted != index.len() {
            let found = index.len();
            return Err(format!("`{name}` takes {wanted} index(es), found {found}"));
        }
        return Ok(Term::Read { part, whole, index });
    }
    if let Some(table) = names.tables.iter().position(|(known, _)| known == name) {
        let whole = names.tables[table].1;
        return match <[Term; 1]>::try_from(index) {
            Ok([index]) => Ok(Term::Table { table, whole, index: Box::new(index) }),
            Err(index) => Err(format!("`{name}` takes one index, found {}", index.len())),
        };
    }
    let parts = names.parts.iter().map(|(n, ..)| n.as_str());
    let tables = names.tables.iter().map(|(n, _)| *n);
    let known: Vec<&str> = parts.chain(tables).chain(Place::ALL.iter().map(|(_, n)| *n)).collect();
    let hint = crate::nearest(name, known.iter().copied());
    Err(format!("unknown name `{name}`{hint}; known: {}", known.join(", ")))
}

fn binary(
    op: BinaryOp,
    (a, left): (Term, &Expr),
    (b, right): (Term, &Expr),
    e: &Expr,
) -> Result<Term, String> {
    use BinaryOp::{And, BitAnd, BitOr, BitXor, Coalesce, Div, Or, Pow, Rem, Shl, Shr};
    let (a, b) = match op {
        Coalesce => return Err(format!("`{e}`: `??` has no meaning on numbers")),
        And | Or | Rem | Pow | BitOr | BitXor | BitAnd | Shl | Shr => {
            (whole(a, left)?, whole(b, right)?)
        }
        // Division is one of floats, but directly in `floor` and `ceil`.
        Div => (a.widened(), b.widened()),
        _ => alike(a, b),
    };
    Ok(match (&a, &b) {
        // Of constants: of one that is given a value by `each`, what remains is what it means.
        (Term::Int(a), Term::Int(b)) => Term::Int(ints(op, *a, *b)),
        _ => Term::Binary(op, Box::new(a), Box::new(b)),
    })
}

fn call(func: Func, args: &[Expr], names: &Names<'_>, e: &Expr) -> Result<Term, String> {
    let term = |e| Term::compile(e, names);
    match (func, args) {
        (Func::Floor | Func::Ceil, [Expr::Binary(BinaryOp::Div, a, b)]) => {
            let (a, b) = (term(a)?, term(b)?);
            if a.is_whole() && b.is_whole() {
                let up = func == Func::Ceil;
                if let (Term::Int(a), Term::Int(b)) = (&a, &b) {
                    return Ok(Term::Int(divide(*a, *b, up)));
                }
                return Ok(Term::Divide { up, a: Box::new(a), b: Box::new(b) });
            }
            let quotient =
                Term::Binary(BinaryOp::Div, Box::new(a.widened()), Box::new(b.widened()));
            Ok(Term::Call(func, vec![quotient]))
        }
        (Func::Floor | Func::Ceil | Func::Round, [a]) => {
            let a = term(a)?;
            Ok(if a.is_whole() { a } else { Term::Call(func, vec![a]) })
        }
        (Func::Abs, [a]) => Ok(Term::Call(func, vec![term(a)?])),
        (Func::Min | Func::Max, [a, b]) => {
            let (a, b) = alike(term(a)?, term(b)?);
            Ok(Term::Call(func, vec![a, b]))
        }
        _ => Err(format!(
            "`{e}`: expected floor, ceil, round, abs, min or max: other functions differ from \
             target to target"
        )),
    }
}

#[inline]
pub(super) fn ints(op: BinaryOp, a: i64, b: i64) -> i64 {
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Rem => a.checked_rem(b).unwrap_or(0),
        // As `whole_power` of kernels: exponents outside are the nearest inside.
        BinaryOp::Pow => a.wrapping_pow(b.clamp(0, 63) as u32),
        BinaryOp::Div | BinaryOp::Coalesce => 0, // not of whole numbers
        BinaryOp::BitOr | BinaryOp::BitXor | BinaryOp::BitAnd | BinaryOp::Shl | BinaryOp::Shr => {
            op.bits(a, b).unwrap_or(0)
        }
        BinaryOp::Lt => i64::from(a < b),
        BinaryOp::Le => i64::from(a <= b),
        BinaryOp::Gt => i64::from(a > b),
        BinaryOp::Ge => i64::from(a >= b),
        BinaryOp::Eq => i64::from(a == b),
        BinaryOp::Ne => i64::from(a != b),
        BinaryOp::And => i64::from(a != 0 && b != 0),
        BinaryOp::Or => i64::from(a != 0 || b != 0),
    }
}

#[allow(clippy::float_cmp, reason = "that is what the language's `==` asks for")]
#[inline]
pub(super) fn floats(op: BinaryOp, a: f32, b: f32) -> Number {
    match op {
        BinaryOp::Add => Number::Float(a + b),
        BinaryOp::Sub => Number::Float(a - b),
        BinaryOp::Mul => Number::Float(a * b),
        BinaryOp::Div => Number::Float(a / b),
        BinaryOp::Lt => Number::Int(i64::from(a < b)),
        BinaryOp::Le => Number::Int(i64::from(a <= b)),
        BinaryOp::Gt => Number::Int(i64::from(a > b)),
        BinaryOp::Ge => Number::Int(i64::from(a >= b)),
        BinaryOp::Eq => Number::Int(i64::from(a == b)),
        BinaryOp::Ne => Number::Int(i64::from(a != b)),
        // Of whole numbers only.
        _ => Number::Float(f32::NAN),
    }
}

#[inline]
pub(super) fn divide(a: i64, b: i64, up: bool) -> i64 {
    let (Some(quotient), Some(rest)) = (a.checked_div(b), a.checked_rem(b)) else { return 0 };
    let same_sign = (rest < 0) == (b < 0);
    if up {
        quotient + i64::from(rest != 0 && same_sign)
    } else {
        quotient - i64::from(rest != 0 && !same_sign)
    }
}

#[inline]
pub(super) fn apply(func: Func, mut args: impl Iterator<Item = Number>) -> Number {
    let mut next = || args.next().unwrap_or(Number::Float(f32::NAN));
    match (func, next()) {
        (Func::Abs, Number::Int(a)) => Number::Int(a.wrapping_abs()),
        (Func::Abs, Number::Float(a)) => Number::Float(a.abs()),
        (Func::Floor, a) => Number::Float(a.float().floor()),
        (Func::Ceil, a) => Number::Float(a.float().ceil()),
        (Func::Round, a) => Number::Float(a.float().round_ties_even()),
        (Func::Min, Number::Int(a)) => Number::Int(a.min(next().int())),
        (Func::Max, Number::Int(a)) => Number::Int(a.max(next().int())),
        (Func::Min, Number::Float(a)) => Number::Float(a.min(next().float())),
        (Func::Max, Number::Float(a)) => Number::Float(a.max(next().float())),
        _ => Number::Float(f32::NAN), // refused when it was compiled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nowhere;

    impl Memory for Nowhere {
        fn place(&self, place: Place) -> i64 {
            match place {
                Place::N => 5,
                Place::K => 130,
                Place::Rows => 8,
                Place::Columns => 300,
            }
        }

        fn read(&self, _: usize, index: &[Term]) -> Number {
            Number::Int(index[0].eval(self).int() * 2)
        }

        fn table(&self, table: usize, index: i64) -> Number {
            if table == 0 { Number::Float(index as f32 + 0.5) } else { Number::Int(7 * index) }
        }
    }

    fn compile(text: &str) -> Result<Term, String> {
        let parts = [("q".to_owned(), true, 1)];
        let tables = [("levels", false), ("grid", true)];
        let names = Names { parts: &parts, tables: &tables };
        Term::compile(&text.parse().expect("an expression"), &names)
    }

    #[test]
    fn whole_numbers_stay_whole_until_they_meet_a_float() {
        let eval = |text: &str| compile(text).expect(text).eval(&Nowhere);
        for (text, expected) in [
            ("floor(k / 128)", 1),
            ("ceil(K / 128)", 3),
            ("floor(-7 / 2)", -4),
            ("ceil(-7 / 2)", -3),
            ("floor(k / 0)", 0),
            ("k % 32", 2),
            ("floor(q[60] / 2 ** (4 * (k % 2))) % 16", 120 % 16),
            ("n < 5 ? 1 : max(n, 7)", 7),
            ("!(n == 5) || k > 3", 1),
            ("q[60] >> 4 & 15", 7),
            ("(k ^ 255 | n) << 1", 250),
            ("-9 >> 1", -5),
            ("k >> 99", 0),
            ("1 << -1", 1),
            ("grid[n] + 1", 36),
        ] {
            assert_eq!(eval(text), Number::Int(expected), "{text}");
        }
        assert_eq!(eval("levels[q[1]] * 2"), Number::Float(5.0));
        assert_eq!(eval("k / 4"), Number::Float(32.5));
        assert_eq!(eval("n < 3 ? 1 : 0.5"), Number::Float(0.5));
        // Each operation rounds to f32.
        assert_eq!(eval("16777216.0 + 0.5 + 0.5"), Number::Float(16_777_216.0));
    }

    #[test]
    fn what_no_target_could_do_alike_is_refused() {
        for (text, expected) in [
            ("exp(k)", "`exp(k)`: expected floor, ceil, round, abs, min or max"),
            ("q[0.5]", "expected a whole number, found `0.5`"),
            ("q[1][2]", "`q` takes 1 index(es), found 2"),
            ("q", "`q` takes 1 index(es), found 0"),
            ("level[1]", "unknown name `level` (did you mean `levels`?)"),
            ("0.5 % 2", "expected a whole number, found `0.5`"),
            ("n[1]", "unknown name `n`"),
            ("'a'", "expected a number, found text"),
            ("n ?? 1", "has no meaning on numbers"),
            ("0.5 & 2", "expected a whole number, found `0.5`"),
            ("n << levels[0]", "expected a whole number, found `levels[0]`"),
        ] {
            let error = compile(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
