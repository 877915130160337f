//! Errors, as the clients of each API expect them.

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use infernum_link::{Cause, Refusal};
use serde::Serialize;
use tower_http::request_id::RequestId;
use utoipa::ToSchema;

use super::limits::Exceeded;

/// Why a request was refused, or failed.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
    /// Seconds after which it is worth another try.
    pub(crate) retry_after: Option<u64>,
}

/// What went wrong. All four keys are always there.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    message: String,
    /// Such as `invalid_request_error`.
    r#type: &'static str,
    /// The field at fault.
    #[schema(required = true)]
    param: Option<String>,
    #[schema(required = true)]
    code: Option<&'static str>,
}

/// The body of every answer that is an error.
#[derive(Serialize, ToSchema)]
pub(crate) struct ErrorResponse<'a> {
    error: &'a ErrorBody,
}

/// How an API tells errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorShape {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ErrorShape {
    /// Of the API that a path is of.
    pub(crate) fn of(path: &str) -> ErrorShape {
        let below = |root: &str| {
            path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        match () {
            () if below("/v1/messages") => ErrorShape::Anthropic,
            () if below("/api") => ErrorShape::Ollama,
            () => ErrorShape::OpenAi,
        }
    }
}

/// An error as Anthropic tells it.
#[derive(Serialize, ToSchema)]
pub(crate) struct AnthropicError<'a> {
    /// `error`
    r#type: &'static str,
    error: AnthropicReason<'a>,
}

/// What went wrong.
#[derive(Serialize, ToSchema)]
struct AnthropicReason<'a> {
    /// Such as `invalid_request_error`.
    r#type: &'static str,
    message: &'a str,
}

/// An error as Ollama tells it.
#[derive(Serialize, ToSchema)]
pub(crate) struct OllamaError<'a> {
    error: &'a str,
}

/// Bytes of what a client sent that are told back to it.
const LONGEST_QUOTE: usize = 200;
/// Bytes of a message. None of ours is that long; what others write of a template may be.
const LONGEST_MESSAGE: usize = 1000;

/// What a client sent, as it may stand in a message: no longer than it is useful, on one line.
pub(crate) fn quoted(text: &str) -> String {
    shortened(text, LONGEST_QUOTE, |c| c.is_control() || c == '\u{2028}' || c == '\u{2029}')
}

/// The beginning of a text, with an ellipsis where something is left out, in at most `most` bytes;
/// characters that `escape` wants are escaped.
fn shortened(text: &str, most: usize, escape: impl Fn(char) -> bool) -> String {
    const ELLIPSIS: char = '…';
    let mut out = String::new();
    let mut whole = 0; // bytes of `out` that may be kept where there is no room for the rest
    for c in text.chars() {
        if escape(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        if out.len() > most {
            out.truncate(whole);
            out.push(ELLIPSIS);
            return out;
        }
        if out.len() + ELLIPSIS.len_utf8() <= most {
            whole = out.len();
        }
    }
    out
}

/// The code of what a model that sleeps does not do.
const ASLEEP: &str = "model_sleeping";
const INVALID: &str = "invalid_request_error";

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = shortened(&message.into(), LONGEST_MESSAGE, char::is_control);
        let body = ErrorBody { message, r#type: kind, param: None, code: None };
        ApiError { status, body, retry_after: None }
    }

    /// Not JSON, or not of the shape that was expected.
    pub(crate) fn malformed(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// A value out of range, or one that is not supported.
    pub(crate) fn value(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, INVALID, message)
            .param(param)
            .code("invalid_value")
    }

    /// A feature that is not built yet.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::value(param, message).code("unsupported_value")
    }

    /// More tokens than the model, or its cache, holds.
    pub(crate) fn too_long(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::malformed(message).param(param).code("context_length_exceeded")
    }

    pub(crate) fn unauthorized(message: &str) -> ApiError {
        ApiError::new(StatusCode::UNAUTHORIZED, INVALID, message).code("invalid_api_key")
    }

    /// Something that is not allowed here.
    pub(crate) fn forbidden(code: &'static str, message: &str) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, INVALID, message).code(code)
    }

    /// Called by a name that it does not go by.
    pub(crate) fn host(name: &str) -> ApiError {
        let message = format!(
            "this server is not called `{}`: it takes requests of this machine alone, by the names \
             localhost, its address, and those of --allowed-host",
            quoted(name)
        );
        ApiError::new(StatusCode::FORBIDDEN, INVALID, message).code("host_not_allowed")
    }

    /// Sent by a web page that is not its own.
    pub(crate) fn origin(origin: &str) -> ApiError {
        let message = format!(
            "pages of `{}` may not call this server; --cors-origin names those that may",
            quoted(origin)
        );
        ApiError::new(StatusCode::FORBIDDEN, INVALID, message).code("origin_not_allowed")
    }

    /// A body of another kind; `found` may be shown.
    pub(crate) fn media_type(found: &str) -> ApiError {
        let message = format!("content-type: expected `application/json`, found {found}");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, message)
            .code("unsupported_media_type")
    }

    pub(crate) fn unknown_model(name: &str, known: &str) -> ApiError {
        let name = quoted(name);
        ApiError::no_model(format!("the model `{name}` does not exist; this server has {known}"))
    }

    fn no_model(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, INVALID, message)
            .param("model")
            .code("model_not_found")
    }

    /// A stored response that is not, or no longer, there.
    pub(crate) fn unknown_response(id: &str, param: Option<&str>) -> ApiError {
        let message = format!(
            "there is no response `{}`: responses are kept in memory, for the API key that made them, until newer \
             ones need their room or the server ends",
            quoted(id)
        );
        let error = ApiError::new(StatusCode::NOT_FOUND, INVALID, message);
        let error = error.code("response_not_found");
        match param {
            Some(param) => error.param(param),
            None => error,
        }
    }

    pub(crate) fn not_found(path: &str) -> ApiError {
        let message = format!("there is nothing at {}", quoted(path));
        ApiError::new(StatusCode::NOT_FOUND, INVALID, message).code("not_found")
    }

    pub(crate) fn method(method: &str, path: &str) -> ApiError {
        let message = format!("{} does not take {}", quoted(path), quoted(method));
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, message).code("method_not_allowed")
    }

    pub(crate) fn too_large(what: &str, limit: usize) -> ApiError {
        let message = format!("{what} is larger than the {limit} bytes that this server takes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, message).code("body_too_large")
    }

    pub(crate) fn timeout(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("request_timeout")
    }

    /// The model's engine is not there, or no longer.
    pub(crate) fn engine_gone() -> ApiError {
        ApiError::unavailable("engine_gone", "the model's engine has stopped", 30)
    }

    /// The model was put to sleep.
    pub(crate) fn asleep(model: &str) -> ApiError {
        let message = format!("the model `{}` sleeps: POST /wake_up wakes it", quoted(model));
        ApiError::unavailable(ASLEEP, message, 30)
    }

    /// The queue is full.
    pub(crate) fn busy(retry_after: u64) -> ApiError {
        let message = "too many requests are waiting; try again later";
        let mut error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            .code("queue_full");
        error.retry_after = Some(retry_after);
        error
    }

    /// A key has used what it may.
    pub(crate) fn rate(exceeded: &Exceeded) -> ApiError {
        let Exceeded { what, most, after } = exceeded;
        let message = format!(
            "this key may use {most} {what} a minute, and has: try again in {:.1} s",
            after.as_secs_f64()
        );
        let mut error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            .code("rate_limit_exceeded");
        error.retry_after = Some(after.as_secs() + 1);
        error
    }

    /// Not now.
    pub(crate) fn unavailable(
        code: &'static str,
        message: impl Into<String>,
        retry_after: u64,
    ) -> ApiError {
        let mut error =
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
                .code(code);
        error.retry_after = Some(retry_after);
        error
    }

    /// No memory for another large body.
    pub(crate) fn too_many_bodies() -> ApiError {
        let message = "the server holds as many large bodies as it can";
        ApiError::unavailable("too_many_bodies", message, 1)
    }

    /// Our fault.
    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
            .code("internal_error")
    }

    /// Names the field at fault.
    pub(crate) fn param(mut self, param: impl Into<String>) -> ApiError {
        self.body.param = Some(quoted(&param.into()));
        self
    }

    /// Names the reason.
    pub(crate) fn because(self, code: &'static str) -> ApiError {
        self.code(code)
    }

    fn code(mut self, code: &'static str) -> ApiError {
        self.body.code = Some(code);
        self
    }

    /// What went wrong, in words.
    pub(crate) fn message(&self) -> &str {
        &self.body.message
    }

    /// What kind of refusal it is, for metrics: a code, of which there are few.
    pub(crate) fn kind(&self) -> &'static str {
        self.body.code.unwrap_or("malformed")
    }

    /// As JSON.
    pub(crate) fn response(&self) -> ErrorResponse<'_> {
        ErrorResponse { error: &self.body }
    }

    /// As JSON, in Anthropic's words.
    pub(crate) fn anthropic(&self) -> AnthropicError<'_> {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::REQUEST_TIMEOUT => "timeout_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => INVALID,
        };
        let error = AnthropicReason { r#type: kind, message: &self.body.message };
        AnthropicError { r#type: "error", error }
    }

    /// As JSON, in Ollama's words.
    pub(crate) fn ollama(&self) -> OllamaError<'_> {
        OllamaError { error: &self.body.message }
    }

    /// An answer in the words of an API.
    pub(crate) fn told(self, shape: ErrorShape) -> Response {
        let mut response = match shape {
            ErrorShape::OpenAi => json(self.status, &self.response()),
            ErrorShape::Anthropic => json(self.status, &self.anthropic()),
            ErrorShape::Ollama => json(self.status, &self.ollama()),
        };
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let schemes = ["Bearer", "Basic realm=\"infernum: any name, the key as password\""];
            for scheme in schemes {
                headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(scheme));
            }
        }
        // For whoever counts refusals, or tells them in other words.
        response.extensions_mut().insert(self);
        response
    }
}

/// What the engine refuses.
impl From<&Refusal> for ApiError {
    fn from(Refusal { cause, message }: &Refusal) -> ApiError {
        match cause {
            Cause::Value(field) => ApiError::value(field, message),
            Cause::Unsupported(field) => ApiError::unsupported(field, message),
            Cause::TooLong => ApiError::too_long("prompt", message),
            Cause::Model => ApiError::malformed(message).param("model"),
            Cause::Grammar => ApiError::malformed(message).because("invalid_grammar"),
            Cause::NoAdapter => ApiError::no_model(message),
            Cause::AdaptersNotAllowed => ApiError::forbidden("adapters_not_allowed", message),
            Cause::NoAdapterSlot => ApiError::malformed(message).because("no_adapter_slot"),
            Cause::Busy => ApiError::busy(1),
            Cause::Draining => ApiError::unavailable("shutting_down", message, 5),
            Cause::Asleep => ApiError::unavailable(ASLEEP, message, 30),
            Cause::Internal => ApiError::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.told(ErrorShape::OpenAi)
    }
}

/// Has errors told in the words of the API that was asked.
pub(crate) async fn in_its_words(request: Request, next: Next) -> Response {
    let shape = ErrorShape::of(request.uri().path());
    let id = request.extensions().get::<RequestId>().map(|id| id.header_value().clone());
    let mut response = next.run(request).await;
    if shape == ErrorShape::OpenAi {
        return response;
    }
    if let Some(id) = id.filter(|_| shape == ErrorShape::Anthropic) {
        // Where its clients look for it.
        response.headers_mut().insert("request-id", id);
    }
    if let Some(error) = response.extensions().get::<ApiError>() {
        // Headers stay: they are not the error's alone.
        *response.body_mut() = error.clone().told(shape).into_body();
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}

/// An answer of JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    // Our own types: no maps with keys that are not strings.
    json_text(status, serde_json::to_vec(value).unwrap_or_default().into())
}

/// An answer of JSON that is text already.
pub(crate) fn json_text(status: StatusCode, text: Bytes) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_back_is_short_and_on_one_line() {
        assert_eq!(quoted("a\n\u{1b}[2J\u{2028}é"), "a\\n\\u{1b}[2J\\u{2028}é");
        assert_eq!(quoted(&"x".repeat(200)), "x".repeat(200));
        for long in ["x".repeat(201), "é".repeat(4000), "\u{0}".repeat(50), "😀".repeat(51)] {
            let short = quoted(&long);
            assert!(short.len() <= 200 && short.len() > 190 && short.ends_with('…'), "{short}");
        }
        let error = ApiError::value(&"p".repeat(5000), "m\0".repeat(5000));
        assert!(error.body.message.len() <= 1000 && !error.body.message.contains('\0'));
        assert!(error.body.param.is_some_and(|p| p.len() <= 200));
        let names = [
            ApiError::unknown_model(&"x".repeat(5000), "`a`"),
            ApiError::not_found(&"x".repeat(5000)),
        ];
        assert!(names.iter().all(|e| e.body.message.len() < 300));
    }
}
