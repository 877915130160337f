//! Making the packed form of a weight on the host: what the kernel `repack` makes of it on a GPU, bit for bit.
//!
//! An encoding's expressions are walked for many columns at a time ([`Run`]); bits of codes are moved as they are
//! wherever that is what the expressions do, see [`Moves`].

use std::ops::Range;

use super::decoder::Decoder;
use super::packing::{Packing, Plane, ROWS, bits, code_bits};
use super::run::{RUN, Run};
use super::{CodeKind, Element, Encoding, Number, Stored, Term};
use crate::random;

/// Packs weights of an encoding, band by band: bands are eight rows each, and independent.
pub struct Packer {
    packing: Packing,
    kind: CodeKind,
    moves: Option<Moves>,
    /// For each plane, the byte of a unit and the bit in it that each of its columns' codes of row 0 begins at, and how many
    /// bytes further on the next row's are.
    spots: Vec<(Vec<(usize, u32)>, usize)>,
    /// What each byte is as a code, where codes are elements of one byte: the part, and its indices.
    stored: Option<(usize, Vec<Term>, [u8; 256])>,
}

impl Packer {
    /// What packs weights of an encoding; an error where they have no packed form. How their codes lie is found once, here.
    pub fn new(encoding: &Encoding) -> Result<Packer, String> {
        let packing = Packing::of(encoding)?;
        let moves = Moves::find(encoding, &packing);
        let kind = encoding.def().code.kind;
        let spots = packing.planes.iter().map(|plane| {
            let first = |column| packing.place(*plane, 0, column);
            let spot = |column| {
                (
                    first(column).word as usize + first(column).bit as usize / 8,
                    first(column).bit % 8,
                )
            };
            let stride = packing.place(*plane, 1, 0).word - first(0).word;
            ((0..packing.columns).map(spot).collect(), stride as usize)
        });
        let spots = spots.collect();
        let float = match kind {
            CodeKind::E4m3 => Some(Element::F8e4m3),
            CodeKind::E5m2 => Some(Element::F8e5m2),
            _ => None,
        };
        let stored = match encoding.code() {
            Term::Read { part, index, .. }
                if float.is_some() && encoding.0.parts.get(*part).map(|p| p.element) == float =>
            {
                let code = |byte: u8| {
                    code_bits(kind, 0, float.map_or(Number::Int(0), |f| f.read(&[byte]))) as u8
                };
                Some((*part, index.clone(), std::array::from_fn(|byte| code(byte as u8))))
            }
            _ => None,
        };
        Ok(Packer { packing, kind, moves, spots, stored })
    }

    /// How many bands a weight has, and the bytes of each.
    pub fn bands(&self, decoder: &Decoder<'_>) -> (u64, u64) {
        (decoder.rows().div_ceil(ROWS), self.packing.band(decoder.columns()))
    }

    /// Writes a band, which `out` has the room for, of a weight of the encoding.
    pub fn band(&self, decoder: &Decoder<'_>, band: u64, out: &mut [u8]) {
        out.fill(0);
        let columns = decoder.columns();
        for row in 0..ROWS.min(decoder.rows().saturating_sub(band * ROWS)) {
            let n = band * ROWS + row;
            for (i, unit) in out.chunks_exact_mut(self.packing.bytes as usize).enumerate() {
                let from = i as u64 * self.packing.columns;
                let until = columns.min(from + self.packing.columns);
                match &self.moves {
                    Some(moves) if until - from == self.packing.columns => {
                        moves.run(decoder.block(n, from), i, row as usize, unit);
                    }
                    _ => self.codes(decoder, (n, row), from..until, unit),
                }
            }
            self.factors(decoder, (n, row), out);
        }
    }

    /// Writes the codes of row `n` of the weight, which is row `row` of a unit, whose columns are `columns` of the weight.
    fn codes(
        &self,
        decoder: &Decoder<'_>,
        (n, row): (u64, u64),
        columns: Range<u64>,
        unit: &mut [u8],
    ) {
        for from in columns.clone().step_by(RUN) {
            let run = Run::new(decoder, n, (from, columns.end), 1);
            let codes: [u8; RUN] = if let Some((part, index, codes)) = &self.stored {
                run.bytes(*part, index).map(|byte| codes[usize::from(byte)])
            } else {
                let numbers = run.eval(decoder.encoding().code());
                let code = |i| code_bits(self.kind, self.packing.added, numbers.get(i)) as u8;
                std::array::from_fn(code)
            };
            let first = (from - columns.start) as usize;
            let count = RUN.min((columns.end - from) as usize);
            for (plane, (spots, stride)) in self.packing.planes.iter().zip(&self.spots) {
                let mask = (u16::MAX >> (16 - plane.bits)) as u8;
                for (code, (byte, bit)) in codes[..count].iter().zip(&spots[first..]) {
                    unit[byte + row as usize * stride] |= (code >> plane.shift & mask) << bit;
                }
            }
        }
    }

    /// Writes the scales and the minimums of row `n` of the weight, which is row `row` of each unit of a band.
    fn factors(&self, decoder: &Decoder<'_>, (n, row): (u64, u64), band: &mut [u8]) {
        let packing = &self.packing;
        let columns = decoder.columns();
        let mut write = |element: Element, term: &Term, step: u64, at: &dyn Fn(u64) -> u64| {
            let size = element.size() as usize;
            for from in (0..columns).step_by(RUN * step as usize) {
                let numbers = Run::new(decoder, n, (from, columns), step).eval(term);
                for (i, k) in (from..columns).step_by(step as usize).take(RUN).enumerate() {
                    let bits = bits(element, numbers.get(i)).to_le_bytes();
                    let at =
                        (k / packing.columns * packing.bytes + at(k % packing.columns)) as usize;
                    band[at..at + size].copy_from_slice(&bits[..size]);
                }
            }
        };
        for factor in [Some(&packing.scale), packing.minimum.as_ref()].into_iter().flatten() {
            write(factor.element, &factor.inner_term, packing.group, &|column| {
                let index = row * packing.groups() + column / packing.group;
                factor.at + index * factor.element.size()
            });
            if let (Some((element, at)), Some(term)) = (factor.outer, &factor.outer_term) {
                write(element, term, packing.columns, &|_| at + row * element.size());
            }
        }
    }
}

impl Decoder<'_> {
    /// The packed form of the weight.
    pub fn packed(&self) -> Result<Vec<u8>, String> {
        let packer = Packer::new(self.encoding())?;
        let (count, size) = packer.bands(self);
        let mut all = vec![0; (count * size) as usize];
        let bands = all.chunks_exact_mut((size as usize).max(1));
        bands.enumerate().for_each(|(i, band)| packer.band(self, i as u64, band));
        Ok(all)
    }
}

/// How the bits of blocks become those of a row of a unit, of an encoding whose codes are bits of the block: none
/// depends on two, though it may be the opposite of one.
///
/// Such a map is found by asking: of blocks whose bit `i` is bit `j` of the number `i + 1`, one for each `j`, a code's
/// bit tells the number of the bit that it is. Random blocks then tell whether that is all there is to it.
struct Moves {
    /// Of one unit after another, until a unit begins with a block again.
    units: Vec<Unit>,
    /// Bytes of the blocks of a row of a unit.
    bytes: usize,
}

/// Moves of the codes of a row of a unit.
struct Unit {
    /// The planes' words of 32 bits, those of row 0.
    words: Vec<Word>,
    pieces: Vec<Piece>,
}

/// A word of a plane.
struct Word {
    /// Where it begins in row 0, and how far on in the next row.
    at: usize,
    stride: usize,
    /// Bits that are the opposite of what they are in a block.
    flipped: u32,
    /// How many of the pieces are its own, which follow one another.
    pieces: usize,
}

/// Neighbouring bits of a byte that are so in a code, too.
#[derive(Clone, Copy)]
struct Piece {
    byte: u32,
    down: u8,
    mask: u8,
    up: u8,
}

/// A bit of a code: the bit of the block that it is, and whether it is its opposite. One that is always the same has none.
#[derive(Clone, Copy, PartialEq)]
struct Source {
    bit: Option<usize>,
    flipped: bool,
}

impl Moves {
    fn find(encoding: &Encoding, packing: &Packing) -> Option<Moves> {
        let Stored::Blocks { values, .. } = encoding.def().stored else { return None };
        if !values.is_multiple_of(packing.columns) && !packing.columns.is_multiple_of(values) {
            return None;
        }
        let block = encoding.bytes(&[1, values])? as usize;
        let bits = usize::try_from(encoding.def().code.bits).ok()?;
        let codes = |bytes: &[u8]| -> Option<Vec<u64>> {
            let decoder = encoding.decoder_of(1, values, bytes).ok()?;
            let kind = encoding.def().code.kind;
            let code = |k| code_bits(kind, packing.added, decoder.code(0, k));
            Some((0..values).map(code).collect())
        };
        // Found.
        let base = codes(&vec![0; block])?;
        let mut numbers = vec![0usize; values as usize * bits];
        for j in 0..usize::BITS - (block * 8).leading_zeros() {
            let mut bytes = vec![0; block];
            let set = (0..block * 8).filter(|i| (i + 1) >> j & 1 == 1);
            set.for_each(|i| bytes[i / 8] |= 1 << (i % 8));
            for (k, code) in codes(&bytes)?.into_iter().enumerate() {
                let changed = code ^ base[k];
                (0..bits).for_each(|b| numbers[k * bits + b] |= (changed as usize >> b & 1) << j);
            }
        }
        let sources: Vec<Source> = numbers
            .into_iter()
            .enumerate()
            .map(|(i, number)| Source {
                bit: number.checked_sub(1),
                flipped: base[i / bits] >> (i % bits) & 1 == 1,
            })
            .collect();
        // And held to what expressions say.
        let mut rng = random::named(encoding.name(), 0);
        for _ in 0..8 {
            let mut bytes = vec![0; block];
            rng.fill(&mut bytes);
            let is_bit = |s: &Source| {
                s.flipped
                    ^ s.bit.is_some_and(|i| bytes.get(i / 8).is_some_and(|b| b >> (i % 8) & 1 == 1))
            };
            let moved = sources.chunks_exact(bits).map(|code| {
                code.iter().enumerate().map(|(b, s)| u64::from(is_bit(s)) << b).sum::<u64>()
            });
            if !moved.eq(codes(&bytes)?) {
                return None;
            }
        }
        Some(Moves::of(packing, &sources, bits, (values, block)))
    }

    /// Moves of the codes whose bits have these sources, of blocks of so many values and bytes.
    fn of(
        packing: &Packing,
        sources: &[Source],
        bits: usize,
        (values, block): (u64, usize),
    ) -> Moves {
        let units = (values / packing.columns).max(1);
        let unit = |i| Unit::of(packing, sources, bits, (values, block), i * packing.columns);
        let bytes = packing.columns.div_ceil(values) as usize * block;
        Moves { units: (0..units).map(unit).collect(), bytes }
    }

    /// Writes a row of the codes of unit `index` of a band; its blocks begin where `blocks` does.
    fn run(&self, blocks: &[u8], index: usize, row: usize, unit: &mut [u8]) {
        let blocks = &blocks[..self.bytes];
        let Unit { words, pieces } = &self.units[index % self.units.len()];
        let mut pieces = &pieces[..];
        for word in words {
            let (own, rest) = pieces.split_at(word.pieces);
            let bits = own.iter().fold(word.flipped, |bits, p| {
                bits ^ u32::from(blocks[p.byte as usize] >> p.down & p.mask) << p.up
            });
            unit[word.at + row * word.stride..][..4].copy_from_slice(&bits.to_le_bytes());
            pieces = rest;
        }
    }
}

impl Unit {
    /// As [`Moves::of`], of a unit that begins at value `from` of a block.
    fn of(
        packing: &Packing,
        sources: &[Source],
        bits: usize,
        (values, block): (u64, usize),
        from: u64,
    ) -> Unit {
        let (mut words, mut pieces) = (Vec::new(), Vec::new());
        for plane in &packing.planes {
            let stride = packing.place(*plane, 1, 0).word - packing.place(*plane, 0, 0).word;
            let mut placed: Vec<_> =
                (0..packing.columns).map(|k| (packing.place(*plane, 0, k), from + k)).collect();
            placed.sort_unstable_by_key(|(place, _)| place.word);
            for same in placed.chunk_by(|(a, _), (b, _)| a.word == b.word) {
                let (first, mut flipped) = (pieces.len(), 0);
                for (place, k) in same {
                    let before = (k / values) as usize * block;
                    let code = (k % values) as usize * bits;
                    let code = &sources[code..code + bits];
                    flipped |= moved(*plane, code, before, place.bit, &mut pieces);
                }
                words.push(Word {
                    at: same[0].0.word as usize,
                    stride: stride as usize,
                    flipped,
                    pieces: pieces.len() - first,
                });
            }
        }
        Unit { words, pieces }
    }
}

/// Adds the pieces of a code's part in a plane, whose lowest bit is bit `to` of its word; which bits of the word are flipped.
fn moved(plane: Plane, code: &[Source], before: usize, to: u32, pieces: &mut Vec<Piece>) -> u32 {
    let (mut flipped, mut last) = (0, None);
    for b in 0..plane.bits {
        let Some(source) = code.get((plane.shift + b) as usize) else { break };
        flipped |= u32::from(source.flipped) << (to + b);
        if let (Some(bit), true, Some(piece)) = (source.bit, last.is_some(), pieces.last_mut())
            && last == bit.checked_sub(1)
            && bit % 8 != 0
        {
            piece.mask = piece.mask << 1 | 1;
        } else if let Some(bit) = source.bit {
            let (byte, down) = ((before + bit / 8) as u32, (bit % 8) as u8);
            pieces.push(Piece { byte, down, mask: 1, up: (to + b) as u8 });
        }
        last = source.bit;
    }
    flipped
}

#[cfg(test)]
mod tests {
    use super::super::packing::packed_value;
    use super::super::{Code, EncodingDef, EncodingFault, Group};
    use super::*;

    /// Blocks of so many values, 32 or more, whose codes are `value`.
    fn encoding(values: u64, kind: CodeKind, bits: u32, value: &str) -> Encoding {
        tried(values, kind, bits, value).expect("a definition")
    }

    fn tried(
        values: u64,
        kind: CodeKind,
        bits: u32,
        value: &str,
    ) -> Result<Encoding, EncodingFault> {
        let field = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
        Encoding::new(EncodingDef {
            name: "tried".to_owned(),
            doc: String::new(),
            stored: Stored::Blocks {
                values,
                fields: vec![field("d", "f32"), field("q", "u8 [32]"), field("s", "i8 [256]")],
            },
            tables: Vec::new(),
            constants: Vec::new(),
            lets: Vec::new(),
            zero: None,
            group: Group { n: Some(1), k: Some(values) },
            code: Code { kind, bits, value: value.to_owned() },
            scale: "d".to_owned(),
            minimum: None,
            when: None,
            activations: None,
            gguf: None,
            packed: false,
        })
    }

    fn is_moved(encoding: &Encoding) -> bool {
        Moves::find(encoding, &Packing::of(encoding).expect("a packed form")).is_some()
    }

    #[test]
    fn values_survive() {
        for (values, kind, bits, value, moves) in [
            // A unit that is the second half of a block.
            (256, CodeKind::Signed, 8, "s[k & 255]", true),
            (32, CodeKind::Unsigned, 4, "q[k & 15] >> (k >> 4 & 1) * 4 & 15", true),
            // A code of two bytes' bits.
            (32, CodeKind::Unsigned, 6, "q[k & 31] & 15 | (q[31 - (k & 31)] >> 5 & 3) << 4", true),
            (32, CodeKind::Signed, 8, "s[k & 31]", true),
            (32, CodeKind::Unsigned, 8, "255 - q[k & 31]", true),
            // What is no bit of the block.
            (32, CodeKind::Unsigned, 4, "(q[k & 31] & 15) * (q[0] & 1)", false),
            (32, CodeKind::Unsigned, 5, "(q[k & 31] & 15) + (q[0] & 15)", false),
            (
                32,
                CodeKind::Unsigned,
                4,
                "k % 3 == 1 ? min(q[k & 31] & 15, 9) : max(q[31] >> 4, 2 ** (k & 3)) ^ (q[0] & 1) << 3",
                false,
            ),
            (
                32,
                CodeKind::Unsigned,
                4,
                "!(q[k & 31] > 7 && n < 5) + floor(q[k & 31] / 32) + abs(-(k & 3))",
                false,
            ),
        ] {
            let encoding = encoding(values, kind, bits, value);
            assert_eq!(is_moved(&encoding), moves, "{value}");
            // A unit and a part of one, a band and a part of one.
            let (rows, columns) = (11, if values == 32 { 160 } else { 512 });
            let mut rng = random::named(value, 1);
            let tensors = encoding
                .random((rows, columns), Some(Encoding::TAME), &mut rng)
                .expect("random bytes");
            let parts = tensors.iter().map(|(_, bytes)| &bytes[..]).collect();
            let decoder = encoding.decoder(rows, columns, parts).expect("their sizes");
            let packed = decoder.packed().expect("a packed form");
            let mut row = vec![0.0; columns as usize];
            for n in 0..rows {
                decoder.row(n, 0, &mut row);
                for (k, value) in row.iter().enumerate() {
                    let found = packed_value(&encoding, columns, &packed, n, k as u64);
                    assert_eq!(found, Ok(*value), "{} at {n}, {k}", encoding.def().code.value);
                    // Of many columns at once it is what it is of one.
                    let (code, scale) = (decoder.code(n, k as u64), decoder.scale(n, k as u64));
                    assert_eq!(
                        code.float() * scale,
                        *value,
                        "{} at {n}, {k}",
                        encoding.def().code.value
                    );
                }
            }
        }
    }

    #[test]
    fn the_deepest_expression_fits_a_small_stack() {
        let deep = |levels| format!("q[0]{}", " + 0".repeat(levels));
        let fault = tried(32, CodeKind::Unsigned, 8, &deep(63)).expect_err("it is too deep");
        assert!(fault.message.contains("at most 64 levels"), "{}", fault.message);
        let encoding = encoding(32, CodeKind::Unsigned, 8, &deep(62));
        let read = move || {
            let bytes = vec![0; encoding.bytes(&[1, 32]).expect("a size") as usize];
            let decoder = encoding.decoder_of(1, 32, &bytes).expect("its bytes");
            decoder.row(0, 0, &mut [0.0; 32]);
        };
        let thread = std::thread::Builder::new().stack_size(1 << 20);
        thread.spawn(read).expect("a thread").join().expect("no overflow");
    }
}
