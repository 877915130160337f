//! Weights are stored once, whatever each bucket makes of them.

use std::path::Path;

use infernum_codegen::compile::{Options, compile};
use infernum_codegen::{Plan, Recipe, Weight};
use infernum_frontend_hf::LowerOptions;
use infernum_frontend_hf::spec::Source;
use infernum_ir::{Encoding, Sym};
use infernum_passes::Pipeline;
use infernum_passes::data::Kernels;
use infernum_passes::fuse::CostTable;

use crate::support::{Fixture, names, nmse};

/// The shipped rules, but packed weights for small steps only, so that buckets differ.
fn packing_small_steps() -> Kernels {
    let mut kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    for file in ["ffn.ron", "qkv.ron"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/rules").join(file);
        let text = std::fs::read_to_string(path).expect("a shipped file of rules");
        let text = text.replace("const\"],", "const\", \"tokens.max <= 16\"],");
        kernels.add_rules(&Source::new(file, &text)).unwrap_or_else(|e| panic!("{e}"));
    }
    kernels
}

fn planned(fixture: &Fixture, target: &str, kernels: &Kernels) -> Plan {
    let pipeline = Pipeline::named("default", None).expect("a built-in pipeline");
    let costs = CostTable::named(target, None).expect("a built-in cost table");
    let dtype = fixture.model.dtype().expect("a dtype");
    let options = Options {
        model: &fixture.model,
        lower: LowerOptions { rows: Sym::T, ..fixture.options(dtype) },
        pipeline: &pipeline,
        kernels,
        costs: (target, &costs),
        rules: None,
        adapters: None,
        kv_dtype: infernum_passes::KvDtype::Auto,
        explain: false,
        limits: fixture.limits(),
        templates: &infernum_codegen::cuda::Library::default(),
        device: None,
    };
    let compiled =
        compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{}: {e}", fixture.name));
    compiled.plan
}

/// Bytes that are stored of what the checkpoint holds: tables that are computed (the frequencies of
/// a rotation) are no copies.
fn stored(plan: &Plan) -> u64 {
    let alone = |w: &Weight| Plan { weights: vec![w.clone()], ..plan.clone() };
    let weights = plan.weights.iter().map(alone).filter(|p| !p.tensors().is_empty());
    // The packed form is made of whole units, which the small matrices of fixtures do not fill.
    let unpacked = |mut p: Plan| {
        for w in &mut p.weights {
            if let Some(stored) = w.ty.encoding.as_ref().and_then(Encoding::stored) {
                w.ty.encoding = Some(stored);
            }
        }
        p.stored_bytes()
    };
    weights.map(unpacked).sum()
}

#[test]
fn all_buckets_together_store_no_more_than_the_checkpoint() {
    let (shipped, split) = (Kernels::load(None, &[]).expect("built in"), packing_small_steps());
    for name in names() {
        let fixture = Fixture::open(&name);
        let checkpoint = fixture.model.checkpoint.as_ref().expect("a fixture has weights");
        for kernels in [&shipped, &split] {
            let plan = planned(&fixture, "sm_90a", kernels);
            // What is encoded in tensors beside one another has no rows that are a piece of it: one that a bucket reads
            // joined and another apart is stored twice.
            // The packed form has zeros at the ends of rows.
            let beside = |e: &Encoding| e.packing().is_some() || e.row_bytes(256).is_none();
            if plan.weights.iter().any(|w| w.ty.encoding.as_ref().is_some_and(beside)) {
                continue;
            }
            let (stored, held) = (stored(&plan), checkpoint.data_len());
            assert!(
                // Vectors that are computed of stored ones are f32.
                stored <= held + held / 50,
                "{name}: {stored} bytes of weights for {held} in the checkpoint"
            );
        }
    }
}

#[test]
fn what_one_bucket_packs_another_reads_in_parts() {
    let kernels = packing_small_steps();
    for name in ["llama/gqa3", "llama/bias_gqa8", "qwen2/windows", "qwen3/gqa3_tied"] {
        let fixture = Fixture::open(name);
        let dtype = fixture.model.dtype().expect("a dtype");
        let plan = fixture.plan(dtype, "default", &kernels);
        let views = |calls: &[infernum_codegen::ProgramCall]| {
            let weights = calls.iter().flat_map(|c| &c.weights);
            let is_view =
                |w: &&u32| matches!(plan.weights[**w as usize].recipe, Recipe::Rows { .. });
            weights.filter(is_view).count()
        };
        let (one, many) = (plan.schedule(1, true), plan.schedule(17, false));
        let calls = |i: Option<usize>| &plan.schedules[i.expect("a schedule")].calls;
        assert_eq!(views(calls(one)), 0, "{name}: one token reads what is stored");
        assert!(views(calls(many)) >= 5 * 2, "{name}: q, k, v, gate and up of two layers");
        // Both read the right rows: prompts in steps of 17 or more, and of few tokens.
        let logits = fixture.run_plan(plan.clone(), 20);
        let unfused = fixture.run(dtype, "none", 20);
        let (ours, theirs) = (nmse(&logits, &fixture.logits), nmse(&unfused, &fixture.logits));
        assert!(ours <= 2.0 * theirs, "{name}: NMSE {ours:.2e}, unfused {theirs:.2e}");
        let small = nmse(&fixture.run_plan(plan, 3), &fixture.logits);
        assert!(small <= 2.0 * theirs, "{name}: NMSE {small:.2e} in small steps");
    }
}
