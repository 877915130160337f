use infernum_codegen::Limits;
use infernum_codegen::compile::{Options, compile};
use infernum_frontend_hf::LowerOptions;

use super::*;
use crate::options::{ModelOptions, RunOptions};

/// What a GPU would run, without one.
fn compiled(limits: Limits, run: impl FnOnce(&Plan, &Kernels, &Library, &Device)) {
    let options = ModelOptions::default();
    let model = options.open_bare().expect("the demo");
    let (pipeline, kernels) = (options.pipeline("cuda"), options.kernels().expect("ours"));
    let (templates, device) = (Library::new(None), Device::named("sm_90a").expect("known"));
    let costs = options.cost_table("sm_90a").expect("known");
    let tuned = TunedVariants::default();
    let options = Options {
        model: &model,
        lower: LowerOptions {
            dtype: Some(infernum_ir::DType::Bf16),
            max_length: Some(limits.max_length),
            rows: Sym::B,
        },
        pipeline: &pipeline.expect("known"),
        kernels: &kernels,
        costs: ("sm_90a", &costs),
        rules: None,
        adapters: None,
        kv_dtype: infernum_passes::KvDtype::Auto,
        explain: false,
        limits,
        templates: &templates,
        device: Some((&device, &tuned)),
    };
    let compiled = compile(&options, &mut |_, _, _| {}).expect("a plan");
    run(&compiled.plan, &kernels, &templates, &device);
}

#[test]
fn each_kind_of_steps_has_a_sample_and_each_rival_can_be_chosen() {
    let limits = Limits { chunk: 256, sequences: 70, max_length: 256 };
    compiled(limits, |plan, kernels, templates, device| {
        let (batches, only) = (Vec::new(), Vec::new());
        let tuning = Tuning { sequences: 70, context: 64, batches, prompts: false, only };
        let all = samples(plan, &tuning);
        let empty = (0..plan.schedules.len())
            .filter(|i| plan.steps(*i).is_some_and(|steps| steps.min > steps.max));
        assert_eq!(all.len() + empty.count(), plan.schedules.len(), "{all:?}");
        for sample in &all {
            let sequences = (sample.generated + usize::from(sample.prompt > 0)) as u64;
            let tokens = (sample.generated + sample.prompt) as u64;
            assert!(sequences <= plan.limits.seqs && tokens <= plan.limits.t, "{sample}");
        }
        let has_both = |s: &&Sample| s.generated > 0 && s.prompt > 0;
        assert_eq!(
            all.iter().filter(has_both).count(),
            6,
            "greedy and drawn, in three kinds of steps"
        );
        // Restricted: of one kind, and with prompts.
        let one = Tuning { batches: vec![5], ..tuning.clone() };
        assert!(samples(plan, &one).iter().all(|s| (s.generated, s.prompt) == (8, 0)));
        let prompts = Tuning { prompts: true, ..tuning };
        assert!(samples(plan, &prompts).iter().all(|s| s.prompt > 0));

        let mut contested = 0;
        for sample in &all {
            let found = rivals(plan, sample.schedule, &kernels.ops, templates, device);
            for rivals in found.expect("rivals").0 {
                let site = &rivals.site;
                // What is found for the 70 sequences of this plan is for all of 65 to 128.
                let kind = (sample.generated == 70).then_some((65, 128));
                assert!(kind.is_none_or(|kind| (site.steps.min, site.steps.max) == kind), "{site}");
                assert_eq!(rivals.refused, [""; 0], "{site}");
                // Rows that run on one variant are launched together, as a site of its own.
                let decode = plan.schedules[sample.schedule].bucket.decode;
                let is_part = !decode && site.op == "paged_attention";
                // The one that the order would take last.
                let Some(variant) = rivals.variants.last().filter(|_| !is_part) else { continue };
                let sites = [(site.clone(), variant.clone())].into();
                let tuned = TunedVariants::of(vec![Chosen { source: String::new(), sites }]);
                let (mut other, ops) = (plan.clone(), &kernels.ops);
                let choices = reattach(&mut other, sample.schedule, ops, templates, device, &tuned);
                let choices = choices.expect("kernels");
                assert_eq!(rivals.running(&choices), Some(variant.as_str()), "{site}");
                assert_eq!(choices.dropped, []);
                contested += 1;
            }
        }
        assert!(contested > 20, "{contested}");
    });
}

#[test]
fn a_shortened_step_calls_each_program_a_few_times() {
    let (model, run) = (ModelOptions::default(), RunOptions::default());
    let opened = model.open_bare().expect("the demo");
    let loader = Loader::new(&opened, &model, &run, &Machine::Cpu);
    let plan = loader.plan(Sym::B, Capacity::new(4, 64)).expect("a plan");
    let calls = |plan: &Plan, program: u32| {
        plan.schedules[1].calls.iter().filter(|call| call.program == program).count()
    };
    assert_eq!(shortened(&plan, 1, u64::MAX), plan);
    let short = shortened(&plan, 1, 0);
    short.check().expect("a plan");
    let mut shorter = 0;
    for program in plan.schedules[1].calls.iter().map(|call| call.program) {
        assert_eq!(calls(&short, program), calls(&plan, program).min(2));
        shorter += usize::from(calls(&plan, program) > 2);
    }
    assert!(shorter > 0, "the demo has layers");
    assert_eq!(short.schedules[0], plan.schedules[0]);
    // As many as read so much: a layer's weights, three times.
    let layer = plan.schedules[1].calls.iter().find(|call| calls(&plan, call.program) > 3);
    let layer = layer.expect("a layer");
    let bytes = |w: &u32| plan.weights[*w as usize].ty.bytes(&Dims::default());
    let cold = 3 * layer.weights.iter().map(bytes).sum::<u64>();
    assert_eq!(calls(&shortened(&plan, 1, cold), layer.program), 3);
}

#[test]
fn ones_own_choices_go_before_those_of_the_data_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = |op: &str| Site {
        op: op.to_owned(),
        operands: Vec::new(),
        steps: Bucket { min: 1, max: 1, decode: true },
    };
    let file = |device: &str, variant: &str| TunedFile {
        device: device.to_owned(),
        choices: [(site("linear"), variant.to_owned())].into(),
        ..TunedFile::default()
    };
    let (data, cache) = (folder.path().join("data"), folder.path().join("cache"));
    let run = RunOptions { kernel_cache: Some(cache), ..RunOptions::default() };
    let own = run.kernels().tuned_file("A GPU").expect("a path");
    file("A GPU", "own").save(&own).expect("written");
    let shared = data.join("kernels/tuned/any-name.ron");
    file("A GPU", "shared").save(&shared).expect("written");
    file("Another", "other").save(&data.join("kernels/tuned/b.ron")).expect("written");
    let chosen = |path: &Path, variant: &str| Chosen {
        source: path.display().to_string(),
        sites: [(site("linear"), variant.to_owned())].into(),
    };
    let found = run.tuned("A GPU", Some(&data)).expect("read");
    let expected = vec![chosen(&own, "own"), chosen(&shared, "shared")];
    assert_eq!(found, TunedVariants::of(expected));
    let untuned = RunOptions { untuned: true, ..run.clone() };
    assert_eq!(untuned.tuned("A GPU", Some(&data)).expect("nothing"), TunedVariants::default());
    std::fs::write(&own, "{}").expect("written");
    let error = run.tuned("A GPU", Some(&data)).expect_err("damaged").to_string();
    assert!(error.contains("a-gpu.ron") && error.contains("--untuned"), "{error}");
}
