//! Picking a token from a row of logits: what the op `pick` means, and what a host does that picks from
//! logits itself. There is no other definition: kernels are held against this one.
//!
//! Logits are edited, of which one is drawn, and log-probabilities are those of the edited ones. Edits are
//! computed in f32, operation by operation, so that all targets edit to the same bits.

mod logprobs;
mod noise;

pub use logprobs::Logprobs;
pub use noise::Noise;

use crate::{DType, NO_TOKEN};

/// How many of the likeliest tokens a row can tell of at most, unless the op says otherwise.
pub const MOST_TOLD: usize = 20;

/// A number of 32 bits.
trait Word: Copy {
    const DTYPE: DType;

    fn word(self) -> u32;

    fn of(word: u32) -> Self;
}

impl Word for u32 {
    const DTYPE: DType = DType::U32;

    fn word(self) -> u32 {
        self
    }

    fn of(word: u32) -> u32 {
        word
    }
}

impl Word for f32 {
    const DTYPE: DType = DType::F32;

    fn word(self) -> u32 {
        self.to_bits()
    }

    fn of(word: u32) -> f32 {
        f32::from_bits(word)
    }
}

/// A struct that can be laid out as words, and read from them; kernels get its declaration of `FIELDS`.
macro_rules! words {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $about:literal])+ $field:ident: $ty:ty,)+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name {
            $($(#[doc = $about])+ pub $field: $ty,)+
        }

        impl $name {
            /// What it is, in a line.
            pub const DOC: &str = concat!($($doc),+);

            /// Its fields in order, a word each: name, type, and what it says.
            pub const FIELDS: &[(&str, DType, &str)] =
                &[$((stringify!($field), <$ty as Word>::DTYPE, concat!($($about),+))),+];

            /// How many there are.
            pub const WORDS: usize = Self::FIELDS.len();

            /// As words.
            pub fn words(&self) -> [u32; $name::WORDS] {
                [$(self.$field.word()),+]
            }

            /// Of its words; those that are missing are zero.
            pub fn from_words(words: &[u32]) -> $name {
                let mut words = words.iter().copied();
                $name { $($field: <$ty as Word>::of(words.next().unwrap_or(0)),)+ }
            }
        }
    };
}

words! {
    /// How the token after a row of logits is picked; zeros take the largest.
    PickRow {
        /// log2(e) / temperature; 0 picks the largest logit.
        scale: f32,
        /// Only so many of the largest compete; 0 for all.
        top_k: u32,
        /// Only the likeliest tokens that together have this probability compete.
        top_p: f32,
        /// Only tokens at least this likely, relative to the likeliest, compete.
        min_p: f32,
        /// Divides (where positive) or multiplies the logits of tokens that were seen.
        repetition: f32,
        /// Taken off a token's logit for each time that it was generated.
        frequency: f32,
        /// Taken off a token's logit if it was generated.
        presence: f32,
        /// Of seed and position, the first half of the key of its noise.
        key0: u32,
        /// The second half.
        key1: u32,
        /// Where its lists begin among the step's words: pairs of token and bias, then of token and count.
        lists: u32,
        /// How many tokens have a bias, each once: the bits of an f32, added first.
        biased: u32,
        /// How many tokens were seen, each once: how often they were generated, or BANNED.
        seen: u32,
        /// 1 where the row's own token was generated, and is not counted among those seen.
        counts_own: u32,
        /// 1 and where among the words the set of its allowed tokens begins, a bit a token; 0 allows all.
        allowed: u32,
        /// 1 and how many of the likeliest tokens are told of, beside the picked one; 0 tells nothing.
        told: u32,
        /// 1 and the token that is told of in place of the picked one; 0 for the picked one.
        given: u32,
    }
}

/// A token that penalties change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenToken {
    /// Seen in the prompt or generated.
    pub token: u32,
    /// How often it was generated, or [`SeenToken::BANNED`].
    pub generated: u32,
}

impl SeenToken {
    /// In place of how often it was generated: it may not be picked. `BANNED` in kernels.
    pub const BANNED: u32 = u32::MAX;
}

/// What changes the logits of single tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edits<'a> {
    /// Tokens, each once, and what is added to their logits before anything else.
    pub bias: &'a [(u32, f32)],
    /// Tokens with penalties and banned ones, each once.
    pub seen: &'a [SeenToken],
    /// Tokens that may be picked: a bit for each of the vocabulary, from the lowest of the first word on. `None`
    /// for all.
    pub allowed: Option<&'a [u32]>,
}

/// How the tokens of a step's rows are picked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Picks {
    rows: Vec<PickRow>,
    words: Vec<u32>,
}

impl Picks {
    /// Those of the first rows; the others take the largest logit.
    pub fn rows(&self) -> &[PickRow] {
        &self.rows
    }

    /// Their lists.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Of one row.
    pub fn row(&self, row: usize) -> PickRow {
        self.rows.get(row).copied().unwrap_or_default()
    }

    /// Of the rows that were set.
    pub fn set_rows(&self) -> impl Iterator<Item = (usize, PickRow)> + '_ {
        let all = self.rows.iter().copied().enumerate();
        all.filter(|(_, row)| *row != PickRow::default())
    }

    /// Whether each set of allowed tokens has a bit for each of a vocabulary.
    pub fn sets_hold(&self, vocab: usize) -> bool {
        let end = |set: u32| (set as usize - 1).saturating_add(vocab.div_ceil(32));
        let sets = self.rows.iter().map(|row| row.allowed).filter(|set| *set > 0);
        sets.map(end).all(|end| end <= self.words.len())
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.words.clear();
    }

    /// Sets one row's; it is given its lists' places.
    pub fn set(&mut self, row: usize, pick: PickRow, edits: Edits<'_>) {
        if self.rows.len() <= row {
            self.rows.resize(row + 1, PickRow::default());
        }
        let lists = self.words.len() as u32;
        self.words.extend(edits.bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]));
        self.words.extend(edits.seen.iter().flat_map(|s| [s.token, s.generated]));
        let allowed = edits.allowed.map_or(0, |_| self.words.len() as u32 + 1);
        self.words.extend_from_slice(edits.allowed.unwrap_or_default());
        let (biased, seen) = (edits.bias.len() as u32, edits.seen.len() as u32);
        self.rows[row] = PickRow { lists, biased, seen, allowed, ..pick };
    }

    /// Edits and picks as `pick` says, whose lists are among these words.
    pub fn pick(
        &self,
        pick: &PickRow,
        own: u32,
        logits: &mut [f32],
        round: &dyn Fn(f32) -> f32,
    ) -> (Option<u32>, Option<Logprobs>) {
        let from = |start: usize| self.words.get(start..).unwrap_or_default();
        let lists = from(pick.lists as usize);
        let biased = (2 * pick.biased as usize).min(lists.len());
        let pairs = |words: &[u32]| -> Vec<(u32, u32)> {
            words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
        };
        let (bias, seen) = (pairs(&lists[..biased]), pairs(&lists[biased..]));
        let bias: Vec<_> = bias.into_iter().map(|(t, b)| (t, f32::from_bits(b))).collect();
        let seen = seen.into_iter().take(pick.seen as usize);
        let seen: Vec<_> = seen.map(|(token, generated)| SeenToken { token, generated }).collect();
        let allowed = pick.allowed.checked_sub(1).map(|start| from(start as usize));
        let edits = Edits { bias: &bias, seen: &seen, allowed };
        edit(logits, pick, edits, own, round);
        let token = draw(logits, pick, &mut Vec::new());
        (token, token.and_then(|token| tell(logits, pick, token)))
    }
}

/// Edits a row of logits: bias, penalties and bans, then the set of allowed tokens. Each logit that changes
/// is `round`ed after the bias, and after the penalties; `own` is the row's own token.
pub fn edit(
    logits: &mut [f32],
    pick: &PickRow,
    edits: Edits<'_>,
    own: u32,
    round: &dyn Fn(f32) -> f32,
) {
    for (token, bias) in edits.bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = round(*logit + bias);
        }
    }
    let mut penalise = |token: u32, generated: u32| {
        let Some(logit) = logits.get_mut(token as usize) else { return };
        if generated == SeenToken::BANNED {
            *logit = f32::NEG_INFINITY;
            return;
        }
        let factor = pick.repetition;
        let mut value = if *logit > 0.0 { *logit / factor } else { *logit * factor };
        if generated > 0 {
            value -= pick.frequency * generated as f32 + pick.presence;
        }
        *logit = round(value);
    };
    let mut uncounted = pick.counts_own != 0;
    for seen in edits.seen {
        let is_own = pick.counts_own != 0 && seen.token == own;
        let more = u32::from(is_own && seen.generated != SeenToken::BANNED);
        penalise(seen.token, seen.generated + more);
        uncounted &= !is_own;
    }
    if uncounted {
        penalise(own, 1);
    }
    if let Some(set) = edits.allowed {
        for (token, logit) in logits.iter_mut().enumerate() {
            let word = set.get(token / 32).copied().unwrap_or(0);
            if word >> (token % 32) & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// What competes in a draw. Kept for its memory.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    logit: f32,
    token: u32,
}

/// The token of a row of edited logits. `None` where they are no distribution: any is NaN, or none is
/// above -inf.
pub fn draw(logits: &[f32], pick: &PickRow, scratch: &mut Vec<Candidate>) -> Option<u32> {
    let likeliest = argmax(logits)?;
    let drawn = if pick.scale == 0.0 { None } else { among(logits, pick, scratch) };
    Some(drawn.unwrap_or(likeliest))
}

/// Temperature, then top-k, top-p and min-p on what is left, then a draw.
fn among(logits: &[f32], pick: &PickRow, all: &mut Vec<Candidate>) -> Option<u32> {
    all.clear();
    let finite = logits.iter().zip(0..).filter(|(l, _)| **l > f32::NEG_INFINITY);
    all.extend(finite.map(|(l, token)| Candidate { logit: sane(*l), token }));
    // Likeliest first; ties by token, so that the order is total and repeatable.
    let order =
        |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
    let k = pick.top_k as usize;
    if k > 0 && k < all.len() {
        all.select_nth_unstable_by(k - 1, order);
        all.truncate(k);
    }
    let max = all.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
    let scale = f64::from(pick.scale);
    let log2_weight = |c: &Candidate| (f64::from(c.logit) - f64::from(max)) * scale;
    let weight = |c: &Candidate| log2_weight(c).exp2();
    if pick.top_p < 1.0 {
        all.sort_unstable_by(order);
        let enough = all.iter().map(weight).sum::<f64>() * f64::from(pick.top_p);
        let mut mass = 0.0;
        let kept = all.iter().take_while(|c| {
            let short = mass < enough;
            mass += weight(c);
            short
        });
        let kept = kept.count().max(1);
        all.truncate(kept);
    }
    if pick.min_p > 0.0 {
        all.retain(|c| weight(c) >= f64::from(pick.min_p));
    }
    let noise = Noise { key: [pick.key0, pick.key1] };
    let best =
        all.iter().fold(None, |best, c| Some(noise.challenge(best, log2_weight(c), c.token)));
    best.map(|(_, token)| token)
}

/// What `pick` wants to know of a row of edited logits whose token was picked.
pub fn tell(logits: &[f32], pick: &PickRow, picked: u32) -> Option<Logprobs> {
    let top = pick.told.checked_sub(1)? as usize;
    Some(Logprobs::new(logits, pick.given.checked_sub(1).unwrap_or(picked), top))
}

/// An infinite logit is the largest finite one, and -0 is 0.
fn sane(logit: f32) -> f32 {
    if logit > f32::MAX { f32::MAX } else { logit + 0.0 }
}

/// Index of the largest value, the first of equals. `None` if any is NaN, or none is above -inf: such
/// rows come of weights or sums that overflowed, and any token would be made up.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let (mut best, mut has_nan) = ((f32::NEG_INFINITY, NO_TOKEN), false);
    for (i, &l) in logits.iter().enumerate() {
        if l > best.0 {
            best = (l, i as u32);
        }
        has_nan |= l.is_nan();
    }
    (best.1 != NO_TOKEN && !has_nan).then_some(best.1)
}
