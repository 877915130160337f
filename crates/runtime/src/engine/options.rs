//! How the engine schedules, each choice a switch.

use infernum_ir::Dims;
use serde::{Deserialize, Serialize};

/// How much the engine may hold.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// The largest step, from the plan.
    pub step: Dims,
    /// The longest sequence, in tokens.
    pub max_length: usize,
    /// Tokens of prompts computed in one step at most.
    pub chunk: usize,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
}

/// Who goes first when a step, or the cache, has not room for all. No request waits forever under
/// any: one that was passed over for [`EngineOptions::patience`] steps goes before all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Prompts before those that generate already: the first token comes soonest.
    PrefillFirst,
    /// Those that generate in turn, before prompts: tokens come most evenly.
    DecodeRoundRobin,
    /// By [`Request::priority`](super::Request::priority).
    Priority,
}

/// Which requests run together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Batching {
    /// Requests join and leave at every step (Orca, Yu et al. 2022).
    #[default]
    Continuous,
    /// A batch is taken when the one before it has ended.
    Static,
    /// One request at a time.
    None,
}

/// How the KV cache is handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvMode {
    /// By block, as a sequence grows (vLLM, Kwon et al. 2023).
    #[default]
    Paged,
    /// The longest sequence's room in one piece for each, up front.
    Contiguous,
    /// Nothing is kept: every token computes all before it again.
    Off,
}

/// What the engine does to be fast, and how fair it is. All combinations that
/// [`EngineOptions::check`] takes give the same outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Who goes first.
    pub policy: Policy,
    /// Which requests run together.
    pub batching: Batching,
    /// How the KV cache is handed out.
    pub kv: KvMode,
    /// Keep the rows of prompts and outputs for requests that begin the same.
    pub prefix_cache: bool,
    /// Schedule a step while the one before it runs, where the executor can.
    pub ahead: bool,
    /// Requests that run together at most; 0 for as many as a step holds.
    pub max_running: usize,
    /// Steps that a request may be passed over before it goes first.
    pub patience: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            policy: Policy::default(),
            batching: Batching::default(),
            kv: KvMode::default(),
            prefix_cache: true,
            ahead: true,
            max_running: 0,
            patience: 256,
        }
    }
}

/// Options that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// Shared blocks lie anywhere.
    #[error(
        "a prefix cache shares blocks wherever they lie, which a contiguous KV cache cannot: turn \
         one of them off"
    )]
    PrefixContiguous,
    /// Nothing to find.
    #[error(
        "a prefix cache needs rows that are kept, and the KV cache is off: turn one of them off"
    )]
    PrefixOff,
    /// Nothing is ahead of a token that needs all tokens.
    #[error(
        "without a KV cache every step needs the token before it: turn scheduling ahead off, or the \
         cache on"
    )]
    AheadOff,
    /// It would wait forever.
    #[error("the patience is 0 steps: expected at least 1")]
    NoPatience,
    /// One request has no rivals.
    #[error("without batching requests run one by one, in order: policy `{0:?}` needs batching")]
    PolicyAlone(Policy),
}

impl EngineOptions {
    /// Refuses options that contradict each other.
    pub fn check(&self) -> Result<(), OptionsError> {
        let turns = matches!(self.policy, Policy::PrefillFirst | Policy::DecodeRoundRobin);
        match (self.kv, self.batching) {
            (KvMode::Contiguous, _) if self.prefix_cache => Err(OptionsError::PrefixContiguous),
            (KvMode::Off, _) if self.prefix_cache => Err(OptionsError::PrefixOff),
            (KvMode::Off, _) if self.ahead => Err(OptionsError::AheadOff),
            (_, Batching::None) if turns => Err(OptionsError::PolicyAlone(self.policy)),
            _ if self.patience == 0 => Err(OptionsError::NoPatience),
            _ => Ok(()),
        }
    }
}

/// How the engine stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Requests without memory.
    pub waiting: usize,
    /// Requests with memory.
    pub running: usize,
    /// Blocks that requests hold.
    pub used_blocks: usize,
    /// All blocks.
    pub total_blocks: usize,
    /// Tokens of prompts looked for in the prefix cache.
    pub prefix_queries: u64,
    /// Those found.
    pub prefix_hits: u64,
    /// How often a request gave its memory up.
    pub preemptions: u64,
    /// Steps computed.
    pub steps: u64,
    /// Requests that ended because their logits were no distribution: a NaN among them, or none above
    /// -inf.
    pub corrupted: u64,
    /// Tokens that were picked under a constraint.
    pub constrained: u64,
    /// Tokens that constraints forced, which were not picked.
    pub forced: u64,
    /// How often a row was left out of a step because what may come next was not worked out yet.
    pub awaited: u64,
}

impl Stats {
    /// The same, counting on from where another engine stood, in whose place this one is.
    #[must_use]
    pub fn after(&self, before: &Stats) -> Stats {
        Stats {
            prefix_queries: self.prefix_queries + before.prefix_queries,
            prefix_hits: self.prefix_hits + before.prefix_hits,
            preemptions: self.preemptions + before.preemptions,
            steps: self.steps + before.steps,
            corrupted: self.corrupted + before.corrupted,
            constrained: self.constrained + before.constrained,
            forced: self.forced + before.forced,
            awaited: self.awaited + before.awaited,
            ..*self
        }
    }

    /// How two engines stand together.
    #[must_use]
    pub fn beside(&self, other: &Stats) -> Stats {
        Stats {
            waiting: self.waiting + other.waiting,
            running: self.running + other.running,
            used_blocks: self.used_blocks + other.used_blocks,
            total_blocks: self.total_blocks + other.total_blocks,
            ..self.after(other)
        }
    }
}
