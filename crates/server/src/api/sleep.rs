//! `/sleep`, `/wake_up` and `/is_sleeping`, as vLLM has them: the memory of models that nobody asks, for others.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum_link::{Depth, Sleep};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::commands::Undone;
use crate::error::{ApiError, json, quoted};
use crate::model::Served;

/// How to sleep.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SleepQuery {
    /// What is kept: 1, the default, what makes waking fast, with the weights in the system's cache of files; 2, nothing.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 2)]
    level: Option<String>,
    /// What becomes of requests that run: `wait`, the default, until they have ended, or `abort`.
    mode: Option<String>,
    /// The model; all of them when left out.
    model: Option<String>,
}

/// What to wake.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct WakeQuery {
    /// The model; all of them when left out.
    model: Option<String>,
    /// vLLM wakes weights and cache one after the other by these; here they wake together.
    tags: Option<String>,
}

/// Which model is asked about.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ModelQuery {
    /// The model; any of them when left out.
    model: Option<String>,
}

/// Whether a model sleeps.
#[derive(Serialize, ToSchema)]
pub(crate) struct Sleeping {
    is_sleeping: bool,
}

type Asked<T> = Result<Query<T>, QueryRejection>;

/// Has models give back the memory of their engines: weights, cache and all. They take no requests until they are woken.
#[utoipa::path(post, path = "/sleep", tag = "Operation", params(SleepQuery), responses(
    (status = 200, description = "They sleep"),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "A model is loading, or was woken meanwhile", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn sleep(
    State(app): State<Arc<App>>,
    query: Asked<SleepQuery>,
) -> Result<StatusCode, ApiError> {
    let SleepQuery { level, mode, model } = read(query)?;
    let depth = match level.as_deref() {
        None | Some("1") => Depth::Light,
        Some("2") => Depth::Deep,
        Some(other) => return Err(wrong("level", "1 or 2", other)),
    };
    let abort = match mode.as_deref() {
        None | Some("wait") => false,
        Some("abort") => true,
        Some(other) => return Err(wrong("mode", "`wait` or `abort`", other)),
    };
    for served in asked(&app, model.as_deref())? {
        let slept = served.worker.sleep(Sleep { depth, abort }).await;
        slept.map_err(|why| undone(&served, why, "sleep_ended"))?;
    }
    Ok(StatusCode::OK)
}

/// Has models take requests again: their engines are made as they were, with empty caches.
#[utoipa::path(post, path = "/wake_up", tag = "Operation", params(WakeQuery), responses(
    (status = 200, description = "They are awake"),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "A model is loading, or cannot be woken now", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn wake_up(
    State(app): State<Arc<App>>,
    query: Asked<WakeQuery>,
) -> Result<StatusCode, ApiError> {
    let WakeQuery { model, tags } = read(query)?;
    if tags.is_some() {
        let message = "tags: expected none: weights and cache wake together";
        return Err(ApiError::unsupported("tags", message));
    }
    for served in asked(&app, model.as_deref())? {
        let woken = served.worker.wake().await;
        woken.map_err(|why| undone(&served, why, "wake_failed"))?;
    }
    Ok(StatusCode::OK)
}

/// The same as `/wake_up`.
#[utoipa::path(post, path = "/wake", tag = "Operation", params(WakeQuery), responses(
    (status = 200, description = "They are awake"),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "A model is loading, or cannot be woken now", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn wake(
    app: State<Arc<App>>,
    query: Asked<WakeQuery>,
) -> Result<StatusCode, ApiError> {
    wake_up(app, query).await
}

/// Whether a model sleeps, or is about to.
#[utoipa::path(get, path = "/is_sleeping", tag = "Operation", params(ModelQuery), responses(
    (status = 200, description = "Whether it does", body = Sleeping),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "A model is loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn is_sleeping(
    State(app): State<Arc<App>>,
    query: Asked<ModelQuery>,
) -> Result<Response, ApiError> {
    let models = asked(&app, read(query)?.model.as_deref())?;
    let is_sleeping = models.iter().any(|served| served.worker.asleep());
    Ok(json(StatusCode::OK, &Sleeping { is_sleeping }))
}

fn read<T>(query: Asked<T>) -> Result<T, ApiError> {
    query.map(|Query(query)| query).map_err(|error| ApiError::malformed(error.body_text()))
}

/// The model of this name, or all.
fn asked(app: &App, name: Option<&str>) -> Result<Vec<Arc<Served>>, ApiError> {
    match name {
        Some(_) => Ok(vec![app.model_for_work(name)?]),
        None => app.models().iter().map(|entry| app.model_for_work(Some(&entry.name))).collect(),
    }
}

fn wrong(param: &str, expected: &str, found: &str) -> ApiError {
    ApiError::value(param, format!("{param}: expected {expected}, found `{}`", quoted(found)))
}

fn undone(served: &Served, why: Undone, code: &'static str) -> ApiError {
    match why {
        Undone::Gone => ApiError::engine_gone(),
        Undone::Refused(why) => {
            let message = format!("the model `{}`: {}", served.name, why.message);
            ApiError::unavailable(code, message, 30)
        }
    }
}
