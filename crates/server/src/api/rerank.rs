//! `/v1/rerank` and `/score`: how well texts fit a text.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use infernum_ir::Task;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::common::{Asked, Head, encode, encode_error, within};
use super::embeddings::PromptUsage;
use super::read::{parse, whole};
use super::warnings::Warnings;
use crate::app::App;
use crate::error::{ApiError, json};
use crate::lanes::Client;
use crate::model::Served;
use crate::vectors::{check_prompts, check_task, compute};

/// A question, and texts that may answer it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct RerankRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    query: String,
    /// Up to 2048.
    documents: Vec<Document>,
    /// Only the best so many; all when left out.
    #[schema(minimum = 1)]
    #[serde(default, deserialize_with = "whole")]
    top_n: Option<i64>,
    /// Give the texts back with their scores; true when left out.
    return_documents: Option<bool>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    user: Option<String>,
}

/// A text, or an object that holds it.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object { text: String },
}

/// The texts, the best first.
#[derive(Serialize, ToSchema)]
pub(crate) struct Ranking {
    id: String,
    model: String,
    results: Vec<Ranked>,
    usage: PromptUsage,
}

#[derive(Serialize, ToSchema)]
struct Ranked {
    /// Its place in the request.
    index: usize,
    relevance_score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RankedDocument>,
}

#[derive(Serialize, ToSchema)]
struct RankedDocument {
    text: String,
}

/// Texts to be held against one another: one and several, or as many of each.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ScoreRequest {
    /// May be left out where there is but one.
    model: Option<String>,
    text_1: Texts,
    text_2: Texts,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    user: Option<String>,
}

/// A text, or several.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "the first is for the API's description")]
enum Texts {
    One(String),
    Several(Vec<String>),
}

/// A score for each pair.
#[derive(Serialize, ToSchema)]
pub(crate) struct Scores {
    id: String,
    /// `list`
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<ScoredPair>,
    usage: PromptUsage,
}

#[derive(Serialize, ToSchema)]
struct ScoredPair {
    index: usize,
    /// `score`
    object: &'static str,
    score: f64,
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Document, D::Error> {
        input.deserialize_any(DocumentVisitor)
    }
}

impl Document {
    fn into_text(self) -> String {
        match self {
            Document::Text(text) | Document::Object { text } => text,
        }
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string, or an object with a `text`")
    }

    fn visit_str<E>(self, text: &str) -> Result<Document, E> {
        Ok(Document::Text(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Document, A::Error> {
        let mut found = None;
        while let Some(key) = entries.next_key::<String>()? {
            if key == "text" {
                found = Some(entries.next_value()?);
            } else {
                entries.next_value::<IgnoredAny>()?;
            }
        }
        found.map(|text| Document::Object { text }).ok_or_else(|| A::Error::missing_field("text"))
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Texts, D::Error> {
        input.deserialize_any(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string or a list of them")
    }

    fn visit_str<E>(self, text: &str) -> Result<Texts, E> {
        Ok(Texts::One(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Texts, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = items.next_element()? {
            texts.push(text);
        }
        Ok(Texts::Several(texts))
    }
}

impl Texts {
    fn into_vec(self) -> Vec<String> {
        match self {
            Texts::One(text) => vec![text],
            Texts::Several(texts) => texts,
        }
    }
}

/// Pairs of texts that a model is to score.
struct Pairs {
    served: Arc<Served>,
    prompts: Vec<infernum_runtime::Request>,
    /// Where the vectors of a pair's texts stand among what is computed; none where a pair is one prompt.
    vectors: Option<Vec<(usize, usize)>>,
    /// The field that is at fault where one is refused.
    param: &'static str,
}

impl Pairs {
    /// Of a cross-encoder a prompt for each pair, of a model of embeddings one for each text: a pair's score is then how
    /// far they point into one direction.
    fn new(
        app: &App,
        served: &Arc<Served>,
        asked: &Asked,
        (first, second): (&[String], &[String]),
        params: [&'static str; 2],
    ) -> Result<Pairs, ApiError> {
        let salt = asked.tenant.salt(None);
        let request = |tokens| infernum_runtime::Request {
            salt,
            ..infernum_runtime::Request::new(tokens, 0)
        };
        let count = first.len().max(second.len());
        let places = |i: usize| (if first.len() == 1 { 0 } else { i }, i);
        let (mut prompts, mut vectors) = (Vec::new(), None);
        if served.frontend.task() == Task::Score {
            check_repeated(app.max_body, params[0], first, count)?;
            for (a, b) in (0..count).map(places) {
                let (tokens, begins) = pair(served, params, &first[a], &second[b])?;
                let request = request(tokens);
                prompts.push(infernum_runtime::Request { second: begins, ..request });
            }
        } else {
            for (texts, param) in [(first, params[0]), (second, params[1])] {
                for text in texts {
                    let tokens = encode(served, param, text, true, served.max_length)?;
                    prompts.push(request(tokens));
                }
            }
            vectors = Some((0..count).map(|i| (places(i).0, first.len() + i)).collect());
        }
        Ok(Pairs { served: served.clone(), prompts, vectors, param: params[1] })
    }

    /// A score for each pair, and how many tokens that took.
    async fn scores(self, app: &App) -> Result<(Vec<f64>, usize), ApiError> {
        let computed = compute(app, &self.served, self.prompts, self.param).await?;
        let rows = computed.rows;
        let scores = match self.vectors {
            None => rows.iter().map(|row| f64::from(row[0])).collect(),
            Some(pairs) => pairs.iter().map(|(a, b)| cosine(&rows[*a], &rows[*b])).collect(),
        };
        Ok((scores, computed.prompt_tokens))
    }
}

/// Refuses a text that is one of so many pairs that together they would be far larger than the body in which it came.
fn check_repeated(
    most: usize,
    param: &str,
    first: &[String],
    count: usize,
) -> Result<(), ApiError> {
    let [text] = first else { return Ok(()) };
    if text.len().saturating_mul(count) <= most {
        return Ok(());
    }
    let bytes = text.len();
    let message = format!(
        "{param}: {bytes} bytes in each of {count} pairs are more than {most} together; ask for fewer at a time"
    );
    Err(ApiError::value(param, message))
}

/// Tokens of two texts that a model takes as one, and where the second begins.
fn pair(
    served: &Served,
    params: [&str; 2],
    first: &str,
    second: &str,
) -> Result<(Vec<u32>, Option<usize>), ApiError> {
    let (tokenizer, limit) = (served.frontend.tokenizer(), served.max_length);
    // Each by itself is bounded, so that both together are not much work.
    for (text, param) in [(first, params[0]), (second, params[1])] {
        if tokenizer.surely_longer(text, limit).map_err(|e| encode_error(param, &e))? {
            let message =
                format!("{param}: a text has more than the model's {limit} tokens; shorten it");
            return Err(ApiError::too_long(param, message));
        }
    }
    let encoded = tokenizer.encode_pair(first, second);
    let (tokens, begins) = encoded.map_err(|e| encode_error(params[1], &e))?;
    if tokens.len() > limit {
        let (found, param) = (tokens.len(), params[1]);
        let message =
            format!("{param}: a pair has {found} tokens, the model takes {limit}; shorten it");
        return Err(ApiError::too_long(param, message));
    }
    Ok((tokens, begins))
}

/// The cosine of the angle between two vectors; 0 where one has no direction.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
    };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { dot(a, b) / lengths } else { 0.0 }
}

/// Refuses a model that has no one score for a pair of texts.
fn check_model(served: &Served) -> Result<(), ApiError> {
    check_task(served, &[Task::Embed, Task::Score], "scores of texts")?;
    if served.frontend.task() == Task::Score && served.width != 1 {
        let (name, labels) = (&served.name, served.width);
        let message =
            format!("the model `{name}` has scores of {labels} labels: expected one label");
        return Err(ApiError::malformed(message).param("model").because("model_not_supported"));
    }
    Ok(())
}

/// A request for a ranking, checked.
struct PreparedRanking {
    pairs: Pairs,
    documents: Vec<String>,
    most: usize,
    told: bool,
    warnings: Warnings,
}

/// Ranks texts by how well they answer a question.
#[utoipa::path(post, path = "/v1/rerank", tag = "Scores",
    request_body(content = RerankRequest, example = json!({"query": "Who sleeps?", "documents": ["A dog barks", "A cat sleeps"]})), responses(
    (status = 200, description = "The texts, the best first", body = Ranking),
    (status = "4XX", description = "The request's fault, or the model gives no scores", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn create_ranking(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    rank(&app, request).await
}

/// The same as `/v1/rerank`.
#[utoipa::path(post, path = "/rerank", tag = "Scores",
    request_body(content = RerankRequest, example = json!({"query": "Who sleeps?", "documents": ["A dog barks", "A cat sleeps"]})), responses(
    (status = 200, description = "The texts, the best first", body = Ranking),
    (status = "4XX", description = "The request's fault, or the model gives no scores", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn create_ranking_by_its_other_name(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    rank(&app, request).await
}

async fn rank(app: &Arc<App>, request: Request) -> Result<Response, ApiError> {
    let asked = Asked::read(app, request).await?;
    let client = asked.client;
    let prepared = asked.prepare(app, prepare_ranking).await?;
    let PreparedRanking { pairs, documents, most, told, warnings } = prepared;
    let head = Head::new("rerank", &pairs.served);
    let (scores, tokens) = pairs.scores(app).await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut documents: Vec<Option<String>> = documents.into_iter().map(Some).collect();
    let ranked = |index: usize| {
        let text = documents[index].take().filter(|_| told);
        let document = text.map(|text| RankedDocument { text });
        Ranked { index, relevance_score: scores[index], document }
    };
    let results = order.into_iter().take(most).map(ranked).collect();
    let usage = PromptUsage::of(tokens);
    let ranking = Ranking { id: head.id, model: head.model, results, usage };
    told_aside(app, client, &warnings, ranking).await
}

fn prepare_ranking(app: &App, asked: &Asked) -> Result<PreparedRanking, ApiError> {
    let (request, unknown) = parse::<RerankRequest>(&asked.bytes)?;
    let served = &app.model_for_work(request.model.as_deref())?;
    check_model(served)?;
    check_prompts("documents", request.documents.len())?;
    let most = within("top_n", request.top_n.unwrap_or(i64::MAX), 1, i64::MAX)? as usize;
    let documents: Vec<String> = request.documents.into_iter().map(Document::into_text).collect();
    let query = [request.query];
    let pairs = Pairs::new(app, served, asked, (&query, &documents), ["query", "documents"])?;
    let told = request.return_documents.unwrap_or(true);
    Ok(PreparedRanking { pairs, documents, most, told, warnings: Warnings::new(&unknown, &[]) })
}

/// Scores pairs of texts.
#[utoipa::path(post, path = "/score", tag = "Scores",
    request_body(content = ScoreRequest, example = json!({"text_1": "Who sleeps?", "text_2": ["A dog barks", "A cat sleeps"]})), responses(
    (status = 200, description = "A score for each pair", body = Scores),
    (status = "4XX", description = "The request's fault, or the model gives no scores", body = inline(crate::error::ErrorResponse<'static>)),
    (status = 503, description = "Loading, or shutting down", body = inline(crate::error::ErrorResponse<'static>)),
))]
pub(crate) async fn create_scores(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, request).await?;
    let client = asked.client;
    let (pairs, warnings) = asked.prepare(&app, prepare_scores).await?;
    let Head { id, created, model } = Head::new("score", &pairs.served);
    let (scores, tokens) = pairs.scores(&app).await?;
    let score = |(index, score)| ScoredPair { index, object: "score", score };
    let data = scores.into_iter().enumerate().map(score).collect();
    let usage = PromptUsage::of(tokens);
    let scores = Scores { id, object: "list", created, model, data, usage };
    told_aside(&app, client, &warnings, scores).await
}

fn prepare_scores(app: &App, asked: &Asked) -> Result<(Pairs, Warnings), ApiError> {
    let (request, unknown) = parse::<ScoreRequest>(&asked.bytes)?;
    let served = &app.model_for_work(request.model.as_deref())?;
    check_model(served)?;
    let (first, second) = (request.text_1.into_vec(), request.text_2.into_vec());
    check_prompts("text_1", first.len())?;
    check_prompts("text_2", second.len())?;
    if first.len() != 1 && first.len() != second.len() {
        let (a, b) = (first.len(), second.len());
        let message = format!("text_1: expected one text, or as many as text_2, {b}; found {a}");
        return Err(ApiError::value("text_1", message));
    }
    let pairs = Pairs::new(app, served, asked, (&first, &second), ["text_1", "text_2"])?;
    Ok((pairs, Warnings::new(&unknown, &[])))
}

/// Writes an answer off the runtime.
async fn told_aside(
    app: &App,
    client: Client,
    warnings: &Warnings,
    body: impl Serialize + Send + 'static,
) -> Result<Response, ApiError> {
    const BYTES: usize = 64 << 10;
    let response = app.lanes.run(client, BYTES, move || Ok(json(StatusCode::OK, &body))).await?;
    Ok(warnings.tell(response))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_texts_or_hold_them() {
        let read = |text: &str| serde_json::from_str::<Vec<Document>>(text);
        let texts: Vec<String> = read(r#"["a", {"title": [1], "text": "b"}]"#)
            .expect("documents")
            .into_iter()
            .map(Document::into_text)
            .collect();
        assert_eq!(texts, ["a", "b"]);
        for wrong in [r#"[{"title": "a"}]"#, "[3]", r#"[{"text": 3}]"#, "[null]"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_text_of_many_pairs_is_bounded_by_what_a_body_may_be() {
        let one = ["x".repeat(1000)];
        assert!(check_repeated(1 << 20, "query", &one, 1048).is_ok());
        assert!(check_repeated(1 << 20, "query", &one, 1049).is_err());
        let each = [one[0].clone(), one[0].clone()];
        assert!(check_repeated(1, "text_1", &each, 2).is_ok(), "each came by itself");
    }

    #[test]
    fn a_cosine_knows_no_length() {
        assert!((cosine(&[3.0, 0.0], &[0.5, 0.0]) - 1.0).abs() < 1e-12);
        assert!((cosine(&[1.0, 1.0], &[-2.0, -2.0]) + 1.0).abs() < 1e-12);
        assert!(cosine(&[0.0, 0.0], &[1.0, 0.0]).abs() < 1e-12);
    }
}
