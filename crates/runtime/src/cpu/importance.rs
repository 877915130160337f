//! What the columns of matrices are multiplied with: the squares of activations, summed while a plan runs.
//!
//! An error of a weight costs as much as what it is multiplied with is large, so that these sums say which columns a
//! format of few bits had better keep ([`infernum_ir::Encoding::encode_for`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use infernum_codegen::{Launch, Plan, Recipe, Value, Weight};
use infernum_ir::{DType, Type};

use super::exec::{CpuExecutor, CpuOptions};
use super::kernels::{Args, Kernel, Operand, View, float};
use super::simd;
use crate::exec::{LoadError, WeightSource};

/// Sums of squares for each column, by the names of the tensors that a product reads.
#[derive(Debug, Default)]
pub struct Importance(Mutex<BTreeMap<String, Vec<f64>>>);

impl Importance {
    /// An executor of a plan that adds to `self` what every product of a constant takes. Products that are parts of fused ops
    /// are not seen: the plan is best one of no passes.
    pub fn gathering(
        self: &Arc<Importance>,
        plan: Plan,
        source: &dyn WeightSource,
        options: CpuOptions,
    ) -> Result<CpuExecutor, LoadError> {
        let names: Arc<Vec<Vec<String>>> =
            Arc::new(plan.weights.iter().map(|w| names(&w.recipe)).collect());
        let wrap = |launch: &Launch, kernel: Box<dyn Kernel>| -> Box<dyn Kernel> {
            match columns(launch) {
                Some((dtype, columns)) => {
                    let (sums, names) = (Arc::clone(self), Arc::clone(&names));
                    Box::new(Gathering { kernel, dtype, columns, names, sums })
                }
                None => kernel,
            }
        };
        CpuExecutor::with_kernels(plan, source, options, &wrap)
    }

    /// The sums, by tensor.
    pub fn sums(&self) -> BTreeMap<String, Vec<f64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The tensors that a recipe reads.
fn names(recipe: &Recipe) -> Vec<String> {
    let all = |weights: &mut dyn Iterator<Item = &Weight>| {
        weights.flat_map(|w| names(&w.recipe)).collect()
    };
    match recipe {
        Recipe::Tensor(name) => vec![name.clone()],
        Recipe::Stack(parts) => parts.iter().flat_map(names).collect(),
        Recipe::Concat(parts) => all(&mut parts.iter()),
        Recipe::Op { operands, .. } => all(&mut operands.iter().flatten()),
        Recipe::Bank(_) | Recipe::Rows { .. } => Vec::new(),
    }
}

/// Of a launch that multiplies operand 0 with operand 1, a constant `[.., N, K]`: the type of the former and K.
fn columns(launch: &Launch) -> Option<(DType, usize)> {
    /// The ops whose first two operands are such; [`Importance::gathering`] says why fused ones are none.
    const PRODUCTS: [&str; 3] = ["linear", "expert_linear", "head_linear"];
    let value = |i: usize| launch.operands.get(i)?.as_ref();
    let tensor = |v: &Value| if let Type::Tensor(ty) = &v.ty { Some(ty.clone()) } else { None };
    let (x, w) = (tensor(value(0)?)?, tensor(value(1)?)?);
    let columns = w.last_const()? as usize;
    let is_product = PRODUCTS.contains(&&*launch.op) && x.last_const() == w.last_const();
    (is_product && columns > 0).then_some((x.dtype, columns))
}

/// A product that adds up what it takes.
struct Gathering {
    kernel: Box<dyn Kernel>,
    dtype: DType,
    columns: usize,
    /// By weight of the plan.
    names: Arc<Vec<Vec<String>>>,
    sums: Arc<Importance>,
}

impl Kernel for Gathering {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        if let (Some(Operand::Tensor(View { bytes, .. })), Some(Operand::Weight(_, weight))) =
            (&args.operands[0], &args.operands[1])
            && let Some(dtype) = float(self.dtype)
        {
            let mut x = vec![0.0; bytes.len() / dtype.size()];
            simd::widen_bytes(args.isa, dtype, bytes, &mut x);
            let mut sums = vec![0.0; self.columns];
            for x in x.chunks_exact(self.columns) {
                sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
            }
            let mut all = self.sums.0.lock().unwrap_or_else(PoisonError::into_inner);
            for name in self.names.get(*weight as usize).into_iter().flatten() {
                let of = all.entry(name.clone()).or_insert_with(|| vec![0.0; self.columns]);
                of.iter_mut().zip(&sums).for_each(|(of, sum)| *of += sum);
            }
        }
        self.kernel.run(args)
    }

    fn reads_values(&self, operand: usize) -> bool {
        self.kernel.reads_values(operand)
    }

    fn is_reference(&self) -> bool {
        self.kernel.is_reference()
    }
}
