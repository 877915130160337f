//! All fused ops, rules and encodings: ours, with the user's on top.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::{Op, OpSet, SourceError, is_there};

use super::notation::at;
use super::rules::{self, Rule};
use super::signature::{self, Signature};
use super::{encodings, fused};

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/kernels");

/// A file of fused ops, rules or encodings could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum DataError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error(transparent)]
    Source(#[from] Box<SourceError>),
}

impl From<SourceError> for DataError {
    fn from(e: SourceError) -> Self {
        DataError::Source(Box::new(e))
    }
}

/// The fused ops, the rules over them, and the encodings of weights.
#[derive(Clone, Debug, Default)]
pub struct Kernels {
    /// Primitives and fused ops, and encodings.
    pub ops: OpSet,
    /// In the order of their files' names.
    pub rules: Vec<Rule>,
    /// What fused ops are called with, where their files say so.
    signatures: Vec<(&'static str, Signature)>,
    /// Long lists that encodings name.
    tables: Vec<(String, Vec<f64>)>,
    /// Whether one of our ops is hidden by another: what our rules mean is then not what we tried.
    foreign_ops: bool,
}

impl Kernels {
    /// The built-in files, those of `DIR/kernels` on top, and `extra` rule files.
    pub fn load(data: Option<&Path>, extra: &[PathBuf]) -> Result<Kernels, DataError> {
        let mut kernels = Kernels::default();
        let fused = files("fused", data)?;
        let ours = EMBEDDED.get_dir("fused").into_iter().flat_map(Dir::files);
        let mut ours = ours.filter_map(|f| f.contents_utf8());
        kernels.foreign_ops = !ours.all(|text| fused.iter().any(|s| &*s.text == text));
        kernels.define_all(fused)?;
        kernels.add_tables(&files("tables", data)?)?;
        kernels.add_encodings(&files("encodings", data)?)?;
        for source in files("rules", data)? {
            kernels.add_rules(&source)?;
        }
        for path in extra {
            kernels.add_rules(&open(path)?)?;
        }
        Ok(kernels)
    }

    /// Defines the fused ops of `sources`. One may use another: those that name an op not yet
    /// defined wait until the others are.
    pub fn define_all(&mut self, mut sources: Vec<Source>) -> Result<(), DataError> {
        let mut names: Vec<String> = Vec::new();
        for source in &sources {
            let file: fused::File<'_> = read_ron(source)?;
            if names.iter().any(|n| n == file.name) {
                let message = format!("another file defines `{}` too", file.name);
                return Err(at(source, file.name, message).into());
            }
            names.push(file.name.to_owned());
        }
        while !sources.is_empty() {
            let before = sources.len();
            let mut failed: Vec<(String, SourceError)> = Vec::new();
            let mut waiting = Vec::new();
            for source in sources {
                let file: fused::File<'_> = read_ron(&source)?;
                match fused::define(&source, &file, &mut self.ops) {
                    Ok((op, signature)) => {
                        self.signatures.retain(|(name, _)| *name != op.name);
                        self.signatures.extend(signature.map(|s| (op.name, s)));
                    }
                    Err(e) => {
                        failed.push((file.name.to_owned(), e));
                        waiting.push(source);
                    }
                }
            }
            if waiting.len() == before {
                // A file that only waits for another is not the one to blame.
                let waits = |e: &SourceError| {
                    let mut others = failed.iter().map(|(name, _)| name);
                    others.any(|name| e.message.starts_with(&format!("unknown op `{name}`")))
                };
                let blamed = failed.iter().position(|(_, e)| !waits(e));
                let circle: Vec<&str> = failed.iter().map(|(name, _)| name.as_str()).collect();
                let circle = circle.join("`, `");
                let mut error = failed.swap_remove(blamed.unwrap_or(0)).1;
                if blamed.is_none() {
                    error.message = format!("defined in a circle: `{circle}`");
                }
                return Err(error.into());
            }
            sources = waiting;
        }
        Ok(())
    }

    /// What a fused op is called with: as its file says, or as a rule that makes it of the rule's
    /// variables; `None` where neither does.
    pub fn signature(&self, op: Op) -> Option<Signature> {
        let declared = self.signatures.iter().find(|(name, _)| *name == op.name);
        let declared = declared.map(|(_, signature)| signature.clone());
        declared.or_else(|| signature::derived(op, &self.rules))
    }

    /// Adds the encodings of files, each of a name of its own.
    pub fn add_encodings(&mut self, sources: &[Source]) -> Result<(), DataError> {
        let mut names = HashSet::new();
        for source in sources {
            let file: encodings::File<'_> = read_ron(source)?;
            for encoding in encodings::read(source, &file, &self.tables)? {
                if !names.insert(encoding.name().to_owned()) {
                    let message = format!(
                        "`{encoding}` is defined twice, in another file or, if `each` has values that the name leaves \
                         out, in this one"
                    );
                    return Err(at(source, file.name, message).into());
                }
                self.ops.define_encoding(encoding);
            }
        }
        Ok(())
    }

    /// Adds the tables of files, for encodings to name.
    pub fn add_tables(&mut self, sources: &[Source]) -> Result<(), DataError> {
        for source in sources {
            let file: encodings::TableFile<'_> = read_ron(source)?;
            if self.tables.iter().any(|(name, _)| name == file.name) {
                let message = format!("another file defines the table `{}` too", file.name);
                return Err(at(source, file.name, message).into());
            }
            self.tables.push((file.name.to_owned(), file.values));
        }
        Ok(())
    }

    /// Adds the rules of a file; a rule of a name already there takes its place.
    pub fn add_rules(&mut self, source: &Source) -> Result<(), DataError> {
        let list: Vec<rules::File<'_>> = read_ron(source)?;
        for (i, file) in list.iter().enumerate() {
            if list[..i].iter().any(|f| f.name == file.name) {
                let message = format!("another rule of this file is named `{}`", file.name);
                return Err(at(source, file.name, message).into());
            }
            let mut rule = rules::read(source, file, &self.ops)?;
            rule.built_in = !self.foreign_ops && is_built_in("rules", source);
            self.rules.retain(|r| r.name != rule.name);
            self.rules.push(rule);
        }
        Ok(())
    }
}

/// Whether a file is one of ours, unchanged.
fn is_built_in(folder: &str, source: &Source) -> bool {
    let files = EMBEDDED.get_dir(folder).into_iter().flat_map(Dir::files);
    files.filter_map(|f| f.contents_utf8()).any(|text| text == &*source.text)
}

fn open(path: &Path) -> Result<Source, DataError> {
    let shown = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Source::new(&shown, &text)),
        Err(source) => Err(DataError::Io { path: shown, source }),
    }
}

/// The `.ron` files of one folder of `kernels/`, by name; the user's hide ours.
fn files(folder: &str, data: Option<&Path>) -> Result<Vec<Source>, DataError> {
    let mut found: Vec<(String, Source)> = Vec::new();
    let is_ron = |name: &str| Path::new(name).extension().is_some_and(|e| e == "ron");
    for file in EMBEDDED.get_dir(folder).into_iter().flat_map(Dir::files) {
        let name = file.path().file_name().and_then(|n| n.to_str());
        if let (Some(name), Some(text)) = (name, file.contents_utf8())
            && is_ron(name)
        {
            let shown = format!("kernels/{folder}/{name}");
            found.push((name.to_owned(), Source::new(&shown, text)));
        }
    }
    if let Some(dir) = data.map(|d| d.join("kernels").join(folder)).filter(|d| is_there(d)) {
        let io = |source| DataError::Io { path: dir.display().to_string(), source };
        for entry in std::fs::read_dir(&dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
            if is_ron(&name) {
                found.retain(|(n, _)| *n != name);
                found.push((name, open(&path)?));
            }
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found.into_iter().map(|(_, source)| source).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_files_load() {
        let kernels = Kernels::load(None, &[]).unwrap_or_else(|e| panic!("{e}"));
        assert!(kernels.ops.fused().count() > 0);
        assert!(!kernels.rules.is_empty());
        assert!(kernels.ops.encoding("q8_0").is_some());
    }
}
