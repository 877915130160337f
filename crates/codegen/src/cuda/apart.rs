//! Launches that are no graph's: what feeds tokens, packs weights and measures memory.

use infernum_ir::{DType, Dims, OpSet, Sym, TensorType};
use infernum_passes::Bucket;

use super::attach::{Attach, CudaError};
use super::{Device, Library, TunedVariants};
use crate::plan::{Arg, Kernel, KernelLaunch, Launch, Plan, Run, Value, Yields};

/// The kernel that measures how fast memory is read: a launch of it, and its kernel.
pub fn ceiling(
    library: &Library,
    device: &Device,
    bytes: u64,
) -> Result<(Launch, KernelLaunch, Kernel), CudaError> {
    let ops = OpSet::default();
    let mut attach = Attach::new(&ops, library, device, Dims::default(), TunedVariants::default());
    let row = |cols: u64| TensorType::act(DType::U32, [1.into(), cols.into()]);
    let launch = apart(CEILING, row(bytes / 4), row(1));
    match (attach.launch(&launch, Bucket::ALL, CEILING)?, attach.kernels.pop()) {
        (Run::Kernel(k), Some(kernel)) => Ok((launch, k, kernel)),
        _ => Err(CudaError::NoTemplate { launch: CEILING.to_owned(), op: CEILING.to_owned() }),
    }
}

/// Measures how fast memory is read.
pub(super) const CEILING: &str = "read_ceiling";

/// Makes the packed form of a weight.
const REPACK: &str = "repack";

/// Brings picked tokens to the next step.
pub(super) const FEED: &str = "feed_tokens";

/// Feeds a step with the tokens of the one before, if these are one for each sequence.
pub(super) fn feed(plan: &Plan) -> Option<Launch> {
    let ids = match plan.yields(0)? {
        Yields::Picks => plan.outputs().get(1)?,
        Yields::Tokens => plan.outputs().first()?,
        Yields::Logits => return None,
    };
    let tokens = TensorType::act(DType::U32, [Sym::T.into()]);
    (plan.output_rows == Some(Sym::B)).then(|| apart(FEED, ids.ty.clone(), tokens))
}

/// What makes the packed forms that the plan's weights have, each once.
pub(super) fn repacks(plan: &Plan) -> Vec<Launch> {
    let mut pairs: Vec<(&TensorType, &TensorType)> = Vec::new();
    for weight in &plan.weights {
        weight.recipe.repacked(&weight.ty, &mut |from, to| {
            if !pairs.contains(&(from, to)) {
                pairs.push((from, to));
            }
        });
    }
    pairs
        .into_iter()
        .map(|(from, to)| apart_of(REPACK, ["w", "y"], from.clone(), to.clone()))
        .collect()
}

/// A launch that is no graph's.
pub(super) fn apart(op: &str, x: TensorType, y: TensorType) -> Launch {
    apart_of(op, ["x", "y"], x, y)
}

/// As [`apart`], with names of its operand and its result.
fn apart_of(op: &str, names: [&str; 2], x: TensorType, y: TensorType) -> Launch {
    let value = |ty: TensorType| Value { arg: Arg::Buffer(0), ty: ty.into() };
    Launch {
        op: op.to_owned(),
        attrs: Vec::new(),
        names: names.map(str::to_owned).into(),
        operands: vec![Some(value(x))],
        results: vec![value(y)],
        name: op.to_owned(),
        loc: None,
        frees: Vec::new(),
        run: None,
    }
}
