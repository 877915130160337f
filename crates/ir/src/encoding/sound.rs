//! What must hold of stored elements, whatever values they stand for: checked where weights are loaded.
//!
//! Codes may be any bits. Floats beside them (scales, minimums) are finite, what is divided by is not zero, and an element that
//! picks one of another part picks one that is there; decoders would take the nearest in its place, in silence. Which
//! elements these are follows from the encoding's expressions.

use std::fmt;

use super::{Element, Encoding, Layout, Number, PartLayout, Term};
use crate::expr::BinaryOp;

/// An element that no weight of its encoding can hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsound {
    /// Which of the stored tensors it is in.
    pub tensor: usize,
    /// Where it is there, outermost dimension first; of blocks the row and the block in it.
    pub index: Vec<u64>,
    /// Of blocks, which of their fields it is in.
    pub field: Option<String>,
    /// What it may be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl fmt::Display for Unsound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unsound { index, field, expected, found, .. } = self;
        let what = field.as_ref().map_or("element".to_owned(), |f| format!("`{f}` of block"));
        write!(f, "{what} {index:?}: expected {expected}, found {found}")
    }
}

/// What an element must be.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sound {
    Finite,
    /// Finite, and something can be divided by it.
    Divisor,
    /// From 0 to below this.
    Below(u64),
}

impl Sound {
    fn holds(self, element: Element, bytes: &[u8]) -> bool {
        match self {
            Sound::Finite => element.is_finite(bytes),
            Sound::Divisor => element.is_finite(bytes) && element.read(bytes).float() != 0.0,
            Sound::Below(end) => {
                u64::try_from(element.read(bytes).int()).is_ok_and(|picked| picked < end)
            }
        }
    }
}

impl fmt::Display for Sound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sound::Finite => f.write_str("a finite number"),
            Sound::Divisor => f.write_str("a finite number that is not zero"),
            Sound::Below(end) => write!(f, "0 to {}", end.saturating_sub(1)),
        }
    }
}

impl Encoding {
    /// Checks the stored tensors of a weight of `rows` by `columns`: the first element that cannot be, if there is one. Only
    /// what is stored beside codes is read.
    pub fn check_stored(&self, rows: u64, columns: u64, tensors: &[&[u8]]) -> Result<(), Unsound> {
        // What has no layout has no tensors: whoever made these says so.
        let Ok(layout) = self.layout(rows, columns) else { return Ok(()) };
        for (part, described) in layout.parts.iter().enumerate() {
            let Some(sound) = self.sound(part, &layout) else { continue };
            let tensor = if layout.blocks.is_some() { 0 } else { part };
            let bytes = tensors.get(tensor).copied().unwrap_or_default();
            let unsound = |index, field, found| {
                Err(Unsound { tensor, index, field, expected: sound.to_string(), found })
            };
            let Some(blocks) = layout.blocks else {
                if let Some((i, found)) = first_unsound(described, bytes, sound) {
                    return unsound(index(i, &described.dims), None, found);
                }
                continue;
            };
            let (size, start) = (blocks.bytes as usize, described.offset as usize);
            let end = start + described.bytes() as usize;
            for (i, block) in (0..).zip(bytes.chunks_exact(size)) {
                if let Some((_, found)) = first_unsound(described, &block[start..end], sound) {
                    let field = self.0.parts[part].name.clone();
                    return unsound(vec![i / blocks.row, i % blocks.row], Some(field), found);
                }
            }
        }
        Ok(())
    }

    /// What must hold of each element of a part.
    fn sound(&self, part: usize, layout: &Layout) -> Option<Sound> {
        let (code, parts) = (self.code(), &self.0.parts);
        let scales = [Some(self.scale()), self.minimum(), self.zero()];
        let terms = || scales.into_iter().flatten();
        if !parts[part].element.is_whole() {
            let is_read = |term: &Term| any(term, &mut |t| reads(t, part));
            // Codes that are floats are any.
            if is_read(code) || !terms().any(is_read) {
                return None;
            }
            let divides = |t: &Term| match t {
                Term::Binary(BinaryOp::Div, _, b) => any(b, &mut |t| reads(t, part)),
                _ => false,
            };
            let is_divisor = terms().any(|term| any(term, &mut |t| divides(t)));
            return Some(if is_divisor { Sound::Divisor } else { Sound::Finite });
        }
        // The smallest dimension that it picks of.
        let mut end: Option<u64> = None;
        for term in terms().chain([code]) {
            any(term, &mut |t| {
                if let Term::Read { part: of, index, .. } = t {
                    let dims = layout.parts[*of].dims.iter();
                    let picked = index.iter().zip(dims).filter(|(i, _)| reads(i, part));
                    end = picked.map(|(_, dim)| *dim).chain(end).min();
                }
                false
            });
        }
        end.map(Sound::Below)
    }
}

/// The first element that is not sound: its number, and what it is.
fn first_unsound(part: &PartLayout, bytes: &[u8], sound: Sound) -> Option<(u64, String)> {
    let size = part.element.size() as usize;
    let mut all = bytes.chunks_exact(size);
    let i = all.position(|bytes| !sound.holds(part.element, bytes))?;
    let found = match part.element.read(&bytes[i * size..(i + 1) * size]) {
        Number::Int(n) => n.to_string(),
        Number::Float(x) => x.to_string(),
    };
    Some((i as u64, found))
}

/// Where the element number `i` is, outermost dimension first.
fn index(mut i: u64, dims: &[u64]) -> Vec<u64> {
    let mut places = Vec::new();
    for dim in dims.iter().rev() {
        places.insert(0, i % dim);
        i /= dim;
    }
    places
}

/// Whether it is an element of that part.
fn reads(term: &Term, part: usize) -> bool {
    matches!(term, Term::Read { part: of, .. } if *of == part)
}

/// Whether it holds of a term or of any term within.
fn any(term: &Term, holds: &mut dyn FnMut(&Term) -> bool) -> bool {
    holds(term)
        || match term {
            Term::Int(_) | Term::Float(_) | Term::Place(_) => false,
            Term::Read { index, .. } => index.iter().any(|t| any(t, holds)),
            Term::Table { index: a, .. } | Term::Widen(a) | Term::Neg(a) | Term::Not(a) => {
                any(a, holds)
            }
            Term::Binary(_, a, b) | Term::Divide { a, b, .. } => any(a, holds) || any(b, holds),
            Term::Call(_, args) => args.iter().any(|t| any(t, holds)),
            Term::Select(parts) => parts.iter().any(|t| any(t, holds)),
        }
}
