//! CPU work of requests: off the runtime, on a bounded number of threads, shared fairly.
//!
//! Reading JSON, rendering a template and encoding a text take as long as the client's body makes
//! them. So they are jobs for these threads. A job's lane is chosen by its size, and each lane has
//! threads of its own, so that small jobs never wait behind big ones; the threads of bigger jobs
//! run at lower priority, so that they do not slow down an engine on the CPU either.
//!
//! In a lane, clients take turns by start-time fair queueing (Goyal et al. 1996): each job gets
//! the time at which it would start if its client had a fair share for itself, and the earliest
//! goes first. A client with a thousand jobs thus delays another's by one at most.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Extensions;
use tokio::sync::oneshot;

use super::auth::Tenant;
use super::error::ApiError;

/// What a job of so many bytes is expected to take, until it is known.
const BYTE: Duration = Duration::from_nanos(200);
/// What any job takes.
const JOB: Duration = Duration::from_micros(50);
/// Clients whose shares a lane keeps; beyond that, it begins anew.
const REMEMBERED: usize = 4096;
/// Tokens that are told on a thread of the runtime without another one taking its tasks over.
const FEW_TOKENS: usize = 256;

/// Whose share of the machine a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    /// Who brings an API key, by its digest.
    Key([u8; 32]),
    /// Who brings none, by address.
    Address(IpAddr),
}

impl Client {
    /// Who sent a request, by what the way here noted.
    pub(crate) fn of(extensions: &Extensions) -> Client {
        let key = extensions.get::<Tenant>().and_then(|tenant| tenant.client());
        let client = key.or_else(|| extensions.get().copied());
        client.unwrap_or_else(|| Client::at(Ipv4Addr::LOCALHOST.into()))
    }

    /// A client by where it calls from. A host has all addresses of an IPv6 network of 64 bits.
    pub(crate) fn at(address: IpAddr) -> Client {
        Client::Address(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

/// Jobs of one range of sizes.
struct Size {
    /// Bytes of its jobs at most.
    bytes: usize,
    /// Cores for each of its threads.
    cores: usize,
    /// How much its threads yield to others, as `nice` has it.
    nice: i32,
}

const SIZES: [Size; 3] = [
    Size { bytes: 8 << 10, cores: 1, nice: 0 },
    Size { bytes: 128 << 10, cores: 2, nice: 5 },
    Size { bytes: usize::MAX, cores: 4, nice: 15 },
];

/// Threads for jobs; they end when this is dropped.
pub(crate) struct Lanes(Vec<Arc<Lane>>);

impl Lanes {
    /// Starts the threads.
    pub(crate) fn start() -> std::io::Result<Lanes> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        // What was started ends with this, if a thread cannot be.
        let mut lanes = Lanes(Vec::new());
        for size in &SIZES {
            let lane = Arc::new(Lane::default());
            lanes.0.push(lane.clone());
            for _ in 0..(cores / size.cores).clamp(1, 8) {
                let lane = lane.clone();
                std::thread::Builder::new().name("requests".to_owned()).spawn(move || {
                    yield_to_others(size.nice);
                    lane.serve();
                })?;
            }
        }
        Ok(lanes)
    }

    /// Does work that a client gave `bytes` of input for. It is not begun once nobody waits for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: Client,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let bug = || ApiError::internal("the server has a bug; its log says where");
        let (sender, done) = oneshot::channel();
        let job = move || {
            if !sender.is_closed() {
                let _ = sender.send(catch_unwind(AssertUnwindSafe(work))); // it may have gone since
            }
        };
        let lane = self.0.iter().zip(&SIZES).find(|(_, size)| bytes <= size.bytes);
        let (lane, _) = lane.ok_or_else(bug)?;
        lane.push(client, JOB + BYTE * u32::try_from(bytes).unwrap_or(u32::MAX), Box::new(job));
        let done: Result<Result<_, Box<dyn Any + Send>>, _> = done.await;
        done.ok().and_then(Result::ok).ok_or_else(bug)?
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        for lane in &self.0 {
            lane.queue().ended = true;
            lane.ready.notify_all();
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Lane {
    queue: Mutex<Queue<Client, Job>>,
    ready: Condvar,
}

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue<Client, Job>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, client: Client, expected: Duration, job: Job) {
        self.queue().push(client, expected, job);
        self.ready.notify_one();
    }

    /// Does jobs until the lane ends.
    fn serve(&self) {
        let mut queue = self.queue();
        loop {
            if queue.ended {
                return;
            }
            let Some((client, expected, job)) = queue.pop() else {
                queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let start = Instant::now();
            job();
            queue = self.queue();
            queue.charge(client, start.elapsed().saturating_sub(expected));
        }
    }
}

/// Jobs in the order of fair shares.
struct Queue<C, J> {
    /// By the time at which a job would start; those of one time in the order they came.
    jobs: BTreeMap<(Duration, u64), (C, Duration, J)>,
    /// When each client's last job would end.
    ends: HashMap<C, Duration>,
    /// The start of the job that was begun last.
    now: Duration,
    pushed: u64,
    ended: bool,
}

impl<C, J> Default for Queue<C, J> {
    fn default() -> Queue<C, J> {
        let (jobs, ends) = (BTreeMap::new(), HashMap::new());
        Queue { jobs, ends, now: Duration::ZERO, pushed: 0, ended: false }
    }
}

impl<C: Clone + Eq + Hash, J> Queue<C, J> {
    fn push(&mut self, client: C, expected: Duration, job: J) {
        if self.ends.len() >= REMEMBERED {
            self.ends.clear();
        }
        let end = self.ends.entry(client.clone()).or_default();
        let start = self.now.max(*end);
        *end = start + expected;
        self.pushed += 1;
        self.jobs.insert((start, self.pushed), (client, expected, job));
    }

    fn pop(&mut self) -> Option<(C, Duration, J)> {
        let Some(((start, _), job)) = self.jobs.pop_first() else {
            self.ends.clear(); // nobody waits, so nobody is owed anything
            return None;
        };
        self.now = start;
        Some(job)
    }

    /// Has a client pay for what its job took beyond what was expected.
    fn charge(&mut self, client: C, more: Duration) {
        *self.ends.entry(client).or_insert(self.now) += more;
    }
}

/// Lowers the calling thread's priority.
fn yield_to_others(nice: i32) {
    // Elsewhere it would be that of the whole process.
    #[cfg(target_os = "linux")]
    if nice > 0
        && let Err(error) = rustix::process::setpriority_process(None, nice)
    {
        tracing::debug!(%error, "a thread keeps its priority");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}

/// Does work on so many tokens; where they are many, another thread takes the runtime's tasks over
/// for the time being.
pub(crate) fn aside<T>(tokens: usize, work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    let many = tokens > FEW_TOKENS
        && Handle::try_current().is_ok_and(|h| h.runtime_flavor() == RuntimeFlavor::MultiThread);
    if many { tokio::task::block_in_place(work) } else { work() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn order(queue: &mut Queue<u8, u32>) -> Vec<(u8, u32)> {
        std::iter::from_fn(|| queue.pop()).map(|(client, _, job)| (client, job)).collect()
    }

    #[test]
    fn clients_take_turns_however_many_jobs_they_have() {
        let mut queue = Queue::default();
        (0..1000).for_each(|job| queue.push(1, MS, job));
        assert_eq!(queue.pop().map(|(_, _, job)| job), Some(0));
        queue.push(2, MS, 0);
        queue.push(2, MS, 1);
        let order = order(&mut queue);
        let of_second: Vec<usize> = (0..order.len()).filter(|i| order[*i].0 == 2).collect();
        assert_eq!(of_second, [0, 2]);
        let own = order.iter().filter(|(client, _)| *client == 1).map(|(_, job)| *job);
        assert!(own.is_sorted(), "a client's own jobs keep their order");
    }

    #[test]
    fn shares_are_of_time_not_of_jobs() {
        let mut queue = Queue::default();
        (0..10).for_each(|job| queue.push(1, 10 * MS, job));
        (0..100).for_each(|job| queue.push(2, MS, job));
        let order = order(&mut queue);
        let before = order.iter().position(|job| *job == (1, 5)).expect("it");
        let small = order[..before].iter().filter(|(client, _)| *client == 2).count();
        assert!((45..=55).contains(&small), "{small}");
    }

    #[test]
    fn what_took_longer_than_expected_is_paid_for() {
        let mut queue = Queue::default();
        queue.push(1, MS, 0);
        queue.push(2, MS, 0);
        for _ in 0..2 {
            let (client, ..) = queue.pop().expect("two jobs");
            queue.charge(client, if client == 1 { 10 * MS } else { Duration::ZERO });
        }
        queue.push(1, MS, 1);
        (1..9).for_each(|job| queue.push(2, MS, job));
        assert_eq!(order(&mut queue).pop(), Some((1, 1)));
    }

    #[test]
    fn clients_are_forgotten() {
        let mut queue = Queue::default();
        for client in 0..100_000u32 {
            queue.push(client, MS, ());
            assert!(queue.ends.len() <= REMEMBERED + 1);
        }
    }

    fn host(last: u8) -> Client {
        Client::at(IpAddr::from([127, 0, 0, last]))
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        let at = |text: &str| Client::at(text.parse().expect("an address"));
        assert_eq!(at("2001:db8::1"), at("2001:db8::2"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
    }

    /// Big jobs and a crowd of another client's hold up a small one by one job at most.
    #[tokio::test]
    async fn small_jobs_do_not_wait() {
        let lanes = Arc::new(Lanes::start().expect("threads"));
        let long = Duration::from_millis(300);
        let mut crowd = Vec::new();
        for _ in 0..32 {
            let lanes = lanes.clone();
            crowd.push(tokio::spawn(async move {
                let work = move || {
                    std::thread::sleep(long);
                    Ok(())
                };
                lanes.run(host(1), 4 << 20, work).await
            }));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let start = Instant::now();
        assert_eq!(lanes.run(host(1), 100, || Ok(7)).await.expect("done"), 7);
        assert!(start.elapsed() < long, "{:?}", start.elapsed());
        crowd.iter().for_each(tokio::task::JoinHandle::abort);
        // What nobody waits for is not begun: the lane is free after the jobs under way.
        let start = Instant::now();
        lanes.run(host(1), 4 << 20, || Ok(())).await.expect("done");
        assert!(start.elapsed() < 4 * long, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn a_bug_in_one_job_stays_there() {
        let lanes = Lanes::start().expect("threads");
        for _ in 0..20 {
            let work = || -> Result<(), ApiError> { panic!("a bug") };
            assert_eq!(lanes.run(host(1), 1, work).await.expect_err("it").status.as_u16(), 500);
        }
        lanes.run(host(1), 1, || Ok(())).await.expect("threads are there yet");
    }
}
