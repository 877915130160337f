//! A model's answer is read by each dialect: at once and in pieces it has the same parts, in bounded memory.

#![no_main]

mod common;

use std::sync::{Arc, LazyLock};

use common::{Bound, bounded};
use infernum_frontend_hf::dialect::{Dialect, Parser, Part, Tools};
use infernum_frontend_hf::spec::Library;
use libfuzzer_sys::fuzz_target;

/// Arguments of a byte each are written in some more.
const BOUND: Bound = Bound { factor: 512, slack: 1 << 20 };

static DIALECTS: LazyLock<Vec<Arc<Dialect>>> = LazyLock::new(|| {
    let all = Dialect::all(&Library::default()).expect("ours");
    all.into_iter().map(Arc::new).collect()
});

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let schema =
        serde_json::json!({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}});
    Arc::new(Tools(vec![("f".to_owned(), schema)]))
});

fn read<'a>(dialect: &Arc<Dialect>, pieces: impl Iterator<Item = &'a str>) -> [String; 3] {
    let (mut parser, mut all) = (Parser::new(dialect, &TOOLS, ""), [const { String::new() }; 3]);
    let mut parts: Vec<Part> = pieces.flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    for part in parts {
        match part {
            Part::Reasoning(text) => all[0].push_str(&text),
            Part::Content(text) => all[1].push_str(&text),
            Part::Call(_, name) => all[2].push_str(&format!("\n{name} ")),
            Part::Arguments(_, text) => all[2].push_str(&text),
        }
    }
    all
}

fuzz_target!(|data: &[u8]| {
    let [which, size, text @ ..] = data else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let dialect = &DIALECTS[usize::from(*which) % DIALECTS.len()];
    bounded(&dialect.name, data.len(), BOUND, || {
        let whole = read(dialect, std::iter::once(text));
        let chars: Vec<String> = text
            .chars()
            .collect::<Vec<_>>()
            .chunks(usize::from(*size) % 16 + 1)
            .map(|c| c.iter().collect())
            .collect();
        assert_eq!(
            read(dialect, chars.iter().map(String::as_str)),
            whole,
            "{}: {text:?}",
            dialect.name
        );
    });
});
