//! Pages for people.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{Html, Response};
use utoipa::OpenApi;

use crate::serve::app::App;
use crate::serve::error::json_text;
use crate::serve::openapi::Api;

/// A page to chat on.
pub(crate) async fn chat() -> Html<&'static str> {
    Html(include_str!("../page.html"))
}

/// A page that describes the API.
pub(crate) async fn docs() -> Html<&'static str> {
    Html(include_str!("../docs.html"))
}

/// The API's description, with the models of this server.
pub(crate) async fn openapi(State(app): State<Arc<App>>) -> Response {
    let text = app.description.get_or_init(|| {
        let mut api = serde_json::to_value(Api::openapi()).unwrap_or_default();
        if let Some(model) = api.pointer_mut("/components/schemas/CommonFields/properties/model") {
            let names: Vec<&str> = app.models.iter().map(|m| m.name.as_str()).collect();
            model["enum"] = names.into();
        }
        api.to_string().into()
    });
    json_text(StatusCode::OK, text.clone())
}
