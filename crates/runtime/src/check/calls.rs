//! Calls of every op, in the values of `cases`.

use super::cases::Case;

/// Calls of fused ops.
pub(super) const CASES: &[Case] = &[
    Case(
        "%r, %s = add_rmsnorm(%x, %y, %norm) {eps: 0.01, offset: 1} : DT[T, $N], DT[T, $N]",
        "%r, %s",
    ),
    // In place of its second operand, and without a weight.
    Case(
        "%t, %u = add_rmsnorm(%x, %y, _) {eps: 0.01, offset: 0} : DT[T, $N], DT[T, $N]",
        "%t, %u, %x",
    ),
    Case("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %y"),
    Case("%r = swiglu(%x, %y) : DT[T, $N]", "%r, %x"),
    Case("%r = geglu(%x, %y) : DT[T, $N]", "%r"),
    Case("%r = swiglu_packed(%packed) : DT[T, $F]", "%r"),
    Case("%r = geglu_packed(%packed) : DT[T, $F]", "%r"),
    Case("%r = linear_add(%x, %k, %w, _) : DT[T, $N]", "%r, %x"),
    Case("%r = linear_add(%x, %k, %w, %bias) : DT[T, $N]", "%r"),
    Case("%r = linear_add(%y, %k, %w, _) : DT[T, $N]", "%r"),
    Case(
        "%r = norm_linear(%x, %norm, %wr, _) {eps: 0.01, offset: 0, dtype: none} : DT[T, $K]",
        "%r",
    ),
    Case("%r = norm_linear(%x, _, %wr, %kb) {eps: 0.01, offset: 0, dtype: f32} : f32[T, $K]", "%r"),
    Case(
        "%r = gather_norm_linear(%x, %rows, %norm, %wr, _) {eps: 0.01, offset: 1, dtype: f32} : f32[B, $K]",
        "%r",
    ),
    Case("%r = linear_swiglu(%k, %w2, _) : DT[T, $N]", "%r"),
    Case("%r = linear_geglu(%k, %w2, %b2) : DT[T, $N]", "%r"),
    Case("%r = norm_linear_swiglu(%k, _, %w2, %b2) {eps: 0.1, offset: 0} : DT[T, $N]", "%r"),
    Case("%r = norm_linear_geglu(%k, %kb, %w2, _) {eps: 0.1, offset: 1} : DT[T, $N]", "%r"),
    Case(
        "%ks, %vs = rope_kv_write(%kh, %vh, %pos, %freqs, %k0, %v0) {style: neox, scale: 1.2} : state DT[$G, $D], state DT[$G, $E]",
        "",
    ),
    Case(
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, _, _) {eps: none, offset: none, style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = qk_rope_kv_write(%qh, %kh, %vh, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 1, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r, %x",
    ),
    Case(
        "%r, %ks, %vs = qkv_rope_kv_write(%packed, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 0, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = qkv_rope_kv_write(%packed, %pos, %freqs, %k0, %v0, _, _) {eps: none, offset: none, style: neox, scale: 1.2} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.7, cap: none, window: none} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, _) {scale: 0.9, cap: 1.5, window: 5} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = paged_attention(%qh, %k1, %v1, %sinks) {scale: 0.5, cap: none, window: 30} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = attention(%qh, %kc, %vc, %sinks) {scale: 0.7, cap: none, window: 9} : DT[T, $H, $E]",
        "%r",
    ),
    Case(
        "%r = attention(%qh, %kc, %vc, _) {scale: 0.7, cap: 2, window: none} : DT[T, $H, $E]",
        "%r, %x",
    ),
];

/// Calls of fused ops that run on GPUs only.
pub(super) const ON_GPUS: &[Case] = &[
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, %kb, %wqkv, _, %pos, %freqs, %k0, %v0, _, _) {eps: 0.1, offset: 0, head_eps: none, head_offset: none, style: neox, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, _, %wqkv, %pb, %pos, %freqs, %k0, %v0, %head, %head) {eps: 0.1, offset: 1, head_eps: 0.1, head_offset: 0, style: neox, scale: 1.2} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r, %k",
    ),
    Case(
        "%r, %ks, %vs = norm_qkv_rope_kv_write(%k, %kb, %wqkv, %pb, %pos, %freqs, %k0, %v0, _, _) {eps: 0.1, offset: 1, head_eps: none, head_offset: none, style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r = quantise_paged_attention(%qh, %k1, %v1, _) {scale: 0.7, cap: none, window: none} : quantised_rows DT[T, $HE]",
        "%r",
    ),
    Case(
        "%r = quantise_paged_attention(%qh, %k1, %v1, _) {scale: 0.9, cap: 1.5, window: 5} : quantised_rows DT[T, $HE]",
        "%r",
    ),
    Case(
        "%r = quantise_paged_attention(%qh, %k1, %v1, %sinks) {scale: 0.5, cap: none, window: 30} : quantised_rows DT[T, $HE]",
        "%r",
    ),
    // Sums of eighths are exact, so that equal ones are; the row of the weights shows which was taken.
    Case(
        "%r = linear_argmax(%e, %wn, _) {dtype: f32} : u32[T]\n  %row = gather_rows(%wn, %r) : DT[T, $K]",
        "%row",
    ),
    Case(
        "%r = linear_argmax(%e, %wn, %bias) {dtype: none} : u32[T]\n  %row = gather_rows(%wn, %r) : DT[T, $K]",
        "%row",
    ),
    // What is normed is not exact: of nearly equal ones either may be taken.
    Case(
        "%r = gather_norm_linear_argmax(%x, %rows, %norm, %wr, _) {eps: 0.01, offset: 1, dtype: f32} : u32[B]
  %row = gather_rows(%wr, %r) : DT[B, $N]
  %from = gather_rows(%x, %rows) : DT[B, $N]
  %normed = rmsnorm(%from, %norm) {eps: 0.01, offset: 1} : DT[B, $N]
  %terms = mul(%normed, %row) : DT[B, $N]
  %largest = reduce(%terms) {by: sum, axis: 1} : DT[B, 1]",
        "%largest",
    ),
    Case(
        r#"%r = expert_gated(%x, %gate, %up, %picked, _, _, _, _) {act: "a / (1 + exp(-a)) * b"} : DT[T, 3, $K]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated(%x, %gate, %up, %picked, %gb, %gb, %order, %starts) {act: "max(a, 0) * (b + 1)"} : DT[T, 3, $K]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated_interleaved(%k, %pairs, %picked, _, _, _) {act: "a / (1 + exp(-a)) * b"} : DT[T, 3, $N]"#,
        "%r",
    ),
    Case(
        r#"%r = expert_gated_interleaved(%k, %pairs, %picked, %b3, %order, %starts) {act: "min(a, 7) * (b + 1)"} : DT[T, 3, $N]"#,
        "%r",
    ),
    Case("%r = expert_sum(%inner, %best, %picked, %down, _, _) : DT[T, $N]", "%r"),
    Case("%r = expert_sum(%inner, %best, %picked, %down, %db, %x) : DT[T, $N]", "%r"),
    Case("%r = combine_experts(%each, %best, _) : DT[T, $N]", "%r"),
    Case("%r = combine_experts(%each, %best, %x) : DT[T, $N]", "%r"),
    Case(
        r#"%r, %i = route(%sf, _) {softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: 2.5, dtype: none} : f32[T, 3], u32[T, 3]"#,
        "%r, %i",
    ),
    Case(
        r#"%r, %i = route(%sf, %choice) {softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: "a / (b + 1e-20)", factor: none, dtype: DT} : DT[T, 4], u32[T, 4]"#,
        "%r, %i",
    ),
    Case(
        "%r, %i = route(%sf, _) {softmax: false, sigmoid: false, k: 2, groups: 1, keep: 1, chosen: true, share: none, factor: none, dtype: DT} : DT[T, 2], u32[T, 2]",
        "%r, %i",
    ),
    Case(
        r#"%r, %i = router_topk(%x, %router, _, _) {logits_dtype: f32, softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: none, dtype: none} : f32[T, 3], u32[T, 3]"#,
        "%r, %i",
    ),
    Case(
        "%r, %i = router_topk(%x, %router, %choice, %choice) {logits_dtype: f32, softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: none, factor: 1.5, dtype: DT} : DT[T, 4], u32[T, 4]",
        "%r, %i",
    ),
    Case(
        r#"%r, %s, %i = norm_router_topk(%x, %norm, %router, _, _) {eps: 0.01, offset: 1, logits_dtype: f32, softmax: true, sigmoid: false, k: 3, groups: 1, keep: 1, chosen: false, share: "a / b", factor: none, dtype: DT} : DT[T, $N], DT[T, 3], u32[T, 3]"#,
        "%r, %s, %i",
    ),
    Case(
        "%r, %s, %i = norm_router_topk(%x, _, %router, %choice, %choice) {eps: 0.01, offset: 0, logits_dtype: f32, softmax: false, sigmoid: true, k: 4, groups: 4, keep: 2, chosen: false, share: none, factor: none, dtype: none} : DT[T, $N], f32[T, 4], u32[T, 4]",
        "%r, %s, %i",
    ),
];

/// Calls of primitives.
pub(super) const PRIMITIVES: &[Case] = &[
    Case("%r = add(%x, %y) : DT[T, $N]", "%r, %x"),
    Case("%r = add(%x, %bias) : DT[T, $N]", "%r"),
    Case("%r = add(%x, %column) : DT[T, $N]", "%r"),
    Case("%r = mul(%x, %y) : DT[T, $N]", "%r"),
    Case("%r = mul(%x, %bias) : DT[T, $N]", "%r"),
    Case("%r = scale(%x) {by: -0.125} : DT[T, $N]", "%r"),
    Case("%r = silu(%x) : DT[T, $N]", "%r"),
    Case("%r = gelu(%x) : DT[T, $N]", "%r"),
    Case("%r = gelu_tanh(%x) : DT[T, $N]", "%r"),
    Case("%r = softcap(%x) {cap: 0.7} : DT[T, $N]", "%r"),
    Case("%r = softcap(%dots) {cap: 5} : f32[$H, T, S]", "%r"),
    Case(r#"%r = map(%x, _, _) {expr: "a > 0 ? a ** 2 : -a"} : DT[T, $N]"#, "%r"),
    Case(r#"%r = map(%x, %y, _) {expr: "max(a, b) / (1 + exp(-b))"} : DT[T, $N]"#, "%r"),
    Case(r#"%r = map(%x, %y, %bias) {expr: "a * c + (1 - c) * b"} : DT[T, $N]"#, "%r"),
    Case("%r = cast(%x) {dtype: f32} : f32[T, $N]", "%r"),
    Case("%r = cast(%f) {dtype: DT} : DT[T, $N]", "%r"),
    Case("%r = cast(%x) {dtype: bf16} : bf16[T, $N]", "%r"),
    Case("%r = cast(%pos) {dtype: f32} : f32[T]", "%r"),
    Case("%r = argmax(%x) : u32[T]", "%r"),
    Case("%r = argmax(%qh) : u32[T, $H]", "%r"),
    Case(
        "%r, %i, %l, %t = pick(%last, %ids, %rows, %picks) {top: 20} : DT[B, $N], u32[B], f32[B, 21], u32[B, 21]",
        "%r, %i, %l, %t",
    ),
    // Not in place.
    Case(
        "%r, %i, %l, %t = pick(%last, %ids, %rows, %picks) {top: 3} : DT[B, $N], u32[B], f32[B, 4], u32[B, 4]",
        "%r, %i, %l, %t, %last",
    ),
    Case("%r = concat(%x, %k) {axis: 1} : DT[T, $NK]", "%r"),
    Case("%r = concat(%qh, %kh) {axis: 1} : DT[T, $HG, $D]", "%r"),
    Case("%r = slice(%x) {axis: 1, start: 1, len: 3} : DT[T, 3]", "%r"),
    Case("%r = slice(%qh) {axis: 1, start: 1, len: 2} : DT[T, 2, $D]", "%r"),
    Case("%r = embedding(%ids, %wx) : DT[T, $N]", "%r"),
    Case("%r = expert_linear(%x, %gate, %picked, _, _, _) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%each, %gate, %picked, %gb, _, _) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%x, %gate, %picked, _, %order, %starts) : DT[T, 3, $K]", "%r"),
    Case("%r = expert_linear(%each, %gate, %picked, %gb, %order, %starts) : DT[T, 3, $K]", "%r"),
    Case("%r, %s = group_rows(%picked) {groups: 12} : u32[T, 3], u32[13]", "%r, %s"),
    Case("%r = gather_rows(%x, %rows) : DT[B, $N]", "%r"),
    Case("%r, %s = expert_slots(%slots, %picked) {experts: 12} : u32[T*3], u32[T*3]", "%r, %s"),
    Case("%r = adapt(%k, %x, %la, %lb, %slots) {start: 0} : DT[T, $K]", "%r, %x"),
    Case("%r = adapt(%k, %x, %la, %lb, %slots) {start: 1} : DT[T, $K]", "%r, %k"),
    Case("%r = adapt(%k, %x, %la16, %lb16, %slots) {start: $N} : DT[T, $K]", "%r, %x"),
    // More rows than tokens, as experts have.
    Case(
        "%p, %of = expert_slots(%slots, %picked) {experts: 1} : u32[T*3], u32[T*3]
  %chosen_x = gather_rows(%x, %of) : DT[T*3, $N]
  %chosen_k = gather_rows(%k, %of) : DT[T*3, $K]
  %r = adapt(%chosen_k, %chosen_x, %la16, %lb16, %p) {start: $N} : DT[T*3, $K]",
        "%r",
    ),
    Case("%r = head_linear(%qh, %wh) : DT[T, $H, $E]", "%r, %x"),
    Case(
        "%ks = kv_write(%k0, %kh) : state DT[$G, $D]\n  %vs = kv_write(%v0, %vh) : state DT[$G, $E]",
        "",
    ),
    Case("%r = kv_read(%k1) : DT[S, $G, $D]", "%r"),
    Case(
        "%near = kv_read(%r1) : DT[S, $G, $D]\n  %q2 = scores(%qh, %near) : f32[$H, T, S]
  %hidden = mask(%q2) {window: 2} : f32[$H, T, S]\n  %p = softmax(%hidden, _) : f32[$H, T, S]
  %r = mix(%p, %near) : DT[T, $H, $D]",
        "%r",
    ),
    Case("%r = layernorm(%x, %norm, %bias) {eps: 0.01} : DT[T, $N]", "%r"),
    Case("%r = layernorm(%x, _, _) {eps: 0.01} : DT[T, $N]", "%r"),
    Case("%r = quantise_rows(%x384) : quantised_rows DT[T, 384]", "%r"),
    Case("%r = linear(%k, %w, %nb) {dtype: none} : DT[T, $N]", "%r"),
    Case("%r = linear(%k, %w, _) {dtype: f32} : f32[T, $N]", "%r"),
    Case("%r = linear(%k, %w, %bias) {dtype: none} : DT[T, $N]", "%r"),
    Case("%r = mask(%dots) {window: none} : f32[$H, T, S]", "%r"),
    Case("%r = mask(%dots) {window: 5} : f32[$H, T, S]", "%r"),
    Case("%r = mask_chunks(%dots) {chunk: 5} : f32[$H, T, S]", "%r"),
    Case("%r = mask_far(%dots) {reach: 3} : f32[$H, T, S]", "%r"),
    Case("%r = combine_heads(%dots, %each_head) : f32[1, T, S]", "%r"),
    Case("%r = mask_topk(%dots, %first_head) {k: 4} : f32[$H, T, S]", "%r"),
    Case("%r = alibi(%dots, %sinks) : f32[$H, T, S]", "%r"),
    Case(
        "%one = slice(%dots) {axis: 0, start: 0, len: 1} : f32[1, T, S]\n  %r = mask_topk(%dots, %first_head) {k: 3} : f32[$H, T, S]",
        "%r",
    ),
    Case(
        "%hw = slice(%x) {axis: 1, start: 0, len: $H} : DT[T, $H]\n  %r = combine_heads(%dots, %hw) : f32[1, T, S]",
        "%r",
    ),
    Case("%r = transpose(%qh) : DT[T, $D, $H]", "%r"),
    Case("%m1, %r = causal_conv(%c0, %x, %wt, _) : state slot DT[4, $N], DT[T, $N]", "%r, %x"),
    Case("%m1, %r = causal_conv(%c0, %x, %wt, %bias) : state slot DT[4, $N], DT[T, $N]", "%r"),
    // The sum over the axis in the middle, over the innermost, and none; inputs that neighbours share.
    Case(
        r#"%m1, %r = scan(%p0, %qh, %kh, %vh, %each_head, %sinks, _, _, _, _) {body: "s[h, k, v], q[h, k], key[h, k], value[h, v], rate[h], bias[h] -> out[h, v]: keep[h] = exp(-abs(rate + bias)); kept[h, k, v] = s * keep; seen[h, v] = sum(kept * key); delta[h, v] = (value - seen) / 64; s[h, k, v] = kept + key * delta; out[h, v] = sum(s * q)", dtype: none} : state slot f32[$H, $D, $E], DT[T, $H, $E]"#,
        "%r",
    ),
    Case(
        r#"%m1, %r = scan(%t0, %vh, %each_head, %kh, %qh, %head, _, _, _, _) {body: "s[h, p, n], x[h, p], step[h], b[h, n], c[h, n], d[n] -> y[h, p]: kept[h] = exp(-exp(step)); s[h, p, n] = s * kept + x * b; seen[h, p] = sum(s * c * d); y[h, p] = seen + x * step", dtype: f32} : state slot f32[$H, $E, $D], f32[T, $H, $E]"#,
        "%r",
    ),
    Case(
        r#"%m1, %r = scan(%u0, %x, %y, _, _, _, _, _, _, _) {body: "s[c], x[c], a[c] -> y[c]: gate[c] = 1 / (1 + exp(-a)); s[c] = s * gate + x; y[c] = s", dtype: none} : state slot f32[$N], DT[T, $N]"#,
        "%r",
    ),
    Case("%r = embedding(%picked, %router) : DT[T, 3, $N]", "%r"),
    Case("%r = matmul(%x, %wt) : DT[T, 5]", "%r"),
    Case("%r = scores(%qh, %kc) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%dots, _) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%dots, %sinks) : f32[$H, T, S]", "%r"),
    Case("%r = softmax(%x, _) : DT[T, $N]", "%r"),
    Case("%r = mix(%dots, %vc) : DT[T, $H, $E]", "%r"),
    Case("%r = reduce(%qh) {by: sum, axis: 1} : DT[T, 1, $D]", "%r"),
    Case("%r = reduce(%qh) {by: max, axis: 2} : DT[T, $H, 1]", "%r"),
    Case("%r = reduce(%f) {by: mean, axis: 1} : f32[T, 1]", "%r"),
    Case("%r = rmsnorm(%x, %norm) {eps: 0.01, offset: 1} : DT[T, $N]", "%r, %x"),
    Case("%r = rmsnorm(%x, _) {eps: 0.01, offset: 0} : DT[T, $N]", "%r"),
    Case("%r = rmsnorm(%qh, %head) {eps: 0.01, offset: 0} : DT[T, $H, $D]", "%r"),
    Case("%r = rope(%qh, %pos, %freqs) {style: neox, scale: 1} : DT[T, $H, $D]", "%r"),
    Case("%r = rope(%qh, %pos, %freqs) {style: interleaved, scale: 0.9} : DT[T, $H, $D]", "%r, %x"),
    Case("%r = rope(%kc, %cpos, %freqs) {style: neox, scale: 1.2} : DT[S, $G, $D]", "%r"),
    Case("%r, %i = topk(%f, _) {k: 5, groups: 1, keep: 1} : f32[T, 5], u32[T, 5]", "%r, %i"),
    Case("%r, %i = topk(%sf, %choice) {k: 4, groups: 4, keep: 2} : f32[T, 4], u32[T, 4]", "%r, %i"),
    // The same value twice: the second is a copy.
    Case("%r = scale(%x) {by: 3} : DT[T, $N]", "%r, %r"),
];

/// Calls that take activations of 8 bits, and no others.
pub(super) const OF_EIGHT_BITS: &[Case] =
    &[Case("%r = quantise_linear_swiglu(%k, %w2, _) : quantised_rows DT[T, $N]", "%r")];

/// Calls whose weights are codes; with others they are made of what their files say.
pub(super) const OF_CODES: &[Case] = &[
    Case(
        "%r, %s, %t = linear_add_rms(%x, %k, %w, _, %norm) {offset: 1} : DT[T, $N], DT[T, $N], f32[T, $N64]",
        "%r, %s, %t",
    ),
    Case("%r = rms_linear(%k, %rms, %w, _) {eps: 0.1, dtype: none} : DT[T, $N]", "%r"),
    Case("%r = rms_linear_swiglu(%k, %rms, %w2, %b2) {eps: 0.1} : DT[T, $N]", "%r"),
    Case("%r = rms_linear_geglu(%k, %rms, %w2, _) {eps: 0.1} : DT[T, $N]", "%r"),
    Case(
        "%r, %ks, %vs = linear_qkv_rope_kv_write(%k, %wqkv, %pb, %pos, %freqs, %k0, %v0) {style: neox, scale: 1.2} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
    Case(
        "%r, %ks, %vs = linear_qkv_rope_kv_write(%k, %wqkv, _, %pos, %freqs, %k0, %v0) {style: interleaved, scale: 1} : DT[T, $H, $D], state DT[$G, $D], state DT[$G, $E]",
        "%r",
    ),
];
