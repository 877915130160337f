//! The reference of everything that data files may say, made from the tables that read them.
//!
//! `docs/reference.md` is what [`page`] gives; a test holds it up to date. `infernum ops` prints it, or
//! the entry of one op, block or structure.

use std::fmt::Write;

use infernum_frontend_hf::spec::fields::{SPEC, Structure};
use infernum_frontend_hf::spec::{Arg, Block, Library, LibraryError, parse_block};
use infernum_ir::expr::{BinaryOp, Func};
use infernum_ir::{AttrDefault, AttrKind, DType, Effect, OPS, Op, Pointwise, StepInput, nearest};

use crate::PASSES;
use crate::data::Kernels;
use crate::data::fields::{COSTS, ENCODINGS, KERNELS};

/// Why there is no entry.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum ReferenceError {
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error("{0}")]
    Block(#[from] infernum_ir::SourceError),
    #[error("there is no op, block or structure of a data file named `{name}`{hint}")]
    Unknown { name: String, hint: String },
}

/// Prose that comes before what is generated.
const NOTATION: &str = include_str!("reference/notation.md");
const RECURRENCES: &str = include_str!("reference/recurrences.md");
const RULES: &str = include_str!("reference/rules.md");

/// The whole reference, as Markdown.
pub fn page(kernels: &Kernels, library: &Library) -> Result<String, ReferenceError> {
    let mut out = String::from(
        "# Reference\n\n<!-- Made by `infernum ops`: change the tables, then \
         `infernum ops > docs/reference.md`. -->\n\n",
    );
    out += NOTATION;
    out += &expressions();
    out += "\n## Specs and blocks\n\n";
    SPEC.iter().for_each(|s| out += &structure(s));
    out += "### Inputs of a step\n\nNames that every body may use:\n\n| name | type |\n|---|---|\n";
    for (input, name) in StepInput::ALL {
        let ty = match input {
            StepInput::Tokens => "u32 [T]: the ids of the step's tokens",
            StepInput::Positions => "i32 [T]: the position of each in its sequence",
            StepInput::ContextPositions => {
                "i32 [S]: the position of each context row in its sequence"
            }
            StepInput::Segments => {
                "u32 [T]: which of its sequence's two texts each token is of, 0 or 1; only models that compute sequences whole tell"
            }
            StepInput::Adapters => {
                "u32 [T]: the adapter of each token, from 1, or 0: the compiler adds what reads it"
            }
            StepInput::OutputRows => "u32 [B]: the rows whose logits are wanted, below T",
            StepInput::Picks => "u32 [B, 16]: how the token after each of these is picked",
        };
        let _ = writeln!(out, "| `{name}` | {ty} |");
    }
    out += "\n## Ops\n\nEach may be called in specs, in the bodies of fused ops, and in rules. `?` marks what \
            may be left out.\n\n";
    OPS.iter().for_each(|def| out += &op_entry(Op::find(def.name).ok(), kernels));
    out += RECURRENCES;
    out += "## Blocks\n\nWhat `models/blocks/` holds; a family names those that it uses. Beside what is \
            listed, every block takes `at` (put before the names of its weights), `rename` and `when`.\n\n";
    for source in library.blocks()? {
        let name = source.file.rsplit('/').next().unwrap_or_default().trim_end_matches(".ron");
        out += &block_entry(name, &parse_block(&source)?);
    }
    out += RULES;
    KERNELS.iter().for_each(|s| out += &structure(s));
    out += "### Passes\n\nFor pipelines (`--passes FILE`):\n\n";
    for pass in PASSES {
        let _ = writeln!(out, "- `{}`: {}", pass.name, pass.doc);
    }
    out += "\n";
    COSTS.iter().for_each(|s| out += &structure(s));
    out += "## Encodings\n\n";
    ENCODINGS.iter().for_each(|s| out += &structure(s));
    out += "Those that ship:\n\n| name | bits a value | |\n|---|---|---|\n";
    for row in encodings(kernels) {
        let _ = writeln!(out, "| {} | {} | {} |", row.names.join(" "), row.bits, row.doc);
    }
    out += "\n## Fused ops\n\n";
    kernels.ops.fused().for_each(|op| out += &op_entry(Some(op), kernels));
    Ok(out.trim_end().to_owned() + "\n")
}

/// Encodings of one file, which differ in its parameters.
struct EncodingRow<'k> {
    doc: &'k str,
    names: Vec<String>,
    bits: String,
}

fn encodings(kernels: &Kernels) -> Vec<EncodingRow<'_>> {
    let mut rows: Vec<(EncodingRow<'_>, Vec<f64>)> = Vec::new();
    for encoding in kernels.ops.encodings() {
        let (doc, name) = (encoding.def().doc.as_str(), format!("`{encoding}`"));
        let bits = encoding.bits();
        if let Some((row, all)) = rows.iter_mut().find(|(row, _)| row.doc == doc) {
            row.names.push(name);
            all.extend(bits);
        } else {
            let row = EncodingRow { doc, names: vec![name], bits: String::new() };
            rows.push((row, bits.into_iter().collect()));
        }
    }
    let finished = rows.into_iter().map(|(mut row, bits)| {
        let least = bits.iter().copied().fold(f64::INFINITY, f64::min);
        let most = bits.iter().copied().fold(0.0, f64::max);
        row.bits =
            if least < most { format!("{least:.4} to {most:.4}") } else { format!("{most:.4}") };
        row
    });
    finished.collect()
}

/// The entry of an op, a fused op, a block or a structure of data files (`Family`, `layers`).
pub fn entry(name: &str, kernels: &Kernels, library: &Library) -> Result<String, ReferenceError> {
    if let Ok(op) = kernels.ops.find(name) {
        return Ok(op_entry(Some(op), kernels));
    }
    let structures = || SPEC.iter().chain(&KERNELS).chain(&COSTS);
    if let Some(found) = structures().find(|s| s.name == name) {
        return Ok(structure(found));
    }
    let mut known: Vec<String> = kernels.ops.all().map(|op| op.name.to_owned()).collect();
    known.extend(structures().map(|s| s.name.to_owned()));
    for source in library.blocks()? {
        let found = source.file.rsplit('/').next().unwrap_or_default().trim_end_matches(".ron");
        if found == name {
            return Ok(block_entry(name, &parse_block(&source)?));
        }
        known.push(found.to_owned());
    }
    let hint = nearest(name, known.iter().map(String::as_str));
    Err(ReferenceError::Unknown { name: name.to_owned(), hint })
}

fn expressions() -> String {
    let mut out = String::from("### Functions and operators\n\n");
    let names = |(name, _, arity): &(&str, Func, usize)| match arity {
        2 => format!("`{name}(a, b)`"),
        _ => format!("`{name}(a)`"),
    };
    let list = |list: Vec<String>| list.join(" ");
    let _ = writeln!(out, "- functions: {}", list(Func::TABLE.iter().map(names).collect()));
    let mut operators: Vec<_> = BinaryOp::TABLE.iter().collect();
    operators.sort_by_key(|row| row.1);
    let spelt = operators.iter().map(|row| format!("`{}`", row.2)).collect();
    let _ = writeln!(out, "- operators, the weakest first: `c ? a : b`, {}", list(spelt));
    let dtypes = DType::ALL.iter().map(|d| format!("`{d}`")).collect();
    let _ = writeln!(out, "- element types: {}", list(dtypes));
    out + "\nOperators of bits take whole numbers of 64 bits in two's complement. `round` takes halves to the even number, `a ?? b` is b where a is null, `a.key` and `a[0]` look \
     into maps and lists, `'text'` stands in single quotes. Text and lists have `len` and `contains`; \
     `first(list, n)` are the first n items of a list, `last(list, x)` is where the last that is x stands, and `places(list, x)` are all such places.\n"
}

fn structure(s: &Structure) -> String {
    let mut out = format!("### `{}`\n\n{}\n\n| field | |\n|---|---|\n", s.name, s.doc);
    for (name, required, doc) in s.fields {
        let _ = writeln!(out, "| `{name}`{} | {doc} |", if *required { "" } else { "?" });
    }
    out + "\n"
}

fn op_entry(op: Option<Op>, kernels: &Kernels) -> String {
    let Some(op) = op else { return String::new() };
    let optional = |optional: bool| if optional { "?" } else { "" };
    let operands = op.operands.iter().map(|o| format!("{}{}", o.name, optional(o.optional)));
    let attrs = op
        .attrs
        .iter()
        .map(|a| format!("{}{}", a.name, optional(!matches!(a.default, AttrDefault::Required))));
    let arguments: Vec<String> = operands.chain(attrs).collect();
    let mut out = format!("### {}\n\n`{}({})`", op.name, op.name, arguments.join(", "));
    if let Some(fused) = op.fused.as_ref().filter(|f| f.results.len() > 1) {
        let _ = write!(out, " yields `{}`", fused.results.join(", "));
    }
    let _ = writeln!(out, ": {}", op.doc);
    if let Some(signature) = op.fused.as_ref().and_then(|_| kernels.signature(op)) {
        let typed = op.operands.iter().zip(&signature.operands);
        let typed: Vec<String> = typed
            .filter_map(|(def, ty)| Some(format!("`{}: {}`", def.name, ty.as_ref()?)))
            .collect();
        let _ = writeln!(out, "\n- operands: {}", typed.join(", "));
    } else {
        out += "\n";
    }
    for attr in op.attrs {
        let default = match attr.default_value() {
            None => String::new(),
            Some(infernum_ir::Attr::None) => ", or absent".to_owned(),
            Some(value) => format!(", {value} if left out"),
        };
        let doc = if attr.doc.is_empty() { String::new() } else { format!(": {}", attr.doc) };
        let kind = match attr.kind {
            AttrKind::Enum(names) => {
                names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(" or ")
            }
            kind => kind.to_string(),
        };
        let _ = writeln!(out, "- `{}`, {kind}{default}{doc}", attr.name);
    }
    match op.effect {
        Effect::Pure => {}
        Effect::View => {
            out += "- effect: none, and it costs nothing: the same memory under another shape\n";
        }
        Effect::Reads => out += "- effect: reads the KV cache\n",
        Effect::Writes => {
            out += "- effect: makes the next version of a cache plane, in place; the one before may not be used after it\n";
        }
    }
    if let Pointwise::Fixed(text) = op.pointwise {
        let _ = writeln!(out, "- elementwise: `{text}`");
    }
    if let Some(template) = op.cuda {
        let _ = writeln!(out, "- CUDA: `kernels/templates/{template}.cu.j2`");
    }
    if op.fused.is_some() {
        if op.is_map() {
            out += "- without a kernel it runs as one `map`\n";
        }
        let rules = kernels.rules.iter().filter(|r| r.right.iter().any(|s| s.op == op));
        let rules: Vec<String> = rules.map(|r| format!("`{}`", r.name)).collect();
        if !rules.is_empty() {
            let _ = writeln!(out, "- made by {}", rules.join(", "));
        }
    }
    out + "\n"
}

fn block_entry(name: &str, block: &Block<'_>) -> String {
    let doc = block.doc.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut out = format!("### blocks/{name}.ron\n\n{doc}\n\n- inputs: ");
    let inputs: Vec<String> = block.inputs.iter().map(|i| format!("`{i}`")).collect();
    let _ = writeln!(out, "{}", inputs.join(", "));
    for (name, default) in block.params.iter() {
        let default = match default {
            Arg::Text(text) => text.split_whitespace().collect::<Vec<_>>().join(" "),
            Arg::Num(n) => n.to_string(),
            Arg::Bool(b) => b.to_string(),
            Arg::Null => "none".to_owned(),
        };
        let _ = writeln!(out, "- `{name}`, if left out: `{default}`");
    }
    let weights: Vec<String> = block.weights.iter().map(|(n, _)| format!("`{n}`")).collect();
    if !weights.is_empty() {
        let _ = writeln!(out, "- weights: {}", weights.join(", "));
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_up_to_date() {
        let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
        let page = page(&kernels, &Library::default()).unwrap_or_else(|e| panic!("{e}"));
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference.md");
        if std::env::var("INSTA_UPDATE").is_ok_and(|v| v == "always") {
            std::fs::write(path, &page).unwrap_or_else(|e| panic!("{path}: {e}"));
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == page,
            "docs/reference.md is not what the tables say: `infernum ops > docs/reference.md`, or \
             run this test with INSTA_UPDATE=always"
        );
    }

    /// Every op says what goes in and comes out.
    #[test]
    fn every_op_gives_its_shapes() {
        for op in OPS {
            assert!(op.doc.contains('['), "{}: {}", op.name, op.doc);
        }
        let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
        let untyped: Vec<_> = kernels
            .ops
            .fused()
            .filter(|op| kernels.signature(*op).is_none())
            .map(|o| o.name)
            .collect();
        assert!(
            untyped.is_empty(),
            "no rule or `vars` says what these are called with: {untyped:?}"
        );
    }

    #[test]
    fn an_entry_is_found_by_name() {
        let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
        let entry = |name: &str| super::entry(name, &kernels, &Library::default());
        assert!(entry("rope").unwrap().contains("`style`, `neox` or `interleaved`"));
        assert!(entry("swiglu").unwrap().contains("`gate: [.., F]`"));
        assert!(entry("gated_ffn").unwrap().contains("down_proj.weight"));
        for structure in SPEC.iter().chain(&KERNELS).chain(&COSTS) {
            let text = entry(structure.name).unwrap();
            assert!(text.starts_with(&format!("### `{}`", structure.name)), "{text}");
        }
        let error = entry("rop").unwrap_err().to_string();
        assert!(error.contains("did you mean `rope`?"), "{error}");
    }
}
