//! What a key may use: requests and tokens a minute.
//!
//! Each is a bucket that fills evenly and holds a minute's worth. A request takes one from the first as it comes, and is
//! let in while anything is left in the second; tokens are taken as they are read and made, so that the second may be
//! overdrawn by what was let in, which those that come later wait for.

use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

/// How much a key may use in a minute; no limit where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) requests: Option<NonZeroU32>,
    pub(crate) tokens: Option<NonZeroU32>,
}

const MINUTE: Duration = Duration::from_secs(60);

/// What is limited: its name, and those of the headers that tell what may be had, what is left, and when all is there
/// again, as OpenAI has them.
struct Kind {
    name: &'static str,
    headers: [&'static str; 3],
}

const REQUESTS: Kind = Kind {
    name: "requests",
    headers: [
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
    ],
};
const TOKENS: Kind = Kind {
    name: "tokens",
    headers: [
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    ],
};

/// Names of all headers that tell of limits.
pub(crate) fn header_names() -> impl Iterator<Item = HeaderName> {
    [REQUESTS, TOKENS].into_iter().flat_map(|kind| kind.headers).map(HeaderName::from_static)
}

/// What a request was refused for, and after how long it would be let in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exceeded {
    pub(crate) what: &'static str,
    pub(crate) most: u32,
    pub(crate) after: Duration,
}

/// What is left of a limit.
#[derive(Clone, Debug)]
struct Bucket {
    most: u32,
    left: f64,
    at: Instant,
}

impl Bucket {
    fn full(most: NonZeroU32, now: Instant) -> Bucket {
        Bucket { most: most.get(), left: f64::from(most.get()), at: now }
    }

    /// The same under another limit: what was used stays used.
    fn limited_to(&self, most: NonZeroU32) -> Bucket {
        let used = f64::from(self.most) - self.left;
        Bucket { most: most.get(), left: f64::from(most.get()) - used, at: self.at }
    }

    fn fill(&mut self, now: Instant) {
        let most = f64::from(self.most);
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / MINUTE.as_secs_f64();
        (self.left, self.at) = ((self.left + most * minutes).min(most), now);
    }

    /// How long it takes until so much is there.
    fn wait(&self, wanted: f64) -> Duration {
        MINUTE.mul_f64((wanted - self.left).max(0.0) / f64::from(self.most))
    }
}

/// What a key has left.
#[derive(Debug)]
pub(crate) struct Account(Mutex<Buckets>);

#[derive(Debug)]
struct Buckets {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

tokio::task_local! {
    /// Who pays for what the request does that this task answers.
    static PAYER: Option<Arc<Account>>;
}

/// Runs what answers a request: whatever it hands to an engine is charged to the account.
pub(crate) fn charged<F: Future>(
    account: Option<Arc<Account>>,
    answer: F,
) -> impl Future<Output = F::Output> {
    PAYER.scope(account, answer)
}

/// Who pays for what this task does; nobody, where nothing is limited.
pub(crate) fn payer() -> Option<Arc<Account>> {
    PAYER.try_with(Clone::clone).ok().flatten()
}

impl Account {
    /// An account with these limits, less what was used of one before it; none where nothing is limited.
    pub(crate) fn open(limits: Limits, before: Option<&Account>) -> Option<Arc<Account>> {
        if limits == Limits::default() {
            return None;
        }
        let now = Instant::now();
        let bucket = |most: Option<NonZeroU32>, before: Option<Bucket>| {
            let new = |most| before.map_or_else(|| Bucket::full(most, now), |b| b.limited_to(most));
            most.map(new)
        };
        let (requests, tokens) = match before.map(Account::buckets) {
            Some(before) => (before.requests.clone(), before.tokens.clone()),
            None => (None, None),
        };
        let (requests, tokens) = (bucket(limits.requests, requests), bucket(limits.tokens, tokens));
        Some(Arc::new(Account(Mutex::new(Buckets { requests, tokens }))))
    }

    fn buckets(&self) -> MutexGuard<'_, Buckets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request in, or says why not.
    pub(crate) fn admit(&self, now: Instant) -> Result<(), Exceeded> {
        let mut buckets = self.buckets();
        let Buckets { requests, tokens } = &mut *buckets;
        for (bucket, kind) in [(&mut *requests, REQUESTS), (tokens, TOKENS)] {
            let Some(bucket) = bucket else { continue };
            bucket.fill(now);
            if bucket.left < 1.0 {
                let after = bucket.wait(1.0);
                return Err(Exceeded { what: kind.name, most: bucket.most, after });
            }
        }
        if let Some(requests) = requests {
            requests.left -= 1.0;
        }
        Ok(())
    }

    /// Takes tokens that were read or made.
    pub(crate) fn spend(&self, tokens: usize) {
        if let Some(bucket) = &mut self.buckets().tokens {
            bucket.left -= tokens as f64;
        }
    }

    /// Tells what is left.
    pub(crate) fn tell(&self, headers: &mut HeaderMap, now: Instant) {
        let mut buckets = self.buckets();
        let Buckets { requests, tokens } = &mut *buckets;
        for (bucket, kind) in [(requests, REQUESTS), (tokens, TOKENS)] {
            let Some(bucket) = bucket else { continue };
            bucket.fill(now);
            let [limit, remaining, reset] = kind.headers.map(HeaderName::from_static);
            headers.insert(limit, bucket.most.into());
            headers.insert(remaining, HeaderValue::from(bucket.left.max(0.0) as u32));
            let wait = bucket.wait(f64::from(bucket.most));
            if let Ok(text) = HeaderValue::try_from(duration(wait)) {
                headers.insert(reset, text);
            }
        }
    }
}

/// As OpenAI writes durations: `20ms`, `1.5s`, `6m0s`.
fn duration(time: Duration) -> String {
    let (seconds, ms) = (time.as_secs(), time.as_millis());
    match seconds {
        0 => format!("{ms}ms"),
        1..60 => format!("{}s", (ms as f64 / 100.0).ceil() / 10.0),
        _ => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(requests: u32, tokens: u32) -> Arc<Account> {
        let limits =
            Limits { requests: NonZeroU32::new(requests), tokens: NonZeroU32::new(tokens) };
        Account::open(limits, None).expect("limits")
    }

    #[test]
    fn requests_are_let_in_as_fast_as_the_limit_says() {
        let (account, start) = (account(60, 0), Instant::now());
        let admitted = |now| (0..200).filter(|_| account.admit(now).is_ok()).count();
        assert_eq!(admitted(start), 60);
        let refused = account.admit(start).expect_err("a minute's worth is gone");
        assert_eq!((refused.what, refused.most), ("requests", 60));
        assert!(
            refused.after > Duration::from_millis(900) && refused.after <= Duration::from_secs(1)
        );
        assert_eq!(admitted(start + Duration::from_secs(10)), 10);
        assert_eq!(
            admitted(start + Duration::from_secs(1000)),
            60,
            "no more than a minute's worth"
        );
    }

    #[test]
    fn tokens_may_be_overdrawn_once() {
        let (account, start) = (account(0, 600), Instant::now());
        account.admit(start).expect("all is left");
        account.spend(1200);
        let refused = account.admit(start).expect_err("overdrawn");
        assert_eq!(refused.what, "tokens");
        assert!(refused.after > Duration::from_secs(59), "{refused:?}");
        assert!(account.admit(start + Duration::from_secs(59)).is_err());
        assert!(account.admit(start + Duration::from_secs(61)).is_ok());
    }

    #[test]
    fn limits_that_change_keep_what_was_used() {
        let (before, start) = (account(10, 0), Instant::now());
        (0..10).for_each(|_| before.admit(start).expect("it is let in"));
        let limits = Limits { requests: NonZeroU32::new(12), tokens: None };
        let after = Account::open(limits, Some(&before)).expect("limits");
        assert_eq!((0..20).filter(|_| after.admit(start).is_ok()).count(), 2);
        assert!(Account::open(Limits::default(), Some(&before)).is_none());
    }

    #[test]
    fn what_is_left_is_told_as_openai_tells_it() {
        let (account, start) = (account(60, 6000), Instant::now());
        account.admit(start).expect("it is let in");
        account.spend(30);
        let mut headers = HeaderMap::new();
        account.tell(&mut headers, start);
        let expected = ["60", "59", "1s", "6000", "5970", "300ms"];
        let found: Vec<_> =
            header_names().map(|n| headers[n].to_str().expect("text").to_owned()).collect();
        assert_eq!(found, expected);
        assert_eq!(duration(Duration::from_secs(363)), "6m3s");
    }

    #[tokio::test]
    async fn what_a_task_does_is_charged() {
        let account = account(0, 10);
        assert!(payer().is_none());
        let found = charged(Some(account.clone()), async { payer() }).await;
        assert!(found.is_some_and(|found| Arc::ptr_eq(&found, &account)));
    }
}
