//! What goes over the wire: requests and the parts of answers that are measured.

use std::borrow::Cow;

use clap::ValueEnum;
use hyper::StatusCode;
use serde::{Deserialize, Serialize};

use super::error::Error;
use super::load::Request;
use super::record::Record;

/// A route that generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Endpoint {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions
    Chat,
}

/// How a prompt is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PromptKind {
    /// Random token ids: prompts are exactly as long as the load says.
    Ids,
    /// Random short English words, which are about a token each.
    Text,
}

impl Endpoint {
    pub(super) fn path(self) -> &'static str {
        match self {
            Endpoint::Completions => "/v1/completions",
            Endpoint::Chat => "/v1/chat/completions",
        }
    }
}

/// What all requests to a server have in common.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ask {
    pub(super) model: String,
    pub(super) endpoint: Endpoint,
    pub(super) prompt: PromptKind,
    /// Ids are below this.
    pub(super) vocab: u32,
    pub(super) stream: bool,
    pub(super) ignore_eos: bool,
    pub(super) temperature: f64,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(flatten)]
    prompt: Prompt<'a>,
    max_tokens: u32,
    temperature: f64,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u32>,
}

#[derive(Serialize)]
enum Prompt<'a> {
    #[serde(rename = "prompt")]
    Ids(Vec<u32>),
    #[serde(rename = "prompt")]
    Text(String),
    #[serde(rename = "messages")]
    Chat(&'a [Message]),
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Ask {
    /// Tokens to choose from: ids, or words.
    pub(super) fn tokens(&self) -> u32 {
        match self.prompt {
            PromptKind::Ids => self.vocab,
            PromptKind::Text => WORDS.len() as u32,
        }
    }

    /// A request as JSON.
    pub(super) fn body(&self, request: &Request) -> Vec<u8> {
        let mut messages = Vec::new();
        let prompt = match (self.endpoint, self.prompt) {
            (Endpoint::Chat, _) => {
                if !request.shared.is_empty() {
                    messages.push(Message { role: "system", content: words(&request.shared) });
                }
                messages.push(Message { role: "user", content: words(&request.own) });
                Prompt::Chat(&messages)
            }
            (_, PromptKind::Ids) => Prompt::Ids([&request.shared[..], &request.own].concat()),
            (_, PromptKind::Text) => {
                Prompt::Text(words(&[&request.shared[..], &request.own].concat()))
            }
        };
        let body = Body {
            model: &self.model,
            prompt,
            max_tokens: request.output,
            temperature: self.temperature,
            stream: self.stream,
            stream_options: self.stream.then_some(StreamOptions { include_usage: true }),
            ignore_eos: self.ignore_eos.then_some(true),
            priority: request.priority,
        };
        // Numbers and texts, with texts for keys: nothing here can fail.
        serde_json::to_vec(&body).unwrap_or_default()
    }
}

fn words(tokens: &[u32]) -> String {
    let word = |t: &u32| WORDS[*t as usize % WORDS.len()];
    tokens.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Words that nearly every vocabulary has as one token, with a space before.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as",
    "his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by", "but", "what",
    "all", "were", "when", "we", "there", "can", "an", "your", "which", "their", "said", "if",
    "do", "will", "each", "about", "how", "up", "out", "them", "then", "she", "many", "some", "so",
    "these", "would", "other", "into", "has", "more", "her", "two", "like", "him", "see", "time",
];

/// A chunk of a stream, or an answer as a whole.
#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Text<'a>>,
    #[serde(borrow, alias = "message")]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    finish_reason: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Text<'a>>,
    #[serde(borrow, alias = "reasoning_content")]
    reasoning: Option<Text<'a>>,
}

/// Text that is borrowed unless it holds escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Failure {
    Object { message: String },
    Other(serde_json::Value),
}

impl Failure {
    fn text(self) -> String {
        match self {
            Failure::Object { message } => message,
            Failure::Other(value) => value.to_string(),
        }
    }
}

impl<'a> Chunk<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Chunk<'a>, Error> {
        serde_json::from_slice(data).map_err(|source| {
            let found = String::from_utf8_lossy(&data[..data.len().min(200)]).into_owned();
            Error::Json { found, source }
        })
    }

    /// Notes what has come.
    pub(super) fn record(self, record: &mut Record) -> Result<(), Error> {
        if let Some(error) = self.error {
            return Err(Error::Failed { message: error.text() });
        }
        for choice in self.choices {
            let delta = choice.delta.map(|d| [d.reasoning, d.content]).unwrap_or_default();
            for Text(text) in delta.into_iter().chain([choice.text]).flatten() {
                record.text(&text);
            }
            record.finished |= choice.finish_reason.is_some_and(|r| !r.0.is_empty());
        }
        if let Some(usage) = self.usage {
            let cached = usage.prompt_tokens_details.and_then(|d| d.cached_tokens);
            record.usage(usage.prompt_tokens, usage.completion_tokens, cached);
        }
        Ok(())
    }
}

/// What an answer other than success says.
pub(super) fn refusal(status: StatusCode, body: &[u8]) -> String {
    let message = serde_json::from_slice::<Chunk>(body).ok().and_then(|c| c.error);
    let message = message.map_or_else(
        || String::from_utf8_lossy(&body[..body.len().min(200)]).trim().to_owned(),
        Failure::text,
    );
    format!("{} {message}", status.as_u16())
}

/// A model that a server lists.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Model {
    pub(super) id: String,
    /// The longest sequence in tokens, where the server tells.
    pub(super) max_model_len: Option<u32>,
}

/// The models of `/v1/models`; none where it is something else.
pub(super) fn models(body: &[u8]) -> Vec<Model> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    serde_json::from_slice(body).map_or_else(|_| Vec::new(), |models: Models| models.data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request { shared: vec![7, 8], own: vec![9], output: 3, hang_up: None, priority: None }
    }

    fn ask(endpoint: Endpoint, prompt: PromptKind) -> serde_json::Value {
        let (model, vocab) = ("m".to_owned(), 100);
        let (stream, ignore_eos, temperature) = (true, true, 0.0);
        let ask = Ask { model, endpoint, prompt, vocab, stream, ignore_eos, temperature };
        serde_json::from_slice(&ask.body(&request())).expect("JSON")
    }

    #[test]
    fn requests_ask_for_exact_lengths_and_usage() {
        let body = ask(Endpoint::Completions, PromptKind::Ids);
        assert_eq!(
            body,
            serde_json::json!({"model": "m", "prompt": [7, 8, 9], "max_tokens": 3, "temperature": 0.0,
                "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true})
        );
        let body = ask(Endpoint::Completions, PromptKind::Text);
        assert_eq!(body["prompt"], "it was for");
        let body = ask(Endpoint::Chat, PromptKind::Text);
        assert_eq!(body["messages"][0]["role"], "system");
        assert_eq!(body["messages"][1]["content"], words(&[9]));
        assert!(body.get("prompt").is_none());
    }

    #[test]
    fn chunks_of_both_routes_are_read() {
        let mut record = Record::test();
        let mut read =
            |text: &str| Chunk::parse(text.as_bytes()).and_then(|c| c.record(&mut record));
        read(r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}"#)
            .expect("role");
        read(r#"{"choices":[{"delta":{"content":"a\n"}}]}"#).expect("content");
        read(r#"{"choices":[{"text":"b","finish_reason":""}]}"#).expect("text");
        read(r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#).expect("finish");
        read(
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,
            "prompt_tokens_details":{"cached_tokens":8}}}"#,
        )
        .expect("usage");
        let error = read(r#"{"error":{"message":"no memory","code":null}}"#).expect_err("error");
        assert!(error.to_string().contains("no memory"));
        assert!(read("{").is_err());
        assert_eq!((record.pieces, record.finished), (2, true));
        assert_eq!((record.prompt_tokens, record.output_tokens), (Some(9), 4));
        assert_eq!(record.cached_tokens, Some(8));
    }
}
