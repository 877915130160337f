//! The two files of an adapter are read or refused, and fitted to the demo model's banks or refused, in bounded memory. The
//! first two bytes of an input say how long the configuration is; behind it are the weights.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum::{Capacity, CompileOptions, Loader, Machine, ModelOptions, RunOptions};
use infernum_frontend_hf::peft::Adapter;
use infernum_ir::Sym;
use infernum_runtime::AdapterBanks;
use libfuzzer_sys::fuzz_target;

/// A pattern of a few bytes may be a machine of 64 KiB, and names are held twice; beside that the file itself.
const READ: Bound = Bound { factor: 1 << 15, slack: 1 << 20 };
/// The banks' rows, and one matrix in f64.
const FITTED: Bound = Bound { factor: 64, slack: 32 << 20 };

static BANKS: LazyLock<AdapterBanks> = LazyLock::new(|| {
    let mut options =
        ModelOptions { compile: CompileOptions::default(), ..ModelOptions::default() };
    options.compile.lora.max_loras = Some(2);
    let model = options.open().expect("the demo model");
    let run = RunOptions::default();
    let loader = Loader::new(&model, &options.compile, &run, &Machine::Cpu);
    AdapterBanks::of(&loader.plan(Sym::B, Capacity::new(2, 64)).expect("a plan"))
});

fuzz_target!(|data: &[u8]| {
    let [low, high, rest @ ..] = data else { return };
    let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
    let (config, weights) = rest.split_at(length);
    let weights = weights.to_vec();
    let read = bounded("read", data.len(), READ, || {
        Adapter::from_bytes(config, weights).map_err(|e| e.to_string())
    });
    let adapter = match read {
        Ok(adapter) => adapter,
        Err(message) => return assert!(message.len() < 4096, "{message}"),
    };
    for (_, low) in adapter.modules() {
        assert!(low.rank > 0 && low.rows > 0 && low.columns > 0);
        assert!(!adapter.a(low).1.is_empty() && !adapter.b(low).1.is_empty(), "outside the file");
    }
    let banks = &*BANKS;
    let fitted =
        bounded("fit", data.len(), FITTED, || banks.fit(&adapter).map_err(|e| e.to_string()));
    if let Err(message) = fitted {
        assert!(message.len() < 4096, "{message}");
    }
});
