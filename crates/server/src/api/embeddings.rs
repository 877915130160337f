//! `/v1/embeddings`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use infernum_ir::Task;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::common::{Asked, check_count, encode, within};
use super::completions::Prompt;
use super::read::{TokenId, parse, whole};
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::model::Served;
use crate::vectors::{Computed, check_prompts, check_task, compute};

/// Numbers of one answer at most.
const MOST_VALUES: usize = 4 << 20;

/// Texts, or what a tokenizer made of them.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    /// A text, token ids, or a list of up to 2048 of either.
    input: Prompt,
    /// How vectors are written: as lists of numbers, or as base64 of their f32s, the lowest byte first.
    encoding_format: Option<EncodingFormat>,
    /// Only so many of each vector's numbers, the first ones; a vector of length 1 keeps its length.
    #[schema(minimum = 1)]
    #[serde(default, deserialize_with = "whole")]
    dimensions: Option<i64>,
    /// Add what the tokenizer puts around a text; true when left out.
    add_special_tokens: Option<bool>,
    /// Cached prefixes are shared among requests of one key with the same salt only.
    cache_salt: Option<String>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    user: Option<String>,
}

/// How a vector is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

/// The vectors.
#[derive(Serialize, ToSchema)]
pub(crate) struct Embeddings {
    /// `list`
    object: &'static str,
    data: Vec<NumberedVector>,
    model: String,
    usage: PromptUsage,
}

/// One vector.
#[derive(Serialize, ToSchema)]
struct NumberedVector {
    /// `embedding`
    object: &'static str,
    index: usize,
    embedding: Written,
}

/// A vector as it was asked for.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Written {
    Floats(Vec<f32>),
    Base64(String),
}

/// Tokens that were used.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(crate) struct PromptUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl PromptUsage {
    pub(crate) fn of(tokens: usize) -> PromptUsage {
        PromptUsage { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// What is to be computed, and how it is answered.
struct Prepared {
    served: Arc<Served>,
    prompts: Vec<infernum_runtime::Request>,
    format: EncodingFormat,
    size: usize,
    warnings: Warnings,
}

/// A vector for each text.
#[utoipa::path(post, path = "/v1/embeddings", tag = "OpenAI",
    request_body(content = EmbeddingRequest, example = json!({"input": ["A cat sleeps", "A dog barks"]})),
    extensions(("x-python" = json!("openai: embeddings.create"))), responses(
    (status = 200, description = "The vectors", body = Embeddings),
    (status = "4XX", description = "The request's fault, or the model gives no vectors", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn create_embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, request).await?;
    let client = asked.client;
    let Prepared { served, prompts, format, size, warnings } = asked.prepare(&app, prepare).await?;
    let computed = compute(&app, &served, prompts, "input").await?;
    let bytes = 4 * size * computed.rows.len();
    let name = served.name.clone();
    let answer = move || Ok(answer(name, computed, format, size));
    Ok(warnings.tell(app.lanes.run(client, bytes, answer).await?))
}

fn prepare(app: &App, asked: &Asked) -> Result<Prepared, ApiError> {
    let (request, unknown) = parse::<EmbeddingRequest>(&asked.bytes)?;
    let served = app.model_for_work(request.model.as_deref())?;
    check_task(&served, &[Task::Embed], "embeddings")?;
    check_prompts("input", request.input.count())?;
    let size = dimensions(&served, request.dimensions)?;
    if size.saturating_mul(request.input.count()) > MOST_VALUES {
        let most = MOST_VALUES / size;
        let message = format!("input: expected at most {most} texts of {size} numbers each");
        return Err(ApiError::value("input", message));
    }
    let special = request.add_special_tokens.unwrap_or(true);
    let format = request.encoding_format.unwrap_or_default();
    let text = |text: String| encode(&served, "input", &text, special, served.max_length);
    let tokens = |tokens: Vec<TokenId>| Ok(tokens.into_iter().map(|t| t.0).collect());
    let prompts: Result<Vec<Vec<u32>>, ApiError> = match request.input {
        Prompt::Text(one) => text(one).map(|p| vec![p]),
        Prompt::Tokens(one) => tokens(one).map(|p| vec![p]),
        Prompt::Texts(texts) => texts.into_iter().map(text).collect(),
        Prompt::TokenLists(lists) => lists.into_iter().map(tokens).collect(),
    };
    let salt = asked.tenant.salt(request.cache_salt.as_deref());
    let request = |tokens: Vec<u32>| {
        if tokens.is_empty() {
            return Err(ApiError::value("input", "input: expected at least one token of each"));
        }
        check_count("input", tokens.len(), served.max_length)?;
        Ok(infernum_runtime::Request { salt, ..infernum_runtime::Request::new(tokens, 0) })
    };
    let prompts: Result<Vec<_>, ApiError> = prompts?.into_iter().map(request).collect();
    let (prompts, warnings) = (prompts?, Warnings::new(&unknown, &[]));
    Ok(Prepared { served, prompts, format, size, warnings })
}

/// How many numbers of each vector are wanted: all, or as many as the model lets one take.
fn dimensions(served: &Served, wanted: Option<i64>) -> Result<usize, ApiError> {
    let Some(wanted) = wanted else { return Ok(served.width) };
    let wanted = within("dimensions", wanted, 1, served.width as i64)? as usize;
    let allowed = served.frontend.dimensions();
    if wanted == served.width || allowed.is_none_or(|list| list.contains(&wanted)) {
        return Ok(wanted);
    }
    let listed = allowed.unwrap_or_default().iter().map(ToString::to_string);
    let listed = listed.collect::<Vec<_>>().join(", ");
    let listed = if listed.is_empty() { served.width.to_string() } else { listed };
    let message =
        format!("dimensions: expected one of those of the model, {listed}, found {wanted}");
    Err(ApiError::value("dimensions", message))
}

fn answer(model: String, computed: Computed, format: EncodingFormat, size: usize) -> Response {
    let Computed { rows, prompt_tokens } = computed;
    let written = |(index, row): (usize, Box<[f32]>)| {
        let vector = shortened(row.into_vec(), size);
        let embedding = match format {
            EncodingFormat::Float => Written::Floats(vector),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                Written::Base64(STANDARD.encode(bytes))
            }
        };
        NumberedVector { object: "embedding", index, embedding }
    };
    let data = rows.into_iter().enumerate().map(written).collect();
    let usage = PromptUsage::of(prompt_tokens);
    json(StatusCode::OK, &Embeddings { object: "list", data, model, usage })
}

/// The first `size` numbers of a vector. One that had length 1 has it again.
fn shortened(mut vector: Vec<f32>, size: usize) -> Vec<f32> {
    /// What roundings to 16 bits leave of a length of 1.
    const UNIT: f64 = 1e-2;
    if size >= vector.len() {
        return vector;
    }
    let length = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let is_unit = (length(&vector) - 1.0).abs() < UNIT;
    vector.truncate(size);
    let rest = length(&vector);
    if is_unit && rest > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / rest) as f32);
    }
    vector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_vector_of_length_1_has_length_1() {
        assert_eq!(shortened(vec![0.6, 0.0, 0.8], 2), [1.0, 0.0]);
        assert_eq!(shortened(vec![3.0, 4.0, 12.0], 2), [3.0, 4.0], "it had another length");
        assert_eq!(shortened(vec![0.0, 0.0, 1.0], 2), [0.0, 0.0], "nothing is left of it");
        assert_eq!(shortened(vec![0.6, 0.8], 2), [0.6, 0.8]);
    }
}
