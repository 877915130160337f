//! `/v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, json};
use crate::model::Entry;

/// A model.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelInfo {
    id: String,
    /// `model`
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// The longest sequence, prompt and output together, in tokens.
    max_model_len: usize,
}

/// All of them.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`
    object: &'static str,
    data: Vec<ModelInfo>,
}

fn info(app: &App, entry: &Entry) -> Result<ModelInfo, ApiError> {
    let served = app.model(Some(&entry.name))?;
    Ok(ModelInfo {
        id: entry.name.clone(),
        object: "model",
        created: entry.created,
        owned_by: "infernum",
        max_model_len: served.max_length,
    })
}

/// The models that there are.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses(
    (status = 200, description = "The models", body = ModelList),
    (status = 503, description = "They are loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn list_models(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let data: Result<Vec<_>, _> = app.models.iter().map(|entry| info(&app, entry)).collect();
    Ok(json(StatusCode::OK, &ModelList { object: "list", data: data? }))
}

/// One model.
#[utoipa::path(get, path = "/v1/models/{*model}", tag = "OpenAI",
    params(("model" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "The model", body = ModelInfo),
        (status = 404, description = "There is none of this name", body = inline(crate::error::ErrorResponse<'static>)),
        (status = 503, description = "It is loading", body = inline(crate::error::ErrorResponse<'static>)),
    ))]
pub(crate) async fn retrieve_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    app.model(Some(&name))?;
    let entry = app.models.iter().find(|m| m.name == name);
    let entry = entry.ok_or_else(|| ApiError::unknown_model(&name, "others"))?;
    Ok(json(StatusCode::OK, &info(&app, entry)?))
}
