//! Which variants launches run, where something other than their order says so.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use infernum_passes::Bucket;
use serde::{Deserialize, Serialize};

use super::attach::Attach;
use super::attach::within;
use super::{CudaError, Device, Library};
use crate::plan::{Launch, Plan};

/// Variants that go before others, wherever they are admitted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedVariants {
    /// By template.
    #[serde(default)]
    templates: BTreeMap<String, String>,
    /// By site, as [`site`] names it; these go before those of templates.
    #[serde(default)]
    sites: BTreeMap<String, String>,
}

/// What `infernum tune` wrote cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: expected what `infernum tune` writes: {message}; delete it, or give --untuned")]
pub struct TunedVariantsError {
    path: String,
    message: String,
}

/// What variants are chosen by: the op, the types of its operands, and the steps.
pub fn site(launch: &Launch, bucket: Bucket) -> String {
    let types =
        launch.operands.iter().map(|v| v.as_ref().map_or("_".to_owned(), |v| v.ty.to_string()));
    format!("{}({}) for {bucket}", launch.op, types.collect::<Vec<_>>().join(", "))
}

impl TunedVariants {
    /// One variant of a template, at every site.
    pub fn everywhere(template: &str, variant: &str) -> TunedVariants {
        let templates = [(template.to_owned(), variant.to_owned())].into();
        TunedVariants { templates, sites: BTreeMap::new() }
    }

    /// Chooses a variant for a site; returns the one before.
    pub fn choose(&mut self, site: &str, variant: &str) -> Option<String> {
        self.sites.insert(site.to_owned(), variant.to_owned())
    }

    /// Takes a choice back.
    pub fn forget(&mut self, site: &str) {
        self.sites.remove(site);
    }

    /// How many sites have a choice.
    pub fn len(&self) -> usize {
        self.sites.len()
    }

    /// Whether nothing is chosen.
    pub fn is_empty(&self) -> bool {
        self.sites.is_empty() && self.templates.is_empty()
    }

    /// The variant for a launch.
    pub(super) fn variant(&self, launch: &Launch, bucket: Bucket, template: &str) -> Option<&str> {
        let site = if self.sites.is_empty() { None } else { self.sites.get(&site(launch, bucket)) };
        site.or_else(|| self.templates.get(template)).map(String::as_str)
    }

    /// Reads what [`TunedVariants::save`] wrote; nothing where there is no such file.
    pub fn load(path: &Path) -> Result<TunedVariants, TunedVariantsError> {
        let error =
            |message: String| TunedVariantsError { path: path.display().to_string(), message };
        match std::fs::read(path) {
            // A list would do for a struct, too; what is saved is an object.
            Ok(bytes) if !bytes.trim_ascii_start().starts_with(b"{") => {
                Err(error("expected an object".to_owned()))
            }
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| error(e.to_string())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(TunedVariants::default()),
            Err(e) => Err(error(e.to_string())),
        }
    }

    /// Writes them, whole or not at all.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&serde_json::to_vec_pretty(self)?)?;
        file.persist(path).map_err(|e| e.error)?;
        Ok(())
    }
}

/// The sites of one schedule of a plan, with the variants that each could run, in their order of
/// preference; the plan may have kernels already.
pub fn sites(
    plan: &Plan,
    schedule: usize,
    ops: &infernum_ir::OpSet,
    library: &Library,
    device: &Device,
) -> Result<Vec<(String, Vec<String>)>, CudaError> {
    let mut attach = Attach::new(ops, library, device, plan.limits, TunedVariants::default());
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let Some(schedule) = plan.schedules.get(schedule) else { return Ok(found) };
    let bucket = within(schedule.bucket, &plan.limits);
    for call in &schedule.calls {
        for launch in &plan.programs[call.program as usize].launches {
            let template = attach.template(launch, &launch.name)?;
            let parts = attach.parts(launch, bucket, &template);
            for bucket in parts.map_or_else(|| vec![bucket], Vec::from) {
                let key = site(launch, bucket);
                if found.iter().any(|(known, _)| *known == key) {
                    continue;
                }
                let variants = attach.admitted(launch, bucket, &template)?;
                found.push((key, variants.into_iter().map(|v| v.name.clone()).collect()));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_and_none_is_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sub/choices-sm_90a.json");
        assert_eq!(TunedVariants::load(&path).expect("none"), TunedVariants::default());
        let mut tuned = TunedVariants::everywhere("linear", "skinny");
        assert_eq!(tuned.choose("here", "a"), None);
        assert_eq!(tuned.choose("here", "b"), Some("a".to_owned()));
        tuned.save(&path).expect("written");
        assert_eq!(TunedVariants::load(&path).expect("some"), tuned);
        for text in ["", "{\"templates\": {\"linear\"", "[]", "{\"template\": {}}", "\u{0}"] {
            std::fs::write(&path, text).expect("written");
            let error = TunedVariants::load(&path).expect_err(text).to_string();
            assert!(error.contains("choices-sm_90a.json: expected") && error.contains("--untuned"));
        }
        std::fs::remove_file(&path).expect("gone");
        std::fs::create_dir(&path).expect("a folder in its place");
        assert!(TunedVariants::load(&path).is_err());
    }
}
