//! `/api/chat` and what else Ollama's clients ask for.

mod answer;
mod models;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::de::DeserializeOwned;

use super::blocks::collect;
use super::calls::Reader;
use super::common::{Asked, Prepared};
use super::conversation::Conversation;
use super::read::parse_parts;
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::generation::Generation;
use crate::model::Served;
use crate::sse;
use answer::{Kind, OllamaAnswer, Streamed};
use request::{OllamaChat, OllamaGenerate, Settings};

pub(crate) use models::{
    __path_list_tags, __path_ollama_version, __path_show_model, list_tags, ollama_version,
    show_model,
};

/// Answers a conversation; line by line as the answer comes, unless `stream` is false.
#[utoipa::path(
    post, path = "/api/chat", tag = "Ollama",
    request_body(content = request::OllamaChatRequest,
                 example = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "options": {"num_predict": 32}, "stream": false})),
    extensions(("x-python" = json!("ollama: chat"))),
    responses(
        (status = 200, description = "The answer, or its parts, a line each",
         content((OllamaAnswer = "application/json"), (String = "application/x-ndjson"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::OllamaError<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::OllamaError<'static>)),
    )
)]
pub(crate) async fn ollama_chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, |app, asked| prepare(app, asked, Kind::Chat, OllamaChat::conversation))
        .await
}

/// Continues a text, or answers it; line by line as the answer comes, unless `stream` is false.
#[utoipa::path(
    post, path = "/api/generate", tag = "Ollama",
    request_body(content = request::OllamaGenerateRequest,
                 example = json!({"prompt": "Once upon a time", "options": {"num_predict": 32}, "stream": false})),
    extensions(("x-python" = json!("ollama: generate"))),
    responses(
        (status = 200, description = "The answer, or its parts, a line each",
         content((OllamaAnswer = "application/json"), (String = "application/x-ndjson"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::OllamaError<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::OllamaError<'static>)),
    )
)]
pub(crate) async fn ollama_generate(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, |app, asked| {
        prepare(app, asked, Kind::Generate, OllamaGenerate::conversation)
    })
    .await
}

/// A model for new work, by a name as Ollama has them: what has no tag has `latest`.
fn model(app: &App, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
    app.model_for_work(name.map(|name| untagged(app, name)))
}

fn untagged<'a>(app: &App, name: &'a str) -> &'a str {
    let known = app.entry(name).is_some() || app.adapter(name).is_some();
    if known { name } else { name.strip_suffix(":latest").unwrap_or(name) }
}

/// How a request is to be answered.
struct Plan {
    kind: Kind,
    stream: bool,
    reader: Reader,
}

/// What a request comes to.
enum Wanted {
    /// A model that is to be loaded, as all are.
    Load(Arc<Served>, Kind),
    Text(Box<Prepared<Plan>>),
}

fn prepare<T: DeserializeOwned>(
    app: &App,
    asked: &Asked,
    kind: Kind,
    read: fn(T, &Settings, &Served) -> Result<Option<Conversation>, ApiError>,
) -> Result<Wanted, ApiError> {
    let parts = parse_parts::<T, Settings>(&asked.bytes)?;
    let settings = parts.common;
    let mut warnings = Warnings::new(&parts.unknown, parts.options.without_effect());
    let served = model(app, settings.model.as_deref())?;
    parts.options.check()?;
    let conversation = read(parts.own, &settings, &served)?;
    let Some(conversation) = conversation else { return Ok(Wanted::Load(served, kind)) };
    let stream = settings.stream.unwrap_or(true);
    let (common, options, most) = settings.read(&mut warnings)?;
    let common = common.check(&options, &served, asked.tenant)?;
    let conversation = Conversation { most, ..conversation };
    let (job, reader) = conversation.job(&served, common, &asked.request_id, &mut warnings)?;
    let plan = Plan { kind, stream, reader };
    Ok(Wanted::Text(Box::new(Prepared { served, job, plan, warnings })))
}

async fn answer(
    app: &Arc<App>,
    request: Request,
    work: fn(&App, &Asked) -> Result<Wanted, ApiError>,
) -> Result<Response, ApiError> {
    let asked = Asked::read(app, request).await?;
    let client = asked.client;
    let Prepared { served, job, plan, warnings } = match asked.prepare(app, work).await? {
        Wanted::Text(prepared) => *prepared,
        Wanted::Load(served, kind) => {
            return Ok(json(StatusCode::OK, &OllamaAnswer::loaded(&served.name, kind)));
        }
    };
    let generation = Generation::start(app, &served, job).await?;
    let Plan { kind, stream, reader } = plan;
    let response = if stream {
        sse::stream(generation, Streamed::new(served.name.clone(), kind, &reader))
    } else {
        let model = served.name.clone();
        let tell = move |answers: Vec<_>, used| {
            let whole = |answered| OllamaAnswer::whole(&model, kind, answered, used);
            json(StatusCode::OK, &answers.into_iter().next().map(whole))
        };
        collect(app, client, &served, reader, generation, tell).await?
    };
    Ok(warnings.tell(response))
}
