//! IR text files: each is parsed, printed back and verified.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use infernum_ir::text::{parse_with, print};
use infernum_ir::{Module, NodeKind, OPS, OpSet, SourceError, verify};
use infernum_passes::data::Kernels;

/// The text without comments, blank lines and indentation: what printing preserves.
fn statements(text: &str) -> Vec<&str> {
    let lines = text.lines().map(str::trim);
    lines.filter(|l| !l.is_empty() && !l.starts_with("//")).collect()
}

/// Reads a module that may use what ships.
fn parse(text: &str, file: &str) -> Result<Module, SourceError> {
    static OPS: LazyLock<OpSet> =
        LazyLock::new(|| Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}")).ops);
    parse_with(text, file, &OPS)
}

fn outcome(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let name = path.file_name().unwrap().to_string_lossy();
    let module = match parse(&text, &name) {
        Ok(module) => module,
        Err(error) => return error.to_string(),
    };
    let printed = print(&module);
    assert_eq!(statements(&printed), statements(&text), "{name}: printing changed the text");
    assert_eq!(parse(&printed, &name).as_ref(), Ok(&module), "{name}");
    match verify(&module) {
        Ok(()) => "ok".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// `error_*.ir` files are refused as their snapshots say; every other file is well formed.
#[test]
fn ir() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../filetests/ir/snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let _scope = settings.bind_to_scope();
    insta::glob!("../filetests/ir", "*.ir", |path| {
        let (name, outcome) = (path.file_name().unwrap().to_string_lossy(), outcome(path));
        if name.starts_with("error_") {
            assert_ne!(outcome, "ok", "{name}");
            insta::assert_snapshot!(outcome);
        } else {
            assert_eq!(outcome, "ok", "{name}");
        }
    });
}

/// A module that must be well formed.
pub(crate) fn load(path: &Path) -> Module {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let module = parse(&text, &path.to_string_lossy()).unwrap_or_else(|e| panic!("{e}"));
    verify(&module).unwrap_or_else(|e| panic!("{e}"));
    module
}

#[test]
fn every_op_has_a_filetest_of_its_name() {
    for op in OPS {
        let path = format!("{}/filetests/ir/{}.ir", env!("CARGO_MANIFEST_DIR"), op.name);
        let module = load(Path::new(&path));
        let nodes = module.graphs.iter().flat_map(infernum_ir::Graph::nodes);
        let used: BTreeSet<&str> = nodes
            .filter_map(|(_, n)| match &n.kind {
                NodeKind::Op { op, .. } => Some(op.name),
                NodeKind::Param(_) => None,
            })
            .collect();
        assert!(used.contains(op.name), "{path} does not use `{}`", op.name);
    }
}
