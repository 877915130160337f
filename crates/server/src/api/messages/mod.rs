//! `/v1/messages`, as Anthropic has it.

mod answer;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::blocks::collect;
use super::common::{Asked, Begun, Head, Prepared, begin};
use super::read::parse_own;
use super::tokens::most_tokens;
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::sse;
use answer::{AnsweredMessage, Streamed};
use request::{CountRequest, MessagesRequest, Plan};

/// Answers a conversation.
#[utoipa::path(
    post, path = "/v1/messages", tag = "Anthropic",
    request_body(content = request::MessagesBody, example = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 32})),
    extensions(("x-python" = json!("anthropic: messages.create"))),
    responses(
        (status = 200, description = "The answer; with `stream` as server-sent events",
         content((AnsweredMessage = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::AnthropicError<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::AnthropicError<'static>)),
    )
)]
pub(crate) async fn create_message(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Begun { client, served, plan, warnings, generation } =
        begin(&app, request, prepare).await?;
    let head = Head::new("msg_", &served);
    let response = if plan.stream {
        let tokenizer = served.frontend.tokenizer().clone();
        sse::stream(generation, Streamed::new(head, &plan.reader, tokenizer))
    } else {
        let tell = move |answers: Vec<_>, used| {
            let message =
                answers.into_iter().next().map(|a| AnsweredMessage::whole(&head, a, used));
            json(StatusCode::OK, &message)
        };
        collect(&app, client, &served, plan.reader, generation, tell).await?
    };
    Ok(warnings.tell(response))
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared<Plan>, ApiError> {
    let (request, options, unknown) = parse_own::<MessagesRequest>(&asked.bytes)?;
    let mut warnings = Warnings::new(&unknown, options.without_effect());
    let served = app.model_for_work(request.model())?;
    options.check()?;
    let (common, conversation) = request.read(&served, &mut warnings)?;
    let common = common.check(&options, &served, asked.tenant)?;
    let stream = common.stream;
    let (job, reader) = conversation.job(&served, common, &asked.request_id, &mut warnings)?;
    Ok(Prepared { served, job, plan: Plan { stream, reader }, warnings })
}

/// How many tokens there are.
#[derive(Serialize, ToSchema)]
pub(crate) struct TokensCount {
    input_tokens: usize,
}

/// Counts the tokens of a conversation.
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "Anthropic",
    request_body(content = CountRequest, example = json!({"messages": [{"role": "user", "content": "Once upon a time"}]})),
    extensions(("x-python" = json!("anthropic: messages.count_tokens"))),
    responses(
        (status = 200, description = "How many there are", body = TokensCount),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::AnthropicError<'static>)),
        (status = 503, description = "Loading", body = inline(crate::error::AnthropicError<'static>)),
    )
)]
pub(crate) async fn count_message_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    Asked::read(&app, request).await?.prepare(&app, count).await
}

fn count(app: &App, asked: &Asked) -> Result<Response, ApiError> {
    let (request, options, unknown) = parse_own::<CountRequest>(&asked.bytes)?;
    let mut warnings = Warnings::new(&unknown, options.without_effect());
    let served = &app.model(request.model.as_deref())?;
    options.check()?;
    let conversation = request.conversation(served, &mut warnings)?;
    let input_tokens = conversation.prompt(served, most_tokens(served))?.len();
    Ok(warnings.tell(json(StatusCode::OK, &TokensCount { input_tokens })))
}
