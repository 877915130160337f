//! Encodings: how the values of a weight are stored.
//!
//! A weight's type says what it means, `[N, K]` of floats; its encoding says where each value comes
//! from. What is stored is either blocks of one tensor, each with fields, or several tensors beside one
//! another; a value is `code * scale - minimum`, three expressions over its row `n`, its column `k`, the
//! sizes `N` and `K`, and what is stored. Further leading axes (experts) repeat the whole.
//!
//! In memory, on every target, a matrix is its stored tensors one after another, each but a single one
//! begun at a multiple of [`ALIGN`] bytes.

mod decoder;
mod element;
mod term;

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use decoder::Decoder;
pub use element::Element;
pub use term::{Number, Place, Term};

use crate::expr::{Expr, ExprError};
use crate::names::is_name;
use term::{Memory, Names};

/// Where tensors that lie beside one another begin, in bytes.
pub const ALIGN: u64 = 16;

/// Values and elements beyond this are mistakes.
const MAX_ELEMENTS: u64 = 1 << 48;

/// How values are stored; equal when the definitions are. Cloning is cheap.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "EncodingDef", into = "EncodingDef")]
pub struct Encoding(Arc<Compiled>);

/// An encoding as its file says it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncodingDef {
    /// Its name in types.
    pub name: String,
    /// What it is and where it comes from.
    pub doc: String,
    /// What is stored.
    pub stored: Stored,
    /// Constant lists that the expressions may look into.
    pub tables: Vec<(String, Vec<f64>)>,
    /// The values that share scale and minimum.
    pub group: Group,
    /// What is stored of each value.
    pub code: Code,
    /// What a code is multiplied by: an expression that is the same throughout a group.
    pub scale: String,
    /// What is then subtracted; the same throughout a group.
    pub minimum: Option<String>,
    /// A condition on the keys of a checkpoint's `quantization_config`, under which its weights may be
    /// so.
    pub when: Option<String>,
    /// Number of the type in GGUF files.
    pub gguf: Option<u32>,
}

/// What is stored. Types are written `f16` for one element, `u8 [32]` for several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Stored {
    /// Blocks along K, in one tensor.
    Blocks {
        /// Values of a block.
        values: u64,
        /// Its fields in order, without gaps: names and types.
        fields: Vec<(String, String)>,
    },
    /// Tensors whose names differ in the last part.
    Tensors {
        /// The last part of the name of the weight that they stand for.
        of: String,
        /// Last parts of their names, and types; dimensions are expressions over N and K.
        tensors: Vec<(String, String)>,
    },
}

/// A rectangle of values; an extent left out is that of the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Rows.
    pub n: Option<u64>,
    /// Columns.
    pub k: Option<u64>,
}

/// What is stored of a value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Code {
    /// What kind of number it is.
    pub kind: CodeKind,
    /// Bits that it needs.
    pub bits: u32,
    /// The number.
    pub value: String,
}

/// Kinds of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "named as usual")]
pub enum CodeKind {
    /// A whole number from 0 on.
    Unsigned,
    /// A whole number in two's complement.
    Signed,
    E4m3,
    E5m2,
    E2m1,
    /// An entry of a table.
    Table,
}

/// A definition that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EncodingFault {
    /// What it is about.
    pub of: FaultIn,
    /// Byte offset in that text.
    pub at: usize,
    /// What was expected and found.
    pub message: String,
}

/// A text of a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after the definition's fields")]
pub enum FaultIn {
    Name,
    /// A field or tensor.
    Part(usize),
    Code,
    Scale,
    Minimum,
    When,
}

struct Compiled {
    def: EncodingDef,
    parts: Vec<Part>,
    /// Bytes of a block; 0 for tensors.
    block: u64,
    tables: Vec<Vec<f32>>,
    code: Term,
    scale: Term,
    minimum: Option<Term>,
    when: Option<Expr>,
}

/// A field or a tensor.
struct Part {
    name: String,
    element: Element,
    dims: Vec<Term>,
    /// Where a field begins in its block.
    offset: u64,
}

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
}

impl Encoding {
    /// Checks and compiles a definition.
    pub fn new(def: EncodingDef) -> Result<Encoding, EncodingFault> {
        let fault = |of, message: String| EncodingFault { of, at: 0, message };
        if !is_name(&def.name) || def.name.parse::<crate::DType>().is_ok() {
            let message =
                "expected a name of letters, digits, `_`, `.` and `-` that is no element type";
            return Err(fault(FaultIn::Name, message.to_owned()));
        }
        let (parts, block) = parts(&def)?;
        let known: Vec<(String, bool, usize)> =
            parts.iter().map(|p| (p.name.clone(), p.element.is_whole(), p.dims.len())).collect();
        if let Some((name, _)) = def.tables.iter().find(|(_, list)| list.is_empty()) {
            return Err(fault(FaultIn::Name, format!("table `{name}` is empty")));
        }
        let names = Names { parts: &known, tables: &def.tables };
        let term = |of, text: &str| {
            let e: Expr = text.parse().map_err(|e: ExprError| EncodingFault {
                of,
                at: e.at,
                message: e.message,
            })?;
            Term::compile(&e, &names).map_err(|message| fault(of, message))
        };
        let code = term(FaultIn::Code, &def.code.value)?;
        let scale = term(FaultIn::Scale, &def.scale)?.widened();
        let minimum = def.minimum.as_ref().map(|text| term(FaultIn::Minimum, text)).transpose()?;
        let is_integer = matches!(def.code.kind, CodeKind::Unsigned | CodeKind::Signed);
        if is_integer != code.is_whole() || !(1..=16).contains(&def.code.bits) {
            let found = if code.is_whole() { "a whole number" } else { "a float" };
            let message = format!(
                "expected a code of 1 to 16 bits of kind {:?}, found {found} of {} bits",
                def.code.kind, def.code.bits
            );
            return Err(fault(FaultIn::Code, message));
        }
        if [def.group.n, def.group.k].contains(&Some(0)) {
            return Err(fault(FaultIn::Scale, "expected groups of at least one value".to_owned()));
        }
        let when = def.when.as_ref().map(|text| text.parse::<Expr>()).transpose();
        let when =
            when.map_err(|e| EncodingFault { of: FaultIn::When, at: e.at, message: e.message });
        let tables = def.tables.iter().map(|(_, list)| list.iter().map(|x| *x as f32).collect());
        Ok(Encoding(Arc::new(Compiled {
            tables: tables.collect(),
            parts,
            block,
            code,
            scale,
            minimum: minimum.map(Term::widened),
            when: when?,
            def,
        })))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.def.name
    }

    /// What its file says.
    pub fn def(&self) -> &EncodingDef {
        &self.0.def
    }

    /// The condition on `quantization_config`, if there is one.
    pub fn when(&self) -> Option<&Expr> {
        self.0.when.as_ref()
    }

    /// What is stored of a value.
    pub fn code(&self) -> &Term {
        &self.0.code
    }

    /// The scale of a value, a float.
    pub fn scale(&self) -> &Term {
        &self.0.scale
    }

    /// The minimum of a value, a float.
    pub fn minimum(&self) -> Option<&Term> {
        self.0.minimum.as_ref()
    }

    /// The tables, as decoding reads them.
    pub fn tables(&self) -> &[Vec<f32>] {
        &self.0.tables
    }

    /// Where a weight of `rows` by `columns` has what; an error if none can be so large, or of parts
    /// of blocks.
    pub fn layout(&self, rows: u64, columns: u64) -> Result<Layout, String> {
        let shown = || format!("[{rows}, {columns}]");
        if rows == 0 || columns == 0 || rows.checked_mul(columns).is_none_or(|n| n > MAX_ELEMENTS) {
            return Err(format!("{} is not stored as {}", shown(), self.name()));
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
            let bytes = rows * row * self.0.block;
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
        if let Some(blocks) = layout.blocks {
            return Ok(vec![StoredTensor {
                name: name.to_owned(),
                element: Element::U8,
                shape: vec![rows, blocks.row * blocks.bytes],
                bytes: layout.bytes,
                offset: 0,
            }]);
        }
        let owner = name.rfind('.').map_or("", |at| &name[..=at]);
        let parts = self.0.parts.iter().zip(layout.parts);
        let tensors = parts.map(|(part, layout)| StoredTensor {
            name: format!("{owner}{}", part.name),
            element: part.element,
            bytes: layout.bytes(),
            offset: layout.offset,
            shape: layout.dims,
        });
        Ok(tensors.collect())
    }

    /// The tensors of a weight with random numbers; with `tame`, floats of magnitudes around 2^-5, else
    /// any bytes at all.
    pub fn random(
        &self,
        (rows, columns): (u64, u64),
        tame: bool,
        rng: &mut crate::random::Rng,
    ) -> Result<Vec<(StoredTensor, Vec<u8>)>, String> {
        let layout = self.layout(rows, columns)?;
        let mut all = Vec::new();
        for (i, tensor) in self.tensors("", rows, columns)?.into_iter().enumerate() {
            let mut bytes = vec![0; tensor.bytes as usize];
            rng.fill(&mut bytes);
            let parts = match layout.blocks {
                Some(_) => &layout.parts[..],
                None => &layout.parts[i..=i],
            };
            let block = layout.blocks.map_or(tensor.bytes, |b| b.bytes) as usize;
            for block in bytes.chunks_exact_mut(block).filter(|_| tame) {
                for part in parts {
                    let start = if layout.blocks.is_some() { part.offset as usize } else { 0 };
                    let field = &mut block[start..start + part.bytes() as usize];
                    let size = part.element.size() as usize;
                    field.chunks_exact_mut(size).for_each(|e| part.element.tame(e));
                }
            }
            all.push((tensor, bytes));
        }
        Ok(all)
    }

    /// Whether a weight of this name may be stored so.
    pub fn is_for(&self, name: &str) -> bool {
        match &self.0.def.stored {
            Stored::Blocks { .. } => true,
            Stored::Tensors { of, .. } => name.rsplit('.').next() == Some(of),
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

    fn table(&self, _: usize, _: i64) -> f32 {
        0.0
    }
}

/// The parts of a definition, and the bytes of a block.
fn parts(def: &EncodingDef) -> Result<(Vec<Part>, u64), EncodingFault> {
    let (list, is_block) = match &def.stored {
        Stored::Blocks { fields, .. } => (fields, true),
        Stored::Tensors { tensors, .. } => (tensors, false),
    };
    let (mut parts, mut end) = (Vec::<Part>::new(), 0u64);
    for (i, (name, ty)) in list.iter().enumerate() {
        let fault = |message: String| EncodingFault { of: FaultIn::Part(i), at: 0, message };
        let (element, dims) = part_type(ty).map_err(fault)?;
        let constant = dims.iter().all(|d| matches!(d, Term::Int(n) if (1..1 << 20).contains(n)));
        if is_block && (dims.len() > 1 || !constant) {
            return Err(fault(format!(
                "expected a field such as `f16` or `u8 [32]`, found `{ty}`"
            )));
        }
        let taken = parts.iter().any(|p| p.name == *name)
            || def.tables.iter().any(|(table, _)| table == name)
            || Place::ALL.iter().any(|(_, place)| place == name);
        if taken || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            let message =
                format!("expected a name of its own, of letters, digits and `_`, found `{name}`");
            return Err(fault(message));
        }
        let count = if let [Term::Int(n)] = dims[..] { n as u64 } else { 1 };
        parts.push(Part { name: name.clone(), element, dims, offset: end });
        end += count * element.size();
    }
    let values = if let Stored::Blocks { values, .. } = def.stored { values } else { 1 };
    if parts.is_empty() || !(1..1 << 20).contains(&values) {
        let message = "expected at least one stored part, and blocks of at least one value";
        return Err(EncodingFault { of: FaultIn::Name, at: 0, message: message.to_owned() });
    }
    Ok((parts, if is_block { end } else { 0 }))
}

/// `f16`, or `f32 [ceil(N / 128), K]`.
fn part_type(text: &str) -> Result<(Element, Vec<Term>), String> {
    let (element, dims) = match text.split_once('[') {
        None => (text, None),
        Some((element, rest)) => match rest.trim_end().strip_suffix(']') {
            Some(dims) => (element, Some(dims)),
            None => return Err(format!("expected `]` at the end of `{text}`")),
        },
    };
    let element = element.trim().parse()?;
    let names = Names { parts: &[], tables: &[] };
    let (mut list, mut depth, mut start) = (Vec::new(), 0, 0);
    let dims = dims.unwrap_or_default();
    for (i, c) in dims.char_indices().chain([(dims.len(), ',')]) {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 && !dims.is_empty() => {
                let text = dims[start..i].trim();
                let e: Expr = text.parse().map_err(|e: ExprError| format!("`{text}`: {e}"))?;
                let term = Term::compile(&e, &names)?;
                let over_sizes = !mentions(&term, Place::N) && !mentions(&term, Place::K);
                if !term.is_whole() || !over_sizes {
                    return Err(format!("expected a whole number over N and K, found `{text}`"));
                }
                list.push(term);
                start = i + 1;
            }
            _ => {}
        }
    }
    if list.len() > 4 {
        Err("expected at most 4 dimensions".to_owned())
    } else {
        Ok((element, list))
    }
}

fn mentions(term: &Term, place: Place) -> bool {
    let all = |terms: &[Term]| terms.iter().any(|t| mentions(t, place));
    match term {
        Term::Place(found) => *found == place,
        Term::Int(_) | Term::Float(_) => false,
        Term::Widen(a) | Term::Neg(a) | Term::Not(a) | Term::Table { index: a, .. } => {
            mentions(a, place)
        }
        Term::Binary(_, a, b) | Term::Divide { a, b, .. } => {
            mentions(a, place) || mentions(b, place)
        }
        Term::Read { index, .. } => all(index),
        Term::Call(_, args) => all(args),
        Term::Select(parts) => all(&parts[..]),
    }
}

impl TryFrom<EncodingDef> for Encoding {
    type Error = EncodingFault;

    fn try_from(def: EncodingDef) -> Result<Encoding, EncodingFault> {
        Encoding::new(def)
    }
}

impl From<Encoding> for EncodingDef {
    fn from(encoding: Encoding) -> EncodingDef {
        encoding.0.def.clone()
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl PartialEq for Encoding {
    fn eq(&self, other: &Encoding) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.def == other.0.def
    }
}

// Definitions hold no NaN: no number can be written that is one.
impl Eq for Encoding {}

impl Hash for Encoding {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl Ord for Encoding {
    fn cmp(&self, other: &Encoding) -> Ordering {
        if self == other {
            return Ordering::Equal;
        }
        // Two of one name differ in what they print.
        let text = |e: &Encoding| format!("{:?}", e.0.def);
        self.name().cmp(other.name()).then_with(|| text(self).cmp(&text(other)))
    }
}

impl PartialOrd for Encoding {
    fn partial_cmp(&self, other: &Encoding) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
