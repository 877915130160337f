//! What a call costs on a target, in microseconds.

use std::collections::BTreeMap;
use std::path::Path;

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::{Attr, Call, DType, Dims, Effect, Instance, NodeKind, Op, Type, nearest};
use serde::Deserialize;

use crate::data::DataError;

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../kernels/costs");

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
    /// A block-quantised operand.
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
}

fn one() -> f64 {
    1.0
}

impl CostTable {
    /// The table of `target`: one of `DIR/kernels/costs`, or a built-in one.
    pub fn named(target: &str, data: Option<&Path>) -> Result<CostTable, DataError> {
        let file = format!("{target}.ron");
        if let Some(path) = data.map(|d| d.join("kernels/costs").join(&file))
            && path.is_file()
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

    /// Whether the target has a kernel of `op`'s own.
    pub fn has_kernel(&self, op: Op) -> bool {
        op.fused.is_none()
            || match &self.kernels {
                Kernels::Templates => op.cuda.is_some(),
                Kernels::Only(names) => names.iter().any(|n| n == op.name),
            }
    }

    /// Whether the target runs `op` as one call: by a kernel of its own, or as a `map`.
    fn is_one_call(&self, op: Op) -> bool {
        op.is_map() || self.has_kernel(op)
    }

    /// Microseconds of one call. Views cost nothing, and neither does what is constant: it is
    /// computed when the weights are loaded.
    pub fn cost(
        &self,
        op: Op,
        operands: &[Option<&Type>],
        attrs: &[Attr],
        results: &[Type],
        dims: &Dims,
    ) -> f64 {
        let constant = results.iter().all(|t| matches!(t, Type::Tensor(t) if t.constant));
        if op.effect == Effect::View || constant {
            return 0.0;
        }
        let call = Call { op, operands, attrs };
        if !self.is_one_call(op)
            && let Ok(instance) = Instance::new(&call)
        {
            return self.parts(&instance, dims);
        }
        let work = (op.work)(&call, results, dims);
        let bytes = |t: &Type| t.tensor().map_or(0, |t| t.bytes(dims));
        let written = results.iter().map(bytes).fold(0, u64::saturating_add).min(work.bytes);
        let read = work.bytes - written;
        let moving = read as f64 / self.read_gb_s + written as f64 / self.write_gb_s;
        let computing = work.flops as f64 / self.rate(operands);
        let special = self.ops.get(op.name);
        let launch = special.and_then(|s| s.launch_us).unwrap_or(self.launch_us);
        // 10⁹ a second is 10³ a microsecond.
        launch + special.map_or(1.0, |s| s.factor) * moving.max(computing) / 1e3
    }

    fn parts(&self, instance: &Instance, dims: &Dims) -> f64 {
        let graph = &instance.graph;
        let cost = |(index, node): (usize, &infernum_ir::Node)| {
            let NodeKind::Op { op, attrs } = &node.kind else { return 0.0 };
            let operands = graph.operands(index);
            let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
            self.cost(*op, &types, attrs, &node.types, dims)
        };
        graph.nodes().map(cost).sum()
    }

    fn rate(&self, operands: &[Option<&Type>]) -> f64 {
        let types = || {
            let tensors = operands.iter().flatten().filter_map(|t| t.tensor().ok());
            tensors.map(|t| t.dtype)
        };
        if types().any(DType::is_quantised) {
            return self.gflop_s.quantised;
        }
        match types().find(|d| d.is_float()) {
            Some(DType::F16 | DType::Bf16) => self.gflop_s.half,
            Some(DType::F8e4m3 | DType::F8e5m2) => self.gflop_s.eight,
            _ => self.gflop_s.f32,
        }
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
