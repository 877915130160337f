//! Which families are nearest to a config that none serves: by the keys that they read of it.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use infernum_ir::SourceError;
use serde::Serialize;

use crate::lower::{LowerError, bases, over_bases};
use crate::spec::{Arg, Block, BlockSource, Entries, Family, Library, Part, Source, parse_block};

/// Keys that say nothing of what a model computes, whole or by their ends.
const ASIDE: [&str; 12] = [
    "architectures",
    "model_type",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "initializer_range",
    "token_id",
    "dropout",
    "pdrop",
];

/// Where a family reads a key of `config.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// The parameter that is made of it.
    pub param: String,
    /// The parameter's expression.
    pub value: String,
    /// The file, as the user would name it.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
}

/// A family, by what it reads of a config.
#[derive(Clone, Debug, Serialize)]
pub struct Near {
    /// The family's name.
    pub family: String,
    /// What it covers.
    pub doc: String,
    /// Its file.
    pub file: String,
    /// The keys of the config that it reads, each with the first place.
    pub reads: BTreeMap<String, Reading>,
    /// How many keys the config has that may matter, read or not.
    pub keys: usize,
    /// Keys that it has a default for, and that the config lacks: signs of what is another model's.
    pub lacking: usize,
}

impl Near {
    /// Those of a config's `keys` that may matter and that the family does not read.
    pub fn unread<'k>(&self, keys: &[&'k str]) -> Vec<&'k str> {
        let unread = |key: &&&str| matters(key) && !self.reads.contains_key(**key);
        keys.iter().filter(unread).copied().collect()
    }
}

/// All families, the nearest to a config of these `keys` first: that which reads most of them and knows fewest others.
///
/// Only what a family's parameters, its checks and the blocks that it calls say is looked at; nothing is evaluated.
///
/// # Errors
/// If a file of the library cannot be read or parsed.
pub fn nearest_families(keys: &[&str], library: &Library) -> Result<Vec<Near>, LowerError> {
    let keys: BTreeSet<&str> = keys.iter().copied().filter(|key| matters(key)).collect();
    let mut families = Vec::new();
    for source in library.families()? {
        families.push(near(&source, &keys, library)?);
    }
    families.sort_by(|a, b| {
        (b.reads.len(), a.lacking, &a.family).cmp(&(a.reads.len(), b.lacking, &b.family))
    });
    Ok(families)
}

fn matters(key: &str) -> bool {
    !ASIDE.iter().any(|aside| {
        key.strip_suffix(aside).is_some_and(|rest| rest.is_empty() || rest.ends_with('_'))
    })
}

fn near(source: &Source, keys: &BTreeSet<&str>, library: &Library) -> Result<Near, LowerError> {
    let bases = bases(source, library)?;
    let family = over_bases(source, &bases)?;
    let mut files = BTreeMap::new();
    for (_, block) in family.blocks.iter() {
        if let BlockSource::File(path) = block {
            files.insert(*path, library.file(path)?);
        }
    }
    let mut parsed = BTreeMap::new();
    for (path, file) in &files {
        parsed.insert(*path, parse_block(file)?);
    }

    let sources: Vec<&Source> =
        std::iter::once(source).chain(&bases).chain(files.values()).collect();
    let mut reader = Reader { keys, sources, reads: BTreeMap::new() };
    let mut hidden = HashSet::new();
    reader.read(&family.params, &mut hidden)?;
    reader.read(&family.layer_params, &mut hidden.clone())?;
    reader.read(&family.checks, &mut hidden.clone())?;
    for block in called(&family, &parsed) {
        let mut hidden = hidden.clone();
        reader.read(&block.params, &mut hidden)?;
        reader.read(&block.checks, &mut hidden)?;
    }
    let reads = reader.reads;
    Ok(Near {
        family: family.name.to_owned(),
        doc: family.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        file: source.file.to_string(),
        keys: keys.len(),
        lacking: family.defaults.iter().filter(|(key, _)| !keys.contains(*key)).count(),
        reads,
    })
}

/// The blocks that a family's bodies call, and those that these call, each once.
fn called<'f, 's>(
    family: &'f Family<'s>,
    files: &'f BTreeMap<&'s str, Block<'s>>,
) -> Vec<&'f Block<'s>> {
    let ends = [&family.embed, &family.head, &family.pool, &family.score];
    let layers = family.layers.iter().flat_map(|layers| layers.kinds.iter().map(|(_, part)| part));
    let parts = ends.into_iter().flatten().chain(layers);
    let calls = |part: &'f Part<'s>| part.body.iter().map(|(_, call)| call.name);
    let mut names: Vec<&str> = parts.flat_map(calls).collect();
    let (mut seen, mut blocks) = (HashSet::new(), Vec::new());
    while let Some(name) = names.pop() {
        let block = match family.blocks.get(name) {
            Some(BlockSource::File(path)) => files.get(path),
            Some(BlockSource::Inline(block)) => Some(block),
            None => None, // an op
        };
        if let Some(block) = block.filter(|_| seen.insert(name)) {
            names.extend(block.body.iter().map(|(_, call)| call.name));
            blocks.push(block);
        }
    }
    blocks
}

struct Reader<'a> {
    keys: &'a BTreeSet<&'a str>,
    sources: Vec<&'a Source>,
    reads: BTreeMap<String, Reading>,
}

impl Reader<'_> {
    /// Takes down what the expressions of `entries` read. Names in `hidden` are parameters and no keys; each entry hides its own
    /// from those after it.
    fn read<'s>(
        &mut self,
        entries: &Entries<'s, Arg<'s>>,
        hidden: &mut HashSet<&'s str>,
    ) -> Result<(), SourceError> {
        for (name, arg) in entries.iter() {
            // What is written is a piece of one of the sources.
            let mut sources = self.sources.iter().copied();
            let place = sources.find_map(|source| Some((source, source.find(name)?)));
            if let (Arg::Text(text), Some((source, at))) = (arg, place) {
                source.expression(text)?.names(&mut |key| {
                    if self.keys.contains(key) && !hidden.contains(key) {
                        self.reads.entry(key.to_owned()).or_insert_with(|| Reading {
                            param: name.to_owned(),
                            value: text.split_whitespace().collect::<Vec<_>>().join(" "),
                            file: source.file.to_string(),
                            line: source.text[..at].matches('\n').count() + 1,
                        });
                    }
                });
            }
            hidden.insert(name);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nearest(keys: &[&str]) -> Vec<Near> {
        nearest_families(keys, &Library::default()).expect("the library's files are right")
    }

    /// Every family is the nearest to what it alone knows.
    #[test]
    fn a_config_is_near_to_the_families_that_read_it() {
        let granite = ["embedding_multiplier", "residual_multiplier", "logits_scaling"];
        let keys = ["hidden_size", "num_hidden_layers", "rms_norm_eps"];
        let keys = [&granite[..], &keys].concat();
        let found = nearest(&keys);
        assert_eq!((&*found[0].family, found[0].keys), ("granite", keys.len()));
        assert!(found[0].unread(&keys).is_empty(), "{:?}", found[0].unread(&keys));
        let reading = &found[0].reads["residual_multiplier"];
        assert_eq!(
            (&*reading.param, &*reading.value, &*reading.file),
            ("residual_scale", "residual_multiplier", "models/granite.ron")
        );
        assert!(reading.line > 1);
    }

    /// A block that no layer calls reads nothing, and a parameter of the family's name hides a key.
    #[test]
    fn only_what_is_called_reads() {
        let found = nearest(&["index_topk", "sliding_window"]);
        let of = |name: &str| found.iter().find(|near| near.family == name).expect("is there");
        assert!(of("deepseek_v32").reads.contains_key("index_topk"));
        assert!(of("llama").reads.is_empty(), "{:?}", of("llama").reads);
        assert!(of("mistral").reads.contains_key("sliding_window"));
    }

    #[test]
    fn keys_that_change_no_numbers_are_left_aside() {
        let keys = ["attention_dropout", "bos_token_id", "dtype", "my_new_key"];
        let found = nearest(&keys);
        assert_eq!((found[0].keys, found[0].unread(&keys)), (1, vec!["my_new_key"]));
    }
}
