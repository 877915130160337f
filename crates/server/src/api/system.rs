//! What operators and their tools ask for.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, json};
use crate::lanes::Client;

/// Which server this is.
#[derive(Serialize, ToSchema)]
pub(crate) struct Version {
    version: &'static str,
}

/// Whether all models are ready and well.
#[utoipa::path(get, path = "/health", tag = "Operation", security(()), responses(
    (status = 200, description = "All models are ready"),
    (status = 503, description = "Loading, sick, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    for entry in &app.models {
        let served = app.model_for_work(Some(&entry.name))?;
        if !served.worker.status.healthy() {
            let message = format!("the engine of `{}` fails; the log says why", entry.name);
            return Err(ApiError::unavailable("engine_failing", message, 30));
        }
    }
    Ok(StatusCode::OK)
}

/// The server's version.
#[utoipa::path(get, path = "/version", tag = "Operation", responses(
    (status = 200, description = "The version", body = Version),
))]
pub(crate) async fn version() -> Response {
    json(StatusCode::OK, &Version { version: env!("CARGO_PKG_VERSION") })
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "Operation", responses(
    (status = 200, description = "The metrics", body = String, content_type = "text/plain"),
))]
pub(crate) async fn metrics(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let shared = app.clone();
    let render = move || {
        for served in shared.models.iter().filter_map(|m| m.served()) {
            let status = &served.worker.status;
            served.metrics.set(&status.stats(), status.queued());
        }
        Ok(shared.metrics.render())
    };
    // Its size is that of a small body, and whoever asks again and again has one share.
    let text = app.lanes.run(Client::of(request.extensions()), 0, render).await?;
    let mut response = text.into_response();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}
