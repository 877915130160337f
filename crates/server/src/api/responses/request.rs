//! Requests as OpenAI's responses have them, and what they come to.

use infernum_frontend_hf::chat::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::item::{self, InputItem};
use crate::api::calls::{self, ChoiceMode, ToolChoice, ToolType};
use crate::api::common::{CommonFields, token_limit};
use crate::api::conversation::{Conversation, messages, variables};
use crate::api::options::SamplingFields;
use crate::api::read::whole;
use crate::api::structure::ResponseFormat;
use crate::api::turns;
use crate::error::{ApiError, quoted};
use crate::model::Served;

/// A request, but for sampling options.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponsesRequest {
    /// One of the models that `/v1/models` lists. May be left out where there is but one.
    pub(super) model: Option<String>,
    /// What is said to the model: a text, or items.
    #[schema(value_type = InputTextOrItems)]
    input: Value,
    /// What comes before all items; that of an earlier response counts no more.
    pub(super) instructions: Option<String>,
    /// The conversation goes on from this response, if it is still kept.
    pub(super) previous_response_id: Option<String>,
    /// Keep the response, for `previous_response_id` and to be asked for; true when left out.
    pub(super) store: Option<bool>,
    /// Send the answer as it comes, as server-sent events.
    pub(super) stream: Option<bool>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "there is nothing to choose")]
    stream_options: Option<ResponsesStreamOptions>,
    /// Most tokens to generate.
    #[schema(minimum = 1)]
    #[serde(default, deserialize_with = "whole")]
    pub(super) max_output_tokens: Option<i64>,
    /// What the model may call, if its chat template knows calls.
    #[schema(value_type = Option<Vec<FlatTool>>, max_items = 128)]
    pub(super) tools: Option<Vec<Value>>,
    pub(super) tool_choice: Option<FlatToolChoice>,
    /// Several calls in one answer; true when left out.
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) text: Option<TextConfig>,
    pub(super) reasoning: Option<ReasoningConfig>,
    /// Given back with the response.
    pub(super) metadata: Option<Map<String, Value>>,
    /// Without effect: nothing that can be included is left out.
    include: Option<Vec<String>>,
    /// Only `disabled` is supported.
    truncation: Option<String>,
    /// Not supported.
    #[schema(minimum = 0, maximum = 0)]
    #[serde(default, deserialize_with = "whole")]
    top_logprobs: Option<i64>,
    /// Not supported.
    background: Option<bool>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    conversation: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    prompt: Option<Value>,
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct ResponsesBody {
    #[serde(flatten)]
    own: ResponsesRequest,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// A text, or items.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum InputTextOrItems {
    Text(String),
    Items(Vec<InputItem>),
}

/// Accepted for clients that send it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponsesStreamOptions {
    /// Without effect.
    #[allow(dead_code, reason = "nothing is obfuscated")]
    include_obfuscation: Option<bool>,
}

/// Something that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct FlatTool {
    /// `function`, the one kind that there is.
    r#type: String,
    #[schema(max_length = 128)]
    name: Option<String>,
    description: Option<String>,
    /// A JSON schema of the arguments.
    parameters: Option<Map<String, Value>>,
}

/// `none`, `auto` (where there are tools, unless something else is said), `required`, or a tool.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged, expecting = "`none`, `auto`, `required` or a function by its name")]
pub(crate) enum FlatToolChoice {
    Mode(ChoiceMode),
    Named(FlatNamed),
}

/// A tool that is to be called.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct FlatNamed {
    r#type: ToolType,
    name: String,
}

/// What the text is held to.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TextConfig {
    format: Option<TextFormat>,
    /// Only `medium` is supported.
    verbosity: Option<String>,
}

/// Any text, any JSON object, or what a schema describes.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct TextFormat {
    r#type: TextFormatType,
    /// Accepted for clients that send it.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Accepted for clients that send it.
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// With `json_schema`.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<Value>,
    /// Without effect: texts are held to schemas in either case.
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TextFormatType {
    Text,
    JsonObject,
    JsonSchema,
}

/// How much the model is to think.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub(crate) struct ReasoningConfig {
    /// A variable of the chat template, `reasoning_effort`; `none` is not to think.
    effort: Option<String>,
    /// Without effect: thoughts are told as they are.
    summary: Option<String>,
}

impl ResponsesRequest {
    /// Refuses what is not built.
    fn check(&self) -> Result<(), ApiError> {
        let said = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_deref());
        let logprobs = |name: &String| name == "message.output_text.logprobs";
        let refused = [
            (
                "background",
                self.background == Some(true),
                "not supported yet; `stream` tells answers as they come",
            ),
            (
                "conversation",
                said(&self.conversation),
                "not supported yet; `previous_response_id` goes on from a response",
            ),
            (
                "include",
                self.include.iter().flatten().any(logprobs),
                "log-probabilities are not supported here yet",
            ),
            ("prompt", said(&self.prompt), "there are no stored prompts here"),
            ("text.verbosity", verbosity.is_some_and(|v| v != "medium"), "not supported yet"),
            (
                "top_logprobs",
                self.top_logprobs.is_some_and(|n| n != 0),
                "not supported here yet; chat completions have it",
            ),
            (
                "truncation",
                self.truncation.as_deref().is_some_and(|t| t != "disabled"),
                "only `disabled` is supported",
            ),
        ];
        match refused.iter().find(|(_, refused, _)| *refused) {
            Some((name, _, why)) => Err(ApiError::unsupported(name, format!("{name}: {why}"))),
            None => Ok(()),
        }
    }

    /// What the text is held to.
    pub(super) fn format(&self) -> Option<&TextFormat> {
        self.text.as_ref().and_then(|text| text.format.as_ref())
    }

    /// Its common fields.
    pub(super) fn common(&self) -> Result<CommonFields, ApiError> {
        self.check()?;
        let response_format = match self.format() {
            None | Some(TextFormat { r#type: TextFormatType::Text, .. }) => None,
            Some(TextFormat { r#type: TextFormatType::JsonObject, .. }) => {
                Some(ResponseFormat::json_object())
            }
            Some(TextFormat { r#type: TextFormatType::JsonSchema, schema, .. }) => {
                let message = "text.format.schema: is missing";
                let missing = || ApiError::malformed(message).param("text.format.schema");
                Some(ResponseFormat::json_schema(schema.clone().ok_or_else(missing)?))
            }
        };
        Ok(CommonFields::of(None, self.stream, response_format))
    }

    /// The messages that go on from those of earlier responses.
    pub(super) fn history(&self, mut earlier: Vec<Message>) -> Result<Vec<Message>, ApiError> {
        match &self.input {
            Value::String(text) => earlier.push(Message::new("user", text.as_str())),
            Value::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    item::read(item, &format!("input.{i}"), &mut earlier)?;
                }
            }
            _ => {
                let message = "input: expected a string or a list of items";
                return Err(ApiError::malformed(message).param("input"));
            }
        }
        Ok(earlier)
    }

    /// The conversation, as the chat template reads it.
    pub(super) fn conversation(
        &self,
        history: &[Message],
        served: &Served,
    ) -> Result<Conversation, ApiError> {
        let tools = self.tools.iter().flatten().enumerate().map(tool);
        let tools = tools.collect::<Result<Vec<_>, _>>()?;
        let choice = self.tool_choice.clone().map(ToolChoice::from);
        let tools = calls::Asked::check(Some(tools), choice.as_ref(), self.parallel_tool_calls)?;
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
        Ok(Conversation {
            messages: messages(self.with_instructions(history), served)?,
            tools,
            variables: variables(effort, None, Map::new()),
            most: token_limit("max_output_tokens", self.max_output_tokens, 1)?,
            ..Conversation::default()
        })
    }

    /// Instructions and what system messages the conversation begins with are one: templates take no two.
    fn with_instructions(&self, history: &[Message]) -> Vec<Message> {
        let Some(instructions) = &self.instructions else { return history.to_vec() };
        let systems = history.iter().take_while(|message| message.role() == Some("system")).count();
        let (systems, rest) = history.split_at(systems);
        let mut parts = vec![turns::part(instructions)];
        for system in systems {
            match system.0.get("content") {
                Some(Value::Array(more)) => parts.extend(more.iter().cloned()),
                Some(Value::String(text)) => parts.push(turns::part(text)),
                _ => {}
            }
        }
        let mut all = vec![turns::said("system", parts.into())];
        all.extend_from_slice(rest);
        all
    }
}

impl From<FlatToolChoice> for ToolChoice {
    fn from(choice: FlatToolChoice) -> ToolChoice {
        match choice {
            FlatToolChoice::Mode(mode) => ToolChoice::Mode(mode),
            FlatToolChoice::Named(named) => ToolChoice::named(named.name),
        }
    }
}

/// A tool as templates get it.
fn tool((i, tool): (usize, &Value)) -> Result<Value, ApiError> {
    let param = format!("tools.{i}");
    let malformed = |what: &str| ApiError::malformed(format!("{param}: {what}")).param(&*param);
    let read = FlatTool::deserialize(tool).map_err(|e| malformed(&quoted(&e.to_string())))?;
    if read.r#type != "function" {
        let kind = quoted(&read.r#type);
        let message = format!("{param}: tools of type `{kind}` are not supported, only `function`");
        return Err(ApiError::unsupported("tools", message));
    }
    let name = read.name.ok_or_else(|| malformed("its `name` is missing"))?;
    Ok(calls::described(name, read.description, read.parameters))
}
