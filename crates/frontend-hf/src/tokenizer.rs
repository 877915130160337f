//! Text to token ids and back, over `tokenizer.json`, or a GGUF file's metadata.

pub(crate) mod gguf;
mod inside;
mod least;
mod spelling;

use std::panic::catch_unwind;
use std::sync::{Arc, OnceLock};

use serde::de::IgnoredAny;
use serde_json::Value;

use crate::gguf::GgufError;
use crate::safetensors::shown;
use crate::source::{ModelFiles, SourceError};
use crate::spec::Library;
pub use gguf::metadata as gguf_metadata;
use least::Least;
use spelling::{byte_token, gpt2_bytes};

const FILE: &str = "tokenizer.json";

/// A tokenizer could not be read or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum TokenizerError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{place}: holds no {FILE}{hint}")]
    Absent { place: String, hint: &'static str },
    #[error("{file}: {error}")]
    Gguf { file: String, error: GgufError },
    #[error("{file}: {message}")]
    Invalid { file: String, message: String },
    #[error("the tokenizer could not encode the text: {message}")]
    Encode { message: String },
    /// Told before the text was encoded to its end.
    #[error("the text has more than {limit} tokens")]
    TooLong { limit: usize },
    #[error("the tokenizer could not decode the tokens: {message}")]
    Decode { message: String },
}

/// Special tokens by role (`bos_token`, `eos_token`, `pad_token`, …), as `tokenizer_config.json` and
/// the older `special_tokens_map.json` name them.
#[derive(Clone, Debug, Default)]
pub struct SpecialTokens(Vec<(String, String)>);

impl SpecialTokens {
    /// Reads both files; either may be absent. The first to name a role wins.
    pub fn open(files: &ModelFiles) -> Result<SpecialTokens, TokenizerError> {
        let mut roles = SpecialTokens::default();
        for file in ["tokenizer_config.json", "special_tokens_map.json"] {
            if let Some(json) = files.read(file)? {
                let value = serde_json::from_slice(&json).map_err(|error| {
                    TokenizerError::Invalid { file: file.into(), message: error.to_string() }
                })?;
                roles.add(&value);
            }
        }
        Ok(roles)
    }

    /// Takes every `*_token` of `object` that is a string or an object with `content`.
    fn add(&mut self, object: &Value) {
        for (role, value) in object.as_object().into_iter().flatten() {
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            if let Some(text) =
                text.filter(|_| role.ends_with("_token") && self.get(role).is_none())
            {
                self.0.push((role.clone(), text.into()));
            }
        }
    }

    /// The token of a role, such as `eos_token`.
    pub fn get(&self, role: &str) -> Option<&str> {
        self.0.iter().find(|(r, _)| r == role).map(|(_, text)| text.as_str())
    }

    /// All `(role, token)` pairs.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(role, text)| (role.as_str(), text.as_str()))
    }
}

impl FromIterator<(String, String)> for SpecialTokens {
    /// Takes `(role, token)` pairs, each role once.
    fn from_iter<I: IntoIterator<Item = (String, String)>>(pairs: I) -> SpecialTokens {
        SpecialTokens(pairs.into_iter().collect())
    }
}

/// A tokenizer. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    special: Arc<SpecialTokens>,
    least: Arc<OnceLock<Option<Least>>>,
}

/// Bytes of a token, roughly, beyond which a text is not encoded in one go without a look at it.
const TOKEN_BYTES: usize = 8;
/// Bytes that are encoded at a time, to see how many tokens there may be.
const PIECE: usize = 16 << 10;

impl Tokenizer {
    /// Reads `tokenizer.json`, and the special tokens' roles from the files beside it; of a GGUF file its metadata.
    pub fn open(files: &ModelFiles) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::open_with(files, &Library::default())
    }

    /// The same with data files of a user's own, which may know more ways to split texts.
    pub fn open_with(files: &ModelFiles, library: &Library) -> Result<Tokenizer, TokenizerError> {
        if let Some(name) = files.gguf() {
            let (json, special) = gguf::read(files, name, library)?;
            let named = |error| match error {
                TokenizerError::Invalid { message, .. } => {
                    TokenizerError::Invalid { file: files.name().to_owned(), message }
                }
                other => other,
            };
            let tokenizer = Tokenizer::from_bytes(&json).map_err(named)?;
            return Ok(Tokenizer { special: Arc::new(special), ..tokenizer });
        }
        let Some(json) = files.read(FILE)? else {
            let hint = match files.read("tokenizer.model")? {
                Some(_) => {
                    "; it has a SentencePiece tokenizer.model: open it once with transformers and \
                     call save_pretrained, which writes a tokenizer.json"
                }
                None => "; download it beside config.json",
            };
            return Err(TokenizerError::Absent { place: files.name().into(), hint });
        };
        let mut tokenizer = Tokenizer::from_bytes(&json)?;
        tokenizer.special = Arc::new(SpecialTokens::open(files)?);
        Ok(tokenizer)
    }

    /// Reads a tokenizer from the text of a `tokenizer.json`.
    pub fn from_bytes(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let invalid = |message| TokenizerError::Invalid { file: FILE.into(), message };
        // The library panics on some malformed files, a truncated one among them. Syntax is checked
        // first, since its errors have a line; the rest is caught.
        serde_json::from_slice::<IgnoredAny>(json).map_err(|e| invalid(e.to_string()))?;
        let mut inner = catch_unwind(|| tokenizers::Tokenizer::from_bytes(json))
            .map_err(|_| invalid("is not a tokenizer this program can read".into()))?
            .map_err(|e| invalid(shown(&e.to_string())))?;
        // Some files were saved with the settings of a training run; a prompt must not be cut.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| invalid(e.to_string()))?;
        Ok(Tokenizer { inner: Arc::new(inner), special: Arc::default(), least: Arc::default() })
    }

    /// As a `tokenizer.json` says it, wherever it comes from: of the same tokenizer always the same.
    pub fn json(&self) -> Result<String, TokenizerError> {
        self.inner.to_string(false).map_err(|error| TokenizerError::Invalid {
            file: FILE.into(),
            message: error.to_string(),
        })
    }

    /// Token ids of `text`. `add_special` adds what the tokenizer puts around a text (most often a
    /// begin token); leave it off for text from a chat template, which writes its own.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        match self.inner.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TokenizerError::Encode { message: error.to_string() }),
        }
    }

    /// Token ids of two texts, with what the tokenizer puts around a pair; and where those of the second text begin, if the
    /// tokenizer tells.
    pub fn encode_pair(
        &self,
        first: &str,
        second: &str,
    ) -> Result<(Vec<u32>, Option<usize>), TokenizerError> {
        match self.inner.encode_fast((first, second), true) {
            Ok(encoding) => {
                let begins = encoding.get_type_ids().iter().position(|id| *id > 0);
                Ok((encoding.get_ids().to_vec(), begins))
            }
            Err(error) => Err(TokenizerError::Encode { message: error.to_string() }),
        }
    }

    /// As [`Tokenizer::encode`], for a text of any size from a stranger: one that has more than
    /// `limit` tokens is refused without being encoded as a whole where that is certain. What is
    /// given back can have more than `limit` tokens yet; the work is bounded, not the result.
    pub fn encode_within(
        &self,
        text: &str,
        add_special: bool,
        limit: usize,
    ) -> Result<Vec<u32>, TokenizerError> {
        if self.surely_longer(text, limit)? {
            return Err(TokenizerError::TooLong { limit });
        }
        self.encode(text, add_special)
    }

    /// Whether a text certainly has more than `limit` tokens; takes no longer than a text of a few
    /// times that many tokens does.
    pub fn surely_longer(&self, text: &str, limit: usize) -> Result<bool, TokenizerError> {
        if text.len() <= limit {
            return Ok(false);
        }
        let least = self.least.get_or_init(|| Least::new(&self.inner));
        if least.as_ref().is_some_and(|least| least.tokens(text) > limit) {
            return Ok(true);
        }
        if text.len() <= limit.saturating_mul(TOKEN_BYTES) {
            return Ok(false);
        }
        // Where a text is cut, a piece may have a few tokens more than its part of the whole has.
        // Twice the limit is far beyond that; what lies between is encoded, and counted exactly.
        let (mut rest, mut tokens) = (text, 0usize);
        while !rest.is_empty() {
            let end = (rest.len().min(PIECE)..rest.len()).find(|n| rest.is_char_boundary(*n));
            let (piece, more) = rest.split_at(end.unwrap_or(rest.len()));
            tokens += self.encode(piece, false)?.len();
            if tokens > limit.saturating_mul(2) {
                return Ok(true);
            }
            rest = more;
        }
        Ok(false)
    }

    /// Text of `ids`. Ids outside the vocabulary are left out, and so are special tokens where
    /// `skip_special` says so.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| TokenizerError::Decode { message: error.to_string() })
    }

    /// A decoder for ids that arrive one by one.
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream {
            tokenizer: self.clone(),
            skip_special,
            window: Vec::new(),
            context: 0,
            done: 0,
        }
    }

    /// The id of a token, spelt as in the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id, spelt as in the vocabulary.
    pub fn token_of(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes of a token by itself, whatever stands around it; `None` for ids outside the
    /// vocabulary.
    pub fn bytes_of(&self, id: u32) -> Option<Vec<u8>> {
        let spelt = self.token_of(id)?;
        if let Some(byte) = byte_token(&spelt) {
            return Some(vec![byte]);
        }
        // A vocabulary that writes bytes as GPT-2 does has a token for each.
        let byte_level = self.id_of("Ġ").is_some() && self.id_of("Ċ").is_some();
        let bytes = byte_level.then(|| gpt2_bytes(&spelt)).flatten();
        Some(bytes.unwrap_or_else(|| spelt.replace('▁', " ").into_bytes()))
    }

    /// One more than the largest id, that of an added token included.
    pub fn ids(&self) -> usize {
        let largest = self.inner.get_vocab(true).into_values().max();
        largest.map_or(0, |id| id as usize + 1)
    }

    /// Whether a token stands for no text, such as `<|im_end|>`.
    pub fn is_special(&self, id: u32) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// Number of tokens, added ones included. A model's vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The special tokens' roles.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// The token that ends a text.
    pub fn eos_id(&self) -> Option<u32> {
        self.id_of(self.special.get("eos_token")?)
    }

    /// The token that begins a text.
    pub fn bos_id(&self) -> Option<u32> {
        self.id_of(self.special.get("bos_token")?)
    }

    /// True when [`Tokenizer::decode`] passes over `id`.
    fn skips(&self, id: u32, skip_special: bool) -> bool {
        match self.inner.id_to_token(id) {
            Some(token) => {
                skip_special && self.inner.get_added_vocabulary().is_special_token(&token)
            }
            None => true,
        }
    }
}

/// Decodes ids one by one into whole characters.
///
/// A token can end inside a character, and decoders treat the first token of a text apart (they
/// drop its leading space). So a short window of tokens is decoded anew each time: its first part,
/// the context, was yielded before and makes the rest no longer the first; what the window's text
/// has beyond what was yielded is new. Text that may still change is held back: a trailing
/// replacement character (an unfinished character looks like one), and all of a run of byte
/// tokens (`<0xE2>`), which is judged valid or not as a whole.
///
/// A run of tokens that are no characters would make the window grow for ever, and each token cost
/// as much as all before it. So the start of a long window is dropped: UTF-8 finds its way again
/// after the three bytes that can follow a cut, and the tokens that are kept have more.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    window: Vec<u32>,
    /// Tokens of `window` that are context.
    context: usize,
    /// Bytes of `window`'s text that were yielded.
    done: usize,
}

impl TextStream {
    /// Takes the next id and returns the text that is now certain, often empty.
    ///
    /// All pieces and [`TextStream::flush`] together equal [`Tokenizer::decode`] of all ids.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let Some(token) = self.tokenizer.token_of(id) else { return Ok(String::new()) };
        if self.tokenizer.skips(id, self.skip_special) {
            return Ok(String::new());
        }
        self.window.push(id);
        if byte_token(&token).is_some() {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.window, false)?;
        let certain = text.strip_suffix('\u{FFFD}').unwrap_or(&text);
        let new = certain.get(self.done..).unwrap_or_default().to_owned();
        if certain.len() < text.len() || new.is_empty() {
            self.done = self.done.max(certain.len());
            if self.window.len() >= LONGEST {
                self.shorten(text.len() - certain.len())?;
            }
            return Ok(new);
        }
        // Everything is certain: what is new becomes the context of what follows.
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.done = self.tokenizer.decode(&self.window, false)?.len();
        Ok(new)
    }

    /// Drops the start of a window whose last `unsure` bytes of text are held back.
    fn shorten(&mut self, unsure: usize) -> Result<(), TokenizerError> {
        if unsure == 0 {
            self.window.pop(); // it has no text
            return Ok(());
        }
        self.window.drain(..self.window.len() - KEPT);
        self.context = 0;
        self.done = self.tokenizer.decode(&self.window, false)?.len().saturating_sub(unsure);
        Ok(())
    }

    /// Ends the text: yields what was held back, and makes the stream ready for another.
    pub fn flush(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window, false)?;
        let rest = text.get(self.done..).unwrap_or_default().to_owned();
        self.window.clear();
        (self.context, self.done) = (0, 0);
        Ok(rest)
    }
}

/// Tokens of a window after which its start is dropped, and those that are kept then.
const LONGEST: usize = 32;
const KEPT: usize = 8;

#[cfg(test)]
mod tests;
