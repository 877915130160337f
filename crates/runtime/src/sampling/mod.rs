//! Picks the next token from logits. It knows nothing of steps and targets.

mod logprobs;
mod noise;
mod params;

pub use infernum_codegen::cuda::abi::SeenToken;
use infernum_ir::NO_TOKEN;
pub use logprobs::Logprobs;
pub(crate) use noise::Noise;
pub use params::{Number, Range, SamplingError, SamplingOption, SamplingParams};

/// How one token is to be picked: all that it depends on but the logits.
#[derive(Clone, Copy, Debug)]
pub struct TokenPick<'a> {
    /// The request's parameters.
    pub params: SamplingParams,
    /// The token's index in the sequence.
    pub position: u64,
    /// Tokens with penalties, each once, in order.
    pub seen: &'a [SeenToken],
}

impl TokenPick<'_> {
    /// The token of a row of logits; see [`Sampler::sample`].
    pub fn pick(&self, logits: &[f32]) -> Option<u32> {
        self.pick_in(&mut logits.to_vec())
    }

    /// As [`TokenPick::pick`]; `logits` is left with the penalties applied.
    pub(crate) fn pick_in(&self, logits: &mut [f32]) -> Option<u32> {
        let (params, seen) = (self.params, self.seen.to_vec());
        let mut sampler = Sampler { seen, ..Sampler::new(params, &[]) };
        sampler.sample(logits, self.position)
    }
}

/// One request's sampler: its parameters and what it has seen.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    // Kept only where a penalty or a ban asks for it; sorted by token.
    seen: Vec<SeenToken>,
    // Tokens that are banned before a position, and whether the prompt has them, too.
    banned: Vec<(u32, bool)>,
    free_from: u64,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    token: u32,
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
        Sampler { params, seen, banned: Vec::new(), free_from: 0, candidates: Vec::new() }
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

    /// Whether the largest logit wins, as it is.
    pub fn is_greedy(&self) -> bool {
        self.params.is_greedy() && self.seen.is_empty()
    }

    /// How the token for `position`, which was [reached](Sampler::reach), is picked, for an executor
    /// that does it. It must be told of by [`Sampler::note`].
    pub fn pick_at(&self, position: u64) -> TokenPick<'_> {
        TokenPick { params: self.params, position, seen: &self.seen }
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
    /// on what else is in the batch. `logits` is left with the penalties applied. `None` where they
    /// are no distribution: any is NaN, or none is above -inf.
    pub fn sample(&mut self, logits: &mut [f32], position: u64) -> Option<u32> {
        self.reach(position);
        self.penalise(logits);
        let likeliest = argmax(logits)?;
        let token = if self.params.takes_largest() {
            likeliest
        } else {
            self.draw(logits, Noise::new(self.params.seed, position)).unwrap_or(likeliest)
        };
        self.note(token);
        Some(token)
    }

    fn penalise(&self, logits: &mut [f32]) {
        let p = &self.params;
        for seen in &self.seen {
            let Some(logit) = logits.get_mut(seen.token as usize) else { continue };
            if seen.generated == SeenToken::BANNED {
                *logit = f32::NEG_INFINITY;
                continue;
            }
            let factor = p.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
            if seen.generated > 0 {
                *logit -= p.frequency_penalty * seen.generated as f32 + p.presence_penalty;
            }
        }
    }

    /// Temperature, then top-k, top-p and min-p on what is left, then a draw.
    fn draw(&mut self, logits: &[f32], noise: Noise) -> Option<u32> {
        let params = self.params;
        let all = &mut self.candidates;
        all.clear();
        let finite = logits.iter().zip(0..).filter(|(l, _)| **l > f32::NEG_INFINITY);
        // Adding 0 makes -0 equal 0, as it is for `argmax`.
        all.extend(finite.map(|(l, token)| Candidate { logit: l.min(f32::MAX) + 0.0, token }));
        // Likeliest first; ties by token, so that the order is total and repeatable.
        let order =
            |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
        let k = params.top_k as usize;
        if k > 0 && k < all.len() {
            all.select_nth_unstable_by(k - 1, order);
            all.truncate(k);
        }
        let max = all.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
        let scale = f64::from(params.scale());
        let log2_weight = |c: &Candidate| (f64::from(c.logit) - f64::from(max)) * scale;
        let weight = |c: &Candidate| log2_weight(c).exp2();
        if params.top_p < 1.0 {
            all.sort_unstable_by(order);
            let enough = all.iter().map(weight).sum::<f64>() * f64::from(params.top_p);
            let mut mass = 0.0;
            let kept = all.iter().take_while(|c| {
                let short = mass < enough;
                mass += weight(c);
                short
            });
            let kept = kept.count().max(1);
            all.truncate(kept);
        }
        if params.min_p > 0.0 {
            all.retain(|c| weight(c) >= f64::from(params.min_p));
        }
        let best =
            all.iter().fold(None, |best, c| Some(noise.challenge(best, log2_weight(c), c.token)));
        best.map(|(_, token)| token)
    }
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
        assert!(!sampler.is_greedy());
        sampler.reach(4);
        assert_eq!(sampler.pick_at(4).seen.len(), 4);
        sampler.reach(5);
        let token = |token| SeenToken { token, generated: 0 };
        assert_eq!(sampler.pick_at(5).seen, [token(1), token(2)]);
    }
}
