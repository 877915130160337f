//! Pages for people.

use axum::http::StatusCode;
use axum::response::{Html, Response};
use utoipa::OpenApi;

use crate::serve::error::json;
use crate::serve::openapi::Api;

/// A page to chat on.
pub(crate) async fn chat() -> Html<&'static str> {
    Html(include_str!("../page.html"))
}

/// A page that describes the API.
pub(crate) async fn docs() -> Html<&'static str> {
    Html(include_str!("../docs.html"))
}

/// The API's description.
pub(crate) async fn openapi() -> Response {
    json(StatusCode::OK, &Api::openapi())
}
