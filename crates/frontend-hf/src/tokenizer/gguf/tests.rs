use std::path::{Path, PathBuf};

use infernum_ir::random;

use super::super::Tokenizer;
use super::super::spelling::gpt2_alphabet;
use super::{TABLE, Table};
use crate::chat::{ChatTemplate, Message, RenderOptions};
use crate::source::ModelFiles;
use crate::spec::{Library, read_ron};

const LINES: usize = 10_000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf/tokenizers")
}

/// Lines of code, words of many scripts, emoji, numbers, spaces, control characters, and anything else that is a character.
fn lines() -> Vec<String> {
    const PARTS: [&str; 44] = [
        "the",
        " of",
        "don't",
        "WE'LL",
        "it's",
        "Hello",
        "CamelCase",
        "snake_case",
        "中文",
        "模型",
        "編譯",
        "日本語",
        "カタカナ",
        "ひらがな",
        "한국어",
        "привет",
        "مرحبا",
        "नमस्ते",
        "café",
        "cafe\u{301}",
        "ﬁ",
        "Å",
        "🙂",
        "🚀",
        "👩‍🚀",
        "🇫🇷",
        " ",
        "  ",
        "    ",
        "\t",
        "\r",
        "\u{a0}",
        "\u{3000}",
        "fn main() {",
        "x += 1;",
        "// ---",
        "!=",
        "(a[0])",
        "\u{0}",
        "\u{7}",
        "\u{200b}",
        "<tool>",
        "<|end|>",
        "\u{1f}",
    ];
    let mut rng = random::named("lines", 1);
    let mut below = move |n: u64| rng.u64(0..n);
    let line = |_| {
        let mut line = String::new();
        for _ in 0..=below(9) {
            match below(8) {
                0 => {
                    let digits = 1 + below(9) as u32;
                    line += &below(10u64.pow(digits)).to_string();
                }
                1 => line.extend(char::from_u32(below(0x11_0000) as u32)),
                2 => line.push((32 + below(95) as u8) as char),
                _ => line += PARTS[below(PARTS.len() as u64) as usize],
            }
        }
        line
    };
    (0..LINES).map(line).collect()
}

/// Both forms of every tokenizer of the fixtures give the same tokens, and the same text of them.
#[test]
fn metadata_gives_the_tokens_of_tokenizer_json() {
    let lines = lines();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder()).expect("the fixtures are committed") {
        let path = entry.expect("a readable folder").path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let files = ModelFiles::open(&path).expect("a file");
        let found = Tokenizer::open(&files).unwrap_or_else(|e| panic!("{e}"));
        let json = std::fs::read(path.with_extension("json")).expect("its tokenizer.json");
        let expected = Tokenizer::from_bytes(&json).unwrap_or_else(|e| panic!("{e}"));
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        assert_eq!(found.vocab_size(), expected.vocab_size(), "{name}");
        for line in &lines {
            let ids =
                |t: &Tokenizer| t.encode(line, true).unwrap_or_else(|e| panic!("{name}: {e}"));
            let (own, other) = (ids(&found), ids(&expected));
            assert_eq!(own, other, "{name}: {line:?}");
            let text =
                |t: &Tokenizer| t.decode(&own, false).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(text(&found), text(&expected), "{name}: {line:?}");
        }
        assert!(found.bos_id().is_some() && found.eos_id().is_some(), "{name}");
        names.push(name);
    }
    assert!(names.len() >= 16, "{names:?}");
}

/// A file of these keys, each a text or a list.
fn file(entries: &[(&str, Vec<u8>)]) -> (tempfile::TempDir, ModelFiles) {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        bytes.extend(text(key));
        bytes.extend(value);
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("v.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let files = ModelFiles::open(&path).expect("a GGUF file");
    (dir, files)
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn word(value: &str) -> Vec<u8> {
    [&8u32.to_le_bytes()[..], &text(value)].concat()
}

fn list(kind: u32, len: u64, items: &[Vec<u8>]) -> Vec<u8> {
    [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &len.to_le_bytes(), &items.concat()].concat()
}

fn words(all: &[&str]) -> Vec<u8> {
    list(8, all.len() as u64, &all.iter().map(|w| text(w)).collect::<Vec<_>>())
}

type Entry = (&'static str, Vec<u8>);

#[test]
fn what_a_vocabulary_lacks_is_named() {
    let base = || {
        vec![
            ("tokenizer.ggml.model", word("gpt2")),
            ("tokenizer.ggml.pre", word("gpt-2")),
            ("tokenizer.ggml.tokens", words(&["a", "b", "ab"])),
            ("tokenizer.ggml.merges", words(&["a b"])),
        ]
    };
    let (_dir, files) = file(&base());
    let tokenizer = Tokenizer::open(&files).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(tokenizer.encode("aab", true).expect("tokens"), [0, 2]);
    let changed = |i: usize, entry: Option<Entry>| {
        let mut all = base();
        all.remove(i);
        all.extend(entry);
        let (_dir, files) = file(&all);
        Tokenizer::open(&files).expect_err("a mistake").to_string()
    };
    let cases: [(usize, Option<Entry>, &str); 9] = [
        (0, None, "`tokenizer.ggml.model` is `nothing`: expected `llama` or `gpt2`"),
        (0, Some(("tokenizer.ggml.model", word("rwkv"))), "is `rwkv`: expected"),
        (
            0,
            Some(("tokenizer.ggml.model", word("llama"))),
            "key `tokenizer.ggml.scores` is missing",
        ),
        (
            1,
            Some(("tokenizer.ggml.pre", word("new"))),
            "`tokenizer.ggml.pre` is `new`, which is not in models/gguf/",
        ),
        (2, None, "key `tokenizer.ggml.tokens` is missing"),
        (
            2,
            Some(("tokenizer.ggml.tokens", word("a"))),
            "`tokenizer.ggml.tokens`: expected a list, found text",
        ),
        (
            2,
            Some(("tokenizer.ggml.tokens", words(&["a", "b"]))),
            "whose texts together are a third, found `a b`",
        ),
        (3, Some(("tokenizer.ggml.merges", words(&["ab"]))), "found `ab`"),
        (3, None, "key `tokenizer.ggml.merges` is missing"),
    ];
    for (i, entry, expected) in cases {
        let found = changed(i, entry);
        assert!(found.contains(expected), "expected `{expected}`, found `{found}`");
    }
    let mut all = base();
    all.push(("tokenizer.ggml.token_type", list(5, 2, &[vec![1, 0, 0, 0], vec![1, 0, 0, 0]])));
    let (_dir, files) = file(&all);
    let found = Tokenizer::open(&files).expect_err("a mistake").to_string();
    assert!(found.contains("a value for each token, found 2 values for 3 tokens"), "{found}");
}

/// Every name in the table has a pattern that can be used, and loses nothing of a text.
#[test]
fn every_way_to_split_is_one() {
    let source = Library::default().file(TABLE).expect("it ships");
    let table: Table<'_> = read_ron(&source).unwrap_or_else(|e| panic!("{e}"));
    let sample = "Hello  WORLD's 12345 中文\n\n\tx=1;";
    let mut seen = std::collections::HashSet::new();
    for named in &table.names {
        for name in &named.names {
            assert!(seen.insert(*name), "`{name}` is there twice");
            let alphabet: Vec<String> = if named.bytes {
                gpt2_alphabet().map(String::from).collect()
            } else {
                sample.replace(' ', "▁").chars().map(String::from).collect()
            };
            let tokens: Vec<&str> = alphabet.iter().map(String::as_str).collect();
            let (_dir, files) = file(&[
                ("tokenizer.ggml.model", word("gpt2")),
                ("tokenizer.ggml.pre", word(name)),
                ("tokenizer.ggml.tokens", words(&tokens)),
                ("tokenizer.ggml.merges", words(&[])),
            ]);
            let tokenizer = Tokenizer::open(&files).unwrap_or_else(|e| panic!("{name}: {e}"));
            let ids = tokenizer.encode(sample, false).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(tokenizer.decode(&ids, false).expect("a text"), sample, "{name}");
        }
    }
    assert!(seen.len() > 60, "{}", seen.len());
}

#[test]
fn chat_templates_have_names() {
    let vocabulary = || {
        vec![
            ("tokenizer.ggml.tokens", words(&["<s>", "b"])),
            (
                "tokenizer.ggml.bos_token_id",
                [&4u32.to_le_bytes()[..], &0u32.to_le_bytes()].concat(),
            ),
        ]
    };
    let (_dir, files) = file(&vocabulary());
    let error = ChatTemplate::open(&files).expect_err("no template").to_string();
    assert!(error.contains("no `tokenizer.chat_template`"), "{error}");
    let mut all = vocabulary();
    all.push(("tokenizer.chat_template", word("{{ bos_token }}{{ messages[0].content }}")));
    all.push(("tokenizer.chat_template.tool_use", word("{{ tools[0].name }}")));
    let (_dir, files) = file(&all);
    let template = ChatTemplate::open(&files).unwrap_or_else(|e| panic!("{e}"));
    let messages = [Message::new("user", "hello")];
    let render = |tools: Option<&str>| {
        let tools = tools.map(|name| vec![serde_json::json!({ "name": name })]);
        let options = RenderOptions { tools, ..RenderOptions::default() };
        template.render(&messages, &options).unwrap_or_else(|e| panic!("{e}"))
    };
    assert_eq!((render(None), render(Some("sum"))), ("<s>hello".to_owned(), "sum".to_owned()));
}

/// Every tokenizer.json is written and read as the tokenizer that it is, or what cannot be written is named.
#[test]
fn tokenizers_are_written_as_they_are_read() {
    let mut refused = Vec::new();
    let mut names: Vec<_> =
        std::fs::read_dir(folder()).unwrap().map(|e| e.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|e| e == "json"));
    names.sort();
    for json in names {
        let name = json.file_stem().unwrap().to_str().unwrap().to_owned();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(&json, dir.path().join("tokenizer.json")).unwrap();
        let files = ModelFiles::folder(dir.path()).unwrap();
        let own = Tokenizer::open(&files).unwrap();
        let rows = own.vocab_size() as u64 + 3;
        let metadata = match super::metadata(&files, &Library::default(), rows, &[]) {
            Ok(metadata) => metadata,
            Err(error) => {
                refused.push(format!("{name}: {error}"));
                continue;
            }
        };
        let file = dir.path().join("m.gguf");
        crate::gguf::write_gguf(&file, &metadata, &[], |_| Ok(Vec::new()), |_| Ok(())).unwrap();
        let written = Tokenizer::open(&ModelFiles::open(&file).unwrap()).unwrap();
        assert_eq!(written.vocab_size() as u64, rows, "{name}");
        for line in lines().iter().take(500) {
            for special in [false, true] {
                let tokens = |t: &Tokenizer| t.encode(line, special).unwrap();
                assert_eq!(tokens(&written), tokens(&own), "{name}: {line:?}");
            }
        }
    }
    eprintln!("{}", refused.join("\n"));
    assert!(refused.len() < 6, "{}", refused.join("\n"));
}
