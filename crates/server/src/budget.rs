//! Memory for the bodies of requests, shared among clients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lanes::Client;

/// Bytes of a body that are not counted: connections bound how many there are of them.
const SMALL: usize = 64 << 10;
/// Bytes that are taken at a time.
const STEP: usize = 256 << 10;

/// Bytes that all bodies may have together.
///
/// A client may hold as much as is left free ("dynamic thresholds", Choudhury and Hahne 1998): one
/// alone gets half, two get a third each, and there is always something left for the next one.
pub(crate) struct Budget {
    all: usize,
    held: Mutex<Accounts>,
}

#[derive(Default)]
struct Accounts {
    total: usize,
    clients: HashMap<Client, usize>,
}

impl Budget {
    pub(crate) fn new(all: usize) -> Arc<Budget> {
        Arc::new(Budget { all, held: Mutex::default() })
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing yet, for a client.
    pub(crate) fn open(self: &Arc<Budget>, client: Client) -> Held {
        Held { budget: self.clone(), client, bytes: 0 }
    }
}

/// What one body holds, until it is dropped.
pub(crate) struct Held {
    budget: Arc<Budget>,
    client: Client,
    bytes: usize,
}

impl Held {
    /// Takes what a body of so many bytes needs; whether there was room.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> bool {
        let wanted = bytes.saturating_sub(SMALL).next_multiple_of(STEP);
        let more = wanted.saturating_sub(self.bytes);
        if more == 0 {
            return true;
        }
        let mut accounts = self.budget.accounts();
        let own = accounts.clients.get(&self.client).copied().unwrap_or(0);
        let free = self.budget.all.saturating_sub(accounts.total);
        if own.saturating_add(more) > free {
            return false;
        }
        accounts.total += more;
        *accounts.clients.entry(self.client).or_default() += more;
        self.bytes = wanted;
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut accounts = self.budget.accounts();
        accounts.total -= self.bytes;
        if let Some(own) = accounts.clients.get_mut(&self.client) {
            *own -= self.bytes;
            if *own == 0 {
                accounts.clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_all() {
        let client = |last| Client::at(std::net::IpAddr::from([127, 0, 0, last]));
        let budget = Budget::new(64 << 20);
        let mut bodies = Vec::new();
        let mut fill = |client| {
            let before = bodies.len();
            loop {
                let mut held = budget.open(client);
                if !held.grow_to(4 << 20) {
                    return bodies.len() - before;
                }
                bodies.push(held);
            }
        };
        let counts = [fill(client(1)), fill(client(2)), fill(client(3))];
        assert_eq!(counts, [8, 4, 2]);
        let mut small = budget.open(client(1));
        assert!(small.grow_to(SMALL), "what is small is always taken");
        assert!(!small.grow_to(4 << 20));
        bodies.clear();
        assert!(small.grow_to(4 << 20));
        drop(small);
        let accounts = budget.accounts();
        assert!(accounts.total == 0 && accounts.clients.is_empty());
    }
}
