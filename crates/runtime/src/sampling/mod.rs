//! Which picks a request wants, and the host's own. It knows nothing of steps and targets; what a pick is
//! stands in [`infernum_ir::picking`].

mod params;

use infernum_ir::NO_TOKEN;
use infernum_ir::picking::{Candidate, Edits, Noise, PickRow, draw, edit};
pub use infernum_ir::picking::{Logprobs, MOST_TOLD, SeenToken, argmax};
pub use params::{Number, Range, SamplingError, SamplingOption, SamplingParams};

/// How one token is to be picked: all that it depends on but the logits.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenPick<'a> {
    /// The request's parameters.
    pub params: SamplingParams,
    /// The token's index in the sequence.
    pub position: u64,
    /// What changes the logits of single tokens.
    pub edits: Edits<'a>,
    /// The token before it was generated, and is not among those seen: it was not known yet.
    pub counts_own: bool,
    /// What is told of the row.
    pub tell: Option<Tell>,
}

/// Log-probabilities that are wanted of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tell {
    /// How many of the likeliest tokens, at most [`MOST_TOLD`] where an executor picks.
    pub top: usize,
    /// The token whose log-probability is told; `None` for the one that is picked.
    pub given: Option<u32>,
}

impl TokenPick<'_> {
    /// What kernels read of it; its lists have no place yet.
    pub fn row(&self) -> PickRow {
        let p = self.params;
        let [key0, key1] = Noise::new(p.seed, self.position).key;
        let one = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).saturating_add(1);
        let given = self.tell.and_then(|tell| tell.given);
        PickRow {
            scale: p.scale(),
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            repetition: p.repetition_penalty,
            frequency: p.frequency_penalty,
            presence: p.presence_penalty,
            key0,
            key1,
            counts_own: u32::from(self.counts_own),
            told: self.tell.map_or(0, |tell| one(tell.top)),
            given: given.map_or(0, |token| token.saturating_add(1)),
            ..PickRow::default()
        }
    }

    /// Whether the largest logit wins, as it is, and nothing is told.
    pub fn is_greedy(&self) -> bool {
        let Edits { bias, seen, allowed } = self.edits;
        let edited = !bias.is_empty() || !seen.is_empty() || allowed.is_some() || self.counts_own;
        self.params.takes_largest() && !edited && self.tell.is_none()
    }

    /// The token after a row's `own`, by its logits, which are left edited. `None` where they are no
    /// distribution: any is NaN, or none is above -inf. Nothing is told.
    pub fn pick(&self, own: u32, logits: &mut [f32]) -> Option<u32> {
        self.pick_with(own, logits, &mut Vec::new())
    }

    fn pick_with(&self, own: u32, logits: &mut [f32], scratch: &mut Vec<Candidate>) -> Option<u32> {
        let row = self.row();
        edit(logits, &row, self.edits, own, &|v| v);
        draw(logits, &row, scratch)
    }
}

/// One request's sampler: its parameters and what it has seen.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    // Kept only where a penalty or a ban asks for it; sorted by token.
    seen: Vec<SeenToken>,
    // Sorted by token, each once.
    bias: Vec<(u32, f32)>,
    // Tokens that are banned before a position, and whether the prompt has them, too.
    banned: Vec<(u32, bool)>,
    free_from: u64,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for a request with this prompt.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Sampler {
        let mut seen = Vec::new();
        if params.repetition_penalty != 1.0 {
            seen.extend(prompt.iter().map(|&token| SeenToken { token, generated: 0 }));
            seen.sort_unstable_by_key(|s| s.token);
            seen.dedup();
        }
        let (bias, banned, candidates) = (Vec::new(), Vec::new(), Vec::new());
        Sampler { params, seen, bias, banned, free_from: 0, candidates }
    }

    /// Adds to the logits of tokens, before anything else.
    #[must_use]
    pub fn with_bias(mut self, bias: &[(u32, f32)]) -> Sampler {
        self.bias = bias.to_vec();
        self.bias.sort_by_key(|(token, _)| *token);
        self.bias.dedup_by(|(token, more), (kept, sum)| {
            let same = token == kept;
            *sum += if same { *more } else { 0.0 };
            same
        });
        self
    }

    /// Keeps `ends` out of the first `min_tokens` tokens after a prompt of `prompt` tokens.
    #[must_use]
    pub fn with_ends(mut self, ends: &[u32], prompt: usize) -> Sampler {
        self.free_from = (prompt as u64).saturating_add(self.params.min_tokens.into());
        for &token in ends.iter().filter(|_| self.params.min_tokens > 0) {
            let found = self.seen.binary_search_by_key(&token, |s| s.token);
            match found {
                Ok(at) if self.seen[at].generated == SeenToken::BANNED => continue, // named twice
                Ok(at) => self.seen[at].generated = SeenToken::BANNED,
                Err(at) => self.seen.insert(at, SeenToken { token, generated: SeenToken::BANNED }),
            }
            self.banned.push((token, found.is_ok()));
        }
        self
    }

    /// Lets end tokens in again, from the position on where they may come.
    pub fn reach(&mut self, position: u64) {
        if position < self.free_from {
            return;
        }
        for (token, in_prompt) in self.banned.drain(..) {
            let Ok(at) = self.seen.binary_search_by_key(&token, |s| s.token) else { continue };
            if in_prompt {
                self.seen[at].generated = 0;
            } else {
                self.seen.remove(at);
            }
        }
    }

    /// How the token for `position`, which was [reached](Sampler::reach), is picked, for an executor
    /// that does it. It must be told of by [`Sampler::note`]; where it is picked before the one before it
    /// was told of, that one `is_coming`.
    pub fn pick_at(&self, position: u64, is_coming: bool) -> TokenPick<'_> {
        let edits = Edits { bias: &self.bias, seen: &self.seen, allowed: None };
        let counts_own = is_coming && self.params.has_penalties();
        TokenPick { params: self.params, position, edits, counts_own, tell: None }
    }

    /// Remembers a token that was picked.
    pub fn note(&mut self, token: u32) {
        if !self.params.has_penalties() {
            return;
        }
        match self.seen.binary_search_by_key(&token, |s| s.token) {
            Ok(at) => self.seen[at].generated = self.seen[at].generated.saturating_add(1),
            Err(at) => self.seen.insert(at, SeenToken { token, generated: 1 }),
        }
    }

    /// Picks the token for `position` (its index in the sequence) and remembers it.
    ///
    /// The choice depends on the parameters, the logits, what was seen, and `position` alone: not
    /// on what else is in the batch. `logits` is left edited. `None` where they are no distribution: any
    /// is NaN, or none is above -inf.
    pub fn sample(&mut self, logits: &mut [f32], position: u64) -> Option<u32> {
        self.sample_among(logits, position, None)
    }

    /// As [`Sampler::sample`], of the tokens that are [allowed](Edits::allowed).
    pub fn sample_among(
        &mut self,
        logits: &mut [f32],
        position: u64,
        allowed: Option<&[u32]>,
    ) -> Option<u32> {
        self.reach(position);
        let mut scratch = std::mem::take(&mut self.candidates);
        let pick = self.pick_at(position, false);
        let pick = TokenPick { edits: Edits { allowed, ..pick.edits }, ..pick };
        let token = pick.pick_with(NO_TOKEN, logits, &mut scratch);
        self.candidates = scratch;
        token.inspect(|token| self.note(*token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 1.5];

    fn frequencies(params: SamplingParams, draws: u64) -> [f64; 5] {
        let mut counts = [0.0; 5];
        let mut sampler = Sampler::new(params, &[]);
        for position in 0..draws {
            let token = sampler.sample(&mut LOGITS.clone(), position).expect("a token");
            counts[token as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(logits: &[f32]) -> Vec<f64> {
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|w| w / sum).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(SamplingParams::default(), &[]);
        assert_eq!(sampler.sample(&mut [1.0, 3.0, 3.0], 0), Some(1));
        assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY, -1.0], 0), Some(1));
        assert_eq!(sampler.sample(&mut [1.0, f32::INFINITY], 0), Some(1));
    }

    #[test]
    fn what_is_no_distribution_gives_no_token() {
        let warm = SamplingParams { temperature: 1.0, top_p: 0.5, ..Default::default() };
        for params in [SamplingParams::default(), warm] {
            let mut sampler = Sampler::new(params, &[]);
            for mut row in
                [vec![], vec![f32::NAN; 3], vec![1.0, 2.0, f32::NAN], vec![f32::NEG_INFINITY; 3]]
            {
                assert_eq!(sampler.sample(&mut row, 0), None, "{row:?}");
            }
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let params = SamplingParams { temperature: 1.0, ..Default::default() };
        let found = frequencies(params, 200_000);
        for (p, f) in softmax(&LOGITS).iter().zip(found) {
            assert!((p - f).abs() < 0.005, "expected {p}, found {f}");
        }
        // A temperature of 0.5 squares the odds.
        let found = frequencies(SamplingParams { temperature: 0.5, ..params }, 200_000);
        for (p, f) in softmax(&LOGITS.map(|l| l * 2.0)).iter().zip(found) {
            assert!((p - f).abs() < 0.005, "expected {p}, found {f}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_leave_the_right_tokens() {
        let base = SamplingParams { temperature: 1.0, ..Default::default() };
        let alive = |params| frequencies(params, 20_000).map(|f| f > 0.0);
        // By likelihood: 1, 4, 2, 0, 3 with probabilities .455, .276, .167, .062, .023.
        assert_eq!(alive(SamplingParams { top_k: 2, ..base }), [false, true, false, false, true]);
        assert_eq!(alive(SamplingParams { top_p: 0.7, ..base }), [false, true, false, false, true]);
        assert_eq!(alive(SamplingParams { top_p: 0.75, ..base }), [false, true, true, false, true]);
        assert_eq!(
            alive(SamplingParams { top_p: 1e-6, ..base }),
            [false, true, false, false, false]
        );
        assert_eq!(alive(SamplingParams { min_p: 0.3, ..base }), [false, true, true, false, true]);
        assert_eq!(
            alive(SamplingParams { min_p: 1.0, ..base }),
            [false, true, false, false, false]
        );
    }

    #[test]
    fn penalties_move_logits_as_defined() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..Default::default()
        };
        let mut sampler = Sampler::new(params, &[0, 3]);
        let mut logits = [4.0, 3.0, 1.0, -1.0];
        assert_eq!(sampler.sample(&mut logits, 0), Some(1), "the prompt's 4.0 is halved");
        assert_eq!(logits, [2.0, 3.0, 1.0, -2.0]);
        let mut logits = [4.0, 3.0, 1.0, -1.0];
        assert_eq!(sampler.sample(&mut logits, 1), Some(0));
        assert_eq!(logits, [2.0, 0.75, 1.0, -2.0], "3 / 2 - 0.5 - 0.25 after one appearance");
    }

    #[test]
    fn a_choice_depends_on_seed_and_position_alone() {
        let params = SamplingParams { temperature: 1.0, seed: 7, ..Default::default() };
        let draw = |seed, position| {
            Sampler::new(SamplingParams { seed, ..params }, &[])
                .sample(&mut LOGITS.clone(), position)
        };
        let line = |seed| (0..64).map(|p| draw(seed, p)).collect::<Vec<_>>();
        assert_eq!(line(7), line(7));
        assert_ne!(line(7), line(8));
        let mut kept = Sampler::new(params, &[]);
        let one: Vec<_> = (0..64).map(|p| kept.sample(&mut LOGITS.clone(), p)).collect();
        assert_eq!(one, line(7), "a sampler's history does not change its draws");
    }

    #[test]
    fn ends_come_after_the_tokens_that_must_be_there() {
        let ends = [1, 4, 1, 99];
        let of = |params: SamplingParams, prompt: &[u32]| {
            let mut sampler = Sampler::new(params, prompt).with_ends(&ends, 3);
            (3..9).filter_map(|p| sampler.sample(&mut LOGITS.clone(), p)).collect::<Vec<u32>>()
        };
        let greedy = SamplingParams { min_tokens: 2, ..Default::default() };
        assert_eq!(of(greedy, &[1]), [2, 2, 1, 1, 1, 1]);
        assert_eq!(of(SamplingParams::default(), &[1]), [1; 6]);
        // Bans are lifted without a trace: the penalties are those of a request without them.
        let penalised = SamplingParams { repetition_penalty: 3.0, ..greedy };
        let mut sampler = Sampler::new(penalised, &[1, 2]).with_ends(&ends, 3);
        sampler.reach(4);
        assert_eq!(sampler.pick_at(4, false).edits.seen.len(), 4);
        sampler.reach(5);
        let token = |token| SeenToken { token, generated: 0 };
        assert_eq!(sampler.pick_at(5, false).edits.seen, [token(1), token(2)]);
    }
}
