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
use crate::model::Served;

/// Which server this is.
#[derive(Serialize, ToSchema)]
pub(crate) struct Version {
    version: &'static str,
}

/// Whether all models are ready and well.
#[utoipa::path(get, path = "/health", tag = "Operation", security(()), responses(
    (status = 200, description = "All models are ready"),
    (status = 503, description = "Loading, asleep, sick, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    for entry in app.models().iter() {
        check(&*app.model_for_work(Some(&entry.name))?)?;
    }
    Ok(StatusCode::OK)
}

/// As /health, by the name that Kubernetes' components have for it.
#[utoipa::path(get, path = "/readyz", tag = "Operation", security(()), responses(
    (status = 200, description = "All models are ready"),
    (status = 503, description = "Loading, asleep, sick, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn readyz(app: State<Arc<App>>) -> Result<StatusCode, ApiError> {
    health(app).await
}

/// Whether the server is better left running: also while models load, and while it shuts down.
#[utoipa::path(get, path = "/livez", tag = "Operation", security(()), responses(
    (status = 200, description = "Nothing is wrong that a new start would mend"),
    (status = 503, description = "An engine fails", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn livez(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    let models = app.models();
    let mut all = models.iter().filter_map(|entry| entry.served());
    match all.find(|served| served.worker.failing()) {
        None => Ok(StatusCode::OK),
        Some(served) => check(served).map(|()| StatusCode::OK),
    }
}

fn check(served: &Served) -> Result<(), ApiError> {
    if served.worker.healthy() {
        return served.check_awake();
    }
    if served.worker.engines() == 0 {
        return Err(ApiError::engine_gone());
    }
    let message = format!("the engine of `{}` fails; the log says why", served.name);
    Err(ApiError::unavailable("engine_failing", message, 30))
}

/// Have no request find what was computed for those before it: prefixes of prompts are computed anew, of all models.
#[utoipa::path(post, path = "/reset_prefix_cache", tag = "Operation", responses(
    (status = 200, description = "Requests from now on find nothing of those before"),
    (status = 503, description = "A model is loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn reset_prefix_cache(
    State(app): State<Arc<App>>,
) -> Result<StatusCode, ApiError> {
    for entry in app.models().iter() {
        app.model(Some(&entry.name))?.worker.forget_prefixes();
    }
    tracing::info!("prefixes are computed anew");
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
        for served in shared.models().iter().filter_map(|m| m.served()) {
            let worker = &served.worker;
            served.metrics.set(&worker.stats(), worker.queued());
            served.metrics.engines(worker.engines(), worker.malformed());
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
