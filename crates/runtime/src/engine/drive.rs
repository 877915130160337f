//! The one loop that steps an engine.

use std::ops::ControlFlow;
use std::vec::Drain;

use super::{Engine, EngineError, Event};
use crate::exec::Executor;

impl<E: Executor> Engine<E> {
    /// Steps until nothing is left to do, or `after` breaks: after each step it gets what came of it. Where
    /// a step fails, `after` still hears which requests ended with it.
    ///
    /// A server that takes requests between steps calls [`Engine::step`] itself.
    pub fn drive(
        &mut self,
        mut after: impl FnMut(&Engine<E>, Drain<'_, Event>) -> ControlFlow<()>,
    ) -> Result<(), EngineError> {
        let mut events = Vec::new();
        while !self.is_idle() {
            let stepped = self.step(&mut events);
            let flow = after(self, events.drain(..));
            stepped?;
            if flow.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Steps until nothing is left to do: all that came of it, in order.
    pub fn run_until_idle(&mut self) -> Result<Vec<Event>, EngineError> {
        let mut all = Vec::new();
        self.drive(|_, events| {
            all.extend(events);
            ControlFlow::Continue(())
        })?;
        Ok(all)
    }
}
