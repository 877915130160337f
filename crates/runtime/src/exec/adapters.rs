//! Adapters on their way into a plan's banks.

use std::collections::BTreeMap;

use infernum_codegen::Plan;
use infernum_frontend_hf::peft::{Adapter, LowRank};
use infernum_frontend_hf::safetensors::StoredType;
use infernum_ir::{DType, TensorType, random};
use infernum_passes::{bank_a, bank_b};

use super::{Bytes, ExecError, elements};

/// What a plan's banks can hold: all that must be known of a plan to make an adapter ready for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterBanks {
    /// By name: the weight of the plan, its element type, and a row's shape.
    banks: BTreeMap<String, (usize, DType, [u64; 2])>,
    slots: u64,
}

/// An adapter does not fit the model, or the room for adapters.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AdapterFault {
    #[error(
        "{file}: module `{module}`: expected one whose product can be adapted here, such as `{example}`; found none of this \
         name that was compiled for adapters"
    )]
    Module { file: String, module: String, example: String },
    #[error(
        "{file}: module `{module}`: expected a rank of at most {limit} (--max-lora-rank), found {found}"
    )]
    Rank { file: String, module: String, found: u64, limit: u64 },
    #[error(
        "{file}: module `{module}`: expected a weight of {expected:?}, found an adapter for {found:?}"
    )]
    Shape { file: String, module: String, expected: [u64; 2], found: [u64; 2] },
    #[error(
        "{file}: module `{module}`: expected finite numbers of at most {limit:e}, found {found}"
    )]
    Value { file: String, module: String, found: f64, limit: f64 },
}

/// An adapter, ready to be put into the banks of a plan.
#[derive(Clone, Debug)]
pub struct AdapterWeights {
    /// By weight of the plan: the bytes of a bank's row.
    rows: Vec<(usize, Bytes)>,
}

impl AdapterBanks {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> AdapterBanks {
        let bank = |(weight, name, ty): (usize, &str, &TensorType)| {
            let sizes: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
            let [_, rows, columns] = sizes[..] else { return None };
            Some((name.to_owned(), (weight, ty.dtype, [rows, columns])))
        };
        AdapterBanks { banks: plan.banks().filter_map(bank).collect(), slots: plan.adapter_slots() }
    }

    /// Adapters that there is room for.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of the largest adapter's file that fits, without its header.
    pub fn largest(&self) -> u64 {
        self.banks.values().map(|(_, _, [n, k])| 4 * n * k).fold(0, u64::saturating_add)
    }

    /// An adapter of small random numbers for all that can be adapted, of the highest rank: to measure with.
    pub fn random(&self, seed: u64) -> AdapterWeights {
        let row = |(name, (weight, dtype, [n, k])): (&String, &(usize, DType, [u64; 2]))| {
            let values = random::uniform(name, seed, n.saturating_mul(*k) as usize);
            let small: Vec<f64> = values.iter().map(|v| v / 64.0).collect();
            (*weight, encoded(&small, *dtype))
        };
        let rows: BTreeMap<usize, Bytes> = self.banks.iter().map(row).collect();
        AdapterWeights { rows: rows.into_iter().collect() }
    }

    /// An adapter for these banks: modules that it leaves alone have zeros, and so have ranks that it has not.
    pub fn fit(&self, adapter: &Adapter) -> Result<AdapterWeights, AdapterFault> {
        let mut rows: BTreeMap<usize, Bytes> = BTreeMap::new();
        for (module, low) in adapter.modules() {
            let file = || adapter.file().to_owned();
            let known = self.banks.get(&bank_a(module)).zip(self.banks.get(&bank_b(module)));
            let Some((a, b)) = known else {
                let first = self.banks.keys().next().map_or("", |name| name.as_str());
                let example = first.strip_suffix(&bank_a("")).unwrap_or(first).to_owned();
                return Err(AdapterFault::Module {
                    file: file(),
                    module: module.to_owned(),
                    example,
                });
            };
            let ([limit, k], [n, _]) = (a.2, b.2);
            if low.rank > limit {
                let (found, module) = (low.rank, module.to_owned());
                return Err(AdapterFault::Rank { file: file(), module, found, limit });
            }
            if [low.rows, low.columns] != [n, k] {
                let (expected, found) = ([n, k], [low.rows, low.columns]);
                return Err(AdapterFault::Shape {
                    file: file(),
                    module: module.to_owned(),
                    expected,
                    found,
                });
            }
            let value = |(found, limit)| AdapterFault::Value {
                file: file(),
                module: module.to_owned(),
                found,
                limit,
            };
            rows.insert(a.0, row_a(adapter, low, a.1, limit).map_err(value)?);
            rows.insert(b.0, row_b(adapter, low, b.1, limit).map_err(value)?);
        }
        // What the slot held before must not stay.
        for (weight, dtype, [n, k]) in self.banks.values() {
            let zeros =
                || Bytes::from(vec![0; n.saturating_mul(*k) as usize * elements::size(*dtype)]);
            rows.entry(*weight).or_insert_with(zeros);
        }
        Ok(AdapterWeights { rows: rows.into_iter().collect() })
    }
}

impl AdapterWeights {
    /// By weight of the plan, the bytes of a bank's row.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, &Bytes)> {
        self.rows.iter().map(|(weight, bytes)| (*weight, bytes))
    }

    /// Refuses a slot that a plan has not, and an adapter that was made for another plan.
    pub(crate) fn check(&self, plan: &Plan, slot: usize) -> Result<(), ExecError> {
        let slots = plan.adapter_slots();
        if slot as u64 >= slots {
            return Err(ExecError::Adapter(format!("slot {slot} is outside the plan's {slots}")));
        }
        let size = |ty: &TensorType| infernum_codegen::row_bytes(ty);
        let own = plan.banks().map(|(weight, _, ty)| (weight, size(ty)));
        let given = self.rows().map(|(weight, bytes)| (weight, Some(bytes.len() as u64)));
        if own.eq(given) {
            Ok(())
        } else {
            Err(ExecError::Adapter("it is for another plan".to_owned()))
        }
    }
}

type OutOfRange = (f64, f64);

fn row_a(adapter: &Adapter, low: &LowRank, dtype: DType, ranks: u64) -> Result<Bytes, OutOfRange> {
    let mut values = stored(adapter.a(low));
    values.resize((ranks * low.columns) as usize, 0.0);
    rounded(&values, dtype)
}

/// With the scale in it, so that it is rounded once.
fn row_b(adapter: &Adapter, low: &LowRank, dtype: DType, ranks: u64) -> Result<Bytes, OutOfRange> {
    let mut values = Vec::with_capacity((low.rows * ranks) as usize);
    for row in stored(adapter.b(low)).chunks_exact(low.rank as usize) {
        values.extend(row.iter().map(|v| v * low.scale));
        values.resize(values.len().next_multiple_of(ranks as usize), 0.0);
    }
    rounded(&values, dtype)
}

fn stored((dtype, bytes): (StoredType, &[u8])) -> Vec<f64> {
    let mut values = Vec::new();
    dtype.ir().into_iter().for_each(|dtype| elements::decode(dtype, bytes, &mut values));
    values
}

fn rounded(values: &[f64], dtype: DType) -> Result<Bytes, OutOfRange> {
    let limit = match dtype {
        DType::F16 => f64::from(half::f16::MAX),
        _ => f64::from(half::bf16::MAX),
    };
    if let Some(found) = values.iter().find(|v| v.is_nan() || v.abs() > limit) {
        return Err((*found, limit));
    }
    Ok(encoded(values, dtype))
}

fn encoded(values: &[f64], dtype: DType) -> Bytes {
    let mut bytes = vec![0; values.len() * elements::size(dtype)];
    // Banks are of activations' element types, which can be written.
    let _ = elements::encode(dtype, values, &mut bytes);
    bytes.into()
}
