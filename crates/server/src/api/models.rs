//! `/v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, json};
use crate::model::{Entry, Served};

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
    /// Of an adapter: the model that it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
}

/// All of them.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`
    object: &'static str,
    data: Vec<ModelInfo>,
}

fn info(entry: &Entry, served: &Served) -> ModelInfo {
    ModelInfo {
        id: served.name.clone(),
        object: "model",
        created: entry.created,
        owned_by: "infernum",
        max_model_len: served.max_length,
        parent: served.parent.clone(),
    }
}

/// A model, and behind it its adapters.
fn family(app: &App, entry: &Entry) -> Result<Vec<ModelInfo>, ApiError> {
    let served = std::iter::once(app.model(Some(&entry.name))?).chain(app.adapters(entry));
    Ok(served.map(|served| info(entry, &served)).collect())
}

/// The models that there are.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", extensions(("x-python" = json!("openai: models.list"))), responses(
    (status = 200, description = "The models", body = ModelList),
    (status = 503, description = "They are loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn list_models(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let data: Result<Vec<_>, _> = app.models().iter().map(|entry| family(&app, entry)).collect();
    let data = data?.into_iter().flatten().collect();
    Ok(json(StatusCode::OK, &ModelList { object: "list", data }))
}

/// One model.
#[utoipa::path(get, path = "/v1/models/{*model}", tag = "OpenAI",
    extensions(("x-python" = json!("openai: models.retrieve"))),
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
    let served = app.model(Some(&name))?;
    let model = served.parent.as_ref().unwrap_or(&served.name);
    let entry = app.entry(model).ok_or_else(|| ApiError::unknown_model(&name, "others"))?;
    Ok(json(StatusCode::OK, &info(&entry, &served)))
}
