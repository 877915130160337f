//! A `tokenizer.json` as the metadata that GGUF files have for it: what [`super::read`] reads, the other way round. What a
//! file cannot say is an error, never another tokenizer.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::{Kind, Named, ROLES, SPACE, TABLE, Table};
use crate::gguf::{Datum, Metadata};
use crate::safetensors::shown;
use crate::source::ModelFiles;
use crate::spec::{Library, read_ron};
use crate::tokenizer::{FILE, SpecialTokens, Tokenizer, TokenizerError};

/// How many rows of an embedding may have no token: each takes a text in the file.
const MAX_UNUSED: u64 = 1 << 20;

/// The metadata of a model's tokenizer, for an embedding of so many rows; `roles` are ids that are known already, by keys.
/// Nothing but that there is none, where the model has no tokenizer.
pub fn metadata(
    files: &ModelFiles,
    library: &Library,
    rows: u64,
    roles: &[(String, Datum)],
) -> Result<Metadata, TokenizerError> {
    let tokenizer = match Tokenizer::open_with(files, library) {
        Err(TokenizerError::Absent { .. }) => {
            return Ok(vec![entry("model", Datum::Text("none".to_owned()))]);
        }
        tokenizer => tokenizer?,
    };
    let json: Json =
        serde_json::from_str(&tokenizer.json()?).map_err(|e| refused(&e.to_string()))?;
    let source = library.file(TABLE).map_err(|e| refused(&e.to_string()))?;
    let table: Table<'_> = read_ron(&source).map_err(|e| refused(&e.to_string()))?;
    let writer = Writer::new(&json, &tokenizer.special, &table)?;
    writer.write(rows, roles)
}

fn entry(key: &str, value: Datum) -> (String, Datum) {
    (format!("tokenizer.ggml.{key}"), value)
}

fn refused(what: &str) -> TokenizerError {
    let message = format!("{what}, which GGUF files cannot say: no file is written");
    TokenizerError::Invalid { file: FILE.to_owned(), message }
}

struct Writer<'a> {
    json: &'a Json,
    model: &'a Json,
    special: &'a SpecialTokens,
    table: &'a Table<'a>,
    /// Tokens by their texts; those that were added, too.
    ids: HashMap<&'a str, u32>,
    merges: Vec<(&'a str, &'a str)>,
}

/// How texts are split and merged.
struct Way {
    /// Pieces have scores (`llama`), or merges are listed (`gpt2`).
    scored: bool,
    /// What splits are called.
    name: Option<String>,
    /// Whether a space is put before a text.
    prefix: bool,
}

impl<'a> Writer<'a> {
    fn new(
        json: &'a Json,
        special: &'a SpecialTokens,
        table: &'a Table<'a>,
    ) -> Result<Writer<'a>, TokenizerError> {
        let model = &json["model"];
        match model["type"].as_str() {
            Some("BPE") => {}
            other => return Err(refused(&format!("the model is {}", shown(other.unwrap_or("?"))))),
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[key].as_str().is_some_and(|text| !text.is_empty()) {
                return Err(refused(&format!("`{key}` is {}", model[key])));
            }
        }
        let mut ids = HashMap::new();
        for (text, id) in model["vocab"].as_object().into_iter().flatten() {
            ids.insert(text.as_str(), id.as_u64().unwrap_or_default() as u32);
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let (Some(text), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) else {
                continue;
            };
            ids.insert(text, id as u32);
            for flag in ["single_word", "lstrip", "rstrip"] {
                if token[flag] == true {
                    return Err(refused(&format!("the token `{}` has `{flag}`", shown(text))));
                }
            }
        }
        let pair = |merge: &'a Json| match merge {
            Json::String(text) => text.split_once(' '),
            Json::Array(two) => Some((two.first()?.as_str()?, two.get(1)?.as_str()?)),
            _ => None,
        };
        let merges = model["merges"].as_array().into_iter().flatten().map(pair);
        let merges: Option<Vec<_>> = merges.collect();
        let merges = merges.ok_or_else(|| refused("`merges` are no pairs"))?;
        Ok(Writer { json, model, special, table, ids, merges })
    }

    fn write(&self, rows: u64, roles: &[(String, Datum)]) -> Result<Metadata, TokenizerError> {
        let way = self.way()?;
        let (begin, end) = self.around()?;
        let (texts, kinds) = self.tokens(rows, way.scored)?;
        let text = |s: &str| Datum::Text(s.to_owned());
        let mut all = vec![entry("model", text(if way.scored { "llama" } else { "gpt2" }))];
        all.extend(way.name.as_deref().map(|name| entry("pre", text(name))));
        if way.scored {
            all.push(entry("scores", Datum::F32s(self.scores(&texts)?)));
        } else {
            all.push(entry("merges", Datum::Texts(self.listed()?)));
        }
        all.push(entry("token_type", Datum::I32s(kinds)));
        all.push(entry("tokens", Datum::Texts(texts)));
        all.push(entry("add_bos_token", Datum::Bool(begin.is_some())));
        all.push(entry("add_eos_token", Datum::Bool(end.is_some())));
        all.push(entry("add_space_prefix", Datum::Bool(way.prefix)));
        for (role, name) in ROLES {
            let key = format!("{role}_token_id");
            let known = roles.iter().find(|(k, _)| *k == format!("tokenizer.ggml.{key}"));
            let around = if role == "bos" { begin } else { None };
            let around = if role == "eos" { end } else { around };
            let own = around.or_else(|| self.ids.get(self.special.get(name)?).copied());
            match (known, around) {
                (Some((_, known)), Some(id)) if *known != Datum::U32(id) => {
                    let what = format!("texts end with token {id}, and generation with another");
                    return Err(refused(&what));
                }
                (Some(_), _) => {}
                (None, _) => all.extend(own.map(|id| entry(&key, Datum::U32(id)))),
            }
        }
        Ok(all)
    }

    /// How its texts are split and merged, by what the reader of these files knows.
    fn way(&self) -> Result<Way, TokenizerError> {
        let normalizers = flat(&self.json["normalizer"], "normalizers");
        let splits = flat(&self.json["pre_tokenizer"], "pretokenizers");
        let flag = |key: &str| self.model[key] == true;
        if splits.iter().any(|s| s["type"] == "ByteLevel") {
            let (name, prefix) = self.bytes(&normalizers, &splits)?;
            return Ok(Way { scored: false, name: Some(name), prefix });
        }
        if !flag("byte_fallback") {
            return Err(refused("merges are neither of bytes nor with bytes for what they lack"));
        }
        if flag("ignore_merges") {
            return Err(refused("`ignore_merges` is set"));
        }
        // Spaces are `▁`, here or there.
        let mut prefix = false;
        let mut spaced = false;
        for part in normalizers {
            match part["type"].as_str() {
                Some("Prepend") if part["prepend"] == SPACE && !spaced => prefix = true,
                Some("Replace") if part["pattern"]["String"] == " " && part["content"] == SPACE => {
                    spaced = true;
                }
                _ => return Err(refused(&format!("texts are normalised by {part}"))),
            }
        }
        for part in splits {
            let kind = part["type"].as_str();
            // What is no space any more is not split.
            let idle = kind == Some("Split") && part["pattern"]["String"] == " " && spaced;
            let scheme = part["prepend_scheme"].as_str();
            let whole = kind == Some("Metaspace")
                && part["replacement"] == SPACE
                && part["split"] == false
                && matches!(scheme, Some("always" | "never"));
            if whole {
                (prefix, spaced) = (scheme == Some("always"), true);
            } else if !idle {
                return Err(refused(&format!("texts are split by {part}")));
            }
        }
        if !spaced {
            return Err(refused("spaces do not become `▁`"));
        }
        Ok(Way { scored: true, name: None, prefix })
    }

    /// The name of the way in which texts are split whose bytes are merged, and whether a space is put before them.
    fn bytes(
        &self,
        normalizers: &[&Json],
        splits: &[&Json],
    ) -> Result<(String, bool), TokenizerError> {
        let (mut patterns, mut prefix, mut nfc) = (Vec::new(), false, false);
        for part in normalizers {
            match part["type"].as_str() {
                Some("NFC") => nfc = true,
                Some("Prepend") if part["prepend"] == " " => prefix = true,
                _ => return Err(refused(&format!("texts are normalised by {part}"))),
            }
        }
        let gpt2 = self.table.patterns.get("gpt2").and_then(|p| p.first()).copied();
        for part in splits {
            match part["type"].as_str() {
                Some("Split") if part["behavior"] == "Isolated" && part["invert"] == false => {
                    let pattern = part["pattern"]["Regex"].as_str();
                    let text = || format!("texts are split by {}", part["pattern"]);
                    patterns.push(pattern.ok_or_else(|| refused(&text()))?);
                }
                Some("Digits") if part["individual_digits"] == true => patterns.push(r"\p{N}"),
                Some("ByteLevel") => {
                    prefix |= part["add_prefix_space"] == true;
                    patterns.extend(gpt2.filter(|_| part["use_regex"] == true));
                }
                _ => return Err(refused(&format!("texts are split by {part}"))),
            }
        }
        let whole = self.model["ignore_merges"] == true;
        let fits = |n: &&Named<'_>| {
            let known = self.table.patterns.get(n.pattern);
            let same = known.is_some_and(|known| *known == patterns);
            same && n.bytes && n.nfc == nfc && n.whole == whole
        };
        let name = self.table.names.iter().find(fits).and_then(|n| n.names.first());
        let name = name.ok_or_else(|| {
            refused(&format!(
                "no name of models/{TABLE} stands for texts split by {patterns:?}{}{}",
                if nfc { ", composed (NFC)" } else { "" },
                if whole { ", with `ignore_merges`" } else { "" },
            ))
        })?;
        Ok(((*name).to_owned(), prefix))
    }

    /// The tokens that are put before and after a text.
    fn around(&self) -> Result<(Option<u32>, Option<u32>), TokenizerError> {
        let mut around = (None, None);
        for part in flat(&self.json["post_processor"], "processors") {
            match part["type"].as_str() {
                Some("ByteLevel") => continue,
                Some("TemplateProcessing") => {}
                other => {
                    let what = format!("texts are completed by {}", shown(other.unwrap_or("?")));
                    return Err(refused(&what));
                }
            }
            let mut behind = false;
            for item in part["single"].as_array().into_iter().flatten() {
                let Some(name) = item["SpecialToken"]["id"].as_str() else {
                    behind = true;
                    continue;
                };
                let ids = part["special_tokens"][name]["ids"].as_array();
                let id = match ids.map(Vec::as_slice) {
                    Some([id]) => id.as_u64().map(|id| id as u32),
                    _ => None,
                };
                let place = if behind { &mut around.1 } else { &mut around.0 };
                if id.is_none() || place.replace(id.unwrap_or_default()).is_some() {
                    return Err(refused("several tokens are put before or after a text"));
                }
            }
        }
        Ok(around)
    }

    /// Texts and kinds of tokens, by their numbers; rows without one are called unused.
    fn tokens(&self, rows: u64, scored: bool) -> Result<(Vec<String>, Vec<i32>), TokenizerError> {
        let most = self.ids.values().max().map_or(0, |id| u64::from(*id) + 1);
        if most > rows || rows - most > MAX_UNUSED {
            return Err(refused(&format!("there are {most} tokens for {rows} rows")));
        }
        let mut texts: Vec<Option<&str>> = vec![None; rows as usize];
        for (text, id) in &self.ids {
            if texts[*id as usize].replace(text).is_some() {
                return Err(refused(&format!("token {id} has several texts")));
            }
        }
        let mut kinds = vec![Kind::Normal; rows as usize];
        if scored {
            let is_byte = |t: &str| t.len() == 6 && t.starts_with("<0x") && t.ends_with('>');
            for (text, kind) in texts.iter().zip(&mut kinds) {
                if text.is_some_and(is_byte) {
                    *kind = Kind::Byte;
                }
            }
        }
        for token in self.json["added_tokens"].as_array().into_iter().flatten() {
            let kind = if token["special"] == true { Kind::Control } else { Kind::UserDefined };
            if let Some(place) = token["id"].as_u64().and_then(|id| kinds.get_mut(id as usize)) {
                *place = kind;
            }
        }
        let unknown = self.model["unk_token"].as_str().filter(|_| scored);
        if let Some(id) = unknown.and_then(|text| self.ids.get(text)) {
            kinds[*id as usize] = Kind::Unknown;
        }
        let texts = texts.into_iter().zip(&mut kinds).enumerate().map(|(id, (text, kind))| {
            text.map_or_else(
                || {
                    *kind = Kind::Unused;
                    format!("[PAD{id}]")
                },
                str::to_owned,
            )
        });
        let texts = texts.collect();
        Ok((texts, kinds.into_iter().map(Kind::number).collect()))
    }

    /// Merges as files list them.
    fn listed(&self) -> Result<Vec<String>, TokenizerError> {
        let text = |(a, b): &(&str, &str)| {
            let later = a.chars().skip(1).any(|c| c == ' ');
            let what = || refused(&format!("the merge of `{}` has a space", shown(a)));
            if later { Err(what()) } else { Ok(format!("{a} {b}")) }
        };
        self.merges.iter().map(text).collect()
    }

    /// Scores by which pieces are merged in the order of `merges`: the first that makes a piece counts.
    fn scores(&self, texts: &[String]) -> Result<Vec<f32>, TokenizerError> {
        let mut ranks: HashMap<String, usize> = HashMap::new();
        let mut last = 0;
        for (a, b) in &self.merges {
            let next = ranks.len();
            let rank = *ranks.entry(format!("{a}{b}")).or_insert(next);
            // All that make a piece stand together, or no score says their order.
            if rank < last {
                return Err(refused(&format!(
                    "merges into `{}` are not one after the other",
                    shown(&format!("{a}{b}"))
                )));
            }
            last = rank;
        }
        if ranks.len() >= 1 << f32::MANTISSA_DIGITS {
            return Err(refused("there are more merges than scores"));
        }
        let pairs: std::collections::HashSet<&(&str, &str)> = self.merges.iter().collect();
        for piece in ranks.keys() {
            let splits = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
            let missing = splits.into_iter().find(|(a, b)| {
                let known = self.ids.contains_key(a) && self.ids.contains_key(b);
                known && !pairs.contains(&(*a, *b))
            });
            if let Some((a, b)) = missing {
                return Err(refused(&format!("`{}` and `{}` are not merged", shown(a), shown(b))));
            }
        }
        let none = -(ranks.len() as f32);
        let score = |text: &String| ranks.get(text).map_or(none, |rank| -(*rank as f32));
        Ok(texts.iter().map(score).collect())
    }
}

/// The parts of a sequence, or the one part that it is.
fn flat<'j>(json: &'j Json, key: &str) -> Vec<&'j Json> {
    match json {
        Json::Null => Vec::new(),
        Json::Object(map) if map.get("type").is_some_and(|t| t == "Sequence") => map
            .get(key)
            .and_then(Json::as_array)
            .into_iter()
            .flatten()
            .flat_map(|j| flat(j, key))
            .collect(),
        one => vec![one],
    }
}
