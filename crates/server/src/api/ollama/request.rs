//! Requests as Ollama has them, and what they come to.

use infernum_frontend_hf::chat::Message;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::calls::{self, Tool};
use crate::api::common::{CommonFields, Stop, token_limit};
use crate::api::conversation::{Conversation, End, messages, variables};
use crate::api::options::{Options, SamplingFields};
use crate::api::read::{parse_own, whole};
use crate::api::structure::{ResponseFormat, Schema};
use crate::api::warnings::Warnings;
use crate::error::ApiError;
use crate::model::Served;

/// Options that say how a model is loaded and run, which is the operator's business, or that change no answer here.
const WITHOUT_EFFECT: [&str; 19] = [
    "draft_num_predict",
    "embedding_only",
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "mirostat_eta",
    "mirostat_tau",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "penalize_newline",
    "repeat_last_n",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

/// Fields of conversations only.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaChat {
    /// The conversation so far; without any, nothing is done.
    #[schema(value_type = Option<Vec<OllamaInput>>, max_items = 10_000)]
    messages: Option<Vec<Message>>,
    /// What the model may call, if its chat template knows calls.
    #[schema(value_type = Option<Vec<Tool>>, max_items = 128)]
    tools: Option<Vec<Value>>,
}

/// Fields of single texts only.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaGenerate {
    /// What the user says; without it, nothing is done.
    prompt: Option<String>,
    /// What comes before it.
    system: Option<String>,
    /// Continue the prompt as it is, without the chat template.
    raw: Option<bool>,
    /// Not supported.
    #[schema(max_length = 0)]
    suffix: Option<String>,
    /// Not supported.
    #[schema(max_length = 0)]
    template: Option<String>,
    /// Not supported: `/api/chat` takes what was said before.
    #[schema(max_items = 0)]
    context: Option<Vec<i64>>,
    /// Not supported.
    #[schema(max_items = 0)]
    images: Option<Vec<String>>,
}

/// Fields that both have.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Settings {
    /// One of the models that `/api/tags` lists. May be left out where there is but one.
    pub(super) model: Option<String>,
    /// Tell the answer line by line, as it comes; true when left out.
    pub(super) stream: Option<bool>,
    /// What the text is held to: `json` for any JSON object, or a JSON schema.
    #[schema(value_type = Option<Schema>)]
    format: Option<Value>,
    /// How tokens are picked, and when the text ends.
    #[schema(value_type = Option<OllamaOptionFields>)]
    options: Option<Map<String, Value>>,
    /// Whether the model is to think, or how much, as `low`, if its chat template knows that.
    #[schema(value_type = Option<Think>)]
    think: Option<Value>,
    /// Without effect: models stay.
    #[schema(value_type = Option<String>)]
    keep_alive: Option<Value>,
    /// Not supported.
    logprobs: Option<bool>,
    /// Not supported.
    #[schema(minimum = 0, maximum = 0)]
    #[serde(default, deserialize_with = "whole")]
    top_logprobs: Option<i64>,
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct OllamaChatRequest {
    #[serde(flatten)]
    own: OllamaChat,
    #[serde(flatten)]
    settings: Settings,
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct OllamaGenerateRequest {
    #[serde(flatten)]
    own: OllamaGenerate,
    #[serde(flatten)]
    settings: Settings,
}

/// A message.
#[derive(ToSchema)]
#[allow(dead_code, reason = "messages go to templates as they are")]
pub(crate) struct OllamaInput {
    /// system, user, assistant, tool or what else the model's template knows.
    role: String,
    content: Option<String>,
    /// What the model thought.
    thinking: Option<String>,
    /// What it called.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// Of a tool's result: which tool it was.
    tool_name: Option<String>,
}

/// Whether, or how much.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum Think {
    Whether(bool),
    HowMuch(String),
}

/// Options that no table has.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct OptionFields {
    /// Most tokens to generate; -1 and -2 for as many as there is room for.
    #[schema(minimum = -2)]
    #[serde(default, deserialize_with = "whole")]
    num_predict: Option<i64>,
    /// Up to 64 strings that end the text, of 16384 bytes together; they are not part of it.
    stop: Option<Stop>,
}

/// Options, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct OllamaOptionFields {
    #[serde(flatten)]
    own: OptionFields,
    #[serde(flatten)]
    sampling: SamplingFields,
    /// As `repetition_penalty`.
    repeat_penalty: Option<f64>,
}

impl Settings {
    /// Its common fields, sampling options, and tokens to generate at most.
    pub(super) fn read(
        self,
        warnings: &mut Warnings,
    ) -> Result<(CommonFields, Options, Option<usize>), ApiError> {
        for (name, asked) in [
            ("logprobs", self.logprobs == Some(true)),
            ("top_logprobs", self.top_logprobs.is_some_and(|n| n != 0)),
        ] {
            if asked {
                let message = format!("{name}: not supported here yet; chat completions have it");
                return Err(ApiError::unsupported(name, message));
            }
        }
        let mut ignored: Vec<&str> = self.keep_alive.iter().map(|_| "keep_alive").collect();
        let mut given = self.options.unwrap_or_default();
        ignored.extend(WITHOUT_EFFECT.iter().filter(|name| given.remove(**name).is_some()));
        if let Some(penalty) = given.remove("repeat_penalty") {
            given.insert("repetition_penalty".to_owned(), penalty);
        }
        // As if they were a request of their own: tables read text.
        let text = Value::Object(given).to_string();
        let (own, options, unknown) = parse_own::<OptionFields>(text.as_bytes())?;
        options.check()?;
        warnings.join(Warnings::new(&unknown, &ignored));
        let format = match self.format {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) if name.is_empty() => None,
            Some(Value::String(name)) if name == "json" => Some(ResponseFormat::json_object()),
            Some(schema @ Value::Object(_)) => Some(ResponseFormat::json_schema(schema)),
            Some(_) => {
                let message = "format: expected `json` or a JSON schema";
                return Err(ApiError::malformed(message).param("format"));
            }
        };
        // As much as there is room for is what nothing says, too.
        let most = own.num_predict.filter(|n| ![-1, -2].contains(n));
        let most = token_limit("num_predict", most, 1)?;
        Ok((CommonFields::of(own.stop, self.stream, format), options, most))
    }

    /// Variables of the chat template.
    fn variables(&self) -> Result<Map<String, Value>, ApiError> {
        let (thinks, effort) = match &self.think {
            None | Some(Value::Null) => (None, None),
            Some(Value::Bool(thinks)) => (Some(*thinks), None),
            Some(Value::String(effort)) => (Some(true), Some(effort.clone())),
            Some(_) => {
                let message = "think: expected true, false or how much";
                return Err(ApiError::malformed(message).param("think"));
            }
        };
        Ok(variables(effort, thinks, Map::new()))
    }
}

impl OllamaChat {
    /// The conversation, as the chat template reads it; `None` where nothing is said.
    pub(super) fn conversation(
        self,
        settings: &Settings,
        served: &Served,
    ) -> Result<Option<Conversation>, ApiError> {
        let given = self.messages.unwrap_or_default();
        if given.is_empty() {
            return Ok(None);
        }
        let length = served.frontend.dialect().and_then(|dialect| dialect.id_length);
        let mut ids = Ids { length, made: 0, open: Vec::new() };
        let read = |(i, message)| read_message(message, i, &mut ids);
        let given = given.into_iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        Ok(Some(Conversation {
            end: End::of(&given),
            messages: messages(given, served)?,
            tools: calls::Asked::check(self.tools, None, None)?,
            variables: settings.variables()?,
            ..Conversation::default()
        }))
    }
}

impl OllamaGenerate {
    /// A conversation of one message, or a text as it is; `None` where nothing is said.
    pub(super) fn conversation(
        self,
        settings: &Settings,
        served: &Served,
    ) -> Result<Option<Conversation>, ApiError> {
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        for (name, asked, why) in [
            ("suffix", said(&self.suffix), "not supported yet"),
            ("template", said(&self.template), "templates are the model's own, never a client's"),
            (
                "context",
                self.context.is_some_and(|c| !c.is_empty()),
                "`/api/chat` takes what was said before",
            ),
            (
                "images",
                self.images.is_some_and(|i| !i.is_empty()),
                "there are no models of images here",
            ),
        ] {
            if asked {
                return Err(ApiError::unsupported(name, format!("{name}: {why}")));
            }
        }
        let Some(prompt) = self.prompt.filter(|prompt| !prompt.is_empty()) else { return Ok(None) };
        if self.raw == Some(true) {
            return Ok(Some(Conversation { raw: Some(prompt), ..Conversation::default() }));
        }
        let system = self.system.map(|text| Message::new("system", text));
        let said = system.into_iter().chain([Message::new("user", prompt)]).collect();
        Ok(Some(Conversation {
            messages: messages(said, served)?,
            variables: settings.variables()?,
            ..Conversation::default()
        }))
    }
}

/// Ids of calls, which Ollama's messages need not have and templates may want: the same ones in each turn, so that a
/// prompt begins as the one before it did.
struct Ids {
    length: Option<usize>,
    made: usize,
    /// Calls that have no result yet: names and ids.
    open: Vec<(String, String)>,
}

impl Ids {
    fn next(&mut self) -> String {
        self.made += 1;
        match self.length {
            Some(length) => format!("{:0length$}", self.made),
            None => format!("call_{}", self.made),
        }
    }

    /// The call that a result is of: the first of that name, or the first.
    fn answered(&mut self, name: Option<&str>) -> Option<(String, String)> {
        let named = self.open.iter().position(|(known, _)| Some(known.as_str()) == name);
        let at = named.unwrap_or(0);
        (at < self.open.len()).then(|| self.open.remove(at))
    }
}

/// A message as templates read it.
fn read_message(mut message: Message, i: usize, ids: &mut Ids) -> Result<Message, ApiError> {
    let param = |field: &str| format!("messages.{i}.{field}");
    let images = message.0.remove("images");
    if images.is_some_and(|images| {
        images.as_array().is_none_or(|all| !all.is_empty()) && !images.is_null()
    }) {
        let message = format!("{}: there are no models of images here", param("images"));
        return Err(ApiError::unsupported("messages", message));
    }
    if message
        .0
        .get("tool_calls")
        .is_some_and(|calls| calls.is_null() || calls == &Value::Array(Vec::new()))
    {
        message.0.remove("tool_calls");
    }
    message.0.entry("content").or_insert_with(|| "".into());
    if message.role() == Some("tool") {
        let name = message.0.remove("tool_name");
        let call = ids.answered(name.as_ref().and_then(Value::as_str));
        message.0.extend(name.map(|name| ("name".to_owned(), name)));
        if let Some((_, id)) = call {
            message.0.entry("tool_call_id").or_insert_with(|| id.into());
        }
    }
    let calls = message.0.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten().filter_map(Value::as_object_mut) {
        call.entry("type").or_insert_with(|| "function".into());
        let id = call.entry("id").or_insert_with(|| ids.next().into());
        let id = id.as_str().unwrap_or_default().to_owned();
        let name = call.get("function").and_then(|f| f.get("name")).and_then(Value::as_str);
        ids.open.push((name.unwrap_or_default().to_owned(), id));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_and_their_results_have_one_id() {
        let call = |name: &str| json!({"function": {"name": name, "arguments": {}}});
        let given = json!([
            {"role": "assistant", "tool_calls": [call("a"), call("b"), {"id": "own", "function": {"name": "c"}}]},
            {"role": "tool", "tool_name": "b", "content": "2"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "tool_name": "c", "content": "3"},
            {"role": "tool", "content": "4"},
        ]);
        for (length, first, second) in
            [(None, "call_1", "call_2"), (Some(9), "000000001", "000000002")]
        {
            let mut ids = Ids { length, made: 0, open: Vec::new() };
            let given: Vec<Message> = serde_json::from_value(given.clone()).expect("messages");
            let read: Vec<Message> = given
                .into_iter()
                .enumerate()
                .map(|(i, message)| read_message(message, i, &mut ids).expect("sound"))
                .collect();
            let made: Vec<&str> =
                (0..3).map(|i| read[0].0["tool_calls"][i]["id"].as_str().expect("an id")).collect();
            assert_eq!(made, [first, second, "own"]);
            let answered = |i: usize| read[i].0.get("tool_call_id").and_then(Value::as_str);
            assert_eq!(
                [answered(1), answered(2), answered(3), answered(4)],
                [Some(second), Some(first), Some("own"), None]
            );
            assert_eq!(read[1].0["name"], "b");
        }
    }
}
