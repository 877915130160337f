//! What is asked of a server, and when.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use infernum_ir::random::{self, Rng};
use serde::{Deserialize, Serialize};

use super::error::Error;

/// Bounds on what may be asked for: no server takes longer prompts, no machine holds more clients.
const LONGEST: u32 = 1 << 22;
const MOST_CLIENTS: u32 = 1 << 16;
const MOST_REQUESTS: u32 = 1 << 22;

/// A mix of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// One request at a time, 256 tokens in and 256 out.
    W1,
    /// 16 to 64 at a time, 32–1024 tokens in and 64–256 out.
    #[default]
    W2,
    /// 16 to 64 at a time, sharing a system prompt of 768 tokens; 16–64 of their own, 64–256 out.
    W3,
    /// 512 at a time, 1000 tokens in and 256 out.
    Fixed,
}

/// What clients do. Left out fields have the workload's values.
#[derive(clap::Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct LoadArgs {
    /// What is asked; the flags below change parts of it.
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Clients that each send their next request when the last one ended; several to drive one after
    /// the other.
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with = "rate")]
    concurrency: Vec<u32>,
    /// Requests a second, at random moments (a Poisson process), however the server fares; several to
    /// drive one after the other.
    #[arg(long, value_name = "R", value_delimiter = ',')]
    rate: Vec<f64>,
    /// Requests; 4 a client, at least 8 (64 with --rate) when left out.
    #[arg(long, value_name = "N")]
    requests: Option<u32>,
    /// Tokens of a prompt, without what is shared: a number, or LEAST-MOST.
    #[arg(long, value_name = "TOKENS")]
    input: Option<Span>,
    /// Tokens to generate: a number, or LEAST-MOST.
    #[arg(long, value_name = "TOKENS")]
    output: Option<Span>,
    /// Tokens that all prompts begin with.
    #[arg(long, value_name = "TOKENS")]
    shared: Option<u32>,
    /// Factor of all lengths, for models with a short context.
    #[arg(long, value_name = "FACTOR")]
    scale: Option<f64>,
    /// Fraction of the clients that hang up at a random token.
    #[arg(long, value_name = "FRACTION")]
    disconnect: Option<f64>,
    /// Give each request a random priority in 0..N, for servers that schedule by it.
    #[arg(long, value_name = "N")]
    priorities: Option<u32>,
    /// Requests before the measured ones, one client each.
    #[arg(long, value_name = "N")]
    warmup: Option<u32>,
    /// What all random choices follow from. A server with a prefix cache remembers the prompts of a seed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// Lengths in tokens, uniform from the least to the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    least: u32,
    most: u32,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pace {
    /// So many clients, each one request at a time.
    Concurrency(u32),
    /// So many requests a second, as a Poisson process.
    Rate(f64),
}

/// Requests to send; the same ones for the same values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Load {
    pub(super) workload: Workload,
    #[serde(flatten)]
    pub(super) pace: Pace,
    pub(super) requests: u32,
    pub(super) warmup: u32,
    pub(super) shared: u32,
    pub(super) input: Span,
    pub(super) output: Span,
    pub(super) disconnect: f64,
    pub(super) priorities: u32,
    pub(super) seed: u64,
}

/// One request, in tokens.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    /// Random words of the shared part, each a number that stands for a token.
    pub(super) shared: Vec<u32>,
    pub(super) own: Vec<u32>,
    pub(super) output: u32,
    /// Hangs up when so many pieces of text have come.
    pub(super) hang_up: Option<u32>,
    pub(super) priority: Option<u32>,
}

impl LoadArgs {
    /// One load for each concurrency or rate.
    pub(super) fn loads(&self) -> Result<Vec<Load>, Error> {
        let workload = self.workload.unwrap_or_default();
        if !self.rate.is_empty() && !self.concurrency.is_empty() {
            return Err(invalid("rate", "no concurrency beside it", "both"));
        }
        let paces: Vec<Pace> = match (&self.rate[..], &self.concurrency[..]) {
            ([], []) => workload.clients().iter().map(|n| Pace::Concurrency(*n)).collect(),
            ([], clients) => clients.iter().map(|n| Pace::Concurrency(*n)).collect(),
            (rates, _) => rates.iter().map(|r| Pace::Rate(*r)).collect(),
        };
        paces.into_iter().enumerate().map(|(i, pace)| self.load(workload, pace, i)).collect()
    }

    fn load(&self, workload: Workload, pace: Pace, index: usize) -> Result<Load, Error> {
        let requests = match pace {
            Pace::Concurrency(n) if n == 0 || n > MOST_CLIENTS => {
                return Err(invalid("concurrency", &format!("1 to {MOST_CLIENTS}"), n));
            }
            Pace::Rate(r) if !(r > 0.0 && r <= 1e6) => {
                return Err(invalid("rate", "above 0, to 1000000", r));
            }
            Pace::Concurrency(n) => (4 * n).max(8),
            Pace::Rate(_) => 64,
        };
        let requests = self.requests.unwrap_or(requests);
        if requests == 0 || requests > MOST_REQUESTS {
            return Err(invalid("requests", &format!("1 to {MOST_REQUESTS}"), requests));
        }
        let disconnect = self.disconnect.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&disconnect) {
            return Err(invalid("disconnect", "0 to 1", disconnect));
        }
        let factor = self.scale.unwrap_or(1.0);
        if !(factor > 0.0 && factor <= 1000.0) {
            return Err(invalid("scale", "above 0, to 1000", factor));
        }
        let scaled = |name, tokens: u32| {
            let scaled = (f64::from(tokens) * factor).round();
            if scaled > f64::from(LONGEST) {
                return Err(invalid(name, &format!("up to {LONGEST} tokens"), scaled));
            }
            Ok(scaled as u32)
        };
        let span = |name, Span { least, most }| -> Result<Span, Error> {
            Ok(Span { least: scaled(name, least)?.max(1), most: scaled(name, most)?.max(1) })
        };
        let (shared, input, output) = workload.lengths();
        // Requests of one level must not find another's prompts in the server's cache.
        let level = index as u64;
        Ok(Load {
            workload,
            pace,
            requests,
            warmup: self.warmup.unwrap_or(2).min(MOST_CLIENTS),
            shared: scaled("shared", self.shared.unwrap_or(shared))?,
            input: span("input", self.input.unwrap_or(input))?,
            output: span("output", self.output.unwrap_or(output))?,
            disconnect,
            priorities: self.priorities.unwrap_or(0),
            seed: self.seed.unwrap_or(0).wrapping_mul(0x1_0000).wrapping_add(level << 48),
        })
    }
}

impl Workload {
    /// Clients at a time.
    fn clients(self) -> &'static [u32] {
        match self {
            Workload::W1 => &[1],
            Workload::W2 | Workload::W3 => &[16, 32, 64],
            Workload::Fixed => &[512],
        }
    }

    /// Tokens shared, of each prompt's own, and generated.
    fn lengths(self) -> (u32, Span, Span) {
        let span = |least, most| Span { least, most };
        match self {
            Workload::W1 => (0, span(256, 256), span(256, 256)),
            Workload::W2 => (0, span(32, 1024), span(64, 256)),
            Workload::W3 => (768, span(16, 64), span(64, 256)),
            Workload::Fixed => (0, span(1000, 1000), span(256, 256)),
        }
    }
}

impl Load {
    /// The same kind of load with other requests, for a repetition.
    pub(super) fn again(&self, repeat: u32) -> Load {
        Load { seed: self.seed.wrapping_add(u64::from(repeat)), ..self.clone() }
    }

    /// The same kind of load with other requests, before the measured ones; nobody hangs up.
    pub(super) fn warm_up(&self) -> Load {
        let pace = Pace::Concurrency(self.warmup.max(1));
        let seed = self.seed ^ 1 << 63;
        Load { pace, requests: self.warmup, disconnect: 0.0, seed, ..self.clone() }
    }

    /// What this load is called in tables.
    pub(super) fn name(&self) -> String {
        let workload = format!("{:?}", self.workload).to_lowercase();
        match self.pace {
            Pace::Concurrency(n) => format!("{workload}, {n} at a time"),
            Pace::Rate(r) => format!("{workload}, {r} a second"),
        }
    }

    /// The most tokens that a request may come to.
    pub(super) fn longest(&self) -> u32 {
        self.shared + self.input.most + self.output.most
    }

    /// The request of an index, with tokens below `vocab`.
    pub(super) fn request(&self, index: u32, vocab: u32) -> Request {
        // All seeds of a load, warm-up too, share one system prompt.
        let mut common = random::named("shared", self.shared.into());
        let mut rng = random::named(&format!("request {index}"), self.seed);
        let tokens = |rng: &mut Rng, n: u32| (0..n).map(|_| rng.u32(..vocab.max(1))).collect();
        let (input, output) = (self.input.draw(&mut rng), self.output.draw(&mut rng));
        let hangs_up = rng.f64() < self.disconnect;
        let hang_up = rng.u32(..output);
        Request {
            shared: tokens(&mut common, self.shared),
            own: tokens(&mut rng, input),
            output,
            hang_up: hangs_up.then_some(hang_up),
            priority: (self.priorities > 0).then(|| rng.u32(..self.priorities)),
        }
    }

    /// When each request is sent, from the start; all at once where clients wait for their answers.
    pub(super) fn arrivals(&self) -> impl Iterator<Item = Duration> + use<> {
        let mut rng = random::named("arrivals", self.seed);
        let pace = self.pace;
        let mut at = 0.0;
        (0..self.requests).map(move |_| match pace {
            Pace::Concurrency(_) => Duration::ZERO,
            Pace::Rate(rate) => {
                at -= (1.0 - rng.f64()).ln() / rate;
                Duration::from_secs_f64(at)
            }
        })
    }
}

impl Span {
    fn draw(self, rng: &mut Rng) -> u32 {
        rng.u32(self.least..=self.most)
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        match (least.trim().parse(), most.trim().parse()) {
            (Ok(least), Ok(most)) if 1 <= least && least <= most => Ok(Span { least, most }),
            _ => Err(format!("expected a number of tokens, or LEAST-MOST, found `{text}`")),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.least == self.most {
            return write!(f, "{}", self.least);
        }
        write!(f, "{}–{}", self.least, self.most)
    }
}

impl Serialize for Span {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        (self.least, self.most).serialize(out)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Span, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u32),
            Text(String),
        }
        let text = match Written::deserialize(from)? {
            Written::Number(n) => n.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

fn invalid(name: &'static str, expected: &str, found: impl fmt::Display) -> Error {
    Error::Load { name, expected: expected.to_owned(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn load(args: &LoadArgs) -> Load {
        args.loads().expect("a load").remove(0)
    }

    fn poisson(rate: f64, requests: u32, seed: u64) -> Load {
        let (rate, seed) = (vec![rate], Some(seed));
        load(&LoadArgs { rate, requests: Some(requests), seed, ..LoadArgs::default() })
    }

    #[test]
    fn arrivals_are_a_poisson_process() {
        let (rate, n) = (50.0, 20_000);
        let arrivals: Vec<f64> =
            poisson(rate, n, 7).arrivals().map(|at| at.as_secs_f64() * rate).collect();
        let gaps: Vec<f64> = arrivals.windows(2).map(|a| a[1] - a[0]).collect();
        let count = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / count;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / count;
        let short = gaps.iter().filter(|g| **g < std::f64::consts::LN_2).count() as f64;
        // An exponential distribution of mean 1: variance 1, median ln 2.
        assert!((mean - 1.0).abs() < 0.03, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.08, "variance {variance}");
        assert!((short / count - 0.5).abs() < 0.02, "median");
    }

    #[test]
    fn a_seed_gives_the_same_requests_and_another_gives_others() {
        let (a, b) = (poisson(2.0, 9, 1), poisson(2.0, 9, 2));
        let all = |l: &Load| (0..9).map(|i| l.request(i, 500)).collect::<Vec<_>>();
        assert_eq!(all(&a), all(&a.clone()));
        assert_ne!(all(&a), all(&b));
        assert_ne!(all(&a), all(&a.again(1)));
        assert_ne!(all(&a), all(&a.warm_up()));
        assert!(a.arrivals().eq(a.clone().arrivals()) && !a.arrivals().eq(b.arrivals()));
    }

    #[test]
    fn levels_of_one_load_have_prompts_of_their_own() {
        let args = LoadArgs { workload: Some(Workload::W3), ..LoadArgs::default() };
        let loads = args.loads().expect("loads");
        assert_eq!(loads.len(), 3);
        let requests: Vec<Request> = loads.iter().map(|l| l.request(0, 900)).collect();
        assert_eq!(requests[0].shared, requests[1].shared);
        assert_eq!(requests[0].shared.len(), 768);
        assert_ne!(requests[0].own, requests[1].own);
    }

    #[test]
    fn lengths_scale_and_stay_in_bounds() {
        let args = LoadArgs { scale: Some(0.25), ..LoadArgs::default() };
        let load = load(&args);
        assert_eq!(
            (load.input.to_string(), load.output.to_string()),
            ("8–256".into(), "16–64".into())
        );
        assert_eq!(load.longest(), 320);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let d = LoadArgs::default;
        for (args, name) in [
            (LoadArgs { rate: vec![0.0], ..d() }, "rate"),
            (LoadArgs { rate: vec![f64::NAN], ..d() }, "rate"),
            (LoadArgs { concurrency: vec![0], ..d() }, "concurrency"),
            (LoadArgs { requests: Some(0), ..d() }, "requests"),
            (LoadArgs { disconnect: Some(1.5), ..d() }, "disconnect"),
            (LoadArgs { scale: Some(-1.0), ..d() }, "scale"),
            (LoadArgs { scale: Some(1000.0), input: "9999999".parse().ok(), ..d() }, "input"),
        ] {
            let error = args.loads().expect_err(name).to_string();
            assert!(error.contains(name) && error.contains("expected"), "{error}");
        }
        for text in ["", "0", "9-1", "a", "1-", "-1"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn requests_are_as_long_as_the_load_says(seed in any::<u64>(), index in 0u32..1000) {
            let args = LoadArgs { disconnect: Some(0.5), seed: Some(seed), ..LoadArgs::default() };
            let request = load(&args).request(index, 300);
            prop_assert!((32..=1024).contains(&request.own.len()));
            prop_assert!((64..=256).contains(&request.output));
            prop_assert!(request.hang_up.is_none_or(|at| at < request.output));
            prop_assert!(request.own.iter().all(|t| *t < 300));
        }
    }
}
