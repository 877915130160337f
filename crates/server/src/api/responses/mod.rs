//! `/v1/responses`.

mod answer;
mod item;
mod request;
pub(crate) mod store;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::blocks::collect;
use super::calls::Reader;
use super::common::{Asked, Head, Prepared};
use super::options::Options;
use super::read::{Unknown, parse_own};
use super::warnings::Warnings;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::{self, ApiError, json_text};
use crate::generation::Generation;
use crate::model::Served;
use crate::sse;
use answer::{Keeper, ResponseObject, Streamed};
use request::ResponsesRequest;
use store::Stored;

/// Answers what is said.
#[utoipa::path(
    post, path = "/v1/responses", tag = "OpenAI",
    request_body(content = request::ResponsesBody, example = json!({"input": "Once upon a time", "max_output_tokens": 32})),
    extensions(("x-python" = json!("openai: responses.create"))),
    responses(
        (status = 200, description = "The answer; with `stream` as server-sent events",
         content((ResponseObject = "application/json"), (String = "text/event-stream"))),
        (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
        (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
    )
)]
pub(crate) async fn create_response(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, request).await?;
    let (client, bytes) = (asked.client, asked.bytes.len());
    let shared = app.clone();
    let parsed = app.lanes.run(client, bytes, move || Parsed::read(&shared, asked)).await?;
    // What went before is work, too, though it is no part of the body.
    let size = bytes + parsed.earlier.as_ref().map_or(0, |stored| stored.history.len());
    let shared = app.clone();
    let prepared = app.lanes.run(client, size, move || parsed.prepare(&shared)).await?;
    let Prepared { served, job, plan, warnings } = prepared;
    let generation = Generation::start(&app, &served, job).await?;
    let Plan { stream, reader, response, tenant, history } = plan;
    let keeper = Keeper { app: app.clone(), tenant, asked: bytes, history };
    let response = if stream {
        let tokenizer = served.frontend.tokenizer().clone();
        sse::stream(generation, Streamed::new(response, &reader, tokenizer, keeper))
    } else {
        let tell = move |answers: Vec<_>, used| {
            let whole = |a: &_| answer::whole(response, a, used, keeper);
            error::json(StatusCode::OK, &answers.first().map(whole))
        };
        collect(&app, client, &served, reader, generation, tell).await?
    };
    Ok(warnings.tell(response))
}

/// A request that was read.
struct Parsed {
    asked: Asked,
    request: ResponsesRequest,
    options: Options,
    unknown: Unknown,
    /// The response from which it goes on.
    earlier: Option<Stored>,
}

/// How it is to be answered.
struct Plan {
    stream: bool,
    reader: Reader,
    response: ResponseObject,
    tenant: Tenant,
    /// What came before the answer, as JSON: a list that is not ended.
    history: Vec<u8>,
}

impl Parsed {
    fn read(app: &App, mut asked: Asked) -> Result<Parsed, ApiError> {
        let (request, options, unknown) = parse_own::<ResponsesRequest>(&asked.bytes)?;
        let earlier = request.previous_response_id.as_deref().map(|id| {
            let unknown = || ApiError::unknown_response(id, Some("previous_response_id"));
            app.responses.get(asked.tenant, id).ok_or_else(unknown)
        });
        let earlier = earlier.transpose()?;
        asked.hold(app, earlier.as_ref().map_or(0, |stored| stored.history.len()))?;
        Ok(Parsed { asked, request, options, unknown, earlier })
    }

    fn prepare(self, app: &App) -> Result<Prepared<Plan>, ApiError> {
        let Parsed { asked, request, options, unknown, earlier } = self;
        let mut warnings = Warnings::new(&unknown, options.without_effect());
        let served = app.model_for_work(request.model.as_deref())?;
        options.check()?;
        let common = request.common()?.check(&options, &served, asked.tenant)?;
        let earlier = earlier.map_or(Ok(Vec::new()), |stored| {
            serde_json::from_slice(&stored.history).map_err(|e| ApiError::internal(e.to_string()))
        })?;
        let history = request.history(earlier)?;
        let conversation = request.conversation(&history, &served)?;
        let (job, reader) = conversation.job(&served, common, &asked.request_id, &mut warnings)?;
        let sampling = job.requests.first().map(|request| request.sampling).unwrap_or_default();
        let stream = request.stream.unwrap_or(false);
        let response = begun(request, &served, (sampling.temperature, sampling.top_p));
        let mut history = serde_json::to_vec(&history).unwrap_or_default(); // a list of objects
        history.pop();
        let plan = Plan { stream, reader, response, tenant: asked.tenant, history };
        Ok(Prepared { served, job, plan, warnings })
    }
}

/// The response before anything was said.
fn begun(
    request: ResponsesRequest,
    served: &Served,
    (temperature, top_p): (f32, f32),
) -> ResponseObject {
    let Head { id, created, model } = Head::new("resp_", served);
    let format = request.format().map_or(json!({"type": "text"}), |format| json!(format));
    let choice = request.tool_choice.as_ref().map_or(json!("auto"), |choice| json!(choice));
    ResponseObject {
        id,
        object: "response",
        created_at: created,
        status: "in_progress",
        model,
        output: Vec::new(),
        error: None,
        incomplete_details: None,
        usage: None,
        store: request.store.unwrap_or(true),
        background: false,
        max_output_tokens: request.max_output_tokens,
        temperature,
        top_p,
        text: json!({"format": format}),
        reasoning: json!(request.reasoning.clone().unwrap_or_default()),
        tool_choice: choice,
        tools: request.tools.unwrap_or_default(),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        truncation: "disabled",
        metadata: request.metadata.unwrap_or_default(),
        instructions: request.instructions,
        previous_response_id: request.previous_response_id,
    }
}

/// A response that is kept.
#[utoipa::path(get, path = "/v1/responses/{id}", tag = "OpenAI",
    extensions(("x-python" = json!("openai: responses.retrieve"))),
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 200, description = "The response", body = ResponseObject),
        (status = 404, description = "It is not, or no longer, kept", body = inline(crate::error::ErrorResponse<'static>)),
    ))]
pub(crate) async fn retrieve_response(
    State(app): State<Arc<App>>,
    tenant: Option<Extension<Tenant>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = app.responses.get(whose(tenant), &id);
    let stored = stored.ok_or_else(|| ApiError::unknown_response(&id, None))?;
    Ok(json_text(StatusCode::OK, stored.response))
}

/// A response that is kept no longer.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeletedResponse {
    id: String,
    /// `response`
    object: &'static str,
    deleted: bool,
}

/// Forgets a response.
#[utoipa::path(delete, path = "/v1/responses/{id}", tag = "OpenAI",
    extensions(("x-python" = json!("openai: responses.delete"))),
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 200, description = "It is forgotten", body = DeletedResponse),
        (status = 404, description = "It is not, or no longer, kept", body = inline(crate::error::ErrorResponse<'static>)),
    ))]
pub(crate) async fn delete_response(
    State(app): State<Arc<App>>,
    tenant: Option<Extension<Tenant>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !app.responses.remove(whose(tenant), &id) {
        return Err(ApiError::unknown_response(&id, None));
    }
    let deleted = DeletedResponse { id, object: "response", deleted: true };
    Ok(error::json(StatusCode::OK, &deleted))
}

fn whose(tenant: Option<Extension<Tenant>>) -> Tenant {
    tenant.map(|Extension(tenant)| tenant).unwrap_or_default()
}
