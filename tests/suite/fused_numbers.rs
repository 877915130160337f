//! What fusion does to the numbers, on the CPU: the default pipeline against `--passes none`.

use std::collections::BTreeMap;

use infernum_ir::DType;

use crate::support::{Fixture, names, nmse};

/// Steps of one token (the decode bucket), of a few (the small one) and of many (the large one).
const CHUNKS: [usize; 3] = [1, 7, 64];

/// The worst figure of each family, which `--nocapture` shows.
fn worst(what: &str, bound: f64, figure: impl Fn(&Fixture, usize) -> f64) {
    let mut families: BTreeMap<(String, usize), (f64, String)> = BTreeMap::new();
    let mut failures = Vec::new();
    for name in names() {
        let fixture = Fixture::open(&name);
        let family = name.split('/').next().unwrap_or_default().to_owned();
        for chunk in CHUNKS {
            let found = figure(&fixture, chunk);
            if found.is_nan() || found > bound {
                failures.push(format!("{name}, steps of {chunk}: {found:.3e}, at most {bound:e}"));
            }
            let worst = families.entry((family.clone(), chunk)).or_default();
            if found.is_nan() || found > worst.0 {
                *worst = (found, name.clone());
            }
        }
    }
    // Equal to the last bit, nothing was fused: of few families nothing is, or what is changes no bit.
    let equal = families.values().filter(|(found, _)| *found == 0.0).count();
    assert!(equal * 5 < families.len(), "{equal} of {}", families.len());
    for ((family, chunk), (found, name)) in families {
        println!("{what}: {family}, steps of {chunk:2}: {found:.3e} ({name})");
    }
    assert!(failures.is_empty(), "{what}\n{}", failures.join("\n"));
}

/// The worst found is 1.0e-12, on llama/sharded in steps of one token.
#[test]
fn fused_f32_is_unfused_f32() {
    worst("f32 NMSE of fused against unfused", 1e-11, |f, chunk| {
        let fused = f.run(DType::F32, "default", chunk);
        nmse(&fused, &f.run(DType::F32, "none", chunk))
    });
}

/// Rounding elsewhere may be worse here and better there, but not by much. The worst found is 1.03,
/// on llama/f16; the mean squared error is meant, so that this is 1.02 in its root.
#[test]
fn fused_bf16_is_as_near_to_float64_as_unfused() {
    worst("bf16 NMSE of fused over that of unfused", 1.5, |f, chunk| {
        let fused = nmse(&f.run(DType::Bf16, "default", chunk), &f.logits);
        fused / nmse(&f.run(DType::Bf16, "none", chunk), &f.logits)
    });
}
