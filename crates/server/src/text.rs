//! Tokens to text: whole characters, stop strings, and how single tokens are shown.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::noncontiguous::NFA;
use aho_corasick::{Anchored, BuildError};
use infernum_frontend_hf::tokenizer::{TextStream, Tokenizer, TokenizerError};

/// How the tokens of a choice become its text.
#[derive(Clone, Debug)]
pub(crate) struct TextRules {
    /// Strings that end it.
    pub(crate) stops: Stops,
    /// Whether the one that did is part of it.
    pub(crate) include_stop: bool,
    /// Tokens in whose text none of them may end. One may begin there, as vLLM has it.
    pub(crate) min_tokens: usize,
    /// Whether tokens such as `<|im_end|>` have no text.
    pub(crate) skip_special: bool,
    /// But for these.
    pub(crate) shown: Vec<u32>,
}

impl TextRules {
    /// All of it, without special tokens.
    pub(crate) const PLAIN: TextRules = TextRules {
        stops: Stops(None),
        include_stop: false,
        min_tokens: 0,
        skip_special: true,
        shown: Vec::new(),
    };
}

/// Text of one choice, token by token.
pub(crate) struct TextOut {
    stream: TextStream,
    stops: StopStrings,
    /// Where special tokens have no text but for some, the tokenizer and those.
    shown: Option<(Tokenizer, Vec<u32>)>,
    /// Tokens taken so far.
    tokens: usize,
    min_tokens: usize,
    /// Characters decoded so far, those held back included.
    chars: usize,
}

impl TextOut {
    pub(crate) fn new(tokenizer: &Tokenizer, rules: &TextRules) -> TextOut {
        let some = rules.skip_special && !rules.shown.is_empty();
        TextOut {
            stream: tokenizer.stream(rules.skip_special && !some),
            shown: some.then(|| (tokenizer.clone(), rules.shown.clone())),
            stops: StopStrings::new(&rules.stops, rules.include_stop),
            tokens: 0,
            min_tokens: rules.min_tokens,
            chars: 0,
        }
    }

    /// Characters before the next token.
    pub(crate) fn offset(&self) -> usize {
        self.chars
    }

    /// The stop string that ended it, if one did.
    pub(crate) fn stop(&self) -> Option<&str> {
        self.stops.found.as_deref()
    }

    /// Takes a token; gives the text that is now certain, and whether it ends here.
    pub(crate) fn push(&mut self, token: u32) -> Result<(String, bool), TokenizerError> {
        self.tokens += 1;
        let hidden = self.shown.as_ref().is_some_and(|(tokenizer, shown)| {
            tokenizer.is_special(token) && !shown.contains(&token)
        });
        let text = if hidden { String::new() } else { self.stream.push(token)? };
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
        self.stops.push(text, self.tokens > self.min_tokens)
    }
}

/// Strings that end a text, ready to be looked for. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stops(Option<Arc<Matcher>>);

/// The automaton of Aho and Corasick (1975): a step for each byte, however many strings there are
/// and however long they are.
#[derive(Debug)]
struct Matcher {
    nfa: NFA,
    start: StateID,
    /// How many bytes of a string have been seen in each state.
    depths: HashMap<StateID, usize>,
}

impl Stops {
    /// Empty strings stop nothing.
    pub(crate) fn new(stops: &[String]) -> Result<Stops, BuildError> {
        let stops: Vec<&String> = stops.iter().filter(|s| !s.is_empty()).collect();
        if stops.is_empty() {
            return Ok(Stops(None));
        }
        let nfa = NFA::builder().prefilter(false).build(&stops)?;
        // All searches begin anywhere, which every automaton is built for.
        let Ok(start) = nfa.start_state(Anchored::No) else { return Ok(Stops(None)) };
        let mut depths = HashMap::from([(start, 0)]);
        for stop in stops {
            let mut state = start;
            for (seen, byte) in (1..).zip(stop.bytes()) {
                state = nfa.next_state(Anchored::No, state, byte);
                depths.insert(state, seen);
            }
        }
        Ok(Stops(Some(Arc::new(Matcher { nfa, start, depths }))))
    }
}

impl Matcher {
    /// Bytes of the longest string that ends in a state.
    fn matched(&self, state: StateID) -> Option<usize> {
        if !self.nfa.is_match(state) {
            return None;
        }
        let all = 0..self.nfa.match_len(state);
        all.map(|i| self.nfa.pattern_len(self.nfa.match_pattern(state, i))).max()
    }
}

/// Cuts a text that arrives in pieces before the first of some strings: the one that is complete
/// first; of several, the longest. What may be the beginning of one is held back, so that no part
/// of it is ever shown.
#[derive(Debug)]
pub(crate) struct StopStrings {
    /// With the state it is in.
    matcher: Option<(Arc<Matcher>, StateID)>,
    /// Whether the cut is behind the string that was found.
    include: bool,
    held: VecDeque<u8>,
    /// The one that was found.
    found: Option<String>,
}

impl StopStrings {
    pub(crate) fn new(stops: &Stops, include: bool) -> StopStrings {
        let matcher = stops.0.clone().map(|m| (m.start, m)).map(|(start, m)| (m, start));
        StopStrings { matcher, include, held: VecDeque::new(), found: None }
    }

    /// Takes a piece, in which a stop string may end or not; gives what can be shown, and whether a stop string
    /// followed it.
    pub(crate) fn push(&mut self, piece: &str, may_end: bool) -> (String, bool) {
        let Some((matcher, state)) = &mut self.matcher else { return (piece.to_owned(), false) };
        for byte in piece.bytes() {
            self.held.push_back(byte);
            *state = matcher.nfa.next_state(Anchored::No, *state, byte);
            if let Some(length) = matcher.matched(*state).filter(|_| may_end) {
                let start = self.held.len() - length;
                self.found = Some(shown(self.held.range(start..).copied()));
                if !self.include {
                    self.held.truncate(start);
                }
                return (self.finish(), true);
            }
        }
        let unfinished = matcher.depths.get(state).copied().unwrap_or(0);
        let certain = self.held.len() - unfinished;
        (shown(self.held.drain(..certain)), false)
    }

    /// What was held back, when nothing more comes.
    pub(crate) fn finish(&mut self) -> String {
        shown(self.held.drain(..))
    }
}

/// Stop strings begin and end where characters do, so the bytes before and between them are text.
fn shown(bytes: impl Iterator<Item = u8>) -> String {
    let bytes: Vec<u8> = bytes.collect();
    String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// Tokens one by one, as bytes, whatever stands around them.
#[derive(Clone, Debug)]
pub(crate) struct Spelling(Tokenizer);

impl Spelling {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Spelling {
        Spelling(tokenizer.clone())
    }

    /// A token's bytes; none for ids outside the vocabulary.
    pub(crate) fn bytes(&self, token: u32) -> Vec<u8> {
        self.0.bytes_of(token).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What all pieces give together, and whether they were stopped.
    fn joined<'a>(stops: &[String], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        joined_by(stops, false, pieces)
    }

    fn joined_by<'a>(
        stops: &[String],
        include: bool,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, bool) {
        let stops = Stops::new(stops).expect("few and short");
        let (mut cut, mut out) = (StopStrings::new(&stops, include), String::new());
        for piece in pieces {
            let (text, stopped) = cut.push(piece, true);
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
            // However it is cut to pieces, it is the stop that is complete first.
            let (found, stopped) = joined(&stops, pieces.clone());
            let (with, _) = joined_by(&stops, true, pieces);
            let rest = with.strip_prefix(&found).map(str::to_owned);
            let complete = rest.is_some_and(|s| if stopped { stops.contains(&s) } else { s.is_empty() });
            prop_assert!(complete && text.starts_with(&with), "{with:?} where {found:?} is found");
            prop_assert_eq!((found, stopped), expected(&text, &stops));
        }

        /// In what comes first no stop string ends; one that begins there and ends later is cut off whole.
        #[test]
        fn a_stop_string_may_begin_before_the_least_tokens(
            early in "[ab]{0,12}",
            late in "[ab]{0,12}",
            stops in prop::collection::vec("[ab]{1,4}", 1..4),
            include in any::<bool>(),
        ) {
            let text = format!("{early}{late}");
            let ends = (early.len() + 1..=text.len()).find_map(|end| {
                // Of those that end here, the longest.
                let all = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
                all.map(|stop| if include { end } else { end - stop.len() }).min()
            });
            let mut cut = StopStrings::new(&Stops::new(&stops).expect("few and short"), include);
            let mut found = String::new();
            for piece in early.split_inclusive('a') {
                let (shown, stopped) = cut.push(piece, false);
                prop_assert!(!stopped);
                found.push_str(&shown);
            }
            let mut stopped = false;
            for piece in late.split_inclusive('b') {
                let shown;
                (shown, stopped) = cut.push(piece, true);
                found.push_str(&shown);
                if stopped {
                    break;
                }
            }
            found.push_str(&cut.finish());
            prop_assert_eq!(stopped, ends.is_some());
            prop_assert_eq!(found, &text[..ends.unwrap_or(text.len())]);
        }

        /// Nothing that is held back could have been shown.
        #[test]
        fn no_more_is_held_back_than_needed(
            text in "[ab]{0,16}", stop in "[ab]{1,4}",
        ) {
            let stops = [stop.clone()];
            let mut cut = StopStrings::new(&Stops::new(&stops).expect("one, and short"), false);
            if let (shown, false) = cut.push(&text, true) {
                let held = &text[shown.len()..];
                prop_assert!(stop.starts_with(held));
                let longer = (1..text.len()).filter(|n| stop.starts_with(&text[text.len() - n..]));
                prop_assert_eq!(held.len(), longer.max().unwrap_or(0).max(held.len()));
            }
        }
    }

    /// A long string that the text all but matches again and again costs no more than a short one.
    #[test]
    fn long_stop_strings_cost_nothing_by_the_character() {
        let took = |stop: String| {
            let stops = Stops::new(&[stop]).expect("it is one");
            let mut cut = StopStrings::new(&stops, false);
            let start = std::time::Instant::now();
            let shown: usize = (0..200_000).map(|_| cut.push("a", true).0.len()).sum();
            assert_eq!(shown + cut.finish().len(), 200_000);
            start.elapsed()
        };
        let (short, long) = (took("aab".to_owned()), took("a".repeat(16_000) + "b"));
        assert!(long < 8 * short, "{long:?} against {short:?}");
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
            let stops = Stops::new(&stops).expect("one, and short");
            let mut out = TextOut::new(&tokenizer, &TextRules { stops, ..TextRules::PLAIN });
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
