//! How far back planes of the cache are read, and rings that keep too little.

use infernum_ir::text::{parse, print};
use infernum_ir::{Module, StateKind, state_kinds, verify};

/// A layer whose planes are of `state`, with `body` between what it reads and `%mixed`.
fn layer(state: &str, body: &str) -> Module {
    let text = format!(
        "module m\n\ngraph g {{\n\
         %q = weight \"q\" : const f32[4, 4]\n\
         %x = carry 0 : f32[T, 4]\n\
         %rows = reshape(%x) {{shape: [T, 1, 4]}} : f32[T, 1, 4]\n\
         %k0 = state k : {state} f32[1, 4]\n\
         %v0 = state v : {state} f32[1, 4]\n\
         %k1 = kv_write(%k0, %rows) : {state} f32[1, 4]\n\
         %v1 = kv_write(%v0, %rows) : {state} f32[1, 4]\n\
         %k = kv_read(%k1) : f32[S, 1, 4]\n\
         %v = kv_read(%v1) : f32[S, 1, 4]\n\
         {body}\n\
         return %mixed, %k1, %v1\n}}\n"
    );
    parse(&text, "m.ir").unwrap_or_else(|e| panic!("{e}"))
}

const SCORES: &str = "%s = scores(%rows, %k) : f32[1, T, S]\n";

fn masked(window: &str) -> String {
    format!(
        "{SCORES}%m = mask(%s) {{window: {window}}} : f32[1, T, S]\n\
         %p = softmax(%m, _) : f32[1, T, S]\n%mixed = mix(%p, %v) : f32[T, 1, 4]"
    )
}

#[test]
fn masks_say_what_is_kept() {
    let ragged = |lines: &[&str]| format!("{SCORES}{}", lines.join("\n"));
    let soft = "%p = softmax(%n, _) : f32[1, T, S]";
    let mix = "%mixed = mix(%p, %v) : f32[T, 1, 4]";
    let mask = "%m = mask(%s) {window: 5} : f32[1, T, S]";
    let paged = StateKind::Paged;
    for (body, expected) in [
        (masked("5"), StateKind::Ring(5)),
        (masked("none"), paged),
        // The narrower of two masks.
        (
            ragged(&[mask, "%n = mask(%m) {window: 9} : f32[1, T, S]", soft, mix]),
            StateKind::Ring(5),
        ),
        // What leaves -inf what it is.
        (ragged(&[mask, "%n = scale(%m) {by: 2} : f32[1, T, S]", soft, mix]), StateKind::Ring(5)),
        // What revives it: rows beyond the window would have a part in the sum.
        (ragged(&[mask, "%n = scale(%m) {by: 0} : f32[1, T, S]", soft, mix]), paged),
        (ragged(&[mask, "%n = softcap(%m) {cap: 3} : f32[1, T, S]", soft, mix]), paged),
        // Of two readers, the one that looks back further.
        (
            ragged(&[
                mask,
                "%p1 = softmax(%m, _) : f32[1, T, S]",
                "%near = mix(%p1, %v) : f32[T, 1, 4]",
                "%n = mask(%s) {window: 8} : f32[1, T, S]",
                soft,
                "%far = mix(%p, %v) : f32[T, 1, 4]",
                "%mixed = add(%near, %far) : f32[T, 1, 4]",
            ]),
            StateKind::Ring(8),
        ),
        // Values that are mixed by something else see every row.
        (
            ragged(&[
                mask,
                "%p1 = softmax(%m, _) : f32[1, T, S]",
                "%near = mix(%p1, %v) : f32[T, 1, 4]",
                "%mixed = mix(%s, %v) : f32[T, 1, 4]",
            ]),
            paged,
        ),
        // Row by row, what is made of a plane's rows is like them.
        (
            "%big = linear(%k, %q, _) {dtype: none} : f32[S, 1, 4]\n\
             %s = scores(%rows, %big) : f32[1, T, S]\n%m = mask(%s) {window: 3} : f32[1, T, S]\n\
             %p = softmax(%m, _) : f32[1, T, S]\n%mixed = mix(%p, %v) : f32[T, 1, 4]"
                .to_owned(),
            StateKind::Ring(3),
        ),
        // What is no longer row by row.
        (format!("{}\n%flat = reshape(%k) {{shape: [S*4]}} : f32[S*4]", masked("5")), paged),
    ] {
        let module = layer("state", &body);
        verify(&module).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(state_kinds(&module)[0], expected, "{body}");
    }
}

/// A layer whose planes others read keeps what any of them sees.
#[test]
fn shared_planes_keep_what_all_see() {
    let own = print(&layer("state", &masked("5")));
    let graph = own
        .split_once("\n\n")
        .map(|(_, rest)| rest.replace("\nschedule\n", ""))
        .unwrap_or_default();
    let reader = |name: &str, window: &str| {
        format!(
            "graph {name} {{\n%x = carry 0 : f32[T, 1, 4]\n\
             %k = state k of layer 0 : state f32[1, 4]\n\
             %keys = kv_read(%k) : f32[S, 1, 4]\n\
             %s = scores(%x, %keys) : f32[1, T, S]\n\
             %m = mask(%s) {{window: {window}}} : f32[1, T, S]\n\
             %p = softmax(%m, _) : f32[1, T, S]\n%y = mix(%p, %keys) : f32[T, 1, 4]\nreturn %y\n}}\n\n"
        )
    };
    let kinds = |windows: &[&str]| {
        let readers = windows.iter().enumerate().map(|(i, w)| reader(&format!("r{i}"), w));
        let readers: String = readers.collect();
        let sites = (0..windows.len()).map(|i| format!(", r{i} {}..{}", i + 1, i + 2));
        let text =
            format!("module m\n\n{graph}\n{readers}schedule g 0..1{}\n", sites.collect::<String>());
        state_kinds(&parse(&text, "m.ir").unwrap_or_else(|e| panic!("{e}\n{text}")))[0]
    };
    assert_eq!(kinds(&[]), StateKind::Ring(5));
    assert_eq!(kinds(&["3", "7"]), StateKind::Ring(7));
    assert_eq!(kinds(&["3", "none"]), StateKind::Paged);
}

#[test]
fn a_ring_keeps_what_tokens_see() {
    let findings = |state: &str, window: &str| {
        let found = verify(&layer(state, &masked(window))).err();
        let findings = found.map_or_else(Vec::new, |e| e.findings);
        findings.into_iter().map(|f| f.message).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(findings("state ring(5)", "5"), "");
    assert_eq!(findings("state ring(6)", "5"), "");
    let short = findings("state ring(4)", "5");
    assert!(short.contains("`%k0` keeps 4 rows, and tokens see 5 rows back"), "{short}");
    let all = findings("state ring(4)", "none");
    assert!(all.contains("`%v0` keeps 4 rows, and tokens see every row"), "{all}");
    let none = findings("state ring(0)", "5");
    assert!(none.contains("expected dimensions of at least 1"), "{none}");
    let module = layer("state ring(5)", &masked("5"));
    let text = print(&module);
    assert!(text.contains("%k0 = state k : state ring(5) f32[1, 4]"), "{text}");
    assert_eq!(parse(&text, "again.ir").expect("a module"), module);
    let mixed = text.replace("%v0 = state v : state ring(5)", "%v0 = state v : state");
    let mixed = mixed.replace(
        "%v1 = kv_write(%v0, %rows) : state ring(5)",
        "%v1 = kv_write(%v0, %rows) : state",
    );
    let refused = verify(&parse(&mixed, "mixed.ir").expect("a module")).expect_err("two kinds");
    assert!(refused.findings.iter().any(|f| f.message.contains("longer or shorter")), "{refused}");
    let unclosed = text.replace("ring(5)", "ring(5");
    let error = parse(&unclosed, "m.ir").expect_err("a mistake").to_string();
    assert!(error.contains("in parentheses"), "{error}");
}
