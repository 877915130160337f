//! `infernum families`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use infernum_frontend_hf::spec::{Library, parse_family};
use infernum_frontend_hf::{Config, ModelFiles, Near, Reading, nearest_families};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

/// Families that are shown as near to a config, and places where another reads a key.
const SHOWN: usize = 3;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show which families read most of this config.json, or of that of a folder, and where families read what the
    /// nearest does not: where to start a spec of another architecture.
    #[arg(long = "for", value_name = "DIR|FILE")]
    config: Option<PathBuf>,
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
    let library = Library::new(args.data.as_deref());
    match &args.config {
        Some(path) => show_near(&open(path)?, &library, args.json),
        None => list(&library, args.json),
    }
}

fn list(library: &Library, json: bool) -> Outcome {
    let mut families = Vec::new();
    for source in library.families()? {
        let family = parse_family(&source)?;
        families.push(Family {
            name: family.name.to_owned(),
            architectures: family.served().map(str::to_owned).collect(),
            doc: family.doc.split_whitespace().collect::<Vec<_>>().join(" "),
            file: source.file.to_string(),
        });
    }
    if json {
        return report::json(&families);
    }
    for f in &families {
        report::line(&format!("{:<10} {}  ({})", f.name, f.architectures.join(", "), f.file))?;
        report::line(&format!("{:<10} {}", "", f.doc))?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<Config, Box<dyn std::error::Error>> {
    if path.is_dir() {
        return Ok(Config::open(&ModelFiles::folder(path)?)?);
    }
    // Mapped, and not read whole: whatever the file is, the parser stops where it is no JSON.
    let shown = path.display().to_string();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let json = ModelFiles::folder(parent)?.read(name)?;
    let json = json.ok_or_else(|| format!("{shown}: there is no such file"))?;
    Ok(Config::parse(&shown, &json)?)
}

/// A family that is near to a config, and what it does not read of that.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    near: &'a Near,
    unread: Vec<&'a str>,
}

/// What is shown of a config that some family is to serve.
#[derive(Serialize)]
struct Nearest<'a> {
    nearest: Vec<Shown<'a>>,
    /// Where other families read what the first does not; nowhere where no family does.
    elsewhere: BTreeMap<&'a str, Vec<&'a Reading>>,
}

fn show_near(config: &Config, library: &Library, json: bool) -> Outcome {
    let keys: Vec<&str> = config.keys().collect::<BTreeSet<_>>().into_iter().collect();
    let families = nearest_families(&keys, library)?;
    let shown = families.iter().take(SHOWN);
    let nearest: Vec<Shown<'_>> =
        shown.map(|near| Shown { near, unread: near.unread(&keys) }).collect();
    let unread = nearest.first().map_or(&[][..], |first| &first.unread);
    let elsewhere = unread.iter().map(|key| (*key, places(&families, key))).collect();
    let found = Nearest { nearest, elsewhere };
    if json {
        return report::json(&found);
    }
    for Shown { near, unread } in &found.nearest {
        let (read, all) = (near.reads.len(), near.keys);
        report::line(&format!("{}  reads {read} of {all} keys  ({})", near.family, near.file))?;
        report::line(&format!("    {}", near.doc))?;
        if !unread.is_empty() {
            let unread: Vec<String> = unread.iter().map(|key| printable(key)).collect();
            report::line(&format!("    does not read {}", unread.join(", ")))?;
        }
    }
    if !found.elsewhere.is_empty() {
        report::line("\nwhat the first does not read, and where others do:")?;
    }
    for (key, places) in &found.elsewhere {
        let key = printable(key);
        if places.is_empty() {
            report::line(&format!("{key}: no family reads it"))?;
        }
        for place in places {
            let Reading { param, value, file, line } = place;
            report::line(&format!("{key}: {file}:{line} \"{param}\": \"{value}\""))?;
        }
    }
    Ok(())
}

/// A key as a terminal may get it.
fn printable(key: &str) -> String {
    key.escape_debug().to_string()
}

/// Where families read a key, each place once, the nearest family's first.
fn places<'a>(families: &'a [Near], key: &str) -> Vec<&'a Reading> {
    let mut places: Vec<&Reading> = Vec::new();
    for reading in families.iter().filter_map(|near| near.reads.get(key)) {
        if places.len() < SHOWN && !places.contains(&reading) {
            places.push(reading);
        }
    }
    places
}
