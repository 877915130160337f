//! The type of a rule's variable, as written in `vars`.

use std::collections::HashMap;
use std::fmt;

use infernum_frontend_hf::spec::Source;
use infernum_ir::expr::{BinaryOp, Expr, Value};
use infernum_ir::{DType, Dim, SourceError, Sym, TensorType, Type};

use super::notation::{at, expression};

/// What a variable of a rule may be, which is also what the rule is tried on.
///
/// ```text
/// [T, H*D]      dimensions: T, B, S; constants in capitals, sums and products of them; numbers
/// [n, K]        in lower case, a dimension of any kind
/// [.., K]       `..` for any number of dimensions before
/// const [N, K]  a weight, or computed from weights alone
/// i32 [T]       of this element type; without one, of any
/// u32 [m] < n   indices into an axis of that size
/// [T, H] >= 0   what trials and checks of kernels have no negative values for, as it never has; nothing is known of it otherwise
/// const encoded [N, K]  a weight stored in an encoding, as it is stored or in its packed form; a `const [N, K]` may be
///               in the packed form, which kernels read
/// const packed [N, K]  one in its packed form
///               (activations `[T, K]` may be of 8 bits, as products take them: see `quantise_rows`)
/// state [G, D]  a version of a KV-cache plane of rows
/// slot [H, K, V]  one of a plane that has a state of a fixed size for each sequence
/// [N]?          an operand that may be left out
/// shape [T, N]  not a value: what an attribute that is a shape may be
/// ```
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a word of its own in the notation")]
pub struct VarType {
    /// Element type; any when `None`.
    pub dtype: Option<DType>,
    /// Whether it is a weight stored in an encoding.
    pub encoded: bool,
    /// Whether it is one in its packed form.
    pub packed: bool,
    /// Outermost first.
    pub dims: Vec<DimPattern>,
    /// Whether it must be constant.
    pub constant: bool,
    /// Whether it is a KV-cache state: of rows, unless it is a `slot`.
    pub state: bool,
    /// Whether it is a state of a fixed size for each sequence.
    pub slot: bool,
    /// Whether it may be left out.
    pub optional: bool,
    /// For indices, what they are below.
    pub below: Option<DimPattern>,
    /// Whether it is tried on values that are not negative.
    pub not_negative: bool,
}

/// One dimension of a [`VarType`].
#[derive(Clone, Debug, PartialEq)]
pub enum DimPattern {
    /// `..`
    Rest,
    /// `n`: a constant, or a multiple of a symbol.
    Any(String),
    /// `T`, `4`, `K`, `H*D`.
    Size(Expr),
}

/// What the dimension variables of a rule stand for.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    /// Each variable.
    pub vars: HashMap<String, Dim>,
    /// What `..` stands for.
    pub rest: Option<Vec<Dim>>,
}

/// Reads a type; `true` when it is that of a shape attribute.
pub(super) fn parse(source: &Source, text: &str) -> Result<(VarType, bool), SourceError> {
    let expected = |slice: &str| {
        at(
            source,
            slice,
            "expected a type such as `[T, K]`, `const [N, K]`, `const encoded [N, K]`, `state [G, D]`, `slot [H, K]`, `i32 [T]`, `[N]?` or \
             `u32 [m] < n`",
        )
    };
    let (head, rest) = text.split_once('[').ok_or_else(|| expected(text))?;
    let (dims, tail) = rest.split_once(']').ok_or_else(|| expected(text))?;
    let dims = match dims.trim() {
        "" => Vec::new(),
        dims => dims.split(',').map(|d| dim(source, d.trim())).collect::<Result<_, _>>()?,
    };
    if let Some(i) = dims.iter().skip(1).position(|d| *d == DimPattern::Rest) {
        let message = format!("`..` stands first, not in place {}", i + 2);
        return Err(at(source, text, message));
    }
    let tail = tail.trim();
    let not_negative = tail.strip_prefix(">=").is_some_and(|least| least.trim() == "0");
    let below = match tail.strip_prefix('<') {
        Some(size) => Some(dim(source, size.trim())?),
        None if not_negative || matches!(tail, "" | "?") => None,
        None => return Err(expected(tail)),
    };
    let mut ty = VarType {
        dtype: None,
        encoded: false,
        packed: false,
        dims,
        constant: false,
        state: false,
        slot: false,
        optional: tail == "?",
        below,
        not_negative,
    };
    let mut shape = false;
    for word in head.split_whitespace() {
        match (word, word.parse::<DType>()) {
            ("const", _) => ty.constant = true,
            ("encoded", _) => ty.encoded = true,
            ("packed", _) => (ty.encoded, ty.packed) = (true, true),
            ("state", _) => ty.state = true,
            ("slot", _) => (ty.state, ty.slot) = (true, true),
            ("shape", _) => shape = true,
            (_, Ok(dtype)) => ty.dtype = Some(dtype),
            _ => return Err(expected(word)),
        }
    }
    Ok((ty, shape))
}

fn dim(source: &Source, text: &str) -> Result<DimPattern, SourceError> {
    if text == ".." {
        return Ok(DimPattern::Rest);
    }
    let e = expression(source, text)?;
    if let Expr::Var(name) = &e
        && name.starts_with(|c: char| c.is_ascii_lowercase())
    {
        return Ok(DimPattern::Any(name.clone()));
    }
    if is_size(&e) {
        return Ok(DimPattern::Size(e));
    }
    let message = "expected a dimension: T, B, S, a number, a name in capitals, or a sum or product \
                   of them; or alone, a name in lower case";
    Err(at(source, text, message))
}

fn is_size(e: &Expr) -> bool {
    match e {
        Expr::Lit(Value::Num(n)) => *n >= 1.0 && n.fract() == 0.0 && *n < 1e9,
        Expr::Var(name) => name.starts_with(|c: char| c.is_ascii_uppercase()),
        Expr::Binary(BinaryOp::Add | BinaryOp::Mul, a, b) => {
            let symbol = |e: &Expr| matches!(e, Expr::Var(n) if self::symbol(n).is_some());
            is_size(a) && is_size(b) && !symbol(a) && !symbol(b)
        }
        _ => false,
    }
}

fn symbol(name: &str) -> Option<Sym> {
    Sym::ALL.into_iter().find(|s| s.name() == name)
}

impl DimPattern {
    /// Calls `visit` with every variable.
    pub fn names<'a>(&'a self, visit: &mut dyn FnMut(&'a str)) {
        match self {
            DimPattern::Rest => {}
            DimPattern::Any(name) => visit(name),
            DimPattern::Size(e) => e.names(&mut |n| {
                if symbol(n).is_none() {
                    visit(n);
                }
            }),
        }
    }

    /// The dimension, where its variables are known.
    pub fn eval(&self, sizes: &Sizes) -> Option<Dim> {
        match self {
            DimPattern::Rest => None,
            DimPattern::Any(name) => sizes.vars.get(name).copied(),
            DimPattern::Size(Expr::Var(n)) if symbol(n).is_some() => symbol(n).map(Dim::sym),
            DimPattern::Size(e) => {
                let number = |n: &str| {
                    sizes.vars.get(n).and_then(|d| d.as_const()).map(|n| Value::Num(n as f64))
                };
                match e.eval(&number) {
                    Ok(Value::Num(n)) if (0.0..1e15).contains(&n) => Some(Dim::Const(n as u64)),
                    _ => None,
                }
            }
        }
    }

    /// Whether `dim` fits what is known; learns what a variable on its own stands for.
    fn matches(&self, dim: Dim, sizes: &mut Sizes) -> bool {
        if let Some(known) = self.eval(sizes) {
            return known == dim;
        }
        match self {
            DimPattern::Any(name) | DimPattern::Size(Expr::Var(name)) => {
                sizes.vars.insert(name.clone(), dim);
                matches!(self, DimPattern::Any(_)) || dim.as_const().is_some()
            }
            _ => dim.as_const().is_some(),
        }
    }
}

impl VarType {
    /// Whether `shape` is one that these dimensions describe.
    pub fn fits_shape(&self, shape: &[Dim], sizes: &mut Sizes) -> bool {
        let mut dims = &self.dims[..];
        let mut shape = shape;
        if let [DimPattern::Rest, tail @ ..] = dims {
            let Some(lead) = shape.len().checked_sub(tail.len()) else { return false };
            let rest = sizes.rest.get_or_insert_with(|| shape[..lead].to_vec());
            if *rest != shape[..lead] {
                return false;
            }
            (dims, shape) = (tail, &shape[lead..]);
        }
        dims.len() == shape.len() && dims.iter().zip(shape).all(|(p, d)| p.matches(*d, sizes))
    }

    fn fits_encoding(&self, ty: &TensorType) -> bool {
        match &ty.encoding {
            None => !self.encoded,
            // Activations of 8 bits, which products alone take.
            Some(_) if !ty.constant => !self.encoded,
            Some(encoding) if encoding.packing().is_some() => self.encoded || self.constant,
            Some(_) => self.encoded && !self.packed,
        }
    }

    /// Whether `ty` is one that this describes, given what the variables stand for already.
    pub fn fits(&self, ty: &Type, sizes: &mut Sizes) -> bool {
        let dtype = |d: DType| self.dtype.is_none_or(|want| want == d);
        match ty {
            Type::State(s) => {
                self.state
                    && self.slot == s.is_slot()
                    && dtype(s.dtype)
                    && self.fits_shape(&s.dims(), sizes)
            }
            Type::Tensor(t) => {
                !self.state
                    && self.fits_encoding(t)
                    && dtype(t.dtype)
                    && (t.constant || !self.constant)
                    && self.fits_shape(&t.shape, sizes)
            }
        }
    }
}

impl fmt::Display for DimPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DimPattern::Rest => f.write_str(".."),
            DimPattern::Any(name) => f.write_str(name),
            DimPattern::Size(e) => write!(f, "{e}"),
        }
    }
}

/// As it is written.
impl fmt::Display for VarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.constant, "const "),
            (self.packed, "packed "),
            (self.encoded && !self.packed, "encoded "),
            (self.state && !self.slot, "state "),
            (self.slot, "slot "),
        ];
        words.iter().filter(|(is, _)| *is).try_for_each(|(_, word)| f.write_str(word))?;
        self.dtype.map_or(Ok(()), |d| write!(f, "{d} "))?;
        let dims: Vec<String> = self.dims.iter().map(ToString::to_string).collect();
        write!(f, "[{}]{}", dims.join(", "), if self.optional { "?" } else { "" })?;
        self.below.as_ref().map_or(Ok(()), |below| write!(f, " < {below}"))?;
        f.write_str(if self.not_negative { " >= 0" } else { "" })
    }
}
