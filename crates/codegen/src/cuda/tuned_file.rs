//! Files of tuned variants: what `infernum tune` found for a GPU.
//!
//! `kernels/tuned/README.md` is the reference of the format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_passes::Bucket;
use serde::Deserialize;

use super::tuned::{Chosen, Site};

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/tuned");

/// A file of tuned variants cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: expected what `infernum tune` writes: {message}; delete it, or give --untuned")]
pub struct TunedVariantsError {
    path: String,
    message: String,
}

/// The fastest variants on one kind of GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunedFile {
    /// The GPU, as its driver names it.
    pub device: String,
    /// Its architecture, as NVRTC names it: `sm_90a`.
    pub arch: String,
    /// The driver and the NVRTC that it was measured with, for people.
    pub measured_with: String,
    /// The variants.
    pub choices: BTreeMap<Site, String>,
}

#[derive(Deserialize)]
#[serde(rename = "Tuned", deny_unknown_fields)]
struct Notation {
    device: String,
    arch: String,
    measured_with: String,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Choice {
    op: String,
    operands: Vec<String>,
    steps: String,
    variant: String,
}

impl TunedFile {
    /// Reads a file; `None` where there is none.
    pub fn open(path: &Path) -> Result<Option<TunedFile>, TunedVariantsError> {
        let shown = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => TunedFile::parse(&shown, &text).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(TunedVariantsError { path: shown, message: e.to_string() }),
        }
    }

    /// Reads a file's text.
    pub fn parse(path: &str, text: &str) -> Result<TunedFile, TunedVariantsError> {
        let error = |message: String| TunedVariantsError { path: path.to_owned(), message };
        let read: Notation =
            read_ron(&Source::new(path, text)).map_err(|e| error(e.to_string()))?;
        let mut choices = BTreeMap::new();
        for Choice { op, operands, steps, variant } in read.choices {
            let steps: Bucket = steps.parse().map_err(|e| error(format!("`{steps}`: {e}")))?;
            let site = Site { op, operands, steps };
            if choices.contains_key(&site) {
                return Err(error(format!("{site} is there twice")));
            }
            choices.insert(site, variant);
        }
        let Notation { device, arch, measured_with, .. } = read;
        Ok(TunedFile { device, arch, measured_with, choices })
    }

    /// As it is written: sorted, an entry a line.
    pub fn text(&self) -> String {
        let mut text = format!(
            "Tuned(\n    device: {:?},\n    arch: {:?},\n    measured_with: {:?},\n    choices: [\n",
            self.device, self.arch, self.measured_with
        );
        for (site, variant) in &self.choices {
            let Site { op, operands, steps } = site;
            let steps = steps.to_string();
            let _ = writeln!(
                text,
                "        (op: {op:?}, operands: {operands:?}, steps: {steps:?}, variant: {variant:?}),"
            );
        }
        text + "    ],\n)\n"
    }

    /// Writes it, whole or not at all; what a file of this name has for other sites stays, if it is of such a GPU.
    pub fn save(&self, path: &Path) -> Result<TunedFile, TunedVariantsError> {
        let error =
            |message: String| TunedVariantsError { path: path.display().to_string(), message };
        let mut whole = self.clone();
        if let Some(before) = TunedFile::open(path)? {
            if before.device != self.device {
                let message = format!("it is of `{}`, not of `{}`", before.device, self.device);
                return Err(error(message));
            }
            for (site, variant) in before.choices {
                whole.choices.entry(site).or_insert(variant);
            }
        }
        let write = || {
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder)?;
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(whole.text().as_bytes())?;
            file.persist(path).map(drop).map_err(|e| e.error)
        };
        write().map_err(|e: std::io::Error| error(e.to_string()))?;
        Ok(whole)
    }

    /// What ships for a device, that of `DIR/kernels/tuned` first. A file there hides ours of its name.
    pub fn shipped(device: &str, data: Option<&Path>) -> Result<Vec<Chosen>, TunedVariantsError> {
        let mut files: Vec<(String, String, TunedFile)> = Vec::new();
        let folder = data.map(|d| d.join("kernels/tuned")).filter(|d| d.is_dir());
        if let Some(folder) = &folder {
            let fail = |e: std::io::Error| TunedVariantsError {
                path: folder.display().to_string(),
                message: e.to_string(),
            };
            for entry in std::fs::read_dir(folder).map_err(fail)? {
                let path = entry.map_err(fail)?.path();
                let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                if let Some(file) = is_ron(&path).then(|| TunedFile::open(&path)).transpose()? {
                    let shown = path.display().to_string();
                    files.extend(file.map(|file| (name.to_owned(), shown, file)));
                }
            }
            files.sort_by(|a, b| a.0.cmp(&b.0));
        }
        for file in EMBEDDED.files().filter(|f| is_ron(f.path())) {
            let name = file.path().display().to_string();
            if !files.iter().any(|(known, ..)| *known == name) {
                let shown = format!("kernels/tuned/{name}");
                let read = TunedFile::parse(&shown, file.contents_utf8().unwrap_or_default())?;
                files.push((name, shown, read));
            }
        }
        let same = files.into_iter().filter(|(_, _, file)| file.device == device);
        Ok(same.map(|(_, source, file)| Chosen { source, sites: file.choices }).collect())
    }

    /// The name of the file for a device: its letters and digits, small, with `-` between words.
    pub fn name(device: &str) -> String {
        let small = device.to_lowercase();
        let words = small.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        words.collect::<Vec<_>>().join("-") + ".ron"
    }
}

fn is_ron(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "ron")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(op: &str, steps: &str) -> Site {
        let operands = vec!["bf16[T, 64]".to_owned(), "_".to_owned()];
        Site { op: op.to_owned(), operands, steps: steps.parse().expect(steps) }
    }

    fn file(device: &str, choices: &[(&str, &str, &str)]) -> TunedFile {
        TunedFile {
            device: device.to_owned(),
            arch: "sm_90a".to_owned(),
            measured_with: "driver for CUDA 13.0, NVRTC 13.0".to_owned(),
            choices: choices.iter().map(|(op, s, v)| (site(op, s), (*v).to_owned())).collect(),
        }
    }

    #[test]
    fn what_is_written_is_read_again_and_added_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sub").join(TunedFile::name("A \"GPU\" 80GB"));
        assert!(path.ends_with("a-gpu-80gb.ron"));
        assert_eq!(TunedFile::open(&path).expect("nothing"), None);
        let first = file(
            "A \"GPU\" 80GB",
            &[("linear", "T = 1 (decode)", "a"), ("linear", "T >= 17", "b")],
        );
        assert_eq!(first.save(&path).expect("written"), first);
        assert_eq!(TunedFile::open(&path).expect("some"), Some(first.clone()));
        let again = file("A \"GPU\" 80GB", &[("linear", "T >= 17", "c"), ("argmax", "any T", "d")]);
        let both = file(
            "A \"GPU\" 80GB",
            &[
                ("linear", "T = 1 (decode)", "a"),
                ("linear", "T >= 17", "c"),
                ("argmax", "any T", "d"),
            ],
        );
        assert_eq!(again.save(&path).expect("written"), both);
        let text = std::fs::read_to_string(&path).expect("a file");
        let entries: Vec<&str> = text.lines().filter(|l| l.contains("variant:")).collect();
        assert!(entries.len() == 3 && entries[0].contains("argmax"), "{text}");
        let error = file("another", &[]).save(&path).expect_err("of another").to_string();
        assert!(error.contains("not of `another`"), "{error}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let wrong = r#"Tuned(device: "d", arch: "a", measured_with: "", choices: [(op: "o", operands: [], steps: "T = x", variant: "v")])"#;
        let twice = file("d", &[("o", "any T", "v")]).text();
        let twice = twice.replace(
            "    ],",
            "(op: \"o\", operands: [\"bf16[T, 64]\", \"_\"], steps: \"any T\", variant: \"w\")],",
        );
        for text in ["", "{\"templates\": {}}", "[]", "Tuned(device: 1)", "\u{0}", wrong, &twice] {
            let error = TunedFile::parse("tuned/x.ron", text).expect_err(text).to_string();
            assert!(error.starts_with("tuned/x.ron: expected") && error.contains("--untuned"));
        }
        let folder = tempfile::tempdir().expect("a folder");
        assert!(TunedFile::open(folder.path()).is_err());
    }

    #[test]
    fn what_ships_is_found_by_the_name_of_the_device() {
        let folder = tempfile::tempdir().expect("a folder");
        let tuned = folder.path().join("kernels/tuned");
        file("A", &[("linear", "any T", "a")]).save(&tuned.join("x.ron")).expect("written");
        file("B", &[("linear", "any T", "b")]).save(&tuned.join("y.ron")).expect("written");
        std::fs::write(tuned.join("README.md"), "no table").expect("written");
        let found = TunedFile::shipped("A", Some(folder.path())).expect("read");
        assert_eq!(found.len(), 1);
        assert!(found[0].source.ends_with("x.ron") && found[0].sites.len() == 1);
        assert_eq!(TunedFile::shipped("C", Some(folder.path())).expect("read"), []);
        for file in EMBEDDED.files().filter(|f| is_ron(f.path())) {
            let (path, text) = (file.path().display().to_string(), file.contents_utf8());
            let read = TunedFile::parse(&path, text.expect("a text")).expect("ours reads");
            assert_eq!(TunedFile::name(&read.device), path);
            assert_eq!(Some(&*read.text()), text, "{path}: as `infernum tune` writes it");
        }
    }
}
