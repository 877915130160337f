//! From values to what is stored: the way back through an encoding's own expressions.
//!
//! Nothing here knows a format. Which stored bits a code, a scale, a minimum or a zero depends on is found by flipping
//! bits and evaluating; what they may come to by trying all their values. Floats that a scale or a minimum reads are
//! set directly, as both are proportional to them (or, where they divide, inversely). Of each group the scale is searched
//! whose codes come nearest to the values, by the sum of squared differences.

mod blocks;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use half::{bf16, f16};

use super::term::Memory;
use super::{Element, Encoding, Layout, Number, Place, Term};
use blocks::Blocks;

/// Bits that one number may depend on: all of their values are tried.
const MOST_BITS: usize = 12;

/// A stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Spot {
    tensor: usize,
    /// Its first byte.
    at: usize,
    element: Element,
}

impl Spot {
    /// Whether a scale is set through it as a number, not bit by bit.
    fn is_float(self) -> bool {
        matches!(self.element, Element::F16 | Element::Bf16 | Element::F32)
    }
}

/// A bit of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bit {
    tensor: usize,
    at: usize,
    mask: u8,
}

/// Numbers that some bits may make, and the bits of each.
#[derive(Clone, Default)]
struct Choices {
    bits: Vec<Bit>,
    /// By value, ascending: the value, and a word with a bit of it for each of `bits`.
    values: Rc<[(f64, u32)]>,
}

impl Choices {
    /// The value nearest to `x`, and its bits.
    fn nearest(&self, x: f64) -> (f64, u32) {
        let after = self.values.partition_point(|(v, _)| *v < x);
        let around = self.values.get(after.saturating_sub(1)..(after + 1).min(self.values.len()));
        let near = around.into_iter().flatten();
        near.copied().min_by(|a, b| (a.0 - x).abs().total_cmp(&(b.0 - x).abs())).unwrap_or_default()
    }

    fn range(&self) -> (f64, f64) {
        match (self.values.first(), self.values.last()) {
            (Some(least), Some(most)) => (least.0, most.0),
            _ => (0.0, 0.0),
        }
    }
}

/// A scale, a minimum or a zero of a group.
struct Factor {
    /// What it is proportional to.
    float: Option<Spot>,
    /// Whether it is divided by that.
    divides: bool,
    /// What it comes to where `float` is 1.
    choices: Choices,
}

/// Which number of a value.
#[derive(Clone, Copy)]
enum Which {
    Code,
    Zero,
    Scale,
    Minimum,
}

/// A weight that is being encoded.
struct Encoder<'a> {
    encoding: &'a Encoding,
    layout: Layout,
    tensors: Vec<Vec<u8>>,
    /// Bits that codes have taken.
    taken: Vec<Vec<u8>>,
    /// By elements and place within a period: choices of a code that are the same at many values.
    known: HashMap<(u64, u64), Choices>,
    /// A weight for each column, or none.
    importance: &'a [f32],
}

impl Encoding {
    /// The stored tensors whose values come near to `values`, [rows, columns]. An error where the encoding's numbers
    /// cannot be chosen one by one: codes that share bits, or columns that are in groups by an index.
    pub fn encode(&self, rows: u64, columns: u64, values: &[f32]) -> Result<Vec<Vec<u8>>, String> {
        self.encode_for(rows, columns, values, &[])
    }

    /// The same by the squares of differences times the importance of their columns, which is as many numbers of at least 0,
    /// or none where all are alike.
    pub fn encode_for(
        &self,
        rows: u64,
        columns: u64,
        values: &[f32],
        importance: &[f32],
    ) -> Result<Vec<Vec<u8>>, String> {
        let layout = self.layout(rows, columns)?;
        let weighs = importance.iter().all(|w| w.is_finite() && *w >= 0.0);
        if !weighs || !(importance.is_empty() || importance.len() as u64 == columns) {
            return Err(format!("{self}: expected the importance of {columns} columns"));
        }
        let sizes: Vec<u64> = self.tensors("", rows, columns)?.iter().map(|t| t.bytes).collect();
        if values.len() as u64 != rows * columns || values.iter().any(|v| !v.is_finite()) {
            return Err(format!("{self}: expected {rows} x {columns} finite values"));
        }
        if let Some(blocks) = Blocks::of(self)? {
            return Ok(vec![blocks.encode(columns as usize, values, importance)?]);
        }
        let zeros: Vec<Vec<u8>> = sizes.iter().map(|n| vec![0; *n as usize]).collect();
        let (taken, known) = (zeros.clone(), HashMap::new());
        let mut encoder =
            Encoder { encoding: self, layout, tensors: zeros, taken, known, importance };
        if self.def().group.k == Some(1) && columns > 1 {
            return Err(encoder.refused("columns are in groups by an index"));
        }
        let height = self.def().group.n.unwrap_or(rows).min(rows);
        for top in (0..rows).step_by(height as usize) {
            encoder.band(top, height.min(rows - top), values)?;
        }
        Ok(encoder.tensors)
    }
}

/// A group of values, by its corner.
struct Group {
    n: u64,
    k: u64,
    values: Vec<(u64, u64, f64)>,
    /// Of each value; none where all are alike.
    weights: Vec<f64>,
    scale: Factor,
    minimum: Option<Factor>,
    zero: Choices,
    codes: (f64, f64),
    /// Scale and minimum that suit it best.
    wanted: (f64, f64),
}

impl Encoder<'_> {
    /// Encodes rows of which groups are as high.
    fn band(&mut self, top: u64, height: u64, values: &[f32]) -> Result<(), String> {
        let columns = self.layout.columns;
        let width = self.encoding.def().group.k.unwrap_or(columns).min(columns);
        let mut groups = Vec::new();
        for k in (0..columns).step_by(width as usize) {
            let all = (top..top + height)
                .flat_map(|n| (k..(k + width).min(columns)).map(move |k| (n, k)));
            let values: Vec<(u64, u64, f64)> =
                all.map(|(n, k)| (n, k, f64::from(values[(n * columns + k) as usize]))).collect();
            groups.push(self.group(top, k, values)?);
        }
        self.set_floats(&groups, |g| Some((&g.scale, g.wanted.0)));
        self.set_floats(&groups, |g| Some((g.minimum.as_ref()?, g.wanted.1)));
        groups.iter().try_for_each(|group| self.fill(group))
    }

    fn group(&mut self, n: u64, k: u64, values: Vec<(u64, u64, f64)>) -> Result<Group, String> {
        let scale = self.factor(n, k, Which::Scale)?;
        let minimum = self.encoding.minimum().map(|_| self.factor(n, k, Which::Minimum));
        let minimum = minimum.transpose()?;
        let zero = self.choices(n, k, Which::Zero)?;
        let codes = self.code(n, k)?.range();
        let weight = |v: &(u64, u64, f64)| self.importance.get(v.1 as usize).map(|w| f64::from(*w));
        let weights = values.iter().filter_map(weight).collect();
        let wanted = (0.0, 0.0);
        let mut group = Group { n, k, values, weights, scale, minimum, zero, codes, wanted };
        group.wanted = group.suited();
        Ok(group)
    }

    /// Sets floats that groups share, so that the one that wants most can have it.
    fn set_floats<'g>(
        &mut self,
        groups: &'g [Group],
        of: impl Fn(&'g Group) -> Option<(&'g Factor, f64)>,
    ) {
        let mut wanted: BTreeMap<Spot, (f64, bool)> = BTreeMap::new();
        for (factor, wish) in groups.iter().filter_map(of) {
            let Some(spot) = factor.float else { continue };
            let (least, most) = factor.choices.range();
            let furthest = if most.abs() >= least.abs() { most } else { least };
            let float = if furthest == 0.0 { 0.0 } else { wish / furthest };
            let entry = wanted.entry(spot).or_insert((0.0, factor.divides));
            if float.abs() > entry.0.abs() {
                entry.0 = float;
            }
        }
        for (spot, (float, divides)) in wanted {
            let float = match (divides, float == 0.0) {
                (true, true) => 1.0,
                (true, false) => 1.0 / float,
                (false, _) => float,
            };
            self.write_float(spot, float as f32);
        }
    }

    /// Chooses what is left of a group: the bits of its scale, minimum and zero, and its codes.
    fn fill(&mut self, group: &Group) -> Result<(), String> {
        let (n, k) = (group.n, group.k);
        let float = |e: &Self, factor: &Factor| {
            let value = factor.float.map_or(1.0, |spot| f64::from(e.read_float(spot)));
            if factor.divides && value != 0.0 { 1.0 / value } else { value }
        };
        if let Some(minimum) = &group.minimum {
            let by = float(self, minimum);
            let wish = if by == 0.0 { 0.0 } else { group.wanted.1 / by };
            self.write(&minimum.choices, minimum.choices.nearest(wish).1);
        }
        let least = self.value(n, k, Which::Minimum);
        // Scales around the one that is wanted, as far as they can be stored.
        let by = float(self, &group.scale);
        let ratio = if by == 0.0 { 0.0 } else { group.wanted.0 / by };
        let around = [0.8, 0.87, 0.93, 1.0, 1.08, 1.2, 1.5, 2.0];
        let mut tried: Vec<(f64, u32)> =
            around.iter().map(|f| group.scale.choices.nearest(ratio * f)).collect();
        tried.dedup();
        let mut best: Option<(f64, u32, u32)> = None;
        for (relative, bits) in tried {
            let scale = relative * by;
            let zero = group.zero_for(scale);
            let error = group.error(scale, least, zero.0, &self.code(n, k)?);
            if best.is_none_or(|(least, ..)| error < least) {
                best = Some((error, bits, zero.1));
            }
        }
        let (_, scale, zero) = best.unwrap_or_default();
        self.write(&group.scale.choices, scale);
        self.write(&group.zero, zero);
        let (scale, zero) = (self.value(n, k, Which::Scale), self.value(n, k, Which::Zero));
        for (n, k, value) in &group.values {
            let choices = self.code(*n, *k)?;
            let wish = if scale == 0.0 { zero } else { (value + least) / scale + zero };
            let (code, bits) = choices.nearest(wish);
            self.write(&choices, bits);
            self.take(&choices)?;
            if self.value(*n, *k, Which::Code).to_bits() != code.to_bits() {
                return Err(self.refused("a code is not what its bits made elsewhere"));
            }
        }
        Ok(())
    }

    /// The codes that a value may have.
    fn code(&mut self, n: u64, k: u64) -> Result<Choices, String> {
        // Bits lie alike every so many values in every format that is known; a code that comes out otherwise is an error.
        let key = (n % 128, k % 256);
        let spots = self.spots(n, k, Which::Code);
        if let Some(known) = self.known.get(&key) {
            let moved = known.bits.iter().map(|bit| {
                let spot = spots.get(bit.tensor)?;
                Some(Bit { tensor: spot.tensor, at: spot.at + bit.at, ..*bit })
            });
            if let Some(bits) = moved.collect::<Option<Vec<_>>>() {
                return Ok(Choices { bits, values: Rc::clone(&known.values) });
            }
        }
        let choices = self.choices(n, k, Which::Code)?;
        // Relative to the elements that the code reads.
        let within = choices.bits.iter().map(|bit| {
            let holds = |s: &Spot| {
                s.tensor == bit.tensor && (s.at..s.at + s.element.size() as usize).contains(&bit.at)
            };
            let i = spots.iter().position(holds)?;
            Some(Bit { tensor: i, at: bit.at - spots[i].at, ..*bit })
        });
        if let Some(bits) = within.collect::<Option<Vec<_>>>() {
            self.known.insert(key, Choices { bits, values: Rc::clone(&choices.values) });
        }
        Ok(choices)
    }

    /// How a scale or a minimum may be set.
    fn factor(&mut self, n: u64, k: u64, which: Which) -> Result<Factor, String> {
        let mut floats: Vec<Spot> =
            self.spots(n, k, which).into_iter().filter(|s| s.is_float()).collect();
        floats.dedup();
        let float = match floats[..] {
            [] => None,
            [spot] => Some(spot),
            _ => return Err(self.refused("a scale reads several floats")),
        };
        let Some(spot) = float else {
            return Ok(Factor { float, divides: false, choices: self.choices(n, k, which)? });
        };
        self.write_float(spot, 1.0);
        let choices = self.choices(n, k, which)?;
        let (least, most) = choices.range();
        let extreme = if most.abs() >= least.abs() { most } else { least };
        let bits = choices.nearest(extreme).1;
        self.write(&choices, bits);
        let one = self.value(n, k, which);
        self.write_float(spot, 2.0);
        let two = self.value(n, k, which);
        self.write_float(spot, 1.0);
        self.write(&choices, choices.nearest(0.0).1);
        match two / one {
            2.0 => Ok(Factor { float, divides: false, choices }),
            0.5 => Ok(Factor { float, divides: true, choices }),
            _ => Err(self.refused("a scale or a minimum is not proportional to its float")),
        }
    }

    /// The bits that a number depends on, floats apart, and what they may make of it.
    fn choices(&mut self, n: u64, k: u64, which: Which) -> Result<Choices, String> {
        let mut bits = Vec::new();
        for spot in self.spots(n, k, which) {
            if spot.is_float() {
                if matches!(which, Which::Code) {
                    return Err(self.refused("a code is a float of 16 bits or more"));
                }
                continue;
            }
            for bit in 0..spot.element.size() * 8 {
                let bit = Bit {
                    tensor: spot.tensor,
                    at: spot.at + (bit / 8) as usize,
                    mask: 1 << (bit % 8),
                };
                if bits.contains(&bit) {
                    continue;
                }
                let before = self.value(n, k, which);
                self.tensors[bit.tensor][bit.at] ^= bit.mask;
                let after = self.value(n, k, which);
                self.tensors[bit.tensor][bit.at] ^= bit.mask;
                if before.to_bits() != after.to_bits() {
                    bits.push(bit);
                }
            }
        }
        if bits.len() > MOST_BITS {
            return Err(self.refused(&format!(
                "a number depends on {} bits, more than {MOST_BITS}",
                bits.len()
            )));
        }
        let (mut choices, mut values) = (Choices { bits, ..Choices::default() }, Vec::new());
        let kept = self.read(&choices);
        for word in 0..1u32 << choices.bits.len() {
            self.write(&choices, word);
            let value = self.value(n, k, which);
            if value.is_finite() {
                values.push((value, word));
            }
        }
        self.write(&choices, kept);
        values.sort_by(|a: &(f64, u32), b| a.0.total_cmp(&b.0));
        values.dedup_by(|a, b| a.0 == b.0);
        choices.values = values.into();
        Ok(choices)
    }

    fn term(&self, which: Which) -> Option<&Term> {
        match which {
            Which::Code => Some(self.encoding.code()),
            Which::Zero => self.encoding.zero(),
            Which::Scale => Some(self.encoding.scale()),
            Which::Minimum => self.encoding.minimum(),
        }
    }

    fn value(&self, n: u64, k: u64, which: Which) -> f64 {
        let at = At { encoder: self, n, k, spots: RefCell::default() };
        self.term(which).map_or(0.0, |term| match term.eval(&at) {
            Number::Int(i) => i as f64,
            Number::Float(x) => f64::from(x),
        })
    }

    /// The elements that a number is read from.
    fn spots(&self, n: u64, k: u64, which: Which) -> Vec<Spot> {
        let at = At { encoder: self, n, k, spots: RefCell::default() };
        self.term(which).map(|term| term.eval(&at));
        let mut spots = at.spots.into_inner();
        let mut seen = Vec::new();
        spots.retain(|s| {
            !seen.contains(s) && {
                seen.push(*s);
                true
            }
        });
        spots
    }

    fn read(&self, choices: &Choices) -> u32 {
        let set = |bit: &Bit| self.tensors[bit.tensor][bit.at] & bit.mask != 0;
        choices.bits.iter().enumerate().fold(0, |word, (i, bit)| word | u32::from(set(bit)) << i)
    }

    fn write(&mut self, choices: &Choices, word: u32) {
        for (i, bit) in choices.bits.iter().enumerate() {
            let byte = &mut self.tensors[bit.tensor][bit.at];
            *byte = if word >> i & 1 == 0 { *byte & !bit.mask } else { *byte | bit.mask };
        }
    }

    fn take(&mut self, choices: &Choices) -> Result<(), String> {
        for bit in &choices.bits {
            let byte = &mut self.taken[bit.tensor][bit.at];
            if *byte & bit.mask != 0 {
                return Err(self.refused("codes of several values share bits"));
            }
            *byte |= bit.mask;
        }
        Ok(())
    }

    fn bytes(&mut self, spot: Spot) -> &mut [u8] {
        &mut self.tensors[spot.tensor][spot.at..spot.at + spot.element.size() as usize]
    }

    fn write_float(&mut self, spot: Spot, x: f32) {
        match spot.element {
            Element::F16 => self.bytes(spot).copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            Element::Bf16 => self.bytes(spot).copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            _ => self.bytes(spot).copy_from_slice(&x.to_le_bytes()),
        }
    }

    fn read_float(&self, spot: Spot) -> f32 {
        let end = spot.at + spot.element.size() as usize;
        spot.element.read(&self.tensors[spot.tensor][spot.at..end]).float()
    }

    fn refused(&self, why: &str) -> String {
        format!("{}: values cannot be stored so by trial: {why}", self.encoding)
    }
}

impl Group {
    /// The scale and the minimum that spread its values over the codes.
    fn suited(&self) -> (f64, f64) {
        let (low, high) = self.codes;
        let values = self.values.iter().map(|v| v.2);
        // Zero is always one of the values.
        let (least, most) = values.fold((0.0f64, 0.0f64), |(a, b), v| (a.min(v), b.max(v)));
        let span = (high - low).max(f64::MIN_POSITIVE);
        if self.minimum.is_some() {
            let scale = (most - least) / span;
            return (scale, scale * low - least);
        }
        if self.zero.values.len() > 1 {
            return ((most - least) / span, 0.0);
        }
        let zero = self.zero.values.first().map_or(0.0, |z| z.0);
        let (low, high) = ((low - zero).abs(), (high - zero).abs());
        let extreme = if most >= -least { most } else { least };
        // The side that has more codes is for the furthest value, where scales may have signs.
        let (from, to) = self.scale.choices.range();
        let signs = self.scale.float.is_some() || (from < 0.0 && to > 0.0);
        if signs && low > high {
            return (-extreme / low, 0.0);
        }
        (extreme.abs() / high.min(low).max(f64::MIN_POSITIVE), 0.0)
    }

    /// The zero that puts the least value at the first code.
    fn zero_for(&self, scale: f64) -> (f64, u32) {
        let least = self.values.iter().map(|v| v.2).fold(0.0, f64::min);
        let wish = if scale == 0.0 { 0.0 } else { self.codes.0 - least / scale };
        self.zero.nearest(wish)
    }

    fn error(&self, scale: f64, least: f64, zero: f64, codes: &Choices) -> f64 {
        let difference = |value: f64| {
            let wish = if scale == 0.0 { zero } else { (value + least) / scale + zero };
            (codes.nearest(wish).0 - zero) * scale - least - value
        };
        let weight = |i| self.weights.get(i).copied().unwrap_or(1.0);
        let values = self.values.iter().enumerate();
        values.map(|(i, v)| weight(i) * difference(v.2).powi(2)).sum()
    }
}

/// A value of a weight, and the elements that were read for it.
struct At<'a> {
    encoder: &'a Encoder<'a>,
    n: u64,
    k: u64,
    spots: RefCell<Vec<Spot>>,
}

impl Memory for At<'_> {
    fn place(&self, place: Place) -> i64 {
        self.encoder.layout.number(place, self.n, self.k)
    }

    fn read(&self, part: usize, index: &[Term]) -> Number {
        let (tensor, at) =
            self.encoder.layout.place(self.n, self.k, part, |i| index[i].eval(self).int());
        let element = self.encoder.layout.parts[part].element;
        let spot = Spot { tensor, at, element };
        self.spots.borrow_mut().push(spot);
        let end = at + element.size() as usize;
        element.read(self.encoder.tensors[tensor].get(at..end).unwrap_or_default())
    }

    fn table(&self, table: usize, index: i64) -> Number {
        self.encoder.encoding.tables()[table].entry(index)
    }
}
