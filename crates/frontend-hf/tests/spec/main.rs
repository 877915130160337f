//! Specs to IR: what the shipped families lower to, and what a mistake in a spec looks like.

mod errors;
mod families;
mod files;
mod limits;
mod rope;
mod warnings;

use std::path::{Path, PathBuf};

use infernum_frontend_hf::Config;
use infernum_frontend_hf::lower::{LowerError, Lowered, Request, lower};
use infernum_frontend_hf::spec::{Library, Source, parse_family};
use infernum_ir::{DType, Module, Sym, Task, text, verify};

/// A config that every small spec of these tests can be lowered with.
const CONFIG: &str = r#"{
    "hidden_size": 8, "vocab_size": 11, "intermediate_size": 12, "num_attention_heads": 2,
    "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tied": null,
    "layer_types": ["full_attention", "sliding_attention"]
}"#;

fn lowered(
    source: &Source,
    library: &Library,
    config: &str,
    max_length: u64,
) -> Result<Lowered, LowerError> {
    let config = Config::parse("config.json", config.as_bytes()).unwrap();
    let keys: Vec<&str> = config.keys().collect();
    let request = Request {
        config: &|key| config.value(key),
        config_keys: &keys,
        dtype: DType::Bf16,
        max_length,
        weight_dtype: &|_| None,
        encoding: &|_, _| None,
        rows: Sym::B,
        task: Task::Generate,
        container: &[],
        names_only: false,
    };
    lower(source, library, &request)
}

/// Lowers a spec by its text.
fn lower_text(spec: &str, config: &str) -> Result<Module, LowerError> {
    let source = Source::new("tiny.ron", spec);
    lowered(&source, &Library::default(), config, 64).map(|l| l.module)
}

/// Lowers a shipped family.
fn lower_family(family: &str, config: &str, max_length: u64) -> Module {
    let library = Library::default();
    let source = library.file(&format!("{family}.ron")).unwrap();
    let lowered = lowered(&source, &library, config, max_length);
    lowered.unwrap_or_else(|e| panic!("{e}")).module
}

/// Verifies a module and reads its text back.
fn check(module: &Module) -> String {
    verify(module).unwrap_or_else(|e| panic!("{e}"));
    let text = text::print(module);
    let back = text::parse(&text, "printed").unwrap_or_else(|e| panic!("{text}\n{e}"));
    assert_eq!(&back, module);
    text
}

/// A parity fixture.
struct Fixture {
    family: String,
    dir: PathBuf,
}

impl Fixture {
    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.dir.join(file)).unwrap()
    }

    fn fact(&self, name: &str) -> f64 {
        let facts: serde_json::Value = serde_json::from_str(&self.read("fixture.json")).unwrap();
        facts[name].as_f64().unwrap()
    }

    fn lower(&self) -> Module {
        lower_family(&self.family, &self.read("config.json"), self.fact("max_length") as u64)
    }
}

/// Every fixture of every shipped family.
fn fixtures() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let mut all = Vec::new();
    for source in Library::default().families().unwrap() {
        let family = Path::new(&*source.file).file_stem().unwrap().to_str().unwrap().to_owned();
        // What has no head has its fixtures in `vectors`, for which tests with executors are.
        if parse_family(&source).unwrap().architectures.is_empty() {
            continue;
        }
        let mut dirs: Vec<PathBuf> = std::fs::read_dir(root.join(&family))
            .unwrap_or_else(|e| panic!("family {family} has no fixtures: {e}"))
            .map(|entry| entry.unwrap().path())
            .collect();
        dirs.sort();
        all.extend(dirs.into_iter().map(|dir| Fixture { family: family.clone(), dir }));
    }
    assert!(all.len() >= 70, "fixtures are missing: {} found", all.len());
    all
}
