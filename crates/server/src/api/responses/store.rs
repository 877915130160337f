//! Responses that are kept for later, in memory that is bounded for each API key.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;

use crate::auth::Tenant;

/// A response that is kept.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// As JSON.
    pub(crate) response: Bytes,
    /// The conversation that ends with it, as JSON.
    pub(crate) history: Bytes,
}

impl Stored {
    /// Bytes that it takes.
    fn size(&self) -> usize {
        self.response.len() + self.history.len()
    }
}

/// Responses by the key that made them, the oldest of which make room.
pub(crate) struct Store {
    most: usize,
    most_bytes: usize,
    kept: Mutex<HashMap<Tenant, Kept>>,
}

/// Those of one key.
#[derive(Default)]
struct Kept {
    /// By age.
    all: BTreeMap<u64, (String, Stored)>,
    ages: HashMap<String, u64>,
    next: u64,
    bytes: usize,
}

impl Store {
    /// Keeps so many responses for each key, and so many bytes of them.
    pub(crate) fn new(most: usize, most_bytes: usize) -> Store {
        Store { most, most_bytes, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<Tenant, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response. One that is too large on its own is not kept.
    pub(crate) fn put(&self, tenant: Tenant, id: &str, stored: Stored) {
        if stored.size() > self.most_bytes || self.most == 0 {
            return;
        }
        let mut kept = self.kept();
        let kept = kept.entry(tenant).or_default();
        kept.remove(id);
        while kept.all.len() >= self.most || kept.bytes + stored.size() > self.most_bytes {
            let Some((_, (oldest, _))) = kept.all.first_key_value() else { break };
            let oldest = oldest.clone();
            kept.remove(&oldest);
        }
        kept.bytes += stored.size();
        kept.ages.insert(id.to_owned(), kept.next);
        kept.all.insert(kept.next, (id.to_owned(), stored));
        kept.next += 1;
    }

    /// A response of a key.
    pub(crate) fn get(&self, tenant: Tenant, id: &str) -> Option<Stored> {
        let kept = self.kept();
        let kept = kept.get(&tenant)?;
        let (_, stored) = kept.all.get(kept.ages.get(id)?)?;
        Some(stored.clone())
    }

    /// Forgets a response of a key; whether there was one.
    pub(crate) fn remove(&self, tenant: Tenant, id: &str) -> bool {
        self.kept().get_mut(&tenant).is_some_and(|kept| kept.remove(id))
    }
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let removed = self.ages.remove(id).and_then(|age| self.all.remove(&age));
        self.bytes -= removed.as_ref().map_or(0, |(_, stored)| stored.size());
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_a_key_make_room() {
        let stored =
            |bytes: usize| Stored { response: vec![0; bytes].into(), history: Bytes::new() };
        let (store, one) = (Store::new(3, 100), Tenant::default());
        let known = |ids: &[&str]| {
            ids.iter().map(|id| u8::from(store.get(one, id).is_some())).collect::<Vec<_>>()
        };
        for id in ["a", "b", "c", "d"] {
            store.put(one, id, stored(10));
        }
        assert_eq!(known(&["a", "b", "c", "d"]), [0, 1, 1, 1], "three at most");
        store.put(one, "e", stored(85));
        assert_eq!(known(&["b", "c", "d", "e"]), [0, 0, 1, 1], "100 bytes at most");
        store.put(one, "f", stored(101));
        assert_eq!(known(&["d", "e", "f"]), [1, 1, 0], "what is too large drops nothing");
        assert!(store.remove(one, "d") && !store.remove(one, "d") && !store.remove(one, "x"));
        assert_eq!(known(&["d", "e"]), [0, 1]);
        store.put(one, "e", stored(5));
        store.put(one, "g", stored(95));
        assert_eq!(known(&["e", "g"]), [1, 1], "its bytes are counted once");
    }
}
