//! Items of input and output as OpenAI's responses have them.

use infernum_frontend_hf::chat::Message;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::blocks::Block;
use crate::api::calls;
use crate::api::turns::{self, assistant, field, malformed, said};
use crate::error::{ApiError, quoted};

/// An item of the input.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum InputItem {
    Message(MessageItem),
    Call(CallItem),
    Result(ResultItem),
    Reasoning(ReasoningItem),
}

/// A message.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct MessageItem {
    /// `message`, or left out
    #[schema(pattern = "^message$")]
    r#type: Option<String>,
    role: ItemRole,
    content: TextOrParts,
}

/// Whose a message is; `developer` is `system`.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum ItemRole {
    User,
    Assistant,
    System,
    Developer,
}

/// A text, or parts of one.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum TextOrParts {
    Text(String),
    Parts(Vec<InputPart>),
}

/// Part of a text.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum InputPart {
    InputText { text: String },
    OutputText { text: String },
}

/// A call of an earlier turn.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct CallItem {
    #[schema(pattern = "^function_call$")]
    r#type: String,
    call_id: String,
    name: String,
    /// JSON, as text.
    arguments: String,
}

/// What a call gave.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct ResultItem {
    #[schema(pattern = "^function_call_output$")]
    r#type: String,
    call_id: String,
    output: TextOrParts,
}

/// What the model thought in an earlier turn.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct ReasoningItem {
    #[schema(pattern = "^reasoning$")]
    r#type: String,
    content: Option<Vec<ThoughtPart>>,
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum ThoughtPart {
    ReasoningText { text: String },
}

/// Adds what an item of the input comes to. What one turn thought, said and called is one message.
pub(super) fn read(item: &Value, param: &str, all: &mut Vec<Message>) -> Result<(), ApiError> {
    let kind = match item.get("type") {
        None | Some(Value::Null) => "message",
        Some(kind) => {
            kind.as_str().ok_or_else(|| malformed(&format!("{param}.type"), "expected a string"))?
        }
    };
    match kind {
        "message" => {
            let role = field(item, "role", param)?;
            let content = content(item, "content", param)?;
            match role {
                "assistant" => match last_answer(all).filter(|answer| unsaid(answer)) {
                    Some(answer) => drop(answer.0.insert("content".to_owned(), content)),
                    None => all.push(assistant(content, String::new(), Vec::new())),
                },
                "user" => all.push(said("user", content)),
                "system" | "developer" => all.push(said("system", content)),
                _ => {
                    let what = "expected `user`, `assistant`, `system` or `developer`";
                    return Err(malformed(&format!("{param}.role"), what));
                }
            }
        }
        "reasoning" => all.push(assistant(Value::Null, thoughts(item, param)?, Vec::new())),
        "function_call" => {
            let (id, name) = (field(item, "call_id", param)?, field(item, "name", param)?);
            let text = field(item, "arguments", param)?;
            let text = if text.trim().is_empty() { "{}" } else { text };
            let arguments = serde_json::from_str::<Map<String, Value>>(text).map_err(|_| {
                malformed(&format!("{param}.arguments"), "expected a JSON object, as text")
            })?;
            add_call(all, calls::past(id, name, &arguments));
        }
        "function_call_output" => {
            let id = field(item, "call_id", param)?;
            all.push(turns::result(id, content(item, "output", param)?));
        }
        other => {
            let message =
                format!("{param}: items of type `{}` are not supported here", quoted(other));
            return Err(ApiError::unsupported(param, message));
        }
    }
    Ok(())
}

/// The last message, if it is the model's.
fn last_answer(all: &mut [Message]) -> Option<&mut Message> {
    all.last_mut().filter(|message| message.role() == Some("assistant"))
}

/// Whether an answer has but thoughts so far.
fn unsaid(answer: &Message) -> bool {
    answer.0.get("content") == Some(&Value::Null) && !answer.0.contains_key("tool_calls")
}

fn add_call(all: &mut Vec<Message>, call: Value) {
    let Some(answer) = last_answer(all) else {
        all.push(assistant(Value::Null, String::new(), vec![call]));
        return;
    };
    let calls = answer.0.entry("tool_calls").or_insert_with(|| json!([]));
    if let Some(calls) = calls.as_array_mut() {
        calls.push(call);
    }
}

/// A text, or parts of one, as templates read them.
fn content(item: &Value, name: &str, param: &str) -> Result<Value, ApiError> {
    let param = format!("{param}.{name}");
    let parts = match item.get(name) {
        Some(Value::String(text)) => return Ok(text.as_str().into()),
        Some(Value::Array(parts)) => parts,
        _ => return Err(malformed(&param, "expected a string or a list of parts")),
    };
    let text = |(i, part): (usize, &Value)| {
        let param = format!("{param}.{i}");
        let text = match field(part, "type", &param)? {
            "input_text" | "output_text" | "text" => field(part, "text", &param)?,
            "refusal" => field(part, "refusal", &param)?,
            other => {
                let message = format!(
                    "{param}: parts of type `{}` are not supported, only text",
                    quoted(other)
                );
                return Err(ApiError::unsupported(&param, message));
            }
        };
        Ok(turns::part(text))
    };
    parts.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>().map(Value::from)
}

/// The texts of an item of reasoning; what is encrypted nobody here can read.
fn thoughts(item: &Value, param: &str) -> Result<String, ApiError> {
    let parts = match item.get("content") {
        None | Some(Value::Null) => return Ok(String::new()),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(malformed(&format!("{param}.content"), "expected a list of parts")),
    };
    let text = |(i, part)| field(part, "text", &format!("{param}.content.{i}"));
    parts.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>().map(|texts| texts.concat())
}

/// An item of the output.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputItem {
    Reasoning {
        id: String,
        /// Always empty: thoughts are told as they are.
        summary: Vec<String>,
        content: Vec<OutputPart>,
        status: &'static str,
    },
    Message {
        id: String,
        role: &'static str,
        status: &'static str,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        /// JSON, as text.
        arguments: String,
        status: &'static str,
    },
}

/// Part of an item.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputPart {
    OutputText { text: String, annotations: Vec<String>, logprobs: Vec<String> },
    ReasoningText { text: String },
}

impl OutputItem {
    /// An id for what becomes of a block.
    pub(super) fn new_id(block: &Block) -> String {
        let prefix = match block {
            Block::Reasoning(_) => "rs",
            Block::Text(_) => "msg",
            Block::Call(_) => "fc",
        };
        format!("{prefix}_{}", crate::app::random_id())
    }

    /// A block that was just begun.
    pub(super) fn begun(id: String, block: &Block) -> OutputItem {
        let mut item = OutputItem::of(id, block, "in_progress");
        match &mut item {
            OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. } => {
                content.clear();
            }
            OutputItem::FunctionCall { .. } => {}
        }
        item
    }

    pub(super) fn of(id: String, block: &Block, status: &'static str) -> OutputItem {
        let content = OutputPart::of(block).into_iter().collect();
        match block {
            Block::Reasoning(_) => {
                OutputItem::Reasoning { id, summary: Vec::new(), content, status }
            }
            Block::Text(_) => OutputItem::Message { id, role: "assistant", status, content },
            Block::Call(call) => OutputItem::FunctionCall {
                id,
                call_id: call.id.clone(),
                name: call.name.clone(),
                arguments: call.arguments.clone(),
                status,
            },
        }
    }
}

impl OutputPart {
    /// The part that a block's item has, if it has one.
    pub(super) fn of(block: &Block) -> Option<OutputPart> {
        match block {
            Block::Reasoning(text) => Some(OutputPart::ReasoningText { text: text.clone() }),
            Block::Text(text) => {
                let text = text.clone();
                Some(OutputPart::OutputText { text, annotations: Vec::new(), logprobs: Vec::new() })
            }
            Block::Call(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_turn_thought_said_and_called_is_one_message() {
        let items = [
            json!({"role": "user", "content": "x"}),
            json!({"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}),
            json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}),
            json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\": 1}"}),
            json!({"type": "function_call", "call_id": "2", "name": "g", "arguments": ""}),
            json!({"type": "function_call_output", "call_id": "1", "output": "one"}),
            json!({"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"}),
            json!({"role": "assistant", "content": "Done."}),
            json!({"role": "assistant", "content": "Really."}),
        ];
        let mut all = Vec::new();
        for item in &items {
            read(item, "input.0", &mut all).expect("sound");
        }
        let roles: Vec<_> = all.iter().filter_map(Message::role).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "assistant", "assistant", "assistant"]);
        let turn = &all[1].0;
        assert_eq!(
            (&turn["reasoning_content"], &turn["content"][0]["text"]),
            (&json!("Hm."), &json!("Yes."))
        );
        assert_eq!(turn["tool_calls"][0]["function"], json!({"name": "f", "arguments": {"a": 1}}));
        assert_eq!(turn["tool_calls"][1]["function"], json!({"name": "g", "arguments": {}}));
        assert_eq!((&all[2].0["tool_call_id"], &all[2].0["content"]), (&json!("1"), &json!("one")));
    }
}
