//! Mistakes planted in the lowered IR: the parity check must see each of them.

use infernum_ir::{DType, text, verify};

use crate::support::{Fixture, nmse};

struct Mutation {
    what: &'static str,
    /// A fixture on which it matters.
    fixture: &'static str,
    change: fn(&str) -> String,
}

/// Rewrites each line that holds `mark`.
fn lines(text: &str, mark: &str, change: impl Fn(&str) -> String) -> String {
    let line = |l: &str| if l.contains(mark) { change(l) } else { l.to_owned() };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Replaces, on each line that holds `mark`, `from` by `to`.
fn swap(text: &str, mark: &str, from: &str, to: &str) -> String {
    lines(text, mark, |l| l.replace(from, to))
}

/// `%n = rmsnorm(%x, %w) {eps: e, ..} : ty` as `x / (sqrt(mean(x²)) + e) * w`.
fn eps_outside_the_root(text: &str) -> String {
    lines(text, " = rmsnorm(", |l| {
        let field = |from: &str, to: &str| {
            let start = l.find(from).expect("the printed form of rmsnorm") + from.len();
            l[start..start + l[start..].find(to).expect("the printed form of rmsnorm")].to_owned()
        };
        let (name, x, w) = (field("%", " ="), field("(", ","), field(", ", ")"));
        let (eps, ty) = (field("eps: ", ","), field(" : ", " @"));
        // The reduced axis is the last of two or three.
        let axis = ty.matches(',').count();
        let (head, _) = ty.rsplit_once(", ").expect("at least two dimensions");
        format!(
            "  %{name}.sq = mul({x}, {x}) : {ty}\n  \
             %{name}.ms = reduce(%{name}.sq) {{by: mean, axis: {axis}}} : {head}, 1]\n  \
             %{name}.rms = map({x}, %{name}.ms, _) {{expr: \"a / (sqrt(b) + {eps})\"}} : {ty}\n  \
             %{name} = mul(%{name}.rms, {w}) : {ty}"
        )
    })
}

const MUTATIONS: &[Mutation] = &[
    Mutation {
        what: "RoPE pairs neighbours instead of halves",
        fixture: "llama/gqa3",
        change: |t| swap(t, " = rope(", "style: neox", "style: interleaved"),
    },
    Mutation {
        what: "eps outside the root",
        fixture: "llama/bias_gqa8",
        change: eps_outside_the_root,
    },
    Mutation {
        what: "window one too long",
        fixture: "mistral/window",
        change: |t| swap(t, " = mask(", "window: 13", "window: 14"),
    },
    Mutation {
        what: "window one too short",
        fixture: "mistral/window",
        change: |t| swap(t, " = mask(", "window: 13", "window: 12"),
    },
    Mutation {
        what: "no window",
        fixture: "qwen2/windows",
        change: |t| {
            lines(t, " = mask(", |l| {
                let start = l.find("window: ").expect("mask's attribute");
                let end = start + l[start..].find('}').expect("the end of the attributes");
                format!("{}window: none{}", &l[..start], &l[end..])
            })
        },
    },
    Mutation {
        what: "scores scaled by 1/d instead of its root",
        fixture: "llama/gqa3",
        change: |t| {
            lines(t, " = scale(", |l| {
                let start = l.find("by: ").expect("scale's attribute") + 4;
                let end = start + l[start..].find('}').expect("the end of the attributes");
                let by: f64 = l[start..end].parse().expect("a number");
                format!("{}{}{}", &l[..start], by * by, &l[end..])
            })
        },
    },
    Mutation {
        what: "values read from the key cache",
        fixture: "llama/gqa3",
        change: |t| swap(t, " = mix(", "values)", "keys)"),
    },
    Mutation {
        what: "keys cached before the rotation",
        fixture: "llama/gqa3",
        change: |t| swap(t, "k_written = kv_write(", "attn.k_turned.rotated", "attn.q_heads.k"),
    },
    Mutation {
        what: "YaRN's attention factor dropped",
        fixture: "llama/yarn",
        change: |t| {
            lines(t, " = rope(", |l| {
                let start = l.find("scale: ").expect("rope's attribute") + 7;
                let end = start + l[start..].find('}').expect("the end of the attributes");
                format!("{}1{}", &l[..start], &l[end..])
            })
        },
    },
    Mutation {
        what: "linear RoPE scaling dropped",
        fixture: "llama/linear",
        change: |t| {
            lines(t, " = table(", |l| {
                let slash = l.rfind(" / ").expect("the division by the factor");
                let quote = slash + l[slash..].find('"').expect("the end of the expression");
                format!("{}{}", &l[..slash], &l[quote..])
            })
        },
    },
    Mutation {
        what: "gate and up swapped",
        fixture: "llama/gqa3",
        change: |t| {
            swap(&swap(t, " = silu(", "ffn.gate", "ffn.up"), " = mul(", "ffn.up", "ffn.gate")
        },
    },
    Mutation {
        what: "residual dropped",
        fixture: "llama/gqa3",
        change: |t| swap(t, ".mid = add(%x, ", "add(%x, ", "add(%x.attn.out, "),
    },
    Mutation {
        what: "bias dropped",
        fixture: "qwen2/tied",
        change: |t| swap(t, "k_flat = linear(", "%x.attn.q_heads.k_proj.bias", "_"),
    },
    Mutation {
        what: "head-wise norm of the keys dropped",
        fixture: "qwen3/gqa3_tied",
        change: |t| {
            swap(t, "k_turned.rotated = rope(", "%x.attn.k_normed.alike.y", "%x.attn.q_heads.k")
        },
    },
    Mutation {
        what: "norm weights ignored",
        fixture: "llama/gqa3",
        change: |t| {
            lines(t, " = rmsnorm(", |l| {
                let comma = l.find(", ").expect("two operands");
                let close = comma + l[comma..].find(')').expect("the end of the operands");
                format!("{}, _{}", &l[..comma], &l[close..])
            })
        },
    },
    Mutation {
        what: "the delta rule forgets nothing",
        fixture: "qwen3_5/dense",
        change: |t| swap(t, " = scan(", "kept[h, k, v] = s * decay", "kept[h, k, v] = s"),
    },
    Mutation {
        what: "the delta rule adds values and replaces none",
        fixture: "qwen3_5/dense",
        change: |t| swap(t, " = scan(", "(value - seen) * beta", "value * beta"),
    },
    Mutation {
        what: "the delta rule reads what was there before the token",
        fixture: "qwen3_5/dense",
        change: |t| swap(t, " = scan(", "read[h, v] = sum(s * q", "read[h, v] = sum(kept * q"),
    },
    Mutation {
        what: "Mamba 2 without what passes its state by",
        fixture: "mamba2/groups",
        change: |t| swap(t, " = scan(", "seen + skip * x", "seen"),
    },
    Mutation {
        what: "Mamba 2 forgets at a rate of its own alone",
        fixture: "mamba2/groups",
        change: |t| swap(t, " = scan(", "exp(-exp(rate) * step)", "exp(-exp(rate))"),
    },
    Mutation {
        what: "a shift of tokens that shifts none",
        fixture: "rwkv/tied",
        change: |t| swap(t, " = table(", "\"1 - i % 2\"", "\"i % 2\""),
    },
    Mutation {
        what: "RWKV weighs a token itself as it does those before",
        fixture: "rwkv/tied",
        change: |t| swap(t, " = scan(", "held - key - bonus", "held - key"),
    },
    Mutation {
        what: "RWKV's weights fall twice as fast",
        fixture: "rwkv/tied",
        change: |t| {
            swap(t, " = scan(", "old[c] = held - exp(decay)", "old[c] = held - 2 * exp(decay)")
        },
    },
    Mutation {
        what: "RWKV's first token has one before it",
        fixture: "rwkv/tied",
        change: |t| swap(t, " = scan(", "first > 0 ? -1e30 : s", "s"),
    },
    Mutation {
        what: "a residual that was halved, and what is added to it that is not",
        fixture: "rwkv/rescaled",
        change: |t| swap(t, ".fed.act = map(", "** 2 * 0.5", "** 2"),
    },
    Mutation {
        what: "shared weights of another layer's turn",
        fixture: "zamba2/turns",
        change: |t| swap(t, "o_proj.weight = weight", "layers.2.shared", "layers.0.shared"),
    },
    Mutation {
        what: "low-rank projections of another use of shared weights",
        fixture: "zamba2/turns",
        change: |t| swap(t, " = weight", "adapter_list.2.", "adapter_list.0."),
    },
    Mutation {
        what: "the hidden state in place of the embedding that it began as",
        fixture: "zamba2/turns",
        change: |t| swap(t, ".both = concat(", "%embedded.x)", "%x)"),
    },
    Mutation {
        what: "channels of Mamba in place of their gates",
        fixture: "zamba/shared",
        change: |t| swap(t, ".mixed_part = slice(", "start: 0", "start: 1"),
    },
    Mutation {
        what: "mLSTM forgets nothing of its matrix",
        fixture: "xlstm/bias",
        change: |t| swap(t, ".memory_after", "exp(held + keep - peak)", "exp(held - peak)"),
    },
    Mutation {
        what: "mLSTM divides by a sum of 1 at least, however small its weights",
        fixture: "xlstm/bias",
        change: |t| swap(t, ".total_after", "exp(-peak)", "1"),
    },
    Mutation {
        what: "lightning attention forgets as fast in all heads",
        fixture: "minimax/factors",
        change: |t| swap(t, ".decay = table(", "(-8 * (i + 1) / 4)", "(-8 / 4)"),
    },
    Mutation {
        what: "heads without gates",
        fixture: "lfm3/gates",
        change: |t| swap(t, ".head_gates.open = map(", "1 / (1 + exp(-a))", "1"),
    },
    Mutation {
        what: "a convolution without its bias",
        fixture: "lfm2/bias",
        change: |t| {
            lines(t, " = causal_conv(", |l| {
                let (comma, close) =
                    (l.rfind(", %").expect("a bias"), l.find(") :").expect("its end"));
                format!("{}, _{}", &l[..comma], &l[close..])
            })
        },
    },
    Mutation {
        what: "a convolution's taps in another order",
        fixture: "lfm2/tied",
        change: |t| {
            lines(t, " = causal_conv(", |l| {
                // After two results and two operands.
                let taps = l.split('%').nth(5).expect("taps");
                let name = taps.split([',', ')']).next().expect("a name");
                let first = "{axis: 1, start: 0, len: 1} : const bf16[40, 1]";
                let rest = "{axis: 1, start: 1, len: 2} : const bf16[40, 2]";
                format!(
                    "  %turned.a = slice(%{name}) {first}\n  %turned.b = slice(%{name}) {rest}\n  \
                     %turned = concat(%turned.b, %turned.a) {{axis: 1}} : const bf16[40, 3]\n{}",
                    l.replace(&format!("%{name}"), "%turned")
                )
            })
        },
    },
    Mutation {
        what: "latents cached before their norm",
        fixture: "deepseek_v2/lite",
        change: |t| swap(t, "latent_row = reshape(", "%x.attn.kv_latent", "%x.attn.kv_part"),
    },
    Mutation {
        what: "the rotated part of latent scores left out",
        fixture: "deepseek_v3/groups",
        change: |t| swap(t, ".dots = add(", "%x.attn.dots_rope", "%x.attn.dots_nope"),
    },
    Mutation {
        what: "gelu for silu",
        fixture: "llama/gqa3",
        change: |t| swap(t, " = silu(", "silu(", "gelu("),
    },
    Mutation {
        what: "linear biases twice as steep",
        fixture: "mpt/alibi",
        change: |t| swap(t, ".slopes = table(", "\"1 * 2 **", "\"2 * 2 **"),
    },
    Mutation {
        what: "chunks of attention one longer",
        fixture: "llama4/chunks",
        change: |t| swap(t, " = mask_chunks(", "chunk: 11", "chunk: 12"),
    },
    Mutation {
        what: "queries that grow one position later",
        fixture: "llama4/chunks",
        change: |t| swap(t, "q.factor = map(", "floor((a + 1) / 8)", "floor(a / 8)"),
    },
    Mutation {
        what: "sinks dropped",
        fixture: "gpt_oss/sinks",
        change: |t| swap(t, ".probs = softmax(", "%x.attn.sinks", "_"),
    },
    Mutation {
        what: "an indexer that chooses one row more",
        fixture: "deepseek_v32/indexer",
        change: |t| swap(t, " = mask_topk(", "k: 9", "k: 10"),
    },
    Mutation {
        what: "one group of experts more",
        fixture: "deepseek_v3/groups",
        change: |t| swap(t, " = topk(", "keep: 2", "keep: 3"),
    },
    Mutation {
        what: "experts chosen without the bias of the choice",
        fixture: "deepseek_v3/groups",
        change: |t| swap(t, " = topk(", "%x.ffn.out.choice", "_"),
    },
    Mutation {
        what: "the base of rotation of another layer",
        fixture: "granite_swa/thetas",
        change: |t| swap(t, ".freqs = table(", "\"100 **", "\"5000 **"),
    },
    Mutation {
        what: "a projection that is stored [in, out] taken as [out, in]",
        fixture: "openai_gpt/post_norm",
        change: |t| swap(t, " = linear(", "%x.attn.o_proj.weight.values", "%x.attn.o_proj.weight"),
    },
    Mutation {
        what: "keys of the wrong layer",
        fixture: "gemma4/shared",
        change: |t| swap(t, "k_cache = state", "of layer 2", "of layer 0"),
    },
    Mutation {
        what: "values that are another layer's keys",
        fixture: "gemma4/shared",
        change: |t| swap(t, " = mix(", "%x.attn.values)", "%x.attn.keys)"),
    },
    Mutation {
        what: "the embeddings of the layer after",
        fixture: "gemma4/shared",
        change: |t| swap(t, ".own_part = slice(", "start: 0", "start: 6"),
    },
    Mutation {
        what: "coefficients of corrections that are not added to 1",
        fixture: "gemma3n/shared",
        change: |t| swap(t, ".corrected.y = map(", "(c + 1)", "c"),
    },
    Mutation {
        what: "activations kept by their variance",
        fixture: "gemma3n/shared",
        change: |t| swap(t, ".above = map(", "sqrt(c)", "c"),
    },
];

#[test]
fn every_planted_mistake_is_caught() {
    let mut missed = Vec::new();
    for m in MUTATIONS {
        let fixture = Fixture::open(m.fixture);
        let lowered =
            fixture.model.lower(fixture.options(DType::F32), []).expect("a shipped family");
        let right = text::print(&lowered.module);
        let wrong = (m.change)(&right);
        assert_ne!(right.trim_end(), wrong.trim_end(), "`{}` changed nothing", m.what);
        let module = text::parse(&wrong, "mutated").unwrap_or_else(|e| panic!("{}: {e}", m.what));
        verify(&module).unwrap_or_else(|e| panic!("{}: {e}", m.what));
        let error = nmse(&fixture.run_module(&module), &fixture.logits);
        // A NaN is caught as well.
        if error <= 1e-10 {
            missed.push(format!("{} on {}: NMSE {error:.2e}", m.what, m.fixture));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
