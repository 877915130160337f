//! A table of costs, or a file of measured microseconds, is read or refused, in bounded memory; what is read prices
//! a graph.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{TEXT, bounded};
use infernum_frontend_hf::spec::Source;
use infernum_ir::{Module, text};
use infernum_passes::Bucket;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{CostTable, FuseOptions, Limits, Measurements, fuse};
use libfuzzer_sys::fuzz_target;

static KERNELS: LazyLock<Kernels> =
    LazyLock::new(|| Kernels::load(None, &[]).expect("the built-in files"));
static TABLE: LazyLock<CostTable> =
    LazyLock::new(|| CostTable::named("sm_90a", None).expect("a built-in table"));
static GRAPH: LazyLock<Module> = LazyLock::new(|| {
    text::parse(include_str!("../../tests/fixtures/ir/moe_qwen3.ir"), "fixture").expect("it parses")
});

fuzz_target!(|data: &[u8]| {
    let Ok(input) = std::str::from_utf8(data) else { return };
    let (kernels, table, graph) = (&*KERNELS, &*TABLE, &*GRAPH);
    let source = Source::new("fuzz.ron", input);
    let read = bounded("read", input.len(), TEXT, || {
        (CostTable::parse(&source), Measurements::parse(&source))
    });
    let costs = match read {
        (Ok(table), _) => table,
        (_, Ok(measured)) => CostTable { measured, ..table.clone() },
        (Err(a), Err(b)) => {
            std::hint::black_box((a.to_string(), b.to_string()));
            return;
        }
    };
    let bucket = Bucket { min: 1, max: 1, decode: true };
    let limits = Limits { nodes: 300, rounds: 4, search: 100 };
    let options = FuseOptions { limits, explain: true, ..FuseOptions::new("fuzz", costs, bucket) };
    let _ = std::hint::black_box(fuse(graph, kernels, &options).map_err(|e| e.to_string()));
});
