//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. Engines read the files, and say whether clients may.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use infernum_link::{AdapterPath, AdapterRefused, Refusal, check_name};
use serde::Deserialize;
use utoipa::ToSchema;

use super::common::Asked;
use super::read::parse;
use super::warnings::Warnings;
use crate::app::App;
use crate::commands::Undone;
use crate::error::{ApiError, quoted};
use crate::model::Served;

/// An adapter to load.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LoadAdapter {
    /// What it is called from then on, in the place of a model.
    lora_name: String,
    /// Its folder as PEFT saves it: below the folder that --lora-root names, and relative to it unless it is absolute.
    lora_path: String,
    /// The model that it changes; may be left out where there is but one.
    model: Option<String>,
}

/// An adapter to unload.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct UnloadAdapter {
    /// What it was called.
    lora_name: String,
}

/// An adapter, and the model whose engines are asked.
struct Wanted<T> {
    served: Arc<Served>,
    adapter: T,
    warnings: Warnings,
}

/// Loads a low-rank adapter: while requests run, which wait for nothing but the copy of its weights.
#[utoipa::path(post, path = "/v1/load_lora_adapter", tag = "Operation",
    request_body(content = LoadAdapter, example = json!({"lora_name": "style", "lora_path": "style"})), responses(
    (status = 200, description = "It may be asked for", body = String, content_type = "text/plain"),
    (status = "4XX", description = "The request's fault, or the adapter's, or there is no room", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn load_lora_adapter(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, request).await?;
    let Wanted { served, adapter, warnings } = asked.prepare(&app, to_load).await?;
    let name = adapter.name.clone();
    // Whoever asks may go meanwhile: even then all engines get it, or none.
    let worker = served.worker.clone();
    let loaded = tokio::spawn(async move { worker.load_adapter(adapter).await }).await;
    loaded.unwrap_or(Err(Undone::Gone)).map_err(|why| undone(&served, why))?;
    Ok(warnings.tell(format!("Success: the adapter `{name}` is loaded.\n").into_response()))
}

/// Unloads an adapter: it takes no more requests, and those that it has run to their ends.
#[utoipa::path(post, path = "/v1/unload_lora_adapter", tag = "Operation",
    request_body(content = UnloadAdapter, example = json!({"lora_name": "style"})), responses(
    (status = 200, description = "It may be asked for no more", body = String, content_type = "text/plain"),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn unload_lora_adapter(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, request).await?;
    let Wanted { served, adapter: name, warnings } = asked.prepare(&app, to_unload).await?;
    served.worker.unload_adapter(&name).await.map_err(|why| undone(&served, why))?;
    let text = format!("Success: the adapter `{}` is unloaded.\n", quoted(&name));
    Ok(warnings.tell(text.into_response()))
}

fn to_load(app: &App, asked: &Asked) -> Result<Wanted<AdapterPath>, ApiError> {
    let (request, unknown) = parse::<LoadAdapter>(&asked.bytes)?;
    let LoadAdapter { lora_name: name, lora_path: path, model } = request;
    let adapter = AdapterPath { name, path };
    adapter.check().map_err(|error| refused(&error))?;
    let name = &adapter.name;
    let served = app.model_for_work(model.as_deref())?;
    // Engines know their own adapters alone.
    let others = app.adapter(name).is_some_and(|known| !known.is_of(&served.name));
    if others || app.entry(name).is_some() {
        return Err(refused(&AdapterRefused::Taken { name: name.clone() }));
    }
    Ok(Wanted { served, adapter, warnings: Warnings::new(&unknown, &[]) })
}

fn to_unload(app: &App, asked: &Asked) -> Result<Wanted<String>, ApiError> {
    let (request, unknown) = parse::<UnloadAdapter>(&asked.bytes)?;
    let name = request.lora_name;
    check_name(&name).map_err(|error| refused(&error))?;
    // One that is not known the first model's engines refuse: as such, or because clients may unload none.
    let first = || app.models().iter().find_map(|entry| entry.served().cloned());
    let served = app.adapter(&name).or_else(first);
    let served = served.map_or_else(|| app.model_for_work(None), Ok)?;
    Ok(Wanted { served, adapter: name, warnings: Warnings::new(&unknown, &[]) })
}

fn undone(served: &Served, why: Undone) -> ApiError {
    match why {
        Undone::Gone => served.gone(),
        Undone::Refused(refusal) => ApiError::from(&refusal),
    }
}

fn refused(error: &AdapterRefused) -> ApiError {
    ApiError::from(&Refusal::from(error))
}
