//! Random graphs of what models are made of, under random subsets of the shipped rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use infernum_frontend_hf::spec::Source;
use infernum_passes::Bucket;
use infernum_passes::data::{Kernels, Rule};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{fused, module_with, nmse, on, run};

/// An encoding of rows as short as those here.
const SMALL: &str = "Encoding(
    name: \"small\",
    doc: \"Blocks of four.\",
    stored: Blocks(values: 4, fields: { \"d\": \"f16\", \"q\": \"i8 [4]\" }),
    group: (n: 1, k: 4),
    code: (kind: signed, bits: 8, value: \"q[k % 4]\"),
    scale: \"d\",
)";

/// What all values have: `f32[T, 8]`.
const PARAMS: &str = "  %t = step tokens : u32[T]
  %pos = step positions : i32[T]
  %rows = step output_rows : u32[B]
  %e = weight \"e\" : const f32[8, 8]
  %n = weight \"n\" : const f32[8]
  %hn = weight \"hn\" : const f32[4]
  %freqs = weight \"freqs\" : const f32[2]
  %sinks = weight \"sinks\" : const f32[2]
  %w = weight \"w\" : const f32[8, 8]
  %packed = weight \"packed\" : const f32[12, 8]
  %b12 = weight \"b12\" : const f32[12]
  %kw = weight \"kw\" : const f32[4, 8]
  %vw = weight \"vw\" : const f32[4, 8]
  %lq = weight \"lq\" : const f32[14, 8]
  %lkv = weight \"lkv\" : const f32[8, 8]
  %up_kv = weight \"up_kv\" : const f32[14, 4]
  %b14 = weight \"b14\" : const f32[14]
  %down = weight \"down\" : const f32[8, 6]
  %gate = weight \"gate\" : const f32[6, 8]
  %up = weight \"up\" : const f32[6, 8]
  %coded_gate = weight \"cg.weight\" : const small[6, 8]
  %coded_up = weight \"cu.weight\" : const small[6, 8]
  %router = weight \"router\" : const f32[6, 8]
  %egate = weight \"eg\" : const f32[6, 3, 8]
  %eup = weight \"eu\" : const f32[6, 3, 8]
  %edown = weight \"ed\" : const f32[6, 8, 3]
  %b8 = weight \"b8\" : const f32[8]
  %b6 = weight \"b6\" : const f32[6]
  %b4 = weight \"b4\" : const f32[4]
  %slots = step adapters : u32[T]
  %la = weight \"la\" : const f32[2, 3, 8]
  %lb8 = weight \"lb8\" : const f32[2, 8, 3]
  %lb6 = weight \"lb6\" : const f32[2, 6, 3]
  %lb4 = weight \"lb4\" : const f32[2, 4, 3]
  %ks = state k : state f32[1, 4]
  %vs = state v : state f32[1, 4]
  %v0 = embedding(%t, %e) : f32[T, 8]\n";

/// A call or a block: what it is, two earlier values by number, and its variant.
type Part = (u8, usize, usize, u16);

struct Text {
    out: String,
    /// The newest versions of the cache's planes.
    states: (String, String),
}

impl Text {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.out, "  {line}");
    }

    /// `%name`, a product of x; with its low-rank part, or without.
    fn product(&mut self, name: &str, x: &str, w: &str, bias: &str, n: usize, adapted: bool) {
        let base = if adapted { format!("{name}b") } else { name.to_owned() };
        self.line(&format!("%{base} = linear({x}, {w}, {bias}) {{dtype: none}} : f32[T, {n}]"));
        if adapted {
            self.line(&format!(
                "%{name} = adapt(%{base}, {x}, %la, %lb{n}, %slots) {{start: 0}} : f32[T, {n}]"
            ));
        }
    }

    /// `%a`, or its norm.
    fn input(&mut self, y: usize, a: usize, normed: bool) -> String {
        if !normed {
            return format!("%v{a}");
        }
        self.line(&format!("%x{y} = rmsnorm(%v{a}, %n) {{eps: 0.01, offset: 0}} : f32[T, 8]"));
        format!("%x{y}")
    }

    /// `%y`, an attention over `%a`.
    fn attention(&mut self, y: usize, a: usize, variant: u16) {
        let on = |bit: u16| variant >> bit & 1 == 1;
        let bias = |b: &str, yes: bool| if yes { format!("%{b}") } else { "_".to_owned() };
        // Mostly none or all have a bias.
        let (qb, kb) = (on(0), on(0) != variant.is_multiple_of(13));
        let x = self.input(y, a, on(10));
        let adapted = on(11) && on(12);
        self.product(&format!("qf{y}"), &x, "%w", &bias("b8", qb), 8, adapted);
        self.product(&format!("kf{y}"), &x, "%kw", &bias("b4", kb), 4, adapted);
        self.product(&format!("vf{y}"), &x, "%vw", &bias("b4", qb), 4, adapted);
        self.line(&format!("%q{y} = reshape(%qf{y}) {{shape: [T, 2, 4]}} : f32[T, 2, 4]"));
        self.line(&format!("%k{y} = reshape(%kf{y}) {{shape: [T, 1, 4]}} : f32[T, 1, 4]"));
        self.line(&format!("%w{y} = reshape(%vf{y}) {{shape: [T, 1, 4]}} : f32[T, 1, 4]"));
        let (mut q, mut k) = (format!("%q{y}"), format!("%k{y}"));
        if on(1) {
            self.line(&format!("{q}n = rmsnorm({q}, %hn) {{eps: 0.1, offset: 0}} : f32[T, 2, 4]"));
            self.line(&format!("{k}n = rmsnorm({k}, %hn) {{eps: 0.1, offset: 0}} : f32[T, 1, 4]"));
            (q, k) = (q + "n", k + "n");
        }
        if on(2) {
            let style = if on(3) { "neox" } else { "interleaved" };
            let attrs = format!("{{style: {style}, scale: 1}}");
            if !variant.is_multiple_of(11) {
                self.line(&format!("{q}r = rope({q}, %pos, %freqs) {attrs} : f32[T, 2, 4]"));
                q += "r";
            }
            self.line(&format!("{k}r = rope({k}, %pos, %freqs) {attrs} : f32[T, 1, 4]"));
            k += "r";
        }
        if on(4) {
            self.line(&format!("{q}s = scale({q}) {{by: 0.5}} : f32[T, 2, 4]"));
            q += "s";
        }
        self.cached(y, &q, &k, variant);
    }

    /// `%y`, a latent attention over `%a`, whose latents and keys go into the cache.
    fn latent_attention(&mut self, y: usize, a: usize, variant: u16) {
        let on = |bit: u16| variant >> bit & 1 == 1;
        let bias = |b: &str, yes: bool| if yes { format!("%{b}") } else { "_".to_owned() };
        let (qb, kb) = (bias("b14", on(0)), bias("b8", on(0) != variant.is_multiple_of(13)));
        let norm = bias("hn", on(1));
        let style = if on(2) { "neox" } else { "interleaved" };
        let window = if on(3) { "3" } else { "none" };
        // Mostly keys turn as queries do.
        let other = if variant.is_multiple_of(11) { "neox" } else { style };
        let x = self.input(y, a, on(10));
        let (ls, ks) = &self.states;
        let text = format!(
            "%lq{y} = linear({x}, %lq, {qb}) {{dtype: none}} : f32[T, 14]
  %lkv{y} = linear({x}, %lkv, {kb}) {{dtype: none}} : f32[T, 8]
  %q{y} = reshape(%lq{y}) {{shape: [T, 2, 7]}} : f32[T, 2, 7]
  %qn{y} = slice(%q{y}) {{axis: 2, start: 0, len: 3}} : f32[T, 2, 3]
  %qp{y} = slice(%q{y}) {{axis: 2, start: 3, len: 4}} : f32[T, 2, 4]
  %qr{y} = rope(%qp{y}, %pos, %freqs) {{style: {style}, scale: 1}} : f32[T, 2, 4]
  %lp{y} = slice(%lkv{y}) {{axis: 1, start: 0, len: 4}} : f32[T, 4]
  %ln{y} = rmsnorm(%lp{y}, {norm}) {{eps: 0.01, offset: 0}} : f32[T, 4]
  %l{y} = reshape(%ln{y}) {{shape: [T, 1, 4]}} : f32[T, 1, 4]
  %kp{y} = slice(%lkv{y}) {{axis: 1, start: 4, len: 4}} : f32[T, 4]
  %kw{y} = reshape(%kp{y}) {{shape: [T, 1, 4]}} : f32[T, 1, 4]
  %kr{y} = rope(%kw{y}, %pos, %freqs) {{style: {other}, scale: 1}} : f32[T, 1, 4]
  %ks{y} = kv_write(%{ls}, %l{y}) : state f32[1, 4]
  %vs{y} = kv_write(%{ks}, %kr{y}) : state f32[1, 4]
  %latents{y} = kv_read(%ks{y}) : f32[S, 1, 4]
  %keys{y} = kv_read(%vs{y}) : f32[S, 1, 4]
  %wide{y} = linear(%latents{y}, %up_kv, _) {{dtype: none}} : f32[S, 1, 14]
  %made{y} = reshape(%wide{y}) {{shape: [S, 2, 7]}} : f32[S, 2, 7]
  %kn{y} = slice(%made{y}) {{axis: 2, start: 0, len: 3}} : f32[S, 2, 3]
  %values{y} = slice(%made{y}) {{axis: 2, start: 3, len: 4}} : f32[S, 2, 4]
  %dn{y} = scores(%qn{y}, %kn{y}) : f32[2, T, S]
  %dr{y} = scores(%qr{y}, %keys{y}) : f32[2, T, S]
  %dots{y} = add(%dn{y}, %dr{y}) : f32[2, T, S]
  %scaled{y} = scale(%dots{y}) {{by: 0.4}} : f32[2, T, S]
  %masked{y} = mask(%scaled{y}) {{window: {window}}} : f32[2, T, S]
  %p{y} = softmax(%masked{y}, _) : f32[2, T, S]
  %mixed{y} = mix(%p{y}, %values{y}) : f32[T, 2, 4]
  %v{y} = reshape(%mixed{y}) {{shape: [T, 8]}} : f32[T, 8]"
        );
        self.line(&text);
        self.states = (format!("ks{y}"), format!("vs{y}"));
    }

    /// `%y`, from the queries `q` and the keys `k`, which go into the cache.
    fn cached(&mut self, y: usize, q: &str, k: &str, variant: u16) {
        let on = |bit: u16| variant >> bit & 1 == 1;
        let (ks, vs) = &self.states;
        let writes = format!(
            "%ks{y} = kv_write(%{ks}, {k}) : state f32[1, 4]
  %vs{y} = kv_write(%{vs}, %w{y}) : state f32[1, 4]
  %keys{y} = kv_read(%ks{y}) : f32[S, 1, 4]
  %values{y} = kv_read(%vs{y}) : f32[S, 1, 4]
  %dots{y} = scores({q}, %keys{y}) : f32[2, T, S]"
        );
        self.line(&writes);
        self.states = (format!("ks{y}"), format!("vs{y}"));
        let mut x = format!("%dots{y}");
        for (step, op) in [(5, "scale"), (6, "softcap"), (7, "mask"), (8, "mask")] {
            let attrs = match (op, step) {
                ("scale", _) => "by: 0.7",
                ("softcap", _) => "cap: 2",
                (_, 7) => "window: 3",
                _ => "window: none",
            };
            // The last mask is always there: attention that sees the future is none of ours.
            if step == 8 && !on(7) || step != 8 && on(step) {
                self.line(&format!("{x}{step} = {op}({x}) {{{attrs}}} : f32[2, T, S]"));
                x += &step.to_string();
            }
        }
        let sinks = if on(9) { "%sinks" } else { "_" };
        self.line(&format!("%p{y} = softmax({x}, {sinks}) : f32[2, T, S]"));
        self.line(&format!("%mixed{y} = mix(%p{y}, %values{y}) : f32[T, 2, 4]"));
        self.line(&format!("%v{y} = reshape(%mixed{y}) {{shape: [T, 8]}} : f32[T, 8]"));
    }

    /// `%y`, a gated network over `%a`.
    fn ffn(&mut self, y: usize, a: usize, variant: u16) {
        let on = |bit: u16| variant >> bit & 1 == 1;
        let act = if on(0) { "silu" } else { "gelu_tanh" };
        let bias = |yes: bool| if yes { "%b6" } else { "_" };
        let x = self.input(y, a, on(3));
        let (gb, ub) = (bias(on(1)), bias(on(1) != variant.is_multiple_of(7)));
        let (mut gate, mut up) = ("%gate".to_owned(), "%up".to_owned());
        if on(4) {
            (gate, up) = (format!("%dg{y}"), format!("%du{y}"));
            self.line(&format!("{gate} = dequantise(%coded_gate) {{dtype: f32}} : f32[6, 8]"));
            self.line(&format!("{up} = dequantise(%coded_up) {{dtype: f32}} : f32[6, 8]"));
        }
        let adapted = on(5) && on(6);
        self.product(&format!("g{y}"), &x, &gate, gb, 6, adapted);
        self.product(&format!("u{y}"), &x, &up, ub, 6, adapted);
        self.line(&format!("%act{y} = {act}(%g{y}) : f32[T, 6]"));
        let (first, second) = if on(2) { ("act", "u") } else { ("u", "act") };
        self.line(&format!("%m{y} = mul(%{first}{y}, %{second}{y}) : f32[T, 6]"));
        self.line(&format!("%v{y} = linear(%m{y}, %down, _) {{dtype: none}} : f32[T, 8]"));
    }

    /// `%y`, a mixture of experts over `%a`.
    fn experts(&mut self, y: usize, a: usize, variant: u16) {
        let on = |bit: u16| variant >> bit & 1 == 1;
        self.line(&format!("%l{y} = linear(%v{a}, %router, _) {{dtype: none}} : f32[T, 6]"));
        // Scores before the choice, or of the chosen.
        let chosen = on(3) && on(4);
        let scores = match (chosen, on(0)) {
            (true, _) => format!("%l{y}"),
            (false, true) => format!("%s{y}"),
            (false, false) => format!("%z{y}"),
        };
        self.line(&format!("%s{y} = softmax(%l{y}, _) : f32[T, 6]"));
        self.line(&format!("%z{y} = map(%l{y}, _, _) {{expr: \"1 / (1 + exp(-a))\"}} : f32[T, 6]"));
        let bias = if on(1) { "%b6" } else { "_" };
        let attrs = if on(2) { "k: 2, groups: 3, keep: 2" } else { "k: 2, groups: 1, keep: 1" };
        self.line(&format!(
            "%best{y}, %id{y} = topk({scores}, {bias}) {{{attrs}}} : f32[T, 2], u32[T, 2]"
        ));
        let mut weights = format!("%best{y}");
        let mut next = |name: &str, call: String, text: &mut Text| {
            text.line(&format!("%{name}{y} = {call} : f32[T, 2]"));
            weights = format!("%{name}{y}");
        };
        if chosen {
            next("soft", format!("softmax(%best{y}, _)"), self);
        }
        let chosen = if chosen { format!("%soft{y}") } else { format!("%best{y}") };
        if on(5) {
            self.line(&format!("%all{y} = reduce({chosen}) {{by: sum, axis: 1}} : f32[T, 1]"));
            next("share", format!("map({chosen}, %all{y}, _) {{expr: \"a / (b + 0.25)\"}}"), self);
            if on(6) {
                next("more", format!("scale(%share{y}) {{by: 2.5}}"), self);
                next("cast", format!("cast(%more{y}) {{dtype: f32}}"), self);
            }
        }
        let gated = if on(7) {
            format!("map(%eg{y}, %eu{y}, _) {{expr: \"max(a, 0) * b\"}}")
        } else {
            format!("mul(%ea{y}, %eu{y})")
        };
        let experts = format!(
            "%eg{y} = expert_linear(%v{a}, %egate, %id{y}, _, _, _) : f32[T, 2, 3]
  %eu{y} = expert_linear(%v{a}, %eup, %id{y}, _, _, _) : f32[T, 2, 3]
  %ea{y} = silu(%eg{y}) : f32[T, 2, 3]
  %em{y} = {gated} : f32[T, 2, 3]
  %eo{y} = expert_linear(%em{y}, %edown, %id{y}, _, _, _) : f32[T, 2, 8]
  %col{y} = reshape({weights}) {{shape: [T, 2, 1]}} : f32[T, 2, 1]
  %ew{y} = mul(%eo{y}, %col{y}) : f32[T, 2, 8]
  %es{y} = reduce(%ew{y}) {{by: sum, axis: 1}} : f32[T, 1, 8]
  %ex{y} = reshape(%es{y}) {{shape: [T, 8]}} : f32[T, 8]"
        );
        self.line(&experts);
        // What all tokens have, and the residual.
        self.line(&format!("%sh{y} = linear(%v{a}, %w, _) {{dtype: none}} : f32[T, 8]"));
        self.line(&format!("%both{y} = add(%ex{y}, %sh{y}) : f32[T, 8]"));
        let sum = if on(8) { format!("%both{y}") } else { format!("%ex{y}") };
        self.line(&format!("%v{y} = add(%v{a}, {sum}) : f32[T, 8]"));
    }
}

fn graph(parts: &[Part], head: u8) -> String {
    let states = ("ks".to_owned(), "vs".to_owned());
    let mut text = Text { out: PARAMS.to_owned(), states };
    for (i, (part, a, b, variant)) in parts.iter().enumerate() {
        let (y, a, b) = (i + 1, a % (i + 1), b % (i + 1));
        let call = match part {
            0 | 1 => format!("add(%v{a}, %v{b})"),
            2 => format!("mul(%v{a}, %v{b})"),
            3 => format!("silu(%v{a})"),
            4 | 5 => format!("rmsnorm(%v{a}, {}) {{eps: 0.01, offset: 0}}", ["%n", "_"][b % 2]),
            // Behind it the residual, at times.
            6 | 7 if variant % 3 == 0 => {
                let (name, bias) = (format!("o{y}"), ["%b8", "_"][b % 2]);
                text.product(&name, &format!("%v{a}"), "%w", bias, 8, true);
                format!("add(%v{b}, %{name})")
            }
            6 | 7 => format!("linear(%v{a}, %w, {}) {{dtype: none}}", ["%b8", "_"][b % 2]),
            8 | 9 => {
                text.ffn(y, a, *variant);
                continue;
            }
            10 => {
                text.experts(y, a, *variant);
                continue;
            }
            11 | 12 => {
                text.attention(y, a, *variant);
                continue;
            }
            13 => {
                text.latent_attention(y, a, *variant);
                continue;
            }
            // Some columns of a packed product.
            _ => {
                let bias = ["%b12", "_"][b % 2];
                text.line(&format!(
                    "%p{y} = linear(%v{a}, %packed, {bias}) {{dtype: none}} : f32[T, 12]"
                ));
                format!("slice(%p{y}) {{axis: 1, start: {}, len: 8}}", b % 5)
            }
        };
        text.line(&format!("%v{y} = {call} : f32[T, 8]"));
    }
    let last = parts.len();
    let (first, second) = match head {
        0 => (format!("gather_rows(%v{last}, %rows)"), "rmsnorm(%h1, %n) {eps: 0.01, offset: 0}"),
        _ => (format!("rmsnorm(%v{last}, %n) {{eps: 0.01, offset: 0}}"), "gather_rows(%h1, %rows)"),
    };
    text.line(&format!("%h1 = {first} : f32[{}, 8]", if head == 0 { "B" } else { "T" }));
    text.line(&format!("%h2 = {second} : f32[B, 8]"));
    text.line("%logits = linear(%h2, %e, _) {dtype: none} : f32[B, 8]");
    // The logits alone, what a rule may not swallow as well, or the likeliest tokens in place of the logits.
    let also = if head == 2 { format!("%v{}, ", last.div_ceil(2)) } else { String::new() };
    let yields = if head == 3 { "%ids" } else { "%logits" };
    if head == 3 {
        text.line("%ids = argmax(%logits) : u32[B]");
    }
    let (ks, vs) = text.states.clone();
    text.line(&format!("return {also}{yields}, %{ks}, %{vs}"));
    text.out
}

#[test]
fn shipped_rules_keep_what_random_graphs_mean() {
    let mut kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
    let small = Source::new("small.ron", SMALL);
    kernels.add_encodings(&[small]).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<String> = kernels.rules.iter().map(|r| r.name.clone()).collect();
    let mut fired: BTreeMap<String, usize> = BTreeMap::new();
    let part = (0..15u8, 0..9usize, 0..9usize, any::<u16>());
    let strategy = (
        prop::collection::vec(part, 1..9),
        0..4u8,
        // Half of the time all of them, as a model has it.
        prop::option::of(prop::collection::vec(any::<bool>(), names.len())),
        prop::sample::select(vec!["cpu", "sm_90a"]),
        prop::sample::select(vec![(1, 1, true), (1, 16, false), (17, 256, false)]),
    );
    let config = Config { cases: 1000, failure_persistence: None, ..Config::default() };
    // The same cases each time, so that what fires is known too.
    let rng =
        prop::test_runner::TestRng::deterministic_rng(prop::test_runner::RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let count = std::cell::RefCell::new(&mut fired);
    let result = runner.run(&strategy, |(parts, head, rules, target, (min, max, decode))| {
        let before = module_with(&graph(&parts, head), &kernels.ops);
        let mut options = on(target, Bucket { min, max, decode });
        (options.explain, options.limits.search) = (false, 1000);
        options.rules = rules
            .map(|on| names.iter().zip(on).filter(|(_, on)| *on).map(|(n, _)| n.clone()).collect());
        let after = fused(&before, &kernels, &options);
        let error = nmse(&run(&after.module), &run(&before));
        prop_assert!(error < 1e-20, "{:e}", error);
        for firing in &after.report.fired {
            *count.borrow_mut().entry(firing.rule.clone()).or_default() += 1;
        }
        Ok(())
    });
    result.unwrap_or_else(|e| panic!("{e}"));
    // What takes tiles of 64 columns in 16-bit types, as products of codes do, is tried by filetests and `check-rules`; so are
    // recurrences, which the graphs have none of.
    let typed = |text: &str| text.contains("'bf16'") || text.contains("'f32'");
    let reached = |r: &&Rule| {
        !r.when.iter().any(|(text, _)| typed(text)) && r.left.iter().all(|s| s.op.name != "scan")
    };
    let names: Vec<String> = kernels.rules.iter().filter(reached).map(|r| r.name.clone()).collect();
    let seldom = |name: &&String| fired.get(*name).is_none_or(|n| *n < 5);
    let seldom: Vec<&String> = names.iter().filter(seldom).collect();
    assert!(seldom.len() * 10 < names.len(), "the graphs hardly reach {seldom:?}: {fired:?}");
    println!("fired: {fired:?}");
}
