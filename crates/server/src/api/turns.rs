//! Messages as templates read them, made of what APIs have in their place.

use infernum_frontend_hf::chat::Message;
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// A message that is no answer.
pub(crate) fn said(role: &str, content: Value) -> Message {
    let fields = [("role".to_owned(), role.into()), ("content".to_owned(), content)];
    Message(fields.into_iter().collect())
}

/// An earlier answer.
pub(crate) fn assistant(content: Value, reasoning: String, calls: Vec<Value>) -> Message {
    let Message(mut message) = said("assistant", content);
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), calls.into());
    }
    Message(message)
}

/// What a tool gave.
pub(crate) fn result(call: &str, content: Value) -> Message {
    let Message(mut message) = said("tool", content);
    message.insert("tool_call_id".to_owned(), call.into());
    Message(message)
}

/// A part of a message's content.
pub(crate) fn part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// What is wrong with the value at a path.
pub(crate) fn malformed(param: &str, what: &str) -> ApiError {
    ApiError::malformed(format!("{param}: {what}")).param(param)
}

/// A text that the value at a path must have.
pub(crate) fn field<'a>(value: &'a Value, name: &str, param: &str) -> Result<&'a str, ApiError> {
    let text = value.get(name).and_then(Value::as_str);
    text.ok_or_else(|| malformed(&format!("{param}.{name}"), "expected a string"))
}

/// The object that the value at a path must have.
pub(crate) fn object<'a>(
    value: &'a Value,
    name: &str,
    param: &str,
) -> Result<&'a Map<String, Value>, ApiError> {
    let object = value.get(name).and_then(Value::as_object);
    object.ok_or_else(|| malformed(&format!("{param}.{name}"), "expected an object"))
}
