//! Answers as OpenAI's responses have them, whole and as events.

use std::sync::Arc;

use infernum_frontend_hf::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::item::{OutputItem, OutputPart};
use super::store::Stored;
use crate::api::blocks::{self, Answered, Block, Blocks, Change};
use crate::api::calls::Reader;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generation::{Finish, Piece, Used};
use crate::lanes::aside;
use crate::sse::{Frames, StreamFormat};

/// Bytes of a token, roughly.
const TOKEN: usize = 4;

/// A response.
#[derive(Clone, Serialize, ToSchema)]
pub(crate) struct ResponseObject {
    pub(super) id: String,
    /// `response`
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    /// `in_progress`, `completed`, `incomplete` or `failed`
    pub(super) status: &'static str,
    pub(super) model: String,
    pub(super) output: Vec<OutputItem>,
    #[schema(required = true)]
    pub(super) error: Option<ResponseFailure>,
    #[schema(required = true)]
    pub(super) incomplete_details: Option<IncompleteDetails>,
    #[schema(required = true)]
    pub(super) usage: Option<ResponseUsage>,
    /// What was asked for, from here on.
    #[schema(required = true)]
    pub(super) instructions: Option<String>,
    #[schema(required = true)]
    pub(super) previous_response_id: Option<String>,
    pub(super) store: bool,
    pub(super) background: bool,
    #[schema(required = true)]
    pub(super) max_output_tokens: Option<i64>,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    #[schema(value_type = Object)]
    pub(super) text: Value,
    #[schema(value_type = Object)]
    pub(super) reasoning: Value,
    #[schema(value_type = super::request::FlatToolChoice)]
    pub(super) tool_choice: Value,
    #[schema(value_type = Vec<Object>)]
    pub(super) tools: Vec<Value>,
    pub(super) parallel_tool_calls: bool,
    /// `disabled`
    pub(super) truncation: &'static str,
    #[schema(value_type = Object)]
    pub(super) metadata: Map<String, Value>,
}

/// Why it failed.
#[derive(Clone, Serialize, ToSchema)]
pub(crate) struct ResponseFailure {
    /// `server_error`
    code: &'static str,
    message: String,
}

/// Why it is not complete.
#[derive(Clone, Serialize, ToSchema)]
pub(crate) struct IncompleteDetails {
    /// `max_output_tokens`
    reason: &'static str,
}

/// Tokens that a request used.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(crate) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: ReasoningDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Serialize, ToSchema)]
struct InputDetails {
    /// Found in the prefix cache.
    cached_tokens: usize,
    cache_write_tokens: usize,
}

#[derive(Clone, Copy, Serialize, ToSchema)]
struct ReasoningDetails {
    reasoning_tokens: usize,
}

impl From<Used> for ResponseUsage {
    fn from(used: Used) -> ResponseUsage {
        ResponseUsage {
            input_tokens: used.prompt,
            input_tokens_details: InputDetails {
                cached_tokens: used.cached,
                cache_write_tokens: 0,
            },
            output_tokens: used.completion,
            output_tokens_details: ReasoningDetails { reasoning_tokens: used.reasoning },
            total_tokens: used.prompt + used.completion,
        }
    }
}

impl ResponseObject {
    /// How it ended; the name of the event that says so.
    fn end(&mut self, finish: Finish, used: Used) -> &'static str {
        self.usage = Some(used.into());
        match finish {
            Finish::Stop => {
                self.status = "completed";
                "response.completed"
            }
            Finish::Length => {
                self.status = "incomplete";
                self.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
                "response.incomplete"
            }
        }
    }
}

/// The status of a block's item.
fn status(finish: Option<Finish>, last: bool) -> &'static str {
    if last && finish == Some(Finish::Length) { "incomplete" } else { "completed" }
}

/// Keeps responses, if that is asked for.
pub(super) struct Keeper {
    pub(super) app: Arc<App>,
    pub(super) tenant: Tenant,
    /// Bytes of the request.
    pub(super) asked: usize,
    /// What came before the answer, as JSON: a list that is not ended.
    pub(super) history: Vec<u8>,
}

impl Keeper {
    fn keep(mut self, response: &ResponseObject, blocks: &[Block]) {
        if !response.store {
            return;
        }
        self.history.push(b',');
        // Our own types, and a `Vec` takes all.
        let _ = serde_json::to_writer(&mut self.history, &blocks::message(blocks));
        self.history.push(b']');
        let response_json = serde_json::to_vec(response).unwrap_or_default();
        let stored = Stored { response: response_json.into(), history: self.history.into() };
        self.app.responses.put(self.tenant, &response.id, stored);
    }
}

/// The whole answer.
pub(super) fn whole(
    mut response: ResponseObject,
    answered: &Answered,
    used: Used,
    keeper: Keeper,
) -> ResponseObject {
    let count = answered.blocks.len();
    let item = |(i, block)| {
        let status = status(Some(answered.finish), i + 1 == count);
        OutputItem::of(OutputItem::new_id(block), block, status)
    };
    response.output = answered.blocks.iter().enumerate().map(item).collect();
    response.end(answered.finish, used);
    keeper.keep(&response, &answered.blocks);
    response
}

/// The answer as a stream.
pub(super) struct Streamed {
    tokenizer: Tokenizer,
    blocks: Blocks,
    finish: Finish,
    keeper: Option<Keeper>,
    /// How much there is to tell or keep of what was asked, in tokens.
    weight: usize,
    events: Events,
}

/// What was told.
struct Events {
    response: ResponseObject,
    /// The id of the item that is being told.
    id: String,
    sequence: usize,
}

impl Streamed {
    pub(super) fn new(
        response: ResponseObject,
        reader: &Reader,
        tokenizer: Tokenizer,
        keeper: Keeper,
    ) -> Streamed {
        Streamed {
            weight: keeper.history.len().max(keeper.asked) / TOKEN,
            tokenizer,
            blocks: Blocks::new(reader),
            finish: Finish::Length,
            keeper: Some(keeper),
            events: Events { response, id: String::new(), sequence: 0 },
        }
    }
}

impl Events {
    fn send(&mut self, frames: &mut Frames, name: &str, rest: Value) {
        let mut event = Map::from_iter([
            ("type".to_owned(), name.into()),
            ("sequence_number".to_owned(), self.sequence.into()),
        ]);
        if let Value::Object(rest) = rest {
            event.extend(rest);
        }
        self.sequence += 1;
        frames.event(name, &event);
    }

    /// An event that tells all of the response.
    fn send_response(&mut self, frames: &mut Frames, name: &str) {
        let response = json!({"response": self.response});
        self.send(frames, name, response);
    }

    /// An event of the item that is being told.
    fn send_of_item(
        &mut self,
        frames: &mut Frames,
        name: &str,
        index: usize,
        rest: &[(&str, Value)],
    ) {
        let own = [("item_id", self.id.as_str().into()), ("output_index", index.into())];
        let all = own.iter().chain(rest);
        let all = all.map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        self.send(frames, name, Value::Object(all));
    }

    /// A change of a block.
    fn tell(
        &mut self,
        frames: &mut Frames,
        index: usize,
        block: &Block,
        change: Change<'_>,
        finish: Option<Finish>,
    ) {
        let first = ("content_index", json!(0));
        let part = OutputPart::of(block).map(|part| [first.clone(), ("part", json!(part))]);
        match change {
            Change::Begins => {
                self.id = OutputItem::new_id(block);
                let item = OutputItem::begun(self.id.clone(), block);
                let added = json!({"output_index": index, "item": item});
                self.send(frames, "response.output_item.added", added);
                if let Some(part) = part {
                    self.send_of_item(frames, "response.content_part.added", index, &part);
                }
            }
            Change::Grows(text) => {
                let delta = ("delta", json!(text));
                let (name, rest) = match block {
                    Block::Text(_) => {
                        let rest = vec![first, delta, ("logprobs", json!([]))];
                        ("response.output_text.delta", rest)
                    }
                    Block::Reasoning(_) => ("response.reasoning_text.delta", vec![first, delta]),
                    Block::Call(_) => ("response.function_call_arguments.delta", vec![delta]),
                };
                self.send_of_item(frames, name, index, &rest);
            }
            Change::Ends { last } => {
                let (name, rest) = match block {
                    Block::Text(text) => {
                        let rest = vec![first, ("text", json!(text)), ("logprobs", json!([]))];
                        ("response.output_text.done", rest)
                    }
                    Block::Reasoning(text) => {
                        ("response.reasoning_text.done", vec![first, ("text", json!(text))])
                    }
                    Block::Call(call) => {
                        let rest =
                            vec![("name", json!(call.name)), ("arguments", json!(call.arguments))];
                        ("response.function_call_arguments.done", rest)
                    }
                };
                self.send_of_item(frames, name, index, &rest);
                if let Some(part) = part {
                    self.send_of_item(frames, "response.content_part.done", index, &part);
                }
                let item = OutputItem::of(self.id.clone(), block, status(finish, last));
                let done = json!({"output_index": index, "item": item});
                self.response.output.push(item);
                self.send(frames, "response.output_item.done", done);
            }
        }
    }
}

impl StreamFormat for Streamed {
    fn begin(&mut self, frames: &mut Frames, _: Used) {
        aside(self.weight, || {
            self.events.send_response(frames, "response.created");
            self.events.send_response(frames, "response.in_progress");
        });
    }

    fn piece(&mut self, frames: &mut Frames, piece: Piece) {
        let (events, finish) = (&mut self.events, piece.finish);
        self.blocks.take(&piece.text, finish.is_some(), |i, block, change| {
            events.tell(frames, i, block, change, finish);
        });
        self.finish = finish.unwrap_or(self.finish);
    }

    fn end(&mut self, frames: &mut Frames, used: Used) {
        aside(self.weight + used.completion, || {
            let used = Used { reasoning: self.blocks.thoughts(&self.tokenizer), ..used };
            let name = self.events.response.end(self.finish, used);
            // Before it is told: who is told may ask for it.
            if let Some(keeper) = self.keeper.take() {
                keeper.keep(&self.events.response, self.blocks.all());
            }
            self.events.send_response(frames, name);
        });
    }

    fn fail(&mut self, frames: &mut Frames, error: &ApiError) {
        let response = &mut self.events.response;
        response.status = "failed";
        let message = error.message().to_owned();
        response.error = Some(ResponseFailure { code: "server_error", message });
        self.events.send_response(frames, "response.failed");
    }
}
