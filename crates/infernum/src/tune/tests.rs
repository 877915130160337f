use super::*;
use crate::options::{ModelOptions, RunOptions};

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
