//! Requests as Anthropic has them, and what they come to.

use infernum_frontend_hf::chat::Message;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::calls::{self, Reader, ToolChoice};
use crate::api::common::{CommonFields, Stop, token_limit};
use crate::api::conversation::{Conversation, End, messages, variables};
use crate::api::options::SamplingFields;
use crate::api::read::whole;
use crate::api::structure::ResponseFormat;
use crate::api::turns::{self, assistant, field, malformed, object, part, said};
use crate::api::warnings::Warnings;
use crate::error::{ApiError, quoted};
use crate::model::Served;

/// How a request is to be answered.
pub(crate) struct Plan {
    pub(super) stream: bool,
    pub(super) reader: Reader,
}

/// A request, but for sampling options.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesRequest {
    /// One of the models that `/v1/models` lists. May be left out where there is but one.
    model: Option<String>,
    /// The conversation so far; the last message is the user's.
    #[schema(value_type = Vec<InputMessage>, min_items = 1, max_items = 10_000)]
    messages: Vec<Message>,
    /// Most tokens to generate.
    #[schema(minimum = 1, required = true, value_type = i64)]
    #[serde(default, deserialize_with = "whole")]
    max_tokens: Option<i64>,
    /// What comes before the conversation.
    #[schema(value_type = Option<BlocksOrText>)]
    system: Option<Value>,
    /// Up to 64 strings that end the text, of 16384 bytes together; they are not part of it.
    stop_sequences: Option<Vec<String>>,
    /// Send the answer as it comes, as server-sent events.
    stream: Option<bool>,
    /// What the model may call, if its chat template knows calls.
    #[schema(value_type = Option<Vec<InputTool>>, max_items = 128)]
    tools: Option<Vec<Value>>,
    tool_choice: Option<MessagesToolChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    metadata: Option<Metadata>,
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct MessagesBody {
    #[serde(flatten)]
    own: MessagesRequest,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// A conversation whose tokens are counted.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CountRequest {
    /// May be left out where there is but one.
    pub(super) model: Option<String>,
    #[schema(value_type = Vec<InputMessage>, min_items = 1, max_items = 10_000)]
    messages: Vec<Message>,
    #[schema(value_type = Option<BlocksOrText>)]
    system: Option<Value>,
    #[schema(value_type = Option<Vec<InputTool>>, max_items = 128)]
    tools: Option<Vec<Value>>,
    tool_choice: Option<MessagesToolChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
}

/// A message.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct InputMessage {
    role: Role,
    content: BlocksOrText,
}

/// Whose a message is.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum Role {
    User,
    Assistant,
    System,
}

/// A text, or blocks.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum BlocksOrText {
    Text(String),
    Blocks(Vec<InputBlock>),
}

/// Part of a message.
#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum InputBlock {
    Text { text: String },
    Thinking { thinking: String, signature: Option<String> },
    ToolUse { id: String, name: String, input: Map<String, Value> },
    ToolResult { tool_use_id: String, content: Option<String>, is_error: Option<bool> },
}

/// Something that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InputTool {
    #[schema(max_length = 128)]
    name: String,
    description: Option<String>,
    /// A JSON schema of the arguments.
    input_schema: Option<Map<String, Value>>,
    /// `custom`, the one kind that there is.
    r#type: Option<String>,
}

/// What is to be called: `auto` where there are tools, unless something else is said.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesToolChoice {
    r#type: Choice,
    /// With `tool`.
    name: Option<String>,
    /// One call in an answer at most.
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Choice {
    Auto,
    Any,
    Tool,
    None,
}

/// Whether the model is to think, if its chat template knows that; as the template has it when left out.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Thinking {
    r#type: Thinks,
    /// Without effect.
    #[serde(default, deserialize_with = "whole")]
    budget_tokens: Option<i64>,
    /// Without effect: thoughts are told as they are.
    display: Option<String>,
}

/// `adaptive` leaves it to the model.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Thinks {
    Enabled,
    Disabled,
    Adaptive,
}

/// How much the model is to think, and what its text is held to.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OutputConfig {
    /// A variable of the chat template, `reasoning_effort`.
    effort: Option<String>,
    format: Option<OutputFormat>,
}

/// A JSON schema that the text is held to.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OutputFormat {
    #[allow(dead_code, reason = "there is one kind")]
    r#type: OutputFormatType,
    #[schema(value_type = Object)]
    schema: Value,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum OutputFormatType {
    JsonSchema,
}

/// Accepted for clients that send it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Metadata {
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    user_id: Option<String>,
}

impl MessagesRequest {
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// What it comes to.
    pub(super) fn read(
        self,
        served: &Served,
        warnings: &mut Warnings,
    ) -> Result<(CommonFields, Conversation), ApiError> {
        let most = token_limit("max_tokens", self.max_tokens, 1)?;
        if most.is_none() {
            return Err(ApiError::malformed("max_tokens: is missing").param("max_tokens"));
        }
        let format = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        let format = format.map(|f| ResponseFormat::json_schema(f.schema.clone()));
        let stop = self.stop_sequences.map(Stop::Several);
        let common = CommonFields::of(stop, self.stream, format);
        let asked = CountRequest {
            model: None,
            messages: self.messages,
            system: self.system,
            tools: self.tools,
            tool_choice: self.tool_choice,
            thinking: self.thinking,
            output_config: self.output_config,
        };
        let conversation = asked.conversation(served, warnings)?;
        Ok((common, Conversation { most, ..conversation }))
    }
}

impl CountRequest {
    /// The conversation, as the chat template reads it.
    pub(super) fn conversation(
        self,
        served: &Served,
        warnings: &mut Warnings,
    ) -> Result<Conversation, ApiError> {
        let given = self.tools.unwrap_or_default();
        let given = given.iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?;
        let choice = self.tool_choice.as_ref();
        let several = choice.and_then(|c| c.disable_parallel_tool_use).map(|one| !one);
        let choice = choice.map(MessagesToolChoice::read).transpose()?;
        let tools = calls::Asked::check(Some(given), choice.as_ref(), several)?;
        if let Some(thinking) = &self.thinking {
            for (name, given) in [
                ("thinking.budget_tokens", thinking.budget_tokens.is_some()),
                ("thinking.display", thinking.display.is_some()),
            ] {
                if given {
                    warnings.add(format!("without effect here: {name}"));
                }
            }
        }
        let thinks = self.thinking.and_then(|thinking| match thinking.r#type {
            Thinks::Enabled => Some(true),
            Thinks::Disabled => Some(false),
            Thinks::Adaptive => None,
        });
        let effort = self.output_config.and_then(|config| config.effort);
        let mut all = Vec::new();
        if let Some(system) = self.system.filter(|system| !system.is_null()) {
            all.push(said("system", texts(&system, "system")?.into()));
        }
        for (i, message) in self.messages.iter().enumerate() {
            read_message(&message.0, &format!("messages.{i}"), &mut all, warnings)?;
        }
        let is_answered = self.messages.last().is_some_and(|m| m.role() == Some("assistant"));
        let end = End::of(&all);
        if is_answered && end == End::Answer {
            let message = "messages: the last one calls tools: expected their results after it";
            return Err(ApiError::malformed(message).param("messages"));
        }
        let variables = variables(effort, thinks, Map::new());
        Ok(Conversation {
            end,
            messages: messages(all, served)?,
            tools,
            variables,
            ..Conversation::default()
        })
    }
}

impl MessagesToolChoice {
    /// As OpenAI has it.
    fn read(&self) -> Result<ToolChoice, ApiError> {
        Ok(match self.r#type {
            Choice::Auto => ToolChoice::AUTO,
            Choice::Any => ToolChoice::REQUIRED,
            Choice::None => ToolChoice::NONE,
            Choice::Tool => {
                let message = "tool_choice.name: is missing";
                let missing = || ApiError::malformed(message).param("tool_choice.name");
                ToolChoice::named(self.name.clone().ok_or_else(missing)?)
            }
        })
    }
}

/// A tool as templates get it.
fn tool((i, tool): (usize, &Value)) -> Result<Value, ApiError> {
    let param = format!("tools.{i}");
    let read = InputTool::deserialize(tool);
    let read = read.map_err(|e| malformed(&param, &quoted(&e.to_string())))?;
    if let Some(kind) = read.r#type.as_deref().filter(|kind| *kind != "custom") {
        let message =
            format!("{param}: tools of type `{}` are not supported, only `custom`", quoted(kind));
        return Err(ApiError::unsupported("tools", message));
    }
    Ok(calls::described(read.name, read.description, read.input_schema))
}

/// Adds what a message comes to: tools' results are messages of their own.
fn read_message(
    message: &Map<String, Value>,
    param: &str,
    all: &mut Vec<Message>,
    warnings: &mut Warnings,
) -> Result<(), ApiError> {
    let role = message.get("role").and_then(Value::as_str);
    let role = role.filter(|role| ["user", "assistant", "system"].contains(role));
    let role = role.ok_or_else(|| {
        malformed(&format!("{param}.role"), "expected `user`, `assistant` or `system`")
    })?;
    let param = format!("{param}.content");
    let blocks = match message.get("content") {
        Some(Value::String(text)) => {
            all.push(Message::new(role, text.as_str()));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(malformed(&param, "expected a string or a list of blocks")),
    };
    if role == "assistant" {
        all.push(answered(blocks, &param)?);
        return Ok(());
    }
    let mut parts = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let param = format!("{param}.{i}");
        match kind(block, &param)? {
            "text" => parts.push(part(field(block, "text", &param)?)),
            "tool_result" if role == "user" => {
                if !parts.is_empty() {
                    all.push(said(role, std::mem::take(&mut parts).into()));
                }
                if block.get("is_error") == Some(&Value::Bool(true)) {
                    warnings.add("without effect here: is_error".to_owned());
                }
                let content = match block.get("content") {
                    None | Some(Value::Null) => Vec::new(),
                    Some(content) => texts(content, &format!("{param}.content"))?,
                };
                all.push(turns::result(field(block, "tool_use_id", &param)?, content.into()));
            }
            other => return Err(unsupported(other, &param)),
        }
    }
    if !parts.is_empty() || blocks.is_empty() {
        all.push(said(role, parts.into()));
    }
    Ok(())
}

/// An earlier answer.
fn answered(blocks: &[Value], param: &str) -> Result<Message, ApiError> {
    let (mut parts, mut reasoning, mut past) = (Vec::new(), String::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let param = format!("{param}.{i}");
        match kind(block, &param)? {
            "text" => parts.push(part(field(block, "text", &param)?)),
            "thinking" => reasoning.push_str(field(block, "thinking", &param)?),
            // Nobody here can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (field(block, "id", &param)?, field(block, "name", &param)?);
                let input = object(block, "input", &param)?;
                past.push(calls::past(id, name, input));
            }
            other => return Err(unsupported(other, &param)),
        }
    }
    Ok(assistant(parts.into(), reasoning, past))
}

/// The texts of what is a text, or blocks of text, as parts.
fn texts(content: &Value, param: &str) -> Result<Vec<Value>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![part(text)]),
        Value::Array(blocks) => {
            let text = |(i, block): (usize, &Value)| {
                let param = format!("{param}.{i}");
                match kind(block, &param)? {
                    "text" => Ok(part(field(block, "text", &param)?)),
                    other => Err(unsupported(other, &param)),
                }
            };
            blocks.iter().enumerate().map(text).collect()
        }
        _ => Err(malformed(param, "expected a string or a list of blocks")),
    }
}

fn kind<'a>(block: &'a Value, param: &str) -> Result<&'a str, ApiError> {
    field(block, "type", param)
}

fn unsupported(kind: &str, param: &str) -> ApiError {
    let message = format!("{param}: blocks of type `{}` are not supported here", quoted(kind));
    ApiError::unsupported(param, message)
}
