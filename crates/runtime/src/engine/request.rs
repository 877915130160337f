//! What is asked of the engine, and what it tells.

use std::num::NonZeroU64;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Constraint;
use super::kv::Prefix;
use crate::exec::ExecError;
use crate::sampling::{Logprobs, MOST_TOLD, SamplingError, SamplingParams};

/// What to generate.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Request {
    /// The prompt; not empty.
    pub tokens: Vec<u32>,
    /// Where the second of two texts begins among them, for models that tell texts apart; these compute sequences whole.
    pub second: Option<usize>,
    /// How many tokens to generate at most. 0 only computes the prompt, as of a model that does not generate.
    pub max_tokens: usize,
    /// Tokens that end the text; they are not part of it.
    pub stop: Vec<u32>,
    /// Tell the token of `stop` that ended the text, too.
    pub tell_stop: bool,
    /// How tokens are picked.
    pub sampling: SamplingParams,
    /// Added to the logits of these tokens before anything else.
    pub bias: Vec<(u32, f32)>,
    /// What the generated tokens are held to. A text that is complete ends. It stays in its process: another one makes it
    /// again, of what it [was written as](Constraint::written).
    #[serde(skip)]
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Tell the log-probability of each generated token, and of so many of the likeliest, at most
    /// [`MOST_TOLD`].
    pub logprobs: Option<usize>,
    /// Tell them for the prompt's tokens too, of so many of the likeliest.
    pub prompt_logprobs: Option<usize>,
    /// The lower, the sooner, under [`Policy::Priority`](super::Policy::Priority).
    pub priority: i32,
    /// Cached prefixes are shared among requests of the same salt only: one for each tenant.
    pub salt: u64,
    /// The adapter that it is computed with, one of this process's: its name says nothing elsewhere.
    #[serde(skip)]
    pub adapter: Option<AdapterId>,
}

/// Names an adapter that an engine has loaded: no other one ever has its name, not one of the same files either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub(super) NonZeroU64);

impl Request {
    /// A greedy continuation.
    pub fn new(tokens: Vec<u32>, max_tokens: usize) -> Request {
        Request { tokens, max_tokens, ..Request::default() }
    }

    /// What its first block depends on besides tokens.
    pub(super) fn root(&self) -> Prefix {
        Prefix::Root(self.salt, self.adapter.map_or(0, |adapter| adapter.0.get()))
    }
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub(super) u64);

/// Where a request stands. One that ended, or failed, is no longer known: its last
/// [`Event`] said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has no memory yet.
    Waiting,
    /// Its prompt is being computed.
    Prefill,
    /// It generates.
    Decode,
    /// It gave its memory to others and will compute its rows again.
    Preempted,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model said so.
    Stop,
    /// It reached its own limit, or the engine's longest sequence.
    Length,
    /// The step that it was in failed, or its own logits were no distribution: a NaN among them, or none
    /// above -inf; or its vector was not of finite numbers.
    Failed,
    /// Its constraint could not be followed any further: what may come next was too complex to be worked out.
    Unfollowed,
}

/// What a step did for one request. Each begins with `Started` and ends with `Finished`, unless it
/// was cancelled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// It waits no longer. So many of its prompt's tokens were found in the cache.
    Started(RequestId, usize),
    /// Log-probabilities of the prompt's next token, from the second on, before the first token.
    Prompt(RequestId, Box<Logprobs>),
    /// A token was generated.
    Token(RequestId, u32, Option<Box<Logprobs>>),
    /// The vector or the scores of the prompt, from a model of another [task](infernum_ir::Task) than generating.
    Vector(RequestId, Box<[f32]>),
    /// The request ended; its memory is free again.
    Finished(RequestId, FinishReason),
}

impl Event {
    /// The request that it is of.
    pub fn request(&self) -> RequestId {
        match self {
            Event::Started(id, _)
            | Event::Prompt(id, _)
            | Event::Token(id, ..)
            | Event::Vector(id, _)
            | Event::Finished(id, _) => *id,
        }
    }
}

/// A request could not be taken, or a step failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum EngineError {
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens, and the longest sequence is {limit}; shorten it or raise \
         --max-length"
    )]
    TooLong { tokens: usize, limit: usize },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token { token: u32, vocab: usize },
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(
        "the model does not generate: its output is {output} for each prompt; expected no tokens to generate and no log-probabilities"
    )]
    NoTokens { output: &'static str },
    #[error(
        "log-probabilities: expected at most {MOST_TOLD} of the likeliest tokens, found {found}"
    )]
    Logprobs { found: usize },
    #[error(
        "the plan yields the likeliest token instead of logits: expected temperature 0, no \
         penalties, no bias and no log-probabilities; compile with a pipeline without the pass \
         `greedy` for those"
    )]
    GreedyOnly,
    #[error(
        "{tokens} tokens of prompt and output do not fit the KV cache of {blocks} block(s) of \
         {block_size}; ask for fewer, or give the cache more memory"
    )]
    CacheTooSmall { tokens: usize, blocks: usize, block_size: usize },
    #[error("the adapter was unloaded, or is none of this engine's")]
    NoAdapter,
    #[error(
        "all {slots} slot(s) for adapters are taken, some perhaps by requests of adapters that were unloaded; unload one, or \
         raise --max-loras"
    )]
    NoAdapterSlot { slots: usize },
    #[error(transparent)]
    Exec(#[from] ExecError),
}
