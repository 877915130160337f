//! A file of rules or of a fused op is read or refused, in bounded memory; rules that are read can
//! be tried. Seeds: `seeds/rules`, `../kernels/rules`, `../kernels/fused` and
//! `../tests/filetests/wrong_rules`. Definitions of ops live as long as the process, so run it with
//! `ASAN_OPTIONS=detect_leaks=0` and `-detect_leaks=0`.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Bound, bounded};
use infernum_frontend_hf::spec::Source;
use infernum_passes::check::check_rule;
use infernum_passes::data::Kernels;
use libfuzzer_sys::fuzz_target;

static SHIPPED: LazyLock<Kernels> =
    LazyLock::new(|| Kernels::load(None, &[]).expect("the built-in files"));

/// Names, expressions and calls are small things of a few hundred bytes each.
const BOUND: Bound = Bound { factor: 256, slack: 1 << 20 };

fuzz_target!(|data: &[u8]| {
    let Ok(input) = std::str::from_utf8(data) else { return };
    let mut kernels = SHIPPED.clone();
    kernels.rules.clear();
    let source = Source::new("fuzz.ron", input);
    let result = bounded("read", input.len(), BOUND, || {
        if input.trim_start().starts_with("Fused") {
            kernels.define_all(vec![source])
        } else {
            kernels.add_rules(&source)
        }
    });
    match result {
        Ok(()) => {
            for rule in &kernels.rules {
                std::hint::black_box(check_rule(rule, 1, 2).to_string());
            }
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
