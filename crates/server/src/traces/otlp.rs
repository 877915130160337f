//! Requests as spans of OpenTelemetry, with the attributes of its conventions for generative models, by OTLP over HTTP.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use tokio::runtime::{Builder, Runtime};

use super::{Ended, Export, Record};

/// Where a collector takes spans, below its endpoint.
const PATH: &str = "/v1/traces";
/// How long a collector may take for a batch.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends spans to a collector.
pub(super) struct Exporter {
    inner: SpanExporter,
    runtime: Runtime,
    scope: InstrumentationScope,
}

impl Exporter {
    pub(super) fn new(endpoint: &str) -> Result<Exporter, String> {
        let base = endpoint.trim_end_matches('/');
        let url = if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") };
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .build();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client(agent.into()))
            .with_endpoint(url)
            .with_timeout(TIMEOUT)
            .build();
        let mut exporter = exporter.map_err(|e| e.to_string())?;
        let named = std::env::var_os("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty());
        let resource = Resource::builder();
        let resource = if named { resource } else { resource.with_service_name("infernum") };
        exporter.set_resource(&resource.build());
        let scope = InstrumentationScope::builder("infernum");
        Ok(Exporter {
            inner: exporter,
            runtime: Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|e| e.to_string())?,
            scope: scope.with_version(env!("CARGO_PKG_VERSION")).build(),
        })
    }

    /// A request's span and its children.
    fn spans(&self, record: &Record) -> impl Iterator<Item = SpanData> {
        let Record { parent, operation, end, ended } = record;
        let trace = parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace);
        let parent = parent.map_or(0, |parent| parent.span);
        let name = format!("{operation} {}", ended.model);
        let start = end.checked_sub(ended.in_all).unwrap_or(*end);
        let at = |after: Duration| start + after.min(ended.in_all);
        let mut whole = self.span((trace, parent), name, SpanKind::Server, [start, *end]);
        whole.parent_span_is_remote = parent != 0;
        whole.attributes = attributes(operation, ended);
        if let Some(error) = &ended.error {
            whole.status = Status::error(error.clone());
        }
        let id = u64::from_be_bytes(whole.span_context.span_id().to_bytes());
        let queue = ended.queued.map(|queued| ("queue", [start, at(queued)]));
        let first = ended.queued.zip(ended.to_first);
        let prefill = first.map(|(queued, first)| ("prefill", [at(queued.min(first)), at(first)]));
        let decode = ended.to_first.map(|first| ("decode", [at(first), *end]));
        let parts = [queue, prefill, decode].into_iter().flatten();
        let part = |(name, times): (&str, [SystemTime; 2])| {
            self.span((trace, id), name.to_owned(), SpanKind::Internal, times)
        };
        std::iter::once(whole).chain(parts.map(part).collect::<Vec<_>>())
    }

    fn span(
        &self,
        (trace, parent): (u128, u64),
        name: String,
        kind: SpanKind,
        [start_time, end_time]: [SystemTime; 2],
    ) -> SpanData {
        let id = SpanId::from(fastrand::u64(1..));
        let (flags, state) = (TraceFlags::SAMPLED, TraceState::default());
        SpanData {
            span_context: SpanContext::new(TraceId::from(trace), id, flags, false, state),
            parent_span_id: SpanId::from(parent),
            parent_span_is_remote: false,
            span_kind: kind,
            name: name.into(),
            start_time,
            end_time,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

impl Export for Exporter {
    fn export(&mut self, batch: &[Record]) -> Result<(), String> {
        let spans = batch.iter().flat_map(|record| self.spans(record)).collect();
        self.runtime.block_on(self.inner.export(spans)).map_err(|e| e.to_string())
    }
}

fn attributes(operation: &'static str, ended: &Ended) -> Vec<KeyValue> {
    let count = |name, count: usize| KeyValue::new(name, i64::try_from(count).unwrap_or(i64::MAX));
    let seconds = |name, time: Duration| KeyValue::new(name, time.as_secs_f64());
    let finish: Vec<StringValue> = ended.finish.iter().map(|why| StringValue::from(*why)).collect();
    let mut all = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", "infernum"),
        KeyValue::new("gen_ai.request.model", ended.model.clone()),
        KeyValue::new("gen_ai.response.model", ended.model.clone()),
        count("gen_ai.usage.input_tokens", ended.prompt),
        count("gen_ai.usage.cache_read.input_tokens", ended.cached),
        count("gen_ai.usage.output_tokens", ended.completion),
        KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(finish))),
        seconds("gen_ai.latency.e2e", ended.in_all),
    ];
    let id = Some(&ended.request_id).filter(|id| !id.is_empty());
    all.extend(id.map(|id| KeyValue::new("gen_ai.request.id", id.clone())));
    all.extend(ended.queued.map(|time| seconds("gen_ai.latency.time_in_queue", time)));
    all.extend(ended.to_first.map(|time| seconds("gen_ai.latency.time_to_first_token", time)));
    all.extend(ended.error.clone().map(|error| KeyValue::new("error.type", error)));
    all
}

/// Requests of the exporter's, on its own thread, which may wait for them.
#[derive(Debug)]
struct Client(ureq::Agent);

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.0.run(request.map(|body| body.to_vec()))?;
        let (head, mut body) = answer.into_parts();
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}
