//! Symbolic dimensions.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A size known only when a step is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Sym {
    /// Tokens in the step, over all sequences.
    T,
    /// Rows of output: tokens of the step that yield one, which are the last of each sequence unless others are
    /// asked for. At most as many as there are tokens.
    B,
    /// Context rows in the step: the sum over sequences of the rows their caches hold after it.
    S,
}

impl Sym {
    /// Every symbol, in printing order.
    pub const ALL: [Sym; 3] = [Sym::T, Sym::B, Sym::S];

    /// The symbol's name in IR text and in specs.
    pub const fn name(self) -> &'static str {
        match self {
            Sym::T => "T",
            Sym::B => "B",
            Sym::S => "S",
        }
    }
}

/// One dimension of a shape: a constant, or a constant multiple of a symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Dim {
    /// A size known when the checkpoint is bound.
    Const(u64),
    /// `times` · `sym`.
    Sym {
        /// The step size it scales with.
        sym: Sym,
        /// Rows per unit of `sym`; at least 1.
        times: u64,
    },
}

/// The sizes of one step (or their upper bounds, when buffers are planned).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Dims {
    /// Tokens.
    pub t: u64,
    /// Rows of output.
    pub b: u64,
    /// Context rows.
    pub s: u64,
    /// Token-context pairs: the elements of one head of a ragged `[H, T, S]` value.
    pub pairs: u64,
    /// Sequences.
    pub seqs: u64,
}

impl Dims {
    /// A step of the same tokens in which none sees more than `window` rows, its own included.
    #[must_use]
    pub const fn within(&self, window: u64) -> Dims {
        let before = self.seqs.saturating_mul(window.saturating_sub(1));
        let (rows, pairs) = (before.saturating_add(self.t), self.t.saturating_mul(window));
        let s = if rows < self.s { rows } else { self.s };
        let pairs = if pairs < self.pairs { pairs } else { self.pairs };
        Dims { s, pairs, ..*self }
    }

    /// The value of one symbol.
    pub const fn get(&self, sym: Sym) -> u64 {
        match sym {
            Sym::T => self.t,
            Sym::B => self.b,
            Sym::S => self.s,
        }
    }
}

impl Dim {
    /// The plain symbol `sym`.
    pub const fn sym(sym: Sym) -> Dim {
        Dim::Sym { sym, times: 1 }
    }

    /// The constant, if it is one.
    pub const fn as_const(self) -> Option<u64> {
        match self {
            Dim::Const(n) => Some(n),
            Dim::Sym { .. } => None,
        }
    }

    /// Its size under `dims`, saturating.
    pub const fn eval(self, dims: &Dims) -> u64 {
        match self {
            Dim::Const(n) => n,
            Dim::Sym { sym, times } => dims.get(sym).saturating_mul(times),
        }
    }

    /// The product of two dimensions, when it is again a dimension (not `T·T`) and does not
    /// overflow.
    pub fn product(self, other: Dim) -> Option<Dim> {
        match (self, other) {
            (Dim::Const(a), Dim::Const(b)) => Some(Dim::Const(a.checked_mul(b)?)),
            (Dim::Const(k), Dim::Sym { sym, times }) | (Dim::Sym { sym, times }, Dim::Const(k)) => {
                Some(Dim::Sym { sym, times: times.checked_mul(k)? })
            }
            (Dim::Sym { .. }, Dim::Sym { .. }) => None,
        }
    }

    /// The product of a whole shape.
    pub fn product_of(dims: &[Dim]) -> Option<Dim> {
        dims.iter().try_fold(Dim::Const(1), |acc, &d| acc.product(d))
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Const(n) => write!(f, "{n}"),
            Dim::Sym { sym, times: 1 } => f.write_str(sym.name()),
            Dim::Sym { sym, times } => write!(f, "{}*{times}", sym.name()),
        }
    }
}

impl From<u64> for Dim {
    fn from(n: u64) -> Dim {
        Dim::Const(n)
    }
}

impl From<Sym> for Dim {
    fn from(sym: Sym) -> Dim {
        Dim::sym(sym)
    }
}
