//! The packed form of an encoded weight: what kernels that read codes read, whatever the format.
//!
//! A weight is cut into units of eight rows by [`Packing::columns`] columns, which lie one after another: those of
//! eight rows side by side, then those of the next eight. Beyond the weight's rows and columns there are zeros. A unit
//! holds its codes in planes of 8, 4, 2 and 1 bits, the lowest bits of a code first, in the order in which the lanes of
//! a warp multiply them (`mma.m16n8k16`, see [`Place`]), then scales and minimums, `[8, groups]` each; a scale of two
//! levels, `d * s` with a whole number `s` of a byte, stays so. Signed codes are stored from 0 on.
//! `kernels/templates/common/coded.cuh` reads it.

use super::compile::mentions;
use super::{CodeKind, Element, Encoding, Number, Stored, Term};
use crate::expr::BinaryOp;

/// Rows of a unit.
pub const ROWS: u64 = 8;

/// Columns that a lane's loads of 16 bytes come to: units are whole multiples.
const CHUNK: u64 = 128;

/// Where everything lies in a unit, and what it means.
#[derive(Clone, Debug, PartialEq)]
pub struct Packing {
    /// Columns of a unit.
    pub columns: u64,
    /// Columns of a row of a unit that share a scale.
    pub group: u64,
    /// The planes of codes, the lowest bits first.
    pub planes: Vec<Plane>,
    /// What was added to codes so that they are 0 at least.
    pub added: i64,
    /// What is then subtracted from them, the same for all: that, and a zero that is a number.
    pub zero: i64,
    /// Scales.
    pub scale: Factor,
    /// Minimums, if there are any.
    pub minimum: Option<Factor>,
    /// Bytes of a unit.
    pub bytes: u64,
}

/// Bits of all codes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Bits of each code.
    pub bits: u32,
    /// How many lower ones are in planes before.
    pub shift: u32,
    /// Where it begins, in bytes.
    pub at: u64,
}

/// Scales, or minimums: a number for each row and group of a unit, times one for each row where there are two levels.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    /// Type of the numbers of groups.
    pub element: Element,
    /// Where they begin, in bytes.
    pub at: u64,
    /// Type and begin of the numbers of rows.
    pub outer: Option<(Element, u64)>,
    /// What each is.
    pub inner_term: Term,
    /// What a row's is.
    pub outer_term: Option<Term>,
}

/// Where in a unit a code has its bits of a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The byte of the plane at which its word of 32 bits begins.
    pub word: u64,
    /// The lowest bit there.
    pub bit: u32,
}

impl Packing {
    /// Bytes of a row's scales and minimums in a unit.
    pub fn scale_bytes(&self) -> u64 {
        let bits: u32 = self.planes.iter().map(|p| p.bits).sum();
        self.bytes / ROWS - self.columns * u64::from(bits) / 8
    }

    /// How weights of an encoding are packed; an error where kernels cannot read their codes.
    pub(super) fn of(encoding: &Encoding) -> Result<Packing, String> {
        let def = encoding.def();
        let bits = planes(def.code.kind, def.code.bits).ok_or_else(|| {
            format!(
                "{encoding}: codes of {} bits of kind {:?} are not packed",
                def.code.bits, def.code.kind
            )
        })?;
        let block = match def.stored {
            Stored::Blocks { values, .. } => {
                Some(values).filter(|n| n.is_multiple_of(CHUNK) && *n <= 4 * CHUNK)
            }
            Stored::Tensors { .. } => Some(CHUNK),
        };
        let mut scale = Factor::of(encoding, encoding.scale(), block.is_some());
        let minimum = match (encoding.zero(), encoding.minimum()) {
            (None, minimum) => minimum.cloned(),
            (Some(zero), minimum) if constant(encoding, zero).is_some() => minimum.cloned(),
            // Products of such scales and of such codes are exact in f32, and so is their difference.
            (Some(zero), None) if scale.element.size() == 2 && scale.outer.is_none() => {
                let zero = Term::Widen(Box::new(zero.clone()));
                Some(Term::Binary(
                    BinaryOp::Mul,
                    Box::new(zero),
                    Box::new(encoding.scale().clone()),
                ))
            }
            (Some(_), _) => {
                return Err(format!("{encoding}: zeros beside such scales are not packed"));
            }
        };
        let mut minimum = minimum.map(|m| Factor::of(encoding, &m, block.is_some()));
        let levels = [Some(&scale), minimum.as_ref()];
        let two = levels.into_iter().flatten().any(|f| f.outer.is_some());
        let columns = block.filter(|_| two).unwrap_or(CHUNK);
        let group = match def.group.k {
            None => columns,
            Some(k) if k.is_multiple_of(columns) => columns,
            Some(k) if columns.is_multiple_of(k) && (k == 16 || k.is_multiple_of(32)) => k,
            Some(k) => return Err(format!("{encoding}: groups of {k} columns are not packed")),
        };
        let mut end = 0;
        let (mut all, mut shift) = (Vec::new(), 0);
        for bits in bits {
            all.push(Plane { bits: *bits, shift, at: end });
            shift += bits;
            end += ROWS * columns * u64::from(*bits) / 8;
        }
        let count = ROWS * (columns / group);
        for factor in [Some(&mut scale), minimum.as_mut()].into_iter().flatten() {
            end = end.next_multiple_of(4);
            factor.at = end;
            end += count * factor.element.size();
        }
        for factor in [Some(&mut scale), minimum.as_mut()].into_iter().flatten() {
            if let Some((element, at)) = &mut factor.outer {
                end = end.next_multiple_of(4);
                *at = end;
                end += ROWS * element.size();
            }
        }
        let added = match def.code.kind {
            CodeKind::Signed => 1i64 << (def.code.bits - 1),
            _ => 0,
        };
        let zero = encoding.zero().and_then(|zero| constant(encoding, zero)).unwrap_or(0);
        let zero = added.saturating_add(zero);
        // What codes are multiplied as has the bits for it: `OFFSET` of kernels.
        if !(0..1 << def.code.bits).contains(&zero) {
            return Err(format!("{encoding}: a zero of {zero} is not packed"));
        }
        Ok(Packing {
            columns,
            group,
            planes: all,
            added,
            zero,
            scale,
            minimum,
            bytes: end.next_multiple_of(16),
        })
    }

    /// Groups of a row of a unit.
    pub fn groups(&self) -> u64 {
        self.columns / self.group
    }

    /// Units along the columns of a weight.
    pub fn across(&self, columns: u64) -> u64 {
        columns.div_ceil(self.columns)
    }

    /// Bytes of eight rows of a weight of so many columns.
    pub fn band(&self, columns: u64) -> u64 {
        self.across(columns) * self.bytes
    }

    /// All that kernels know of weights of `encoding`, whose packing it is: constants `NAME = VALUE`, as
    /// `kernels/templates/common/coded.cuh` names them.
    pub fn constants(&self, encoding: &Encoding) -> String {
        let kind = match encoding.def().code.kind {
            CodeKind::Unsigned | CodeKind::Signed => "WHOLE",
            CodeKind::E4m3 => "E4M3",
            CodeKind::E5m2 => "E5M2",
            CodeKind::E2m1 => "E2M1",
            // None is packed.
            CodeKind::Table => "TABLE",
        };
        let element = |element: Element| match element {
            Element::F16 => "AS_F16",
            Element::Bf16 => "AS_BF16",
            Element::U8 => "AS_U8",
            Element::I8 => "AS_I8",
            Element::F8e8m0 => "AS_E8M0",
            _ => "AS_F32",
        };
        let mut constants: Vec<(String, String)> = [
            ("COLUMNS", self.columns.to_string()),
            ("GROUP", self.group.to_string()),
            ("BYTES", self.bytes.to_string()),
            ("KIND", kind.to_owned()),
            ("BITS", encoding.def().code.bits.to_string()),
            ("ADDED", self.added.to_string()),
            ("ZERO", self.zero.to_string()),
            ("PLANES", self.planes.len().to_string()),
            ("ROW_SCALES", encoding.def().group.k.is_none().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        for i in 0..3 {
            let plane = self.planes.get(i);
            constants.push((format!("BITS{i}"), plane.map_or(0, |p| p.bits).to_string()));
            constants.push((format!("AT{i}"), plane.map_or(0, |p| p.at).to_string()));
        }
        for (name, factor) in [("SCALE", Some(&self.scale)), ("MINIMUM", self.minimum.as_ref())] {
            let outer = factor.and_then(|f| f.outer);
            let none = || "-1".to_owned();
            constants.extend([
                (name.to_owned(), factor.map_or_else(none, |f| element(f.element).to_owned())),
                (format!("{name}_AT"), factor.map_or(0, |f| f.at).to_string()),
                (format!("{name}_OUTER"), outer.map_or_else(none, |(e, _)| element(e).to_owned())),
                (format!("{name}_OUTER_AT"), outer.map_or(0, |(_, at)| at).to_string()),
            ]);
        }
        let list: Vec<String> =
            constants.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        list.join(", ")
    }

    /// Where the code of row `row` and column `column` of a unit lies in a plane. Lane `4 row + quad` of a warp has a pair of
    /// each eight columns, which are `2 quad` and the next, as tensor cores take them; the codes of a pair are in the two
    /// halves of a word.
    pub fn place(&self, plane: Plane, row: u64, column: u64) -> Place {
        let (block, j) = (column / 32, column % 32);
        let (quad, pair) = (j % 8 / 2, j / 8);
        let (lane, half) = (row * 4 + quad, (j % 2) as u32 * 16);
        let (chunk, b, p) = (block / 4, block % 4, pair as u32);
        let (word, bit) = if plane.bits == 8 {
            (block / 2 * 512 + lane * 16 + block % 2 * 8 + pair / 2 * 4, 8 - p % 2 * 8)
        } else {
            // A byte of a word has pairs 0 and 1, or pairs 2 and 3, of each of its blocks.
            let blocks = 4 / u64::from(plane.bits);
            let word = (chunk * 32 + lane) * (16 / blocks) + b / blocks * 4;
            (word, p / 2 * 8 + ((b % blocks) as u32 * 2 + p % 2) * plane.bits)
        };
        Place { word: plane.at + word, bit: half + bit }
    }
}

/// The planes of codes, the lowest bits first; `None` where kernels cannot read such.
fn planes(kind: CodeKind, bits: u32) -> Option<&'static [u32]> {
    match (kind, bits) {
        (CodeKind::Signed | CodeKind::Unsigned, 1..=8) => Some(
            [&[1][..], &[2], &[2, 1], &[4], &[4, 1], &[4, 2], &[4, 2, 1], &[4, 4]]
                [bits as usize - 1],
        ),
        (CodeKind::E4m3 | CodeKind::E5m2, 8) => Some(&[8]),
        (CodeKind::E2m1, 4) => Some(&[4]),
        _ => None,
    }
}

impl Factor {
    /// The narrowest form that holds a term exactly: two levels, if blocks are units, one otherwise.
    fn of(encoding: &Encoding, term: &Term, in_blocks: bool) -> Factor {
        if let Term::Binary(BinaryOp::Mul, a, b) = term
            && in_blocks
        {
            let split = |outer: &Term, inner: &Term| {
                let outer_element = of_row(encoding, outer)?;
                let (element, inner) = match inner {
                    Term::Widen(sub) => (byte(encoding, sub)?, &**sub),
                    Term::Read { part, whole: false, .. } => (
                        Some(float(encoding.0.parts[*part].element)).filter(|e| e.size() < 4)?,
                        inner,
                    ),
                    _ => return None,
                };
                Some(Factor {
                    element,
                    at: 0,
                    outer: Some((outer_element, 0)),
                    inner_term: inner.clone(),
                    outer_term: Some(outer.clone()),
                })
            };
            if let Some(factor) = split(a, b).or_else(|| split(b, a)) {
                return factor;
            }
        }
        let read = |term: &Term| match term {
            Term::Read { part, .. } => float(encoding.0.parts[*part].element),
            _ => Element::F32,
        };
        let element = match term {
            // A type that holds a number holds what it is negated, but powers of two have no sign.
            Term::Neg(of) if read(of) == Element::F8e8m0 => Element::F32,
            Term::Neg(of) => read(of),
            of => read(of),
        };
        Factor { element, at: 0, outer: None, inner_term: term.clone(), outer_term: None }
    }

    /// Bits of a number of a group.
    pub fn inner_bits(&self, number: Number) -> u64 {
        bits(self.element, number)
    }
}

/// The float type that kernels read, which holds all values of a stored one.
fn float(element: Element) -> Element {
    match element {
        Element::F16 | Element::F8e4m3 | Element::F8e5m2 => Element::F16,
        Element::Bf16 | Element::F8e8m0 => element,
        _ => Element::F32,
    }
}

/// The type of a stored float that is the same for a row of a unit.
fn of_row(encoding: &Encoding, term: &Term) -> Option<Element> {
    let Term::Read { part, whole: false, .. } = term else { return None };
    (!mentions(term, super::Place::K)).then(|| float(encoding.0.parts[*part].element))
}

/// The type of a byte that holds all values of a whole term.
fn byte(encoding: &Encoding, term: &Term) -> Option<Element> {
    match range(encoding, term)? {
        (0.., ..=255) => Some(Element::U8),
        (-128.., ..=127) => Some(Element::I8),
        _ => None,
    }
}

/// The number that a whole term always is.
fn constant(encoding: &Encoding, term: &Term) -> Option<i64> {
    range(encoding, term).filter(|(least, most)| least == most).map(|(least, _)| least)
}

/// Between which numbers a whole term is; `None` where that is not obvious.
fn range(encoding: &Encoding, term: &Term) -> Option<(i64, i64)> {
    let of = |term: &Term| range(encoding, term);
    match term {
        Term::Int(i) => Some((*i, *i)),
        Term::Read { part, .. } => match encoding.0.parts[*part].element {
            Element::U8 => Some((0, 255)),
            Element::I8 => Some((-128, 127)),
            Element::U16 => Some((0, 65535)),
            _ => None,
        },
        Term::Divide { up: false, a, b } => match (of(a)?, &**b) {
            ((0.., most), Term::Int(by @ 1..)) => Some((0, most / by)),
            _ => None,
        },
        Term::Binary(op, a, b) => {
            let (a, b) = match op {
                // Whatever the other is.
                BinaryOp::BitAnd => {
                    (of(a).unwrap_or((0, i64::MAX)), of(b).unwrap_or((0, i64::MAX)))
                }
                _ => (of(a)?, of(b)?),
            };
            match op {
                BinaryOp::Add => Some((a.0.checked_add(b.0)?, a.1.checked_add(b.1)?)),
                BinaryOp::Sub => Some((a.0.checked_sub(b.1)?, a.1.checked_sub(b.0)?)),
                BinaryOp::Mul if a.0 >= 0 && b.0 >= 0 => Some((0, a.1.checked_mul(b.1)?)),
                BinaryOp::BitAnd if a.0 >= 0 && b.0 >= 0 => Some((0, a.1.min(b.1))),
                BinaryOp::BitOr | BinaryOp::BitXor if a.0 >= 0 && b.0 >= 0 => {
                    Some((0, ((a.1 | b.1) as u64 + 1).checked_next_power_of_two()? as i64 - 1))
                }
                BinaryOp::Shr if a.0 >= 0 && (0..63).contains(&b.0) => Some((0, a.1 >> b.0)),
                BinaryOp::Shl if a.0 >= 0 && b.0 >= 0 && b.1 < 32 && a.1 < 1 << 16 => {
                    Some((a.0 << b.0, a.1 << b.1))
                }
                BinaryOp::Rem if a.0 >= 0 && b.0 > 0 => Some((0, a.1.min(b.1 - 1))),
                _ => None,
            }
        }
        Term::Select(parts) => {
            let (a, b) = (of(&parts[1])?, of(&parts[2])?);
            Some((a.0.min(b.0), a.1.max(b.1)))
        }
        _ => None,
    }
}

/// The bits of a number that an element holds exactly.
pub(super) fn bits(element: Element, number: Number) -> u64 {
    match element {
        Element::F16 => half::f16::from_f32(number.float()).to_bits().into(),
        Element::Bf16 => half::bf16::from_f32(number.float()).to_bits().into(),
        Element::F32 => number.float().to_bits().into(),
        Element::F8e4m3 => small_float(number.float(), 3, 7).into(),
        Element::F8e5m2 => small_float(number.float(), 2, 15).into(),
        // The smallest, 2^-127, has no leading one in f32.
        Element::F8e8m0 => (number.float().to_bits() >> 23 & 0xff).into(),
        _ => number.int() as u64 & 0xff,
    }
}

/// The bits of a float of so many bits of mantissa and this bias that holds `x` exactly.
fn small_float(x: f32, mantissa: u32, bias: i32) -> u8 {
    let bits = x.to_bits();
    let (sign, exponent) = (bits >> 31, (bits >> 23 & 255) as i32 - 127);
    let exponent_bits = 7 - mantissa;
    let magnitude = if x.is_nan() {
        0x7f
    } else if exponent <= -bias {
        // The unit of what has no leading one.
        (x.abs() * 2f32.powi(bias - 1 + mantissa as i32)) as u32
    } else {
        ((exponent + bias) as u32) << mantissa | (bits & 0x7f_ffff) >> (23 - mantissa)
    };
    (magnitude & ((1 << (mantissa + exponent_bits)) - 1)) as u8 | (sign << 7) as u8
}

/// The bits of a code, from 0 on.
pub(super) fn code_bits(kind: CodeKind, added: i64, code: Number) -> u64 {
    match kind {
        CodeKind::E4m3 => bits(Element::F8e4m3, code),
        CodeKind::E5m2 => bits(Element::F8e5m2, code),
        // 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        CodeKind::E2m1 => {
            let x = code.float();
            let at = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].iter().position(|v| *v == x.abs());
            at.unwrap_or(0) as u64 | u64::from(x.is_sign_negative()) << 3
        }
        _ => (code.int() + added) as u64,
    }
}

/// The value that the bits of a code are.
fn code_value(kind: CodeKind, zero: i64, bits: u64) -> f32 {
    match kind {
        CodeKind::E4m3 => Element::F8e4m3.read(&[bits as u8]).float(),
        CodeKind::E5m2 => Element::F8e5m2.read(&[bits as u8]).float(),
        CodeKind::E2m1 => {
            let x = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][bits as usize & 7];
            if bits & 8 == 0 { x } else { -x }
        }
        _ => (bits as i64 - zero) as f32,
    }
}

/// A value of a packed weight of so many columns.
pub fn packed_value(
    encoding: &Encoding,
    columns: u64,
    bytes: &[u8],
    n: u64,
    k: u64,
) -> Result<f32, String> {
    let packing = Packing::of(encoding)?;
    let unit = n / ROWS * packing.band(columns) + k / packing.columns * packing.bytes;
    let (row, column) = (n % ROWS, k % packing.columns);
    let get = |element: Element, at: u64| {
        let from = (unit + at) as usize;
        element.read(bytes.get(from..from + element.size() as usize).unwrap_or_default()).float()
    };
    let code = packing.planes.iter().fold(0, |code, plane| {
        let place = packing.place(*plane, row, column);
        let from = (unit + place.word) as usize;
        let word =
            bytes.get(from..from + 4).and_then(|w| w.try_into().ok()).map_or(0, u32::from_le_bytes);
        code | u64::from(word >> place.bit & ((1 << plane.bits) - 1)) << plane.shift
    });
    let factor = |f: &Factor| {
        let index = row * packing.groups() + column / packing.group;
        let inner = get(f.element, f.at + index * f.element.size());
        f.outer.map_or(inner, |(element, at)| get(element, at + row * element.size()) * inner)
    };
    let scaled = code_value(encoding.def().code.kind, packing.zero, code) * factor(&packing.scale);
    Ok(packing.minimum.as_ref().map_or(scaled, |m| scaled - factor(m)))
}
