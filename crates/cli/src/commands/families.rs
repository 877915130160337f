//! `infernum families`.

use std::path::PathBuf;

use infernum_frontend_hf::spec::{Library, parse_family};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder whose models/ overrides and adds to the built-in families.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Family {
    name: String,
    architectures: Vec<String>,
    doc: String,
    file: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut families = Vec::new();
    for source in Library::new(args.data.as_deref()).families()? {
        let family = parse_family(&source)?;
        families.push(Family {
            name: family.name.to_owned(),
            architectures: family.served().map(str::to_owned).collect(),
            doc: family.doc.split_whitespace().collect::<Vec<_>>().join(" "),
            file: source.file.to_string(),
        });
    }
    if args.json {
        return report::json(&families);
    }
    for f in &families {
        report::line(&format!("{:<10} {}  ({})", f.name, f.architectures.join(", "), f.file))?;
        report::line(&format!("{:<10} {}", "", f.doc))?;
    }
    Ok(())
}
