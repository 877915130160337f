//! What a call costs on a target, in microseconds.

use std::collections::BTreeMap;
use std::path::Path;

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::{Op, is_there, nearest};
use serde::Deserialize;

use super::measured::Measurements;
use crate::Bucket;
use crate::data::DataError;

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/kernels/costs");

/// A target's speeds (`kernels/costs/*.ron`). A call costs its launch, and the longer of moving its
/// bytes and doing its operations.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename = "Costs", deny_unknown_fields)]
pub struct CostTable {
    /// What the numbers are of, and where they are from.
    pub doc: String,
    /// The kind of device, as conditions see it: `device.kind`.
    pub kind: String,
    /// Its compute capability, major times ten plus minor, as conditions see it: `device.sm`.
    #[serde(default)]
    pub sm: Option<u32>,
    /// Microseconds that a call takes when it does nothing.
    pub launch_us: f64,
    /// Bytes read a second, in units of 10⁹.
    pub read_gb_s: f64,
    /// Bytes written a second, in units of 10⁹.
    pub write_gb_s: f64,
    /// Operations a second.
    pub gflop_s: Rates,
    /// The fused ops that have kernels; one without costs what its parts cost.
    pub kernels: Kernels,
    /// Ops that differ from the rest.
    #[serde(default)]
    pub ops: BTreeMap<String, OpCost>,
    /// What was measured, which goes before what is modelled. Read from a file of its own.
    #[serde(skip)]
    pub measured: Measurements,
}

/// Operations a second by the type of the operands, in units of 10⁹.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// `f32`.
    pub f32: f64,
    /// The 16-bit types.
    pub half: f64,
    /// `f8e4m3` and `f8e5m2`.
    pub eight: f64,
    /// An encoded operand.
    pub quantised: f64,
}

/// Which fused ops have kernels.
#[derive(Clone, Debug, Deserialize)]
pub enum Kernels {
    /// Those that name a template.
    Templates,
    /// These.
    Only(Vec<String>),
}

/// How an op differs from the rest.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpCost {
    /// Microseconds of an empty call.
    #[serde(default)]
    pub launch_us: Option<f64>,
    /// Factor on the time that bytes and operations take.
    #[serde(default = "one")]
    pub factor: f64,
    /// The largest step that the target has the op's kernel for; any when left out.
    #[serde(default)]
    pub most_tokens: Option<u64>,
}

fn one() -> f64 {
    1.0
}

impl CostTable {
    /// The table of `target`: one of `DIR/kernels/costs`, or a built-in one.
    pub fn named(target: &str, data: Option<&Path>) -> Result<CostTable, DataError> {
        let file = format!("{target}.ron");
        if let Some(path) = data.map(|d| d.join("kernels/costs").join(&file))
            && is_there(&path)
        {
            let shown = path.display().to_string();
            let text = std::fs::read_to_string(&path)
                .map_err(|source| DataError::Io { path: shown.clone(), source })?;
            return CostTable::parse(&Source::new(&shown, &text));
        }
        let shown = format!("kernels/costs/{file}");
        if let Some(text) = EMBEDDED.get_file(&file).and_then(|f| f.contents_utf8()) {
            return CostTable::parse(&Source::new(&shown, text));
        }
        let known = EMBEDDED.files().filter_map(|f| f.path().file_stem()?.to_str());
        let hint = nearest(target, known);
        let message = format!("there is no cost table for `{target}`{hint}");
        let source = std::io::Error::new(std::io::ErrorKind::NotFound, message);
        Err(DataError::Io { path: shown, source })
    }

    /// Reads a table.
    pub fn parse(source: &Source) -> Result<CostTable, DataError> {
        Ok(read_ron(source)?)
    }

    /// Whether the target has a kernel of `op`'s own for the steps of a bucket.
    pub fn has_kernel(&self, op: Op, bucket: Bucket) -> bool {
        let most = self.ops.get(op.name).and_then(|o| o.most_tokens);
        let known = match &self.kernels {
            Kernels::Templates => op.cuda.is_some(),
            Kernels::Only(names) => names.iter().any(|n| n == op.name),
        };
        op.fused.is_none() || (known && most.is_none_or(|most| bucket.max <= most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_table_reads() {
        let names: Vec<_> = EMBEDDED.files().map(|f| f.path().display().to_string()).collect();
        assert!(names.len() >= 5, "{names:?}");
        for name in names {
            let table = CostTable::named(name.trim_end_matches(".ron"), None);
            let table = table.unwrap_or_else(|e| panic!("{e}"));
            assert!(table.read_gb_s > 0.0 && table.write_gb_s > 0.0 && table.gflop_s.f32 > 0.0);
        }
    }
}
