//! The server without its engine, for whoever tries bodies on it.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, header};
use infernum::{Frontend, ModelOptions};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

use super::app::{self, App};
use super::metrics::Metrics;
use super::model::{Entry, Served};
use super::worker::connect;
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
        let frontend = Frontend::open(&ModelOptions::default().open_bare()?)?;
        let (worker, ..) = connect(256, args.limits.queue, 1 << 20);
        let (entry, metrics) = (Entry::new("ember"), Metrics::new("infernum")?);
        entry.set(Served {
            name: entry.name.clone(),
            vocab: frontend.tokenizer().vocab_size(),
            width: 0,
            frontend,
            max_length,
            worker: Arc::new(worker),
            metrics: Arc::new(metrics.model(&entry.name, 16, 1)),
        });
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
            (status, answer["error"]["code"].as_str().unwrap_or_default().to_owned())
        };
        let text =
            r#"{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [3]}"#;
        let pairs =
            r#"{"input": "x", "query": "x", "documents": ["x"], "text_1": "x", "text_2": "x"}"#;
        let texts = ["/v1/chat/completions", "/v1/completions"];
        let vectors = ["/rerank", "/score", "/v1/embeddings", "/v1/rerank"];
        let mut all: Vec<&str> =
            texts.into_iter().chain(vectors).chain(["/detokenize", "/tokenize"]).collect();
        all.sort_unstable();
        let mut paths = rehearsal.paths().to_vec();
        paths.sort_unstable();
        assert_eq!(paths, all);
        for path in all {
            assert_eq!(ask(path, "{").0, 400, "{path}");
        }
        for path in vectors {
            let unfit = (400, "model_not_supported".to_owned());
            assert_eq!(ask(path, pairs), unfit, "{path}: it generates");
        }
        for path in texts {
            assert_eq!(ask(path, text), (503, "engine_gone".to_owned()), "{path}");
            let long = text.replace("\"x\"", &format!("\"{}\"", "x y ".repeat(100)));
            assert_eq!(ask(path, &long), (400, "context_length_exceeded".to_owned()), "{path}");
        }
        assert_eq!(ask("/detokenize", text), (200, String::new()));
    }
}
