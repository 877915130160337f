//! What engines are asked that takes a while: to sleep and to wake, to load adapters and to unload them.

use std::sync::Arc;

use infernum_link::{AdapterPath, AdapterRefused, Command, Refusal, Sleep};

use super::outbox::locked;
use super::worker::{Line, Worker};

/// Why engines have not done something.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Undone {
    /// One is not there, or no longer.
    Gone,
    /// One says why.
    Refused(Refusal),
}

impl Worker {
    /// Has all engines that are there give back their memory, and waits until they have.
    pub(crate) async fn sleep(&self, how: Sleep) -> Result<(), Undone> {
        all(self.done(&self.there(), |key| Command::Sleep(key, how)).await)
    }

    /// Has them be as they were before, and waits for it.
    pub(crate) async fn wake(&self) -> Result<(), Undone> {
        all(self.done(&self.there(), Command::Wake).await)
    }

    /// Has an adapter loaded by all engines that are there and have none of its name: by each of them, or by none. One that was
    /// started anew so gets what it has lost.
    pub(crate) async fn load_adapter(&self, adapter: AdapterPath) -> Result<(), Undone> {
        let name = &adapter.name;
        let there = self.there();
        let lacking = |line: &&Arc<Line>| !line.status.serves(Some(name));
        let lines: Vec<Arc<Line>> = there.iter().filter(lacking).cloned().collect();
        if lines.is_empty() && !there.is_empty() {
            let taken = AdapterRefused::Taken { name: name.clone() };
            return Err(Undone::Refused(Refusal::from(&taken)));
        }
        let done = self.done(&lines, |key| Command::LoadAdapter(key, adapter.clone())).await;
        let have = lines.iter().zip(&done).filter(|(_, done)| done.is_ok());
        let have: Vec<Arc<Line>> = have.map(|(line, _)| line.clone()).collect();
        if have.len() < lines.len() {
            // One that does not hear it any more has lost the adapter as well.
            self.done(&have, |key| Command::UnloadAdapter(key, name.clone())).await;
        }
        all(done)
    }

    /// Has an adapter unloaded by all engines that are there and have it; where none is known to, all say why not.
    pub(crate) async fn unload_adapter(&self, name: &str) -> Result<(), Undone> {
        let known = self.has_adapter(name);
        let mut lines = self.there();
        lines.retain(|line| !known || line.status.serves(Some(name)));
        all(self.done(&lines, |key| Command::UnloadAdapter(key, name.to_owned())).await)
    }

    /// The engines that are there.
    fn there(&self) -> Vec<Arc<Line>> {
        self.lines().iter().filter(|line| line.status.alive()).cloned().collect()
    }

    /// Sends a command to engines, and waits until each has done it, or not.
    async fn done(
        &self,
        lines: &[Arc<Line>],
        command: impl Fn(u64) -> Command,
    ) -> Vec<Result<(), Undone>> {
        let mut awaited = Vec::new();
        for line in lines {
            let key = self.key();
            awaited.push((line, locked(&line.outbox).await_done(key)));
            if line.link.send(command(key)).is_err() {
                locked(&line.outbox).unsent(key, None); // who waits hears that it is gone
            }
        }
        let several = self.lines().len() > 1;
        let mut all = Vec::new();
        for (line, done) in awaited {
            let done = done.await.map_err(|_| Undone::Gone);
            let named = |refusal: Refusal| {
                if !several {
                    return Undone::Refused(refusal);
                }
                let message = format!("the engine at {}: {}", line.name, refusal.message);
                Undone::Refused(Refusal { message, ..refusal })
            };
            all.push(done.and_then(|done| done.map_err(named)));
        }
        all
    }
}

/// Whether all have done something; the first reason why not.
fn all(done: Vec<Result<(), Undone>>) -> Result<(), Undone> {
    if done.is_empty() {
        return Err(Undone::Gone);
    }
    done.into_iter().collect()
}
