//! Between stored elements and `f64`, for constants and the reference fallback.

use half::{bf16, f16};
use infernum_ir::encoding::Element;
use infernum_ir::encoding::quantised_rows::quantise_rows;
use infernum_ir::{DType, TensorType};

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

/// The values of an activation of these sizes, quantised or not.
pub(crate) fn values(ty: &TensorType, sizes: &[usize], bytes: &[u8]) -> Result<Vec<f64>, String> {
    let mut values = Vec::new();
    match (&ty.encoding, sizes) {
        (Some(encoding), &[rows, columns]) if rows > 0 => {
            let decoder = encoding.decoder_of(rows as u64, columns as u64, bytes)?;
            let mut row = vec![0.0; columns];
            for n in 0..rows as u64 {
                decoder.row(n, 0, &mut row);
                values.extend(row.iter().map(|v| f64::from(*v)));
            }
        }
        (Some(_), _) => {}
        (None, _) => decode(ty.dtype, bytes, &mut values),
    }
    Ok(values)
}

/// Writes the values of an activation, rounded to nearest even; into its codes and scales where it is quantised.
pub(crate) fn write(ty: &TensorType, values: &[f64], out: &mut [u8]) -> Result<(), String> {
    if ty.encoding.is_none() {
        return encode(ty.dtype, values, out);
    }
    let columns = ty.last_const().unwrap_or(1) as usize;
    let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    let stored = quantise_rows(&values, columns)?;
    let (expected, found) = (out.len(), stored.len());
    let out =
        out.get_mut(..found).ok_or_else(|| format!("{found} bytes for {expected} of {ty}"))?;
    out.copy_from_slice(&stored);
    Ok(())
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
