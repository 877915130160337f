//! Microseconds of calls: measured where they were, modelled elsewhere.

use infernum_ir::{Attr, DType, Dims, Effect, Instance, Node, NodeKind, Op, OpCall, Type};

use super::cost::CostTable;
use super::measured::{Measured, element_type};
use crate::Bucket;

/// What calls cost in the steps of one bucket on one target.
pub struct Prices<'a> {
    table: &'a CostTable,
    target: String,
    measured: Vec<&'a Measured>,
    bucket: Bucket,
    dims: Dims,
}

/// What one call costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// Microseconds.
    pub us: f64,
    /// Whether they were measured.
    pub measured: bool,
}

impl Price {
    /// What takes no time, whoever says so.
    const NOTHING: Price = Price { us: 0.0, measured: false };
}

impl<'a> Prices<'a> {
    /// Prices for `bucket` on `target`, whose speeds and measurements are in `table`; `context` is
    /// the number of context rows of a sequence.
    pub fn new(table: &'a CostTable, target: &str, bucket: Bucket, context: u64) -> Prices<'a> {
        let measured = table.measured.calls.iter().filter(|m| m.is_of(target, bucket)).collect();
        let target = target.to_owned();
        Prices { table, target, measured, bucket, dims: bucket.dims(context) }
    }

    /// The price of one call. Views cost nothing, and neither does what is constant: it is computed
    /// when the weights are loaded. A fused op without a kernel costs what its parts cost.
    pub fn price(
        &self,
        op: Op,
        operands: &[Option<&Type>],
        attrs: &[Attr],
        results: &[Type],
    ) -> Price {
        let constant = results.iter().all(|t| matches!(t, Type::Tensor(t) if t.constant));
        if op.effect == Effect::View || constant {
            return Price::NOTHING;
        }
        let call = OpCall { op, operands, attrs };
        if !self.is_one_call(&call)
            && let Ok(instance) = Instance::new(&call)
        {
            return self.parts(&instance);
        }
        // Of those that are as specific, the last: what is measured again comes later.
        let fits = self.measured.iter().filter(|m| m.fits(op, operands));
        if let Some(found) = fits.max_by_key(|m| m.specificity()) {
            return Price { us: found.us, measured: true };
        }
        Price { us: self.model(&call, results), measured: false }
    }

    /// Launch, and the longer of moving bytes and doing operations.
    fn model(&self, call: &OpCall<'_>, results: &[Type]) -> f64 {
        let table = self.table;
        let work = (call.op.work)(call, results, &self.dims);
        let bytes = |t: &Type| t.tensor().map_or(0, |t| t.bytes(&self.dims));
        let written = results.iter().map(bytes).fold(0, u64::saturating_add).min(work.bytes);
        let read = work.bytes - written;
        let moving = read as f64 / table.read_gb_s + written as f64 / table.write_gb_s;
        let computing = work.flops as f64 / self.rate(call.operands);
        let special = table.ops.get(call.op.name);
        let launch = special.and_then(|s| s.launch_us).unwrap_or(table.launch_us);
        // 10⁹ a second is 10³ a microsecond.
        // Where it has no answer, `without_kernel` tells.
        let factor = table.factor(call, self.bucket).unwrap_or(1.0);
        launch + factor * moving.max(computing) / 1e3
    }

    /// Why the target does not run a call as one, where it does not: the op's body was priced then. Of a primitive, why its
    /// price leaves a factor out.
    pub(super) fn without_kernel(&self, call: &OpCall<'_>) -> Option<String> {
        if call.op.fused.is_none() {
            let (of, why) = self.table.factor(call, self.bucket).err()?;
            let (op, of) = (call.op.name, &of.text);
            return Some(format!(
                "the factor of `{op}` on {} counts as 1: `{of}`: {why}",
                self.target
            ));
        }
        let why = self.table.refusal(call, self.bucket).filter(|_| !call.op.is_map())?;
        Some(format!("`{}` has no kernel on {}{why}", call.op.name, self.target))
    }

    /// Whether the target runs a call as one: by a kernel of its own, or as a `map`.
    fn is_one_call(&self, call: &OpCall<'_>) -> bool {
        call.op.is_map() || self.table.has_kernel(call, self.bucket)
    }

    fn parts(&self, instance: &Instance) -> Price {
        let graph = &instance.graph;
        let price = |(index, node): (usize, &Node)| {
            let NodeKind::Op { op, attrs } = &node.kind else { return Price::NOTHING };
            let operands = graph.operands(index);
            let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
            self.price(*op, &types, attrs, &node.types)
        };
        let priced: Vec<Price> = graph.nodes().map(price).filter(|p| p.us > 0.0).collect();
        Price {
            us: priced.iter().map(|p| p.us).sum(),
            measured: !priced.is_empty() && priced.iter().all(|p| p.measured),
        }
    }

    fn rate(&self, operands: &[Option<&Type>]) -> f64 {
        let rates = &self.table.gflop_s;
        let mut tensors = operands.iter().flatten().filter_map(|t| t.tensor().ok());
        // Activations in 8 bits meet weights in 8 bits.
        if tensors.clone().any(|t| t.encoding.is_some() && !t.constant) {
            return rates.eight;
        }
        if tensors.any(|t| t.encoding.is_some()) {
            return rates.quantised;
        }
        match element_type(operands) {
            Some(DType::F16 | DType::Bf16) => rates.half,
            Some(DType::F8e4m3 | DType::F8e5m2) => rates.eight,
            _ => rates.f32,
        }
    }
}
