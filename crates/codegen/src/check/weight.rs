//! Constants: that a recipe makes what its weight says.

use infernum_ir::encoding::packing;
use infernum_ir::{Attr, Dims, Op, TensorType, Type};

use super::{Checked, fault};
use crate::layout::row_bytes;
use crate::plan::{Recipe, Weight};

/// Elements of a constant that is computed: in `f64` while it is.
const MAX_COMPUTED: u64 = 1 << 32;

/// Checks a weight of the plan, which may be rows of another of `all`.
pub(super) fn check(place: &str, weight: &Weight, all: &[Weight]) -> Checked {
    let ty = &weight.ty;
    let Recipe::Rows { weight: of, start } = weight.recipe else {
        return recipe(place, ty, &weight.recipe);
    };
    is_constant(place, ty)?;
    let whole = all.get(of as usize).filter(|w| !matches!(w.recipe, Recipe::Rows { .. }));
    let Some(whole) = whole else {
        return fault(place, format!("expected rows of a stored weight, found weight {of}"));
    };
    let rows = |ty: &TensorType| ty.shape.first().and_then(|d| d.as_const());
    let end = rows(ty).and_then(|n| start.checked_add(n));
    let inside = end.zip(rows(&whole.ty)).is_some_and(|(end, n)| end <= n);
    let alike = ty.dtype == whole.ty.dtype
        && ty.encoding == whole.ty.encoding
        && row_bytes(ty).is_some()
        && ty.shape.get(1..) == whole.ty.shape.get(1..);
    // Rows of the packed form lie in bands.
    let is_packed = ty.encoding.as_ref().is_some_and(|e| e.packing().is_some());
    let begins = !is_packed || start.is_multiple_of(packing::ROWS);
    if inside && alike && begins {
        Ok(())
    } else {
        fault(place, format!("{ty} from row {start} on is not in {}", whole.ty))
    }
}

/// Checks that a recipe, which is no view, makes a `ty`.
fn recipe(place: &str, ty: &TensorType, recipe: &Recipe) -> Checked {
    is_constant(place, ty)?;
    match recipe {
        Recipe::Tensor(_) => Ok(()),
        Recipe::Bank(_) if ty.rank() == 3 && ty.encoding.is_none() => Ok(()),
        Recipe::Bank(_) => fault(place, format!("expected a bank of three dimensions, found {ty}")),
        Recipe::Rows { .. } => {
            fault(place, "expected rows of a weight at the top of a recipe only")
        }
        Recipe::Stack(parts) => {
            let Some((first, rest)) = ty.shape.split_first() else {
                return fault(place, format!("a stack cannot be {ty}"));
            };
            if first.as_const() != Some(parts.len() as u64) {
                return fault(
                    place,
                    format!("expected {first} tensors for {ty}, found {}", parts.len()),
                );
            }
            let part = TensorType { shape: rest.to_vec(), ..ty.clone() };
            parts.iter().try_for_each(|p| self::recipe(place, &part, p))
        }
        Recipe::Concat(parts) => {
            let rows = |t: &TensorType| t.shape.first().and_then(|d| d.as_const());
            let total = parts.iter().try_fold(0u64, |n, p| n.checked_add(rows(&p.ty)?));
            let alike = |p: &Weight| {
                p.ty.dtype == ty.dtype
                    && p.ty.encoding == ty.encoding
                    && p.ty.shape.get(1..) == ty.shape.get(1..)
            };
            if total.is_none() || total != rows(ty) || !parts.iter().all(alike) {
                return fault(place, format!("its parts do not make {ty}"));
            }
            parts.iter().try_for_each(|p| self::recipe(place, &p.ty, &p.recipe))
        }
        Recipe::Op { op, attrs, operands, types, result } => {
            for operand in operands.iter().flatten() {
                self::recipe(place, &operand.ty, &operand.recipe)?;
            }
            if types.get(*result as usize) != Some(ty) {
                return fault(place, format!("`{op}` has no result {result} that is {ty}"));
            }
            call(op, attrs, operands, types).or_else(|e| fault(place, format!("`{op}`: {e}")))
        }
    }
}

/// Checks the call of a primitive on constants.
fn call(
    op: &str,
    attrs: &[Attr],
    operands: &[Option<Weight>],
    types: &[TensorType],
) -> Result<(), String> {
    let operands: Vec<Option<Type>> =
        operands.iter().map(|w| w.as_ref().map(|w| w.ty.clone().into())).collect();
    let operands: Vec<Option<&Type>> = operands.iter().map(Option::as_ref).collect();
    let results = Op::find(op)?.infer(&operands, attrs)?;
    if !results.iter().eq(types.iter().cloned().map(Type::from).collect::<Vec<_>>().iter()) {
        return Err("its results are of other types".to_owned());
    }
    match types.iter().map(|ty| ty.elements(&Dims::default())).max() {
        Some(n) if n > MAX_COMPUTED => {
            Err(format!("at most {MAX_COMPUTED} elements are computed, found {n}"))
        }
        _ => Ok(()),
    }
}

fn is_constant(place: &str, ty: &TensorType) -> Checked {
    let sized = ty.shape.iter().all(|d| d.as_const().is_some_and(|n| n > 0));
    if sized && ty.constant && ty.bytes(&Dims::default()) < u64::MAX / 2 {
        Ok(())
    } else {
        fault(place, format!("expected a constant of known dimensions, found {ty}"))
    }
}
