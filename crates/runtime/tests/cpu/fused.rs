//! Every kernel of a fused op against the op's body.

use std::collections::BTreeSet;

use infernum_passes::data::Kernels;
use infernum_passes::fuse::{self, CostTable};
use infernum_runtime::check::cpu::{check, unchecked};
use infernum_runtime::cpu::has_kernel;

#[test]
fn every_kernel_of_a_fused_op_agrees_with_its_body() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(unchecked(&kernels), Vec::<&str>::new());
    let verdicts = check(&kernels, 1, "");
    assert!(verdicts.len() > 200, "{}", verdicts.len());
    let failed: Vec<String> =
        verdicts.iter().filter(|v| !v.passed()).map(ToString::to_string).collect();
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), verdicts.len(), failed.join("\n"));
}

/// What extraction takes for one call is one call here, and nothing else is.
#[test]
fn the_cost_table_lists_the_kernels_that_there_are() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let costs = CostTable::named("cpu", None).unwrap_or_else(|e| panic!("{e}"));
    let fuse::Kernels::Only(listed) = &costs.kernels else { panic!("{:?}", costs.kernels) };
    let fused = kernels.ops.fused().map(|op| op.name).filter(|name| has_kernel(name));
    let unique: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    assert_eq!(unique, fused.collect());
    assert_eq!(unique.len(), listed.len(), "an op is listed twice: {listed:?}");
}

/// An op of a user's own is checked on calls that its files give rise to: no Rust lists them.
#[test]
fn an_op_of_a_users_own_is_checked_from_its_files() {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/new-fusion");
    let kernels = Kernels::load(Some(&data), &[]).unwrap_or_else(|e| panic!("{e}"));
    let verdicts = check(&kernels, 1, "scaled_add");
    assert!(verdicts.len() >= 15, "{verdicts:?}");
    for verdict in &verdicts {
        assert!(verdict.passed(), "{verdict}");
        assert!(verdict.case.contains("[T, ") && verdict.case.contains("by: "), "{verdict}");
    }
    let dtypes: BTreeSet<_> = verdicts.iter().map(|v| v.dtype).collect();
    assert_eq!(dtypes.len(), 3);
}
