//! What all APIs for conversations come to: a prompt, a job for the engine, and how its answer is read.

use infernum_frontend_hf::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use serde_json::{Map, Value};

use super::calls::{self, Reader};
use super::common::{Common, encode, room_for, take_last};
use super::warnings::Warnings;
use crate::error::{ApiError, quoted};
use crate::generation::Job;
use crate::model::Served;

/// Messages of a conversation at most: what templates do with them may grow faster than they do.
const MOST_MESSAGES: usize = 10_000;

/// Where a conversation ends.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// Before the answer's first word.
    #[default]
    Answer,
    /// Behind the last message.
    Message,
    /// With the last message's text, which the answer goes on with.
    Continued,
}

impl End {
    /// As `add_generation_prompt` and `continue_final_message` say, with the names that vLLM gives them.
    pub(crate) fn check(opens: Option<bool>, continues: Option<bool>) -> Result<End, ApiError> {
        match (opens, continues.unwrap_or(false)) {
            (Some(true), true) => Err(ApiError::value(
                "continue_final_message",
                "continue_final_message: an answer that begins a message of its own \
                 (`add_generation_prompt`) does not go on with the last one",
            )),
            (_, true) => Ok(End::Continued),
            (Some(false), false) => Ok(End::Message),
            _ => Ok(End::Answer),
        }
    }

    /// The answer goes on with the last message where that is a text of the assistant's.
    pub(crate) fn of(messages: &[Message]) -> End {
        let is_text =
            |m: &Message| m.role() == Some("assistant") && !m.0.contains_key("tool_calls");
        if messages.last().is_some_and(is_text) { End::Continued } else { End::Answer }
    }
}

/// What the next message is asked for by.
#[derive(Default)]
pub(crate) struct Conversation {
    /// As [`messages`] gives them.
    pub(crate) messages: Vec<Message>,
    /// A text that the model continues as it is, in place of messages.
    pub(crate) raw: Option<String>,
    pub(crate) tools: calls::Asked,
    /// Further variables of the chat template.
    pub(crate) variables: Map<String, Value>,
    pub(crate) end: End,
    /// Add what the tokenizer puts around a text.
    pub(crate) special: bool,
    /// Tokens of the answer at most.
    pub(crate) most: Option<usize>,
    /// Tell the log-probabilities of tokens, and of so many of the likeliest.
    pub(crate) logprobs: Option<usize>,
}

impl Conversation {
    /// What the model continues, and how that is read.
    fn rendered(&self, served: &Served) -> Result<(String, Reader), ApiError> {
        if let Some(text) = &self.raw {
            return Ok((text.clone(), Reader::plain()));
        }
        let options = RenderOptions {
            add_generation_prompt: self.end == End::Answer,
            continue_final_message: self.end == End::Continued,
            tools: self.tools.given.clone(),
            extra: self.variables.clone(),
            ..RenderOptions::default()
        };
        let text = rendered(served, &self.messages, &options)?;
        let reader = self.tools.reader(served, &text)?;
        Ok((text, reader))
    }

    fn encode(&self, served: &Served, text: &str, limit: usize) -> Result<Vec<u32>, ApiError> {
        // What no template wrote begins as texts do.
        encode(served, "messages", text, self.special || self.raw.is_some(), limit)
    }

    /// The tokens that the model continues, of which there may be `limit`.
    pub(crate) fn prompt(&self, served: &Served, limit: usize) -> Result<Vec<u32>, ApiError> {
        let (text, _) = self.rendered(served)?;
        self.encode(served, &text, limit)
    }

    /// What the engine is to do, and how what comes of it is read. It may take seconds.
    pub(crate) fn job(
        &self,
        served: &Served,
        mut common: Common,
        request_id: &str,
        warnings: &mut Warnings,
    ) -> Result<(Job, Reader), ApiError> {
        common.check_least(self.most)?;
        served.check_room(common.n)?;
        common.compile_grammar(served)?;
        let (text, reader) = self.rendered(served)?;
        if let Some(asked) = self.tools.grammar(served, &reader)? {
            if let Some((other, _)) = &common.grammar {
                let message = format!("{other}: a call is required, and an answer is not both");
                return Err(ApiError::malformed(message).param(*other));
            }
            common.hold_to(served, &asked)?;
        }
        if self.raw.is_none() {
            common.text.shown = served.frontend.marker_tokens().to_vec();
        }
        let mut tokens = self.encode(served, &text, common.readable(served))?;
        take_last(&mut tokens, common.taken(self.most, served));
        let most = room_for("messages", tokens.len(), self.most, served, warnings)?;
        let request = |i| {
            let request = common.request(tokens.clone(), most, i, self.logprobs);
            // All choices have one prompt.
            let prompt_logprobs = request.prompt_logprobs.filter(|_| i == 0);
            infernum_runtime::Request { prompt_logprobs, ..request }
        };
        let requests = (0..common.n).map(request).collect();
        let job = Job {
            requests,
            per_prompt: common.n,
            tell_prompts: common.prompt_logprobs.is_some(),
            text: common.text,
            echo: None,
            request_id: request_id.to_owned(),
        };
        Ok((job, reader))
    }
}

/// Messages as templates read them: a list of parts becomes one text, unless the template takes parts, and
/// arguments of calls become objects.
pub(crate) fn messages(messages: Vec<Message>, served: &Served) -> Result<Vec<Message>, ApiError> {
    let takes_parts = served.frontend.template().is_ok_and(ChatTemplate::takes_parts);
    if messages.is_empty() {
        return Err(ApiError::value("messages", "messages: expected at least one"));
    }
    if messages.len() > MOST_MESSAGES {
        let found = messages.len();
        let message = format!("messages: expected at most {MOST_MESSAGES}, found {found}");
        return Err(ApiError::value("messages", message));
    }
    let plain = |(i, mut message): (usize, Message)| {
        let param = |field: &str| format!("messages.{i}.{field}");
        let malformed = |field: &str, expected: &str| {
            let param = param(field);
            ApiError::malformed(format!("{param}: expected {expected}")).param(param)
        };
        if message.role().is_none_or(str::is_empty) {
            return Err(malformed("role", "a role, such as `user`"));
        }
        match message.0.get("content") {
            Some(Value::String(_) | Value::Null) => {}
            Some(Value::Array(parts)) => {
                let text = parts_text(parts).map_err(|e| e.param(param("content")))?;
                if !takes_parts || message.role() == Some("tool") {
                    message.0.insert("content".to_owned(), text.into());
                }
            }
            // A turn of tool calls has none.
            None if message.0.contains_key("tool_calls") => {}
            None => return Err(malformed("content", "a text")),
            Some(_) => return Err(malformed("content", "a string or a list of parts")),
        }
        calls::with_arguments(&mut message.0, &param)?;
        Ok(message)
    };
    messages.into_iter().enumerate().map(plain).collect()
}

/// The texts of a list of parts, a line each.
fn parts_text(parts: &[Value]) -> Result<String, ApiError> {
    fn part(part: &Value) -> Result<&str, ApiError> {
        let kind = part.get("type").and_then(Value::as_str);
        let Some(kind) = kind else {
            return Err(ApiError::malformed("content: expected parts with a `type`"));
        };
        if kind != "text" {
            let kind = quoted(kind);
            let message = format!("content: parts of type `{kind}` are not supported, only `text`");
            return Err(ApiError::unsupported("messages", message));
        }
        let text = part.get("text").and_then(Value::as_str);
        text.ok_or_else(|| ApiError::malformed("content: a part of type `text` has no `text`"))
    }
    Ok(parts.iter().map(part).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// The text of a conversation.
fn rendered(
    served: &Served,
    messages: &[Message],
    options: &RenderOptions,
) -> Result<String, ApiError> {
    let template = served.frontend.template();
    let template = template.map_err(|e| ApiError::unsupported("model", e.to_string()))?;
    let mut rendered = template.render(messages, options);
    // Some templates look into content where there is none, and some add arguments to text, which objects are not.
    for (empty, text) in [(true, false), (false, true), (true, true)] {
        if matches!(rendered, Err(ChatError::Render { .. }))
            && messages.iter().any(|m| m.0.contains_key("tool_calls"))
        {
            rendered = template.render(&calls::adapted(messages, empty, text), options);
        }
    }
    rendered.map_err(|error| match error {
        ChatError::Refused { .. } => ApiError::malformed(error.to_string()).param("messages"),
        ChatError::Render { .. } => ApiError::value("messages", error.to_string()),
        error => ApiError::internal(error.to_string()),
    })
}

/// Variables of the template: those that fields of their own say, and those given by name, which go before them.
pub(crate) fn variables(
    effort: Option<String>,
    thinks: Option<bool>,
    given: Map<String, Value>,
) -> Map<String, Value> {
    let mut all = Map::new();
    let thinks = thinks.or((effort.as_deref() == Some("none")).then_some(false));
    if let Some(thinks) = thinks {
        all.extend(["enable_thinking", "thinking"].map(|name| (name.to_owned(), thinks.into())));
    }
    let effort = effort.filter(|effort| effort != "none");
    all.extend(effort.map(|effort| ("reasoning_effort".to_owned(), effort.into())));
    all.extend(given);
    all
}
