//! What answers to chats and completions have in common.

use std::collections::BTreeMap;

use serde::Serialize;
use utoipa::ToSchema;

use crate::generation::{TokenLogprob, Used};
use crate::text::Spelling;

/// Stands for minus infinity, which JSON has not.
const NEVER: f32 = -9999.0;

/// Tokens that a request used.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct PromptDetails {
    /// Tokens found in the prefix cache.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl From<Used> for Usage {
    fn from(used: Used) -> Usage {
        Usage {
            prompt_tokens: used.prompt,
            completion_tokens: used.completion,
            total_tokens: used.prompt + used.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: used.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: used.reasoning },
        }
    }
}

/// One chunk of a stream.
#[derive(Serialize)]
pub(crate) struct Chunk<'a, C: Serialize> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: &'a [C],
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub(crate) usage: ChunkUsage,
    /// With the first chunk of a chat, where they are told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
}

/// What a chunk says of usage.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ChunkUsage {
    /// Nothing: it is not wanted.
    Absent,
    /// It is wanted: null in all chunks but the last.
    Told(Option<Usage>),
}

impl ChunkUsage {
    pub(crate) fn of(wanted: bool, usage: Option<Usage>) -> ChunkUsage {
        if wanted { ChunkUsage::Told(usage) } else { ChunkUsage::Absent }
    }

    fn is_absent(&self) -> bool {
        matches!(self, ChunkUsage::Absent)
    }
}

/// A token with its log-probability, as chats tell it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Likelihood {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    #[schema(required = true)]
    pub(crate) bytes: Option<Vec<u8>>,
}

/// A log-probability that JSON can hold.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(NEVER)
}

/// The likeliest tokens of one, spelt.
pub(crate) fn likeliest(spelling: &Spelling, of: &TokenLogprob) -> Vec<Likelihood> {
    of.top.iter().map(|(token, logprob)| likelihood(spelling, *token, *logprob)).collect()
}

/// A token, spelt.
pub(crate) fn likelihood(spelling: &Spelling, token: u32, logprob: f32) -> Likelihood {
    let bytes = spelling.bytes(token);
    Likelihood { token: Spelling::shown(&bytes), logprob: finite(logprob), bytes: Some(bytes) }
}

/// A token of a prompt, or one that could have stood in its place, as vLLM tells it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct PromptLogprob {
    logprob: f32,
    /// How many tokens are likelier, and 1.
    rank: u32,
    decoded_token: String,
}

/// For each token of a prompt, by token id: it and the likeliest; null for the first.
pub(crate) type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// Log-probabilities of a prompt, with those of the `most` likeliest.
pub(crate) fn prompt_logprobs(
    spelling: &Spelling,
    most: usize,
    of: &[TokenLogprob],
) -> PromptLogprobs {
    let one = |token, logprob, rank| {
        let decoded_token = Spelling::shown(&spelling.bytes(token));
        (token, PromptLogprob { logprob: finite(logprob), rank, decoded_token })
    };
    let all = |l: &TokenLogprob| {
        let top = (1u32..)
            .zip(&l.top)
            .take(most)
            .map(|(rank, (token, logprob))| one(*token, *logprob, rank));
        let own = one(l.token, l.logprob?, l.rank);
        let mut all: BTreeMap<u32, PromptLogprob> = top.collect();
        all.entry(own.0).or_insert(own.1);
        Some(all)
    };
    of.iter().map(all).collect()
}
