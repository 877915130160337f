//! The fewest tokens that a text can have, found without encoding it.
//!
//! A token of `n` bytes covers `n` bytes of the text. If each byte is given the share `1 / L`, where
//! `L` is the length of the longest token that holds this byte anywhere, the shares of a token's
//! bytes are at most 1 together, so the shares of all bytes are at most the number of tokens. That
//! holds where all of the text ends up in tokens; where a tokenizer drops or rewrites text, the
//! bytes concerned get no share, or nothing is said at all.

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use super::spelling::{byte_token, gpt2_alphabet, gpt2_bytes};

/// 1 as a share.
const ONE: u64 = 1 << 32;

/// Each byte's share of a token.
#[derive(Debug)]
pub(super) struct Least {
    shares: [u64; 256],
    /// Only ASCII that no mark can follow stays as it is.
    ascii_only: bool,
}

/// How much of a text a part of a tokenizer leaves as it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Keeps {
    Nothing,
    /// ASCII before ASCII: Unicode's normal forms change it only where a mark follows.
    Ascii,
    All,
}

impl Least {
    /// `None` where the tokenizer may give a long text few tokens for reasons that are not seen here.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Least> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let has = |token: String| tokenizer.token_to_id(&token).is_some();
        let byte_level = uses_byte_level(&normalizer) || uses_byte_level(&splitter);
        // Otherwise what the vocabulary lacks is dropped, or a whole run of it is one token.
        let complete = if byte_level {
            gpt2_alphabet().all(|c| has(c.to_string()))
        } else {
            falls_back(tokenizer.get_model()) && (0..=255).all(|b| has(format!("<0x{b:02X}>")))
        };
        let keeps = normalized(&normalizer).min(split(&splitter));
        if !complete || keeps == Keeps::Nothing {
            return None;
        }
        let mut longest = [1u64; 256];
        let mut hold = |bytes: &[u8]| {
            for byte in bytes {
                let longest = &mut longest[usize::from(*byte)];
                *longest = (*longest).max(bytes.len() as u64);
            }
        };
        for token in tokenizer.get_vocab(true).into_keys() {
            if byte_token(&token).is_none() {
                hold(token.as_bytes());
                hold(token.replace('▁', " ").as_bytes());
            }
            if let Some(bytes) = gpt2_bytes(&token).filter(|_| byte_level) {
                hold(&bytes);
            }
        }
        let mut shares = longest.map(|n| ONE / n);
        // Added tokens can take the white space beside them along, however much there is.
        let added = tokenizer.get_added_tokens_decoder();
        let strips = added.values().any(|token| token.lstrip || token.rstrip);
        if strips {
            let white = |b: &u8| char::from(*b).is_whitespace();
            (0..128u8).filter(white).for_each(|b| shares[usize::from(b)] = 0);
        }
        Some(Least { shares, ascii_only: strips || keeps == Keeps::Ascii })
    }

    /// The fewest tokens that `text` can have.
    pub(super) fn tokens(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let share = |byte: &u8| self.shares[usize::from(*byte)];
        let all: u64 = if self.ascii_only {
            let next = bytes.iter().skip(1).chain(std::iter::once(&b' '));
            let plain = bytes.iter().zip(next).filter(|(b, next)| b.is_ascii() && next.is_ascii());
            plain.map(|(byte, _)| share(byte)).sum()
        } else {
            bytes.iter().map(share).sum()
        };
        all.div_ceil(ONE) as usize
    }
}

fn falls_back(model: &ModelWrapper) -> bool {
    match model {
        ModelWrapper::BPE(model) => model.byte_fallback,
        ModelWrapper::Unigram(model) => model.byte_fallback(),
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
    }
}

/// The parts of a sequence, or the one part there is.
fn parts<'a>(part: &'a Value, list: &str) -> &'a [Value] {
    part.get(list).and_then(Value::as_array).map_or(std::slice::from_ref(part), Vec::as_slice)
}

fn kind(part: &Value) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn uses_byte_level(part: &Value) -> bool {
    let both = parts(part, "normalizers").iter().chain(parts(part, "pretokenizers"));
    both.into_iter().any(|p| kind(p) == "ByteLevel")
}

fn normalized(normalizer: &Value) -> Keeps {
    let keeps = |part: &Value| match kind(part) {
        _ if part.is_null() => Keeps::All,
        "Prepend" | "ByteLevel" => Keeps::All,
        "Replace" if part["pattern"]["String"] == " " && part["content"] == "▁" => Keeps::All,
        "NFC" | "NFD" | "NFKC" | "NFKD" => Keeps::Ascii,
        _ => Keeps::Nothing,
    };
    parts(normalizer, "normalizers").iter().map(keeps).min().unwrap_or(Keeps::All)
}

fn split(splitter: &Value) -> Keeps {
    let keeps = |part: &Value| match kind(part) {
        _ if part.is_null() => Keeps::All,
        "ByteLevel" | "Digits" => Keeps::All,
        "Metaspace" if part["replacement"] == "▁" => Keeps::All,
        "Split" | "Punctuation" if part["behavior"] != "Removed" => Keeps::All,
        _ => Keeps::Nothing,
    };
    parts(splitter, "pretokenizers").iter().map(keeps).min().unwrap_or(Keeps::All)
}
