//! Picks the next token from logits.

use serde::{Deserialize, Serialize};

/// How a request's tokens are picked. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Logits are divided by it; 0 picks the largest.
    pub temperature: f32,
    /// Only the `k` largest compete; 0 for all.
    pub top_k: u32,
    /// Only the smallest set of most likely tokens with at least this probability competes
    /// (Holtzman et al. 2019).
    pub top_p: f32,
    /// Only tokens at least this likely, relative to the likeliest, compete (Nguyen et al. 2024).
    pub min_p: f32,
    /// Logits of tokens seen in prompt or output are divided by it when positive, multiplied when
    /// negative (Keskar et al. 2019).
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it was generated at all.
    pub presence_penalty: f32,
    /// Fixes the random choices.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

/// A parameter is outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{name}`: expected {expected}, found {found}")]
pub struct SamplingError {
    /// The parameter.
    pub name: &'static str,
    /// Its range.
    pub expected: &'static str,
    /// What was given.
    pub found: f32,
}

impl SamplingParams {
    /// Whether the largest logit wins, as it is: no chance and no penalty.
    pub fn is_greedy(&self) -> bool {
        let penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty);
        self.temperature == 0.0 && penalties == (1.0, 0.0, 0.0)
    }

    /// Refuses parameters that mean nothing.
    pub fn check(&self) -> Result<(), SamplingError> {
        let within = |name, found: f32, low: f32, high: f32, expected| {
            if (low..=high).contains(&found) {
                Ok(())
            } else {
                Err(SamplingError { name, expected, found })
            }
        };
        within("temperature", self.temperature, 0.0, 100.0, "0 to 100")?;
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "above 0 and at most 1")?;
        within("min_p", self.min_p, 0.0, 1.0, "0 to 1")?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "0.01 to 100")?;
        within("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "-100 to 100")?;
        within("presence_penalty", self.presence_penalty, -100.0, 100.0, "-100 to 100")
    }
}

/// How often a token was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    in_prompt: bool,
    generated: u32,
}

/// One request's sampler: its parameters and what it has seen.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    // Kept only where a penalty asks for it; sorted by token.
    seen: Vec<(u32, Seen)>,
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
        let mut sampler = Sampler { params, seen: Vec::new(), candidates: Vec::new() };
        if params.repetition_penalty != 1.0 {
            for &token in prompt {
                sampler.seen(token).in_prompt = true;
            }
        }
        sampler
    }

    fn seen(&mut self, token: u32) -> &mut Seen {
        let at = match self.seen.binary_search_by_key(&token, |(t, _)| *t) {
            Ok(at) => at,
            Err(at) => {
                self.seen.insert(at, (token, Seen::default()));
                at
            }
        };
        &mut self.seen[at].1
    }

    fn has_penalties(&self) -> bool {
        let p = &self.params;
        p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0
    }

    /// Picks the token for `position` (its index in the sequence) and remembers it.
    ///
    /// The choice depends on the parameters, the logits, what was seen, and `position` alone: not
    /// on what else is in the batch. `logits` is left with the penalties applied. NaN never wins.
    pub fn sample(&mut self, logits: &mut [f32], position: u64) -> u32 {
        self.penalise(logits);
        let token = if self.params.temperature == 0.0 {
            argmax(logits)
        } else {
            self.draw(logits, uniform(self.params.seed, position))
        };
        if self.has_penalties() {
            self.seen(token).generated += 1;
        }
        token
    }

    fn penalise(&self, logits: &mut [f32]) {
        let p = &self.params;
        for (token, seen) in &self.seen {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            let factor = p.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
            if seen.generated > 0 {
                *logit -= p.frequency_penalty * seen.generated as f32 + p.presence_penalty;
            }
        }
    }

    /// Temperature, then top-k, top-p and min-p on what is left, then a draw by `u` in [0, 1).
    fn draw(&mut self, logits: &[f32], u: f64) -> u32 {
        let params = self.params;
        let all = &mut self.candidates;
        all.clear();
        let scaled = logits.iter().enumerate().filter(|(_, l)| **l > f32::NEG_INFINITY);
        all.extend(
            scaled.map(|(i, l)| Candidate { logit: l / params.temperature, token: i as u32 }),
        );
        // Likeliest first; ties by token, so that the order is total and repeatable.
        let order =
            |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
        let k = params.top_k as usize;
        if k > 0 && k < all.len() {
            all.select_nth_unstable_by(k - 1, order);
            all.truncate(k);
        }
        if params.top_p < 1.0 || k > 0 {
            all.sort_unstable_by(order);
        }
        let max = all.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
        let weight = |c: &Candidate| f64::from(c.logit - max).exp();
        if params.top_p < 1.0 {
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
        let mut left = u * all.iter().map(weight).sum::<f64>();
        for c in all.iter() {
            left -= weight(c);
            if left < 0.0 {
                return c.token;
            }
        }
        // Rounding may leave a sliver; no candidate at all means no finite logit.
        all.last().map_or_else(|| argmax(logits), |c| c.token)
    }
}

/// Index of the largest value, the first of equals; NaN counts as smallest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &l) in logits.iter().enumerate() {
        if l > best.0 {
            best = (l, i as u32);
        }
    }
    best.1
}

/// A number in [0, 1) for a seed and a position: two rounds of SplitMix64's finaliser
/// (Steele et al. 2014), whose outputs for distinct inputs are independent for our purpose.
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let step = position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ step);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 1.5];

    fn frequencies(params: SamplingParams, draws: u64) -> [f64; 5] {
        let mut counts = [0.0; 5];
        let mut sampler = Sampler::new(params, &[]);
        for position in 0..draws {
            counts[sampler.sample(&mut LOGITS.clone(), position) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(logits: &[f32]) -> Vec<f64> {
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|w| w / sum).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_and_never_nan() {
        let mut sampler = Sampler::new(SamplingParams::default(), &[]);
        assert_eq!(sampler.sample(&mut [1.0, 3.0, 3.0], 0), 1);
        assert_eq!(sampler.sample(&mut [f32::NAN, -1.0, f32::NEG_INFINITY], 0), 1);
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
        assert_eq!(sampler.sample(&mut logits, 0), 1, "the prompt's 4.0 is halved");
        assert_eq!(logits, [2.0, 3.0, 1.0, -2.0]);
        let mut logits = [4.0, 3.0, 1.0, -1.0];
        assert_eq!(sampler.sample(&mut logits, 1), 0);
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
        let one: Vec<u32> = (0..64).map(|p| kept.sample(&mut LOGITS.clone(), p)).collect();
        assert_eq!(one, line(7), "a sampler's history does not change its draws");
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let bad = SamplingParams { top_p: 0.0, ..Default::default() };
        assert_eq!(bad.check().map_err(|e| e.name), Err("top_p"));
        let bad = SamplingParams { temperature: f32::NAN, ..Default::default() };
        assert_eq!(bad.check().map_err(|e| e.name), Err("temperature"));
        assert_eq!(SamplingParams::default().check(), Ok(()));
    }
}
