//! A tokenizer as llguidance sees it: bytes in, tokens out, and a tree of all tokens.

use std::sync::Arc;

use infernum_frontend_hf::tokenizer::Tokenizer;
use llguidance::ParserFactory;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::GrammarError;

struct Tokens {
    trie: TokTrie,
    /// Of text in the middle of another.
    inside: Tokenizer,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.inside
                .encode(text, false)
                .unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }
}

/// What makes parsers for a tokenizer whose texts end with one of `ends`.
pub(crate) fn factory(tokenizer: &Tokenizer, ends: &[u32]) -> Result<ParserFactory, GrammarError> {
    let unusable = |message: String| GrammarError::Tokenizer(message);
    let size = tokenizer.ids() as u32;
    let mut words: Vec<Vec<u8>> = (0..size).map(|id| word(tokenizer, id)).collect();
    let mut ends: Vec<u32> = ends.iter().copied().filter(|end| *end < size).collect();
    if ends.is_empty() {
        // One that no model has: such a text ends where its grammar has nothing more.
        ends.push(size);
        words.push(special(b"<no end>"));
    }
    for end in &ends {
        if words[*end as usize].is_empty() {
            words[*end as usize] = special(format!("<end {end}>").as_bytes());
        }
    }
    let info = TokRxInfo::new(words.len() as u32, ends[0]);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    let tokens: TokEnv = Arc::new(Tokens { trie, inside: tokenizer.inside() });
    let capabilities =
        InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&tokens, capabilities, &slices);
    let mut factory = factory.map_err(|e| unusable(e.to_string()))?;
    factory.quiet();
    // Bounds on the memory of one text, some 2 kB a state, and on the time of one step, some 20 ms.
    let limits = factory.limits_mut();
    limits.max_lexer_states = 50_000;
    limits.max_grammar_size = 200_000;
    limits.verbose_errors = false;
    Ok(factory)
}

/// A token's bytes; special ones stand behind a byte that no text has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let Some(spelt) = tokenizer.token_of(id) else { return Vec::new() };
    if tokenizer.is_special(id) {
        return special(spelt.as_bytes());
    }
    tokenizer.bytes_of(id).unwrap_or_default()
}

fn special(name: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()
}
