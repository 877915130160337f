//! Drives a server with a load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use tokio::task::JoinSet;

use super::Error;
use super::client::Client;
use super::load::{Load, Pace};
use super::metrics::Metrics;
use super::record::Record;
use super::summary::Run;

/// Warms the server up, drives it, and sums up how it did.
pub(super) async fn measure(client: &Arc<Client>, load: &Load, bar: &ProgressBar) -> Run {
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
    let (status, body) = client.get("/metrics").await.ok()?;
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
pub(super) async fn probe(client: &Client) -> Result<(), Error> {
    let request = super::load::Request {
        shared: Vec::new(),
        own: vec![1],
        output: 1,
        hang_up: None,
        priority: None,
    };
    let record = client.send(&request, Record::new(0, 1, Instant::now(), None)).await;
    match record.error {
        None => Ok(()),
        Some(message) => Err(Error::Probe { status: record.status, message }),
    }
}
