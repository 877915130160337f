//! Where weights come from: a checkpoint's mapped files, or random numbers.

use std::collections::HashMap;
use std::sync::Arc;

use infernum_codegen::Plan;
use infernum_frontend_hf::Checkpoint;
use infernum_ir::encoding::StoredTensor;
use infernum_ir::{DType, Dims, Encoding, TensorType, random};

use super::weights::stored_tensors;
use super::{Bytes, TensorBytes, WeightSource};

/// The tensors of a checkpoint, where they lie in its files.
pub struct CheckpointWeights<'a> {
    checkpoint: &'a Checkpoint,
    files: Vec<Bytes>,
}

impl<'a> CheckpointWeights<'a> {
    /// Shares the checkpoint's files: nothing is copied.
    pub fn new(checkpoint: &'a Checkpoint) -> CheckpointWeights<'a> {
        let files = (0..checkpoint.file_count()).filter_map(|i| checkpoint.file_bytes(i));
        let files = files.map(|f| Bytes::new(Arc::new(f))).collect();
        CheckpointWeights { checkpoint, files }
    }
}

impl WeightSource for CheckpointWeights<'_> {
    fn file(&self, name: &str) -> Option<&str> {
        Some(self.checkpoint.tensor(name)?.file)
    }

    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        let view = self.checkpoint.tensor(name)?;
        let at = view.location;
        Some(TensorBytes {
            element: view.dtype.element()?,
            shape: view.shape.to_vec(),
            bytes: self.files.get(at.file)?.slice(at.offset..at.offset + at.len)?,
        })
    }

    fn find(&self, wanted: &StoredTensor) -> Option<TensorBytes> {
        let view = self.checkpoint.tensor(&wanted.name)?;
        if !view.is_loose {
            return self.tensor(&wanted.name);
        }
        let (element, rows) = (wanted.element, view.shape.first().copied().unwrap_or(1));
        // Blocks are rows of bytes, whose number alone both sides know.
        let alike = if view.blocks.is_some() {
            wanted.shape.first() == Some(&rows)
        } else {
            view.has_shape(&wanted.shape)
        };
        let fits = alike && view.is_stored_as(wanted);
        let Some(at) = view.place(wanted.bytes).filter(|_| fits) else {
            let element = view.dtype.element()?;
            return Some(TensorBytes {
                element,
                shape: view.shape.to_vec(),
                bytes: Vec::new().into(),
            });
        };
        let stored = self.files.get(at.file)?.slice(at.offset..at.offset + at.len)?;
        let bytes = match view.change {
            None => stored,
            Some(change) => change.apply(&stored, rows, element).ok()?.into_owned().into(),
        };
        Some(TensorBytes { element, shape: wanted.shape.clone(), bytes })
    }
}

/// Random weights of the shapes that a plan wants: for measuring, not for talking.
pub struct RandomWeights {
    tensors: HashMap<String, TensorType>,
    /// By stored tensor, the encoded weight that it belongs to.
    encoded: HashMap<String, Encoded>,
    seed: u64,
    /// Values that all tensors share.
    pool: Option<Bytes>,
    /// By type, the stored tensors that all encoded weights of it share.
    encoded_pool: HashMap<TensorType, Vec<Bytes>>,
}

impl RandomWeights {
    /// Weights for `plan`. The same seed gives the same weights.
    pub fn for_plan(plan: &Plan, seed: u64) -> RandomWeights {
        let all = plan.tensors().into_iter().map(|(name, ty)| (name.to_owned(), ty));
        let (coded, tensors): (HashMap<_, _>, _) = all.partition(|(_, ty)| ty.encoding.is_some());
        let encoded = coded.into_iter().flat_map(|(weight, ty)| {
            let parts = stored_tensors(&weight, &ty).unwrap_or_default();
            parts
                .into_iter()
                .map(move |part| (part.name, Encoded { weight: weight.clone(), ty: ty.clone() }))
        });
        RandomWeights {
            tensors,
            encoded: encoded.collect(),
            seed,
            pool: None,
            encoded_pool: HashMap::new(),
        }
    }

    /// As [`RandomWeights::for_plan`], all tensors being parts of one pool of numbers, as large as the
    /// largest: quickly made, for devices that copy them. The element types must be alike.
    pub fn pooled(plan: &Plan, seed: u64) -> RandomWeights {
        let mut weights = RandomWeights::for_plan(plan, seed);
        let sizes = weights.tensors.values().map(|ty| (ty.bytes(&Dims::default()), ty.dtype));
        let largest = sizes.max_by_key(|(bytes, _)| *bytes);
        weights.pool = largest.and_then(|(bytes, dtype)| {
            let elements = bytes as usize / (dtype.bytes(1)? as usize).max(1);
            values(dtype, elements, random::named("", seed)).map(Bytes::from)
        });
        let (mut pool, owned) = (HashMap::new(), &weights);
        for encoded in owned.encoded.values() {
            if !pool.contains_key(&encoded.ty) {
                let all = stored_tensors(&encoded.weight, &encoded.ty).unwrap_or_default();
                let made = all.iter().map(|t| Some(encoded.tensor(&t.name, seed)?.bytes));
                pool.insert(
                    encoded.ty.clone(),
                    made.collect::<Option<Vec<_>>>().unwrap_or_default(),
                );
            }
        }
        weights.encoded_pool = pool;
        weights
    }
}

/// An encoded weight.
struct Encoded {
    weight: String,
    ty: TensorType,
}

impl Encoded {
    /// Its stored tensor of that name, of those that all weights of its type share.
    fn pooled(&self, name: &str, pool: &[Bytes]) -> Option<TensorBytes> {
        let tensors = stored_tensors(&self.weight, &self.ty).ok()?;
        let (tensor, bytes) = tensors.into_iter().zip(pool).find(|(t, _)| t.name == name)?;
        Some(TensorBytes { element: tensor.element, shape: tensor.shape, bytes: bytes.clone() })
    }

    /// Its stored tensor of that name, the same whichever is asked for first; the others are not made.
    fn tensor(&self, name: &str, seed: u64) -> Option<TensorBytes> {
        let [leading @ .., rows, columns] = &self.ty.sizes(&Dims::default())[..] else {
            return None;
        };
        let layout = self.ty.encoding.as_ref()?.layout(*rows as u64, *columns as u64).ok()?;
        let tensors = stored_tensors(&self.weight, &self.ty).ok()?;
        let (i, tensor) = tensors.into_iter().enumerate().find(|(_, t)| t.name == name)?;
        let (mut rng, matrices) = (random::named(name, seed), leading.iter().product::<usize>());
        let one = tensor.bytes / matrices.max(1) as u64;
        let all = (0..matrices).flat_map(|_| layout.random(i, one, Some(Encoding::TAME), &mut rng));
        let bytes: Vec<u8> = all.collect();
        Some(TensorBytes { element: tensor.element, shape: tensor.shape, bytes: bytes.into() })
    }
}

impl WeightSource for RandomWeights {
    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        if let Some(encoded) = self.encoded.get(name) {
            return match self.encoded_pool.get(&encoded.ty) {
                Some(pool) => encoded.pooled(name, pool),
                None => encoded.tensor(name, self.seed),
            };
        }
        let ty = self.tensors.get(name)?;
        let dims = Dims::default();
        let shape: Vec<u64> = ty.sizes(&dims).into_iter().map(|n| n as u64).collect();
        let (elements, element) = (ty.elements(&dims) as usize, ty.dtype.into());
        if let Some(bytes) = self.pool.as_ref().and_then(|p| p.slice(0..ty.bytes(&dims) as usize)) {
            return Some(TensorBytes { element, shape, bytes });
        }
        // Each tensor its own numbers, so that the order of loading does not matter.
        let bytes = values(ty.dtype, elements, random::named(name, self.seed))?;
        Some(TensorBytes { element, shape, bytes: bytes.into() })
    }
}

/// Values of magnitude 2^-6 to 2^-5 and either sign: large enough to matter, small enough that a
/// deep model stays finite. Other element types than 16- and 32-bit floats are not made.
fn values(dtype: DType, elements: usize, mut rng: random::Rng) -> Option<Vec<u8>> {
    // The bits to keep random, and the exponent, in each 16 bits of the word.
    let (size, keep, exponent) = match dtype {
        DType::Bf16 => (2, 0x807f_u64 * 0x0001_0001_0001_0001, 0x3c80 * 0x0001_0001_0001_0001),
        DType::F16 => (2, 0x83ff * 0x0001_0001_0001_0001, 0x2400 * 0x0001_0001_0001_0001),
        DType::F32 => (4, 0x807f_ffff * 0x0000_0001_0000_0001, 0x3c80_0000 * 0x0000_0001_0000_0001),
        _ => return None,
    };
    let bytes = elements.checked_mul(size)?;
    let mut out = Vec::new();
    out.try_reserve_exact(bytes.checked_next_multiple_of(8)?).ok()?;
    while out.len() < bytes {
        out.extend_from_slice(&(rng.u64(..) & keep | exponent).to_le_bytes());
    }
    out.truncate(bytes);
    Some(out)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn random_values_have_the_promised_magnitude() {
        let ok = |v: f32| (0.015..0.0313).contains(&v.abs());
        let halves = |d| values(d, 1001, random::named("w", 5)).expect("a float type");
        let pairs = halves(DType::Bf16);
        assert_eq!(pairs.len(), 2002);
        assert!(pairs.chunks(2).all(|b| ok(bf16::from_le_bytes([b[0], b[1]]).to_f32())));
        let pairs = halves(DType::F16);
        assert!(pairs.chunks(2).all(|b| ok(f16::from_le_bytes([b[0], b[1]]).to_f32())));
        let words = halves(DType::F32);
        let words: Vec<f32> =
            words.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert!(words.iter().all(|v| ok(*v)));
        assert!(words.iter().any(|v| *v < 0.0) && words.iter().any(|v| *v > 0.0));
    }
}
