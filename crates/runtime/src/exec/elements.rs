//! Between stored elements and `f64`, for constants and the reference fallback.

use half::{bf16, f16};
use infernum_ir::DType;

/// Bytes of one element; `None` for block formats.
pub(crate) fn size(dtype: DType) -> Option<usize> {
    match dtype.block() {
        (1, bytes) => Some(bytes as usize),
        _ => None,
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut Vec<f64>, f: impl Fn([u8; N]) -> f64) {
    out.extend(bytes.chunks_exact(N).map(|c| {
        let mut raw = [0; N];
        raw.copy_from_slice(c);
        f(raw)
    }));
}

/// Appends the values of little-endian `bytes`.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut Vec<f64>) -> Result<(), String> {
    match dtype {
        DType::F32 => each(bytes, out, |b| f64::from(f32::from_le_bytes(b))),
        DType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f64()),
        DType::Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f64()),
        DType::I32 => each(bytes, out, |b| f64::from(i32::from_le_bytes(b))),
        DType::U32 => each(bytes, out, |b| f64::from(u32::from_le_bytes(b))),
        DType::Q8_0 => {
            for block in bytes.chunks_exact(34) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f64();
                out.extend(block[2..].iter().map(|&q| scale * f64::from(q as i8)));
            }
        }
        DType::Q4_0 => {
            for block in bytes.chunks_exact(18) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f64();
                let value = |q: u8| scale * (f64::from(q) - 8.0);
                // The first half of the block is in the low nibbles.
                out.extend(block[2..].iter().map(|&q| value(q & 15)));
                out.extend(block[2..].iter().map(|&q| value(q >> 4)));
            }
        }
        _ => return Err(format!("element type {dtype} cannot be read on the CPU yet")),
    }
    Ok(())
}

/// Writes values, rounded to nearest even.
pub(crate) fn encode(dtype: DType, values: &[f64], out: &mut [u8]) -> Result<(), String> {
    fn each<const N: usize>(values: &[f64], out: &mut [u8], f: impl Fn(f64) -> [u8; N]) {
        for (v, c) in values.iter().zip(out.chunks_exact_mut(N)) {
            c.copy_from_slice(&f(*v));
        }
    }
    if size(dtype).and_then(|s| s.checked_mul(values.len())) != Some(out.len()) {
        return Err(format!("{} value(s) of {dtype} are not {} bytes", values.len(), out.len()));
    }
    match dtype {
        DType::F32 => each(values, out, |v| (v as f32).to_le_bytes()),
        DType::F16 => each(values, out, |v| f16::from_f64(v).to_le_bytes()),
        DType::Bf16 => each(values, out, |v| bf16::from_f64(v).to_le_bytes()),
        DType::I32 => each(values, out, |v| (v as i32).to_le_bytes()),
        DType::U32 => each(values, out, |v| (v as u32).to_le_bytes()),
        _ => return Err(format!("element type {dtype} cannot be written on the CPU yet")),
    }
    Ok(())
}
