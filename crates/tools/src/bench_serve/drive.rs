//! Drives a server with a load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::args::AskArgs;
use super::client::Client;
use super::error::Error;
use super::load::{Load, Pace, Request};
use super::metrics::Metrics;
use super::record::Record;
use super::summary::Run;
use super::wire::{Ask, Endpoint, PromptKind};
use crate::report as terminal;

/// Drives a server with a load, showing how far it is.
pub(super) fn drive_one(runtime: &Runtime, client: &Arc<Client>, load: &Load) -> Run {
    let bar = terminal::steps_bar("requests", u64::from(load.requests));
    let run = runtime.block_on(measure(client, load, &bar));
    bar.finish_and_clear();
    run
}

/// A client of the server, and how it takes prompts.
pub(super) async fn connect(
    args: &AskArgs,
    url: &str,
    loads: &[Load],
) -> Result<Arc<Client>, Error> {
    let chat = args.endpoint == Endpoint::Chat;
    if chat && args.prompt == Some(PromptKind::Ids) {
        let (name, expected) = ("--prompt", "text, for chat".to_owned());
        return Err(Error::Load { name, expected, found: "ids".to_owned() });
    }
    let ask = Ask {
        model: args.model.clone().unwrap_or_default(),
        endpoint: args.endpoint,
        prompt: args.prompt.unwrap_or(if chat { PromptKind::Text } else { PromptKind::Ids }),
        vocab: args.vocab,
        stream: !args.no_stream,
        ignore_eos: !args.stop_at_eos,
        temperature: args.temperature,
    };
    let mut client = Client::new(url, args.api_key.clone(), ask)?;
    client.timeout = Duration::from_secs_f64(args.timeout);
    client.retries = args.retry;
    let model = client.model(args.model.as_deref()).await?;
    (client.ask.model, client.max_length) = (model.id, model.max_model_len);
    let too_long = |l: &&Load| client.max_length.is_some_and(|limit| l.longest() > limit);
    if let Some((load, limit)) = loads.iter().find(too_long).zip(client.max_length) {
        return Err(Error::TooLong { load: load.name(), needed: load.longest(), limit });
    }
    let mut told = probe(&client).await;
    let refused = matches!(told, Err(Error::Probe { status: Some(400 | 422), .. }));
    if refused && args.prompt.is_none() && !chat {
        client.ask.prompt = PromptKind::Text;
        told = probe(&client).await;
    }
    told.map(|()| Arc::new(client))
}

/// Warms the server up, drives it, and sums up how it did.
async fn measure(client: &Arc<Client>, load: &Load, bar: &ProgressBar) -> Run {
    if load.warmup > 0 {
        drive(client, &load.warm_up(), &ProgressBar::hidden()).await;
    }
    let before = metrics(client).await;
    let records = drive(client, load, bar).await;
    let after = settled(client).await;
    let queue_wait = after.as_ref().zip(before.as_ref()).and_then(|(a, b)| a.queue_wait(b));
    Run::new(load.clone(), records, queue_wait, after.map(|m| m.gauges()))
}

/// Sends a load's requests, and waits for all of them.
async fn drive(client: &Arc<Client>, load: &Load, bar: &ProgressBar) -> Vec<Record> {
    let (load, origin) = (Arc::new(load.clone()), Instant::now());
    let mut tasks = JoinSet::new();
    match load.pace {
        Pace::Concurrency(clients) => {
            let next = Arc::new(AtomicU32::new(0));
            for _ in 0..clients.min(load.requests) {
                let (client, load, next) = (client.clone(), load.clone(), next.clone());
                let bar = bar.clone();
                tasks.spawn(async move {
                    let mut records = Vec::new();
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= load.requests {
                            return records;
                        }
                        records.push(one(&client, &load, index, origin, None).await);
                        bar.inc(1);
                    }
                });
            }
        }
        Pace::Rate(_) => {
            for (index, at) in load.arrivals().enumerate() {
                tokio::time::sleep_until((origin + at).into()).await;
                let (client, load, bar) = (client.clone(), load.clone(), bar.clone());
                tasks.spawn(async move {
                    let due = Some(at.as_secs_f64());
                    let record = one(&client, &load, index as u32, origin, due).await;
                    bar.inc(1);
                    vec![record]
                });
            }
        }
    }
    let mut records = tasks.join_all().await.concat();
    records.sort_unstable_by_key(|r| r.index);
    records
}

async fn one(
    client: &Client,
    load: &Load,
    index: u32,
    origin: Instant,
    due: Option<f64>,
) -> Record {
    let request = load.request(index, client.ask.tokens());
    client.send(&request, Record::new(index, request.output, origin, due)).await
}

/// The server's own figures, where it has any.
async fn metrics(client: &Client) -> Option<Metrics> {
    let (status, body) = client.http.get("/metrics").await.ok()?;
    status.is_success().then(|| Metrics::parse(&String::from_utf8_lossy(&body)))
}

/// The server's figures once it has noticed that clients hung up, or after two seconds.
async fn settled(client: &Client) -> Option<Metrics> {
    for _ in 0..20 {
        let now = metrics(client).await?;
        if now.gauges().running.unwrap_or(0.0) == 0.0 {
            return Some(now);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    metrics(client).await
}

/// One request of a token, to find out whether the server answers at all; not measured.
async fn probe(client: &Client) -> Result<(), Error> {
    let request =
        Request { shared: Vec::new(), own: vec![1], output: 1, hang_up: None, priority: None };
    let record = client.send(&request, Record::new(0, 1, Instant::now(), None)).await;
    match record.error {
        None => Ok(()),
        Some(message) => Err(Error::Probe { status: record.status, message }),
    }
}
