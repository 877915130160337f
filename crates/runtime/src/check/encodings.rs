//! Holds encodings' files against themselves, and what targets decode against the files, bit for bit.

use std::collections::HashSet;
use std::sync::Arc;

use infernum_ir::encoding::packing::packed_value;
use infernum_ir::encoding::{CodeKind, Number, Stored};
use infernum_ir::{DType, Encoding, Op, OpSet, random, text};
use infernum_passes::check::CallModule;

use super::batches::SINGLE;
use super::cases::Tried;
use super::{KernelVerdict, allowed};

/// Values that are looked at one by one.
const MOST_VALUES: u64 = 1 << 17;
/// Bytes of a weight that is tried.
const MOST_BYTES: u64 = 1 << 26;

/// Sizes that an encoding is tried at: two groups and a part of a third both ways, or two blocks. Where that cannot be,
/// as codes share words, the next that can.
fn sizes(encoding: &Encoding) -> (u64, u64) {
    let def = encoding.def();
    let groups = |size: Option<u64>| size.unwrap_or(3).saturating_mul(2).saturating_add(3);
    let rows = groups(def.group.n).min(300);
    match def.stored {
        // Few rows of long blocks.
        Stored::Blocks { values, .. } => (rows.min((1 << 20) / values).max(1), 2 * values),
        Stored::Tensors { .. } => {
            let columns = groups(def.group.k).min(600);
            let upward = |from: u64| (0..=256).map(move |more| from + more);
            let fits = |&(n, k): &(u64, u64)| encoding.layout(n, k).is_ok();
            let row = || upward(rows).flat_map(move |n| upward(columns).map(move |k| (n, k)));
            row().find(fits).unwrap_or((rows, columns))
        }
    }
}

/// Whether an encoding is what its file says: codes are of their kind and bits, scale and minimum are
/// the same throughout each group, and rows decode to what values do one by one. Of random bytes; how
/// many values were looked at.
pub fn check(encoding: &Encoding, seed: u64) -> Result<u64, String> {
    let (rows, columns) = sizes(encoding);
    let bytes = encoding.layout(rows, columns)?.bytes;
    if bytes > MOST_BYTES {
        return Err(format!(
            "{bytes} bytes of [{rows}, {columns}] are too many to be tried: expected at most {MOST_BYTES}"
        ));
    }
    let mut rng = random::named(encoding.name(), seed);
    let all = encoding.random((rows, columns), None, &mut rng)?;
    let decoder = encoding.decoder(rows, columns, all.iter().map(|(_, b)| &b[..]).collect())?;
    let packed = encoding.packed().ok().map(|_| decoder.packed()).transpose()?;
    let def = encoding.def();
    let (gn, gk) = (def.group.n.unwrap_or(rows), def.group.k.unwrap_or(columns));
    let mut codes = HashSet::new();
    let mut values = vec![0.0; columns as usize];
    let rows = rows.min(MOST_VALUES / columns).max(1);
    for n in 0..rows {
        decoder.row(n, 0, &mut values);
        for (k, value) in (0..columns).zip(&values) {
            let at = format!("value [{n}, {k}] of [{rows}, {columns}]");
            let code = decoder.code(n, k);
            is_of_kind(code, def.code.kind, def.code.bits).map_err(|e| format!("{at}: {e}"))?;
            codes.insert(code.float().to_bits());
            let (scale, minimum) = (decoder.scale(n, k), decoder.minimum(n, k));
            let (first_n, first_k) = (n - n % gn, k - k % gk);
            let (zero, first) = (decoder.zero(n, k), decoder.zero(first_n, first_k));
            if zero != first {
                return Err(format!(
                    "{at}: its zero is {zero}, that of [{first_n}, {first_k}] in its group {first}"
                ));
            }
            for (what, own, first) in [
                ("scale", scale, decoder.scale(first_n, first_k)),
                ("minimum", minimum, decoder.minimum(first_n, first_k)),
            ] {
                if !same(own, first) {
                    return Err(format!(
                        "{at}: its {what} is {own}, that of [{first_n}, {first_k}] in its group {first}"
                    ));
                }
            }
            let scaled = match def.zero {
                Some(_) => (code.int() - zero) as f32 * scale,
                None => code.float() * scale,
            };
            let expected = if def.minimum.is_some() { scaled - minimum } else { scaled };
            if let Some(packed) = &packed {
                let again = packed_value(encoding, columns, packed, n, k)?;
                // Of zeros the sign may be lost, and zeros of scales near f32's end have no product.
                let beyond = encoding.zero().is_some() && !again.is_finite();
                let zeros = *value == 0.0 && again == 0.0;
                if !same(*value, again) && !zeros && !beyond {
                    return Err(format!("{at}: it is {value}, packed {again}"));
                }
            }
            if !same(*value, expected) {
                return Err(format!("{at}: its row has {value}, expected {expected}"));
            }
        }
    }
    if codes.len() > 1 << def.code.bits {
        return Err(format!("{} different codes, expected {} bits", codes.len(), def.code.bits));
    }
    Ok(rows * columns)
}

/// Bit for bit; a NaN is as good as another.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn is_of_kind(code: Number, kind: CodeKind, bits: u32) -> Result<(), String> {
    let range = match kind {
        CodeKind::Unsigned => 0..1i64 << bits,
        CodeKind::Signed => -(1 << (bits - 1))..1i64 << (bits - 1),
        // How many there are says enough.
        CodeKind::E4m3 | CodeKind::E5m2 | CodeKind::E2m1 | CodeKind::Table => return Ok(()),
    };
    match code {
        Number::Int(i) if range.contains(&i) => Ok(()),
        _ => Err(format!("expected a code of {range:?}, found {code:?}")),
    }
}

/// A call of `dequantise` of a matrix, and of a stack of them.
pub(super) fn call(encoding: &Encoding, dtype: DType, ops: &OpSet) -> Result<Tried, String> {
    let (rows, columns) = sizes(encoding);
    let ir = format!(
        "module check\ngraph g {{\n  \
           %w = weight \"one.weight\" : const {encoding}[{rows}, {columns}]\n  \
           %e = weight \"e.{{expert}}.weight\" stack 3 : const {encoding}[3, {rows}, {columns}]\n  \
           %r = dequantise(%w) {{dtype: {dtype}}} : {dtype}[{rows}, {columns}]\n  \
           %s = dequantise(%e) {{dtype: {dtype}}} : {dtype}[3, {rows}, {columns}]\n  \
           return %r, %s\n}}\nschedule g\n"
    );
    let module = text::parse_with(&ir, "check", ops).map_err(|e| e.to_string())?;
    let shown = format!("{encoding}[{rows}, {columns}]");
    Ok(Tried::Made(Arc::new(CallModule { module, shown })))
}

/// As [`call`], of the packed form of what is stored; `None` where there is none.
pub(super) fn packed_call(
    encoding: &Encoding,
    dtype: DType,
    ops: &OpSet,
) -> Result<Option<Tried>, String> {
    if encoding.packed().is_err() {
        return Ok(None);
    }
    let (rows, columns) = sizes(encoding);
    let ir = format!(
        "module check\ngraph g {{\n  \
           %w = weight \"one.weight\" : const {encoding}[{rows}, {columns}]\n  \
           %e = weight \"e.{{expert}}.weight\" stack 3 : const {encoding}[3, {rows}, {columns}]\n  \
           %p = repack(%w) : const packed {encoding}[{rows}, {columns}]\n  \
           %f = repack(%e) : const packed {encoding}[3, {rows}, {columns}]\n  \
           %r = dequantise(%p) {{dtype: {dtype}}} : {dtype}[{rows}, {columns}]\n  \
           %s = dequantise(%f) {{dtype: {dtype}}} : {dtype}[3, {rows}, {columns}]\n  \
           return %r, %s\n}}\nschedule g\n"
    );
    let module = text::parse_with(&ir, "check", ops).map_err(|e| e.to_string())?;
    let shown = format!("packed {encoding}[{rows}, {columns}]");
    Ok(Some(Tried::Made(Arc::new(CallModule { module, shown }))))
}

/// What the CPU decodes of an encoding against its file, for each type that its values may be wanted in.
pub fn check_cpu(ops: &OpSet, seed: u64, encoding: &Encoding) -> Vec<KernelVerdict> {
    let verdict = |dtype| {
        let call = call(encoding, dtype, ops);
        let allowed = Op::find(OP).map(|op| allowed(op.tolerance, dtype)).unwrap_or_default();
        let case = call.as_ref().map_or_else(|_| String::new(), ToString::to_string);
        let module = call.and_then(|call| call.module(dtype, ops));
        let outcome = module
            .and_then(|module| super::cpu::compare_plan(&module, &module, &SINGLE, seed, allowed));
        KernelVerdict { op: OP.to_owned(), variant: None, dtype, case, allowed, outcome }
    };
    [DType::F32, DType::Bf16, DType::F16].map(verdict).into()
}

/// The op that decodes.
pub(super) const OP: &str = "dequantise";

#[cfg(test)]
mod tests {
    use infernum_ir::encoding::EncodingDef;
    use infernum_passes::data::Kernels;

    use super::*;

    fn shipped() -> Kernels {
        Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn encodings_are_what_their_files_say() {
        let ops = shipped().ops;
        assert!(ops.encodings().count() >= 5);
        for encoding in ops.encodings() {
            let values = check(encoding, 1).unwrap_or_else(|e| panic!("{encoding}: {e}"));
            assert!(values > 40, "{encoding}: {values}");
        }
        let failed: Vec<String> = ops
            .encodings()
            .flat_map(|encoding| check_cpu(&ops, 1, encoding))
            .filter(|v| !v.passed())
            .map(|v| v.to_string())
            .collect();
        assert!(failed.is_empty(), "{failed:#?}");
    }

    /// A file that is wrong is caught.
    #[test]
    fn what_a_file_gets_wrong_is_found() {
        type Change = fn(&mut EncodingDef);
        let ops = shipped().ops;
        let cases: [(&str, Change, &str); 5] = [
            ("q4_0", |d| d.code.value = "q[k & 15]".to_owned(), "expected a code of 0..16"),
            ("q4_k", |d| d.group.k = Some(64), "its scale is"),
            ("q4_k", |d| d.minimum = Some("dmin * (k % 32)".to_owned()), "its minimum is"),
            ("q4_0", |d| d.zero = Some("k % 2".to_owned()), "its zero is"),
            ("fp8_block", |d| d.code.bits = 7, "different codes, expected 7 bits"),
        ];
        for (name, change, expected) in cases {
            let mut def = ops.encoding(name).expect("a built-in encoding").def().clone();
            change(&mut def);
            let encoding = Encoding::new(def).expect("a definition");
            let error = check(&encoding, 1).expect_err(expected);
            assert!(error.contains(expected), "{name}: {error}");
        }
    }
}
