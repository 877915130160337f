//! The server without its engine, for whoever tries bodies on it.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, header};
use infernum::{Frontend, ModelOptions};
use infernum_link::Facts;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

use super::app::{self, App};
use super::metrics::Metrics;
use super::model::{Entry, Served};
use super::worker::{Line, Worker};
use super::{Args, routes};

/// The routes over the demo model, whose engine has stopped: a request is read, checked, rendered and encoded
/// as ever, and what is without fault ends with 503 and the code `engine_gone`.
pub struct Rehearsal {
    runtime: Runtime,
    router: Router,
    paths: Vec<String>,
}

impl Rehearsal {
    /// Takes sequences of up to `max_length` tokens, and a server's own limits otherwise.
    pub fn new(max_length: usize) -> Result<Rehearsal, Box<dyn std::error::Error>> {
        let args = Args::given(&[])?;
        let model = ModelOptions::default().open_bare()?;
        let frontend = Frontend::open(&model)?;
        let (entry, metrics) = (Entry::new("ember"), Metrics::new("infernum")?);
        let facts = Facts {
            max_length,
            vocab: frontend.tokenizer().vocab_size(),
            width: 0,
            blocks: 1,
            sequences: 256,
            queue: args.limits.queue,
            family: "llama".to_owned(),
            format: "safetensors".to_owned(),
            bytes: 0,
            on: String::new(),
        };
        // Nobody runs the engine.
        let (handle, _) = infernum_link::engine();
        let of_model = Arc::new(metrics.model(&entry.name, 16, 1));
        let (line, _) = Line::local(&handle, &facts, args.limits.queue, of_model.clone());
        let worker = Worker::new(vec![line], args.limits.unread());
        entry.set(Served::new("ember", frontend, facts, worker, of_model));
        let router = app::router(&Arc::new(App::new(&args, vec![entry], metrics)?));
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Rehearsal { runtime, router, paths: routes::taking_bodies() })
    }

    /// The paths that bodies are sent to.
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Sends a body; gives the status and the body of the answer.
    pub fn post(&self, path: &str, body: &[u8]) -> Result<(u16, Bytes), axum::Error> {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_vec())).map_err(axum::Error::new)?;
        self.runtime.block_on(async {
            let Ok(answer) = self.router.clone().oneshot(request).await;
            let status = answer.status().as_u16();
            Ok((status, to_bytes(answer.into_body(), usize::MAX).await?))
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn bodies_go_all_the_way_to_the_engine() {
        let rehearsal = Rehearsal::new(64).expect("the demo model");
        let ask = |path: &str, body: &str| {
            let (status, answer) = rehearsal.post(path, body.as_bytes()).expect("an answer");
            let answer: Value = serde_json::from_slice(&answer).expect("JSON");
            (status, answer)
        };
        let text = r#"{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [3],
            "input": "x", "max_tokens": 4}"#;
        let pairs =
            r#"{"input": "x", "query": "x", "documents": ["x"], "text_1": "x", "text_2": "x"}"#;
        let counting = ["/api/show", "/detokenize", "/tokenize", "/v1/messages/count_tokens"];
        let writing = [
            "/api/chat",
            "/api/generate",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
        ];
        let vectors = ["/rerank", "/score", "/v1/embeddings", "/v1/rerank"];
        let mut paths = rehearsal.paths().to_vec();
        paths.sort_unstable();
        let adapters = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];
        let mut all = [&counting[..], &writing, &vectors, &adapters].concat();
        all.sort_unstable();
        assert_eq!(paths, all);
        for path in all {
            assert_eq!(ask(path, "{").0, 400, "{path}");
        }
        for path in adapters {
            let (status, answer) = ask(path, r#"{"lora_name": "x", "lora_path": "x"}"#);
            let code = answer["error"]["code"].as_str();
            assert_eq!((status, code), (503, Some("engine_gone")), "{path}");
        }
        for path in vectors {
            let (status, answer) = ask(path, pairs);
            let code = answer["error"]["code"].as_str();
            assert_eq!((status, code), (400, Some("model_not_supported")), "{path}: it generates");
        }
        for path in writing {
            // Stored prompts, which there are none of.
            let text = match path {
                "/v1/responses" => text.replace("prompt", "unknown"),
                _ => text.to_owned(),
            };
            let (status, answer) = ask(path, &text);
            assert_eq!(status, 503, "{path}");
            assert!(answer.to_string().contains("the model's engine has stopped"), "{answer}");
            let long = text.replace("\"x\"", &format!("\"{}\"", "x y ".repeat(100)));
            let (status, answer) = ask(path, &long);
            assert_eq!(status, 400, "{path}");
            assert!(answer.to_string().contains("maximum context length"), "{answer}");
            // Each in the words of its API.
            let keys = |value: &Value| {
                value.as_object().map(|o| o.keys().cloned().collect::<Vec<_>>()).unwrap_or_default()
            };
            let shape = (keys(&answer).join(" "), keys(&answer["error"]).join(" "));
            let expected = match path {
                "/api/chat" | "/api/generate" => ("error", ""),
                "/v1/messages" => ("type error", "type message"),
                _ => ("error", "message type param code"),
            };
            assert_eq!((shape.0.as_str(), shape.1.as_str()), expected, "{path}: {answer}");
        }
        for path in ["/api/show", "/detokenize", "/v1/messages/count_tokens"] {
            assert_eq!(
                ask(path, text.replace("\"prompt\": \"x\", ", "").as_str()).0,
                200,
                "{path}"
            );
        }
    }
}
