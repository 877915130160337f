//! Options of adapters: which an engine has from the start, and where clients may load others from.

use std::path::{Path, PathBuf};

use infernum::LoraOptions;
use infernum_frontend_hf::peft::Adapter;
use infernum_link::{AdapterFiles, check_name};
use infernum_runtime::AdapterBanks;

use super::model::NamedModel;

/// Adapters that there is room for where it is not said, but some are wanted.
const ROOM: u64 = 4;

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
        check_name(name).map_err(|e| e.to_string())?;
        Ok(NamedAdapter { name: name.to_owned(), folder: folder.into() })
    }
}

impl AdapterArgs {
    /// Refuses names that are taken, adapters of nobody knows which model, and a folder that is not there.
    pub(crate) fn check(&self, models: &[NamedModel]) -> Result<(), String> {
        if models.len() > 1 && (!self.adapters.is_empty() || self.lora_root.is_some()) {
            return Err("--lora and --lora-root: expected one --model, found several".to_owned());
        }
        let names = models.iter().map(|m| &m.name).chain(self.adapters.iter().map(|a| &a.name));
        let names: Vec<&String> = names.collect();
        let taken = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
        if let Some((_, name)) = taken {
            return Err(format!("two models or adapters are named `{name}`"));
        }
        self.root().map(drop)
    }

    /// How many adapters to have room for, if any.
    pub(crate) fn room(&self, lora: &LoraOptions) -> Option<u64> {
        let wanted = !self.adapters.is_empty() || self.lora_root.is_some();
        lora.max_loras.or_else(|| wanted.then(|| ROOM.max(self.adapters.len() as u64)))
    }

    /// Where clients may load adapters from, without links.
    fn root(&self) -> Result<Option<PathBuf>, String> {
        let found = self.lora_root.as_ref().map(|root| {
            let full = root.canonicalize().map_err(|e| e.to_string());
            let full = full.and_then(|full| {
                if full.is_dir() { Ok(full) } else { Err("is no folder".to_owned()) }
            });
            full.map_err(|e| format!("--lora-root: {}: {e}", root.display()))
        });
        found.transpose()
    }

    /// Where the adapters of an engine with these banks come from.
    pub(crate) fn files(&self, banks: AdapterBanks) -> Result<AdapterFiles, String> {
        let read = move |folder: &Path| {
            let adapter = Adapter::read(folder, banks.largest()).map_err(|e| e.to_string())?;
            banks.fit(&adapter).map_err(|e| e.to_string())
        };
        Ok(AdapterFiles { root: self.root()?, read: Box::new(read) })
    }

    /// Those that are served from the start: their names and folders.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.adapters.iter().map(|adapter| (&*adapter.name, &*adapter.folder))
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
