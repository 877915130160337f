//! Where an encoded weight has what, and which tensors hold it.

use super::packing::ROWS;
use super::term::Memory;
use super::{ALIGN, Element, Encoding, Number, Part, Place, Stored, Term};

/// Values and elements beyond this are mistakes.
const MAX_ELEMENTS: u64 = 1 << 48;

/// Where everything lies, for a weight of so many rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    /// One a part.
    pub parts: Vec<PartLayout>,
    /// Blocks of a row and bytes of each; `None` for tensors.
    pub blocks: Option<Blocks>,
    /// Bytes of the whole.
    pub bytes: u64,
}

/// The blocks of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Blocks of a row.
    pub row: u64,
    /// Values of a block.
    pub values: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

/// A part of a [`Layout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartLayout {
    /// Type of its elements.
    pub element: Element,
    /// Its dimensions; none for a single element.
    pub dims: Vec<u64>,
    /// Where it begins, in bytes: in its block, or in the whole.
    pub offset: u64,
}

/// A tensor that a checkpoint holds for a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Its element type; blocks are bytes.
    pub element: Element,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its size in bytes.
    pub bytes: u64,
    /// Where it begins among the weight's bytes.
    pub offset: u64,
    /// Number of its type in GGUF files, of blocks that have one.
    pub gguf: Option<u32>,
    /// Whether a checkpoint may hold a single element of it, which then stands for all.
    pub broadcast: bool,
    /// Whether it may be held in another type from which nothing is lost.
    pub adapts: bool,
}

impl StoredTensor {
    /// A tensor of plain elements.
    pub fn plain(name: String, element: Element, shape: Vec<u64>) -> StoredTensor {
        let count = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let bytes = count.and_then(|n| n.checked_mul(element.size())).unwrap_or(u64::MAX);
        StoredTensor {
            name,
            element,
            shape,
            bytes,
            offset: 0,
            broadcast: false,
            adapts: false,
            gguf: None,
        }
    }

    /// Whether a tensor of this type and shape holds it: in its own, in one that is widened to it without loss, or
    /// as a single element where that stands for all. Bytes may be called `u8` whatever they mean.
    pub fn is_held_by(&self, element: Element, shape: &[u64]) -> bool {
        let is_there = shape == self.shape || self.is_single(shape);
        is_there && (element == self.element || (self.adapts && self.takes(element)))
    }

    fn takes(&self, element: Element) -> bool {
        let halves = [Element::F16, Element::Bf16];
        (element == Element::U8 && self.element.size() == 1)
            || (self.element == Element::F32 && halves.contains(&element))
    }

    fn is_single(&self, shape: &[u64]) -> bool {
        self.broadcast && shape.iter().all(|d| *d == 1)
    }

    /// Its bytes, from those of a tensor that holds it in another type or as a single element; `None` where they are
    /// its own already.
    pub fn adapted(&self, element: Element, shape: &[u64], bytes: &[u8]) -> Option<Vec<u8>> {
        let narrow = element.size() != self.element.size();
        let repeat = shape != self.shape;
        if !narrow && !repeat {
            return None;
        }
        let widened: Vec<u8> = if narrow {
            let elements = bytes.chunks_exact(element.size() as usize);
            elements.flat_map(|x| element.read(x).float().to_le_bytes()).collect()
        } else {
            bytes.to_vec()
        };
        let count = self.bytes / self.element.size();
        Some(if repeat { widened.repeat(usize::try_from(count).ok()?) } else { widened })
    }
}

impl Encoding {
    /// Where a weight of `rows` by `columns` has what; an error if none can be so large, or of parts
    /// of blocks.
    pub fn layout(&self, rows: u64, columns: u64) -> Result<Layout, String> {
        let shown = || format!("[{rows}, {columns}]");
        if rows == 0 || columns == 0 || rows.checked_mul(columns).is_none_or(|n| n > MAX_ELEMENTS) {
            return Err(format!("{} is not stored as {}", shown(), self.name()));
        }
        if let Some(packing) = self.packing() {
            let bytes = packing.band(columns).checked_mul(rows.div_ceil(ROWS));
            let bytes = bytes.ok_or_else(|| format!("{} is not stored as {self}", shown()))?;
            return Ok(Layout { rows, columns, parts: Vec::new(), blocks: None, bytes });
        }
        let mut parts = Vec::new();
        if let Stored::Blocks { values, .. } = self.0.def.stored {
            if !columns.is_multiple_of(values) {
                return Err(format!(
                    "expected rows of whole blocks of {values} values for {}, found {}",
                    self.name(),
                    shown()
                ));
            }
            for part in &self.0.parts {
                parts.push(part.layout(part.offset, rows, columns)?);
            }
            let row = columns / values;
            let bytes = (rows * row).checked_mul(self.0.block);
            let bytes =
                bytes.ok_or_else(|| format!("{} is not stored as {}", shown(), self.name()))?;
            let blocks = Some(Blocks { row, values, bytes: self.0.block });
            return Ok(Layout { rows, columns, parts, blocks, bytes });
        }
        let mut end = 0u64;
        for part in &self.0.parts {
            let layout = part.layout(end, rows, columns)?;
            end = (end + layout.bytes()).next_multiple_of(ALIGN);
            parts.push(layout);
        }
        Ok(Layout { rows, columns, parts, blocks: None, bytes: end })
    }

    /// The tensors that a checkpoint holds for the weight `name`.
    pub fn tensors(
        &self,
        name: &str,
        rows: u64,
        columns: u64,
    ) -> Result<Vec<StoredTensor>, String> {
        let layout = self.layout(rows, columns)?;
        if self.packing().is_some() {
            return Err(format!("{self}: no checkpoint has it: it is made of what is stored"));
        }
        if let Some(blocks) = layout.blocks {
            return Ok(vec![StoredTensor {
                name: name.to_owned(),
                element: Element::U8,
                shape: vec![rows, blocks.row * blocks.bytes],
                bytes: layout.bytes,
                offset: 0,
                broadcast: false,
                adapts: false,
                gguf: self.0.def.gguf,
            }]);
        }
        let (owner, own) = name.split_at(name.rfind('.').map_or(0, |at| at + 1));
        let parts = self.0.parts.iter().zip(layout.parts);
        let tensors = parts.map(|(part, layout)| StoredTensor {
            name: format!("{owner}{}", part.stored.replace('*', own)),
            element: part.element,
            bytes: layout.bytes(),
            offset: layout.offset,
            shape: layout.dims,
            broadcast: part.broadcast,
            adapts: true,
            gguf: None,
        });
        Ok(tensors.collect())
    }

    /// The tensors that a checkpoint holds for the weight `name` of this shape, whose leading axes each of them has
    /// too. Offsets are those of the first matrix.
    pub fn tensors_of(&self, name: &str, shape: &[u64]) -> Result<Vec<StoredTensor>, String> {
        let [leading @ .., rows, columns] = shape else {
            return Err(format!("{self}: expected a matrix, found {shape:?}"));
        };
        let count = leading.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let large = || format!("{shape:?} is not stored as {self}");
        let mut tensors = self.tensors(name, *rows, *columns)?;
        for tensor in &mut tensors {
            tensor.shape.splice(..0, leading.iter().copied());
            let bytes = count.and_then(|n| tensor.bytes.checked_mul(n));
            tensor.bytes = bytes.filter(|n| *n > 0).ok_or_else(large)?;
        }
        Ok(tensors)
    }

    /// Of floats that neither vanish nor overflow, as an exponent for [`Encoding::random`].
    pub const TAME: i32 = -5;

    /// The tensors of a weight with random numbers; with an exponent `e` floats of magnitudes from 2^e to
    /// 2^(e+1), such as [`Encoding::TAME`], else any bytes at all.
    pub fn random(
        &self,
        (rows, columns): (u64, u64),
        exponent: Option<i32>,
        rng: &mut crate::random::Rng,
    ) -> Result<Vec<(StoredTensor, Vec<u8>)>, String> {
        let layout = self.layout(rows, columns)?;
        let tensors = self.tensors("", rows, columns)?.into_iter().enumerate();
        let all = tensors.map(|(i, tensor)| {
            let bytes = layout.random(i, tensor.bytes, exponent, rng);
            (tensor, bytes)
        });
        Ok(all.collect())
    }

    /// Whether weights of so many columns, of `first` rows and of `second`, are one of all their rows when
    /// what is stored of one is put behind what is stored of the other: groups begin anew with the second.
    pub fn joins(&self, first: u64, second: u64, columns: u64) -> Result<(), String> {
        let apart = || format!("{self}: rows {first} and {second} share what is stored of them");
        if self.packing().is_some() {
            return if first.is_multiple_of(ROWS) { Ok(()) } else { Err(apart()) };
        }
        let rows = first.checked_add(second).ok_or_else(apart)?;
        let [a, b, whole] = [first, second, rows].map(|rows| self.layout(rows, columns));
        let (a, b, whole) = (a?, b?, whole?);
        let add = |((a, b), whole): ((&PartLayout, &PartLayout), &PartLayout)| match (
            &a.dims[..],
            &b.dims[..],
            &whole.dims[..],
        ) {
            ([a, rest @ ..], [b, b_rest @ ..], [both, both_rest @ ..]) => {
                a + b == *both && rest == b_rest && rest == both_rest
            }
            _ => false,
        };
        let parts = a.parts.iter().zip(&b.parts).zip(&whole.parts);
        let groups = self.0.def.group.n.is_some_and(|n| first.is_multiple_of(n));
        let joins = groups && (a.blocks.is_some() || parts.into_iter().all(add));
        if joins { Ok(()) } else { Err(apart()) }
    }

    /// Bytes of a row of so many columns, where rows of a weight are a piece of its bytes. Of the packed form eight rows
    /// are: pieces of it begin at multiples of eight.
    pub fn row_bytes(&self, columns: u64) -> Option<u64> {
        match (self.packing(), &self.0.def.stored) {
            (Some(packing), _) => Some(packing.band(columns) / ROWS),
            (None, Stored::Blocks { .. }) => self.bytes(&[1, columns]),
            (None, Stored::Tensors { .. }) => None,
        }
    }

    /// Bytes of a weight of this shape, leading axes included; `None` for one that cannot be so.
    pub fn bytes(&self, shape: &[u64]) -> Option<u64> {
        let [leading @ .., rows, columns] = shape else { return None };
        let matrix = self.layout(*rows, *columns).ok()?.bytes;
        leading.iter().try_fold(matrix, |n, d| n.checked_mul(*d))
    }
}

impl Part {
    fn layout(&self, offset: u64, rows: u64, columns: u64) -> Result<PartLayout, String> {
        let at = Sizes { rows: rows as i64, columns: columns as i64 };
        let mut dims = Vec::new();
        for dim in &self.dims {
            dims.push(dim.eval(&at).int().try_into().unwrap_or(0));
        }
        let count = dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        if count.is_none_or(|n| n == 0 || n > MAX_ELEMENTS) {
            return Err(format!("`{}` cannot be of shape {dims:?}", self.name));
        }
        Ok(PartLayout { element: self.element, dims, offset })
    }
}

impl Layout {
    /// What a place stands for, of the value at row `n` and column `k`.
    pub(super) fn number(&self, place: Place, n: u64, k: u64) -> i64 {
        let number = match place {
            Place::N => n,
            Place::K => k,
            Place::Rows => self.rows,
            Place::Columns => self.columns,
        };
        number as i64
    }

    /// The stored tensor and the byte in it where the element of a part begins that the value at row `n` and column `k`
    /// reads. An index outside is the nearest inside.
    pub(super) fn place(
        &self,
        n: u64,
        k: u64,
        part: usize,
        index: impl Fn(usize) -> i64,
    ) -> (usize, usize) {
        let described = &self.parts[part];
        let (tensor, base) = match self.blocks {
            Some(b) => (0, (n * b.row + k / b.values) * b.bytes + described.offset),
            None => (part, 0),
        };
        let element = described
            .dims
            .iter()
            .enumerate()
            .fold(0, |at, (i, dim)| at * dim + index(i).clamp(0, *dim as i64 - 1) as u64);
        (tensor, (base + element * described.element.size()) as usize)
    }

    /// Random bytes of the stored tensor `tensor`, of which there are `bytes`; `exponent` as for
    /// [`Encoding::random`].
    pub fn random(
        &self,
        tensor: usize,
        bytes: u64,
        exponent: Option<i32>,
        rng: &mut crate::random::Rng,
    ) -> Vec<u8> {
        let mut all = vec![0; bytes as usize];
        rng.fill(&mut all);
        let parts = match self.blocks {
            Some(_) => &self.parts[..],
            None => &self.parts[tensor..=tensor],
        };
        let block = self.blocks.map_or(bytes, |b| b.bytes) as usize;
        let Some(exponent) = exponent else { return all };
        for block in all.chunks_exact_mut(block) {
            for part in parts {
                let start = if self.blocks.is_some() { part.offset as usize } else { 0 };
                let field = &mut block[start..start + part.bytes() as usize];
                let size = part.element.size() as usize;
                field.chunks_exact_mut(size).for_each(|e| part.element.tame(e, exponent));
            }
        }
        all
    }
}

impl PartLayout {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<u64>() * self.element.size()
    }
}

/// What dimensions are evaluated over.
struct Sizes {
    rows: i64,
    columns: i64,
}

impl Memory for Sizes {
    fn place(&self, place: Place) -> i64 {
        match place {
            Place::Rows => self.rows,
            Place::Columns => self.columns,
            Place::N | Place::K => 0,
        }
    }

    fn read(&self, _: usize, _: &[Term]) -> Number {
        Number::Int(0)
    }

    fn table(&self, _: usize, _: i64) -> Number {
        Number::Int(0)
    }
}
