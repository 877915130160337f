//! Which adapters are served from the start, and where clients may load others from.

use std::error::Error;
use std::path::{Path, PathBuf};

use infernum::LoraOptions;
use infernum_frontend_hf::peft::Adapter;
use infernum_link::{Handle, Reread};
use infernum_runtime::{AdapterBanks, AdapterId, AdapterWeights, EngineError};

use super::model::NamedModel;

/// Adapters that there is room for where it is not said, but some are wanted.
const ROOM: u64 = 4;
/// Bytes of an adapter's name.
const MOST_NAME: usize = 256;

/// Low-rank adapters.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Adapters")]
pub(crate) struct AdapterArgs {
    /// Low-rank adapter (LoRA) to serve as a model of its own: its name, and its folder as PEFT saves it. Repeat for several;
    /// without --max-loras there is room for as many, and 4 at least.
    #[arg(long = "lora", value_name = "NAME=DIR", value_parser = NamedAdapter::parse)]
    adapters: Vec<NamedAdapter>,
    /// Folder below which clients may have adapters loaded, by /v1/load_lora_adapter; none may when left out.
    #[arg(long, value_name = "DIR")]
    lora_root: Option<PathBuf>,
}

/// Where adapters go: an engine of this process, and what it has room for.
pub(crate) struct Room {
    pub(crate) banks: AdapterBanks,
    pub(crate) engine: Handle,
}

/// An adapter as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedAdapter {
    name: String,
    folder: PathBuf,
}

impl NamedAdapter {
    fn parse(text: &str) -> Result<NamedAdapter, String> {
        let found = text.split_once('=').filter(|(_, folder)| !folder.is_empty());
        let (name, folder) = found.ok_or_else(|| format!("expected NAME=DIR, found `{text}`"))?;
        check_name(name)?;
        Ok(NamedAdapter { name: name.to_owned(), folder: folder.into() })
    }
}

/// Refuses what cannot be a model's name.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > MOST_NAME || name.chars().any(char::is_control) {
        return Err(format!(
            "expected a name of 1 to {MOST_NAME} bytes without control characters"
        ));
    }
    Ok(())
}

/// Reads an adapter and makes it ready for banks; what is wrong with it, as text.
pub(crate) fn read(banks: &AdapterBanks, folder: &Path) -> Result<AdapterWeights, String> {
    let adapter = Adapter::read(folder, banks.largest()).map_err(|e| e.to_string())?;
    banks.fit(&adapter).map_err(|e| e.to_string())
}

/// Reads an adapter again, as it is then.
pub(crate) fn reread(name: &str, banks: &AdapterBanks, folder: &Path) -> Reread {
    let (name, banks, folder) = (name.to_owned(), banks.clone(), folder.to_owned());
    Box::new(move || {
        read(&banks, &folder).map_err(|e| {
            format!("the adapter `{name}`: {e}; unload it, or put its files back where they were")
        })
    })
}

impl AdapterArgs {
    /// Refuses names that are taken, and adapters of nobody knows which model.
    pub(crate) fn check(&self, models: &[NamedModel]) -> Result<(), String> {
        if models.len() > 1 && (!self.adapters.is_empty() || self.lora_root.is_some()) {
            return Err("--lora and --lora-root: expected one --model, found several".to_owned());
        }
        let names = models.iter().map(|m| &m.name).chain(self.adapters.iter().map(|a| &a.name));
        let names: Vec<&String> = names.collect();
        let taken = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
        taken.map_or(Ok(()), |(_, name)| Err(format!("two models or adapters are named `{name}`")))
    }

    /// How many adapters to have room for, if any.
    pub(crate) fn room(&self, lora: &LoraOptions) -> Option<u64> {
        let wanted = !self.adapters.is_empty() || self.lora_root.is_some();
        lora.max_loras.or_else(|| wanted.then(|| ROOM.max(self.adapters.len() as u64)))
    }

    /// Where clients may load adapters from, without links.
    pub(crate) fn root(&self) -> Result<Option<PathBuf>, String> {
        let found = self.lora_root.as_ref().map(|root| {
            let full = root.canonicalize().map_err(|e| e.to_string());
            let full = full.and_then(|full| {
                if full.is_dir() { Ok(full) } else { Err("is no folder".to_owned()) }
            });
            full.map_err(|e| format!("--lora-root: {}: {e}", root.display()))
        });
        found.transpose()
    }

    /// Has those that were named loaded by `load`, which is given the means to read them again.
    pub(crate) fn load(
        &self,
        banks: &AdapterBanks,
        mut load: impl FnMut(&AdapterWeights, Reread) -> Result<AdapterId, EngineError>,
    ) -> Result<Vec<(String, AdapterId)>, Box<dyn Error>> {
        let load = |NamedAdapter { name, folder }: &NamedAdapter| {
            let weights = read(banks, folder).map_err(|e| format!("--lora {name}: {e}"))?;
            Ok((name.clone(), load(&weights, reread(name, banks, folder))?))
        };
        self.adapters.iter().map(load).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(names: &[&str], root: Option<&str>) -> AdapterArgs {
        let named = |text: &&str| NamedAdapter::parse(text).unwrap();
        let adapters = names.iter().map(named).collect();
        AdapterArgs { adapters, lora_root: root.map(PathBuf::from) }
    }

    #[test]
    fn adapters_are_named_once_and_of_one_model() {
        assert!(
            ["", "a", "=x", "a=", "a\n=x"].iter().all(|text| NamedAdapter::parse(text).is_err())
        );
        let model = |name: &str| NamedModel { name: name.to_owned(), folder: None };
        assert!(args(&["a=x", "b=y"], None).check(&[model("m")]).is_ok());
        assert!(args(&["a=x", "a=y"], None).check(&[model("m")]).is_err());
        assert!(args(&["m=x"], None).check(&[model("m")]).is_err());
        assert!(args(&["a=x"], None).check(&[model("m"), model("n")]).is_err());
        assert!(args(&[], Some("/")).check(&[model("m"), model("n")]).is_err());
        assert!(args(&[], None).check(&[model("m"), model("n")]).is_ok());
    }

    #[test]
    fn there_is_room_for_those_that_are_wanted() {
        let lora = |max_loras| LoraOptions { max_loras, ..LoraOptions::default() };
        assert_eq!(args(&[], None).room(&lora(None)), None);
        assert_eq!(args(&["a=x"], None).room(&lora(None)), Some(4));
        assert_eq!(args(&[], Some("/")).room(&lora(Some(9))), Some(9));
        assert_eq!(args(&["a=x", "b=x", "c=x", "d=x", "e=x"], None).room(&lora(None)), Some(5));
        assert!(args(&[], Some("/no such folder")).root().is_err());
    }
}
