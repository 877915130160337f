//! Tokens to text: whole characters, stop strings, and how single tokens are shown.

use infernum_frontend_hf::tokenizer::{TextStream, Tokenizer, TokenizerError};

/// Text of one choice, token by token.
pub(crate) struct TextOut {
    stream: TextStream,
    stops: StopStrings,
    /// Characters decoded so far, those held back included.
    chars: usize,
}

impl TextOut {
    pub(crate) fn new(tokenizer: &Tokenizer, stops: &[String]) -> TextOut {
        TextOut { stream: tokenizer.stream(true), stops: StopStrings::new(stops), chars: 0 }
    }

    /// Characters before the next token.
    pub(crate) fn offset(&self) -> usize {
        self.chars
    }

    /// Takes a token; gives the text that is now certain, and whether it ends here.
    pub(crate) fn push(&mut self, token: u32) -> Result<(String, bool), TokenizerError> {
        let text = self.stream.push(token)?;
        Ok(self.take(&text))
    }

    /// Ends the text; as [`TextOut::push`].
    pub(crate) fn finish(&mut self) -> Result<(String, bool), TokenizerError> {
        let text = self.stream.flush()?;
        let (mut text, stopped) = self.take(&text);
        if !stopped {
            text.push_str(&self.stops.finish());
        }
        Ok((text, stopped))
    }

    fn take(&mut self, text: &str) -> (String, bool) {
        self.chars += text.chars().count();
        self.stops.push(text)
    }
}

/// Cuts a text that arrives in pieces before the first of some strings. What may be the beginning
/// of one is held back, so that no part of it is ever shown.
#[derive(Debug)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Empty strings stop nothing.
    pub(crate) fn new(stops: &[String]) -> StopStrings {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopStrings { stops, held: String::new() }
    }

    /// Takes a piece; gives what can be shown, and whether a stop string followed it.
    pub(crate) fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (piece.to_owned(), false);
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s)).min() {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return (text, true);
        }
        let keep = self.held.len() - self.unfinished();
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when nothing more comes.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest end of the text that a stop string begins with.
    fn unfinished(&self) -> usize {
        let begins = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            let fits = |n: &usize| stop.is_char_boundary(*n) && self.held.ends_with(&stop[..*n]);
            (1..=most).rev().find(fits).unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

/// Tokens one by one, as bytes, whatever stands around them.
#[derive(Clone, Debug)]
pub(crate) struct Spelling {
    tokenizer: Tokenizer,
    /// The vocabulary writes bytes as GPT-2 does: `Ġ` is a space.
    byte_level: bool,
}

impl Spelling {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Spelling {
        let has = |token| tokenizer.id_of(token).is_some();
        // Such a vocabulary has a token for every byte.
        Spelling { tokenizer: tokenizer.clone(), byte_level: has("Ġ") && has("Ċ") }
    }

    /// A token's bytes; none for ids outside the vocabulary.
    pub(crate) fn bytes(&self, token: u32) -> Vec<u8> {
        let Some(spelt) = self.tokenizer.token_of(token) else { return Vec::new() };
        if let Some(byte) = byte_token(&spelt) {
            return vec![byte];
        }
        let bytes = self.byte_level.then(|| spelt.chars().map(gpt2_byte).collect());
        bytes.flatten().unwrap_or_else(|| spelt.replace('▁', " ").into_bytes())
    }

    /// A token for people: its text, or its bytes as `bytes:\xe2\x80` where they are none.
    pub(crate) fn shown(bytes: &[u8]) -> String {
        use std::fmt::Write;
        std::str::from_utf8(bytes).map_or_else(
            |_| {
                bytes.iter().fold("bytes:".to_owned(), |mut out, byte| {
                    let _ = write!(out, "\\x{byte:02x}"); // a `String` takes all
                    out
                })
            },
            str::to_owned,
        )
    }
}

/// The byte of a SentencePiece byte token, `<0x41>`.
fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 2)
}

/// The byte that GPT-2's vocabularies write as `c`: printable ones stand for themselves, the rest
/// are counted from U+0100 on (Radford et al. 2019, `bytes_to_unicode`).
fn gpt2_byte(c: char) -> Option<u8> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(printable),
        code => (0..=u8::MAX).filter(|b| !printable(b)).nth((code - 0x100) as usize),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What all pieces give together, and whether they were stopped.
    fn joined<'a>(stops: &[String], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let (mut cut, mut out) = (StopStrings::new(stops), String::new());
        for piece in pieces {
            let (text, stopped) = cut.push(piece);
            out.push_str(&text);
            if stopped {
                return (out, true);
            }
        }
        out.push_str(&cut.finish());
        (out, false)
    }

    /// The text before the stop string that is complete first.
    fn expected(text: &str, stops: &[String]) -> (String, bool) {
        // Of stops that are complete at the same character, the one that began first wins.
        for end in (0..=text.len()).filter(|n| text.is_char_boundary(*n)) {
            let begins = stops.iter().filter_map(|s| text[..end].find(s.as_str())).min();
            if let Some(at) = begins {
                return (text[..at].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn pieces_make_the_text_cut_at_the_first_stop_string(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(0..25usize, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|n| text.is_char_boundary(*n)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|w| &text[w[0]..w[1]]);
            let (found, stopped) = joined(&stops, pieces);
            // A longer piece may complete several stops at once: the one that begins first cuts.
            prop_assert_eq!(stopped, expected(&text, &stops).1);
            if stopped {
                prop_assert!(stops.iter().all(|s| !found.contains(s.as_str())));
                prop_assert!(text.starts_with(&found));
                prop_assert!(stops.iter().any(|s| text[found.len()..].starts_with(s.as_str())));
            } else {
                prop_assert_eq!(&found, &text);
            }
            // Character by character, it is the stop that is complete first.
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let found = joined(&stops, chars.iter().map(String::as_str));
            prop_assert_eq!(found, expected(&text, &stops));
        }

        /// Nothing that is held back could have been shown.
        #[test]
        fn no_more_is_held_back_than_needed(
            text in "[ab]{0,16}", stop in "[ab]{1,4}",
        ) {
            let stops = [stop.clone()];
            let mut cut = StopStrings::new(&stops);
            if let (shown, false) = cut.push(&text) {
                let held = &text[shown.len()..];
                prop_assert!(stop.starts_with(held));
                let longer = (1..text.len()).filter(|n| stop.starts_with(&text[text.len() - n..]));
                prop_assert_eq!(held.len(), longer.max().unwrap_or(0).max(held.len()));
            }
        }
    }

    /// Deltas of random tokens of the demo model, special and unknown ones among them, are the full
    /// decode cut at the first stop string.
    #[test]
    fn deltas_are_the_full_decode() {
        let tokenizer = Tokenizer::open(&infernum_frontend_hf::demo()).expect("the demo's");
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..300 {
            let tokens: Vec<u32> = (0..random.usize(..40)).map(|_| random.u32(..1540)).collect();
            let full = tokenizer.decode(&tokens, true).expect("it decodes");
            let chars: Vec<char> = full.chars().collect();
            let at = random.usize(..=chars.len());
            let stop: String = chars[at..].iter().take(random.usize(1..5)).collect();
            let stops = [stop.clone()];
            let mut out = TextOut::new(&tokenizer, &stops);
            let (mut text, mut stopped) = (String::new(), false);
            for &token in &tokens {
                let (piece, end) = out.push(token).expect("it decodes");
                text.push_str(&piece);
                stopped = end;
                if stopped {
                    break;
                }
            }
            if !stopped {
                text.push_str(&out.finish().expect("it decodes").0);
            }
            let end = if stop.is_empty() { None } else { full.find(&stop) };
            assert_eq!(text, full[..end.unwrap_or(full.len())]);
        }
    }

    #[test]
    fn tokens_are_spelt_as_bytes() {
        assert_eq!(byte_token("<0xE2>"), Some(0xE2));
        assert_eq!(byte_token("<0x1>"), None);
        assert_eq!(gpt2_byte('Ġ'), Some(b' '));
        assert_eq!(gpt2_byte('Ċ'), Some(b'\n'));
        assert_eq!(gpt2_byte('a'), Some(b'a'));
        assert_eq!(gpt2_byte('▁'), None);
        // The table is one to one.
        let mut seen: Vec<u8> =
            (0..0x144).filter_map(char::from_u32).filter_map(gpt2_byte).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(Spelling::shown("é".as_bytes()), "é");
        assert_eq!(Spelling::shown(&[0xE2, 0x80]), r"bytes:\xe2\x80");
        let tokenizer = Tokenizer::open(&infernum_frontend_hf::demo()).expect("the demo's");
        let spelling = Spelling::new(&tokenizer);
        let text = "Hello, the 42 café 😀";
        let ids = tokenizer.encode(text, false).expect("it encodes");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| spelling.bytes(*id)).collect();
        assert_eq!(String::from_utf8_lossy(&bytes).trim_start(), text);
    }
}
