//! Rotary position embedding.

use infernum_ir::StepInput;

use super::super::simd;
use super::{Args, Float, Kernel, Operand, Site, act, act_mut, parallel};

struct Rope {
    dtype: Float,
    heads: usize,
    d: usize,
    turn: Turn,
}

/// How heads are rotated.
pub(super) struct Turn {
    /// Pairs that turn.
    pub(super) r: usize,
    pub(super) scale: f64,
    interleaved: bool,
}

pub(super) fn rope(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(dtype), true) = (site.activation(0), site.channel(2)) else { return Ok(None) };
    let (Some(heads), Some(d)) = (site.dim(0, 1).ok(), site.dim(0, 0).ok()) else {
        return Ok(None);
    };
    Ok(Some(Box::new(Rope { dtype, heads, d, turn: Turn::of(site, 2)? })))
}

impl Kernel for Rope {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (isa, d, r) = (args.isa, self.d, self.turn.r);
        let (x, out) = (args.source(0)?, args.take(0)?);
        let table = table(args, 1, 2, self.turn.scale)?;
        let head_bytes = d * self.dtype.size();
        parallel::rows(out, self.heads * head_bytes, self.heads * d, |n, token| {
            let turns = &table[n * r..(n + 1) * r];
            for (head, row) in token.chunks_exact_mut(head_bytes).enumerate() {
                let from = (n * self.heads + head) * head_bytes;
                parallel::scratch(0, d, |v| {
                    simd::widen(isa, act(self.dtype, x.row(from, row)), v);
                    self.turn.turn(v, turns);
                    simd::narrow(isa, v, act_mut(self.dtype, row));
                });
            }
        });
        Ok(())
    }
}

impl Turn {
    /// As a launch's attributes and its operand `freqs` say.
    pub(super) fn of(site: &Site<'_>, freqs: usize) -> Result<Turn, String> {
        let interleaved = site.choice("style") == "interleaved";
        Ok(Turn { r: site.dim(freqs, 0)?, scale: site.num("scale"), interleaved })
    }

    /// Rotates one head.
    pub(super) fn turn(&self, v: &mut [f32], turns: &[[f32; 2]]) {
        let turn = |a: &mut f32, b: &mut f32, [cos, sin]: [f32; 2]| {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        };
        if self.interleaved {
            for (pair, t) in v.chunks_exact_mut(2).zip(turns) {
                let (a, b) = pair.split_at_mut(1);
                turn(&mut a[0], &mut b[0], *t);
            }
        } else {
            let (a, b) = v.split_at_mut(self.r);
            for ((a, b), t) in a.iter_mut().zip(b).zip(turns) {
                turn(a, b, *t);
            }
        }
    }
}

/// The scaled cosines and sines of every token: of the operands that are its position and the
/// frequencies.
pub(super) fn table<'a>(
    args: &'a mut Args<'_>,
    positions: usize,
    freqs: usize,
    scale: f64,
) -> Result<&'a [[f32; 2]], String> {
    let ids = args.ids(positions)?;
    let key = match args.operands[freqs] {
        Some(Operand::Weight(_, index)) => {
            args.view(positions)?.input.map(|input| (input, index, scale.to_bits()))
        }
        _ => None,
    };
    let freqs = args.channel(freqs)?.ok_or("no frequencies")?;
    Ok(args.rope.get(key, |table| {
        for n in 0..ids.len() {
            // Angle, sine, cosine and their scaling are f32 by the op's definition.
            let position = ids.get(n) as f32;
            table.extend(freqs.iter().map(|freq| {
                let (sin, cos) = f64::from(position * freq).sin_cos();
                [cos as f32 * scale as f32, sin as f32 * scale as f32]
            }));
        }
    }))
}

/// Which table: of which positions, of which frequencies, how scaled.
type Key = (StepInput, u32, u64);

/// Cosines and sines by token, shared by all layers of a step.
#[derive(Default)]
pub(crate) struct RopeTables {
    tables: Vec<(Option<Key>, Vec<[f32; 2]>)>,
    /// How many of them belong to this step; the rest keep their memory for it.
    filled: usize,
}

impl RopeTables {
    /// Forgets the last step's.
    pub(in super::super) fn begin_step(&mut self) {
        self.filled = 0;
    }

    fn get(&mut self, key: Option<Key>, fill: impl FnOnce(&mut Vec<[f32; 2]>)) -> &[[f32; 2]] {
        let found = self.tables[..self.filled].iter().position(|t| key.is_some() && t.0 == key);
        let index = found.unwrap_or_else(|| {
            if self.filled == self.tables.len() {
                self.tables.push((None, Vec::new()));
            }
            let (k, table) = &mut self.tables[self.filled];
            *k = key;
            table.clear();
            fill(table);
            // A table without a key serves one launch only.
            self.filled += usize::from(key.is_some());
            self.filled - usize::from(key.is_some())
        });
        &self.tables[index].1
    }
}
