//! Models by their names on the Hugging Face hub: which of a repository's files one needs.

use std::path::{Path, PathBuf};

use infernum_frontend_hf::ModelFiles;
use infernum_frontend_hf::checkpoint::{CheckpointError, Stored, shards};
use infernum_hub::{Event, Hub, HubError, Repository, Snapshot};

use crate::error::Error;
use crate::options::Needs;
use crate::progress::{Progress, Stage};

/// What is taken of several files that are quantised in different ways, where nothing else is said.
const QUANTISED: &str = "Q4_K_M";
/// Beginnings and endings of the names of files that say what a model is and how its texts are read and written;
/// `modules.json` and what it names say that one gives vectors.
const TEXT: [(&str, &str); 8] = [
    ("config", ".json"),
    ("generation_config", ".json"),
    ("special_tokens_map", ".json"),
    ("tokenizer", ".json"),
    ("tokenizer", ".model"),
    ("chat_template", ".jinja"),
    ("modules", ".json"),
    ("sentence_bert_config", ".json"),
];

/// The repository that a path names, where nothing is there.
pub(crate) fn repository(path: &Path) -> Option<Repository> {
    let name = path.to_str().filter(|_| !path.exists())?;
    name.parse().ok()
}

/// A repository's files, which are downloaded where they are not in the cache.
pub(crate) fn open(
    repository: &Repository,
    needs: Needs,
    progress: &dyn Fn(Progress<'_>),
) -> Result<ModelFiles, Error> {
    let failed = |error| Error::Hub { name: repository.to_string(), error };
    let hub = Hub::from_env().map_err(failed)?;
    let snapshot = hub.snapshot(repository).map_err(failed)?;
    match snapshot.cut_off() {
        None | Some(HubError::Offline) => {}
        Some(why) => {
            let text = format!("{why}: `{}` is as it was downloaded before", repository.id());
            progress(Progress::Notice(&text));
        }
    }
    let path = fetch(&snapshot, repository, needs, &mut |event| match event {
        Event::Begin(total) => progress(Progress::Begin { stage: Stage::Download, total }),
        Event::Bytes(bytes) => progress(Progress::Advance(bytes)),
        Event::End => progress(Progress::End),
        Event::Notice(text) => progress(Progress::Notice(text)),
    })?;
    snapshot.keep().map_err(failed)?;
    Ok(ModelFiles::open(path)?.named(repository.to_string()))
}

/// Downloads what is needed: gives the folder that it is in, or the GGUF file.
fn fetch(
    snapshot: &Snapshot<'_>,
    repository: &Repository,
    needs: Needs,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<PathBuf, Error> {
    let (names, folder) = (snapshot.files(), snapshot.folder());
    let failed = |error| Error::Hub { name: repository.to_string(), error };
    if repository.file().is_some() || !names.iter().any(|name| name == "config.json") {
        let parts = choose(repository, names)?;
        snapshot.fetch(&parts, event).map_err(failed)?;
        return Ok(folder.join(&parts[0]));
    }
    let mut wanted: Vec<String> = names.iter().filter(|name| is_text(name)).cloned().collect();
    if needs == Needs::All {
        match stored(snapshot, repository)? {
            Stored::One(name) => wanted.push(name),
            Stored::Shards { index } => {
                snapshot.fetch(std::slice::from_ref(&index), event).map_err(failed)?;
                let path = folder.join(&index);
                let json = std::fs::read(&path)
                    .map_err(|source| Error::Io { path: path.display().to_string(), source })?;
                let shards = shards(&json).map_err(|e| Error::Model(e.into()))?;
                wanted.extend(shards);
                wanted.push(index);
            }
        }
    }
    snapshot.fetch(&wanted, event).map_err(failed)?;
    Ok(folder)
}

/// Which files the weights are.
fn stored(snapshot: &Snapshot<'_>, repository: &Repository) -> Result<Stored, Error> {
    match Stored::among(repository.id(), snapshot.files()) {
        // A download for a tokenizer alone leaves such a cache.
        Err(CheckpointError::NoWeights { .. }) if snapshot.cut_off().is_some() => {
            let error = snapshot.lacks(vec!["*.safetensors".to_owned()]);
            Err(Error::Hub { name: repository.to_string(), error })
        }
        Err(error @ CheckpointError::NoWeights { .. }) => {
            Err(Error::NoWeights(Box::new(error.into())))
        }
        stored => stored.map_err(|error| Error::Model(error.into())),
    }
}

fn is_text(name: &str) -> bool {
    let is = |(start, end): &(&str, &str)| name.starts_with(start) && name.ends_with(end);
    match name.split_once('/') {
        None => TEXT.iter().any(is),
        // Settings of a module of sentence-transformers: `1_Pooling/config.json`.
        Some((folder, file)) => {
            folder.starts_with(|c: char| c.is_ascii_digit()) && file == "config.json"
        }
    }
}

/// The GGUF file that a repository's name means, or its parts in order.
fn choose(repository: &Repository, names: &[String]) -> Result<Vec<String>, Error> {
    let mut models: Vec<(String, Vec<String>)> = Vec::new();
    let mut files: Vec<&String> = names.iter().filter(|name| is_model(name)).collect();
    files.sort_unstable();
    for name in files {
        let stem = stem(name).to_owned();
        match models.iter_mut().find(|(known, _)| *known == stem) {
            Some((_, parts)) => parts.push(name.clone()),
            None => models.push((stem, vec![name.clone()])),
        }
    }
    let wanted = repository.file().unwrap_or(QUANTISED);
    let only = models.len() == 1 && repository.file().is_none();
    let mut found: Vec<_> = models.iter().filter(|m| only || means(wanted, m)).collect();
    match (found.pop(), found.is_empty()) {
        (Some((_, parts)), true) => Ok(parts.clone()),
        (last, _) => {
            let several = last.is_some();
            let among = if several {
                found.into_iter().chain(last).collect()
            } else {
                models.iter().collect::<Vec<_>>()
            };
            let (id, files) = (
                repository.id().to_owned(),
                among.iter().map(|(_, parts)| parts[0].clone()).collect(),
            );
            let wanted = repository.file().map(str::to_owned);
            Err(Error::NoFile(Box::new(NoFile { id, wanted, several, files })))
        }
    }
}

/// No GGUF file of a repository is the one that is meant.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.message())]
pub struct NoFile {
    id: String,
    wanted: Option<String>,
    several: bool,
    files: Vec<String>,
}

impl NoFile {
    fn message(&self) -> String {
        const LISTED: usize = 30;
        let NoFile { id, wanted, several, files } = self;
        if files.is_empty() {
            return format!("`{id}` holds neither a config.json nor a GGUF file: expected a model");
        }
        let more = if files.len() > LISTED { ", …" } else { "" };
        let listed = files[..files.len().min(LISTED)].join(", ");
        let what = match wanted {
            Some(wanted) if *several => format!("several GGUF files are `{wanted}`"),
            Some(wanted) => format!("no GGUF file is `{wanted}`"),
            None => "there are several GGUF files".to_owned(),
        };
        format!("`{id}`: {what}; choose one as {id}:FILE or {id}:{QUANTISED}, of {listed}{more}")
    }
}

/// Whether a file is a model, and not what goes with one.
fn is_model(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.strip_suffix(".gguf").is_some()
        && !["mmproj", "imatrix"].iter().any(|part| name.contains(part))
}

/// A name without its ending, and without `-00001-of-00003`.
fn stem(name: &str) -> &str {
    let stem = name.get(..name.len() - ".gguf".len()).unwrap_or(name);
    let numbered =
        stem.rsplit_once("-of-").and_then(|(rest, count)| Some((rest.rsplit_once('-')?, count)));
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    match numbered {
        Some(((stem, part), count)) if is_number(part) && is_number(count) => stem,
        _ => stem,
    }
}

/// Whether a model is the one that is wanted: by a file's name, or by how names say that it is quantised.
fn means(wanted: &str, (stem, parts): &(String, Vec<String>)) -> bool {
    if parts.iter().any(|part| part == wanted) {
        return true;
    }
    let (wanted, stem) = (wanted.to_ascii_lowercase(), stem.to_ascii_lowercase());
    let mut folders: Vec<&str> = stem.split('/').collect();
    let name = folders.pop().unwrap_or_default();
    let ends = name
        .strip_suffix(&*wanted)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.', '_']));
    ends || folders.contains(&&*wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(name: &str, files: &[&str]) -> Result<Vec<String>, String> {
        let files: Vec<String> = files.iter().map(|f| (*f).to_owned()).collect();
        choose(&name.parse().expect("a name"), &files).map_err(|e| e.to_string())
    }

    #[test]
    fn one_gguf_file_of_many_is_chosen_by_how_it_is_quantised() {
        let files = [
            "README.md",
            "m-Q4_K_M.gguf",
            "m-Q8_0.gguf",
            "m-UD-Q8_0.gguf",
            "mmproj-m-Q8_0.gguf",
            "big/m.BF16-00002-of-00002.gguf",
            "big/m.BF16-00001-of-00002.gguf",
            "IQ1_S/m.gguf",
        ];
        let one = |file: &str| Ok(vec![file.to_owned()]);
        assert_eq!(chosen("a/b:q4_k_m", &files), one("m-Q4_K_M.gguf"));
        assert_eq!(chosen("a/b", &files), one("m-Q4_K_M.gguf"));
        assert_eq!(chosen("a/b:m-Q8_0.gguf", &files), one("m-Q8_0.gguf"));
        assert_eq!(chosen("a/b:iq1_s", &files), one("IQ1_S/m.gguf"));
        let parts = ["big/m.BF16-00001-of-00002.gguf", "big/m.BF16-00002-of-00002.gguf"];
        assert_eq!(chosen("a/b:BF16", &files), Ok(parts.map(str::to_owned).to_vec()));
        assert_eq!(chosen("a/b", &["only.gguf", "imatrix.gguf"]), one("only.gguf"));
        let message = chosen("a/b:Q8_0", &files).expect_err("two");
        assert!(
            message.contains("several GGUF files are `Q8_0`")
                && message.ends_with("of m-Q8_0.gguf, m-UD-Q8_0.gguf"),
            "{message}"
        );
        let message = chosen("a/b:Q2_K", &files).expect_err("none");
        assert!(
            message.contains("no GGUF file is `Q2_K`") && message.contains("IQ1_S/m.gguf"),
            "{message}"
        );
        let message = chosen("a/b", &["x.bin"]).expect_err("none at all");
        assert!(message.contains("neither a config.json nor a GGUF"), "{message}");
        assert!(chosen("a/b", &["é.gguf", ".gguf", "-of-.gguf"]).is_err());
    }

    #[test]
    fn what_is_not_needed_is_left() {
        let needed = [
            "config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "tokenizer.model",
            "modules.json",
            "sentence_bert_config.json",
            "1_Pooling/config.json",
        ];
        assert!(needed.iter().all(|name| is_text(name)));
        for name in [
            "pytorch_model.bin",
            "onnx/config.json",
            "1_Dense/model.safetensors",
            "README.md",
            "trainer_state.json",
            "model.safetensors",
        ] {
            assert!(!is_text(name), "{name}");
        }
    }

    #[test]
    fn a_path_that_is_there_goes_first() {
        assert!(repository(Path::new("src/hub.rs")).is_none());
        assert!(repository(Path::new("src/nowhere")).is_some());
        assert!(repository(Path::new("./src/nowhere")).is_none());
    }
}
