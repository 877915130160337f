//! Answers as Anthropic has them, whole and as events.

use infernum_frontend_hf::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::blocks::{Answered, Block, Blocks, Change, Ending};
use crate::api::calls::Reader;
use crate::api::common::Head;
use crate::error::ApiError;
use crate::generation::{Piece, Used};
use crate::sse::{Frames, StreamFormat};

/// Stands where clients must find a signature: thoughts are not signed here.
const UNSIGNED: &str = "unsigned";

/// The answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct AnsweredMessage<'a> {
    id: &'a str,
    /// `message`
    r#type: &'static str,
    /// `assistant`
    role: &'static str,
    model: &'a str,
    content: Vec<AnsweredBlock>,
    /// `end_turn`, `stop_sequence`, `tool_use` or `max_tokens`
    #[schema(required = true)]
    stop_reason: Option<&'static str>,
    /// The one of the `stop_sequences` that ended it.
    #[schema(required = true)]
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

/// What follows one another in an answer.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum AnsweredBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        /// Always `unsigned`.
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: String,
        /// Arguments that are no JSON, as where an answer was cut, stand as text under `INVALID_JSON`.
        input: Map<String, Value>,
    },
}

/// Tokens that a request used.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(crate) struct MessageUsage {
    /// Those of the prompt that were computed.
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    /// Those of the prompt that were found in the prefix cache.
    cache_read_input_tokens: usize,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
}

#[derive(Clone, Copy, Serialize, ToSchema)]
struct OutputDetails {
    thinking_tokens: usize,
}

impl From<Used> for MessageUsage {
    fn from(used: Used) -> MessageUsage {
        MessageUsage {
            input_tokens: used.prompt.saturating_sub(used.cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: used.cached,
            output_tokens: used.completion,
            output_tokens_details: OutputDetails { thinking_tokens: used.reasoning },
        }
    }
}

impl AnsweredBlock {
    fn of(block: Block) -> AnsweredBlock {
        match block {
            Block::Text(text) => AnsweredBlock::Text { text },
            Block::Reasoning(thinking) => AnsweredBlock::Thinking { thinking, signature: UNSIGNED },
            Block::Call(call) => {
                let input = call.input();
                AnsweredBlock::ToolUse { id: call.id, name: call.name, input }
            }
        }
    }
}

impl<'a> AnsweredMessage<'a> {
    /// Before anything was said.
    fn begun(head: &'a Head, used: Used) -> AnsweredMessage<'a> {
        AnsweredMessage {
            id: &head.id,
            r#type: "message",
            role: "assistant",
            model: &head.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: used.into(),
        }
    }

    pub(super) fn whole(head: &'a Head, answered: Answered, used: Used) -> AnsweredMessage<'a> {
        let stop_reason = Some(reason(answered.ending()));
        let content = answered.blocks.into_iter().map(AnsweredBlock::of).collect();
        let stop_sequence = answered.stop;
        AnsweredMessage {
            content,
            stop_reason,
            stop_sequence,
            ..AnsweredMessage::begun(head, used)
        }
    }
}

fn reason(ending: Ending) -> &'static str {
    match ending {
        Ending::Stop => "end_turn",
        Ending::StopString => "stop_sequence",
        Ending::Calls => "tool_use",
        Ending::Length => "max_tokens",
    }
}

/// The answer as a stream.
pub(super) struct Streamed {
    head: Head,
    tokenizer: Tokenizer,
    blocks: Blocks,
    ending: Ending,
    stop: Option<String>,
}

impl Streamed {
    pub(super) fn new(head: Head, reader: &Reader, tokenizer: Tokenizer) -> Streamed {
        let (blocks, ending) = (Blocks::new(reader), Ending::Length);
        Streamed { head, tokenizer, blocks, ending, stop: None }
    }
}

/// An event, whose type is its name, too.
fn send(frames: &mut Frames, name: &str, rest: Value) {
    let mut event = Map::from_iter([("type".to_owned(), name.into())]);
    if let Value::Object(rest) = rest {
        event.extend(rest);
    }
    frames.event(name, &event);
}

/// A change of a block.
fn tell(frames: &mut Frames, index: usize, block: &Block, change: Change<'_>) {
    let mut delta = |kind: &str, key: &str, text: &str| {
        let delta =
            Map::from_iter([("type".to_owned(), kind.into()), (key.to_owned(), text.into())]);
        send(frames, "content_block_delta", json!({"index": index, "delta": delta}));
    };
    match (change, block) {
        (Change::Begins, block) => {
            let begun = match block {
                Block::Text(_) => json!({"type": "text", "text": ""}),
                Block::Reasoning(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Block::Call(call) => {
                    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                }
            };
            send(frames, "content_block_start", json!({"index": index, "content_block": begun}));
        }
        (Change::Grows(text), Block::Text(_)) => delta("text_delta", "text", text),
        (Change::Grows(text), Block::Reasoning(_)) => delta("thinking_delta", "thinking", text),
        (Change::Grows(text), Block::Call(_)) => delta("input_json_delta", "partial_json", text),
        (Change::Ends { .. }, block) => {
            if matches!(block, Block::Reasoning(_)) {
                delta("signature_delta", "signature", UNSIGNED);
            }
            send(frames, "content_block_stop", json!({"index": index}));
        }
    }
}

impl StreamFormat for Streamed {
    fn begin(&mut self, frames: &mut Frames, used: Used) {
        let message = AnsweredMessage::begun(&self.head, used);
        send(frames, "message_start", json!({"message": message}));
    }

    fn piece(&mut self, frames: &mut Frames, piece: Piece) {
        let last = piece.finish.is_some();
        self.blocks.take(&piece.text, last, |i, block, change| tell(frames, i, block, change));
        if let Some(finish) = piece.finish {
            self.ending = Ending::of(finish, piece.stop.as_deref(), self.blocks.all());
            self.stop = piece.stop;
        }
    }

    fn end(&mut self, frames: &mut Frames, used: Used) {
        let used = Used { reasoning: self.blocks.thoughts(&self.tokenizer), ..used };
        let delta = json!({"stop_reason": reason(self.ending), "stop_sequence": self.stop});
        let usage = MessageUsage::from(used);
        send(frames, "message_delta", json!({"delta": delta, "usage": usage}));
        send(frames, "message_stop", json!({}));
    }

    fn fail(&mut self, frames: &mut Frames, error: &ApiError) {
        frames.event("error", &error.anthropic());
    }

    fn idle(&mut self, frames: &mut Frames) {
        send(frames, "ping", json!({}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::blocks::tests::ANSWER;
    use crate::api::calls::tests::reader;
    use crate::generation::Finish;

    #[test]
    fn an_answer_is_told_event_by_event() {
        let tokenizer = Tokenizer::open(&infernum_frontend_hf::demo()).expect("the demo's");
        let head = Head { id: "msg_1".to_owned(), created: 0, model: "m".to_owned() };
        let mut streamed = Streamed::new(head, &reader(""), tokenizer);
        let (mut frames, used) =
            (Frames::default(), Used { prompt: 9, cached: 4, ..Used::default() });
        streamed.begin(&mut frames, used);
        streamed.idle(&mut frames);
        streamed.piece(&mut frames, Piece::said(&ANSWER[..30], None));
        streamed.piece(&mut frames, Piece::said(&ANSWER[30..], Some(Finish::Stop)));
        streamed.end(&mut frames, used);
        let events = frames.events();
        assert!(events.iter().all(|(name, event)| event["type"] == name.as_str()));
        let told: Vec<Value> = events.into_iter().map(|(_, event)| event).collect();
        assert_eq!(told[0]["message"]["usage"]["input_tokens"], 5);
        assert_eq!(told[1], json!({"type": "ping"}));
        let of = |index: usize| {
            let own: Vec<&Value> =
                told.iter().filter(|event| event["index"] == json!(index)).collect();
            let deltas = own.iter().filter_map(|event| event.get("delta")).cloned();
            let (first, last) = (own[0].clone(), own[own.len() - 1]["type"].clone());
            (first["content_block"].clone(), deltas.collect::<Vec<_>>(), last)
        };
        let (begun, deltas, last) = of(0);
        assert_eq!(begun, json!({"type": "thinking", "thinking": "", "signature": ""}));
        assert_eq!(
            deltas.last(),
            Some(&json!({"type": "signature_delta", "signature": "unsigned"}))
        );
        assert_eq!(deltas[0]["type"], "thinking_delta");
        assert_eq!(last, "content_block_stop");
        let (begun, deltas, _) = of(1);
        assert_eq!(begun, json!({"type": "text", "text": ""}));
        let text = |key: &str, deltas: &[Value]| {
            deltas.iter().filter_map(|delta| delta[key].as_str()).collect::<String>()
        };
        assert_eq!(text("text", &deltas), "Yes.");
        for (index, arguments) in [(2, json!({"a": [1]})), (3, json!({}))] {
            let (begun, deltas, _) = of(index);
            assert_eq!(
                (&begun["type"], &begun["name"], &begun["input"]),
                (&json!("tool_use"), &json!("f"), &json!({}))
            );
            let input: Value = serde_json::from_str(&text("partial_json", &deltas)).expect("JSON");
            assert_eq!(input, arguments);
        }
        let [delta, stop] = &told[told.len() - 2..] else { panic!("{told:?}") };
        assert_eq!(delta["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
        assert_eq!(delta["usage"]["cache_read_input_tokens"], 4);
        assert!(delta["usage"]["output_tokens_details"]["thinking_tokens"].as_u64() > Some(0));
        assert_eq!(stop, &json!({"type": "message_stop"}));
    }

    #[test]
    fn what_fails_is_an_event() {
        let tokenizer = Tokenizer::open(&infernum_frontend_hf::demo()).expect("the demo's");
        let head = Head { id: "msg_1".to_owned(), created: 0, model: "m".to_owned() };
        let mut frames = Frames::default();
        let mut streamed = Streamed::new(head, &reader(""), tokenizer);
        streamed.fail(&mut frames, &ApiError::internal("the engine failed"));
        let told = json!({"type": "error", "error": {"type": "api_error", "message": "the engine failed"}});
        assert_eq!(frames.events(), [("error".to_owned(), told)]);
    }
}
