//! What engines are made of, for those that sleep.

use infernum_runtime::{Engine, Executor};

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
