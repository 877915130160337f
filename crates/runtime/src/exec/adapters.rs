//! Adapters on their way into a plan's banks.

mod places;

use std::collections::BTreeMap;

use infernum_codegen::Plan;
use infernum_frontend_hf::OtherNames;
use infernum_frontend_hf::peft::Adapter;
use infernum_frontend_hf::safetensors::StoredType;
use infernum_ir::{DType, TensorType, random};

use super::{Bytes, ExecError, elements};
use places::Modules;

/// A bank of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bank {
    /// Which of the plan's weights it is.
    weight: usize,
    dtype: DType,
    /// Its rows for each adapter: one or, for experts, one for each.
    experts: u64,
    /// The shape of such a row.
    shape: [u64; 2],
}

/// What a plan's banks can hold: all that must be known of a plan to make an adapter ready for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterBanks {
    /// By name.
    banks: BTreeMap<String, Bank>,
    slots: u64,
    /// What adapters may call the model's modules besides.
    names: OtherNames,
}

/// An adapter does not fit the model, or the room for adapters.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AdapterFault {
    #[error(
        "{file}: module `{module}`: expected one whose product can be adapted here, such as `{example}`; found none of this \
         name and shape that was compiled for adapters (experts of mixtures are where --lora-targets names them)"
    )]
    Module { file: String, module: String, example: String },
    #[error(
        "{file}: `{module}` and `{other}`: expected one of them, as both are the model's `{found}`"
    )]
    Twice { file: String, module: String, other: String, found: String },
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
    /// By weight of the plan: the bytes of a bank's rows for an adapter.
    rows: Vec<(usize, Bytes)>,
}

impl AdapterBanks {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> AdapterBanks {
        let bank = |(weight, name, ty): (usize, &str, &TensorType)| {
            let sizes: Vec<u64> = ty.shape.iter().filter_map(|d| d.as_const()).collect();
            let ([_, rows, columns], dtype) = (&sizes[..], ty.dtype) else { return None };
            let (experts, shape) = (plan.bank_rows(ty)?, [*rows, *columns]);
            Some((name.to_owned(), Bank { weight, dtype, experts, shape }))
        };
        AdapterBanks {
            banks: plan.banks().filter_map(bank).collect(),
            slots: plan.adapters,
            names: OtherNames::default(),
        }
    }

    /// The same, for adapters that may call modules by these names, too.
    #[must_use]
    pub fn also_named(self, names: OtherNames) -> AdapterBanks {
        AdapterBanks { names, ..self }
    }

    /// Adapters that there is room for.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of the largest adapter's file that fits, without its header.
    pub fn largest(&self) -> u64 {
        let each = self.banks.values().map(|bank| bank.elements().saturating_mul(4));
        each.fold(0, u64::saturating_add)
    }

    /// An adapter of small random numbers for all that can be adapted, of the highest rank: to measure with.
    pub fn random(&self, seed: u64) -> AdapterWeights {
        let row = |(name, bank): (&String, &Bank)| {
            let values = random::uniform(name, seed, bank.elements() as usize);
            let small: Vec<f64> = values.iter().map(|v| v / 64.0).collect();
            let mut bytes = bank.zeros();
            // Banks are of activations' element types, which can be written.
            let _ = elements::encode(bank.dtype, &small, &mut bytes);
            (bank.weight, bytes.into())
        };
        let rows: BTreeMap<usize, Bytes> = self.banks.iter().map(row).collect();
        AdapterWeights { rows: rows.into_iter().collect() }
    }

    /// An adapter for these banks: modules that it leaves alone have zeros, and so have ranks that it has not.
    pub fn fit(&self, adapter: &Adapter) -> Result<AdapterWeights, AdapterFault> {
        let zeros = self.banks.values().map(|bank| (bank.weight, bank.zeros()));
        let mut rows: BTreeMap<usize, Vec<u8>> = zeros.collect();
        let (modules, mut met) = (Modules::of(&self.banks, &self.names), BTreeMap::new());
        for (module, low) in adapter.modules() {
            let (file, name) = (|| adapter.file().to_owned(), || module.to_owned());
            // Sizes are looked at before anything is made of them.
            let places = modules.find(adapter, module, low)?;
            let (a, b) = (stored(adapter.a(low)), stored(adapter.b(low)));
            for place in &places {
                for expert in place.experts.clone() {
                    if let Some(other) = met.insert((place.module, expert), module) {
                        let [other, found] = [other, place.module].map(str::to_owned);
                        let (file, module) = (file(), name());
                        return Err(AdapterFault::Twice { file, module, other, found });
                    }
                }
                let [mut to_a, mut to_b] =
                    place.banks.map(|bank| rows.remove(&bank.weight).unwrap_or_default());
                let scale = adapter.scale(&place.names(module, places.len()), place.rank);
                place.fill((&a, &b), scale, [&mut to_a, &mut to_b]).map_err(|(found, limit)| {
                    AdapterFault::Value { file: file(), module: name(), found, limit }
                })?;
                rows.extend([(place.banks[0].weight, to_a), (place.banks[1].weight, to_b)]);
            }
        }
        let rows = rows.into_iter().map(|(weight, bytes)| (weight, bytes.into())).collect();
        Ok(AdapterWeights { rows })
    }
}

impl AdapterWeights {
    /// By weight of the plan, the bytes of a bank's rows for an adapter.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, &Bytes)> {
        self.rows.iter().map(|(weight, bytes)| (*weight, bytes))
    }

    /// Refuses a slot that a plan has not, and an adapter that was made for another plan.
    pub(crate) fn check(&self, plan: &Plan, slot: usize) -> Result<(), ExecError> {
        let slots = plan.adapters;
        if slot as u64 >= slots {
            return Err(ExecError::Adapter(format!("slot {slot} is outside the plan's {slots}")));
        }
        let size = |ty| plan.bank_rows(ty)?.checked_mul(infernum_codegen::row_bytes(ty)?);
        let own = plan.banks().map(|(weight, _, ty)| (weight, size(ty)));
        let given = self.rows().map(|(weight, bytes)| (weight, Some(bytes.len() as u64)));
        if own.eq(given) {
            Ok(())
        } else {
            Err(ExecError::Adapter("it is for another plan".to_owned()))
        }
    }
}

fn stored((dtype, bytes): (StoredType, &[u8])) -> Vec<f64> {
    let mut values = Vec::new();
    dtype.ir().into_iter().for_each(|dtype| elements::decode(dtype, bytes, &mut values));
    values
}
