//! Files of rules and of fused ops, parted by lines of `---`, are read or refused, in bounded
//! memory. What is read can be tried, and applied to graphs. Seeds: `seeds/rules`,
//! `../kernels/rules`, `../kernels/fused` and `../tests/filetests/wrong_rules`. Definitions of ops
//! live as long as the process, so run it with `ASAN_OPTIONS=detect_leaks=0`, `-detect_leaks=0` and
//! `-rss_limit_mb=8192`.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_frontend_hf::spec::Source;
use infernum_ir::{Module, text};
use infernum_passes::Bucket;
use infernum_passes::check::check_rule;
use infernum_passes::data::{DataError, Kernels};
use infernum_passes::fuse::{CostTable, FuseOptions, Limits, fuse};
use libfuzzer_sys::fuzz_target;

static SHIPPED: LazyLock<Kernels> =
    LazyLock::new(|| Kernels::load(None, &[]).expect("the built-in files"));

/// An attention with its projections, and a mixture of experts.
static GRAPHS: LazyLock<Vec<Module>> = LazyLock::new(|| {
    let texts = [
        include_str!("../../tests/fixtures/ir/gemma2.ir"),
        include_str!("../../tests/fixtures/ir/moe_qwen3.ir"),
    ];
    let parse = |t: &&str| text::parse(t, "fixture").expect("it parses");
    texts.iter().map(parse).collect()
});

static OPTIONS: LazyLock<FuseOptions> = LazyLock::new(|| {
    let costs = CostTable::named("sm_90a", None).expect("a built-in table");
    let bucket = Bucket { min: 1, max: 1, decode: true };
    let limits = Limits { nodes: 500, rounds: 6, search: 200 };
    FuseOptions { limits, explain: true, ..FuseOptions::new("sm_90a", costs, bucket) }
});

/// Names, expressions and calls are small things of a few hundred bytes each.
const BOUND: Bound = Bound { factor: 256, slack: 1 << 20 };

/// The ops first: rules may use them.
fn read(input: &str) -> Result<Kernels, DataError> {
    let source = |text: &str| Source::new("fuzz.ron", text);
    let is_op = |text: &&str| text.trim_start().starts_with("Fused");
    let (ops, rules): (Vec<&str>, Vec<&str>) = input.split("\n---\n").partition(is_op);
    let mut kernels = SHIPPED.clone();
    kernels.rules.clear();
    kernels.define_all(ops.into_iter().map(source).collect())?;
    rules.into_iter().try_for_each(|text| kernels.add_rules(&source(text)))?;
    Ok(kernels)
}

fuzz_target!(|data: &[u8]| {
    let Ok(input) = std::str::from_utf8(data) else { return };
    LazyLock::force(&SHIPPED);
    match bounded("read", input.len(), BOUND, || read(input)) {
        Ok(kernels) => {
            for rule in &kernels.rules {
                std::hint::black_box(check_rule(rule, 1, 2).to_string());
            }
            for graph in GRAPHS.iter().filter(|_| !kernels.rules.is_empty()) {
                let _ = std::hint::black_box(fuse(graph, &kernels, &OPTIONS));
            }
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
