//! The routes, and their handlers.

pub(crate) mod answer;
mod calls;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod pages;
pub(crate) mod read;
pub(crate) mod rerank;
mod structure;
pub(crate) mod system;
pub(crate) mod tokens;

use crate::routes::routes;

// A route is a line here and what the `#[utoipa::path]` of its handler says: method, path, whether all may ask
// without a key (`security(())`), and its documentation.
routes![
    chat::create_chat_completion,
    completions::create_completion,
    embeddings::create_embeddings,
    rerank::create_ranking,
    rerank::create_ranking_by_its_other_name,
    rerank::create_scores,
    models::list_models,
    models::retrieve_model,
    tokens::tokenize,
    tokens::detokenize,
    system::health,
    system::version,
    system::metrics,
    pages::chat_page,
    pages::docs_page,
    pages::openapi_document,
];
