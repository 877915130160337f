//! Random graphs under random subsets of rules.

use std::fmt::Write;

use proptest::prelude::*;

use crate::support::{RULES, fused, kernels, module, nmse, options, run};

const NAMES: [&str; 7] =
    ["t-add-rmsnorm", "t-swiglu", "t-pack", "t-scores", "t-scale", "t-mask", "t-attention"];

/// Calls on values `[T, 4]`; each takes earlier values by number.
fn graph(calls: &[(u8, usize, usize)]) -> String {
    let mut text = "  %t = step tokens : u32[T]
  %e = weight \"e\" : const f32[8, 4]
  %n = weight \"n\" : const f32[4]
  %w0 = weight \"w0\" : const f32[4, 4]
  %w1 = weight \"w1\" : const f32[4, 4]
  %ks = state k : state f32[1, 2]
  %vs = state v : state f32[1, 2]
  %v0 = embedding(%t, %e) : f32[T, 4]\n"
        .to_owned();
    let (mut states, mut version) = (("ks".to_owned(), "vs".to_owned()), 0);
    for (i, (op, a, b)) in calls.iter().enumerate() {
        let (y, a, b) = (i + 1, a % (i + 1), b % (i + 1));
        let call = match op {
            0 => format!("add(%v{a}, %v{b})"),
            1 => format!("mul(%v{a}, %v{b})"),
            2 => format!("silu(%v{a})"),
            3 => format!("rmsnorm(%v{a}, %n) {{eps: 1e-5, offset: 0}}"),
            4 => format!("rmsnorm(%v{a}, _) {{eps: 1e-6, offset: 0}}"),
            5 => format!("linear(%v{a}, %w0, _) {{dtype: none}}"),
            6 => format!("linear(%v{a}, %w1, _) {{dtype: none}}"),
            _ => {
                version += 1;
                let n = version;
                let (ks, vs) = &states;
                let _ = write!(
                    text,
                    "  %q{n} = reshape(%v{a}) {{shape: [T, 2, 2]}} : f32[T, 2, 2]
  %h{n} = reshape(%v{b}) {{shape: [T, 2, 2]}} : f32[T, 2, 2]
  %k{n} = slice(%h{n}) {{axis: 1, start: 0, len: 1}} : f32[T, 1, 2]
  %l{n} = slice(%h{n}) {{axis: 1, start: 1, len: 1}} : f32[T, 1, 2]
  %ks{n} = kv_write(%{ks}, %k{n}) : state f32[1, 2]
  %vs{n} = kv_write(%{vs}, %l{n}) : state f32[1, 2]
  %keys{n} = kv_read(%ks{n}) : f32[S, 1, 2]
  %values{n} = kv_read(%vs{n}) : f32[S, 1, 2]
  %dots{n} = scores(%q{n}, %keys{n}) : f32[2, T, S]
  %scaled{n} = scale(%dots{n}) {{by: 0.5}} : f32[2, T, S]
  %masked{n} = mask(%scaled{n}) {{window: none}} : f32[2, T, S]
  %p{n} = softmax(%masked{n}, _) : f32[2, T, S]
  %mixed{n} = mix(%p{n}, %values{n}) : f32[T, 2, 2]\n"
                );
                states = (format!("ks{n}"), format!("vs{n}"));
                format!("reshape(%mixed{n}) {{shape: [T, 4]}}")
            }
        };
        let _ = writeln!(text, "  %v{y} = {call} : f32[T, 4]");
    }
    let last = calls.len();
    let (middle, (ks, vs)) = (last / 2, states);
    let results = if middle == last { String::new() } else { format!("%v{middle}, ") };
    // States that nothing wrote are returned as they came.
    let _ = writeln!(text, "  return {results}%v{last}, %{ks}, %{vs}");
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn meaning_is_kept(
        calls in prop::collection::vec((0..8u8, 0..12usize, 0..12usize), 1..14),
        rules in prop::collection::vec(any::<bool>(), NAMES.len()),
    ) {
        let before = module(&graph(&calls));
        let mut options = options();
        let used = NAMES.iter().zip(&rules).filter(|(_, on)| **on);
        options.rules = Some(used.map(|(n, _)| (*n).to_owned()).collect());
        let after = fused(&before, &kernels(RULES), &options);
        let (found, expected) = (run(&after.module), run(&before));
        let error = nmse(&found, &expected);
        // All zeros in, all zeros out.
        prop_assert!(error < 1e-20 || error.is_nan() && found == expected, "{error:e}");
        let graph = &after.report.graphs[0];
        prop_assert!(graph.cost_us.1 <= graph.cost_us.0 + 1e-9);
    }
}
