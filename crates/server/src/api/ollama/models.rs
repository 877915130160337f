//! Models as Ollama lists them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum_frontend_hf::chat::ChatTemplate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::untagged;
use crate::api::common::Asked;
use crate::api::read::parse;
use crate::api::system::Version;
use crate::api::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::model::{Entry, Served};

/// All models.
#[derive(Serialize, ToSchema)]
pub(crate) struct Tags {
    models: Vec<Tag>,
}

/// A model.
#[derive(Serialize, ToSchema)]
struct Tag {
    name: String,
    model: String,
    /// When the server began to load it.
    modified_at: String,
    /// Bytes of its weights.
    size: u64,
    /// Always empty: models are not looked through.
    digest: &'static str,
    details: ModelDetails,
}

/// What kind of model it is.
#[derive(Serialize, ToSchema)]
struct ModelDetails {
    parent_model: &'static str,
    /// `safetensors` or `gguf`
    format: String,
    family: String,
    families: Vec<String>,
    /// Always empty.
    parameter_size: &'static str,
    /// Always empty.
    quantization_level: &'static str,
}

impl ModelDetails {
    fn of(served: &Served) -> ModelDetails {
        let about = &served.about;
        ModelDetails {
            parent_model: "",
            format: about.format.clone(),
            family: about.family.clone(),
            families: vec![about.family.clone()],
            parameter_size: "",
            quantization_level: "",
        }
    }
}

fn modified(entry: &Entry) -> String {
    let at = i64::try_from(entry.created).ok();
    let at = at.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.unwrap_or_default().to_string()
}

/// The models that there are.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", extensions(("x-python" = json!("ollama: list"))), responses(
    (status = 200, description = "The models", body = Tags),
    (status = 503, description = "They are loading", body = inline(crate::error::OllamaError<'static>)),
))]
pub(crate) async fn list_tags(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let tag = |entry: &Entry| {
        let served = &app.model(Some(&entry.name))?;
        Ok(Tag {
            name: entry.name.clone(),
            model: entry.name.clone(),
            modified_at: modified(entry),
            size: served.about.bytes,
            digest: "",
            details: ModelDetails::of(served),
        })
    };
    let models = app.models().iter().map(|entry| tag(entry)).collect::<Result<_, ApiError>>()?;
    Ok(json(StatusCode::OK, &Tags { models }))
}

/// Which model is asked about.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ShowRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "all is told in either case")]
    verbose: Option<bool>,
}

/// About a model.
#[derive(Serialize, ToSchema)]
pub(crate) struct Shown {
    modelfile: &'static str,
    parameters: &'static str,
    /// The chat template, as the model has it.
    template: String,
    details: ModelDetails,
    /// Its family, and the longest sequence.
    #[schema(value_type = Object)]
    model_info: Map<String, Value>,
    /// Of `completion`, `tools` and `thinking`.
    capabilities: Vec<&'static str>,
    modified_at: String,
}

/// Tells about a model.
#[utoipa::path(post, path = "/api/show", tag = "Ollama", request_body(content = ShowRequest, example = json!({})), extensions(("x-python" = json!("ollama: show"))), responses(
    (status = 200, description = "About the model", body = Shown),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::OllamaError<'static>)),
    (status = 503, description = "It is loading", body = inline(crate::error::OllamaError<'static>)),
))]
pub(crate) async fn show_model(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    Asked::read(&app, request).await?.prepare(&app, show).await
}

fn show(app: &App, asked: &Asked) -> Result<Response, ApiError> {
    let (request, unknown) = parse::<ShowRequest>(&asked.bytes)?;
    let name = request.model.as_deref().map(|name| untagged(app, name));
    let served = &app.model(name)?;
    let entry = app.entry(&served.name);
    let frontend = &served.frontend;
    let dialect = frontend.dialect();
    let calls = dialect.is_some_and(|d| d.calls.is_some() || d.channels.is_some());
    let thinks = dialect.is_some_and(|d| d.reasoning.is_some() || d.channels.is_some());
    let can = [("completion", true), ("tools", calls), ("thinking", thinks)];
    let family = &served.about.family;
    let info = [
        ("general.architecture".to_owned(), family.as_str().into()),
        (format!("{family}.context_length"), served.max_length.into()),
        (format!("{family}.vocab_size"), served.vocab.into()),
    ];
    let shown = Shown {
        modelfile: "",
        parameters: "",
        template: frontend.template().map(ChatTemplate::text).unwrap_or_default().to_owned(),
        details: ModelDetails::of(served),
        model_info: Map::from_iter(info),
        capabilities: can.into_iter().filter(|(_, can)| *can).map(|(name, _)| name).collect(),
        modified_at: entry.map(|entry| modified(&entry)).unwrap_or_default(),
    };
    Ok(Warnings::new(&unknown, &[]).tell(json(StatusCode::OK, &shown)))
}

/// The server's version.
#[utoipa::path(get, path = "/api/version", tag = "Ollama", responses(
    (status = 200, description = "The version", body = Version),
))]
pub(crate) async fn ollama_version() -> Response {
    crate::api::system::version().await
}
