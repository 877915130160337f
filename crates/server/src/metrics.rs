//! What Prometheus reads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::Method;
use infernum_runtime::{FinishReason, Stats};
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

/// Upper bounds of the histograms' buckets in seconds, by metric.
const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];
const ITL: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5,
];
const REQUEST: &[f64] = &[
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0,
];

const STEP: &[f64] = &[
    0.000_01, 0.000_02, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_2, 0.000_5, 0.001, 0.002,
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
];

const MASK: &[f64] = &[
    0.000_01, 0.000_02, 0.000_03, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_2, 0.000_3,
    0.000_5, 0.001, 0.002, 0.005, 0.01, 0.05,
];

/// All histograms: name, what it measures, buckets.
const HISTOGRAMS: [(&str, &str, &[f64]); 9] = [
    ("time_to_first_token_seconds", "From arrival to the first token", TTFT),
    ("inter_token_latency_seconds", "From one token to the next", ITL),
    ("e2e_request_latency_seconds", "From arrival to the end", REQUEST),
    ("request_queue_time_seconds", "From arrival to the first step", REQUEST),
    ("request_prefill_time_seconds", "From the first step to the first token", REQUEST),
    ("request_decode_time_seconds", "From the first token to the last", REQUEST),
    ("step_seconds", "A step of the engine", STEP),
    ("step_host_seconds", "What of a step was neither computing nor waiting for it", STEP),
    ("mask_seconds", "To work out which tokens a text's grammar lets come next", MASK),
];
const GAUGES: [(&str, &str); 6] = [
    ("connections", "Connections that are open"),
    ("engines", "Engines of the model that are there"),
    ("num_requests_running", "Requests with memory"),
    ("num_requests_waiting", "Requests that wait for memory"),
    ("kv_cache_usage_perc", "Part of the KV cache that requests hold, 0 to 1"),
    ("cache_config_info", "The KV cache: tokens in a block, and blocks"),
];
const COUNTERS: [(&str, &str); 16] = [
    ("http_requests_total", "Answers, by route, method and status"),
    ("http_refusals_total", "Answers that were errors, by kind: the `code` of the error"),
    ("connections_ended_total", "Connections that the server ended, by what they had not done"),
    ("traces_dropped_total", "Requests whose spans were lost, as the collector did not take them"),
    ("unread_requests_total", "Requests that ended because their output was not read"),
    ("prompt_tokens_total", "Tokens of prompts"),
    ("generation_tokens_total", "Tokens generated"),
    ("request_success_total", "Requests that ended, by reason"),
    ("prefix_cache_hits_total", "Tokens of prompts found in the prefix cache"),
    ("prefix_cache_queries_total", "Tokens of prompts looked for in the prefix cache"),
    ("num_preemptions_total", "How often a request gave its memory up"),
    (
        "malformed_messages_total",
        "Messages between engines and front ends that could not be read, by who received them",
    ),
    ("constrained_tokens_total", "Tokens picked among those that a grammar lets come"),
    ("forced_tokens_total", "Tokens that a grammar forced, which were not picked"),
    (
        "mask_waits_total",
        "How often a text was left out of a step as its grammar's tokens were not worked out yet",
    ),
    ("corrupted_requests_total", "Requests that ended because their logits were not numbers"),
];

const METADATA: Metadata<'static> = Metadata::new("infernum", Level::INFO, None);

/// All metrics of the server.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    prefix: &'static str,
}

impl Metrics {
    /// `prefix` is `infernum` or, for tools made for it, `vllm`.
    pub(crate) fn new(prefix: &'static str) -> Result<Metrics, BuildError> {
        let name = |name: &str| format!("{prefix}:{name}");
        let mut builder = PrometheusBuilder::new();
        for (n, _, buckets) in HISTOGRAMS {
            builder = builder.set_buckets_for_metric(Matcher::Full(name(n)), buckets)?;
        }
        let recorder = builder.build_recorder();
        for (n, text, _) in HISTOGRAMS {
            recorder.describe_histogram(name(n).into(), None, text.into());
        }
        for (n, text) in GAUGES {
            recorder.describe_gauge(name(n).into(), None, text.into());
        }
        for (n, text) in COUNTERS {
            recorder.describe_counter(name(n).into(), None, text.into());
        }
        Ok(Metrics { handle: recorder.handle(), recorder, prefix })
    }

    /// The text that Prometheus reads.
    pub(crate) fn render(&self) -> String {
        self.handle.render()
    }

    /// Counts an answer. `route` is the pattern that a path fitted; methods are those that HTTP
    /// defines: what a client makes up gets no label of its own.
    pub(crate) fn answered(&self, method: &Method, route: Option<&str>, status: u16) {
        const KNOWN: [Method; 6] =
            [Method::GET, Method::POST, Method::DELETE, Method::HEAD, Method::OPTIONS, Method::PUT];
        let method = if KNOWN.contains(method) { method.as_str() } else { "other" };
        let labels = vec![
            Label::new("handler", route.unwrap_or("none").to_owned()),
            Label::new("method", method.to_owned()),
            Label::new("status", status.to_string()),
        ];
        self.count("http_requests_total", labels);
    }

    /// Counts an answer that is an error.
    pub(crate) fn refused(&self, kind: &'static str) {
        self.count("http_refusals_total", vec![Label::from_static_parts("code", kind)]);
    }

    fn count(&self, name: &str, labels: Vec<Label>) {
        let key = Key::from_parts(format!("{}:{name}", self.prefix), labels);
        self.recorder.register_counter(&key, &METADATA).increment(1);
    }

    /// Moves what was measured to its buckets; needed now and then where nobody reads.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Counts requests whose spans are lost.
    pub(crate) fn traces_dropped(&self) -> Counter {
        let key = Key::from_name(format!("{}:traces_dropped_total", self.prefix));
        let counter = self.recorder.register_counter(&key, &METADATA);
        counter.absolute(0);
        counter
    }

    /// Shows how many connections there are.
    pub(crate) fn connections(&self, count: usize) {
        let key = Key::from_name(format!("{}:connections", self.prefix));
        self.recorder.register_gauge(&key, &METADATA).set(count as f64);
    }

    /// Counts connections that were ended.
    pub(crate) fn connections_ended(&self, reason: &'static str, count: usize) {
        let name = format!("{}:connections_ended_total", self.prefix);
        let key = Key::from_parts(name, vec![Label::new("reason", reason)]);
        self.recorder.register_counter(&key, &METADATA).increment(count as u64);
    }

    fn key(&self, model: &str, name: &str, more: &[(&'static str, String)]) -> Key {
        let labels = [("model_name", model.to_owned())].into_iter().chain(more.iter().cloned());
        let labels: Vec<Label> = labels.map(|(k, v)| Label::new(k, v)).collect();
        Key::from_parts(format!("{}:{name}", self.prefix), labels)
    }

    /// The metrics of one model.
    pub(crate) fn model(&self, model: &str, block_size: usize, blocks: usize) -> ModelMetrics {
        let key = |name: &str| self.key(model, name, &[]);
        let counter = |name| self.recorder.register_counter(&key(name), &METADATA);
        let gauge = |name| self.recorder.register_gauge(&key(name), &METADATA);
        let histogram = |name| self.recorder.register_histogram(&key(name), &METADATA);
        let finished = |reason: &str| {
            let labels = [("finished_reason", reason.to_owned())];
            let key = self.key(model, "request_success_total", &labels);
            let counter = self.recorder.register_counter(&key, &METADATA);
            counter.absolute(0);
            counter
        };
        let malformed = |by: &str| {
            let key =
                self.key(model, "malformed_messages_total", &[("received_by", by.to_owned())]);
            let counter = self.recorder.register_counter(&key, &METADATA);
            counter.absolute(0);
            counter
        };
        let labels =
            [("block_size", block_size.to_string()), ("num_gpu_blocks", blocks.to_string())];
        let info = self.key(model, "cache_config_info", &labels);
        self.recorder.register_gauge(&info, &METADATA).set(1.0);
        let metrics = ModelMetrics {
            running: gauge("num_requests_running"),
            waiting: gauge("num_requests_waiting"),
            usage: gauge("kv_cache_usage_perc"),
            ttft: histogram("time_to_first_token_seconds"),
            itl: histogram("inter_token_latency_seconds"),
            e2e: histogram("e2e_request_latency_seconds"),
            queue: histogram("request_queue_time_seconds"),
            prefill: histogram("request_prefill_time_seconds"),
            decode: histogram("request_decode_time_seconds"),
            step: histogram("step_seconds"),
            host: histogram("step_host_seconds"),
            mask: histogram("mask_seconds"),
            prompt_tokens: counter("prompt_tokens_total"),
            generation_tokens: counter("generation_tokens_total"),
            prefix_hits: counter("prefix_cache_hits_total"),
            prefix_queries: counter("prefix_cache_queries_total"),
            preemptions: counter("num_preemptions_total"),
            unread: counter("unread_requests_total"),
            corrupted: counter("corrupted_requests_total"),
            constrained: counter("constrained_tokens_total"),
            forced: counter("forced_tokens_total"),
            mask_waits: counter("mask_waits_total"),
            engines: gauge("engines"),
            malformed: malformed("engine"),
            malformed_here: malformed("front_end"),
            stop: finished("stop"),
            length: finished("length"),
            abort: finished("abort"),
            error: finished("error"),
        };
        metrics.set(&Stats::default(), 0);
        metrics.prompt_tokens.absolute(0);
        metrics.generation_tokens.absolute(0);
        metrics.unread.absolute(0);
        metrics
    }
}

/// Handles of one model's metrics.
pub(crate) struct ModelMetrics {
    running: Gauge,
    waiting: Gauge,
    usage: Gauge,
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) step: Histogram,
    pub(crate) host: Histogram,
    pub(crate) mask: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) generation_tokens: Counter,
    prefix_hits: Counter,
    prefix_queries: Counter,
    preemptions: Counter,
    pub(crate) unread: Counter,
    corrupted: Counter,
    constrained: Counter,
    forced: Counter,
    mask_waits: Counter,
    stop: Counter,
    length: Counter,
    pub(crate) abort: Counter,
    error: Counter,
    engines: Gauge,
    malformed: Counter,
    malformed_here: Counter,
}

impl ModelMetrics {
    /// Shows how the engine stood after its last step; `queued` requests have not reached it yet.
    pub(crate) fn set(&self, stats: &Stats, queued: usize) {
        self.running.set(stats.running as f64);
        self.waiting.set((stats.waiting + queued) as f64);
        self.usage.set(stats.used_blocks as f64 / stats.total_blocks.max(1) as f64);
        self.prefix_hits.absolute(stats.prefix_hits);
        self.prefix_queries.absolute(stats.prefix_queries);
        self.preemptions.absolute(stats.preemptions);
        self.corrupted.absolute(stats.corrupted);
        self.constrained.absolute(stats.constrained);
        self.forced.absolute(stats.forced);
        self.mask_waits.absolute(stats.awaited);
    }

    /// Shows how many engines there are, and how many messages they could not read.
    pub(crate) fn engines(&self, count: usize, malformed: u64) {
        self.engines.set(count as f64);
        self.malformed.absolute(malformed);
    }

    /// Counts a message of an engine's that could not be read.
    pub(crate) fn malformed_here(&self) {
        self.malformed_here.increment(1);
    }

    /// Counts requests that ended with their engine.
    pub(crate) fn lost(&self, requests: usize) {
        self.error.increment(requests as u64);
    }

    /// Counts a request that ended by itself.
    pub(crate) fn finished(&self, reason: FinishReason) {
        match reason {
            FinishReason::Stop => self.stop.increment(1),
            FinishReason::Length => self.length.increment(1),
            FinishReason::Failed | FinishReason::Unfollowed => self.error.increment(1),
        }
    }

    /// Counts a request that a stop string ended.
    pub(crate) fn stopped(&self) {
        self.stop.increment(1);
    }
}

/// Adds a duration to a histogram.
pub(crate) fn record(histogram: &Histogram, time: Duration) {
    histogram.record(time.as_secs_f64());
}

/// One of a counted thing, while it lives.
#[derive(Debug)]
pub(crate) struct Counted(std::sync::Arc<AtomicUsize>);

impl Counted {
    /// Counts one that was added to `count` already.
    pub(crate) fn holding(count: &std::sync::Arc<AtomicUsize>) -> Counted {
        Counted(count.clone())
    }

    /// Adds one.
    pub(crate) fn one(count: &std::sync::Arc<AtomicUsize>) -> Counted {
        count.fetch_add(1, Ordering::AcqRel);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_metrics_are_there_under_both_prefixes() {
        for prefix in ["infernum", "vllm"] {
            let metrics = Metrics::new(prefix).expect("buckets");
            let model = metrics.model("m", 16, 8);
            record(&model.ttft, Duration::from_millis(3));
            let used = Stats {
                used_blocks: 2,
                total_blocks: 8,
                running: 1,
                corrupted: 5,
                awaited: 2,
                ..Stats::default()
            };
            model.set(&used, 3);
            model.finished(FinishReason::Length);
            let text = metrics.render();
            for expected in [
                "num_requests_running{model_name=\"m\"} 1",
                "num_requests_waiting{model_name=\"m\"} 3",
                "kv_cache_usage_perc{model_name=\"m\"} 0.25",
                "time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.001\"} 0",
                "time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.005\"} 1",
                "request_success_total{model_name=\"m\",finished_reason=\"length\"} 1",
                "request_success_total{model_name=\"m\",finished_reason=\"stop\"} 0",
                "cache_config_info{model_name=\"m\",block_size=\"16\",num_gpu_blocks=\"8\"} 1",
                "prompt_tokens_total{model_name=\"m\"} 0",
                "corrupted_requests_total{model_name=\"m\"} 5",
                "mask_waits_total{model_name=\"m\"} 2",
                "prefix_cache_queries_total{model_name=\"m\"} 0",
            ] {
                let line = format!("{prefix}:{expected}");
                assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
            }
        }
    }
}
