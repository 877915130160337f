use super::*;
use crate::data::Kernels;

#[test]
fn the_shipped_rules_hold() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let verdicts = check(&kernels, 1, 100);
    for v in &verdicts {
        println!("{v}");
    }
    let bad: Vec<String> = verdicts
        .iter()
        .filter(|v| !v.passed() || v.planted < 100 || !v.warnings.is_empty())
        .map(Verdict::to_string)
        .collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
