//! The routes, and their handlers.

pub(crate) mod answer;
mod blocks;
mod calls;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
mod conversation;
pub(crate) mod embeddings;
pub(crate) mod lora;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod ollama;
pub(crate) mod options;
pub(crate) mod pages;
pub(crate) mod read;
pub(crate) mod rerank;
pub(crate) mod responses;
pub(crate) mod sleep;
mod structure;
pub(crate) mod system;
pub(crate) mod tokens;
mod turns;
pub(crate) mod warnings;

use crate::routes::routes;

// A route is a line here and what the `#[utoipa::path]` of its handler says: method, path, whether all may ask
// without a key (`security(())`), and its documentation.
routes![
    /// All routes, in the order in which people need them: `/docs` is in that order.
    all:
    chat::create_chat_completion,
    responses::create_response,
    responses::retrieve_response,
    responses::delete_response,
    completions::create_completion,
    embeddings::create_embeddings,
    models::list_models,
    models::retrieve_model,
    messages::create_message,
    messages::count_message_tokens,
    ollama::ollama_chat,
    ollama::ollama_generate,
    ollama::list_tags,
    ollama::show_model,
    ollama::ollama_version,
    rerank::create_ranking,
    rerank::create_ranking_by_its_other_name,
    rerank::create_scores,
    tokens::tokenize,
    tokens::detokenize,
    pages::chat_page,
    pages::docs_page,
    pages::openapi_document,
    lora::load_lora_adapter,
    lora::unload_lora_adapter,
    system::health,
    system::livez,
    system::readyz,
    system::version,
    system::metrics,
    system::reset_prefix_cache,
    sleep::sleep,
    sleep::wake_up,
    sleep::wake,
    sleep::is_sleeping,
];

routes![
    /// Those that --metrics-listen has, too.
    operation:
    system::health,
    system::livez,
    system::readyz,
    system::metrics,
];
