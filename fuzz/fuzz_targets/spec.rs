//! A family's spec, or a block called from a small family, is lowered or refused, in bounded
//! memory; what is lowered can be verified and printed. Seeds: `seeds/spec` and `../models`.

#![no_main]

mod common;

use common::{Bound, bounded};
use infernum_frontend_hf::Config;
use infernum_frontend_hf::lower::{Request, lower};
use infernum_frontend_hf::spec::{Library, Source};
use infernum_ir::{DType, Module, Sym, Task, text, verify};
use libfuzzer_sys::fuzz_target;

const CONFIG: &[u8] = br#"{
    "hidden_size": 8, "vocab_size": 11, "intermediate_size": 12, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
}"#;

/// A spec of a few bytes may unfold to the 4 MiB that layers with graphs of their own take in released sizes, by an estimate that
/// allocations may go beyond.
const UNFOLDED: Bound = Bound { factor: 64, slack: 9 << 20 };

fuzz_target!(|data: &[u8]| {
    let Ok(input) = std::str::from_utf8(data) else { return };
    // A block's file is tried as the attention of a family that is otherwise Llama.
    let source = if input.trim_start().starts_with("Block") {
        let family = format!(
            r#"Family(name: "fuzz", doc: "", base: "llama.ron", architectures: [],
                blocks: {{ "attention": Inline({input}) }})"#
        );
        Source::new("fuzz.ron", &family)
    } else {
        Source::new("fuzz.ron", input)
    };
    let config = Config::parse("config.json", CONFIG).expect("a correct config");
    let module = bounded("lower", input.len(), UNFOLDED, || lowered(&source, &config));
    let Some(module) = module else { return };
    let checked = verify(&module);
    if checked.is_ok() {
        // Printing needs as much again as the text is long.
        let printed = text::print(&module);
        let bound = Bound { factor: 2, slack: 1 << 20 };
        let again = bounded("print", printed.len(), bound, || text::print(&module));
        assert_eq!(printed, again);
        match text::parse(&printed, "printed") {
            Ok(back) => assert!(back == module, "changed by printing:\n{printed}"),
            Err(e) => panic!("{e}\n{printed}"),
        }
    }
});

fn lowered(source: &Source, config: &Config) -> Option<Module> {
    let keys: Vec<&str> = config.keys().collect();
    let request = Request {
        config: &|key| config.value(key),
        config_keys: &keys,
        dtype: DType::Bf16,
        max_length: 64,
        weight_dtype: &|_| None,
        encoding: &|_, _| None,
        rows: Sym::B,
        task: Task::Generate,
        container: &[],
        names_only: false,
    };
    match lower(source, &Library::default(), &request) {
        Ok(lowered) => Some(lowered.module),
        Err(e) => {
            std::hint::black_box(e.to_string());
            None
        }
    }
}
