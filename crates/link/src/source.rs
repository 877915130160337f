//! What engines are made of, for those that sleep.

use std::collections::BTreeMap;

use infernum_runtime::{AdapterId, AdapterWeights, Engine, EngineError, Executor};

use crate::message::Depth;

/// What an engine is made of, so that it can be made again.
pub trait Source<E: Executor> {
    /// Gives back what the engine holds, which has nothing to do, and keeps of what it is made of as much as `depth` says. There
    /// is no engine where it sleeps already, and is to keep less.
    fn put_away(&mut self, engine: Option<Engine<E>>, depth: Depth);

    /// Makes the engine again, without adapters: what front ends know of it is as before. An error says why it cannot be made
    /// now.
    fn make(&mut self) -> Result<Engine<E>, String>;
}

/// Keeps the engine as it is: sleeping gives nothing back.
impl<E: Executor> Source<E> for Option<Engine<E>> {
    fn put_away(&mut self, engine: Option<Engine<E>>, _: Depth) {
        *self = engine.or_else(|| self.take());
    }

    fn make(&mut self) -> Result<Engine<E>, String> {
        self.take().ok_or_else(|| "it was never put away".to_owned())
    }
}

/// Reads an adapter again, for an engine that wakes. An error says what is wrong, and of which adapter.
pub type Reread = Box<dyn Fn() -> Result<AdapterWeights, String> + Send>;

/// The adapters that an engine has, and has to have again.
#[derive(Default)]
pub(crate) struct Adapters(BTreeMap<AdapterId, Reread>);

impl Adapters {
    pub(crate) fn load<E: Executor>(
        &mut self,
        engine: &mut Engine<E>,
        weights: &AdapterWeights,
        reread: Reread,
    ) -> Result<AdapterId, EngineError> {
        let id = engine.load_adapter(weights)?;
        self.0.insert(id, reread);
        Ok(id)
    }

    /// Notes that an adapter is not wanted any more.
    pub(crate) fn forget(&mut self, id: AdapterId) {
        self.0.remove(&id);
    }

    /// Loads all into an engine that was made again, by the names that they had.
    pub(crate) fn restore<E: Executor>(&self, engine: &mut Engine<E>) -> Result<(), String> {
        self.0.iter().try_for_each(|(id, reread)| {
            engine.load_adapter_as(*id, &reread()?).map_err(|e| e.to_string())
        })
    }
}
