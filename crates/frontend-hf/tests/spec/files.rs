//! Specs and blocks of the user's own, beside ours.

use std::fmt::Write;
use std::path::Path;

use infernum_frontend_hf::spec::{Library, parse_family};
use infernum_ir::{Graph, Module, NodeKind};

use crate::{CONFIG, check, lowered};

const FAMILY: &str = r#"Family(
    name: "mine",
    doc: "Llama with another attention.",
    base: "llama.ron",
    architectures: ["Mine"],
    blocks: { "attention": File("blocks/mixer.ron") },
)"#;

const MIXER: &str = r#"Block(
    doc: "No attention at all.",
    inputs: ["x"],
    params: { "window": None, "layer_type": None },
    weights: { "proj.weight": (shape: ["hidden", "hidden"]) },
    body: { "out": linear(x: "x", w: "proj.weight") },
    result: "out",
)"#;

fn write(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn uses(module: &Module, name: &str) -> bool {
    let ops = module.graphs.iter().flat_map(Graph::nodes);
    ops.into_iter().any(|(_, n)| matches!(&n.kind, NodeKind::Op { op, .. } if op.name == name))
}

#[test]
fn a_spec_by_path_finds_the_blocks_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "mine.ron", FAMILY);
    write(dir.path(), "blocks/mixer.ron", MIXER);
    // The base names this file too, as seen from its own folder: ours.
    write(dir.path(), "blocks/embed.ron", "not a block");
    let source = Library::open(&dir.path().join("mine.ron")).unwrap();
    let module = lowered(&source, &Library::default(), CONFIG, 64).unwrap().module;
    let text = check(&module);
    assert!(!uses(&module, "softmax") && uses(&module, "rmsnorm"));
    assert!(text.contains("\"model.layers.{layer}.self_attn.proj.weight\""), "{text}");
    assert!(text.contains("blocks/mixer.ron:6:20"), "{text}");
}

#[test]
fn data_replaces_and_adds_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "models/mine.ron", &FAMILY.replace("blocks/mixer", "blocks/attention"));
    write(dir.path(), "models/blocks/attention.ron", MIXER);
    let (ours, mine) = (Library::default(), Library::new(Some(dir.path())));
    let llama = |library: &Library| {
        let source = library.file("llama.ron").unwrap();
        lowered(&source, library, CONFIG, 64).unwrap().module
    };
    assert!(uses(&llama(&ours), "softmax"));
    assert!(!uses(&llama(&mine), "softmax"));

    let names = |library: &Library| {
        let families = library.families().unwrap();
        families.iter().map(|f| Path::new(&*f.file).file_stem().unwrap().to_owned()).collect()
    };
    let (without, with): (Vec<std::ffi::OsString>, Vec<_>) = (names(&ours), names(&mine));
    assert!(without.contains(&"llama".into()) && !without.contains(&"mine".into()));
    let mut expected = without;
    expected.push("mine".into());
    expected.sort();
    assert_eq!(with, expected);
    let own = mine.file("mine.ron").unwrap();
    assert!(!uses(&lowered(&own, &mine, CONFIG, 64).unwrap().module, "softmax"));
}

/// Every entry that a family does not write is its base's.
#[test]
fn a_base_is_changed_entry_by_entry() {
    let dir = tempfile::tempdir().unwrap();
    let spec = FAMILY.replace(
        r#"blocks: { "attention": File("blocks/mixer.ron") },"#,
        r#"params: { "qkv_bias": true }, ignore: ["*.extra"],"#,
    );
    write(dir.path(), "mine.ron", &spec);
    let source = Library::open(&dir.path().join("mine.ron")).unwrap();
    let lowered = lowered(&source, &Library::default(), CONFIG, 64).unwrap();
    let text = check(&lowered.module);
    assert!(text.starts_with("module mine\n"));
    assert!(text.contains("q_proj.bias") && !text.contains("o_proj.bias"), "{text}");
    assert_eq!(lowered.ignore, ["*.rotary_emb.inv_freq", "*.extra"]);
}

/// A family that hides ours of the same name may start from it.
#[test]
fn data_may_change_a_family_in_place() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "models/llama.ron", &FAMILY.replace("blocks/mixer", "mixer"));
    write(dir.path(), "models/mixer.ron", MIXER);
    let library = Library::new(Some(dir.path()));
    let source = library.file("llama.ron").unwrap();
    let module = lowered(&source, &library, CONFIG, 64).unwrap().module;
    assert_eq!(module.name, "mine");
    assert!(!uses(&module, "softmax") && uses(&module, "gather_rows"));
}

#[test]
fn a_base_that_leads_back_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.ron", &FAMILY.replace("llama.ron", "b.ron"));
    write(dir.path(), "b.ron", &FAMILY.replace("llama.ron", "a.ron"));
    let source = Library::open(&dir.path().join("a.ron")).unwrap();
    let error = lowered(&source, &Library::default(), CONFIG, 64).unwrap_err().to_string();
    assert!(error.contains("is based on itself") && error.contains("b.ron:4:12"), "{error}");
}

#[test]
fn errors_in_a_base_are_placed_there() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "mine.ron", FAMILY);
    write(dir.path(), "blocks/mixer.ron", &MIXER.replace("[\"hidden\", ", "[\"hiden\", "));
    let source = Library::open(&dir.path().join("mine.ron")).unwrap();
    let error = lowered(&source, &Library::default(), CONFIG, 64).unwrap_err().to_string();
    let place = format!("{}:5:41: ", dir.path().join("blocks/mixer.ron").display());
    assert!(error.starts_with(&place) && error.contains("did you mean `hidden`"), "{error}");

    let config = CONFIG.replace("\"num_attention_heads\": 2", "\"num_attention_heads\": 0");
    let error = lowered(&source, &Library::default(), &config, 64).unwrap_err().to_string();
    assert!(error.starts_with("models/llama.ron:") && error.contains("not finite"), "{error}");
}

/// A block sees its own parameters and the family's, whoever calls it.
#[test]
fn blocks_do_not_see_their_callers_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let outer = MIXER
        .replace("\"layer_type\": None", "\"layer_type\": None, \"secret\": 2")
        .replace("linear(x: \"x\", w: \"proj.weight\")", "activation(x: \"x\")");
    let inner =
        r#"Block(doc: "", inputs: ["x"], body: { "y": scale(x: "x", by: "secret") }, result: "y")"#;
    let family = FAMILY.replace("blocks: {", "blocks: { \"activation\": File(\"inner.ron\"), ");
    write(dir.path(), "mine.ron", &family);
    write(dir.path(), "blocks/mixer.ron", &outer);
    write(dir.path(), "inner.ron", inner);
    let source = Library::open(&dir.path().join("mine.ron")).unwrap();
    let error = lowered(&source, &Library::default(), CONFIG, 64).unwrap_err().to_string();
    assert!(error.contains("unknown parameter `secret`"), "{error}");
}

/// A block's tensors have other names where a call says so, however deep the call that uses them.
#[test]
fn tensors_are_renamed_where_a_block_is_used() {
    let family = FAMILY.replace(
        "blocks: { \"attention\": File(\"blocks/mixer.ron\") }",
        "layers: (count: \"layer_count\", kinds: { \"decoder\": (
            prefix: \"model.layers.{layer}.\",
            body: { \"x\": decoder_layer(x: \"x\", rename: {
                \"self_attn.o_proj\": \"attention.dense\", \"mlp\": \"ffn\", \"self_attn.q_proj.bias\": \"bias\",
            }) },
            gives: [\"x\"],
        ) })",
    );
    let source = infernum_frontend_hf::spec::Source::new("mine.ron", &family);
    let text = check(
        &lowered(&source, &Library::default(), CONFIG, 64).unwrap_or_else(|e| panic!("{e}")).module,
    );
    for name in ["attention.dense.weight", "ffn.gate_proj.weight", "self_attn.q_proj.weight"] {
        assert!(text.contains(&format!("\"model.layers.{{layer}}.{name}\"")), "{name}: {text}");
    }
    for name in ["self_attn.o_proj", "mlp."] {
        assert!(!text.contains(&format!("\"model.layers.{{layer}}.{name}")), "{name}: {text}");
    }
}

/// Parameters in names of tensors: layers may use weights that stand under another's number, and a number of their own within.
#[test]
fn tensors_are_named_by_parameters() {
    let family = FAMILY.replace(
        "blocks: { \"attention\": File(\"blocks/mixer.ron\") }",
        "params: { \"turns\": 2 },
        layer_params: { \"owner\": \"layer - layer % turns\", \"use\": \"layer\" },
        layers: (count: \"layer_count\", kinds: { \"decoder\": (
            prefix: \"model.\",
            weights: { \"own.{use}.weight\": (shape: [\"hidden\", \"hidden\"]) },
            body: {
                \"shared\": decoder_layer(at: \"layers.{owner}.\", x: \"x\", rename: { \"mlp\": \"ffn{turns}.{layer}\" }),
                \"x\": linear(x: \"shared\", w: \"own.{use}.weight\"),
            },
            gives: [\"x\"],
        ) })",
    );
    let source = infernum_frontend_hf::spec::Source::new("mine.ron", &family);
    let config = CONFIG.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4");
    let module =
        lowered(&source, &Library::default(), &config, 64).unwrap_or_else(|e| panic!("{e}")).module;
    let text = check(&module);
    for name in ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj", "own.0", "own.3"] {
        assert!(text.contains(&format!("\"model.{name}.weight\"")), "{name}: {text}");
    }
    assert!(text.contains("\"model.layers.2.ffn2.{layer}.gate_proj.weight\""), "{text}");
    assert!(!text.contains("layers.1.") && !text.contains("layers.3."), "{text}");
    // A graph for each value, and one for the ends.
    assert_eq!(module.graphs.len(), 6);
}

/// The lists of families in the README and in `docs/models.md` are those of the files. `INFERNUM_UPDATE=1` writes them.
#[test]
fn documents_list_the_families() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let library = Library::default();
    let sources = library.families().unwrap();
    let (mut table, mut names) = (String::new(), Vec::new());
    let mut architectures = 0;
    for source in &sources {
        let family = parse_family(source).unwrap();
        let served: Vec<String> = family.served().map(|a| format!("`{a}`")).collect();
        architectures += served.len();
        let (name, served, doc) = (family.name, served.join(", "), family.doc);
        writeln!(table, "| [`{name}`](../models/{name}.ron) | {served} | {doc} |").unwrap();
        names.push(format!("`{name}`"));
    }
    let table = format!("| family | architectures | what it is |\n|---|---|---|\n{table}");
    let list = format!(
        "{} architectures in {} families ([what each is](docs/models.md)): {}.\n",
        architectures,
        names.len(),
        names.join(", ")
    );
    for (file, expected) in [("docs/models.md", table), ("README.md", list)] {
        let path = root.join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once("<!-- families -->\n").expect("the list's beginning");
        let (found, after) = rest.split_once("<!-- end of families -->").expect("the list's end");
        if std::env::var_os("INFERNUM_UPDATE").is_some() {
            let new =
                format!("{before}<!-- families -->\n{expected}<!-- end of families -->{after}");
            std::fs::write(&path, new).unwrap();
        } else {
            assert_eq!(found, expected, "{file}: INFERNUM_UPDATE=1 with this test writes the list");
        }
    }
}
