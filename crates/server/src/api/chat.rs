//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum::Part;
use infernum_frontend_hf::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::answer::{
    Chunk, ChunkUsage, Likelihood, PromptLogprobs, Usage, likeliest, likelihood, prompt_logprobs,
};
use super::calls::{self, CallDelta, Read, Reader, Reading, Tool, ToolCall, ToolChoice};
use super::common::{
    Asked, Begun, CommonFields, Head, MOST_LOGPROBS, Prepared, Warnings, begin, encode, room_for,
    take_last, token_limit, within,
};
use super::options::SamplingFields;
use super::read::{parse_parts, whole};
use crate::app::App;
use crate::error::{ApiError, json, quoted};
use crate::generation::{Finish, Generation, Job, Piece, TokenLogprob, Used, Whole};
use crate::lanes::Client;
use crate::model::Served;
use crate::sse::{self, Dialect, Frames};
use crate::text::Spelling;

/// Messages of a conversation at most: what templates do with them may grow faster than they do.
const MOST_MESSAGES: usize = 10_000;

/// Fields of chats only.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ChatFields {
    /// The conversation so far.
    #[schema(value_type = Vec<ChatMessage>, min_items = 1, max_items = 10_000)]
    messages: Vec<Message>,
    /// As `max_tokens`, which it goes before.
    #[schema(minimum = 1)]
    #[serde(default, deserialize_with = "whole")]
    max_completion_tokens: Option<i64>,
    /// Tell the log-probabilities of the tokens.
    logprobs: Option<bool>,
    /// Tell those of so many of the likeliest tokens, too; needs `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    #[serde(default, deserialize_with = "whole")]
    top_logprobs: Option<i64>,
    /// What the model may call, if its chat template knows calls.
    #[schema(value_type = Option<Vec<Tool>>, max_items = 128)]
    tools: Option<Vec<Value>>,
    tool_choice: Option<ToolChoice>,
    /// Several calls in one answer; true when left out.
    parallel_tool_calls: Option<bool>,
    /// How much the model is to think: a variable of its chat template. `none` is `enable_thinking`: false.
    reasoning_effort: Option<String>,
    /// Whether the model is to think: a variable of its chat template, also by the name `thinking`.
    enable_thinking: Option<bool>,
    /// End the conversation where the answer begins; true when left out.
    add_generation_prompt: Option<bool>,
    /// Add what the tokenizer puts around a text; false when left out: templates write it.
    add_special_tokens: Option<bool>,
    /// Further variables of the model's chat template, such as `enable_thinking`.
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct ChatRequest {
    #[serde(flatten)]
    own: ChatFields,
    #[serde(flatten)]
    sampling: SamplingFields,
    #[serde(flatten)]
    common: CommonFields,
}

/// A message.
#[derive(ToSchema)]
#[allow(dead_code, reason = "messages go to templates as they are")]
pub(crate) struct ChatMessage {
    /// system, user, assistant or what else the model's template knows.
    role: String,
    content: Option<Content>,
}

/// A message's text.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// Part of a message: `{"type": "text", "text": …}`.
#[derive(ToSchema)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) struct ContentPart {
    r#type: TextType,
    text: String,
}

/// The one kind that there is.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum TextType {
    Text,
}

/// The answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    id: String,
    /// `chat.completion`
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
    /// Where `prompt_logprobs` asks for them.
    #[schema(value_type = Option<Vec<Option<std::collections::BTreeMap<String, super::answer::PromptLogprob>>>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Serialize, ToSchema)]
struct ChatChoice {
    index: usize,
    message: Answer,
    #[schema(required = true)]
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`
    finish_reason: &'static str,
}

#[derive(Serialize, ToSchema)]
struct Answer {
    role: &'static str,
    /// null where there are calls alone.
    #[schema(required = true)]
    content: Option<String>,
    /// What the model thought, where its chat template tells that apart.
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    #[schema(required = true)]
    refusal: Option<String>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct ChatLogprobs {
    content: Vec<ChatLogprob>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct ChatLogprob {
    #[serde(flatten)]
    token: Likelihood,
    top_logprobs: Vec<Likelihood>,
}

/// Answers a conversation.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer; with `stream` as server-sent events",
         content((ChatCompletion = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
    )
)]
pub(crate) async fn create_chat_completion(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Begun { client, served, plan, warnings, generation } =
        begin(&app, request, prepare).await?;
    let response = answer(&app, client, &served, plan, generation).await?;
    Ok(warnings.tell(response))
}

/// How it is to be answered.
struct Plan {
    choices: usize,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
    prompt_logprobs: Option<usize>,
    reader: Option<Reader>,
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared<Plan>, ApiError> {
    let parts = parse_parts::<ChatFields>(&asked.bytes)?;
    let (fields, common_fields) = (parts.own, parts.common);
    let mut warnings = Warnings::new(&parts.unknown, parts.options.without_effect());
    let served = app.model_for_work(common_fields.model.as_deref())?.clone();
    parts.options.check(true)?;
    let mut common = common_fields.check(&parts.options, &served, asked.tenant)?;
    let logprobs = fields.check()?;
    let wanted = match fields.max_completion_tokens {
        Some(n) => token_limit("max_completion_tokens", Some(n), 1)?,
        None => token_limit("max_tokens", common_fields.max_tokens, 1)?,
    };
    common.check_least(wanted)?;
    let tools =
        calls::Asked::check(fields.tools, fields.tool_choice.as_ref(), fields.parallel_tool_calls)?;
    let takes_parts = served.frontend.template().is_ok_and(ChatTemplate::takes_parts);
    let messages = messages(fields.messages, takes_parts)?;
    served.check_room(common.n)?;
    common.compile_grammar(&served)?;
    let options = RenderOptions {
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(true),
        tools: tools.given.clone(),
        extra: variables(
            fields.reasoning_effort,
            fields.enable_thinking,
            fields.chat_template_kwargs.unwrap_or_default(),
        ),
        ..RenderOptions::default()
    };
    let special = fields.add_special_tokens.unwrap_or(false);
    let text = rendered(&served, &messages, &options)?;
    let reader = tools.reader(&served, &text)?;
    if let Some(asked) = tools.grammar(&served, reader.as_ref())? {
        if let Some((other, _)) = &common.grammar {
            let message = format!("{other}: a call is required, and an answer is not both");
            return Err(ApiError::malformed(message).param(*other));
        }
        common.hold_to(&served, &asked)?;
    }
    common.text.shown = served.frontend.marker_tokens().to_vec();
    let mut tokens = encode(&served, "messages", &text, special, common.readable(&served))?;
    take_last(&mut tokens, common.taken(wanted, &served));
    let most = room_for("messages", tokens.len(), wanted, &served, &mut warnings)?;
    let request = |i| {
        let request = common.request(tokens.clone(), most, i, logprobs);
        // All choices have one prompt.
        let prompt_logprobs = request.prompt_logprobs.filter(|_| i == 0);
        infernum_runtime::Request { prompt_logprobs, ..request }
    };
    let requests = (0..common.n).map(request).collect();
    let plan = Plan {
        choices: common.n,
        stream: common.stream,
        include_usage: common.include_usage,
        logprobs: logprobs.is_some(),
        prompt_logprobs: common.prompt_logprobs,
        reader,
    };
    let job = Job {
        requests,
        per_prompt: common.n,
        text: common.text,
        echo: None,
        tell_prompts: common.prompt_logprobs.is_some(),
        request_id: asked.request_id.clone(),
    };
    Ok(Prepared { served, job, plan, warnings })
}

impl ChatFields {
    /// Refuses what is not built; says how many log-probabilities are wanted.
    fn check(&self) -> Result<Option<usize>, ApiError> {
        let top = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, MOST_LOGPROBS)?;
        match self.logprobs {
            Some(true) => Ok(Some(top as usize)),
            _ if top > 0 => {
                Err(ApiError::value("top_logprobs", "top_logprobs: needs `logprobs`: true"))
            }
            _ => Ok(None),
        }
    }
}

/// Messages as templates read them: a list of parts becomes one text, unless the template `takes_parts`, and
/// arguments of calls become objects.
pub(crate) fn messages(
    messages: Vec<Message>,
    takes_parts: bool,
) -> Result<Vec<Message>, ApiError> {
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

/// The tokens of a conversation, of which there may be `limit`.
pub(crate) fn prompt(
    served: &Served,
    messages: &[Message],
    options: &RenderOptions,
    special: bool,
    limit: usize,
) -> Result<Vec<u32>, ApiError> {
    let text = rendered(served, messages, options)?;
    encode(served, "messages", &text, special, limit)
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
fn variables(
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

async fn answer(
    app: &App,
    client: Client,
    served: &Served,
    plan: Plan,
    mut generation: Generation,
) -> Result<Response, ApiError> {
    let head = Head::new("chatcmpl", served);
    let spelling = Spelling::new(served.frontend.tokenizer());
    let prompts = plan.prompt_logprobs.map(|most| (spelling.clone(), most));
    let spelling = plan.logprobs.then_some(spelling);
    if plan.stream {
        let choice = || Told {
            begun: false,
            reading: plan.reader.as_ref().map(Reader::begin),
            logprobs: Vec::new(),
        };
        let choices = (0..plan.choices).map(|_| choice()).collect();
        let (usage, tokenizer) = (plan.include_usage, served.frontend.tokenizer().clone());
        let streamed = Streamed { head, spelling, prompts, usage, choices, tokenizer };
        return Ok(sse::stream(generation, streamed));
    }
    let wholes = generation.collect().await?;
    let used = generation.used();
    let size = wholes.iter().map(Whole::size).sum();
    let (reader, tokenizer) = (plan.reader, served.frontend.tokenizer().clone());
    let work = move || {
        let read = |whole: &Whole| reader.as_ref().map(|reader| Read::whole(reader, &whole.text));
        let read: Vec<Option<Read>> = wholes.iter().map(read).collect();
        let reasoning = read.iter().flatten().map(|r| token_count(&tokenizer, &r.reasoning)).sum();
        let usage = Used { reasoning, ..used }.into();
        Ok(whole_answer(head, spelling.as_ref(), prompts, (wholes, read), usage))
    };
    app.lanes.run(client, size, work).await
}

fn whole_answer(
    head: Head,
    spelling: Option<&Spelling>,
    prompts: Option<(Spelling, usize)>,
    (mut wholes, read): (Vec<Whole>, Vec<Option<Read>>),
    usage: Usage,
) -> Response {
    let of_prompt = wholes.first_mut().and_then(|whole| whole.prompt.take());
    let prompt_logprobs =
        prompts.zip(of_prompt).map(|((spelling, most), of)| prompt_logprobs(&spelling, most, &of));
    let choice = |(index, (whole, read)): (usize, (Whole, Option<Read>))| {
        let read = read.unwrap_or_else(|| Read { content: whole.text, ..Read::default() });
        let finish_reason = finish_name(whole.finish, !read.calls.is_empty());
        let silent = read.content.is_empty() && !read.calls.is_empty();
        let message = Answer {
            role: "assistant",
            content: (!silent).then_some(read.content),
            reasoning_content: read.reasoning,
            tool_calls: read.calls,
            refusal: None,
        };
        ChatChoice { index, message, logprobs: told(spelling, &whole.logprobs), finish_reason }
    };
    let choices = wholes.into_iter().zip(read).enumerate().map(choice).collect();
    let Head { id, created, model } = head;
    let object = "chat.completion";
    let body = ChatCompletion { id, object, created, model, choices, usage, prompt_logprobs };
    json(StatusCode::OK, &body)
}

/// Why an answer ended.
fn finish_name(finish: Finish, calls: bool) -> &'static str {
    if calls && finish == Finish::Stop { "tool_calls" } else { finish.name() }
}

/// How many tokens a text has by itself.
fn token_count(tokenizer: &Tokenizer, text: &str) -> usize {
    if text.is_empty() { 0 } else { tokenizer.encode(text, false).map_or(0, |tokens| tokens.len()) }
}

fn told(spelling: Option<&Spelling>, logprobs: &[TokenLogprob]) -> Option<ChatLogprobs> {
    let spelling = spelling?;
    let told = |l: &TokenLogprob| ChatLogprob {
        token: likelihood(spelling, l.token, l.logprob.unwrap_or_default()),
        top_logprobs: likeliest(spelling, l),
    };
    Some(ChatLogprobs { content: logprobs.iter().map(told).collect() })
}

/// The answer as a stream.
struct Streamed {
    head: Head,
    /// Present where log-probabilities are told.
    spelling: Option<Spelling>,
    /// Present where the prompt's are, with how many of the likeliest.
    prompts: Option<(Spelling, usize)>,
    usage: bool,
    choices: Vec<Told>,
    tokenizer: Tokenizer,
}

/// What was told of a choice.
struct Told {
    /// Its role.
    begun: bool,
    /// Where there may be more in it than text.
    reading: Option<Reading>,
    /// Of tokens whose text is not told yet.
    logprobs: Vec<ChatLogprob>,
}

#[derive(Serialize)]
struct DeltaChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

impl Streamed {
    fn send(&self, frames: &mut Frames, choices: &[DeltaChoice<'_>], usage: Option<Usage>) {
        self.send_with(frames, choices, usage, None);
    }

    fn send_with(
        &self,
        frames: &mut Frames,
        choices: &[DeltaChoice<'_>],
        usage: Option<Usage>,
        prompt_logprobs: Option<PromptLogprobs>,
    ) {
        frames.push(&Chunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: &self.head.model,
            choices,
            usage: ChunkUsage::of(self.usage, usage),
            prompt_logprobs,
        });
    }
}

impl Dialect for Streamed {
    fn piece(&mut self, frames: &mut Frames, piece: Piece) {
        let index = piece.choice;
        if !std::mem::replace(&mut self.choices[index].begun, true) {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            let told = self.prompts.as_ref().zip(piece.prompt.as_ref()).filter(|_| index == 0);
            let told = told.map(|((spelling, most), of)| prompt_logprobs(spelling, *most, of));
            let choice = DeltaChoice { index, delta, logprobs: None, finish_reason: None };
            self.send_with(frames, &[choice], None, told);
        }
        let logprobs = told(self.spelling.as_ref(), &piece.logprobs);
        let choice = &mut self.choices[index];
        choice.logprobs.extend(logprobs.into_iter().flat_map(|l| l.content));
        let parts = match &mut choice.reading {
            Some(reading) => reading.take(&piece.text, piece.finish.is_some()),
            None if piece.text.is_empty() => Vec::new(),
            None => vec![Part::Content(piece.text)],
        };
        let calls = choice.reading.as_ref().is_some_and(Reading::calls);
        for part in parts {
            let choice = &mut self.choices[index];
            let content = std::mem::take(&mut choice.logprobs);
            let logprobs = (!content.is_empty()).then_some(ChatLogprobs { content });
            let id = choice.reading.as_ref().map(Reading::id).unwrap_or_default();
            let none = Delta::default();
            let delta = match &part {
                Part::Content(text) => Delta { content: Some(text), ..none },
                Part::Reasoning(text) => Delta { reasoning_content: Some(text), ..none },
                Part::Call(call, name) => {
                    Delta { tool_calls: Some([CallDelta::begin(*call, name.clone(), id)]), ..none }
                }
                Part::Arguments(call, text) => {
                    Delta { tool_calls: Some([CallDelta::more(*call, text.clone())]), ..none }
                }
            };
            self.send(frames, &[DeltaChoice { index, delta, logprobs, finish_reason: None }], None);
        }
        if let Some(finish) = piece.finish {
            // Tokens without a text of their own are told with the end.
            let content = std::mem::take(&mut self.choices[index].logprobs);
            let logprobs = (!content.is_empty()).then_some(ChatLogprobs { content });
            let (delta, finish_reason) = (Delta::default(), Some(finish_name(finish, calls)));
            self.send(frames, &[DeltaChoice { index, delta, logprobs, finish_reason }], None);
        }
    }

    fn usage(&mut self, frames: &mut Frames, used: Used) {
        if self.usage {
            let thoughts = self.choices.iter().filter_map(|choice| choice.reading.as_ref());
            let reasoning = thoughts.map(|r| token_count(&self.tokenizer, &r.reasoning)).sum();
            self.send(frames, &[], Some(Used { reasoning, ..used }.into()));
        }
    }
}
