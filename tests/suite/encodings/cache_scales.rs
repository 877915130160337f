//! Checkpoints that hold scales of a KV cache: they load as without, and say so once.

use std::collections::BTreeMap;

use infernum_ir::DType;
use safetensors::Dtype;

use super::{Checkpoints, FP8, Tensor, folder, kernels, lowered, open};

const SCHEME: &str = r#"{"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false}"#;

fn with_scales(all: BTreeMap<String, Tensor>, name: &str) -> BTreeMap<String, Tensor> {
    let mut all = all;
    for (layer, part) in [(0, "k"), (0, "v"), (1, "k"), (1, "v"), (2, "k"), (2, "v")] {
        let name = format!("model.layers.{layer}.self_attn.{}", name.replace('*', part));
        // Far from one, so that it would be seen if it changed anything.
        let bytes = 3.5f32.to_le_bytes().to_vec();
        all.insert(name, Tensor { dtype: Dtype::F32, shape: vec![1], bytes });
    }
    all
}

fn logits(tensors: &BTreeMap<String, Tensor>, quantisation: Option<&str>) -> (Vec<f64>, bool) {
    let kernels = kernels(None);
    let fixture = open(&folder("cache-scales", tensors, quantisation));
    let notice = fixture.model.cache_notice();
    let expected = |text: &String| text.contains("change nothing") && text.contains("--kv-dtype");
    assert!(notice.iter().all(expected), "{notice:?}");
    let plan = fixture.plan(DType::F32, "default", &kernels);
    (fixture.run_plan(plan, usize::MAX), notice.is_some())
}

#[test]
fn codes_with_scales_of_the_cache_give_the_logits_of_those_without() {
    let kernels = kernels(None);
    let fp8 = kernels.ops.encoding("fp8_block").expect("it ships").clone();
    let all = || Checkpoints::llama(&|_, _| Some(fp8.clone())).encoded;
    let (expected, is_told) = logits(&all(), Some(FP8));
    assert!(!is_told && expected.iter().all(|x| x.is_finite()));
    // As compressed-tensors, ModelOpt and older FP8 checkpoints call them.
    for name in ["*_scale", "*_proj.*_scale", "attn.*_scale"] {
        let (found, is_told) = logits(&with_scales(all(), name), Some(FP8));
        assert!(is_told && found == expected, "{name}");
    }
}

#[test]
fn plain_numbers_with_scales_of_the_cache_load() {
    let all = || Checkpoints::llama(&|_, _| None).encoded;
    let (expected, _) = logits(&all(), None);
    let tensors = format!(
        r#"{{"quant_method": "compressed-tensors", "config_groups": {{}}, "kv_cache_scheme": {SCHEME}}}"#
    );
    let modelopt =
        r#"{"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"}"#;
    for config in [None, Some(tensors.as_str()), Some(modelopt)] {
        let (found, is_told) = logits(&with_scales(all(), "*_scale"), config);
        assert!(is_told && found == expected, "{config:?}");
    }
    // A scheme whose scales are found while it runs.
    let (found, is_told) = logits(&all(), Some(&tensors));
    assert!(is_told && found == expected);
}

/// Scales of the cache excuse nothing else.
#[test]
fn codes_that_no_encoding_is_for_are_refused_beside_scales_of_the_cache() {
    let kernels = kernels(None);
    let fp8 = kernels.ops.encoding("fp8_block").expect("it ships").clone();
    let all = Checkpoints::llama(&|_, _| Some(fp8.clone())).encoded;
    let config = r#"{"quant_method": "other"}"#;
    let fixture = open(&folder("other-codes", &with_scales(all, "*_scale"), Some(config)));
    let options = fixture.options(DType::F32);
    let error = fixture.model.lower(options, kernels.ops.encodings()).expect_err("codes of nobody");
    let error = error.to_string();
    assert!(error.contains("weight_scale_inv`: unexpected"), "{error}");
    assert!(error.contains("no encoding that is known") && !error.contains("k_scale"), "{error}");
    // Without them, plain weights are what this config is wrong about.
    let plain = Checkpoints::llama(&|_, _| None).encoded;
    let fixture = open(&folder("no-codes", &plain, Some(config)));
    assert!(fixture.model.lower(options, kernels.ops.encodings()).is_err());
    let with = with_scales(plain, "*_scale");
    lowered(&open(&folder("only-scales", &with, Some(config))), &kernels);
}
