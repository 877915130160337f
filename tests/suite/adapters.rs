//! Low-rank adapters against what PEFT computes with them, and beside one another.

use std::path::{Path, PathBuf};

use infernum::CompileOptions;
use infernum_codegen::compile::{Options, compile};
use infernum_codegen::cuda::{Library, TunedVariants};
use infernum_codegen::{Asks, Plan};
use infernum_frontend_hf::peft::Adapter;
use infernum_frontend_hf::{LowerOptions, Model, ModelFiles};
use infernum_ir::{DType, Sym};
use infernum_passes::data::{Kernels, Numerics};
use infernum_passes::{Adapters, Pipeline};
use infernum_runtime::{
    AdapterBanks, AdapterFault, AdapterWeights, Engine, EngineError, EngineLimits, EngineOptions,
    Event, GroupKind, PlanExecutor, Request, StepInputs, most_blocks, tables,
};

use crate::parity::f32_bound;
use crate::support::{Fixture, Launches, library, machine, nmse, numbers, root};

const NAMES: [&str; 6] = ["llama", "joined", "mixture", "experts", "packed_experts", "encoded"];

/// A model, its adapters' folders, and logits: without an adapter and with each.
struct Adapted {
    fixture: Fixture,
    folders: Vec<PathBuf>,
    expected: Vec<Vec<f64>>,
}

impl Adapted {
    fn open(name: &str) -> Adapted {
        let folder = root().join("adapters").join(name);
        let read = |file: &str| std::fs::read(folder.join(file)).expect("a committed file");
        let meta: serde_json::Value = serde_json::from_slice(&read("fixture.json")).expect("JSON");
        let fixture = Fixture::open(meta["base"].as_str().expect("a base"));
        let bytes = read("expected.safetensors");
        let all = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
        let logits = |name| numbers(&all.tensor(name).expect("logits"));
        let expected = vec![fixture.logits.clone(), logits("r4"), logits("r8")];
        Adapted { fixture, folders: ["r4", "r8"].map(|a| folder.join(a)).to_vec(), expected }
    }

    fn plan(&self, dtype: DType, pipeline: &str, rows: Sym, adapters: Option<&Adapters>) -> Plan {
        let machine = machine();
        let pipeline = if pipeline == "default" { machine.pipeline() } else { pipeline };
        let mut pipeline = Pipeline::named(pipeline, None).expect("a built-in pipeline");
        pipeline.numerics = pipeline.numerics.min(Numerics::Rounds);
        let (target, costs) =
            machine.costs(&CompileOptions::default()).expect("a built-in cost table");
        let (device, kernels) =
            (machine.device(), Kernels::load(None, &[]).expect("built-in ones"));
        let (templates, tuned) = (Library::default(), TunedVariants::default());
        let f = &self.fixture;
        let mut limits = f.limits();
        (limits.chunk, limits.sequences) = (3 * limits.chunk, 3);
        let options = Options {
            model: &f.model,
            lower: LowerOptions { rows, ..f.options(dtype) },
            pipeline: &pipeline,
            kernels: &kernels,
            costs: (&target, &costs),
            rules: None,
            kv_dtype: infernum_passes::KvDtype::Auto,
            adapters,
            explain: false,
            limits,
            templates: &templates,
            device: device.as_ref().map(|d| (d, &tuned)),
        };
        compile(&options, &mut |_, _, _| {}).unwrap_or_else(|e| panic!("{}: {e}", f.name)).plan
    }

    fn weights(&self, plan: &Plan) -> Vec<AdapterWeights> {
        let banks = AdapterBanks::of(plan);
        self.folders
            .iter()
            .map(|folder| fit(&banks, folder).unwrap_or_else(|e| panic!("{e}")))
            .collect()
    }

    /// Logits of the prompt three times, in one step: with each of these slots, if any.
    fn run(
        &self,
        plan: Plan,
        adapters: &[(usize, AdapterWeights)],
        slots: [Option<usize>; 3],
    ) -> Vec<Vec<f64>> {
        let (groups, tokens) = (GroupKind::of_plan(&plan), &self.fixture.tokens);
        let size = StepInputs::BLOCK_SIZE;
        let each = most_blocks(&groups, tokens.len(), size, tokens.len());
        let mut executor = self.fixture.executor(plan, 3 * each, Launches::wanted());
        for (slot, weights) in adapters {
            executor.set_adapter(*slot, weights).expect("a slot");
        }
        step(&mut *executor, &groups, tokens, each, slots)
    }

    /// Without an adapter and with each, in one step, logits are those of PEFT.
    fn matches_peft(&self, plan: Plan, what: &str) {
        let [r4, r8] = <[_; 2]>::try_from(self.weights(&plan)).expect("two adapters");
        let found = self.run(plan, &[(2, r4), (0, r8)], [None, Some(2), Some(0)]);
        for (i, (found, expected)) in found.iter().zip(&self.expected).enumerate() {
            let error = nmse(found, expected);
            assert!(error <= f32_bound(), "{what}, row {i}: NMSE {error:.2e}");
        }
    }
}

fn step(
    executor: &mut dyn PlanExecutor,
    groups: &[GroupKind],
    tokens: &[u32],
    each: usize,
    slots: [Option<usize>; 3],
) -> Vec<Vec<f64>> {
    let size = StepInputs::BLOCK_SIZE;
    let mut inputs = StepInputs::new(size).with_groups(groups);
    for (i, slot) in slots.into_iter().enumerate() {
        let own = (i * each) as u32..;
        inputs
            .push(tokens, tokens.len(), &tables(groups, tokens.len(), size, tokens.len(), own))
            .expect("inputs");
        slot.into_iter().for_each(|slot| inputs.set_adapter(slot));
    }
    let logits = &executor.run(&inputs).expect("a step").logits;
    logits
        .chunks(logits.len() / 3)
        .map(|part| part.iter().map(|v| f64::from(*v)).collect())
        .collect()
}

fn fit(banks: &AdapterBanks, folder: &Path) -> Result<AdapterWeights, AdapterFault> {
    banks.fit(&Adapter::read(folder, banks.largest()).expect("a fixture's adapter"))
}

fn room() -> Adapters {
    Adapters { slots: 3, rank: 9, targets: None }
}

/// Room for a fixture's adapters: there is some for experts where they are named.
fn room_of(name: &str) -> Adapters {
    let named = ["experts", "q_proj", "v_proj", "o_proj"].map(str::to_owned);
    let targets = name.ends_with("experts").then(|| named.to_vec());
    Adapters { targets, ..room() }
}

/// Rows of several adapters and of none stand in one step, and each has the logits that PEFT gives it alone.
#[test]
fn rows_with_adapters_of_several_ranks_match_pefts_float64() {
    for name in NAMES {
        let adapted = Adapted::open(name);
        for pipeline in ["default", "none"] {
            let plan = adapted.plan(DType::F32, pipeline, Sym::T, Some(&room_of(name)));
            adapted.matches_peft(plan, &format!("{name}, {pipeline}"));
        }
    }
}

/// A GGUF file takes adapters of the model that it was made from, though its tensors have other names and rows of heads
/// stand in another order.
#[test]
fn a_gguf_file_takes_the_adapters_of_its_model() {
    for name in ["mixture", "experts"] {
        let mut adapted = Adapted::open(name);
        let file = ModelFiles::open(root().join("gguf/mixtral__top2.gguf")).expect("a fixture");
        let model = Model::open(file, None, &library());
        adapted.fixture.model = model.unwrap_or_else(|e| panic!("{e}"));
        let plan = adapted.plan(DType::F32, "default", Sym::T, Some(&room_of(name)));
        adapted.matches_peft(plan, name);
    }
}

/// An adapter may have been trained with the model without its head, whose modules have shorter names; not with two of
/// them.
#[test]
fn modules_are_found_by_the_names_of_other_checkpoints() {
    let adapted = Adapted::open("llama");
    let plan = adapted.plan(DType::F32, "default", Sym::T, Some(&room()));
    let names = adapted.fixture.model.other_names().expect("the family's");
    let banks = AdapterBanks::of(&plan).also_named(names);
    let read = |file: &str| std::fs::read(adapted.folders[0].join(file)).expect("a fixture");
    let weights = read("adapter_model.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&weights).expect("a valid file");
    let shorter = |name: &str| name.replace("base_model.model.model.", "base_model.model.");
    let renamed = |to: &dyn Fn(&str) -> Vec<String>| {
        let named = tensors.iter().flat_map(|(name, view)| {
            to(name).into_iter().map(move |name| (name, view.clone())).collect::<Vec<_>>()
        });
        let bytes = safetensors::serialize(named, None).expect("tensors");
        Adapter::from_bytes(&read("adapter_config.json"), bytes).expect("an adapter")
    };
    let headless = renamed(&|name| vec![shorter(name)]);
    let headless = banks.fit(&headless).expect("the same modules");
    let both = renamed(&|name| vec![name.to_owned(), shorter(name)]);
    let error = banks.fit(&both).unwrap_err();
    assert!(matches!(error, AdapterFault::Twice { .. }), "{error}");
    let elsewhere = renamed(&|name| vec![name.replace(".model.layers.", ".vision.layers.")]);
    let error = banks.fit(&elsewhere).unwrap_err();
    assert!(matches!(error, AdapterFault::Module { .. }), "{error}");
    let found = adapted.run(plan, &[(0, headless)], [Some(0); 3]);
    assert!(nmse(&found[0], &adapted.expected[1]) <= f32_bound());
}

/// A row's numbers are the same bits whatever adapters the other rows of its step have. Where none has one, steps may run
/// what is compiled without adapters, but not those of a reproducible plan.
#[test]
fn a_row_does_not_depend_on_others_adapters() {
    let (wide, narrow) = (DType::F32, DType::Bf16);
    for (dtype, pipeline) in [(wide, "default"), (narrow, "default"), (narrow, "reproducible")] {
        let adapted = Adapted::open("llama");
        let run = |slots| {
            let plan = adapted.plan(dtype, pipeline, Sym::T, Some(&room()));
            let [r4, r8] = <[_; 2]>::try_from(adapted.weights(&plan)).expect("two adapters");
            adapted.run(plan, &[(0, r4), (1, r8)], slots)
        };
        let mixed = run([None, Some(0), Some(1)]);
        for (i, slot) in [None, Some(0), Some(1)].into_iter().enumerate() {
            let beside = if pipeline == "default" { slot.or(Some(1)) } else { slot };
            let mut slots = [beside; 3];
            slots[i] = slot;
            assert_eq!(run(slots)[i], mixed[i], "{dtype}, {pipeline}, {slot:?}");
        }
        assert_ne!(mixed[0], mixed[1]);
    }
}

/// Steps whose rows have no adapter run what is compiled without: no row pays for room that it does not use.
#[test]
fn steps_without_adapters_run_what_is_compiled_without() {
    let adapted = Adapted::open("llama");
    let plain = adapted.plan(DType::Bf16, "default", Sym::B, None);
    for (pipeline, always) in [("default", false), ("reproducible", true)] {
        let plan = adapted.plan(DType::Bf16, pipeline, Sym::B, Some(&room()));
        for (tokens, decode) in [(1, true), (3, true), (3, false), (plan.limits.t, false)] {
            let asks = |adapted| Asks { adapted, ..Asks::default() };
            let adapts = |adapted| {
                let found = plan.schedule_for(tokens, decode, asks(adapted));
                plan.schedules[found.expect("every step has a schedule")].adapts
            };
            assert_eq!((adapts(false), adapts(true)), (always, true), "{pipeline}, {tokens}");
        }
        let found = plan.schedule(1, true).expect("a schedule");
        let launches = |plan: &Plan, schedule: usize| -> Vec<String> {
            let calls = plan.schedules[schedule].calls.iter();
            let programs = calls.flat_map(|c| &plan.programs[c.program as usize].launches);
            programs.map(|launch| launch.op.clone()).collect()
        };
        let own = plain.schedule(1, true).expect("a schedule");
        assert_eq!(launches(&plan, found) == launches(&plain, own), !always, "{pipeline}");
    }
}

/// What is loaded into a slot takes the place of all that was there.
#[test]
fn a_slot_forgets_the_adapter_before() {
    let adapted = Adapted::open("llama");
    let plan = adapted.plan(DType::F32, "default", Sym::T, Some(&room()));
    let [r4, r8] = <[_; 2]>::try_from(adapted.weights(&plan)).expect("two adapters");
    // The second changes fewer modules, of which some have a lower rank.
    let found = adapted.run(plan, &[(1, r4), (1, r8)], [Some(1); 3]);
    assert!(nmse(&found[0], &adapted.expected[2]) <= f32_bound());
}

#[test]
fn a_plan_without_adapters_knows_nothing_of_them() {
    let adapted = Adapted::open("llama");
    let plain = adapted.plan(DType::Bf16, "default", Sym::B, None);
    let text = serde_json::to_string(&plain).expect("JSON");
    assert!(!text.contains("lora") && !text.contains("dapter"), "a plan for none");
    // What adapters may not change is as it is, too.
    let none = Adapters { targets: Some(vec!["no_such_module".to_owned()]), ..room() };
    assert_eq!(adapted.plan(DType::Bf16, "default", Sym::B, Some(&none)), plain);
    let some = Adapters { targets: Some(vec!["self_attn.q_proj".to_owned()]), ..room() };
    let plan = adapted.plan(DType::Bf16, "default", Sym::B, Some(&some));
    assert!(
        plan.banks().count() > 0
            && plan.banks().all(|(_, name, _)| name.contains("self_attn.q_proj.lora_"))
    );
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_by_its_module() {
    let adapted = Adapted::open("llama");
    let banks = |room: &Adapters| {
        AdapterBanks::of(&adapted.plan(DType::F32, "default", Sym::B, Some(room)))
    };
    let narrow = banks(&Adapters { rank: 6, ..room() });
    assert!(fit(&narrow, &adapted.folders[0]).is_ok());
    let read = |folder: &Path| Adapter::read(folder, 1 << 30).expect("an adapter");
    let error = narrow.fit(&read(&adapted.folders[1])).unwrap_err();
    assert!(matches!(error, AdapterFault::Rank { found: 8, limit: 6, .. }), "{error}");
    let few = banks(&Adapters { targets: Some(vec!["q_proj".to_owned()]), ..room() });
    let error = few.fit(&read(&adapted.folders[0])).unwrap_err();
    assert!(matches!(error, AdapterFault::Module { .. }), "{error}");
    let error = banks(&room()).fit(&read(&Adapted::open("mixture").folders[0])).unwrap_err();
    assert!(matches!(error, AdapterFault::Shape { .. }), "{error}");
    let other = adapted.plan(DType::Bf16, "default", Sym::B, Some(&room()));
    let mut executor = adapted.fixture.executor(other, 8, Launches::wanted());
    let weights = fit(&banks(&room()), &adapted.folders[0]).expect("it fits");
    assert!(executor.set_adapter(0, &weights).is_err(), "of another element type");
    assert!(executor.set_adapter(3, &weights).is_err(), "a slot that is not there");
}

/// Greedy tokens of requests.
fn generate(engine: &mut Engine<Box<dyn PlanExecutor>>, requests: Vec<Request>) -> Vec<Vec<u32>> {
    let ids: Vec<_> = requests.into_iter().map(|r| engine.submit(r).expect("a request")).collect();
    let mut texts = vec![Vec::new(); ids.len()];
    let mut events = Vec::new();
    while !engine.is_idle() {
        engine.step(&mut events).expect("a step");
        for event in events.drain(..) {
            if let Event::Token(id, token, _) = event {
                texts[ids.iter().position(|i| *i == id).expect("one of them")].push(token);
            }
        }
    }
    texts
}

/// Requests of one prompt share prefixes with those of their own adapter alone; slots are given on when the last request
/// of an adapter that was unloaded has ended.
#[test]
fn an_engine_keeps_adapters_apart() {
    let adapted = Adapted::open("llama");
    let plan = adapted.plan(DType::F32, "default", Sym::B, Some(&Adapters { slots: 2, ..room() }));
    let (limits, weights) = (plan.limits, adapted.weights(&plan));
    let executor = adapted.fixture.executor(plan, 64, Launches::wanted());
    let vocab = executor.plan().vocabulary() as usize;
    let limits = EngineLimits {
        step: limits,
        max_length: adapted.fixture.max_length as usize,
        chunk: limits.t as usize,
        blocks: 64,
        block_size: StepInputs::BLOCK_SIZE,
        vocab,
    };
    let mut engine = Engine::new(executor, limits, EngineOptions::default()).expect("an engine");
    let [a, b] = [0, 1].map(|i: usize| engine.load_adapter(&weights[i]).expect("a slot"));
    assert!(matches!(
        engine.load_adapter(&weights[0]),
        Err(EngineError::NoAdapterSlot { slots: 2 })
    ));
    let prompt = &adapted.fixture.tokens[..adapted.fixture.tokens.len() - 4];
    let request = |adapter| Request { adapter, ..Request::new(prompt.to_vec(), 4) };
    let alone: Vec<_> = [None, Some(a), Some(b)]
        .map(|x| generate(&mut engine, vec![request(x)]).remove(0))
        .to_vec();
    assert!(
        alone[0] != alone[1] && alone[1] != alone[2],
        "adapters that change nothing show nothing"
    );
    assert_eq!(engine.stats().prefix_hits, 0, "nobody shares with another adapter");
    assert_eq!(generate(&mut engine, [None, Some(a), Some(b)].map(request).to_vec()), alone);
    assert!(engine.stats().prefix_hits > 0, "each shares with its own");
    // Unloaded while a request of it runs.
    let last = engine.submit(request(Some(a))).expect("a request");
    engine.step(&mut Vec::new()).expect("a step");
    engine.unload_adapter(a);
    assert!(matches!(engine.submit(request(Some(a))), Err(EngineError::NoAdapter)));
    assert!(matches!(engine.load_adapter(&weights[1]), Err(EngineError::NoAdapterSlot { .. })));
    let mut events = Vec::new();
    while engine.state(last).is_some() {
        engine.step(&mut events).expect("a step");
    }
    let again = engine.load_adapter(&weights[0]).expect("its slot is free");
    assert_ne!(again, a);
    let hits = engine.stats().prefix_hits;
    assert_eq!(generate(&mut engine, vec![request(Some(again))]).remove(0), alone[1]);
    assert_eq!(
        engine.stats().prefix_hits,
        hits,
        "what is loaded anew shares nothing with what was there"
    );
}
