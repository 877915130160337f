use std::fs;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::Checkpoint;
use crate::source::ModelFiles;
use crate::spec::{Library, read_ron};
use crate::tokenizer::gguf::TABLE;

/// A file that is written piece by piece.
struct File {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(key)[..], &kind.to_le_bytes(), value].concat()
}

/// A tensor's line; `dims` innermost first, as files have them.
fn line(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut line = text(name);
    line.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| line.extend(d.to_le_bytes()));
    line.extend(kind.to_le_bytes());
    line.extend(offset.to_le_bytes());
    line
}

impl File {
    /// Two tensors: `a` f32 [2, 3] at 0 and `q` of type 8 [3, 2, 32] at 32.
    fn new() -> File {
        File {
            keys: vec![
                entry("general.architecture", 8, &text("llama")),
                entry("llama.block_count", 4, &2u32.to_le_bytes()),
                entry("llama.eps", 6, &1e-5f32.to_le_bytes()),
                entry("flag", 7, &[1]),
                entry(
                    "names",
                    9,
                    &[&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &text("x"), &text("yz")]
                        .concat(),
                ),
            ],
            tensors: vec![line("q", &[32, 2, 3], 8, 32), line("a", &[3, 2], 0, 0)],
            data: vec![7; 32 + 6 * 34],
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        self.keys.iter().chain(&self.tensors).for_each(|part| file.extend(part));
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&self.data);
        file
    }

    fn error(&self) -> String {
        Gguf::parse(&self.bytes()).expect_err("a file that is wrong").to_string()
    }
}

#[test]
fn tables_are_read_where_they_lie() {
    let file = File::new().bytes();
    let gguf = Gguf::parse(&file).unwrap();
    assert_eq!(gguf.text(&file, "general.architecture").unwrap(), Some("llama"));
    assert_eq!(gguf.whole(&file, "llama.block_count").unwrap(), Some(2));
    assert_eq!(gguf.get(&file, "llama.eps"), Some(Value::Real(1e-5)));
    assert_eq!(gguf.flag(&file, "flag").unwrap(), Some(true));
    let names = gguf.list(&file, "names").unwrap().unwrap();
    assert_eq!(names.iter().collect::<Vec<_>>(), [Value::Text("x"), Value::Text("yz")]);
    assert_eq!(gguf.whole(&file, "nothing").unwrap(), None);
    let a = gguf.find(&file, "a").unwrap();
    assert_eq!(
        (a.shape(), a.stored(), a.room()),
        (&[2, 3][..], Stored::Plain(StoredType::F32), 24)
    );
    let q = gguf.find(&file, "q").unwrap();
    assert_eq!((q.shape(), q.stored(), q.room()), (&[3, 2, 32][..], Stored::Blocks(8), 6 * 34));
    assert_eq!(q.offset() - a.offset(), 32);
    assert_eq!(gguf.tensors().len(), 2);
}

#[test]
fn parts_of_a_tensor_have_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, File::new().bytes()).unwrap();
    let checkpoint = Checkpoint::open(&ModelFiles::open(&path).unwrap()).unwrap();
    let part = checkpoint.tensor("q[2]").unwrap();
    assert_eq!((part.shape, part.blocks, part.part), (&[2, 32][..], Some(8), Some(2)));
    let whole = checkpoint.tensor("q").unwrap().location;
    assert_eq!(part.place(68).map(|p| (p.offset - whole.offset, p.len)), Some((136, 68)));
    assert_eq!(part.place(69), None, "no room for three parts of 69 bytes");
    for none in ["q[3]", "q[-1]", "q[]", "a[2]", "nothing[0]", "q[0][0]"] {
        assert!(checkpoint.tensor(none).is_none(), "{none}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    type Case = (&'static str, fn(&mut File));
    let mut all: Vec<Case> = Vec::new();
    let mut case = |expected, change: fn(&mut File)| all.push((expected, change));
    case("tensor `a` is there twice", |f| f.tensors[0] = line("a", &[32, 2], 8, 32));
    case("key `flag` is there twice", |f| f.keys.push(entry("flag", 7, &[0])));
    case("key `k` at byte", |f| f.keys.push(entry("k", 13, &[])));
    case("`general.alignment`: expected a power of two", |f| {
        f.keys.push(entry("general.alignment", 4, &24u32.to_le_bytes()));
    });
    case("`general.alignment`: expected a whole number", |f| {
        f.keys.push(entry("general.alignment", 8, &text("x")));
    });
    case("tensor `a`: has 5 dimensions; expected at most 4", |f| {
        f.tensors[1] = line("a", &[1; 5], 0, 0);
    });
    case("tensor `a`: shape [4294967296, 4294967296] is larger", |f| {
        f.tensors[1] = line("a", &[1 << 32, 1 << 32], 0, 0);
    });
    case("begins 36 bytes into those of all tensors, which is no multiple", |f| {
        f.tensors[0] = line("q", &[32, 2, 3], 8, 36);
    });
    case("tensor `a`: needs 40 bytes from byte", |f| f.tensors[1] = line("a", &[5, 2], 0, 0));
    case("and `q` begins 32 bytes later", |f| f.tensors[1] = line("a", &[5, 2], 0, 0));
    case("begins 0 bytes later", |f| f.tensors[0] = line("q", &[32], 8, 0));
    case("tensor `q`: needs 1 bytes from byte", |f| f.tensors[0] = line("q", &[32], 8, 1 << 40));
    case("tensor `q`: needs 1 bytes from byte", |f| {
        f.tensors[0] = line("q", &[32], 8, u64::MAX - 31);
    });
    case("and the file ends at byte", |f| f.data.truncate(20));
    case("a list's values at byte", |f| {
        let list = [&4u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
        f.keys.push(entry("k", 9, &list));
    });
    case("lists within lists", |f| {
        let deep = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
        f.keys.push(entry("k", 9, &deep.repeat(9)));
    });
    case("within a text that begins at byte", |f| {
        f.keys = vec![entry("k", 8, &u64::MAX.to_le_bytes())];
    });
    case("a key at byte 32: expected UTF-8", |f| {
        f.keys = vec![[&1u64.to_le_bytes()[..], &[0xff], &7u32.to_le_bytes(), &[0]].concat()];
    });
    for (expected, change) in all {
        let mut file = File::new();
        change(&mut file);
        let found = file.error();
        assert!(found.contains(expected), "expected `{expected}`, found `{found}`");
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let good = File::new().bytes();
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        Gguf::parse(&file).expect_err("a header that lies").to_string()
    };
    assert!(with(0, b"GGML").contains("expected a GGUF file"));
    assert!(with(4, &1u32.to_le_bytes()).contains("version 1: expected version 2 or 3"));
    assert!(with(4, &3u32.to_be_bytes()).contains("big-endian"));
    for count in [1 << 20, u64::MAX] {
        assert!(with(8, &count.to_le_bytes()).contains("the tensors at byte 8"), "{count}");
        assert!(with(16, &count.to_le_bytes()).contains("the keys at byte 16"), "{count}");
    }
    assert!(Gguf::parse(b"").is_err() && Gguf::parse(b"GGUF").is_err());
}

#[test]
fn parts_of_a_model_are_found_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let part = |no: u16, count: u16, tensors: Vec<Vec<u8>>| File {
        keys: vec![
            entry("split.no", 2, &no.to_le_bytes()),
            entry("split.count", 2, &count.to_le_bytes()),
            entry("split.tensors.count", 5, &2i32.to_le_bytes()),
        ],
        tensors,
        data: vec![0; 64],
    };
    let write = |name: &str, file: &File| fs::write(dir.path().join(name), file.bytes()).unwrap();
    let open = |name: &str| Checkpoint::open(&ModelFiles::open(dir.path().join(name)).unwrap());
    let (first, second) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    write(first, &part(0, 2, vec![line("a", &[2], 0, 0)]));
    let message = open(first).unwrap_err().to_string();
    assert!(
        message.contains("the part `m-00002-of-00002.gguf` of this model is not here"),
        "{message}"
    );
    write(second, &part(1, 2, vec![line("b", &[2], 0, 0)]));
    for given in [first, second] {
        let checkpoint = open(given).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.tensor("b").unwrap().location.file, 1);
    }
    write(second, &part(0, 2, vec![line("b", &[2], 0, 0)]));
    assert!(open(first).unwrap_err().to_string().contains("expected part 2 of 2 by its name"));
    write(second, &part(1, 2, vec![line("a", &[2], 0, 0)]));
    assert!(open(first).unwrap_err().to_string().contains("tensor `a` is both in"));
    write(second, &part(1, 2, Vec::new()));
    assert!(open(first).unwrap_err().to_string().contains("`split.tensors.count`: expected 1"));
    write("odd.gguf", &part(0, 2, Vec::new()));
    assert!(
        open("odd.gguf").unwrap_err().to_string().contains("expected a name such as NAME-00001")
    );
    write("odd.gguf", &part(7, 2, Vec::new()));
    assert!(open("odd.gguf").unwrap_err().to_string().contains("found 7 of 2"));
}

#[test]
fn rows_change_their_order() {
    let order = RowOrder { dims: vec![Some(2), None, Some(2)], axes: vec![0, 2, 1] };
    let rows: Vec<u8> = (0..12).flat_map(|row| [row, 100 + row]).collect();
    let found =
        Change::Rows(order.clone()).apply(&rows, 12, infernum_ir::encoding::Element::U8).unwrap();
    let first: Vec<u8> = found.iter().copied().step_by(2).collect();
    assert_eq!(first, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    assert!(Change::Rows(order).check(&[13, 4], None).is_err());
}

/// Every map and what it is based on can be read, and an architecture has one.
#[test]
fn maps_are_whole() {
    let library = Library::default();
    let mut seen = std::collections::HashSet::new();
    for source in library.folder("gguf").unwrap() {
        if source.file.ends_with(TABLE) {
            continue;
        }
        let mut sources = vec![source];
        loop {
            let last: ContainerMap<'_> = read_ron(&sources[sources.len() - 1]).unwrap();
            let Some(base) = last.base else { break };
            let next = library.file(&format!("gguf/{base}")).unwrap();
            sources.push(next);
        }
        let map = ContainerMap::read(&sources).unwrap_or_else(|e| panic!("{e}"));
        for architecture in &map.architectures {
            assert!(seen.insert((*architecture).to_owned()), "`{architecture}` is there twice");
            assert!(map.config.get("architectures").is_some(), "{}", sources[0].file);
        }
    }
    assert!(seen.len() > 50, "{}", seen.len());
}

#[test]
fn metadata_becomes_a_config() {
    let whole = |key: &str, n: u32| entry(key, 4, &n.to_le_bytes());
    let base = || File {
        keys: vec![
            entry("general.architecture", 8, &text("llama")),
            whole("llama.block_count", 3),
            whole("llama.nextn_predict_layers", 1),
            whole("llama.embedding_length", 64),
            whole("llama.attention.head_count", 4),
            whole("tokenizer.ggml.eos_token_id", 2),
            entry("llama.rope.freq_base", 6, &5e5f32.to_le_bytes()),
        ],
        tensors: vec![
            line("rope_freqs.weight", &[2], 0, 0),
            line("token_embd.weight", &[64, 9], 8, 32),
        ],
        data: [&1f32.to_le_bytes()[..], &8f32.to_le_bytes(), &[0; 1024]].concat(),
    };
    let read = |file: &File| {
        let bytes = file.bytes();
        let gguf = Gguf::parse(&bytes).unwrap();
        Mapped::read("m.gguf", (&gguf, &bytes), &Library::default()).map_err(|e| e.to_string())
    };
    let Mapped { config, ignore, changes, .. } = read(&base()).unwrap();
    let number = |key| config.u64(key).unwrap();
    assert_eq!(config.architectures().unwrap(), ["LlamaForCausalLM"]);
    assert_eq!([number("num_hidden_layers"), number("head_dim")], [Some(2), Some(16)]);
    assert_eq!([number("vocab_size"), number("rope_theta")], [Some(9), Some(500_000)]);
    assert_eq!(config.bool("tie_word_embeddings").unwrap(), Some(true));
    let factors = config.get("rope_scaling.long_factor").unwrap();
    assert_eq!(factors, &serde_json::json!([1, 8]));
    assert_eq!(config.eos_ids(None).unwrap(), [2]);
    assert_eq!(ignore.first().map(String::as_str), Some("blk.2.*"));
    assert_eq!(changes.len(), 2);
    // What is missing or wrong is named, with where it was wanted.
    let mut file = base();
    file.keys.remove(3);
    let error = read(&file).unwrap_err();
    assert!(
        error.contains("common.ron:") && error.contains("`embedding_length`, found null"),
        "{error}"
    );
    file.keys[0] = entry("general.architecture", 8, &text("zebra"));
    let error = read(&file).unwrap_err();
    assert!(
        error.contains("is of the architecture `zebra`") && error.contains("qwen3moe"),
        "{error}"
    );
    file.keys.remove(0);
    assert!(read(&file).unwrap_err().contains("key `general.architecture` is missing"));
}

proptest! {
    #[test]
    fn bytes_that_change_are_read_or_refused(at in 0usize..600, byte: u8, cut in 0usize..600) {
        let mut file = File::new().bytes();
        let at = at % file.len();
        file[at] = byte;
        file.truncate(file.len() - cut % file.len());
        if let Ok(gguf) = Gguf::parse(&file) {
            for tensor in gguf.tensors() {
                prop_assert!(tensor.offset() + tensor.room() <= file.len() as u64);
            }
            for (_, value) in gguf.entries(&file) {
                if let Value::List(list) = value {
                    prop_assert_eq!(list.iter().count(), list.len());
                }
            }
        }
    }
}

/// A file of a value of each type and two tensors.
fn written(
    path: &std::path::Path,
    data: impl FnMut(usize) -> Result<Vec<u8>, String>,
) -> Result<(), GgufWriteError> {
    let text = |s: &str| Datum::Text(s.to_owned());
    let metadata = [
        ("general.architecture", text("llama")),
        ("a.whole", Datum::U32(7)),
        ("a.signed", Datum::I32(-7)),
        ("a.real", Datum::F32(1e-5)),
        ("a.flag", Datum::Bool(true)),
        ("a.wholes", Datum::U32s(vec![1, 2])),
        ("a.signs", Datum::I32s(vec![-1, 2])),
        ("a.reals", Datum::F32s(vec![0.5])),
        ("a.flags", Datum::Bools(vec![true, false])),
        ("a.texts", Datum::Texts(vec![String::new(), "▁x".to_owned()])),
    ];
    let metadata: Vec<_> = metadata.map(|(key, value)| (key.to_owned(), value)).into();
    let line = |name: &str, shape: &[u64], kind, bytes| TensorLine {
        name: name.to_owned(),
        shape: shape.to_vec(),
        kind,
        bytes,
    };
    let tensors = [line("w", &[3], 0, 12), line("q", &[2, 32], 8, 68)];
    write_gguf(path, &metadata, &tensors, data, |_| Ok(()))
}

#[test]
fn what_is_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let data = |i: usize| Ok([vec![1; 12], vec![2; 68]][i].clone());
    written(&path, data).unwrap();
    let file = fs::read(&path).unwrap();
    let gguf = Gguf::parse(&file).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.get(&file, "a.whole"), Some(Value::Whole(7)));
    assert_eq!(gguf.get(&file, "a.signed"), Some(Value::Whole(-7)));
    assert_eq!(gguf.get(&file, "a.real"), Some(Value::Real(1e-5)));
    assert_eq!(gguf.get(&file, "a.flag"), Some(Value::Bool(true)));
    let list =
        |key: &str| -> Vec<Value<'_>> { gguf.list(&file, key).unwrap().unwrap().iter().collect() };
    assert_eq!(list("a.wholes"), [Value::Whole(1), Value::Whole(2)]);
    assert_eq!(list("a.signs"), [Value::Whole(-1), Value::Whole(2)]);
    assert_eq!(list("a.reals"), [Value::Real(0.5)]);
    assert_eq!(list("a.flags"), [Value::Bool(true), Value::Bool(false)]);
    assert_eq!(list("a.texts"), [Value::Text(""), Value::Text("▁x")]);
    let (w, q) = (gguf.find(&file, "w").unwrap(), gguf.find(&file, "q").unwrap());
    assert_eq!((w.shape(), w.stored()), (&[3][..], Stored::Plain(StoredType::F32)));
    assert_eq!((q.shape(), q.stored()), (&[2, 32][..], Stored::Blocks(8)));
    assert_eq!(file[w.offset() as usize..][..12], [1; 12]);
    assert_eq!(file[q.offset() as usize..][..68], [2; 68]);
    // Metadata that is copied is the same.
    let copy = dir.path().join("copy.gguf");
    write_gguf(&copy, &gguf.copied(&file), &[], |_| Ok(Vec::new()), |_| Ok(())).unwrap();
    let bytes = fs::read(&copy).unwrap();
    let copied = Gguf::parse(&bytes).unwrap();
    assert!(
        copied
            .entries(&bytes)
            .eq(gguf.entries(&file).map(|(k, _)| (k, copied.get(&bytes, k).unwrap())))
    );
    assert_eq!(copied.copied(&bytes), gguf.copied(&file));
}

#[test]
fn a_write_that_fails_leaves_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, "before").unwrap();
    let error = written(&path, |i| if i == 0 { Ok(vec![1; 12]) } else { Err("no".to_owned()) });
    assert!(error.unwrap_err().to_string().contains("tensor `q`: no"));
    let error = written(&path, |_| Ok(vec![1; 12])).unwrap_err().to_string();
    assert!(error.contains("tensor `q`: expected 68 bytes, found 12"), "{error}");
    let key = ("k".to_owned(), Datum::Bool(true));
    let twice = write_gguf(&path, &[key.clone(), key.clone()], &[], |_| Ok(Vec::new()), |_| Ok(()));
    assert!(twice.unwrap_err().to_string().contains("`k` is given twice"));
    let wrong = write_gguf(&path, &[key], &[], |_| Ok(Vec::new()), |_| Err("wrong".to_owned()));
    assert!(wrong.unwrap_err().to_string().contains("cannot be read as it is meant: wrong"));
    assert_eq!(fs::read(&path).unwrap(), b"before");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_order_of_rows_is_undone() {
    let order = RowOrder { dims: vec![None, Some(4), Some(2)], axes: vec![0, 2, 1] };
    let rows: Vec<u8> = (0..24).collect();
    let u8s = infernum_ir::encoding::Element::U8;
    let there = Change::Rows(order.clone()).apply(&rows, 24, u8s).unwrap();
    assert_ne!(*there, rows);
    assert_eq!(*Change::Rows(order.inverse()).apply(&there, 24, u8s).unwrap(), rows);
}

#[test]
fn metadata_is_found_for_what_expressions_are_to_be() {
    use infernum_ir::expr::{Expr, Value};
    let solve = |text: &str, value: Value| {
        let mut solver = solve::Solver {
            found: [("heads".to_owned(), Value::Num(4.0))].into(),
            config: [("head_dim".to_owned(), Value::Num(64.0))].into(),
            tensors: Value::Null,
        };
        let done = solver.solve(&text.parse::<Expr>().unwrap(), &value);
        solver.found.remove("heads");
        done.then(|| solver.found.into_iter().collect::<Vec<_>>())
    };
    let one = |path: &str, value: Value| Some(vec![(path.to_owned(), value)]);
    let (four, text) = (Value::Num(4.0), Value::Str("yarn".to_owned()));
    assert_eq!(solve("a.b", four.clone()), one("a.b", four.clone()));
    assert_eq!(solve("a - (b ?? 1)", Value::Num(3.0)), one("a", four.clone()));
    // What is said is said by its own key; what is known is not said again.
    assert_eq!(solve("a ?? heads", four.clone()), one("a", four.clone()));
    assert_eq!(solve("heads", four.clone()), Some(Vec::new()));
    assert_eq!(solve("n / config.head_dim", Value::Num(0.25)), one("n", Value::Num(16.0)));
    assert_eq!(solve("w == 0 ? null : w", four.clone()), one("w", four.clone()));
    assert_eq!(solve("t == 1 ? 'yarn' : 'none'", text.clone()), one("t", Value::Num(1.0)));
    // A value that is another already, or that no metadata says, is no way.
    assert_eq!(solve("heads", Value::Num(5.0)), None);
    assert_eq!(solve("tensors.x[0]", four), None);
    assert_eq!(solve("'none'", text), None);
}
