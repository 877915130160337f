use serde_json::json;

use super::*;
use crate::safetensors::{TensorData, TensorOut, write_safetensors};

fn weights(tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let zeros = vec![0u8; 1 << 12];
    let out: Vec<TensorOut<'_>> = tensors
        .iter()
        .map(|(name, shape)| {
            let bytes = 4 * shape.iter().product::<u64>() as usize;
            TensorOut { name, shape, data: TensorData::Bytes(StoredType::F32, &zeros[..bytes]) }
        })
        .collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    write_safetensors(file.path(), &out).unwrap();
    std::fs::read(file.path()).unwrap()
}

const Q: [(&str, &[u64]); 2] = [
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", &[4, 6]),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", &[8, 4]),
];

fn adapter(config: &Value, tensors: &[(&str, &[u64])]) -> Result<Adapter, AdapterError> {
    Adapter::from_bytes(config.to_string().as_bytes(), weights(tensors))
}

fn config() -> Value {
    json!({ "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"] })
}

fn with(key: &str, value: Value) -> Value {
    let mut config = config();
    config[key] = value;
    config
}

#[test]
fn scales_follow_alpha_the_tensors_rank_and_patterns() {
    let scale = |config: &Value| {
        let adapter = adapter(config, &Q).unwrap();
        let (name, low) = adapter.modules().next().unwrap();
        assert_eq!(name, "model.layers.0.self_attn.q_proj");
        assert_eq!((low.rank, low.rows, low.columns), (4, 8, 6));
        adapter.scale(&[name.to_owned()], low.rank)
    };
    assert_eq!(scale(&config()), 4.0);
    assert_eq!(scale(&with("use_rslora", json!(true))), 8.0);
    assert_eq!(scale(&with("alpha_pattern", json!({ "q_proj": 2 }))), 0.5);
    assert_eq!(scale(&with("alpha_pattern", json!({ "proj": 2 }))), 4.0, "no part of a name");
    let pattern = json!({ "model.layers.[1-9].self_attn.q_proj": 1, "layers.\\d+.self_attn.*": 8 });
    assert_eq!(scale(&with("alpha_pattern", pattern)), 2.0);
}

#[test]
fn what_is_no_low_rank_part_is_refused_by_its_key() {
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("bias", json!("all")),
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("lora_bias", json!(true)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("lora_alpha", json!("much")),
        ("lora_alpha", json!(null)),
        ("alpha_pattern", json!({ "(": 1 })),
        ("alpha_pattern", json!([1])),
        ("use_rslora", json!(1)),
    ] {
        let error = adapter(&with(key, value.clone()), &Q).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("adapter_config.json: `{key}`: expected ")),
            "{value}: {error}"
        );
    }
    for (key, value) in [("modules_to_save", json!([])), ("init_lora_weights", json!("gaussian"))] {
        adapter(&with(key, value), &Q).unwrap();
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let error = |tensors: &[(&str, &[u64])]| adapter(&config(), tensors).unwrap_err().to_string();
    let (a, b) = (Q[0].0, Q[1].0);
    assert!(error(&[]).contains("holds no tensor"));
    assert!(error(&[Q[0]]).contains(b) && error(&[Q[1]]).contains(a));
    assert!(error(&[Q[0], (b, &[8, 5])]).contains("[8, 4]"));
    assert!(error(&[(a, &[4, 6, 1]), Q[1]]).contains("expected a matrix"));
    assert!(error(&[(a, &[0, 6]), (b, &[8, 0])]).contains("expected a matrix"));
    for name in [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    ] {
        assert!(error(&[Q[0], Q[1], (name, &[2, 2])]).contains(name), "{name}");
    }
}

#[test]
fn files_are_no_larger_than_they_may_be() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), config().to_string()).unwrap();
    assert!(matches!(Adapter::read(dir.path(), 1 << 20), Err(AdapterError::Io { .. })));
    std::fs::write(dir.path().join(WEIGHTS), weights(&Q)).unwrap();
    assert_eq!(Adapter::read(dir.path(), 1 << 20).unwrap().modules().count(), 1);
    let sparse = File::create(dir.path().join(WEIGHTS)).unwrap();
    sparse.set_len(MAX_HEADER + 2).unwrap();
    assert!(matches!(Adapter::read(dir.path(), 1), Err(AdapterError::TooLarge { .. })));
    std::fs::remove_file(dir.path().join(WEIGHTS)).unwrap();
    std::fs::create_dir(dir.path().join(WEIGHTS)).unwrap();
    assert!(matches!(Adapter::read(dir.path(), 1), Err(AdapterError::NotAFile { .. })));
}

#[test]
fn damaged_files_are_read_or_refused() {
    let (config, weights) = (config().to_string().into_bytes(), weights(&Q));
    for (at, by) in (0..400).flat_map(|at| [1, 0x20, 0x80, 0xff].map(|by| (at, by))) {
        let damaged = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let at = at % bytes.len();
            bytes[at] ^= by;
            bytes
        };
        for (config, weights) in [
            (damaged(&config), weights.clone()),
            (config.clone(), damaged(&weights)),
            (config[..at % config.len()].to_vec(), weights.clone()),
            (config.clone(), weights[..at % weights.len()].to_vec()),
        ] {
            let Ok(adapter) = Adapter::from_bytes(&config, weights) else { continue };
            for (_, low) in adapter.modules() {
                let elements = (adapter.a(low).1.len(), adapter.b(low).1.len());
                assert!(
                    elements.0 as u64 >= low.rank * low.columns
                        && elements.1 as u64 >= low.rows * low.rank
                );
            }
        }
    }
}
