//! Answers as Ollama has them, whole and line by line.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::blocks::{Answered, Block, Blocks, Call, Change};
use crate::api::calls::Reader;
use crate::error::ApiError;
use crate::generation::{Finish, Piece, Used};
use crate::sse::{Frames, StreamFormat};

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Generate,
}

/// The answer, or a part of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct OllamaAnswer {
    model: String,
    /// A time, as RFC 3339 has it.
    created_at: String,
    /// Of a conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<OllamaMessage>,
    /// Of a single text.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<String>,
    /// Of a single text: what the model thought, where its chat template tells that apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// Whether nothing follows.
    done: bool,
    /// `stop`, `length` or `load`
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    /// With the last part.
    #[serde(flatten)]
    used: Option<OllamaUsage>,
}

/// What the model says.
#[derive(Default, Serialize, ToSchema)]
pub(crate) struct OllamaMessage {
    role: &'static str,
    content: String,
    /// What it thought, where its chat template tells that apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<OllamaCall>,
}

/// A call.
#[derive(Serialize, ToSchema)]
pub(crate) struct OllamaCall {
    id: String,
    function: OllamaCalled,
}

/// What is called, and with what.
#[derive(Serialize, ToSchema)]
struct OllamaCalled {
    index: usize,
    name: String,
    /// Arguments that are no JSON, as where an answer was cut, stand as text under `INVALID_JSON`.
    arguments: Map<String, Value>,
}

/// Tokens and nanoseconds that a request used.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(crate) struct OllamaUsage {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
}

impl From<Used> for OllamaUsage {
    fn from(used: Used) -> OllamaUsage {
        let nanoseconds = |time: std::time::Duration| time.as_nanos() as u64;
        OllamaUsage {
            total_duration: nanoseconds(used.in_all),
            load_duration: 0,
            prompt_eval_count: used.prompt,
            prompt_eval_duration: nanoseconds(used.to_first),
            eval_count: used.completion,
            eval_duration: nanoseconds(used.in_all.saturating_sub(used.to_first)),
        }
    }
}

/// What of an answer is told at a time.
#[derive(Default)]
struct Told {
    text: String,
    thinking: String,
    calls: Vec<OllamaCall>,
}

impl Told {
    fn add_call(&mut self, index: usize, call: &Call) {
        let function = OllamaCalled { index, name: call.name.clone(), arguments: call.input() };
        self.calls.push(OllamaCall { id: call.id.clone(), function });
    }
}

impl OllamaAnswer {
    fn part(model: &str, kind: Kind, told: Told) -> OllamaAnswer {
        let thinking = Some(told.thinking).filter(|text| !text.is_empty());
        let mut answer = OllamaAnswer {
            model: model.to_owned(),
            created_at: now(),
            message: None,
            response: None,
            thinking: None,
            done: false,
            done_reason: None,
            used: None,
        };
        match kind {
            Kind::Chat => {
                let (role, content, tool_calls) = ("assistant", told.text, told.calls);
                answer.message = Some(OllamaMessage { role, content, thinking, tool_calls });
            }
            Kind::Generate => (answer.response, answer.thinking) = (Some(told.text), thinking),
        }
        answer
    }

    fn ended(self, reason: &'static str, used: Option<OllamaUsage>) -> OllamaAnswer {
        OllamaAnswer { done: true, done_reason: Some(reason), used, ..self }
    }

    /// Nothing was asked for but the model.
    pub(super) fn loaded(model: &str, kind: Kind) -> OllamaAnswer {
        OllamaAnswer::part(model, kind, Told::default()).ended("load", None)
    }

    /// The whole answer.
    pub(super) fn whole(model: &str, kind: Kind, answered: Answered, used: Used) -> OllamaAnswer {
        let mut told = Told::default();
        for block in answered.blocks {
            match block {
                Block::Reasoning(text) => told.thinking.push_str(&text),
                Block::Text(text) => told.text.push_str(&text),
                Block::Call(call) => told.add_call(told.calls.len(), &call),
            }
        }
        OllamaAnswer::part(model, kind, told).ended(answered.finish.name(), Some(used.into()))
    }
}

/// The time, to the microsecond.
pub(super) fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Microsecond).unwrap_or(now).to_string()
}

/// The answer, a line a part.
pub(super) struct Streamed {
    model: String,
    kind: Kind,
    blocks: Blocks,
    finish: Finish,
    /// Calls that were told.
    calls: usize,
}

impl Streamed {
    pub(super) fn new(model: String, kind: Kind, reader: &Reader) -> Streamed {
        let (blocks, finish) = (Blocks::new(reader), Finish::Length);
        Streamed { model, kind, blocks, finish, calls: 0 }
    }
}

impl StreamFormat for Streamed {
    const MEDIA_TYPE: &'static str = "application/x-ndjson";

    fn piece(&mut self, frames: &mut Frames, piece: Piece) {
        let Streamed { model, kind, blocks, calls, .. } = self;
        blocks.take(&piece.text, piece.finish.is_some(), |_, block, change| {
            let mut told = Told::default();
            match (change, block) {
                (Change::Grows(text), Block::Text(_)) => text.clone_into(&mut told.text),
                (Change::Grows(text), Block::Reasoning(_)) => text.clone_into(&mut told.thinking),
                // Calls are told whole.
                (Change::Ends { .. }, Block::Call(call)) => {
                    told.add_call(*calls, call);
                    *calls += 1;
                }
                _ => return,
            }
            frames.line(&OllamaAnswer::part(model, *kind, told));
        });
        self.finish = piece.finish.unwrap_or(self.finish);
    }

    fn end(&mut self, frames: &mut Frames, used: Used) {
        let last = OllamaAnswer::part(&self.model, self.kind, Told::default());
        frames.line(&last.ended(self.finish.name(), Some(used.into())));
    }

    fn fail(&mut self, frames: &mut Frames, error: &ApiError) {
        frames.line(&error.ollama());
    }

    /// A line is an answer; there is none that says nothing.
    fn idle(&mut self, _: &mut Frames) {}
}
