//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use infernum_link::{Refusal, Reread};
use infernum_runtime::{AdapterWeights, EngineError};
use serde::Deserialize;
use utoipa::ToSchema;

use super::common::Asked;
use super::read::parse;
use super::warnings::Warnings;
use crate::adapters::{Room, check_name, read, reread};
use crate::app::App;
use crate::error::{ApiError, quoted};
use crate::model::{Entry, Served};

/// An adapter to load.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LoadAdapter {
    /// What it is called from then on, in the place of a model.
    lora_name: String,
    /// Its folder as PEFT saves it: below the folder that --lora-root names, and relative to it unless it is absolute.
    lora_path: String,
}

/// An adapter to unload.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct UnloadAdapter {
    /// What it was called.
    lora_name: String,
}

/// An adapter that was read.
struct Prepared {
    name: String,
    served: Arc<Served>,
    room: Arc<Room>,
    weights: AdapterWeights,
    reread: Reread,
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
    let prepared = asked.prepare(&app, prepare).await?;
    let Prepared { name, served, room, weights, reread, warnings } = prepared;
    let loaded = room.engine.load_adapter(weights, reread).await;
    let loaded = loaded.map_err(|_| served.gone())?;
    let id = loaded.map_err(|error| match error {
        EngineError::NoAdapterSlot { .. } => {
            ApiError::malformed(error.to_string()).because("no_adapter_slot")
        }
        other => ApiError::from(&Refusal::from(&other)),
    })?;
    let entry = entry(&app, &served)?;
    if !entry.add_adapter(served.adapted(&name, id)) {
        room.engine.unload_adapter(id);
        return Err(taken(&name));
    }
    tracing::info!(adapter = name, of = served.name, "loaded");
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
    Asked::read(&app, request).await?.prepare(&app, unload).await
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared, ApiError> {
    let (request, unknown) = parse::<LoadAdapter>(&asked.bytes)?;
    let root = allowed(app)?;
    let LoadAdapter { lora_name: name, lora_path } = request;
    check_name(&name).map_err(|e| ApiError::value("lora_name", format!("lora_name: {e}")))?;
    if app.entry(&name).is_some() || app.model(Some(&name)).is_ok() {
        return Err(taken(&name));
    }
    let served = app.model_for_work(None)?;
    let folder = below(root, &lora_path)
        .ok_or_else(|| refused("expected a folder below the one that --lora-root names"))?;
    let elsewhere = || {
        let message = "the engine is in another process, where adapters cannot be loaded";
        ApiError::forbidden("adapters_not_allowed", message)
    };
    let room = served.room.clone().ok_or_else(elsewhere)?;
    served.check_awake()?;
    let weights = read(&room.banks, &folder).map_err(|e| refused(&e))?;
    let reread = reread(&name, &room.banks, &folder);
    Ok(Prepared { name, served, room, weights, reread, warnings: Warnings::new(&unknown, &[]) })
}

fn unload(app: &App, asked: &Asked) -> Result<Response, ApiError> {
    let (request, unknown) = parse::<UnloadAdapter>(&asked.bytes)?;
    allowed(app)?;
    let name = &request.lora_name;
    let removed = app.models().iter().find_map(|entry| entry.remove_adapter(name));
    let removed =
        removed.ok_or_else(|| ApiError::unknown_model(name, "no adapter of this name"))?;
    if let (Some((adapter, _)), Some(room)) = (&removed.adapter, &removed.room) {
        room.engine.unload_adapter(*adapter);
    }
    tracing::info!(adapter = name, "unloaded");
    let text = format!("Success: the adapter `{}` is unloaded.\n", quoted(name));
    Ok(Warnings::new(&unknown, &[]).tell(text.into_response()))
}

/// The folder that clients may load adapters from.
fn allowed(app: &App) -> Result<&Path, ApiError> {
    let refuse = || {
        let message = "clients may neither load nor unload adapters here: --lora-root names the folder from which they may";
        ApiError::forbidden("adapters_not_allowed", message)
    };
    app.lora_root.as_deref().ok_or_else(refuse)
}

/// A folder below `root`, whatever links there are; none where it is elsewhere, or not there.
fn below(root: &Path, path: &str) -> Option<PathBuf> {
    let full = root.join(path).canonicalize().ok()?;
    (full.starts_with(root) && full.is_dir()).then_some(full)
}

fn entry(app: &App, served: &Served) -> Result<Arc<Entry>, ApiError> {
    app.entry(&served.name).ok_or_else(|| ApiError::unknown_model(&served.name, "others"))
}

fn refused(message: &str) -> ApiError {
    ApiError::value("lora_path", format!("lora_path: {message}"))
}

fn taken(name: &str) -> ApiError {
    let name = quoted(name);
    ApiError::value(
        "lora_name",
        format!("lora_name: expected one that is free, and `{name}` is taken"),
    )
}
