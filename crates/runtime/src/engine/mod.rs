//! Turns requests into steps: chunked prefill, decode, sampling.

mod options;
mod request;

pub use options::{Batching, EngineLimits, EngineOptions, KvMode, OptionsError, Policy, Stats};
pub use request::{EngineError, Event, FinishReason, Request, RequestId, State};

use infernum_ir::Dims;

use crate::kv::BlockPool;
use crate::sampler::Sampler;
use crate::{Executor, StepInputs};

struct Sequence {
    id: RequestId,
    request: Request,
    sampler: Sampler,
    /// Prompt and output.
    tokens: Vec<u32>,
    /// Tokens whose rows are in the cache.
    computed: usize,
    blocks: Vec<u32>,
}

impl Sequence {
    fn generated(&self) -> usize {
        self.tokens.len() - self.request.tokens.len()
    }
}

/// Runs requests on an executor. Requests run together, first come first served.
pub struct Engine<E: Executor> {
    executor: E,
    limits: EngineLimits,
    pool: BlockPool,
    running: Vec<Sequence>,
    inputs: StepInputs,
    /// Which sequences are in the step, and how many of their tokens.
    planned: Vec<(usize, usize)>,
    row: Vec<f32>,
    next_id: u64,
}

impl<E: Executor> Engine<E> {
    /// An engine over an executor whose plan gives a row of logits, or a token, for each sequence.
    pub fn new(
        executor: E,
        limits: EngineLimits,
        options: EngineOptions,
    ) -> Result<Engine<E>, OptionsError> {
        options.check()?;
        Ok(Engine {
            executor,
            pool: BlockPool::new(limits.blocks, limits.block_size),
            inputs: StepInputs::new(limits.block_size),
            running: Vec::new(),
            planned: Vec::new(),
            row: Vec::new(),
            next_id: 0,
            limits,
        })
    }

    /// How it stands.
    pub fn stats(&self) -> Stats {
        let (free, total) = self.blocks();
        Stats {
            running: self.running.len(),
            used_blocks: total - free,
            total_blocks: total,
            ..Stats::default()
        }
    }

    /// Takes a request.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let (tokens, limit) = (request.tokens.len(), self.limits.max_length);
        if tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens > limit {
            return Err(EngineError::TooLong { tokens, limit });
        }
        let vocab = self.limits.vocab;
        if let Some(&token) = request.tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(EngineError::Token { token, vocab });
        }
        request.sampling.check()?;
        if self.executor.yields_tokens() && !request.sampling.is_greedy() {
            return Err(EngineError::GreedyOnly);
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.running.push(Sequence {
            id,
            sampler: Sampler::new(request.sampling, &request.tokens),
            tokens: request.tokens.clone(),
            request,
            computed: 0,
            blocks: Vec::new(),
        });
        Ok(id)
    }

    /// Ends a request, freeing its memory; unknown ones are ignored.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            self.pool.release(&mut self.running.remove(at).blocks);
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Free and all blocks of the cache.
    pub fn blocks(&self) -> (usize, usize) {
        (self.pool.free(), self.pool.total())
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// Computes one step and says what came of it. On an error nothing has changed but that
    /// blocks may have been set aside: the step can be tried again.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<(), EngineError> {
        self.schedule()?;
        if self.planned.is_empty() {
            return Ok(());
        }
        let samples = self.executor.samples();
        let mut planned = self.planned.iter().map(|(index, _)| &self.running[*index]);
        self.executor.set_logits(!samples && planned.any(|s| !s.request.sampling.is_greedy()));
        // A step could be submitted ahead of the one before: a `Choice` needs the position of its
        // token, not the tokens before it, unless there are penalties. What is missing is an input
        // for a token that is still on the device.
        let ticket = self.executor.submit(&self.inputs)?;
        let output = self.executor.wait(ticket)?;
        for (row, &(index, new)) in self.planned.iter().enumerate() {
            let sequence = &mut self.running[index];
            sequence.computed += new;
            if sequence.computed < sequence.tokens.len() {
                continue; // the prompt goes on
            }
            let picked =
                output.tokens.get(row).filter(|_| samples || sequence.request.sampling.is_greedy());
            let token = if let Some(&token) = picked {
                sequence.sampler.note(token);
                token
            } else {
                self.row.clear();
                self.row.extend_from_slice(output.row(row));
                sequence.sampler.sample(&mut self.row, sequence.tokens.len() as u64)
            };
            sequence.tokens.push(token);
            if !sequence.request.stop.contains(&token) {
                events.push(Event::Token(sequence.id, token, None));
            }
        }
        self.retire(events);
        Ok(())
    }

    /// Fills the step's inputs: every sequence's next tokens, as far as the limits go.
    fn schedule(&mut self) -> Result<(), EngineError> {
        self.inputs.clear();
        self.planned.clear();
        let limits = self.limits.step;
        let samples = self.executor.samples();
        let mut left = limits;
        for (index, s) in self.running.iter_mut().enumerate() {
            let wanted = (s.tokens.len() - s.computed).min(self.limits.chunk);
            let new = fitting_chunk(wanted, s.computed, &left);
            if new == 0 {
                break;
            }
            let context = s.computed + new;
            if !self.pool.grow(&mut s.blocks, context) {
                if !self.planned.is_empty() {
                    break; // later, when others have finished
                }
                return Err(EngineError::CacheTooSmall {
                    tokens: context,
                    blocks: self.pool.free(),
                    block_size: self.pool.block_size(),
                });
            }
            self.inputs.push(&s.tokens[s.computed..context], context, &s.blocks)?;
            if samples && context == s.tokens.len() {
                self.inputs.choose(&s.sampler.choice(context as u64));
            }
            self.planned.push((index, new));
            left.t -= new as u64;
            left.b -= 1;
            left.s -= context as u64;
            left.pairs -= (new * context) as u64;
        }
        Ok(())
    }

    /// Removes what has ended.
    fn retire(&mut self, events: &mut Vec<Event>) {
        let (pool, max_length) = (&mut self.pool, self.limits.max_length);
        self.running.retain_mut(|s| {
            if s.generated() == 0 {
                return true;
            }
            let stopped = s.tokens.last().is_some_and(|t| s.request.stop.contains(t));
            let reason = if stopped {
                FinishReason::Stop
            } else if s.generated() >= s.request.max_tokens || s.tokens.len() >= max_length {
                FinishReason::Length
            } else {
                return true;
            };
            pool.release(&mut s.blocks);
            events.push(Event::Finished(s.id, reason));
            false
        });
    }
}

/// The most of `wanted` tokens, after `past` cached ones, that fit what is left of a step.
fn fitting_chunk(wanted: usize, past: usize, left: &Dims) -> usize {
    if left.b == 0 {
        return 0;
    }
    let (t, s, pairs) = (left.t as usize, left.s as usize, left.pairs as usize);
    let mut new = wanted.min(t).min(s.saturating_sub(past));
    // new * (past + new) <= pairs: start from the real root and correct for rounding.
    if new * (past + new) > pairs {
        let root =
            ((past as f64).mul_add(past as f64, 4.0 * pairs as f64).sqrt() - past as f64) / 2.0;
        new = new.min(root as usize + 1);
        while new > 0 && new * (past + new) > pairs {
            new -= 1;
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ExecError, SamplingParams, StepOutput, Ticket};

    const VOCAB: usize = 50;

    /// Its next token is a hash of the tokens it was given for the blocks it was given.
    struct Fake {
        /// Picks tokens itself, as a GPU does, and gives no logits unless they are asked for.
        samples: bool,
        logits: bool,
        rows: Vec<Option<u32>>,
        block_size: usize,
        limits: Dims,
        output: StepOutput,
    }

    fn hash(tokens: impl Iterator<Item = u32>) -> u32 {
        tokens.fold(17u32, |h, t| h.wrapping_mul(31).wrapping_add(t)) % VOCAB as u32
    }

    impl Executor for Fake {
        fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
            let dims = inputs.step().dims();
            assert!(dims.t <= self.limits.t && dims.b <= self.limits.b);
            assert!(dims.s <= self.limits.s && dims.pairs <= self.limits.pairs);
            self.output.logits.clear();
            self.output.tokens.clear();
            let mut choices: std::collections::BTreeMap<_, _> = inputs.choices().collect();
            let mut tokens = inputs.tokens().iter();
            for (i, seq) in inputs.step().seqs.iter().enumerate() {
                let slot = |p: usize| {
                    inputs.blocks(i)[p / self.block_size] as usize * self.block_size
                        + p % self.block_size
                };
                for p in seq.context - seq.new..seq.context {
                    self.rows[slot(p)] = tokens.next().copied();
                }
                let context =
                    (0..seq.context).map(|p| self.rows[slot(p)].expect("a row that was written"));
                let next = hash(context) as usize;
                let row = (0..VOCAB).map(|t| if t == next { 1.0 } else { 0.0 });
                let row: Vec<f32> = row.collect();
                if self.samples {
                    let token = choices.remove(&i).map_or(next as u32, |c| c.pick(&row));
                    self.output.tokens.push(token);
                }
                if self.logits || !self.samples {
                    self.output.logits.extend(row);
                }
            }
            self.output.rows = dims.b as usize;
            self.output.columns = VOCAB;
            Ok(Ticket(0))
        }

        fn samples(&self) -> bool {
            self.samples
        }

        fn set_logits(&mut self, wanted: bool) {
            self.logits = wanted;
        }

        fn wait(&mut self, _: Ticket) -> Result<&StepOutput, ExecError> {
            Ok(&self.output)
        }
    }

    fn engine(step: Dims, chunk: usize) -> Engine<Fake> {
        engine_of(step, chunk, false)
    }

    fn engine_of(step: Dims, chunk: usize, samples: bool) -> Engine<Fake> {
        let (blocks, block_size) = (64, 4);
        let rows = vec![None; blocks * block_size];
        let output = StepOutput::default();
        let executor = Fake { samples, logits: true, rows, block_size, limits: step, output };
        let limits = EngineLimits { step, max_length: 40, chunk, blocks, block_size, vocab: VOCAB };
        Engine::new(executor, limits, EngineOptions::default()).unwrap()
    }

    fn request(tokens: Vec<u32>, max_tokens: usize) -> Request {
        Request::new(tokens, max_tokens)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever the chunking and the company, each request's output is what it would be alone,
        /// and all blocks come back.
        #[test]
        fn outputs_do_not_depend_on_scheduling(
            prompts in prop::collection::vec((prop::collection::vec(0..VOCAB as u32, 1..30), 1..12usize), 1..7),
            t in 1..20u64, b in 1..5u64, pairs in 40..300u64, chunk in 1..16usize,
        ) {
            let step = Dims { t, b, s: 160, pairs };
            let mut engine = engine(step, chunk);
            let mut outputs = std::collections::BTreeMap::new();
            for (tokens, max) in &prompts {
                outputs.insert(engine.submit(request(tokens.clone(), *max)).unwrap(), Vec::new());
            }
            let mut finished = 0;
            for _ in 0..5000 {
                let mut events = Vec::new();
                engine.step(&mut events).unwrap();
                for event in events {
                    match event {
                        Event::Token(id, token, _) => outputs.get_mut(&id).unwrap().push(token),
                        Event::Started(..) | Event::Prompt(..) => {}
                        Event::Finished(_, reason) => {
                            prop_assert_eq!(reason, FinishReason::Length);
                            finished += 1;
                        }
                    }
                }
                if engine.is_idle() {
                    break;
                }
            }
            prop_assert_eq!(finished, prompts.len());
            for ((prompt, max), output) in prompts.iter().zip(outputs.values()) {
                let mut tokens = prompt.clone();
                for _ in 0..(*max).min((40 - prompt.len()).max(1)) {
                    tokens.push(hash(tokens.iter().copied()));
                }
                prop_assert_eq!(&tokens[prompt.len()..], &output[..]);
            }
            let (free, total) = engine.blocks();
            prop_assert_eq!(free, total);
        }
    }

    #[test]
    fn an_executor_that_samples_picks_what_the_host_would() {
        let step = Dims { t: 8, b: 3, s: 160, pairs: 300 };
        let sampling = SamplingParams {
            temperature: 0.8,
            top_p: 0.9,
            repetition_penalty: 1.3,
            frequency_penalty: 0.2,
            ..SamplingParams::default()
        };
        let outputs = |samples: bool| {
            let mut engine = engine_of(step, 4, samples);
            for seed in 0..5 {
                let sampling = SamplingParams { seed, ..sampling };
                let sampling = if seed == 0 { SamplingParams::default() } else { sampling };
                let tokens = vec![seed as u32 + 1; 1 + 3 * seed as usize];
                engine.submit(Request { sampling, ..request(tokens, 20) }).unwrap();
            }
            let mut events = Vec::new();
            while !engine.is_idle() {
                engine.step(&mut events).unwrap();
                assert!(!samples || !engine.executor.logits, "logits nobody needs");
            }
            events
        };
        assert_eq!(outputs(true), outputs(false));
    }

    #[test]
    fn stop_tokens_end_a_request_and_are_not_part_of_it() {
        let step = Dims { t: 8, b: 4, s: 160, pairs: 300 };
        let mut engine = engine(step, 8);
        let stop = hash([1, 2, 3].into_iter());
        let id = engine.submit(Request { stop: vec![stop], ..request(vec![1, 2, 3], 5) }).unwrap();
        let mut events = Vec::new();
        engine.step(&mut events).unwrap();
        assert_eq!(events, [Event::Finished(id, FinishReason::Stop)]);
        assert!(engine.is_idle());
    }

    #[test]
    fn bad_requests_are_refused() {
        let mut engine = engine(Dims { t: 8, b: 4, s: 160, pairs: 300 }, 8);
        assert!(matches!(engine.submit(request(vec![], 1)), Err(EngineError::EmptyPrompt)));
        assert!(matches!(engine.submit(request(vec![0; 41], 1)), Err(EngineError::TooLong { .. })));
        assert!(matches!(engine.submit(request(vec![99], 1)), Err(EngineError::Token { .. })));
    }

    #[test]
    fn chunks_fit() {
        let left = |t, s, pairs| Dims { t, b: 1, s, pairs };
        assert_eq!(fitting_chunk(100, 0, &left(64, 1000, 10_000)), 64);
        assert_eq!(fitting_chunk(100, 0, &left(64, 1000, 100)), 10);
        assert_eq!(fitting_chunk(100, 90, &left(64, 100, 10_000)), 10);
        assert_eq!(fitting_chunk(1, 99, &left(64, 100, 100)), 1);
        assert_eq!(fitting_chunk(1, 99, &left(64, 100, 99)), 0);
    }
}
