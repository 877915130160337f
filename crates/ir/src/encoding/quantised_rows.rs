//! Activations of 8 bits, as products of 8-bit floats take them: in each row the groups of 128 columns share a scale.
//!
//! The op `quantise_rows` makes them and products read them, in the same step: no checkpoint has them, so no file says
//! how they are stored. Codes lie in the order of a row of packed weights (see [`packing`]), so that tensor cores
//! multiply both as they are: 64 columns after 64, of which each pair of every eight has sixteen bytes, and in these words hold
//! columns of two eights in turn. Scales lie by groups, so that those of neighbouring tokens are side by side.
//!
//! Rows of the KV cache are stored alike (`quantised_heads`): there the group is a head, and its scale follows from what is
//! written, so that a row is rounded once and read as often as there are tokens to come.

use std::sync::LazyLock;

use super::{Code, CodeKind, Element, Encoding, EncodingDef, Group, Stored, packing};

/// Columns that share a scale.
pub const GROUP: usize = 128;

/// The largest magnitude of a code: that of `f8e4m3`.
const LARGEST: f32 = 448.0;

/// Why products of such rows with weights of an encoding have no kernels, if they have none: these scale sums of 128
/// columns, of eight rows of a weight or once all columns are summed.
pub(super) fn are_multiplied_with(def: &EncodingDef) -> Result<(), String> {
    let fits = def.group.k.is_none_or(|k| {
        k.is_multiple_of(GROUP as u64)
            && def.group.n.is_none_or(|n| n.is_multiple_of(packing::ROWS))
    });
    if def.code.kind == CodeKind::E4m3 && fits {
        return Ok(());
    }
    let (kind, group, rows) = (def.code.kind.name(), def.group, packing::ROWS);
    Err(format!(
        "activations are codes of kind e4m3 in groups of {GROUP} columns: expected weights that are, too, with a scale for a row \
         or for multiples of {rows} rows and {GROUP} columns; found {kind} in groups of {group:?}"
    ))
}

/// How such rows are stored; its name in types is `quantised_rows`.
pub fn quantised_rows() -> &'static Encoding {
    static ROWS: LazyLock<Encoding> = LazyLock::new(|| {
        made(EncodingDef {
            name: "quantised_rows".to_owned(),
            doc: "Activations of 8 bits.".to_owned(),
            // Rows of whole 16 bytes, which the copy engine asks for.
            stored: codes_and_scales("f32 [ceil(K / 128), ceil(N / 4) * 4]"),
            // Of sixteen columns: one of the upper eight and of the lower one in turn.
            lets: vec![(
                "at".to_owned(),
                "floor(k / 64) * 64 + floor(k % 8 / 2) * 16 + floor(k % 64 / 16) * 4 + k % 2 * 2 + 1 - floor(k % 16 / 8)"
                    .to_owned(),
            )],
            group: Group { n: Some(1), k: Some(GROUP as u64) },
            code: Code { kind: CodeKind::E4m3, bits: 8, value: "codes[n][at]".to_owned() },
            scale: "scales[floor(k / 128)][n]".to_owned(),
            ..blank()
        })
    });
    &ROWS
}

/// How heads `[N, K]` of the KV cache are stored, each with a scale of its own: all codes, and then all scales. On a GPU
/// they are those of a block of rows, head after head, so that what a kernel reads of a head is one piece of memory; on a
/// CPU those of a row, whose scales begin where its codes end.
pub fn quantised_heads() -> &'static Encoding {
    static HEADS: LazyLock<Encoding> = LazyLock::new(|| {
        made(EncodingDef {
            name: "quantised_heads".to_owned(),
            doc: "Rows of the KV cache in 8 bits.".to_owned(),
            stored: codes_and_scales("f32 [N]"),
            group: Group { n: Some(1), k: None },
            code: Code { kind: CodeKind::E4m3, bits: 8, value: "codes[n][k]".to_owned() },
            scale: "scales[n]".to_owned(),
            ..blank()
        })
    });
    &HEADS
}

fn made(def: EncodingDef) -> Encoding {
    Encoding::new(def).unwrap_or_else(|fault| unreachable!("it is the same each time: {fault}"))
}

fn codes_and_scales(scales: &str) -> Stored {
    let tensors = [("codes", "f8e4m3 [N, K]"), ("scales", scales)];
    Stored::Tensors {
        of: "*".to_owned(),
        tensors: tensors.map(|(name, ty)| (name.to_owned(), ty.to_owned())).to_vec(),
        broadcast: Vec::new(),
        unused: Vec::new(),
    }
}

/// What the definitions here have in common.
fn blank() -> EncodingDef {
    EncodingDef {
        name: String::new(),
        doc: String::new(),
        stored: codes_and_scales(""),
        tables: Vec::new(),
        constants: Vec::new(),
        lets: Vec::new(),
        group: Group { n: None, k: None },
        code: Code { kind: CodeKind::E4m3, bits: 8, value: String::new() },
        zero: None,
        scale: String::new(),
        minimum: None,
        when: None,
        activations: None,
        gguf: None,
        packed: false,
    }
}

/// The codes of a group and their scale: the one with which the largest magnitude is the largest that a code has. In
/// f32, operation by operation, as kernels do it: which of two neighbours a value becomes must not hang on the last bit
/// of a scale. What is too small for a scale with an inverse is zero; with a NaN or an infinity all of it is NaN.
pub fn quantise_group(group: &[f32]) -> (Vec<u8>, f32) {
    let most = group.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    if group.iter().any(|x| !x.is_finite()) {
        return (vec![0; group.len()], f32::NAN);
    }
    let scale = most / LARGEST;
    let inverse = Some(1.0 / scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
    (group.iter().map(|x| e4m3(x * inverse)).collect(), scale)
}

/// Rows of so many columns, as they are stored.
pub fn quantise_rows(values: &[f32], columns: usize) -> Result<Vec<u8>, String> {
    let rows = values.len() / columns.max(1);
    let mut bytes = vec![0; quantised_rows().layout(rows as u64, columns as u64)?.bytes as usize];
    let scales = rows * columns;
    for (i, group) in values.chunks(GROUP).enumerate() {
        let (codes, scale) = quantise_group(group);
        let at = i * GROUP;
        for (k, code) in codes.iter().enumerate() {
            bytes[at + k / 64 * 64 + k % 8 / 2 * 16 + k % 64 / 16 * 4 + k % 2 * 2 + 1
                - k % 16 / 8] = *code;
        }
        let (row, group) = (at / columns, at % columns / GROUP);
        let to = scales + (group * rows.next_multiple_of(4) + row) * 4;
        bytes[to..to + 4].copy_from_slice(&scale.to_le_bytes());
    }
    Ok(bytes)
}

/// Bytes of a head of `dim` values in the cache, its scale included.
pub fn bytes_of_head(dim: u64) -> u64 {
    dim.saturating_add(size_of::<f32>() as u64)
}

/// Heads of `dim` values as a CPU's cache has them: codes, and right behind them scales.
pub fn quantise_heads(values: &[f32], dim: usize) -> Vec<u8> {
    let heads: Vec<(Vec<u8>, f32)> = values.chunks(dim.max(1)).map(quantise_group).collect();
    let scales = heads.iter().flat_map(|(_, scale)| scale.to_le_bytes());
    heads.iter().flat_map(|(codes, _)| codes.iter().copied()).chain(scales).collect()
}

/// The nearest `f8e4m3`, ties to even; beyond the largest that.
fn e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs().min(LARGEST);
    // Its exponent, or that of the smallest normal number: below, numbers are as far apart.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    // In steps of its last bit: from 8 to 16 for normal numbers. What is rounded up to 16 is 8 of the next exponent.
    let steps = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as u8;
    sign | ((((exponent + 6) as u8) << 3) + steps)
}

/// The value of a code under a scale.
pub fn value(code: u8, scale: f32) -> f32 {
    Element::F8e4m3.read(&[code]).float() * scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_its_own_nearest() {
        for code in (0..=255u8).filter(|c| c & 0x7f != 0x7f) {
            let x = Element::F8e4m3.read(&[code]).float();
            assert_eq!(e4m3(x), code, "{x}");
        }
        // Halfway between neighbours, to the even one; too large, the largest.
        assert_eq!([e4m3(1.0625), e4m3(1.1875), e4m3(1000.0)], [0x38, 0x3a, 0x7e]);
    }

    #[test]
    fn what_is_stored_is_what_was_rounded() {
        let (rows, columns) = (3, 2 * GROUP);
        let values: Vec<f32> = (0..rows * columns)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * (1 + i / GROUP) as f32)
            .collect();
        let bytes = quantise_rows(&values, columns).expect("a matrix");
        let (rows, columns) = (rows as u64, columns as u64);
        let decoder = quantised_rows().decoder_of(rows, columns, &bytes).expect("all is there");
        for (n, row) in values.chunks(columns as usize).enumerate() {
            let mut found = vec![0.0; row.len()];
            decoder.row(n as u64, 0, &mut found);
            let groups = row.chunks(GROUP).flat_map(|group| {
                let (codes, scale) = quantise_group(group);
                codes.into_iter().map(move |code| value(code, scale))
            });
            assert_eq!(found, groups.collect::<Vec<_>>());
            let far = row.iter().zip(&found).find(|(x, y)| (*x - *y).abs() > x.abs() / 16.0 + 0.1);
            assert_eq!(far, None);
        }
    }

    #[test]
    fn heads_are_stored_with_a_scale_each() {
        let (heads, dim) = (4, 16);
        let values: Vec<f32> = (0..heads * dim).map(|i| (i as f32 - 7.0) * 0.37).collect();
        let bytes = quantise_heads(&values, dim);
        assert_eq!(bytes.len() as u64, heads as u64 * bytes_of_head(dim as u64));
        // Nothing lies between codes and scales of so many heads where they are aligned.
        let decoder = quantised_heads().decoder_of(heads as u64, dim as u64, &bytes);
        let decoder = decoder.expect("all is there");
        for (n, head) in values.chunks(dim).enumerate() {
            let mut found = vec![0.0; dim];
            decoder.row(n as u64, 0, &mut found);
            let (codes, scale) = quantise_group(head);
            assert_eq!(found, codes.iter().map(|c| value(*c, scale)).collect::<Vec<_>>());
        }
        assert_eq!(quantise_heads(&values[..15], 5).len(), 3 * 9);
    }

    #[test]
    fn scales_lie_behind_codes_in_rows_of_whole_sixteen_bytes() {
        for (rows, stride) in [(1, 4), (4, 4), (13, 16)] {
            let bytes = quantised_rows().bytes(&[rows, 2048]);
            assert_eq!(bytes, Some(rows * 2048 + 16 * stride * 4), "{rows}");
        }
    }

    #[test]
    fn a_group_without_a_largest_is_zeros_or_nan() {
        assert_eq!(quantise_group(&[0.0; 4]), (vec![0; 4], 0.0));
        assert!(quantise_group(&[1.0, f32::NAN]).1.is_nan());
        assert!(quantise_group(&[1.0, f32::INFINITY]).1.is_nan());
        assert_eq!(quantise_group(&[1e-44, 0.0]).0, [0, 0]);
    }
}
