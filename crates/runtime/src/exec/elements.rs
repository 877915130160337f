//! Between stored elements and `f64`, for constants and the reference fallback.

use half::{bf16, f16};
use infernum_ir::DType;
use infernum_ir::encoding::Element;

/// Bytes of one element.
pub(crate) fn size(dtype: DType) -> usize {
    dtype.size() as usize
}

fn each<const N: usize>(bytes: &[u8], out: &mut Vec<f64>, f: impl Fn([u8; N]) -> f64) {
    out.extend(bytes.chunks_exact(N).map(|c| {
        let mut raw = [0; N];
        raw.copy_from_slice(c);
        f(raw)
    }));
}

/// Appends the values of little-endian `bytes`.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut Vec<f64>) {
    match dtype {
        DType::F32 => each(bytes, out, |b| f64::from(f32::from_le_bytes(b))),
        DType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f64()),
        DType::Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f64()),
        DType::I32 => each(bytes, out, |b| f64::from(i32::from_le_bytes(b))),
        DType::U32 => each(bytes, out, |b| f64::from(u32::from_le_bytes(b))),
        DType::F8e4m3 | DType::F8e5m2 => {
            let element = Element::from(dtype);
            each::<1>(bytes, out, |b| f64::from(element.read(&b).float()));
        }
    }
}

/// Writes values, rounded to nearest even.
pub(crate) fn encode(dtype: DType, values: &[f64], out: &mut [u8]) -> Result<(), String> {
    fn each<const N: usize>(values: &[f64], out: &mut [u8], f: impl Fn(f64) -> [u8; N]) {
        for (v, c) in values.iter().zip(out.chunks_exact_mut(N)) {
            c.copy_from_slice(&f(*v));
        }
    }
    if size(dtype).checked_mul(values.len()) != Some(out.len()) {
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
