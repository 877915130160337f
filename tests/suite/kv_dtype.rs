//! A KV cache of 8-bit floats: what it holds, and what that does to logits.

use infernum_ir::{DType, Sym};
use infernum_passes::{KvDtype, store_rows};

use crate::fusion::interpreted;
use crate::support::{Fixture, mean_kl, nmse};

/// Paged and in rings, with and without norms of heads, sinks, soft caps and values that are cut.
const FIXTURES: [&str; 8] = [
    "llama/gqa3",
    "mistral/window",
    "qwen2/windows",
    "qwen3/gqa3_tied",
    "gemma2/caps",
    "diffllama/pairs",
    "gpt_oss/sinks",
    "qwen3_5/dense",
];

/// What is rounded differs in its last bits with the order of sums, and now and then becomes the next code.
const CODES: f64 = 1e-5;

#[test]
fn logits_are_those_of_the_reference() {
    for name in FIXTURES {
        let f = Fixture::with_codes(name);
        if f.model.dtype().expect("a dtype") != DType::Bf16 {
            continue; // weights are read as bf16
        }
        let lowered = f.model.lower(f.options(DType::F32), []).expect("a shipped family");
        let stored = store_rows(&lowered.module, KvDtype::Fp8).unwrap_or_else(|e| panic!("{e}"));
        let expected = interpreted(&f, &stored);
        let plain = interpreted(&f, &lowered.module);
        let found = f.run(DType::F32, "default", usize::MAX);
        let error = nmse(&found[..expected.len()], &expected);
        assert!(error <= CODES, "{name}: NMSE {error:.2e}");
        // It is no rounding of ours that is compared.
        let rounded = nmse(&plain, &expected);
        assert!(rounded > 10.0 * error, "{name}: NMSE {rounded:.2e} without codes");
    }
}

#[test]
fn chunks_and_pipelines_agree() {
    for name in FIXTURES {
        let f = Fixture::with_codes(name);
        let whole = f.run(DType::F32, "default", usize::MAX);
        for (pipeline, chunk) in [("default", 1), ("default", 7), ("none", usize::MAX), ("none", 7)]
        {
            let error = nmse(&f.run(DType::F32, pipeline, chunk), &whole);
            assert!(error <= CODES, "{name}, {pipeline}, steps of {chunk}: NMSE {error:.2e}");
        }
    }
}

/// In nats, of bf16 models: `--nocapture` shows them. These are small random models, which are moved more than trained
/// ones by rows that are a thirtieth off.
#[test]
fn little_is_lost() {
    let mut worst = 0.0f64;
    for name in FIXTURES {
        let (plain, codes) = (Fixture::open(name), Fixture::with_codes(name));
        let vocab = plain.logits.len() / plain.tokens.len();
        let [plain, codes] = [plain, codes].map(|f| f.run(DType::Bf16, "default", usize::MAX));
        let kl = mean_kl(&codes, &plain, vocab);
        println!("{name}: mean KL {kl:.2e}");
        worst = worst.max(kl);
        assert!(kl > 0.0, "{name}: nothing was rounded");
    }
    assert!(worst < 2e-2, "mean KL {worst:.2e}");
}

#[test]
fn what_is_no_key_or_value_is_refused() {
    for (name, message) in [
        (
            "deepseek_v2/lite",
            "graph `decoder`: `fp8` is for rows that attention takes as keys or values, and `%",
        ),
        ("mamba/tied", "`fp8` is for caches of keys and values, and the model has none"),
    ] {
        let f = Fixture::open(name);
        let options = infernum_frontend_hf::LowerOptions { rows: Sym::B, ..f.options(DType::F32) };
        let lowered = f.model.lower(options, []).expect("a shipped family");
        let error = store_rows(&lowered.module, KvDtype::Fp8).expect_err(name);
        assert!(error.starts_with(message), "{name}: {error}");
        assert_eq!(store_rows(&lowered.module, KvDtype::Auto).as_ref(), Ok(&lowered.module));
    }
}
