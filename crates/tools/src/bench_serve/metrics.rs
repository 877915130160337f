//! The server's own figures, in Prometheus' text format.

use serde::Serialize;

/// Prefixes under which servers keep them.
const PREFIXES: [&str; 2] = ["infernum:", "vllm:"];

/// A histogram's cumulative counts.
#[derive(Clone, Debug, Default, PartialEq)]
struct Histogram {
    /// Upper bounds, ascending, with the number of values at or below each.
    buckets: Vec<(f64, f64)>,
    sum: f64,
    count: f64,
}

/// What is read of `/metrics`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Metrics {
    queue: Histogram,
    gauges: Gauges,
}

/// What the server still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Gauges {
    pub(super) running: Option<f64>,
    pub(super) waiting: Option<f64>,
    pub(super) kv_cache_usage: Option<f64>,
    pub(super) preemptions: Option<f64>,
}

/// How long requests waited to be admitted, in seconds. Percentiles are the upper bounds of the buckets
/// that they fall in: more is not known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct QueueWait {
    pub(super) requests: f64,
    pub(super) mean: f64,
    pub(super) p50_at_most: Option<f64>,
    pub(super) p95_at_most: Option<f64>,
    pub(super) p99_at_most: Option<f64>,
}

impl Metrics {
    /// Reads `/metrics`; what is no sample of interest is passed over.
    pub(super) fn parse(text: &str) -> Metrics {
        let mut metrics = Metrics::default();
        for line in text.lines() {
            let Some(line) = PREFIXES.iter().find_map(|p| line.strip_prefix(p)) else { continue };
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            metrics.sample(name.trim(), labels, value);
        }
        metrics.queue.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        metrics
    }

    /// Series that differ in other labels, such as the model's name, add up.
    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let add = |gauge: &mut Option<f64>| *gauge = Some(gauge.unwrap_or(0.0) + value);
        match name {
            "request_queue_time_seconds_sum" => self.queue.sum += value,
            "request_queue_time_seconds_count" => self.queue.count += value,
            "request_queue_time_seconds_bucket" => {
                let bound = labels.split_once("le=\"").and_then(|(_, l)| l.split_once('"'));
                let Some(Ok(bound)) = bound.map(|(bound, _)| bound.parse()) else { return };
                match self.queue.buckets.iter_mut().find(|(b, _)| *b == bound) {
                    Some((_, count)) => *count += value,
                    None => self.queue.buckets.push((bound, value)),
                }
            }
            "num_requests_running" => add(&mut self.gauges.running),
            "num_requests_waiting" => add(&mut self.gauges.waiting),
            "kv_cache_usage_perc" => add(&mut self.gauges.kv_cache_usage),
            "num_preemptions_total" => add(&mut self.gauges.preemptions),
            _ => {}
        }
    }

    /// What the server holds.
    pub(super) fn gauges(&self) -> Gauges {
        self.gauges
    }

    /// How long the requests between two readings waited.
    pub(super) fn queue_wait(&self, before: &Metrics) -> Option<QueueWait> {
        let requests = self.queue.count - before.queue.count;
        if requests <= 0.0 {
            return None;
        }
        // A series may appear with its first sample.
        let earlier = |bound: f64| {
            before.queue.buckets.iter().find(|(b, _)| *b == bound).map_or(0.0, |(_, count)| *count)
        };
        let at_most = |fraction: f64| {
            let buckets = self.queue.buckets.iter();
            let mut reached =
                buckets.filter(|(bound, count)| count - earlier(*bound) >= fraction * requests);
            reached.next().map(|(bound, _)| *bound).filter(|bound| bound.is_finite())
        };
        Some(QueueWait {
            requests,
            mean: (self.queue.sum - before.queue.sum) / requests,
            p50_at_most: at_most(0.5),
            p95_at_most: at_most(0.95),
            p99_at_most: at_most(0.99),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_the_difference_of_two_readings() {
        let text = |counts: [u32; 3], sum: f64| {
            let [a, b, c] = counts;
            let name = "vllm:request_queue_time_seconds";
            format!(
                "# TYPE {name} histogram\n\
                 {name}_bucket{{model_name=\"m\",le=\"0.1\"}} {a}\n\
                 {name}_bucket{{model_name=\"m\",le=\"1.0\"}} {b}\n\
                 {name}_bucket{{model_name=\"m\",le=\"+Inf\"}} {c}\n\
                 {name}_sum{{model_name=\"m\"}} {sum}\n{name}_count{{model_name=\"m\"}} {c}\n\
                 vllm:num_requests_running{{model_name=\"m\"}} 3\n\
                 vllm:num_requests_running{{model_name=\"n\"}} 1\nnonsense\nvllm:x y z\n"
            )
        };
        let before = Metrics::parse(&text([5, 5, 5], 0.2));
        let after = Metrics::parse(&text([11, 14, 15], 6.2));
        let wait = after.queue_wait(&before).expect("requests waited");
        assert_eq!((wait.requests, wait.mean), (10.0, 0.6));
        assert_eq!((wait.p50_at_most, wait.p95_at_most), (Some(0.1), None));
        assert_eq!(after.gauges().running, Some(4.0));
        assert_eq!(after.queue_wait(&after), None);
        assert_eq!(Metrics::parse("").queue_wait(&before), None);
    }
}
