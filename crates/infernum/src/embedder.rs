//! A model that gives a vector or scores for a text: the shortest way from a folder to numbers.

use std::collections::HashMap;
use std::ops::ControlFlow;

use infernum_ir::Task;
use infernum_runtime::{Engine, EngineOptions, Event, FinishReason, PlanExecutor, Request};

use crate::capacity::Capacity;
use crate::error::Error;
use crate::frontend::Frontend;
use crate::load::Loader;
use crate::machine::Machine;
use crate::options::{ModelOptions, RunOptions};
use crate::tune;

/// A model that is loaded and turns texts into vectors ([`Task::Embed`]) or scores ([`Task::Score`]). What it has of texts
/// computes together.
pub struct Embedder {
    frontend: Frontend,
    engine: Engine<Box<dyn PlanExecutor>>,
}

/// Texts that are computed together.
const SEQUENCES: u64 = 16;

impl Embedder {
    /// Opens a model, compiles it and loads it: on the first GPU if there is one, else on the CPU, unless `run`
    /// says otherwise. A model that generates is refused.
    pub fn open(model: &ModelOptions, run: &RunOptions) -> Result<Embedder, Error> {
        let (opened, machine) = (model.open()?, Machine::open(run.device)?);
        Embedder::load(&Loader::new(&opened, model, run, &machine), Frontend::open(&opened)?)
    }

    /// The same with a loader of your own, which may tell how far it is.
    pub fn load(loader: &Loader<'_>, frontend: Frontend) -> Result<Embedder, Error> {
        if frontend.task().generates() {
            let place = loader.model.files.name().to_owned();
            return Err(Error::Generates { place });
        }
        let capacity = Capacity::new(SEQUENCES, loader.compile.length(loader.model)?);
        tune::autotune(loader)?;
        let engine = loader.start(capacity, EngineOptions::default())?;
        Ok(Embedder { frontend, engine })
    }

    /// What its numbers are: a vector, or scores.
    pub fn task(&self) -> Task {
        self.frontend.task()
    }

    /// A vector, or scores, for each text.
    pub fn embed<T: AsRef<str>>(&mut self, texts: &[T]) -> Result<Vec<Vec<f32>>, Error> {
        let tokenizer = self.frontend.tokenizer();
        let encode = |text: &T| Ok(Request::new(tokenizer.encode(text.as_ref(), true)?, 0));
        let requests: Result<Vec<_>, Error> = texts.iter().map(encode).collect();
        self.compute(requests?)
    }

    /// The same for pairs of texts, as a cross-encoder takes them.
    pub fn embed_pairs<T: AsRef<str>>(&mut self, pairs: &[(T, T)]) -> Result<Vec<Vec<f32>>, Error> {
        let tokenizer = self.frontend.tokenizer();
        let encode = |(a, b): &(T, T)| {
            let (tokens, second) = tokenizer.encode_pair(a.as_ref(), b.as_ref())?;
            Ok(Request { second, ..Request::new(tokens, 0) })
        };
        let requests: Result<Vec<_>, Error> = pairs.iter().map(encode).collect();
        self.compute(requests?)
    }

    /// The same for requests, which generate nothing: of token ids, say.
    pub fn compute(&mut self, requests: Vec<Request>) -> Result<Vec<Vec<f32>>, Error> {
        let mut rows = vec![Vec::new(); requests.len()];
        let mut places = HashMap::new();
        // All are looked at before any is taken, so that a refusal leaves nothing behind.
        requests.iter().try_for_each(|request| self.engine.check(request))?;
        for (i, request) in requests.into_iter().enumerate() {
            places.insert(self.engine.submit(request)?, i);
        }
        let mut failed = false;
        self.engine.drive(|_, events| {
            for event in events {
                match event {
                    Event::Vector(id, row) => {
                        places.get(&id).into_iter().for_each(|i| rows[*i] = row.to_vec());
                    }
                    Event::Finished(_, reason) => failed |= reason == FinishReason::Failed,
                    _ => {}
                }
            }
            ControlFlow::<()>::Continue(())
        })?;
        if failed || rows.iter().any(Vec::is_empty) {
            return Err(Error::NoNumbers);
        }
        Ok(rows)
    }

    /// The text side.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<Box<dyn PlanExecutor>> {
        &self.engine
    }

    /// Both sides, to be driven in another way.
    pub fn into_parts(self) -> (Frontend, Engine<Box<dyn PlanExecutor>>) {
        (self.frontend, self.engine)
    }
}
