//! Every kernel of a fused op against the op's body.

use infernum_passes::data::Kernels;
use infernum_runtime::cpu::{check, unchecked};

#[test]
fn every_kernel_of_a_fused_op_agrees_with_its_body() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(unchecked(&kernels.ops), Vec::<&str>::new());
    let verdicts = check(&kernels.ops, 1);
    assert!(verdicts.len() > 200, "{}", verdicts.len());
    let failed: Vec<String> =
        verdicts.iter().filter(|v| !v.passed()).map(ToString::to_string).collect();
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), verdicts.len(), failed.join("\n"));
}
