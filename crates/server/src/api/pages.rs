//! Pages for people, and the API's description.

use std::path::Path;
use std::sync::{Arc, LazyLock, PoisonError};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{Html, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::app::App;
use crate::error::json_text;
use crate::model::Entry;
use crate::routes;

/// The files that pages are made of, by name.
macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../pages/", $name)))),+]
    };
}

const FILES: &[(&str, &str)] = files![
    "base.css",
    "chat.css",
    "chat.js",
    "chats.js",
    "docs.css",
    "docs.js",
    "dom.js",
    "markdown.js",
    "server.js",
];

static CHAT: LazyLock<String> = LazyLock::new(|| page(include_str!("../pages/chat.html")));
static DOCS: LazyLock<String> = LazyLock::new(|| page(include_str!("../pages/docs.html")));

/// A page that needs nothing else: `{{FILE}}` is that file, `{{hashes}}` are those of its scripts, which are the only
/// ones that its policy lets run.
fn page(html: &str) -> String {
    let (mut page, mut hashes) = (html.to_owned(), Vec::new());
    for (name, text) in FILES {
        let place = format!("{{{{{name}}}}}");
        let is_script = Path::new(name).extension().is_some_and(|e| e == "js");
        if is_script && page.contains(&place) {
            hashes.push(format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text))));
        }
        page = page.replace(&place, text);
    }
    page.replace("{{hashes}}", &hashes.join(" "))
}

/// A page to chat on.
#[utoipa::path(get, path = "/", tag = "Pages", responses(
    (status = 200, description = "The page", body = String, content_type = "text/html"),
))]
pub(crate) async fn chat_page() -> Html<&'static str> {
    Html(&CHAT)
}

/// A page that describes the API.
#[utoipa::path(get, path = "/docs", tag = "Pages", responses(
    (status = 200, description = "The page", body = String, content_type = "text/html"),
))]
pub(crate) async fn docs_page() -> Html<&'static str> {
    Html(&DOCS)
}

/// The API's description, with the models of this server, and whether it wants a key.
#[utoipa::path(get, path = "/openapi.json", tag = "Pages", responses(
    (status = 200, description = "An OpenAPI document", body = Object),
))]
pub(crate) async fn openapi_document(State(app): State<Arc<App>>) -> Response {
    let models = app.models();
    let mut kept = app.description.lock().unwrap_or_else(PoisonError::into_inner);
    let text = match &*kept {
        Some((count, text)) if *count == models.len() => text.clone(),
        _ => kept.insert((models.len(), describe(&app, &models))).1.clone(),
    };
    json_text(StatusCode::OK, text)
}

fn describe(app: &App, models: &[Arc<Entry>]) -> Bytes {
    let mut api = serde_json::to_value(routes::document()).unwrap_or_default();
    if let Some(model) = api.pointer_mut("/components/schemas/CommonFields/properties/model") {
        let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
        model["enum"] = names.into();
    }
    if !app.keys().is_empty()
        && let Some(ways) = api.pointer_mut("/security").and_then(Value::as_array_mut)
    {
        ways.retain(|way| way.as_object().is_some_and(|way| !way.is_empty()));
    }
    api.to_string().into()
}
