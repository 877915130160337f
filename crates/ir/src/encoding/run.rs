//! Terms at many columns of a row at once: what [`Term::eval`] yields at each of them, to the bit. A tree is walked once
//! for all, so that walking costs nothing beside the numbers; models have billions of them.

use super::decoder::Decoder;
use super::term::{divide, floats, ints};
use super::{Number, Place, Term};
use crate::expr::{BinaryOp, Func};

/// Columns of a [`Run`].
pub(super) const RUN: usize = 64;

/// A number for each column, all of one type.
#[allow(clippy::large_enum_variant, reason = "both are a few vectors on the stack")]
pub(super) enum Numbers {
    Int([i64; RUN]),
    Float([f32; RUN]),
}

impl Numbers {
    /// As floats, rounded to nearest even.
    pub(super) fn floats(self) -> [f32; RUN] {
        match self {
            Numbers::Int(all) => all.map(|i| i as f32),
            Numbers::Float(all) => all,
        }
    }

    /// As whole numbers; what is none is 0.
    pub(super) fn ints(self) -> [i64; RUN] {
        match self {
            Numbers::Int(all) => all,
            Numbers::Float(_) => [0; RUN],
        }
    }

    /// That of one column.
    pub(super) fn get(&self, i: usize) -> Number {
        match self {
            Numbers::Int(all) => Number::Int(all[i]),
            Numbers::Float(all) => Number::Float(all[i]),
        }
    }
}

/// Columns of a row of a weight.
pub(super) struct Run<'a> {
    decoder: &'a Decoder<'a>,
    n: u64,
    columns: [u64; RUN],
}

impl<'a> Run<'a> {
    /// Columns `from`, `from + step` and so on; those from `until` on are the last one before it.
    pub(super) fn new(
        decoder: &'a Decoder<'a>,
        n: u64,
        (from, until): (u64, u64),
        step: u64,
    ) -> Run<'a> {
        let mut column = from;
        let columns = std::array::from_fn(|_| {
            let now = column;
            if now + step < until {
                column += step;
            }
            now
        });
        Run { decoder, n, columns }
    }

    /// What a term comes to.
    pub(super) fn eval(&self, term: &Term) -> Numbers {
        match term {
            Term::Int(i) => Numbers::Int([*i; RUN]),
            Term::Float(x) => Numbers::Float([*x; RUN]),
            Term::Place(Place::K) => Numbers::Int(self.columns.map(|k| k as i64)),
            Term::Place(place) => {
                Numbers::Int([self.decoder.layout().number(*place, self.n, 0); RUN])
            }
            Term::Read { part, whole, index } => self.read(*part, *whole, index),
            Term::Table { table, whole, index } => {
                let (table, at) =
                    (&self.decoder.encoding().tables()[*table], self.eval(index).ints());
                of_type(*whole, |i| table.entry(at[i]))
            }
            Term::Widen(a) => Numbers::Float(self.eval(a).floats()),
            Term::Neg(a) => match self.eval(a) {
                Numbers::Int(all) => Numbers::Int(all.map(i64::wrapping_neg)),
                Numbers::Float(all) => Numbers::Float(all.map(|x| -x)),
            },
            Term::Not(a) => Numbers::Int(self.eval(a).ints().map(|a| i64::from(a == 0))),
            Term::Binary(op, a, b) => match (self.eval(a), self.eval(b)) {
                (Numbers::Int(a), Numbers::Int(b)) => Numbers::Int(each_int(*op, a, &b)),
                (a, b) => each_float(*op, &a.floats(), &b.floats()),
            },
            Term::Divide { up, a, b } => {
                let (a, b) = (self.eval(a).ints(), self.eval(b).ints());
                Numbers::Int(std::array::from_fn(|i| divide(a[i], b[i], *up)))
            }
            Term::Call(func, args) => self.call(*func, args),
            Term::Select(parts) => {
                // Reading what is not taken does no harm: indices outside are the nearest inside.
                let [c, a, b] = &**parts;
                let (c, a, b) = (self.eval(c).ints(), self.eval(a), self.eval(b));
                of_type(parts[1].is_whole(), |i| if c[i] == 0 { b.get(i) } else { a.get(i) })
            }
        }
    }

    fn call(&self, func: Func, args: &[Term]) -> Numbers {
        let args: Vec<Numbers> = args.iter().map(|a| self.eval(a)).collect();
        let whole = matches!(args.first(), Some(Numbers::Int(_)));
        of_type(whole, |i| super::term::apply(func, args.iter().map(|a| a.get(i))))
    }

    fn read(&self, part: usize, whole: bool, index: &[Term]) -> Numbers {
        let element = self.decoder.layout().parts[part].element;
        let places = self.places(part, index);
        of_type(whole, |i| element.read(self.decoder.bytes(places[i], element.size())))
    }

    /// The bytes that a part of elements of one has at an index.
    pub(super) fn bytes(&self, part: usize, index: &[Term]) -> [u8; RUN] {
        self.places(part, index).map(|at| self.decoder.bytes(at, 1).first().copied().unwrap_or(0))
    }

    /// The stored tensors and the bytes in them where elements of a part begin.
    fn places(&self, part: usize, index: &[Term]) -> [(usize, usize); RUN] {
        let layout = self.decoder.layout();
        let index: Vec<[i64; RUN]> = index.iter().map(|i| self.eval(i).ints()).collect();
        std::array::from_fn(|i| layout.place(self.n, self.columns[i], part, |d| index[d][i]))
    }
}

fn of_type(whole: bool, number: impl Fn(usize) -> Number) -> Numbers {
    if whole {
        Numbers::Int(std::array::from_fn(|i| number(i).int()))
    } else {
        Numbers::Float(std::array::from_fn(|i| number(i).float()))
    }
}

/// Makes a loop of each operator, in which the compiler knows it.
macro_rules! known {
    ($op:expr, $known:ident => $loop:expr) => {
        known!($op, $known => $loop; Add Sub Mul Div Rem Pow Coalesce BitOr BitXor BitAnd Shl Shr
            Lt Le Gt Ge Eq Ne And Or)
    };
    ($op:expr, $known:ident => $loop:expr; $($each:ident)+) => {
        match $op {
            $(BinaryOp::$each => {
                const $known: BinaryOp = BinaryOp::$each;
                $loop
            })+
        }
    };
}

fn each_int(op: BinaryOp, mut a: [i64; RUN], b: &[i64; RUN]) -> [i64; RUN] {
    known!(op, OP => a.iter_mut().zip(b).for_each(|(a, b)| *a = ints(OP, *a, *b)));
    a
}

fn each_float(op: BinaryOp, a: &[f32; RUN], b: &[f32; RUN]) -> Numbers {
    let whole = matches!(floats(op, 0.0, 0.0), Number::Int(_));
    known!(op, OP => of_type(whole, |i| floats(OP, a[i], b[i])))
}
