//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum::Part;
use infernum_frontend_hf::chat::Message;
use infernum_frontend_hf::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::answer::{
    Chunk, ChunkUsage, Likelihood, PromptLogprobs, Usage, likeliest, likelihood, prompt_logprobs,
};
use super::blocks::{Answered, Block, collect, token_count};
use super::calls::{self, CallDelta, Reader, Reading, Tool, ToolCall, ToolChoice};
use super::common::{
    Asked, Begun, CommonFields, Head, MOST_LOGPROBS, Prepared, begin, token_limit, within,
};
use super::conversation::{Conversation, End, messages, variables};
use super::options::SamplingFields;
use super::read::{parse_parts, whole};
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::generation::{Finish, Generation, Piece, TokenLogprob, Used};
use crate::lanes::Client;
use crate::model::Served;
use crate::sse::{self, Frames, StreamFormat};
use crate::text::Spelling;

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
    /// Go on with the text of the last message, instead of a message of its own; false when left out.
    continue_final_message: Option<bool>,
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
    request_body(content = ChatRequest, example = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 32})),
    extensions(("x-python" = json!("openai: chat.completions.create"))),
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
    reader: Reader,
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared<Plan>, ApiError> {
    let parts = parse_parts::<ChatFields, CommonFields>(&asked.bytes)?;
    let (fields, common_fields) = (parts.own, parts.common);
    let mut warnings = Warnings::new(&parts.unknown, parts.options.without_effect());
    let served = app.model_for_work(common_fields.model.as_deref())?;
    parts.options.check()?;
    let common = common_fields.check(&parts.options, &served, asked.tenant)?;
    let logprobs = fields.check()?;
    let most = match fields.max_completion_tokens {
        Some(n) => token_limit("max_completion_tokens", Some(n), 1)?,
        None => token_limit("max_tokens", common_fields.max_tokens, 1)?,
    };
    common.check_least(most)?;
    let tools =
        calls::Asked::check(fields.tools, fields.tool_choice.as_ref(), fields.parallel_tool_calls)?;
    let conversation = Conversation {
        messages: messages(fields.messages, &served)?,
        raw: None,
        tools,
        variables: variables(
            fields.reasoning_effort,
            fields.enable_thinking,
            fields.chat_template_kwargs.unwrap_or_default(),
        ),
        end: End::check(fields.add_generation_prompt, fields.continue_final_message)?,
        special: fields.add_special_tokens.unwrap_or(false),
        most,
        logprobs,
    };
    let (choices, stream, include_usage) = (common.n, common.stream, common.include_usage);
    let prompt_logprobs = common.prompt_logprobs;
    let (job, reader) = conversation.job(&served, common, &asked.request_id, &mut warnings)?;
    let logprobs = logprobs.is_some();
    let plan = Plan { choices, stream, include_usage, logprobs, prompt_logprobs, reader };
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

async fn answer(
    app: &App,
    client: Client,
    served: &Served,
    plan: Plan,
    generation: Generation,
) -> Result<Response, ApiError> {
    let head = Head::new("chatcmpl-", served);
    let spelling = Spelling::new(served.frontend.tokenizer());
    let prompts = plan.prompt_logprobs.map(|most| (spelling.clone(), most));
    let spelling = plan.logprobs.then_some(spelling);
    if plan.stream {
        let choice = || Told { begun: false, reading: plan.reader.begin(), logprobs: Vec::new() };
        let choices = (0..plan.choices).map(|_| choice()).collect();
        let (usage, tokenizer) = (plan.include_usage, served.frontend.tokenizer().clone());
        let streamed = Streamed { head, spelling, prompts, usage, choices, tokenizer };
        return Ok(sse::stream(generation, streamed));
    }
    let tell = move |answers: Vec<Answered>, used: Used| {
        whole_answer(head, spelling.as_ref(), prompts, answers, used.into())
    };
    collect(app, client, served, plan.reader, generation, tell).await
}

fn whole_answer(
    head: Head,
    spelling: Option<&Spelling>,
    prompts: Option<(Spelling, usize)>,
    mut answers: Vec<Answered>,
    usage: Usage,
) -> Response {
    let of_prompt = answers.first_mut().and_then(|answer| answer.prompt.take());
    let prompt_logprobs =
        prompts.zip(of_prompt).map(|((spelling, most), of)| prompt_logprobs(&spelling, most, &of));
    let choice = |(index, answered): (usize, Answered)| {
        let logprobs = told(spelling, &answered.logprobs);
        let (finish, message) = (answered.finish, Answer::of(answered.blocks));
        let finish_reason = finish_name(finish, !message.tool_calls.is_empty());
        ChatChoice { index, message, logprobs, finish_reason }
    };
    let choices = answers.into_iter().enumerate().map(choice).collect();
    let Head { id, created, model } = head;
    let object = "chat.completion";
    let body = ChatCompletion { id, object, created, model, choices, usage, prompt_logprobs };
    json(StatusCode::OK, &body)
}

impl Answer {
    fn of(blocks: Vec<Block>) -> Answer {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for block in blocks {
            match block {
                Block::Reasoning(text) => reasoning.push_str(&text),
                Block::Text(text) => content.push_str(&text),
                Block::Call(call) => {
                    calls.push(ToolCall::new(call.id, call.name, call.arguments));
                }
            }
        }
        let silent = content.is_empty() && !calls.is_empty();
        Answer {
            role: "assistant",
            content: (!silent).then_some(content),
            reasoning_content: reasoning,
            tool_calls: calls,
            refusal: None,
        }
    }
}

/// Why an answer ended.
fn finish_name(finish: Finish, calls: bool) -> &'static str {
    if calls && finish == Finish::Stop { "tool_calls" } else { finish.name() }
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
    reading: Reading,
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

impl StreamFormat for Streamed {
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
        let parts = choice.reading.take(&piece.text, piece.finish.is_some());
        let calls = choice.reading.calls();
        for part in parts {
            let choice = &mut self.choices[index];
            let content = std::mem::take(&mut choice.logprobs);
            let logprobs = (!content.is_empty()).then_some(ChatLogprobs { content });
            let id = choice.reading.id();
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

    fn end(&mut self, frames: &mut Frames, used: Used) {
        if self.usage {
            let thoughts = self.choices.iter().map(|choice| &choice.reading.reasoning);
            let reasoning = thoughts.map(|text| token_count(&self.tokenizer, text)).sum();
            self.send(frames, &[], Some(Used { reasoning, ..used }.into()));
        }
        frames.done();
    }
}
