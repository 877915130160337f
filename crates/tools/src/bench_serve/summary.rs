//! A run in figures.

use std::collections::BTreeMap;

use serde::Serialize;

use super::load::Load;
use super::metrics::{Gauges, QueueWait};
use super::record::{Outcome, Record};
use super::stats::Summary;

/// A load that was driven once, and how it went.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Run {
    pub(super) configuration: String,
    pub(super) repeat: u32,
    pub(super) load: Load,
    pub(super) figures: Figures,
    pub(super) records: Vec<Record>,
}

/// Figures of a run; times in seconds, of requests that ended well.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    pub(super) ok: usize,
    pub(super) refused: usize,
    pub(super) failed: usize,
    pub(super) disconnected: usize,
    /// Outputs of another length than asked for.
    pub(super) other_length: usize,
    /// Of what failed or was refused: messages, and how often.
    pub(super) errors: BTreeMap<String, usize>,
    /// Refusals that did not say when to come back.
    pub(super) refused_without_retry_after: usize,
    pub(super) retries: u64,
    /// From the first request to the end of the last.
    pub(super) seconds: f64,
    /// Requests that ended well, a second: the goodput.
    pub(super) requests_per_second: f64,
    /// Tokens of all that came, a second.
    pub(super) output_tokens_per_second: f64,
    /// Prompts that were answered, too.
    pub(super) total_tokens_per_second: f64,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// Prompt tokens that the server had in its cache, where it tells.
    pub(super) cached_tokens: Option<u64>,
    /// Whether tokens are as the server counted, not pieces of text.
    pub(super) counted_by_server: bool,
    pub(super) ttft: Option<Summary>,
    /// Between pieces of text.
    pub(super) itl: Option<Summary>,
    /// Time per output token after the first, by request.
    pub(super) tpot: Option<Summary>,
    pub(super) latency: Option<Summary>,
    pub(super) queue_wait: Option<QueueWait>,
    /// How late this client sent requests.
    pub(super) late: Option<Summary>,
    /// What the server held after the run.
    pub(super) after: Option<Gauges>,
    /// The part of the texts that equal the first configuration's of the same requests.
    pub(super) same_text: Option<f64>,
    /// The most memory that the server has held, where it was started for this run.
    pub(super) server_peak_bytes: Option<u64>,
}

impl Run {
    /// Sums up the records of a load.
    pub(super) fn new(
        load: Load,
        records: Vec<Record>,
        queue_wait: Option<QueueWait>,
        after: Option<Gauges>,
    ) -> Run {
        let figures = Figures { queue_wait, after, ..figures(&records) };
        Run { configuration: String::new(), repeat: 0, load, figures, records }
    }
}

fn figures(records: &[Record]) -> Figures {
    let of = |outcome| records.iter().filter(move |r| r.outcome == outcome);
    let well = || of(Outcome::Ok);
    let answered = || records.iter().filter(|r| r.pieces > 0 || r.outcome == Outcome::Ok);
    let seconds = |time: fn(&Record) -> Option<f64>| Summary::of(well().filter_map(time).collect());
    let start = records.iter().map(|r| r.started).fold(f64::INFINITY, f64::min);
    let end = records.iter().map(Record::ended).fold(0.0, f64::max);
    // A run of no length has no rate.
    let time = (end - start).max(1e-9);
    let prompt_tokens: u64 = answered().filter_map(|r| r.prompt_tokens).map(u64::from).sum();
    let output_tokens: u64 = answered().map(|r| u64::from(r.output_tokens)).sum();
    let cached: Vec<u64> = well().filter_map(|r| r.cached_tokens).map(u64::from).collect();
    let mut errors = BTreeMap::new();
    for message in records.iter().filter_map(|r| r.error.as_ref()) {
        *errors.entry(message.clone()).or_insert(0) += 1;
    }
    Figures {
        ok: well().count(),
        refused: of(Outcome::Refused).count(),
        failed: of(Outcome::Failed).count(),
        disconnected: of(Outcome::Disconnected).count(),
        other_length: well().filter(|r| r.output_tokens != r.asked_tokens).count(),
        errors,
        refused_without_retry_after: of(Outcome::Refused)
            .filter(|r| r.retry_after.is_none())
            .count(),
        retries: records.iter().map(|r| u64::from(r.retries)).sum(),
        seconds: time,
        requests_per_second: well().count() as f64 / time,
        output_tokens_per_second: output_tokens as f64 / time,
        total_tokens_per_second: (prompt_tokens + output_tokens) as f64 / time,
        prompt_tokens,
        output_tokens,
        cached_tokens: (!cached.is_empty()).then(|| cached.iter().sum()),
        counted_by_server: well().all(|r| r.counted_by_server),
        ttft: seconds(|r| r.ttft),
        itl: Summary::of(well().flat_map(|r| &r.gaps).map(|g| f64::from(*g)).collect()),
        tpot: seconds(Record::tpot),
        latency: seconds(|r| Some(r.latency)),
        queue_wait: None,
        late: Summary::of(records.iter().map(|r| r.late).collect()).filter(|s| s.max > 0.0),
        after: None,
        same_text: None,
        server_peak_bytes: None,
    }
}
