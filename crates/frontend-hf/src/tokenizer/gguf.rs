//! Tokenizers of GGUF files: metadata as the `tokenizer.json` that would say the same.

mod write;

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::{SpecialTokens, TokenizerError};
use crate::gguf::{Gguf, GgufError, List, Value};
use crate::safetensors::shown;
use crate::source::ModelFiles;
use crate::spec::{Entries, Library, read_ron};
pub use write::metadata;

/// Where the table of patterns is, in `models/`.
pub(crate) const TABLE: &str = "gguf/tokenizers.ron";

const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
/// What stands for a space where pieces have scores.
const SPACE: &str = "▁";
/// Tokens by their roles, as files call these, and as `tokenizer_config.json` does.
const ROLES: [(&str, &str); 8] = [
    ("bos", "bos_token"),
    ("eos", "eos_token"),
    ("unknown", "unk_token"),
    ("padding", "pad_token"),
    ("seperator", "sep_token"),
    ("mask", "mask_token"),
    ("eot", "eot_token"),
    ("eom", "eom_token"),
];
/// Longer pieces are not taken apart into what they may be merged of: that work grows with the square of their length.
const MAX_PIECE: usize = 256;

/// How texts are split before tokens are merged, by the names that files have for it.
#[derive(Debug, Deserialize)]
#[serde(rename = "Tokenizers", deny_unknown_fields)]
struct Table<'a> {
    #[allow(dead_code, reason = "for readers of the file")]
    doc: &'a str,
    #[serde(borrow)]
    patterns: Entries<'a, Vec<&'a str>>,
    names: Vec<Named<'a>>,
    ends: Vec<&'a str>,
}

/// What stands under some values of `tokenizer.ggml.pre`.
#[derive(Debug, Deserialize)]
#[serde(rename = "named", deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
struct Named<'a> {
    #[serde(borrow)]
    names: Vec<&'a str>,
    pattern: &'a str,
    #[serde(default)]
    nfc: bool,
    #[serde(default)]
    whole: bool,
    #[serde(default)]
    begin: bool,
    #[serde(default = "yes")]
    bytes: bool,
}

fn yes() -> bool {
    true
}

/// Types of tokens (`llama_token_type` of llama.h).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn of(number: i128) -> Kind {
        match number {
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        }
    }

    fn number(self) -> i32 {
        match self {
            Kind::Normal => 1,
            Kind::Unknown => 2,
            Kind::Control => 3,
            Kind::UserDefined => 4,
            Kind::Unused => 5,
            Kind::Byte => 6,
        }
    }
}

/// The vocabulary of a file, and what its metadata says besides.
struct Vocabulary<'a> {
    file: &'a str,
    gguf: &'a Gguf,
    bytes: &'a [u8],
    tokens: Vec<&'a str>,
    kinds: Vec<Kind>,
}

impl<'a> Vocabulary<'a> {
    fn read(
        file: &'a str,
        gguf: &'a Gguf,
        bytes: &'a [u8],
    ) -> Result<Vocabulary<'a>, TokenizerError> {
        let fault = |error| TokenizerError::Gguf { file: file.to_owned(), error };
        let list = |key: &str| gguf.list(bytes, key).map_err(fault);
        let missing = || fault(GgufError::MissingKey { key: TOKENS.to_owned() });
        let tokens = list(TOKENS)?.ok_or_else(missing)?;
        let text = |value| match value {
            Value::Text(text) => Ok(text),
            other => Err(wrong(TOKENS, "texts", other)),
        };
        let tokens: Vec<&str> = tokens.iter().map(text).collect::<Result<_, _>>().map_err(fault)?;
        if u32::try_from(tokens.len()).is_err() {
            return Err(fault(wrong(TOKENS, "fewer than 2^32 texts", Value::Whole(0))));
        }
        let kinds = match list(KINDS)? {
            None => vec![Kind::Normal; tokens.len()],
            Some(list) => {
                same_length(KINDS, list, tokens.len()).map_err(fault)?;
                let kind = |value| match value {
                    Value::Whole(n) => Ok(Kind::of(n)),
                    other => Err(wrong(KINDS, "whole numbers", other)),
                };
                list.iter().map(kind).collect::<Result<_, _>>().map_err(fault)?
            }
        };
        Ok(Vocabulary { file, gguf, bytes, tokens, kinds })
    }

    fn invalid(&self, message: String) -> TokenizerError {
        TokenizerError::Invalid { file: self.file.to_owned(), message }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, TokenizerError> {
        let flag = self.gguf.flag(self.bytes, &format!("tokenizer.ggml.{key}"));
        flag.map_err(|error| TokenizerError::Gguf { file: self.file.to_owned(), error })
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, TokenizerError> {
        let text = self.gguf.text(self.bytes, key);
        text.map_err(|error| TokenizerError::Gguf { file: self.file.to_owned(), error })
    }

    /// The token of a role, such as `bos`; `None` where the file names none. A number that is no token's is none, too:
    /// files say so with the largest there is.
    fn role(&self, role: &str) -> Option<(u32, &'a str)> {
        let id = self.gguf.whole(self.bytes, &format!("tokenizer.ggml.{role}_token_id")).ok()??;
        let text = self.tokens.get(usize::try_from(id).ok()?)?;
        Some((id as u32, text))
    }

    /// All roles that the file names, as `tokenizer_config.json` calls them.
    fn special(&self) -> SpecialTokens {
        let named =
            |(key, name): (&str, &str)| Some((name.to_owned(), self.role(key)?.1.to_owned()));
        ROLES.into_iter().filter_map(named).collect()
    }

    /// The tokens that are found in texts before anything else.
    fn added(&self) -> Json {
        let all = self.tokens.iter().zip(&self.kinds).enumerate();
        let added = all.filter(|(_, (text, kind))| {
            let found = matches!(kind, Kind::Control | Kind::UserDefined | Kind::Unknown);
            found && !text.is_empty()
        });
        let entry = |(id, (text, kind)): (usize, (&&str, &Kind))| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind != Kind::UserDefined,
            })
        };
        added.map(entry).collect()
    }

    /// Tokens with their numbers: of two of one text the first counts.
    fn numbers(&self) -> HashMap<&'a str, u32> {
        let all = self.tokens.iter().enumerate().rev();
        all.map(|(id, text)| (*text, id as u32)).collect()
    }

    /// What is put around a text; `begins` is whether one begins with the begin token where the file does not say.
    fn template(&self, begins: bool) -> Result<Json, TokenizerError> {
        let begin = self.role("bos");
        let begin = if self.flag("add_bos_token")?.unwrap_or(begins) { begin } else { None };
        let end = self.role("eos");
        let end = if self.flag("add_eos_token")?.unwrap_or(false) { end } else { None };
        if begin.is_none() && end.is_none() {
            return Ok(Json::Null);
        }
        let token = |t: Option<(u32, &str)>| {
            t.map(|(_, text)| json!({ "SpecialToken": { "id": text, "type_id": 0 } }))
        };
        let around = |sequence: &str| -> Vec<Json> {
            let own = json!({ "Sequence": { "id": sequence, "type_id": 0 } });
            [token(begin), Some(own), token(end)].into_iter().flatten().collect()
        };
        let (single, pair) = (around("A"), [around("A"), around("B")].concat());
        let tokens = [begin, end].into_iter().flatten();
        let special: serde_json::Map<String, Json> = tokens
            .map(|(id, text)| {
                (text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }))
            })
            .collect();
        Ok(
            json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special }),
        )
    }

    /// A tokenizer of the library: `parts` are its normalizer, its splits, its decoder.
    fn assemble(
        &self,
        model: &Json,
        begins: bool,
        parts: [Json; 3],
    ) -> Result<Json, TokenizerError> {
        let [normalizer, pre_tokenizer, decoder] = parts;
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": self.template(begins)?, "decoder": decoder, "model": model,
        }))
    }

    /// Merges of bytes or characters, as files list them (`gpt2`).
    fn merged(&self, table: &Table<'_>) -> Result<Json, TokenizerError> {
        const MERGES: &str = "tokenizer.ggml.merges";
        let name = self.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let Some(named) = table.names.iter().find(|n| n.names.contains(&name)) else {
            let known: Vec<&str> =
                table.names.iter().flat_map(|n| n.names.iter().copied()).collect();
            return Err(self.invalid(format!(
                "`tokenizer.ggml.pre` is `{}`, which is not in models/{TABLE} (which has {}); add it there, in a \
                 folder given with --data",
                shown(name), known.join(", ")
            )));
        };
        let Some(patterns) = table.patterns.get(named.pattern) else {
            return Err(self.invalid(format!("models/{TABLE} has no pattern `{}`", named.pattern)));
        };
        let fault = |error| TokenizerError::Gguf { file: self.file.to_owned(), error };
        let list = self.gguf.list(self.bytes, MERGES).map_err(fault)?;
        let list = list.ok_or_else(|| fault(GgufError::MissingKey { key: MERGES.to_owned() }))?;
        let numbers = self.numbers();
        let mut merges = Vec::with_capacity(list.len());
        for value in list.iter() {
            let Value::Text(text) = value else {
                return Err(fault(wrong(MERGES, "texts", value)));
            };
            // The first space that is not the first character: a token may be or begin with one.
            let at = text.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
            let pair = at.map(|at| (&text[..at], &text[at + 1..]));
            let whole = |(a, b): &(&str, &str)| {
                let both = format!("{a}{b}");
                [a, b, both.as_str()].into_iter().all(|t| numbers.contains_key(t))
            };
            let Some((a, b)) = pair.filter(whole) else {
                return Err(self.invalid(format!(
                    "`{MERGES}`: expected two tokens whose texts together are a third, found `{}`",
                    shown(text)
                )));
            };
            merges.push(json!([a, b]));
        }
        let spaces = !named.bytes;
        let model = json!({
            "type": "BPE", "vocab": numbers, "merges": merges, "ignore_merges": named.whole,
            "byte_fallback": spaces, "fuse_unk": spaces,
            "unk_token": self.role("unknown").filter(|_| spaces).map(|(_, text)| text),
        });
        let mut splits: Vec<Json> = patterns
            .iter()
            .map(|p| json!({ "type": "Split", "pattern": { "Regex": p }, "behavior": "Isolated", "invert": false }))
            .collect();
        let prefix = self.flag("add_space_prefix")?.unwrap_or(false);
        let parts = if named.bytes {
            let bytes = |prefix: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": false });
            splits.push(bytes(false));
            let nfc = named.nfc.then(|| json!({ "type": "NFC" }));
            let prepend = prefix.then(|| json!({ "type": "Prepend", "prepend": " " }));
            let normalizers: Vec<Json> = nfc.into_iter().chain(prepend).collect();
            let normalizer = json!({ "type": "Sequence", "normalizers": normalizers });
            let normalizer = if normalizers.is_empty() { Json::Null } else { normalizer };
            [normalizer, json!({ "type": "Sequence", "pretokenizers": splits }), bytes(true)]
        } else {
            let pre = json!({ "type": "Sequence", "pretokenizers": splits });
            [spaced(prefix), pre, unspaced(prefix)]
        };
        self.assemble(&model, named.begin, parts)
    }

    /// Merges of pieces in the order of their scores, as SentencePiece's BPE has them (`llama`).
    fn scored(&self) -> Result<Json, TokenizerError> {
        const SCORES: &str = "tokenizer.ggml.scores";
        let fault = |error| TokenizerError::Gguf { file: self.file.to_owned(), error };
        let list = self.gguf.list(self.bytes, SCORES).map_err(fault)?;
        let list = list.ok_or_else(|| fault(GgufError::MissingKey { key: SCORES.to_owned() }))?;
        same_length(SCORES, list, self.tokens.len()).map_err(fault)?;
        let score = |value| match value {
            Value::Real(score) if !score.is_nan() => Ok(score),
            other => Err(wrong(SCORES, "numbers", other)),
        };
        let scores: Vec<f64> = list.iter().map(score).collect::<Result<_, _>>().map_err(fault)?;
        let numbers = self.numbers();
        let mut merges = Vec::new();
        for ((piece, kind), score) in self.tokens.iter().zip(&self.kinds).zip(scores) {
            if *kind != Kind::Normal || piece.len() > MAX_PIECE {
                continue;
            }
            let first = merges.len();
            for (chars, (at, _)) in piece.char_indices().enumerate().skip(1) {
                let (a, b) = piece.split_at(at);
                if let (Some(x), Some(y)) = (numbers.get(a), numbers.get(b)) {
                    let rest = b.chars().count();
                    merges.push((score, chars, rest, (*x, *y), (a, b)));
                }
            }
            merges[first..].sort_by_key(|m| m.3);
        }
        // The best first; among equals, as transformers converts these, the longest beginnings.
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (b.1, b.2).cmp(&(a.1, a.2))));
        let merges: Vec<Json> = merges.into_iter().map(|m| json!([m.4.0, m.4.1])).collect();
        let unknown = self.kinds.iter().position(|k| *k == Kind::Unknown);
        let unknown =
            self.role("unknown").map(|(_, text)| text).or(unknown.map(|i| self.tokens[i]));
        let model = json!({
            "type": "BPE", "vocab": numbers, "merges": merges, "unk_token": unknown,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
        });
        let prefix = self.flag("add_space_prefix")?.unwrap_or(true);
        self.assemble(&model, true, [spaced(prefix), Json::Null, unspaced(prefix)])
    }
}

/// `▁` for spaces, and with `prefix` one before each text.
fn spaced(prefix: bool) -> Json {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    if !prefix {
        return replace;
    }
    json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": SPACE }, replace] })
}

/// The other way round.
fn unspaced(prefix: bool) -> Json {
    let mut parts = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        parts.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": parts })
}

fn wrong(key: &str, expected: &'static str, found: Value<'_>) -> GgufError {
    GgufError::Value { key: key.to_owned(), expected, found: found.kind().to_owned() }
}

fn same_length(key: &str, list: List<'_>, tokens: usize) -> Result<(), GgufError> {
    if list.len() == tokens {
        return Ok(());
    }
    let found = format!("{} values for {tokens} tokens", list.len());
    Err(GgufError::Value { key: key.to_owned(), expected: "a value for each token", found })
}

/// The `tokenizer.json` that a GGUF file stands for, and its tokens' roles.
pub(super) fn read(
    files: &ModelFiles,
    name: &str,
    library: &Library,
) -> Result<(Vec<u8>, SpecialTokens), TokenizerError> {
    let file = files.name();
    let bytes = files
        .read(name)?
        .ok_or_else(|| TokenizerError::Absent { place: file.to_owned(), hint: "" })?;
    let gguf = Gguf::parse(&bytes);
    let gguf = gguf.map_err(|error| TokenizerError::Gguf { file: file.to_owned(), error })?;
    let vocabulary = Vocabulary::read(file, &gguf, &bytes)?;
    let source = library.file(TABLE).map_err(|e| vocabulary.invalid(e.to_string()))?;
    let table: Table<'_> = read_ron(&source).map_err(|e| vocabulary.invalid(e.to_string()))?;
    let json = match vocabulary.text("tokenizer.ggml.model")? {
        Some("llama") => vocabulary.scored()?,
        Some("gpt2" | "gemma4") => vocabulary.merged(&table)?,
        other => {
            return Err(vocabulary.invalid(format!(
                "`tokenizer.ggml.model` is `{}`: expected `llama` or `gpt2`",
                shown(other.unwrap_or("nothing"))
            )));
        }
    };
    Ok((serde_json::to_vec(&json).unwrap_or_default(), vocabulary.special()))
}

/// The tokens that end texts by their names, of a file that may have no tokenizer.
pub(crate) fn ends(file: &str, gguf: &Gguf, bytes: &[u8], library: &Library) -> Vec<u32> {
    let Ok(vocabulary) = Vocabulary::read(file, gguf, bytes) else { return Vec::new() };
    let Ok(source) = library.file(TABLE) else { return Vec::new() };
    let Ok(table) = read_ron::<Table<'_>>(&source) else { return Vec::new() };
    let all = vocabulary.tokens.iter().zip(&vocabulary.kinds).zip(0u32..);
    let is_end = |text: &str, kind: Kind| kind == Kind::Control && table.ends.contains(&text);
    all.filter(|((text, kind), _)| is_end(text, **kind)).map(|(_, id)| id).collect()
}

/// The chat templates of a file, by their names.
pub(crate) fn templates(
    files: &ModelFiles,
    name: &str,
) -> Result<(Vec<(String, String)>, SpecialTokens), TokenizerError> {
    const TEMPLATE: &str = "tokenizer.chat_template";
    let fault = |error| TokenizerError::Gguf { file: files.name().to_owned(), error };
    let Some(bytes) = files.read(name)? else { return Ok(Default::default()) };
    let gguf = Gguf::parse(&bytes).map_err(fault)?;
    let mut found = Vec::new();
    for (key, value) in gguf.entries(&bytes) {
        let name = match key.strip_prefix(TEMPLATE) {
            Some("") => "default",
            Some(rest) => match rest.strip_prefix('.') {
                Some(name) => name,
                None => continue,
            },
            None => continue,
        };
        let Value::Text(text) = value else { return Err(fault(wrong(TEMPLATE, "text", value))) };
        found.push((name.to_owned(), text.to_owned()));
    }
    let special = Vocabulary::read(files.name(), &gguf, &bytes).map(|v| v.special());
    Ok((found, special.unwrap_or_default()))
}

#[cfg(test)]
mod tests;
