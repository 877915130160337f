//! A config.json is read or refused, and its family lowered, in bounded memory.

#![no_main]

mod common;

use common::{Bound, bounded};
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Config, LowerOptions, Model};
use infernum_ir::{Sym, verify};
use libfuzzer_sys::fuzz_target;

/// Beside the config's own values: a family's graphs, whatever the config is.
const BOUND: Bound = Bound { factor: 256, slack: 16 << 20 };

fuzz_target!(|data: &[u8]| {
    let library = Library::default();
    let module = bounded("open and lower", data.len(), BOUND, || {
        let config = Config::parse("config.json", data).map_err(|e| e.to_string())?;
        let _ = (config.dtype(), config.eos_ids(Some(3)), config.architectures());
        let model = Model::from_config(config, None, &library).map_err(|e| e.to_string())?;
        let options = LowerOptions { dtype: None, max_length: None, rows: Sym::B };
        model.lower(options, []).map(|l| l.module).map_err(|e| e.to_string())
    });
    if let Ok(module) = module {
        // Sizes that overflow are refused later; the graphs are sound all the same.
        let _ = std::hint::black_box(verify(&module).map_err(|e| e.to_string()));
    }
});
