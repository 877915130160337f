//! `infernum encodings`.

use std::path::PathBuf;

use infernum_ir::Encoding;
use infernum_passes::data::Kernels;
use serde_json::{Value, json};

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Only encodings whose names contain this.
    #[arg(default_value = "", hide_default_value = true)]
    only: String,
    /// Folder whose kernels/ overrides and adds to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Print JSON, with what each file says.
    #[arg(long)]
    json: bool,
}

/// Lists how weights may be stored.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let all: Vec<&Encoding> =
        kernels.ops.encodings().filter(|e| e.name().contains(&args.only)).collect();
    if all.is_empty() {
        return Err(format!("`{}`: no encoding is named so", args.only).into());
    }
    if args.json {
        return report::json(&all.iter().map(|e| entry(e)).collect::<Vec<_>>());
    }
    let width = all.iter().map(|e| e.name().len()).max().unwrap_or(0);
    report::line(&format!("{:width$}  bits/value  group      code        where", "name"))?;
    for encoding in all {
        let def = encoding.def();
        let bits = encoding.bits().map_or_else(|| "-".to_owned(), |b| format!("{b:.4}"));
        let kind = format!("{:?}", def.code.kind).to_lowercase();
        let code = format!("{kind}, {}", def.code.bits);
        let name = encoding.name();
        let (group, place) = (group(encoding), place(encoding));
        report::line(&format!("{name:width$}  {bits:>10}  {group:9}  {code:11} {place}"))?;
    }
    Ok(())
}

/// Rows and columns that share a scale; `-` for all.
fn group(encoding: &Encoding) -> String {
    let extent = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let group = encoding.def().group;
    format!("{} x {}", extent(group.n), extent(group.k))
}

/// Where weights are stored so.
fn place(encoding: &Encoding) -> String {
    let def = encoding.def();
    match (def.gguf, encoding.when()) {
        (Some(number), _) => format!("GGUF, type {number}"),
        // As far as it is known: parameters of the file have their values.
        (None, Some(when)) => {
            let when = when.fold(&|_| None).unwrap_or_else(|_| when.clone());
            format!("safetensors, {when}")
        }
        (None, None) => "nowhere: the file has no `gguf` and no `when`".to_owned(),
    }
}

fn entry(encoding: &Encoding) -> Value {
    let def = encoding.def();
    json!({
        "name": def.name,
        "doc": def.doc,
        "bits": encoding.bits(),
        "group": def.group,
        "code": def.code,
        "gguf": def.gguf,
        "when": encoding.when().map(ToString::to_string),
        "stored": def.stored,
    })
}
