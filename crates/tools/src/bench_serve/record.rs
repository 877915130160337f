//! What became of one request.

use std::time::Instant;

use serde::Serialize;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Ok,
    /// 429 or 503, and no retries left.
    Refused,
    Failed,
    /// This client hung up, as it was to.
    Disconnected,
}

/// A request's times, in seconds, and counts.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Record {
    pub(super) index: u32,
    pub(super) outcome: Outcome,
    /// The last attempt's.
    pub(super) status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    pub(super) retries: u32,
    /// Seconds that a refusal asked to wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) retry_after: Option<u64>,
    /// When it was sent, from the start of the run.
    pub(super) started: f64,
    /// How long after it was due; all of it is this client's fault.
    pub(super) late: f64,
    /// From sending to the first text.
    pub(super) ttft: Option<f64>,
    /// From sending to the last text.
    pub(super) last_text: Option<f64>,
    /// From sending to the end.
    pub(super) latency: f64,
    pub(super) prompt_tokens: Option<u32>,
    pub(super) cached_tokens: Option<u32>,
    pub(super) asked_tokens: u32,
    /// As the server counted; pieces of text where it did not.
    pub(super) output_tokens: u32,
    pub(super) counted_by_server: bool,
    pub(super) pieces: u32,
    /// Seconds between pieces of text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) gaps: Vec<f32>,
    /// A hash of the text: equal texts have equal ones.
    pub(super) text: u64,
    #[serde(skip)]
    pub(super) finished: bool,
    #[serde(skip)]
    clock: Clock,
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    origin: Instant,
    /// Seconds from the origin.
    due: Option<f64>,
    start: Instant,
    now: Instant,
    end: Option<Instant>,
}

impl Record {
    /// Of a request that is due `due` seconds after the run's start.
    pub(super) fn new(index: u32, asked_tokens: u32, origin: Instant, due: Option<f64>) -> Record {
        Record {
            index,
            outcome: Outcome::Failed,
            status: None,
            error: None,
            retries: 0,
            retry_after: None,
            started: 0.0,
            late: 0.0,
            ttft: None,
            last_text: None,
            latency: 0.0,
            prompt_tokens: None,
            cached_tokens: None,
            asked_tokens,
            output_tokens: 0,
            counted_by_server: false,
            pieces: 0,
            gaps: Vec::new(),
            text: 0xcbf2_9ce4_8422_2325,
            finished: false,
            clock: Clock { origin, due, start: origin, now: origin, end: None },
        }
    }

    /// The request is sent now.
    pub(super) fn start(&mut self) {
        self.clock.start = Instant::now();
        self.clock.now = self.clock.start;
        self.started = (self.clock.start - self.clock.origin).as_secs_f64();
        self.late = self.clock.due.map_or(0.0, |due| (self.started - due).max(0.0));
    }

    /// What is noted next came now.
    pub(super) fn at(&mut self, now: Instant) {
        self.clock.now = now;
    }

    /// The answer came as a whole: nothing is known of when its tokens came.
    pub(super) fn at_once(&mut self) {
        (self.ttft, self.last_text) = (None, None);
        self.gaps.clear();
    }

    /// The answer ended.
    pub(super) fn end(&mut self, now: Instant) {
        self.clock.end = Some(now);
    }

    /// A piece of text came; an empty one is none.
    pub(super) fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let at = (self.clock.now - self.clock.start).as_secs_f64();
        match self.last_text {
            Some(last) => self.gaps.push((at - last) as f32),
            None => self.ttft = Some(at),
        }
        self.last_text = Some(at);
        self.pieces += 1;
        if !self.counted_by_server {
            self.output_tokens += 1;
        }
        // FNV-1a.
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        self.text = text.bytes().fold(self.text, mix);
    }

    /// The server counted tokens.
    pub(super) fn usage(&mut self, prompt: Option<u32>, output: Option<u32>, cached: Option<u32>) {
        self.prompt_tokens = prompt.or(self.prompt_tokens);
        self.cached_tokens = cached.or(self.cached_tokens);
        if let Some(output) = output {
            self.output_tokens = output;
            self.counted_by_server = true;
        }
    }

    pub(super) fn finish(&mut self, outcome: Outcome) {
        let end = self.clock.end.unwrap_or_else(Instant::now);
        self.latency = (end - self.clock.start).as_secs_f64();
        self.outcome = outcome;
    }

    /// Seconds from the start of the run to the end of this request.
    pub(super) fn ended(&self) -> f64 {
        self.started + self.latency
    }

    /// Seconds for each token after the first.
    pub(super) fn tpot(&self) -> Option<f64> {
        let after_first = self.output_tokens.checked_sub(1).filter(|n| *n > 0)?;
        Some((self.last_text? - self.ttft?) / f64::from(after_first))
    }

    #[cfg(test)]
    pub(super) fn test() -> Record {
        Record::new(0, 4, Instant::now(), None)
    }
}
