//! Blocks of a row, encoded by least squares.
//!
//! All blocks of a format are laid out alike, so that what each bit does is found once, of a block of zeros. Of each group the
//! scale (and the minimum) is fitted to the codes that it leads to and these to it in turn; then floats that groups share
//! are chosen so that all can have what they want, whole numbers beside them one by one, and the floats fitted again.

use std::collections::HashMap;

use half::{bf16, f16};

use super::super::{Element, Encoding, Stored};
use super::{Choices, Encoder, Factor, Spot, Which};

/// What the scale that spreads a group's values over the codes is multiplied by, to begin with.
const AROUND: [f64; 7] = [0.8, 0.87, 0.93, 1.0, 1.06, 1.15, 1.3];
/// Rounds of codes for a scale and a scale for codes.
const ROUNDS: usize = 3;
/// Rounds of floats for whole numbers and whole numbers for floats.
const FLOAT_ROUNDS: usize = 3;

/// What every block of a format is like.
pub(super) struct Blocks {
    values: usize,
    bytes: usize,
    groups: Vec<Group>,
    codes: Codes,
}

/// A group of a block's values.
struct Group {
    scale: Factor,
    minimum: Option<Factor>,
    /// The first of its values, and the bits of each.
    first: usize,
    codes: Vec<Choices>,
}

/// The codes that there are, less the zero.
struct Codes {
    values: Vec<f64>,
    /// Whether they are whole numbers without a gap.
    whole: bool,
}

impl Codes {
    /// The place of the nearest to `x`.
    fn nearest(&self, x: f64) -> usize {
        let last = self.values.len() - 1;
        if self.whole {
            return (x - self.values[0]).round().clamp(0.0, last as f64) as usize;
        }
        let after = self.values.partition_point(|v| *v < x).min(last);
        let before = after.saturating_sub(1);
        if x - self.values[before] < self.values[after] - x { before } else { after }
    }

    fn range(&self) -> (f64, f64) {
        (self.values[0], self.values[self.values.len() - 1])
    }
}

/// A value with its weight.
type Weighted = (f64, f64);

/// What a group has of a block.
#[derive(Clone, Default)]
struct Fit {
    scale: f64,
    minimum: f64,
    codes: Vec<usize>,
    error: f64,
}

/// What a block is made of: the floats, and of each group the places of its scale's and minimum's whole numbers.
#[derive(Clone, Default)]
struct Block {
    floats: Vec<(Spot, f64)>,
    factors: Vec<(usize, usize)>,
    fits: Vec<Fit>,
    error: f64,
}

impl Blocks {
    /// What blocks of an encoding are like; an error where that cannot be found out value by value.
    pub(super) fn of(encoding: &Encoding) -> Result<Option<Blocks>, String> {
        let &Stored::Blocks { values, .. } = &encoding.def().stored else { return Ok(None) };
        let width = encoding.def().group.k.unwrap_or(values).min(values);
        let layout = encoding.layout(1, values)?;
        let bytes = layout.bytes as usize;
        let zeros = vec![vec![0; bytes]];
        let (taken, known) = (zeros.clone(), HashMap::new());
        let mut encoder =
            Encoder { encoding, layout, tensors: zeros, taken, known, importance: &[] };
        let mut groups = Vec::new();
        let mut set: Option<Vec<f64>> = None;
        for first in (0..values).step_by(width as usize) {
            let scale = encoder.factor(0, first, Which::Scale)?;
            let minimum = encoding.minimum().map(|_| encoder.factor(0, first, Which::Minimum));
            let minimum = minimum.transpose()?;
            let zeros = encoder.choices(0, first, Which::Zero)?;
            if zeros.values.len() > 1 {
                return Ok(None);
            }
            let zero = zeros.values.first().map_or(0.0, |z| z.0);
            let mut codes = Vec::new();
            for k in first..(first + width).min(values) {
                let choices = encoder.choices(0, k, Which::Code)?;
                encoder.take(&choices)?;
                let found: Vec<f64> = choices.values.iter().map(|(v, _)| v - zero).collect();
                if found.len() < 2 || set.get_or_insert_with(|| found.clone()) != &found {
                    return Err(encoder.refused("values have different codes"));
                }
                codes.push(choices);
            }
            groups.push(Group { scale, minimum, first: first as usize, codes });
        }
        let values_of = set.unwrap_or_default();
        let whole = values_of.windows(2).all(|w| w[1] - w[0] == 1.0);
        let codes = Codes { values: values_of, whole };
        Ok(Some(Blocks { values: values as usize, bytes, groups, codes }))
    }

    /// Encodes rows of whole blocks; `importance` has a weight for each column, or is empty.
    pub(super) fn encode(
        &self,
        columns: usize,
        values: &[f32],
        importance: &[f32],
    ) -> Result<Vec<u8>, String> {
        let mut out = vec![0; values.len() / self.values * self.bytes];
        let weight = |k: usize| importance.get(k).map_or(1.0, |w| f64::from(*w));
        let blocks = values.chunks_exact(self.values).zip(out.chunks_exact_mut(self.bytes));
        for (i, (values, bytes)) in blocks.enumerate() {
            let from = i * self.values % columns;
            let values = values.iter().enumerate();
            let all: Vec<Weighted> =
                values.map(|(k, v)| (f64::from(*v), weight(from + k))).collect();
            self.block(&all, bytes)?;
        }
        Ok(out)
    }

    fn block(&self, values: &[Weighted], bytes: &mut [u8]) -> Result<(), String> {
        let of = |group: &Group| &values[group.first..group.first + group.codes.len()];
        let wanted: Vec<Fit> = self.groups.iter().map(|g| self.fit(g, of(g))).collect();
        let mut floats = self.floats(&wanted);
        let mut best: Option<Block> = None;
        for _ in 0..FLOAT_ROUNDS {
            let block = self.with_floats(values, &wanted, &floats);
            let again = self.refitted(values, &block);
            let better = best.as_ref().is_none_or(|best| block.error < best.error);
            if better {
                best = Some(block);
            }
            if again == floats {
                break;
            }
            floats = again;
        }
        let best = best.unwrap_or_default();
        if best.floats.iter().any(|(_, x)| !x.is_finite()) {
            return Err("values are too large for the floats of its blocks".to_owned());
        }
        for (spot, x) in &best.floats {
            write_float(bytes, *spot, *x);
        }
        for ((group, fit), (scale, minimum)) in
            self.groups.iter().zip(&best.fits).zip(&best.factors)
        {
            set(bytes, &group.scale.choices, *scale);
            if let Some(factor) = &group.minimum {
                set(bytes, &factor.choices, *minimum);
            }
            for (choices, code) in group.codes.iter().zip(&fit.codes) {
                set(bytes, choices, *code);
            }
        }
        Ok(())
    }

    /// The scale and the minimum that suit a group, as if any could be stored.
    fn fit(&self, group: &Group, values: &[Weighted]) -> Fit {
        let (low, high) = self.codes.range();
        let ends = values.iter().fold((0.0f64, 0.0f64), |(a, b), (v, _)| (a.min(*v), b.max(*v)));
        let signed = group.minimum.as_ref().is_some_and(|m| m.float.is_some() && self.is_alone(m));
        let mut best: Option<Fit> = None;
        let (scale, minimum) = if group.minimum.is_some() {
            // Where minimums are of both signs the least value need not be zero.
            let least = values.iter().map(|(v, _)| *v).fold(f64::INFINITY, f64::min);
            let least = if signed { least } else { ends.0 };
            let most = values.iter().map(|(v, _)| *v).fold(f64::NEG_INFINITY, f64::max);
            let scale = (most - least) / (high - low);
            (scale, scale * low - least)
        } else {
            let extreme = if ends.1 >= -ends.0 { ends.1 } else { ends.0 };
            let (from, to) = group.scale.choices.range();
            let signs = group.scale.float.is_some() || (from < 0.0 && to > 0.0);
            // The side that has more codes is for the furthest value, where scales may have signs.
            let side = if low < 0.0 { high.min(-low) } else { high };
            (if signs && -low > high { extreme / low } else { extreme.abs() / side }, 0.0)
        };
        for factor in AROUND {
            let (mut scale, mut minimum) = (scale * factor, minimum);
            for _ in 0..ROUNDS {
                let fit = self.coded(values, scale, minimum);
                let better = best.as_ref().is_none_or(|best| fit.error < best.error);
                let again = self.refit(values, &fit, group.minimum.is_some(), signed);
                if better {
                    best = Some(fit);
                }
                if again == (scale, minimum) {
                    break;
                }
                (scale, minimum) = again;
            }
        }
        best.unwrap_or_default()
    }

    /// Whether no other group reads the float of a factor.
    fn is_alone(&self, factor: &Factor) -> bool {
        let reads = |g: &&Group| g.minimum.as_ref().is_some_and(|m| m.float == factor.float);
        self.groups.iter().filter(reads).count() == 1
    }

    /// The nearest codes for a scale and a minimum.
    fn coded(&self, values: &[Weighted], scale: f64, minimum: f64) -> Fit {
        let mut error = 0.0;
        let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let codes = values.iter().map(|(v, w)| {
            let code = self.codes.nearest((v + minimum) * by);
            error += w * (self.codes.values[code] * scale - minimum - v).powi(2);
            code
        });
        let codes = codes.collect();
        Fit { scale, minimum, codes, error }
    }

    /// The scale and the minimum that suit codes best.
    fn refit(&self, values: &[Weighted], fit: &Fit, has_minimum: bool, signed: bool) -> (f64, f64) {
        let mut sums = Sums::default();
        for ((v, w), code) in values.iter().zip(&fit.codes) {
            sums.add(*w, self.codes.values[*code], if has_minimum { 1.0 } else { 0.0 }, *v);
        }
        let (scale, minimum) = sums.solve((fit.scale, fit.minimum));
        if minimum < 0.0 && !signed { sums.without_minimum(fit.scale) } else { (scale, minimum) }
    }

    /// Floats so that of those groups that share one that which wants most can have it.
    fn floats(&self, wanted: &[Fit]) -> Vec<(Spot, f64)> {
        let mut floats: Vec<(Spot, f64)> = Vec::new();
        for (group, fit) in self.groups.iter().zip(wanted) {
            let factors =
                [Some((&group.scale, fit.scale)), group.minimum.as_ref().map(|m| (m, fit.minimum))];
            for (factor, wish) in factors.into_iter().flatten() {
                let Some(spot) = factor.float else { continue };
                let (least, most) = factor.choices.range();
                let furthest = if most.abs() >= least.abs() { most } else { least };
                let float = if furthest == 0.0 { 0.0 } else { wish / furthest };
                match floats.iter_mut().find(|(s, _)| *s == spot) {
                    Some(entry) if float.abs() > entry.1.abs() => entry.1 = float,
                    Some(_) => {}
                    None => floats.push((spot, float)),
                }
            }
        }
        floats.into_iter().map(|(spot, x)| (spot, stored(spot, x))).collect()
    }

    /// Whole numbers and codes for these floats.
    fn with_floats(&self, values: &[Weighted], wanted: &[Fit], floats: &[(Spot, f64)]) -> Block {
        let float = |factor: &Factor| {
            let spot = factor.float.and_then(|s| floats.iter().find(|(f, _)| *f == s));
            spot.map_or(1.0, |(_, x)| *x)
        };
        let mut block = Block { floats: floats.to_vec(), ..Block::default() };
        for (group, wish) in self.groups.iter().zip(wanted) {
            let values = &values[group.first..group.first + group.codes.len()];
            let by = float(&group.scale);
            let minimums = group
                .minimum
                .as_ref()
                .map_or_else(|| vec![(0, 0.0)], |m| near(&m.choices, wish.minimum, float(m)));
            let scales = near(&group.scale.choices, wish.scale, by);
            let mut best: Option<((usize, usize), Fit)> = None;
            for (scale, s) in &scales {
                for (minimum, m) in &minimums {
                    let fit = self.coded(values, *s, *m);
                    if best.as_ref().is_none_or(|(_, best)| fit.error < best.error) {
                        best = Some(((*scale, *minimum), fit));
                    }
                }
            }
            let (factors, fit) = best.unwrap_or_default();
            block.error += fit.error;
            block.factors.push(factors);
            block.fits.push(fit);
        }
        block
    }

    /// The floats that suit a block's whole numbers and codes best.
    fn refitted(&self, values: &[Weighted], block: &Block) -> Vec<(Spot, f64)> {
        let mut floats = block.floats.clone();
        let spots: Vec<(Option<Spot>, Option<Spot>)> = self
            .groups
            .iter()
            .map(|g| (g.scale.float, g.minimum.as_ref().and_then(|m| m.float)))
            .collect();
        let mut pairs = spots.clone();
        pairs.dedup();
        for pair in pairs {
            let mut sums = Sums::default();
            for (i, group) in self.groups.iter().enumerate().filter(|(i, _)| spots[*i] == pair) {
                let (scale, minimum) = block.factors[i];
                let a = group.scale.choices.values.get(scale).map_or(0.0, |c| c.0);
                let b = group.minimum.as_ref().and_then(|m| m.choices.values.get(minimum));
                let b = b.map_or(0.0, |c| c.0);
                let values = values[group.first..].iter().zip(&block.fits[i].codes);
                for ((v, w), code) in values {
                    sums.add(*w, a * self.codes.values[*code], b, *v);
                }
            }
            let now = |spot: Option<Spot>| {
                floats.iter().find(|(s, _)| Some(*s) == spot).map_or(0.0, |(_, x)| *x)
            };
            let (scale, minimum) = sums.solve((now(pair.0), now(pair.1)));
            for (spot, x) in &mut floats {
                if Some(*spot) == pair.0 {
                    *x = stored(*spot, scale);
                } else if Some(*spot) == pair.1 {
                    *x = stored(*spot, minimum);
                }
            }
        }
        floats
    }
}

/// Sums of weighted products, of `v` that is to be `a * x - b * y`.
#[derive(Default)]
struct Sums {
    aa: f64,
    ab: f64,
    bb: f64,
    av: f64,
    bv: f64,
}

impl Sums {
    fn add(&mut self, w: f64, a: f64, b: f64, v: f64) {
        self.aa += w * a * a;
        self.ab += w * a * b;
        self.bb += w * b * b;
        self.av += w * a * v;
        self.bv += w * b * v;
    }

    /// `x` and `y` with the least squares; as they were where any would do.
    fn solve(&self, before: (f64, f64)) -> (f64, f64) {
        let determinant = self.aa * self.bb - self.ab * self.ab;
        if determinant > 1e-12 * self.aa * self.bb {
            let x = (self.av * self.bb - self.ab * self.bv) / determinant;
            let y = (self.ab * self.av - self.aa * self.bv) / determinant;
            return (x, y);
        }
        if self.aa > 0.0 && self.bb == 0.0 {
            return (self.av / self.aa, before.1);
        }
        before
    }

    /// The same with `y` of 0.
    fn without_minimum(&self, before: f64) -> (f64, f64) {
        (if self.aa > 0.0 { self.av / self.aa } else { before }, 0.0)
    }
}

/// The places of choices whose product with a float comes near to `wish`, and that product.
fn near(choices: &Choices, wish: f64, float: f64) -> Vec<(usize, f64)> {
    let values = &choices.values;
    let relative = if float == 0.0 { 0.0 } else { wish / float };
    let after = values.partition_point(|(v, _)| *v < relative);
    let around = after.saturating_sub(2)..(after + 2).min(values.len());
    around.map(|i| (i, values[i].0 * float)).collect()
}

/// A float as it can be stored.
fn stored(spot: Spot, x: f64) -> f64 {
    match spot.element {
        Element::F16 => f16::from_f64(x).to_f64(),
        Element::Bf16 => bf16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

fn write_float(block: &mut [u8], spot: Spot, x: f64) {
    let bytes = &mut block[spot.at..spot.at + spot.element.size() as usize];
    match spot.element {
        Element::F16 => bytes.copy_from_slice(&f16::from_f64(x).to_le_bytes()),
        Element::Bf16 => bytes.copy_from_slice(&bf16::from_f64(x).to_le_bytes()),
        _ => bytes.copy_from_slice(&(x as f32).to_le_bytes()),
    }
}

/// Sets the bits of a choice in a block of zeros.
fn set(block: &mut [u8], choices: &Choices, place: usize) {
    let word = choices.values.get(place).map_or(0, |c| c.1);
    for (i, bit) in choices.bits.iter().enumerate() {
        if word >> i & 1 == 1 {
            block[bit.at] |= bit.mask;
        }
    }
}
