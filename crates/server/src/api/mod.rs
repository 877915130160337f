//! The routes, and their handlers.

pub(crate) mod answer;
mod calls;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod pages;
pub(crate) mod read;
mod structure;
pub(crate) mod system;
pub(crate) mod tokens;

use crate::routes::routes;

// A route is a line here and what the `#[utoipa::path]` of its handler says: method, path, whether all may ask
// without a key (`security(())`), and its documentation.
routes![
    /// All routes.
    all:
    chat::create_chat_completion,
    completions::create_completion,
    models::list_models,
    models::retrieve_model,
    tokens::tokenize,
    tokens::detokenize,
    system::health,
    system::livez,
    system::readyz,
    system::version,
    system::metrics,
    system::reset_prefix_cache,
    pages::chat_page,
    pages::docs_page,
    pages::openapi_document,
];

routes![
    /// Those that --metrics-listen has, too.
    operation:
    system::health,
    system::livez,
    system::readyz,
    system::metrics,
];
