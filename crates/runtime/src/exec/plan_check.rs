//! A plan is data and may come from a file: what executors take for granted is checked first.

use infernum_codegen::{Plan, TargetKind, VERSION};

use super::LoadError;

/// Operands or results of one launch at most: a packed projection with three adapters has fourteen.
pub(crate) const MAX_ARGS: usize = 16;

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
        let many = |l: &&infernum_codegen::Launch| l.operands.len().max(l.results.len()) > MAX_ARGS;
        if let Some(launch) = program.launches.iter().find(many) {
            let place = format!("program `{}`, `%{}`", program.name, launch.name);
            return fail(format!("{place}: expected at most {MAX_ARGS} operands and results"));
        }
    }
    plan.check().or_else(|e| fail(e.to_string()))
}
