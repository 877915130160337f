//! Rules on graphs of their own: for each shipped rule, one on which it fires and one that it must
//! leave alone. Snapshots hold what is explained, and the graph that comes out.
//!
//! `// tokens: 17..64` says which steps a file is for; without it, it is one decoded token. `// target: cpu` says which
//! target; without it, it is sm_90a.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use infernum_ir::interp::{Carried, Interpreter, Rounding, SeqShape, States, StepShape, Tensor};
use infernum_ir::{Module, Param, Type, WeightRef, random, text, verify};
use infernum_passes::Bucket;
use infernum_passes::data::{Kernels, Numerics, Rule};
use infernum_passes::fuse::{self, CostTable, Factor, FuseOptions, OpCost, Outcome, Report, fuse};

use crate::support::nmse;

/// Rules that any call of their one op matches, so that nothing is told of where they do not fire.
const ALWAYS: [&str; 1] = ["attn-scores"];

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/rules")
}

fn kernels() -> Kernels {
    Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"))
}

fn bucket(text: &str) -> Bucket {
    let Some(line) = text.lines().find_map(|l| l.strip_prefix("// tokens: ")) else {
        return Bucket { min: 1, max: 1, decode: true };
    };
    let (min, max) = line.split_once("..").expect("`// tokens: 17..64`");
    let number = |n: &str| n.parse().expect("a number of tokens");
    Bucket { min: number(min), max: number(max), decode: false }
}

/// The rule alone, on a target on which all that it makes has a kernel and costs nothing: what is
/// shown is the rewrite, whether it pays or not.
fn options(rule: &Rule, kernels: &Kernels, text: &str) -> FuseOptions {
    let target = text.lines().find_map(|l| l.strip_prefix("// target: ")).unwrap_or("sm_90a");
    let mut costs = CostTable::named(target, None).unwrap_or_else(|e| panic!("{e}"));
    let fused = kernels.ops.fused().map(|op| op.name.to_owned());
    costs.kernels = fuse::Kernels::Only(fused.collect());
    for made in rule.right.iter().filter(|s| rule.left.iter().all(|l| l.op != s.op)) {
        let nothing =
            OpCost { launch_us: Some(0.0), factor: Factor::Number(0.0), when: Vec::new() };
        costs.ops.insert(made.op.name.to_owned(), nothing);
    }
    FuseOptions {
        rules: Some(vec![rule.name.clone()]),
        explain: true,
        numerics: Numerics::Lossy,
        ..FuseOptions::new(target, costs, bucket(text))
    }
}

/// A file before and after its rule.
fn fused(rule: &Rule, file: &str, kernels: &Kernels) -> (Module, Module, Report) {
    fused_as(rule, file, kernels, str::to_owned)
}

/// The same, of an edited text.
fn fused_as(
    rule: &Rule,
    file: &str,
    kernels: &Kernels,
    edit: impl Fn(&str) -> String,
) -> (Module, Module, Report) {
    let path = dir().join(&rule.name).join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let text = edit(&text);
    let before = text::parse_with(&text, &format!("{}/{file}", rule.name), &kernels.ops)
        .unwrap_or_else(|e| panic!("{e}"));
    verify(&before).unwrap_or_else(|e| panic!("{e}"));
    let fused = fuse(&before, kernels, &options(rule, kernels, &text))
        .unwrap_or_else(|e| panic!("{}: {e}", rule.name));
    (before, fused.module, fused.report)
}

/// What is told of the rule, and what came out.
fn shown(report: &Report, after: &Module) -> String {
    report.to_string() + &text::print_graph(&after.graphs[0])
}

fn noise(name: &str, n: usize) -> Vec<f64> {
    random::uniform(name, 7, n).into_iter().map(|x| x / 2.0).collect()
}

/// A prefill of two sequences, then a token for each: all results of both steps.
fn run(module: &Module) -> Vec<f64> {
    let weights = |w: &WeightRef, _: Option<u32>, ty: &Type| {
        let shape = ty.tensor()?.sizes(&infernum_ir::Dims::default());
        Ok(Tensor { data: noise(&w.name, shape.iter().product()), shape })
    };
    let graph = &module.graphs[0];
    let interpreter = Interpreter::new(&weights, Rounding::Exact);
    let (mut states, mut found) = (States::default(), Vec::new());
    let seq = |new, context| SeqShape { new, context };
    for seqs in [vec![seq(3, 3), seq(5, 5)], vec![seq(1, 4), seq(1, 6)]] {
        let step = StepShape::of(seqs);
        let mut carried: Vec<(u32, Tensor)> = Vec::new();
        for (value, param, ty) in graph.params() {
            let (Param::Carry(i), Type::Tensor(ty)) = (param, ty) else { continue };
            let shape = ty.sizes(&step.dims());
            let mut data = noise(graph.value_name(value), shape.iter().product());
            if !ty.dtype.is_float() {
                // Rows of a table of four.
                for x in &mut data {
                    *x = (*x * 4.0).floor() + 2.0;
                }
            }
            carried.push((*i, Tensor { shape, data }));
        }
        carried.sort_by_key(|(i, _)| *i);
        let carried: Carried = carried.into_iter().map(|(_, t)| t).collect();
        let tokens = vec![0; step.dims().t as usize];
        let results = interpreter
            .graph(graph, Some(0), &step, &tokens, &carried, &mut states)
            .unwrap_or_else(|e| panic!("{}: {e}", module.name));
        // What a mask hides is equal if it is hidden in both.
        let finite = |x: f64| if x == f64::NEG_INFINITY { -100.0 } else { x };
        found.extend(results.into_iter().flat_map(|t| t.data).map(finite));
    }
    found
}

fn snapshot(rule: &Rule, file: &str, shown: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(dir().join(&rule.name));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(file, shown));
}

#[test]
fn each_rule_fires_where_it_should() {
    let kernels = kernels();
    for rule in &kernels.rules {
        let (before, after, report) = fused(rule, "fires.ir", &kernels);
        let kept = report.fired.iter().filter(|f| f.outcome == Outcome::Kept).count();
        assert!(kept > 0, "{}: {report}", rule.name);
        let error = nmse(&run(&after), &run(&before));
        // Activations of 8 bits: half of a 127th of the largest of 32, or as floats at most a sixteenth of each.
        let bound = if rule.numerics == Numerics::Lossy { 1e-3 } else { 1e-20 };
        assert!(error <= bound, "{}: NMSE {error:.2e}", rule.name);
        snapshot(rule, "fires", &shown(&report, &after));
    }
}

#[test]
fn each_rule_refuses_what_it_should_and_says_why() {
    let kernels = kernels();
    for rule in &kernels.rules {
        let (before, after, report) = fused(rule, "refuses.ir", &kernels);
        assert!(report.fired.is_empty(), "{}: {report}", rule.name);
        let told = report.refused.len() + report.near_misses.len();
        assert!(told > 0 || ALWAYS.contains(&&*rule.name), "{}: {report}", rule.name);
        assert_eq!(after, before, "{}", rule.name);
        snapshot(rule, "refuses", &shown(&report, &after));
    }
}

/// Rules by which a cache is written or read fire as well where its rows are codes, and mean the same, to the bit; but for those whose
/// kernels never have all of a head.
#[test]
fn rules_of_the_cache_know_codes() {
    const REFUSE: [&str; 4] = ["linear-qkv", "quantised-linear-qkv", "norm-qkv", "adapted-qkv"];
    let kernels = kernels();
    let mut tried = 0;
    for rule in &kernels.rules {
        let path = dir().join(&rule.name).join("fires.ir");
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        // What is not of keys and values is never stored so.
        if !text.contains(": state bf16[") || rule.name.contains("latent") {
            continue;
        }
        let edit = |text: &str| text.replace("state bf16[", "state quantised_heads bf16[");
        let (before, after, report) = fused_as(rule, "fires.ir", &kernels, edit);
        let kept = report.fired.iter().any(|f| f.outcome == Outcome::Kept);
        assert_eq!(kept, !REFUSE.contains(&&*rule.name), "{}: {report}", rule.name);
        let error = nmse(&run(&after), &run(&before));
        assert!(error <= 1e-20, "{}: NMSE {error:.2e}", rule.name);
        tried += 1;
    }
    assert!(tried > 6, "rules of the cache are missing: found {tried}");
}

/// And no folder is left of a rule that is gone.
#[test]
fn each_rule_has_its_files() {
    let names: HashSet<String> = kernels().rules.into_iter().map(|r| r.name).collect();
    let mut folders = HashSet::new();
    for entry in std::fs::read_dir(dir()).expect("the folder of rules' filetests").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        for file in ["fires.ir", "refuses.ir", "fires.snap", "refuses.snap"] {
            assert!(entry.path().join(file).is_file(), "{name} has no {file}");
        }
        folders.insert(name);
    }
    assert_eq!(folders, names, "each rule has a folder in tests/filetests/rules, and only rules");
}
