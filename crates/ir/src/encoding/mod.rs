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
mod layout;
pub mod packing;
mod term;

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

pub use decoder::Decoder;
pub use element::Element;
pub use layout::{Blocks, Layout, PartLayout, StoredTensor};
pub use packing::Packing;
pub use term::{Number, Place, Term};

use crate::expr::{Expr, ExprError};
use crate::names::is_name;
use term::Names;

/// Where tensors that lie beside one another begin, in bytes.
pub const ALIGN: u64 = 16;

/// Fields or tensors, and tables, of an encoding: known ones have at most six. Names are looked up among
/// them, and sizes are added up over them.
const MOST_PARTS: usize = 64;

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
    /// Whether it is the packed form: see [`packing`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
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
    /// The packed form, once it was asked for.
    packed: OnceLock<Result<Encoding, String>>,
    /// Of the packed form, where everything lies.
    packing: Option<Packing>,
}

/// A field or a tensor.
struct Part {
    name: String,
    element: Element,
    dims: Vec<Term>,
    /// Where a field begins in its block.
    offset: u64,
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
        check_tables(&def.tables).map_err(|message| fault(FaultIn::Name, message))?;
        let known: Vec<(String, bool, usize)> =
            parts.iter().map(|p| (p.name.clone(), p.element.is_whole(), p.dims.len())).collect();
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
        let is_packed = def.packed;
        let mut compiled = Encoding(Arc::new(Compiled {
            packed: OnceLock::new(),
            packing: None,
            tables: tables.collect(),
            parts,
            block,
            code,
            scale,
            minimum: minimum.map(Term::widened),
            when: when?,
            def,
        }));
        if is_packed {
            let packing = Packing::of(&compiled);
            let packing = packing.map_err(|message| fault(FaultIn::Name, message))?;
            if let Some(compiled) = Arc::get_mut(&mut compiled.0) {
                compiled.packing = Some(packing);
            }
        }
        Ok(compiled)
    }

    /// The form of it that kernels read codes of; an error where there is none. Of the packed form itself it is that.
    pub fn packed(&self) -> Result<Encoding, String> {
        let make = || {
            let def = EncodingDef { packed: true, ..self.def().clone() };
            Encoding::new(def).map_err(|fault| fault.message)
        };
        if self.packing().is_some() {
            Ok(self.clone())
        } else {
            self.0.packed.get_or_init(make).clone()
        }
    }

    /// What is stored, of the packed form; of any other nothing else.
    pub fn stored(&self) -> Option<Encoding> {
        self.packing()?;
        Encoding::new(EncodingDef { packed: false, ..self.def().clone() }).ok()
    }

    /// Of the packed form, where everything lies.
    pub fn packing(&self) -> Option<&Packing> {
        self.0.packing.as_ref()
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

    /// Whether a weight of this name may be stored so.
    pub fn is_for(&self, name: &str) -> bool {
        match &self.0.def.stored {
            Stored::Blocks { .. } => true,
            Stored::Tensors { of, .. } => name.rsplit('.').next() == Some(of),
        }
    }
}

/// Refuses tables that nothing could read, and numbers that f32 does not hold: NaN would make a definition
/// differ from itself.
fn check_tables(tables: &[(String, Vec<f64>)]) -> Result<(), String> {
    if tables.len() > MOST_PARTS {
        return Err(format!("expected at most {MOST_PARTS} tables, found {}", tables.len()));
    }
    for (i, (name, list)) in tables.iter().enumerate() {
        if !is_own_name(name) || tables[..i].iter().any(|(other, _)| other == name) {
            return Err(format!("table `{name}`: expected a name of its own"));
        }
        if list.is_empty() {
            return Err(format!("table `{name}` is empty"));
        }
        if let Some(x) = list.iter().find(|x| !(**x as f32).is_finite()) {
            return Err(format!("table `{name}`: expected finite numbers of f32, found {x}"));
        }
    }
    Ok(())
}

/// Whether a part or a table may have this name.
fn is_own_name(name: &str) -> bool {
    let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    letters && !name.is_empty() && Place::ALL.iter().all(|(_, place)| *place != name)
}

/// The parts of a definition, and the bytes of a block.
fn parts(def: &EncodingDef) -> Result<(Vec<Part>, u64), EncodingFault> {
    let (list, is_block) = match &def.stored {
        Stored::Blocks { fields, .. } => (fields, true),
        Stored::Tensors { tensors, .. } => (tensors, false),
    };
    let (mut parts, mut end) = (Vec::<Part>::new(), 0u64);
    if list.len() > MOST_PARTS {
        let message = format!("expected at most {MOST_PARTS} stored parts, found {}", list.len());
        return Err(EncodingFault { of: FaultIn::Name, at: 0, message });
    }
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
            || def.tables.iter().any(|(table, _)| table == name);
        if taken || !is_own_name(name) {
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
        if self.packing().is_some() {
            f.write_str("packed ")?;
        }
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

// Definitions hold no NaN: `check_tables` refuses it.
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
