//! A plan is data and may come from a file: what executors take for granted is checked first.

use infernum_codegen::{Arg, Launch, Plan, TargetKind, VERSION, Value};
use infernum_ir::Type;

use super::LoadError;

/// Operands or results of one launch at most.
pub(crate) const MAX_ARGS: usize = 12;

/// Checks once what running then takes for granted.
pub(crate) fn check(plan: &Plan, target: TargetKind) -> Result<(), LoadError> {
    let fail = |what: String| Err(LoadError::Plan(what));
    if plan.version != VERSION {
        return fail(format!("it has version {}, expected {VERSION}", plan.version));
    }
    if plan.target != target {
        return fail(format!("it is for {:?}", plan.target));
    }
    for program in &plan.programs {
        let fits = |value: &Value| match (value.arg, &value.ty) {
            (Arg::Buffer(b), Type::Tensor(ty)) => program
                .buffers
                .get(b as usize)
                .is_some_and(|r| r.offset % 64 == 0 && ty.bytes(&plan.limits) <= r.bytes),
            (Arg::Buffer(_), Type::State(_)) => false,
            _ => true,
        };
        let inside = |r: &infernum_codegen::Region| {
            r.offset.checked_add(r.bytes).is_some_and(|end| end <= plan.arena_bytes)
        };
        let values = |l: &Launch| {
            l.operands.len() <= MAX_ARGS
                && l.results.len() <= MAX_ARGS
                && l.operands.iter().flatten().chain(&l.results).all(fits)
                && l.frees.iter().all(|f| (*f as usize) < program.buffers.len())
        };
        let carried = program
            .results
            .iter()
            .all(|c| fits(&Value { arg: Arg::Buffer(c.buffer), ty: Type::Tensor(c.ty.clone()) }));
        if !program.buffers.iter().all(inside) || !program.launches.iter().all(values) || !carried {
            return fail(format!("program `{}` leaves its buffers", program.name));
        }
    }
    let calls = || plan.schedules.iter().flat_map(|s| &s.calls);
    for call in calls() {
        let program = plan.programs.get(call.program as usize);
        let slots = |arg: Arg| match arg {
            Arg::Weight(s) => call.weights.get(s as usize).is_some(),
            Arg::State(s) => call.states.get(s as usize).is_some(),
            _ => true,
        };
        let bound = program.is_some_and(|p| {
            p.launches.iter().flat_map(|l| l.operands.iter().flatten()).all(|v| slots(v.arg))
        });
        let known = call.weights.iter().all(|w| (*w as usize) < plan.weights.len())
            && call.states.iter().all(|s| (*s as usize) < plan.states.len());
        if !bound || !known {
            return fail("a call is not bound".to_owned());
        }
    }
    Ok(())
}
