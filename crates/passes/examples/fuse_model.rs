//! Fuses a model of Llama 3 8B's shape and says what happened and how long it took:
//! `fuse_model [TARGET] [MIN MAX] [decode] [explain]`.

use std::error::Error;
use std::time::Instant;

use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Config, LowerOptions, Model};
use infernum_ir::{DType, Sym, text};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, CostTable, FuseOptions, fuse};

const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": false
}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|a| a == flag);
    let target = args.first().map_or("sm_90a", String::as_str);
    let number = |i: usize| args.get(i).and_then(|a| a.parse().ok());
    let (min, max) = (number(1).unwrap_or(1), number(2).unwrap_or(1));
    let config = Config::parse("config.json", CONFIG.as_bytes())?;
    let model = Model::from_config(config, None, &Library::default())?;
    let options = LowerOptions { dtype: Some(DType::Bf16), max_length: Some(8192), rows: Sym::B };
    let module = model.lower(options)?.module;
    let kernels = Kernels::load(None, &[])?;
    let bucket = Bucket { min, max, decode: has("decode") };
    let mut options = FuseOptions::new(target, CostTable::named(target, None)?, bucket);
    options.explain = has("explain");
    let started = Instant::now();
    let fused = fuse(&module, &kernels, &options)?;
    let took = started.elapsed();
    for graph in &fused.report.graphs {
        println!("{graph:?}");
    }
    if has("text") {
        println!("{}", text::print(&fused.module));
    }
    println!("{}", fused.report);
    println!("fused {} graphs in {took:?}", fused.module.graphs.len());
    Ok(())
}
