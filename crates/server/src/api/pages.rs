//! Pages for people, and the API's description.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{Html, Response};

use crate::app::App;
use crate::error::json_text;
use crate::routes;

/// A page to chat on.
#[utoipa::path(get, path = "/", tag = "Pages", responses(
    (status = 200, description = "The page", body = String, content_type = "text/html"),
))]
pub(crate) async fn chat_page() -> Html<&'static str> {
    Html(include_str!("../page.html"))
}

/// A page that describes the API.
#[utoipa::path(get, path = "/docs", tag = "Pages", responses(
    (status = 200, description = "The page", body = String, content_type = "text/html"),
))]
pub(crate) async fn docs_page() -> Html<&'static str> {
    Html(include_str!("../docs.html"))
}

/// The API's description, with the models of this server.
#[utoipa::path(get, path = "/openapi.json", tag = "Pages", responses(
    (status = 200, description = "An OpenAPI document", body = Object),
))]
pub(crate) async fn openapi_document(State(app): State<Arc<App>>) -> Response {
    let text = app.description.get_or_init(|| {
        let mut api = serde_json::to_value(routes::document()).unwrap_or_default();
        if let Some(model) = api.pointer_mut("/components/schemas/CommonFields/properties/model") {
            let names: Vec<&str> = app.models.iter().map(|m| m.name.as_str()).collect();
            model["enum"] = names.into();
        }
        api.to_string().into()
    });
    json_text(StatusCode::OK, text.clone())
}
