//! Text that stands inside another: what comes of it when it is encoded by itself is what it would be there.

use std::sync::Arc;

use tokenizers::normalizers::{self, NormalizerWrapper};
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::{self, PreTokenizerWrapper};

use super::Tokenizer;

impl Tokenizer {
    /// The same for text in the middle of another: no space goes before it, and what is spelt as a special token is text.
    #[must_use]
    pub fn inside(&self) -> Tokenizer {
        let mut inner = (*self.inner).clone();
        let normalizer = inner.get_normalizer().cloned().and_then(without_prepend);
        inner.with_normalizer(normalizer);
        let splitter = inner.get_pre_tokenizer().cloned().map(without_prefix);
        inner.with_pre_tokenizer(splitter);
        inner.set_encode_special_tokens(true);
        Tokenizer { inner: Arc::new(inner), special: self.special.clone(), least: Arc::default() }
    }

    /// A text cut where special tokens stand: each part, and the token that it is if it is one.
    pub fn special_parts<'a>(&self, text: &'a str) -> Vec<(&'a str, Option<u32>)> {
        let added = self.inner.get_added_vocabulary();
        let special: Vec<(&String, u32)> = added
            .get_vocab()
            .iter()
            .filter(|(token, _)| !token.is_empty() && added.is_special_token(token))
            .map(|(token, id)| (token, *id))
            .collect();
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            // The first one, and of those that begin there the longest.
            let found =
                special.iter().filter_map(|(token, id)| Some((rest.find(*token)?, *token, *id)));
            let first = found.min_by_key(|(at, token, _)| (*at, usize::MAX - token.len()));
            let Some((at, token, id)) = first else {
                parts.push((rest, None));
                break;
            };
            if at > 0 {
                parts.push((&rest[..at], None));
            }
            parts.push((&rest[at..at + token.len()], Some(id)));
            rest = &rest[at + token.len()..];
        }
        parts
    }
}

fn without_prepend(normalizer: NormalizerWrapper) -> Option<NormalizerWrapper> {
    match normalizer {
        NormalizerWrapper::Prepend(_) => None,
        NormalizerWrapper::Sequence(all) => {
            let rest = all.as_ref().iter().cloned().filter_map(without_prepend);
            Some(NormalizerWrapper::Sequence(normalizers::Sequence::new(rest.collect())))
        }
        other => Some(other),
    }
}

fn without_prefix(splitter: PreTokenizerWrapper) -> PreTokenizerWrapper {
    match splitter {
        PreTokenizerWrapper::Metaspace(mut metaspace) => {
            metaspace.prepend_scheme = PrependScheme::Never;
            PreTokenizerWrapper::Metaspace(metaspace)
        }
        PreTokenizerWrapper::ByteLevel(mut bytes) => {
            bytes.add_prefix_space = false;
            PreTokenizerWrapper::ByteLevel(bytes)
        }
        PreTokenizerWrapper::Sequence(all) => {
            let all = all.as_ref().iter().cloned().map(without_prefix);
            PreTokenizerWrapper::Sequence(pre_tokenizers::sequence::Sequence::new(all.collect()))
        }
        other => other,
    }
}
