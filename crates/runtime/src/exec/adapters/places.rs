//! Where an adapter's modules go: into which banks, and to which rows of these.

use std::collections::BTreeMap;
use std::ops::Range;

use infernum_frontend_hf::OtherNames;
use infernum_frontend_hf::peft::{Adapter, LowRank};
use infernum_ir::DType;
use infernum_passes::{EXPERT, bank_a, bank_b, experts_of};

use super::{AdapterFault, Bank};
use crate::exec::elements;

/// What checkpoints with a tensor for each expert call what others have in one: gates, then ups.
const PACKED: (&str, [[&str; 2]; 2]) = ("gate_up_proj", [["gate_proj", "up_proj"], ["w1", "w3"]]);

/// The modules that have banks.
pub(super) struct Modules<'a> {
    /// As the plan calls them, with both banks.
    banks: BTreeMap<&'a str, [&'a Bank; 2]>,
    /// By each name that they go by, an expert by its own; the plan's names go before others.
    named: BTreeMap<String, (&'a str, u64)>,
    names: &'a OtherNames,
}

/// A place for what an adapter has of a module.
pub(super) struct Place<'a> {
    /// The plan's name of the module.
    pub(super) module: &'a str,
    /// Its banks.
    pub(super) banks: [&'a Bank; 2],
    /// The experts that the adapter has parts of; the first alone of what has none.
    pub(super) experts: Range<u64>,
    /// The rank of such a part.
    pub(super) rank: u64,
    /// The first row of the adapter's b that goes there.
    first: u64,
}

impl<'a> Modules<'a> {
    pub(super) fn of(all: &'a BTreeMap<String, Bank>, names: &'a OtherNames) -> Modules<'a> {
        let pair = |name: &'a String| {
            let module = name.strip_suffix(&bank_a(""))?;
            Some((module, [all.get(&bank_a(module))?, all.get(&bank_b(module))?]))
        };
        let banks: BTreeMap<_, _> = all.keys().filter_map(pair).collect();
        let mut own = Vec::new();
        for (module, [a, _]) in &banks {
            if module.contains(EXPERT) {
                let each =
                    (0..a.experts).map(|e| (module.replace(EXPERT, &e.to_string()), (*module, e)));
                own.extend(each);
            } else if a.experts == 1 {
                own.push(((*module).to_owned(), (*module, 0)));
            }
        }
        let others = own.iter().flat_map(|(name, place)| {
            names.of(name).into_iter().skip(1).map(|name| (name, *place))
        });
        let named = others.collect::<Vec<_>>().into_iter().chain(own).collect();
        Modules { banks, named, names }
    }

    /// The places of a module's parts.
    pub(super) fn find(
        &self,
        adapter: &Adapter,
        module: &str,
        low: &LowRank,
    ) -> Result<Vec<Place<'a>>, AdapterFault> {
        let names = self.names.of(module);
        let places = match names.iter().find_map(|name| self.named.get(name)) {
            Some((own, expert)) => vec![Place {
                module: own,
                banks: self.banks[own],
                experts: *expert..expert + 1,
                rank: low.rank,
                first: 0,
            }],
            None => self.stacked(&names, low),
        };
        let (file, module) = (adapter.file().to_owned(), module.to_owned());
        let Some(Place { banks: [a, _], rank, .. }) = places.first() else {
            let example = self.named.keys().next().cloned().unwrap_or_default();
            return Err(AdapterFault::Module { file, module, example });
        };
        let (limit, found) = (a.shape[0], *rank);
        if found > limit {
            return Err(AdapterFault::Rank { file, module, found, limit });
        }
        let rows = places.iter().map(|place| place.banks[1].shape[0]).sum();
        let (expected, found) = ([rows, a.shape[1]], [low.rows, low.columns]);
        if expected != found {
            return Err(AdapterFault::Shape { file, module, expected, found });
        }
        Ok(places)
    }

    /// All experts of a layer at once, as PEFT adapts parameters of three dimensions: `experts` is the one of these parameters
    /// that was adapted last, `experts.base_layer` the one before. Which one it is their shapes say.
    fn stacked(&self, names: &[String], low: &LowRank) -> Vec<Place<'a>> {
        let is_theirs = |own: &str| {
            let Some(own) = experts_of(own) else { return false };
            let mut theirs = names.iter().map(|name| name.trim_end_matches(".base_layer"));
            theirs.any(|name| name == own || are_experts_of_one_layer(name, own))
        };
        let fits = |[a, b]: &[&Bank; 2], rows: u64| {
            let divides = low.rank.is_multiple_of(a.experts.max(1));
            divides && a.shape[1] == low.columns && b.shape[0] == rows
        };
        let place = |(module, banks, first): (&'a str, [&'a Bank; 2], u64)| {
            let experts = banks[0].experts;
            Place { module, banks, experts: 0..experts, rank: low.rank / experts.max(1), first }
        };
        let all: Vec<(&'a str, [&'a Bank; 2])> = self
            .banks
            .iter()
            .filter(|(own, [a, _])| a.experts > 1 && is_theirs(own))
            .map(|(m, b)| (*m, *b))
            .collect();
        let fitting: Vec<_> = all.iter().filter(|(_, banks)| fits(banks, low.rows)).collect();
        match fitting[..] {
            [(module, banks)] => return vec![place((module, *banks, 0))],
            [] => {}
            // Of several nobody knows which is meant.
            _ => return Vec::new(),
        }
        // One tensor there, two here.
        let half = |part: &str| {
            let mut halves =
                all.iter().filter(|(own, banks)| last(own) == part && fits(banks, low.rows / 2));
            halves.next().copied()
        };
        let halves = PACKED.1.iter().find_map(|[gate, up]| half(gate).zip(half(up)));
        let Some((gate, up)) = halves.filter(|_| low.rows.is_multiple_of(2)) else {
            return Vec::new();
        };
        vec![place((gate.0, gate.1, 0)), place((up.0, up.1, low.rows / 2))]
    }
}

/// The last part of a module's name.
fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// Whether two names of experts are those of one layer, whatever the modules around them are called: of `block_sparse_moe.experts`
/// later versions of transformers made `mlp.experts`.
fn are_experts_of_one_layer(a: &str, b: &str) -> bool {
    layer(a).is_some() && layer(a) == layer(b) && last(a) == last(b)
}

/// The name as far as the number of its layer: `model.layers.3` of `model.layers.3.mlp.experts`.
fn layer(module: &str) -> Option<&str> {
    let mut end = 0;
    for part in module.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            return module.get(..end);
        }
        end += 1;
    }
    None
}

impl Place<'_> {
    /// The names that a configuration may have its factor under: what adapters are of, and which of several parameters.
    pub(super) fn names(&self, module: &str, places: usize) -> Vec<String> {
        let own = if places > 1 { PACKED.0 } else { last(self.module) };
        let parameter = format!("{}.{own}", module.trim_end_matches(".base_layer"));
        vec![module.to_owned(), parameter]
    }

    /// Puts a module's matrices into an adapter's rows of both banks; the factor goes into b, so that it is rounded once.
    pub(super) fn fill(
        &self,
        (a, b): (&[f64], &[f64]),
        scale: f64,
        rows: [&mut [u8]; 2],
    ) -> Result<(), OutOfRange> {
        let ([bank_a, bank_b], [to_a, to_b]) = (self.banks, rows);
        let (rank, parts) = (self.rank as usize, (self.experts.end - self.experts.start) as usize);
        let columns = bank_a.shape[1] as usize;
        let mut line = Vec::new();
        for (part, expert) in self.experts.clone().enumerate() {
            bank_a.put(to_a, (expert, 0), &a[part * rank * columns..][..rank * columns])?;
            for row in 0..bank_b.shape[0] {
                let all = &b[(self.first + row) as usize * rank * parts..][..rank * parts];
                line.clear();
                line.extend(all.iter().skip(part).step_by(parts).map(|v| v * scale));
                bank_b.put(to_b, (expert, row), &line)?;
            }
        }
        Ok(())
    }
}

/// A number that the bank's type cannot hold, and the largest that it can.
pub(super) type OutOfRange = (f64, f64);

impl Bank {
    /// Values of an adapter's row.
    pub(super) fn elements(&self) -> u64 {
        self.experts.saturating_mul(self.shape[0]).saturating_mul(self.shape[1])
    }

    /// An adapter's row of nothing.
    pub(super) fn zeros(&self) -> Vec<u8> {
        vec![0; self.elements() as usize * elements::size(self.dtype)]
    }

    /// Rounds values to an adapter's row, from the beginning of a line of an expert's part on.
    fn put(
        &self,
        row: &mut [u8],
        (expert, line): (u64, u64),
        values: &[f64],
    ) -> Result<(), OutOfRange> {
        let limit = match self.dtype {
            DType::F16 => f64::from(half::f16::MAX),
            _ => f64::from(half::bf16::MAX),
        };
        if let Some(found) = values.iter().find(|v| v.is_nan() || v.abs() > limit) {
            return Err((*found, limit));
        }
        let start = ((expert * self.shape[0] + line) * self.shape[1]) as usize;
        let size = elements::size(self.dtype);
        // Banks are of activations' element types, which can be written.
        let _ =
            elements::encode(self.dtype, values, &mut row[start * size..][..values.len() * size]);
        Ok(())
    }
}
