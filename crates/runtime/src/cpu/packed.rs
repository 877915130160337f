//! Weights take their packed form on the host.

use std::sync::Arc;

use infernum_codegen::{Plan, Recipe};
use infernum_ir::encoding::Packer;
use infernum_ir::{Dims, Encoding, TensorType};

use super::memory::HostMemory;
use crate::exec::cores::on_all_cores;
use crate::exec::weights::Loaded;
use crate::exec::{Bytes, LoadError, TensorProblem};

/// Packs all weights that are yet to be, and finds views of them.
pub(crate) fn pack(plan: &Plan, weights: &mut [Loaded]) -> Result<(), LoadError> {
    let problem = |message| {
        LoadError::Tensors(vec![TensorProblem::Constant { op: "repack".to_owned(), message }])
    };
    for weight in weights.iter_mut().filter(|w| !w.unpacked.is_empty()) {
        let bytes = packed(weight).map_err(problem)?;
        weight.segments = vec![bytes];
        weight.unpacked.clear();
    }
    for (i, weight) in plan.weights.iter().enumerate() {
        let is_packed = weight.ty.encoding.as_ref().is_some_and(|e| e.packing().is_some());
        if let (Recipe::Rows { weight: of, start }, true) = (&weight.recipe, is_packed) {
            let row = infernum_codegen::row_bytes(&weight.ty).unwrap_or(0);
            let from = start.saturating_mul(row) as usize;
            let len = weight.ty.bytes(&Dims::default()) as usize;
            let whole = weights.get(*of as usize).and_then(|w| w.segments.first());
            let part = whole.and_then(|bytes| bytes.slice(from..from.saturating_add(len)));
            let outside = || format!("{} from row {start} is outside weight {of}", weight.ty);
            weights[i].segments = vec![part.ok_or_else(|| problem(outside()))?];
        }
    }
    Ok(())
}

/// The packed form of a weight: of its parts one after another, each matrix by itself.
fn packed(weight: &Loaded) -> Result<Bytes, String> {
    let size = |part: &Loaded| {
        let shape: Vec<u64> = part.shape.iter().map(|n| *n as u64).collect();
        part.encoding.as_ref().and_then(|e| e.packed().ok()?.bytes(&shape))
    };
    let parts = weight.parts()?;
    let bytes: Option<u64> = parts.iter().map(size).sum();
    let bytes = bytes.ok_or("a part has no packed form")? as usize;
    let all = HostMemory::zeroed_in_large_pages(bytes);
    let mut all = all.ok_or_else(|| format!("no memory for {bytes} bytes"))?;
    let mut rest = all.as_bytes_mut();
    for part in &parts {
        let encoding = part.encoding.as_ref().ok_or("a part is not encoded")?;
        let packer = Packer::new(encoding)?;
        let decoders = part.decoders()?;
        let mut work = Vec::new();
        for decoder in &decoders {
            let (count, size) = packer.bands(decoder);
            let (own, behind) = rest
                .split_at_mut_checked((count * size) as usize)
                .ok_or("its parts are larger than it")?;
            let bands = own.chunks_exact_mut((size as usize).max(1)).enumerate();
            work.extend(bands.map(|(i, band)| (decoder, i as u64, band)));
            rest = behind;
        }
        on_all_cores(work, |(decoder, i, band)| packer.band(decoder, i, band));
    }
    Ok(Bytes::new(Arc::new(all)))
}

impl Loaded {
    /// Of a weight that is yet to be packed: its parts, as they are stored.
    fn parts(&self) -> Result<Vec<Loaded>, String> {
        let mut at = 0;
        let part = |ty: &TensorType| {
            let len = ty.bytes(&Dims::default()) as usize;
            let whole =
                Loaded { encoding: ty.encoding.clone(), unpacked: Vec::new(), ..self.clone() };
            let part = Loaded {
                shape: ty.sizes(&Dims::default()),
                segments: whole.bytes(at, len),
                ..whole
            };
            at += len;
            part
        };
        let parts: Vec<Loaded> = self.unpacked.iter().map(part).collect();
        let found: usize = self.segments.iter().map(|s| s.len()).sum();
        if at == found { Ok(parts) } else { Err(format!("expected {at} bytes, found {found}")) }
    }

    /// Of a weight in its packed form: the bytes of matrix `index` of those that leading axes count.
    pub(crate) fn packed(&self, index: usize) -> Option<(&Encoding, &[u8])> {
        let encoding = self.encoding.as_ref().filter(|e| e.packing().is_some())?;
        let [.., rows, columns] = self.shape[..] else { return None };
        let size = encoding.bytes(&[rows as u64, columns as u64])? as usize;
        let bytes = self.segments.first()?.get(index.checked_mul(size)?..)?.get(..size)?;
        Some((encoding, bytes))
    }
}
