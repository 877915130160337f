//! Which adapter is in which of the executor's slots.

use std::num::NonZeroU64;

use super::{AdapterId, Engine, EngineError};
use crate::exec::{AdapterWeights, Executor};

/// An adapter in a slot.
#[derive(Clone, Copy, Debug)]
struct Entry {
    id: AdapterId,
    /// Unloaded: it takes no more requests, and its slot is free when those that it has are gone.
    leaving: bool,
}

/// The slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    entries: Vec<Option<Entry>>,
    /// The number of the last adapter that was loaded.
    loaded: u64,
}

impl Slots {
    pub(super) fn new(count: usize) -> Slots {
        Slots { entries: vec![None; count], loaded: 0 }
    }

    /// Where an adapter is, whether it was unloaded or not.
    pub(super) fn find(&self, id: AdapterId) -> Option<usize> {
        self.entries.iter().position(|entry| entry.is_some_and(|entry| entry.id == id))
    }

    /// Whether it takes requests.
    pub(super) fn takes(&self, id: AdapterId) -> bool {
        self.entries.iter().flatten().any(|entry| entry.id == id && !entry.leaving)
    }
}

impl<E: Executor> Engine<E> {
    /// Puts an adapter into a free slot, between two steps: requests may name it from now on. Others wait for nothing but
    /// the copy of its weights.
    pub fn load_adapter(&mut self, weights: &AdapterWeights) -> Result<AdapterId, EngineError> {
        let id = AdapterId(NonZeroU64::MIN.saturating_add(self.adapters.loaded));
        self.load_adapter_as(id, weights)?;
        Ok(id)
    }

    /// As [`Engine::load_adapter`], by the name that another engine of the same plan gave it, in whose place this one is.
    pub fn load_adapter_as(
        &mut self,
        id: AdapterId,
        weights: &AdapterWeights,
    ) -> Result<(), EngineError> {
        let is_used =
            |id: AdapterId| self.sequences.iter().any(|(_, s)| s.request.adapter == Some(id));
        let is_free =
            |entry: &Option<Entry>| entry.is_none_or(|entry| entry.leaving && !is_used(entry.id));
        let slots = self.adapters.entries.len();
        let slot = self.adapters.entries.iter().position(is_free);
        let slot = slot.ok_or(EngineError::NoAdapterSlot { slots })?;
        // Whatever becomes of it: what was there before is gone.
        self.adapters.entries[slot] = None;
        self.executor.set_adapter(slot, weights)?;
        self.adapters.loaded = self.adapters.loaded.max(id.0.get());
        self.adapters.entries[slot] = Some(Entry { id, leaving: false });
        Ok(())
    }

    /// Takes no more requests of an adapter; those that it has run to their ends, and only then another may take its
    /// place. Unknown ones are ignored.
    pub fn unload_adapter(&mut self, id: AdapterId) {
        let mut entries = self.adapters.entries.iter_mut().flatten();
        entries.find(|entry| entry.id == id).into_iter().for_each(|entry| entry.leaving = true);
    }
}
