//! Encodings: how the values of a weight are stored.
//!
//! A weight's type says what it means, `[N, K]` of floats; its encoding says where each value comes
//! from. What is stored is either blocks of one tensor, each with fields, or several tensors beside one
//! another; a value is `(code - zero) * scale - minimum`, expressions over its row `n`, its column `k`, the
//! sizes `N` and `K`, and what is stored. Further leading axes (experts) repeat the whole.
//!
//! In memory, on every target, a matrix is its stored tensors one after another, each but a single one
//! begun at a multiple of [`ALIGN`] bytes.

mod compile;
mod decoder;
mod def;
mod element;
mod encoder;
mod layout;
mod packer;
pub mod packing;
pub mod quantised_rows;
mod run;
mod sound;
mod term;

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use decoder::Decoder;
pub use def::{Code, CodeKind, EncodingDef, EncodingFault, FaultIn, Group, Stored};
pub use element::Element;
pub use layout::{Blocks, Layout, PartLayout, StoredTensor};
pub use packer::Packer;
pub use packing::Packing;
pub use sound::Unsound;
pub use term::{Number, Place, Term};

use crate::expr::Expr;
use crate::names::is_name;
use compile::Texts;
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

struct Compiled {
    def: EncodingDef,
    parts: Vec<Part>,
    /// Bytes of a block; 0 for tensors.
    block: u64,
    tables: Vec<Table>,
    code: Term,
    zero: Option<Term>,
    scale: Term,
    minimum: Option<Term>,
    when: Option<Expr>,
    activations: Option<Expr>,
    /// The packed form, of what is none, or why there is none.
    packed: Result<Encoding, String>,
    /// Of the packed form, where everything lies.
    packing: Option<Packing>,
}

/// A constant list.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "named after what they hold")]
pub enum Table {
    Whole(Vec<i64>),
    Floats(Vec<f32>),
}

impl Table {
    /// Its length; at least 1.
    #[allow(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        match self {
            Table::Whole(list) => list.len(),
            Table::Floats(list) => list.len(),
        }
    }

    /// Entry `index`, the nearest inside.
    pub fn entry(&self, index: i64) -> Number {
        let index = index.clamp(0, self.len() as i64 - 1) as usize;
        match self {
            Table::Whole(list) => Number::Int(list[index]),
            Table::Floats(list) => Number::Float(list[index]),
        }
    }
}

/// A field or a tensor.
struct Part {
    /// What expressions call it.
    name: String,
    /// What checkpoints call it: in place of `*` they have the weight's own.
    stored: String,
    element: Element,
    dims: Vec<Term>,
    /// Where a field begins in its block.
    offset: u64,
    /// Whether a single element may be stored in place of all.
    broadcast: bool,
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
        compile::check_tables(&def.tables).map_err(|message| fault(FaultIn::Name, message))?;
        let texts = Texts::new(&def)?;
        let (parts, block) = compile::parts(&def, &texts)?;
        let tables = compile::tables(&def);
        let known: Vec<(String, bool, usize)> =
            parts.iter().map(|p| (p.name.clone(), p.element.is_whole(), p.dims.len())).collect();
        let listed: Vec<(&str, bool)> = def
            .tables
            .iter()
            .zip(&tables)
            .map(|((name, _), table)| (name.as_str(), matches!(table, Table::Whole(_))))
            .collect();
        let names = Names { parts: &known, tables: &listed };
        let term = |of, text: &str| {
            Term::compile(&texts.expr(of, text)?, &names).map_err(|message| fault(of, message))
        };
        // A mistake in a named expression is told where it is, used or not.
        for (i, (_, text)) in def.lets.iter().enumerate() {
            term(FaultIn::Let(i), text)?;
        }
        let code = term(FaultIn::Code, &def.code.value)?;
        let scale = term(FaultIn::Scale, &def.scale)?.widened();
        let minimum = def.minimum.as_ref().map(|text| term(FaultIn::Minimum, text)).transpose()?;
        let zero = def.zero.as_ref().map(|text| term(FaultIn::Zero, text)).transpose()?;
        if zero.as_ref().is_some_and(|z| !z.is_whole() || !code.is_whole()) {
            let message =
                "expected a whole number, subtracted from codes that are whole".to_owned();
            return Err(fault(FaultIn::Zero, message));
        }
        let is_right = match def.code.kind {
            CodeKind::Unsigned | CodeKind::Signed => code.is_whole(),
            CodeKind::E4m3 | CodeKind::E5m2 | CodeKind::E2m1 => !code.is_whole(),
            CodeKind::Table => true,
        };
        if !is_right || !(1..=16).contains(&def.code.bits) {
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
        let when = def.when.as_ref().map(|text| texts.expr(FaultIn::When, text)).transpose()?;
        let of = FaultIn::Activations;
        let activations = def.activations.as_ref().map(|t| texts.expr(of, t)).transpose()?;
        if activations.is_some() {
            quantised_rows::are_multiplied_with(&def).map_err(|message| fault(of, message))?;
        }
        let is_packed = def.packed;
        let packed = if is_packed {
            Err("it is packed".to_owned())
        } else {
            let def = EncodingDef { packed: true, ..def.clone() };
            Encoding::new(def).map_err(|fault| fault.message)
        };
        let mut compiled = Encoding(Arc::new(Compiled {
            packed,
            packing: None,
            tables,
            parts,
            block,
            code,
            zero,
            scale,
            minimum: minimum.map(Term::widened),
            when,
            activations,
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
        if self.packing().is_some() { Ok(self.clone()) } else { self.0.packed.clone() }
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

    /// The condition on `quantization_config` under which activations may be rounded as well, if there is one.
    pub fn activations(&self) -> Option<&Expr> {
        self.0.activations.as_ref()
    }

    /// The same encoding of a checkpoint whose activations are left as they are.
    #[must_use]
    pub fn of_weights_alone(&self) -> Encoding {
        let def = EncodingDef { activations: None, ..self.def().clone() };
        Encoding::new(def).unwrap_or_else(|_| self.clone())
    }

    /// What is stored of a value.
    pub fn code(&self) -> &Term {
        &self.0.code
    }

    /// What is subtracted from a code first, a whole number.
    pub fn zero(&self) -> Option<&Term> {
        self.0.zero.as_ref()
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
    pub fn tables(&self) -> &[Table] {
        &self.0.tables
    }

    /// Bits that a value takes, with what its group has: of a weight so large that this has its usual part.
    pub fn bits(&self) -> Option<f64> {
        const SIDE: u64 = 4096;
        Some(self.bytes(&[SIDE, SIDE])? as f64 * 8.0 / (SIDE * SIDE) as f64)
    }

    /// Patterns of the names of tensors that may be there beside its weights, and that no value depends on.
    pub fn unused(&self) -> &[String] {
        match &self.0.def.stored {
            Stored::Blocks { .. } => &[],
            Stored::Tensors { unused, .. } => unused,
        }
    }

    /// Whether a weight of this name may be stored so.
    pub fn is_for(&self, name: &str) -> bool {
        match &self.0.def.stored {
            Stored::Blocks { .. } => true,
            Stored::Tensors { of, .. } => of == "*" || name.rsplit('.').next() == Some(of),
        }
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
