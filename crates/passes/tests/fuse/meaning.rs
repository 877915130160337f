//! Whole models mean the same fused and unfused.

use infernum_ir::{DType, text};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::Bucket;

use crate::support::{RULES, calls, fixture, fused, kernels, nmse, on, options, run};

const FIXTURES: [&str; 6] = [
    "llama/f32",
    "llama/bias_gqa8",
    "mistral/window",
    "qwen2/windows",
    "qwen3/gqa3_tied",
    "qwen3/layer_types",
];

#[test]
fn test_rules_keep_what_a_llama_means() {
    let before = fixture("llama/f32", DType::F32);
    let after = fused(&before, &kernels(RULES), &options());
    let calls = calls(&after.module);
    assert_eq!((calls["t_attention"], calls["t_swiglu"], calls["t_add_rmsnorm"]), (1, 1, 1));
    assert!(nmse(&run(&after.module), &run(&before)) < 1e-20);
}

#[test]
fn shipped_rules_keep_what_every_family_means() {
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let buckets = [
        Bucket { min: 1, max: 1, decode: true },
        Bucket { min: 17, max: 64, decode: true },
        Bucket { min: 65, max: 2048, decode: false },
    ];
    for name in FIXTURES {
        let before = fixture(name, DType::F32);
        let expected = run(&before);
        for target in ["cpu", "sm_80"] {
            for bucket in buckets {
                let after = fused(&before, &kernels, &on(target, bucket));
                let error = nmse(&run(&after.module), &expected);
                assert!(error < 1e-20, "{name} {target} {bucket:?}: {error:e}");
                let gap: f64 = after.report.graphs.iter().map(|g| g.gap_us).sum();
                assert_eq!(gap, 0.0, "{name} {target} {bucket:?}: the search was cut off");
            }
        }
    }
}

#[test]
fn twenty_runs_give_one_text_and_one_report() {
    let module = fixture("qwen3/layer_types", DType::Bf16);
    let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let once = || {
        let fused = fused(&module, &kernels, &options());
        let report = serde_json::to_string(&fused.report).expect("a report serialises");
        (text::print(&fused.module), fused.report.to_string(), report)
    };
    let first = once();
    for _ in 1..20 {
        assert_eq!(once(), first);
    }
}
