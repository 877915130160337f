//! `/tokenize` and `/detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum_frontend_hf::chat::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::chat::ChatMessage;
use super::common::{Asked, check_count, encode, encode_error};
use super::conversation::{self, Conversation, End};
use super::read::{TokenId, parse};
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::model::Served;

/// A text, or a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    prompt: Option<String>,
    /// Instead of `prompt`.
    #[schema(value_type = Option<Vec<ChatMessage>>)]
    messages: Option<Vec<Message>>,
    /// Add what the tokenizer puts around a text; true for a prompt when left out.
    add_special_tokens: Option<bool>,
    /// End a conversation where the answer begins; true when left out.
    add_generation_prompt: Option<bool>,
    /// End a conversation with the text of its last message; false when left out.
    continue_final_message: Option<bool>,
    /// Further variables of the model's chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// Its tokens.
#[derive(Serialize, ToSchema)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

/// Tokens.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    #[schema(value_type = Vec<u32>)]
    tokens: Vec<TokenId>,
}

/// Their text.
#[derive(Serialize, ToSchema)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// Counts the tokens of a text.
#[utoipa::path(post, path = "/tokenize", tag = "Tokens",
    request_body(content = TokenizeRequest, example = json!({"prompt": "Once upon a time"})), responses(
    (status = 200, description = "The tokens", body = Tokenized),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    Asked::read(&app, request).await?.prepare(&app, count).await
}

fn count(app: &App, asked: &Asked) -> Result<Response, ApiError> {
    let (request, unknown) = parse::<TokenizeRequest>(&asked.bytes)?;
    let served = &app.model(request.model.as_deref())?;
    let limit = most_tokens(served);
    let tokens = match (request.prompt, request.messages) {
        (Some(text), None) => {
            let special = request.add_special_tokens.unwrap_or(true);
            encode(served, "prompt", &text, special, limit)?
        }
        (None, Some(messages)) => {
            let conversation = Conversation {
                messages: conversation::messages(messages, served)?,
                variables: request.chat_template_kwargs.unwrap_or_default(),
                end: End::check(request.add_generation_prompt, request.continue_final_message)?,
                special: request.add_special_tokens.unwrap_or(false),
                ..Conversation::default()
            };
            conversation.prompt(served, limit)?
        }
        _ => {
            let message = "expected either `prompt` or `messages`";
            return Err(ApiError::malformed(message).param("prompt"));
        }
    };
    check_count("prompt", tokens.len(), limit)?;
    let body = Tokenized { count: tokens.len(), max_model_len: served.max_length, tokens };
    Ok(Warnings::new(&unknown, &[]).tell(json(StatusCode::OK, &body)))
}

/// Tokens that are counted, or spelt, at a time. A text may well be too long for the model: whoever
/// asks wants to know by how much.
pub(crate) fn most_tokens(served: &Served) -> usize {
    served.max_length.saturating_mul(4)
}

/// The text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "Tokens",
    request_body(content = DetokenizeRequest, example = json!({"tokens": [1, 2, 3]})), responses(
    (status = 200, description = "The text", body = Detokenized),
    (status = "4XX", description = "The request's fault", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    Asked::read(&app, request).await?.prepare(&app, spell).await
}

fn spell(app: &App, asked: &Asked) -> Result<Response, ApiError> {
    let (request, unknown) = parse::<DetokenizeRequest>(&asked.bytes)?;
    let served = &app.model(request.model.as_deref())?;
    check_count("tokens", request.tokens.len(), most_tokens(served))?;
    let tokens: Vec<u32> = request.tokens.iter().map(|t| t.0).collect();
    if let Some(token) = tokens.iter().find(|t| **t as usize >= served.vocab) {
        let message =
            format!("tokens: token {token} is outside the vocabulary of {}", served.vocab);
        return Err(ApiError::value("tokens", message));
    }
    let prompt = served.frontend.tokenizer().decode(&tokens, false);
    let prompt = prompt.map_err(|e| encode_error("tokens", &e))?;
    Ok(Warnings::new(&unknown, &[]).tell(json(StatusCode::OK, &Detokenized { prompt })))
}
