//! The fallback: an op's reference on `f64` copies of its operands.

use infernum_ir::interp::Tensor;
use infernum_ir::{Attr, Eval, Op, Type};

use super::{Args, Kernel, Operand, Site};
use crate::exec::elements;

struct Reference {
    op: Op,
    attrs: Vec<Attr>,
    operands: Vec<Option<Type>>,
    results: Vec<Type>,
}

pub(super) fn reference(site: &Site<'_>) -> Result<Box<dyn Kernel>, String> {
    let operands = site.launch.operands.iter().map(|v| v.as_ref().map(|v| v.ty.clone()));
    let results: Vec<Type> = site.launch.results.iter().map(|v| v.ty.clone()).collect();
    let op = site.op()?;
    let operands: Vec<Option<Type>> = operands.collect();
    if operands.iter().flatten().chain(&results).any(|t| t.tensor().is_err()) {
        return Err(format!("no CPU kernel for `{}` on a KV cache", op.name));
    }
    Ok(Box::new(Reference { op, attrs: site.attrs.clone(), operands, results }))
}

impl Kernel for Reference {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let mut values: Vec<Option<Tensor>> = Vec::new();
        for (i, ty) in self.operands.iter().enumerate() {
            let Some(ty) = ty else {
                values.push(None);
                continue;
            };
            let value = match args.operands[i] {
                Some(Operand::Weight(w, _)) => w.decode()?,
                Some(Operand::InPlace) => {
                    let x = args.results[0].as_ref().ok_or("no result to read from")?;
                    tensor(ty, x.bytes, args)?
                }
                _ => tensor(ty, args.view(i)?.bytes, args)?,
            };
            values.push(Some(value));
        }
        let types: Vec<Option<&Type>> = self.operands.iter().map(Option::as_ref).collect();
        let values: Vec<Option<&Tensor>> = values.iter().map(Option::as_ref).collect();
        let call = infernum_ir::OpCall { op: self.op, operands: &types, attrs: &self.attrs };
        let step = &args.step.step;
        let eval = Eval { call, values: &values, results: &self.results, step };
        let computed = (self.op.reference)(&eval)?;
        for (i, tensor) in computed.iter().enumerate() {
            let out = args.results[i].as_mut().ok_or("a result has no place")?;
            elements::write(self.results[i].tensor()?, &tensor.data, out.bytes)?;
        }
        Ok(())
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }

    fn is_reference(&self) -> bool {
        true
    }
}

fn tensor(ty: &Type, bytes: &[u8], args: &Args<'_>) -> Result<Tensor, String> {
    let ty = ty.tensor()?;
    let shape = ty.sizes(args.dims());
    Ok(Tensor { data: elements::values(ty, &shape, bytes)?, shape })
}
