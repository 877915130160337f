//! `/v1/completions`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::de::{Error, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::answer::{Chunk, ChunkUsage, PromptLogprobs, Usage, finite, prompt_logprobs};
use super::common::{
    Asked, Begun, Common, CommonFields, Head, MOST_LOGPROBS, Prepared, begin, encode, encode_error,
    room_for, take_last, token_limit, within,
};
use super::options::SamplingFields;
use super::read::{TokenId, parse_parts, whole};
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::generation::{Generation, Job, MOST_CHOICES, Piece, TokenLogprob, Used, Whole};
use crate::lanes::Client;
use crate::model::Served;
use crate::sse::{self, Frames, StreamFormat};
use crate::text::Spelling;

/// Tokens to generate when a request does not say, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;

/// Fields of completions only.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CompletionFields {
    prompt: Prompt,
    /// Generate so many and give back the `n` likeliest, by mean log-probability.
    #[schema(minimum = 1, maximum = 128)]
    #[serde(default, deserialize_with = "whole")]
    best_of: Option<i64>,
    /// Give the prompt back before the text.
    echo: Option<bool>,
    /// Tell the log-probabilities of the tokens, and of so many of the likeliest.
    #[schema(minimum = 0, maximum = 20)]
    #[serde(default, deserialize_with = "whole")]
    logprobs: Option<i64>,
    /// Add what the tokenizer puts around a text; true when left out.
    add_special_tokens: Option<bool>,
    /// Not supported yet.
    #[schema(max_length = 0)]
    suffix: Option<String>,
}

/// What to continue.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    #[schema(value_type = Vec<u32>)]
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    #[schema(value_type = Vec<Vec<u32>>)]
    TokenLists(Vec<Vec<TokenId>>),
}

impl Prompt {
    /// How many prompts it is.
    pub(crate) fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Tokens(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::TokenLists(lists) => lists.len(),
        }
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Prompt, D::Error> {
        input.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompt;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a text, token ids, or a list of either")
    }

    fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
        Ok(Prompt::Text(text.to_owned()))
    }

    /// The first item says what the others are.
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompt, A::Error> {
        fn all<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
            first: T,
            items: &mut A,
        ) -> Result<Vec<T>, A::Error> {
            let mut all = vec![first];
            while let Some(item) = items.next_element()? {
                all.push(item);
            }
            Ok(all)
        }
        Ok(match items.next_element()? {
            None => Prompt::Texts(Vec::new()),
            Some(Item::Text(text)) => Prompt::Texts(all(text, &mut items)?),
            Some(Item::Token(token)) => Prompt::Tokens(all(token, &mut items)?),
            Some(Item::Tokens(tokens)) => Prompt::TokenLists(all(tokens, &mut items)?),
        })
    }
}

/// The first of a list of prompts, or of a prompt's tokens.
enum Item {
    Text(String),
    Token(TokenId),
    Tokens(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Item, D::Error> {
        input.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a text, a token id, or a list of them")
    }

    fn visit_str<E>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Text(text.to_owned()))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Item, E> {
        TokenId::deserialize(n.into_deserializer()).map(Item::Token)
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Item, E> {
        TokenId::deserialize(n.into_deserializer()).map(Item::Token)
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Item, E> {
        TokenId::deserialize(x.into_deserializer()).map(Item::Token)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = items.next_element()? {
            tokens.push(token);
        }
        Ok(Item::Tokens(tokens))
    }
}

/// A request, for the API's description.
#[derive(ToSchema)]
#[allow(dead_code, reason = "read in two parts, described in one")]
pub(crate) struct CompletionRequest {
    #[serde(flatten)]
    own: CompletionFields,
    #[serde(flatten)]
    sampling: SamplingFields,
    #[serde(flatten)]
    common: CommonFields,
}

/// The answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct Completion {
    id: String,
    /// `text_completion`
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    usage: Usage,
}

#[derive(Serialize, ToSchema)]
struct CompletionChoice {
    text: String,
    index: usize,
    #[schema(required = true)]
    logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`
    #[schema(required = true)]
    finish_reason: Option<&'static str>,
    /// Where `prompt_logprobs` asks for them.
    #[schema(value_type = Option<Vec<Option<BTreeMap<String, super::answer::PromptLogprob>>>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

/// Lists of one length, an entry a token.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    /// null for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of the text before each.
    text_offset: Vec<usize>,
}

/// Continues texts.
#[utoipa::path(
    post, path = "/v1/completions", tag = "OpenAI",
    request_body(content = CompletionRequest, example = json!({"prompt": "Once upon a time", "max_tokens": 32})),
    extensions(("x-python" = json!("openai: completions.create"))),
    responses(
        (status = 200, description = "The continuations; with `stream` as server-sent events",
         content((Completion = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
    )
)]
pub(crate) async fn create_completion(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Begun { client, served, plan, warnings, generation } =
        begin(&app, request, prepare).await?;
    let response = answer(&app, client, &served, plan, generation).await?;
    Ok(warnings.tell(response))
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared<Plan>, ApiError> {
    let parts = parse_parts::<CompletionFields, CommonFields>(&asked.bytes)?;
    let (fields, common_fields) = (parts.own, parts.common);
    let mut warnings = Warnings::new(&parts.unknown, parts.options.without_effect());
    let served = app.model_for_work(common_fields.model.as_deref())?;
    parts.options.check()?;
    let mut common = common_fields.check(&parts.options, &served, asked.tenant)?;
    let wanted = token_limit("max_tokens", common_fields.max_tokens, 0)?;
    let plan = Plan::check(&fields, &common, wanted, &served)?;
    served.check_room(plan.best_of)?;
    plan.check_choices(fields.prompt.count())?;
    common.compile_grammar(&served)?;
    let prompts = encode_prompts(&served, fields.prompt, plan)?;
    let job = plan.job(&served, &common, prompts, asked.request_id.clone(), &mut warnings)?;
    Ok(Prepared { served, job, plan, warnings })
}

/// What is wanted, checked.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each is a field of the request")]
struct Plan {
    n: usize,
    best_of: usize,
    stream: bool,
    include_usage: bool,
    prompt_logprobs: Option<usize>,
    echo: bool,
    logprobs: Option<usize>,
    /// `None` for as many as the checkpoint says.
    max_tokens: Option<usize>,
    /// Tokens of each prompt that are taken, from its end.
    taken: usize,
    /// Tokens of each prompt that are read.
    readable: usize,
    special: bool,
}

impl Plan {
    fn check(
        fields: &CompletionFields,
        common: &Common,
        wanted: Option<usize>,
        served: &Served,
    ) -> Result<Plan, ApiError> {
        if fields.suffix.as_ref().is_some_and(|s| !s.is_empty()) {
            return Err(ApiError::unsupported("suffix", "suffix: not supported yet"));
        }
        let n = common.n as i64;
        let best_of = fields.best_of.unwrap_or(n);
        let best_of = within("best_of", best_of, n, MOST_CHOICES as i64)? as usize;
        if common.stream && best_of > common.n {
            let message = "best_of: what is best is known at the end only, so it cannot stream";
            return Err(ApiError::value("best_of", message));
        }
        let logprobs = fields.logprobs.map(|n| within("logprobs", n, 0, MOST_LOGPROBS));
        let logprobs = logprobs.transpose()?.map(|n| n as usize);
        let own = served.frontend.defaults().max_tokens(0).is_none().then_some(DEFAULT_TOKENS);
        let max_tokens = wanted.or(own);
        common.check_least(max_tokens)?;
        Ok(Plan {
            n: common.n,
            best_of,
            stream: common.stream,
            include_usage: common.include_usage,
            prompt_logprobs: common.prompt_logprobs,
            echo: fields.echo.unwrap_or(false),
            logprobs,
            max_tokens,
            taken: common.taken(max_tokens, served),
            readable: common.readable(served),
            special: fields.add_special_tokens.unwrap_or(true),
        })
    }

    /// Refuses more choices in all than there can be.
    fn check_choices(self, prompts: usize) -> Result<(), ApiError> {
        if prompts.saturating_mul(self.best_of) <= MOST_CHOICES {
            return Ok(());
        }
        let message = format!(
            "prompt: expected at most {MOST_CHOICES} choices in all, found {prompts} prompts of {}",
            self.best_of,
        );
        Err(ApiError::value("prompt", message))
    }

    fn job(
        self,
        served: &Served,
        common: &Common,
        prompts: Vec<(Vec<u32>, String)>,
        request_id: String,
        warnings: &mut Warnings,
    ) -> Result<Job, ApiError> {
        let mut requests = Vec::with_capacity(prompts.len() * self.best_of);
        // What is best is judged by log-probabilities.
        let chooses = self.best_of > common.n;
        let logprobs = self.logprobs.or(chooses.then_some(0));
        let of_prompt = self.logprobs.filter(|_| self.echo);
        for (tokens, _) in &prompts {
            let most = room_for("prompt", tokens.len(), self.max_tokens, served, warnings)?;
            let request = |i| {
                let request = common.request(tokens.clone(), most, i, logprobs);
                let prompt_logprobs = request.prompt_logprobs.max(of_prompt);
                infernum_runtime::Request { prompt_logprobs, ..request }
            };
            requests.extend((0..self.best_of).map(request));
        }
        Ok(Job {
            requests,
            per_prompt: self.best_of,
            text: common.text.clone(),
            tell_prompts: common.prompt_logprobs.is_some(),
            echo: self.echo.then(|| prompts.into_iter().map(|(_, text)| text).collect()),
            request_id,
        })
    }
}

/// Tokens of the prompts, and their texts where they are to be echoed.
fn encode_prompts(
    served: &Served,
    prompt: Prompt,
    plan: Plan,
) -> Result<Vec<(Vec<u32>, String)>, ApiError> {
    let decoded = |tokens: Vec<u32>| {
        let decode = || served.frontend.tokenizer().decode(&tokens, true);
        let text = if plan.echo { decode() } else { Ok(String::new()) };
        let text = text.map_err(|e| encode_error("prompt", &e))?;
        Ok((tokens, text))
    };
    let encode = |text: String| {
        let mut tokens = encode(served, "prompt", &text, plan.special, plan.readable)?;
        if tokens.is_empty() {
            // Nothing to continue: a text of its own.
            tokens.extend(served.frontend.tokenizer().bos_id());
        }
        // What is echoed is what was taken.
        if take_last(&mut tokens, plan.taken) { decoded(tokens) } else { Ok((tokens, text)) }
    };
    let decode = |tokens: Vec<TokenId>| {
        let mut tokens: Vec<u32> = tokens.into_iter().map(|t| t.0).collect();
        take_last(&mut tokens, plan.taken);
        // Before its text is made.
        room_for("prompt", tokens.len(), Some(0), served, &mut Warnings::default())?;
        decoded(tokens)
    };
    let prompts: Result<Vec<_>, ApiError> = match prompt {
        Prompt::Text(text) => encode(text).map(|p| vec![p]),
        Prompt::Tokens(tokens) => decode(tokens).map(|p| vec![p]),
        Prompt::Texts(texts) => texts.into_iter().map(encode).collect(),
        Prompt::TokenLists(lists) => lists.into_iter().map(decode).collect(),
    };
    let prompts = prompts?;
    if prompts.is_empty() || prompts.iter().any(|(tokens, _)| tokens.is_empty()) {
        return Err(ApiError::value("prompt", "prompt: expected at least one token"));
    }
    Ok(prompts)
}

async fn answer(
    app: &App,
    client: Client,
    served: &Served,
    plan: Plan,
    mut generation: Generation,
) -> Result<Response, ApiError> {
    let head = Head::new("cmpl-", served);
    let tells = Tells {
        spelling: Spelling::new(served.frontend.tokenizer()),
        tokens: plan.logprobs,
        prompts: plan.prompt_logprobs,
    };
    if plan.stream {
        let streamed = Streamed { head, tells, usage: plan.include_usage };
        return Ok(sse::stream(generation, streamed));
    }
    let wholes = best(generation.collect().await?, plan.best_of, plan.n);
    let usage = generation.used().into();
    let size = wholes.iter().map(Whole::size).sum();
    app.lanes.run(client, size, move || Ok(whole_answer(head, &tells, wholes, usage))).await
}

fn whole_answer(head: Head, tells: &Tells, wholes: Vec<Whole>, usage: Usage) -> Response {
    let choice = |(index, whole): (usize, Whole)| CompletionChoice {
        text: whole.text,
        index,
        logprobs: tells.of_tokens(&whole.logprobs),
        finish_reason: Some(whole.finish.name()),
        prompt_logprobs: tells.of_prompt(whole.prompt.as_deref()),
    };
    let choices = wholes.into_iter().enumerate().map(choice).collect();
    let Head { id, created, model } = head;
    let body = Completion { id, object: "text_completion", created, model, choices, usage };
    json(StatusCode::OK, &body)
}

/// The `n` likeliest of each prompt's `of` choices, the likeliest first; all in order where no
/// choice is to be made.
fn best(wholes: Vec<Whole>, of: usize, n: usize) -> Vec<Whole> {
    if of == n {
        return wholes;
    }
    let mut wholes = wholes.into_iter();
    let mut best = Vec::new();
    loop {
        let mut group: Vec<Whole> = wholes.by_ref().take(of).collect();
        if group.is_empty() {
            return best;
        }
        group.sort_by(|a, b| b.mean.total_cmp(&a.mean));
        best.extend(group.into_iter().take(n));
    }
}

/// Which log-probabilities are told, with how many of the likeliest.
struct Tells {
    spelling: Spelling,
    tokens: Option<usize>,
    prompts: Option<usize>,
}

impl Tells {
    fn of_tokens(&self, logprobs: &[TokenLogprob]) -> Option<CompletionLogprobs> {
        let most = self.tokens?;
        let shown = |token| Spelling::shown(&self.spelling.bytes(token));
        let mut told = CompletionLogprobs::default();
        for l in logprobs {
            told.tokens.push(shown(l.token));
            told.token_logprobs.push(l.logprob.map(finite));
            let top = l.top.iter().take(most);
            let top = || top.map(|(token, logprob)| (shown(*token), finite(*logprob))).collect();
            told.top_logprobs.push(l.logprob.map(|_| top()));
            told.text_offset.push(l.offset);
        }
        Some(told)
    }

    fn of_prompt(&self, logprobs: Option<&[TokenLogprob]>) -> Option<PromptLogprobs> {
        let (most, logprobs) = self.prompts.zip(logprobs)?;
        Some(prompt_logprobs(&self.spelling, most, logprobs))
    }
}

/// The answer as a stream.
struct Streamed {
    head: Head,
    tells: Tells,
    usage: bool,
}

impl Streamed {
    fn send(&self, frames: &mut Frames, choices: &[CompletionChoice], usage: Option<Usage>) {
        frames.push(&Chunk {
            id: &self.head.id,
            object: "text_completion",
            created: self.head.created,
            model: &self.head.model,
            choices,
            usage: ChunkUsage::of(self.usage, usage),
            prompt_logprobs: None,
        });
    }
}

impl StreamFormat for Streamed {
    fn piece(&mut self, frames: &mut Frames, piece: Piece) {
        let mut logprobs = self.tells.of_tokens(&piece.logprobs);
        let mut prompt_logprobs = self.tells.of_prompt(piece.prompt.as_deref());
        let index = piece.choice;
        let mut send = |text, logprobs, finish_reason| {
            let prompt_logprobs = prompt_logprobs.take();
            let choice = CompletionChoice { text, index, logprobs, finish_reason, prompt_logprobs };
            self.send(frames, &[choice], None);
        };
        if !piece.text.is_empty() || (piece.prompt.is_some() && piece.finish.is_none()) {
            send(piece.text, logprobs.take(), None);
        }
        if let Some(finish) = piece.finish {
            let rest = logprobs.filter(|l| !l.tokens.is_empty());
            send(String::new(), rest, Some(finish.name()));
        }
    }

    fn end(&mut self, frames: &mut Frames, used: Used) {
        if self.usage {
            self.send(frames, &[], Some(used.into()));
        }
        frames.done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::Finish;

    #[test]
    fn the_likeliest_are_given_back() {
        let whole = |text: &str, mean| Whole {
            prompt: None,
            text: text.to_owned(),
            logprobs: Vec::new(),
            finish: Finish::Stop,
            stop: None,
            mean,
        };
        let all = vec![
            whole("a", -2.0),
            whole("b", -1.0),
            whole("c", -3.0),
            whole("d", -0.5),
            whole("e", -9.0),
            whole("f", f64::NEG_INFINITY),
        ];
        let texts: Vec<String> = best(all, 3, 2).into_iter().map(|w| w.text).collect();
        assert_eq!(texts, ["b", "a", "d", "e"]);
    }
}
