//! A server to talk to, and what it answers.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest that anything here may take; reached only where something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernum"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).arg("serve").args(args);
    command.args(["--device", "cpu", "--port", "0"]);
    command
}

/// A server with the demo model; ends with the test.
pub(crate) struct Server {
    process: Child,
    pub(crate) port: u16,
    pub(crate) agent: ureq::Agent,
    pub(crate) key: Option<&'static str>,
    _folder: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start(args: &[&str]) -> Server {
        let server = Server::launch(args);
        wait("it is ready", || server.get("/health").status == 200);
        server
    }

    /// As soon as it listens.
    pub(crate) fn launch(args: &[&str]) -> Server {
        Server::spawn(command(args))
    }

    /// The server that a command is; as soon as it listens.
    pub(crate) fn spawn(mut command: Command) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let port_file: PathBuf = folder.path().join("port");
        command.arg("--port-file").arg(&port_file).stderr(Stdio::null());
        let process = command.spawn().expect("the binary runs");
        let read = || std::fs::read_to_string(&port_file).ok();
        wait("it listens", || read().is_some());
        let port = read().and_then(|t| t.trim().parse().ok()).expect("a port");
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        // A connection that is kept may be ended by the server just as it is used again.
        let config = config.timeout_global(Some(PATIENCE)).max_idle_connections(0);
        let agent = config.build().into();
        Server { process, port, agent, key: None, _folder: folder }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        let mut request = self.agent.get(self.url(path));
        if let Some(key) = self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        Answer::of(request.call().expect("an answer"))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(path, &body.to_string())
    }

    pub(crate) fn send(&self, path: &str, body: &str) -> Answer {
        Answer::of(self.open(path, body))
    }

    pub(crate) fn open(&self, path: &str, body: &str) -> ureq::http::Response<ureq::Body> {
        let mut request =
            self.agent.post(self.url(path)).header("content-type", "application/json");
        if let Some(key) = self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        request.send(body).expect("an answer")
    }

    /// A stream of events, line by line.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> impl BufRead + use<> {
        let response = self.open(path, &body.to_string());
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        BufReader::new(response.into_body().into_reader())
    }

    /// A line of /metrics.
    pub(crate) fn metric(&self, start: &str) -> f64 {
        let text = self.get("/metrics").text;
        let line = text.lines().find(|l| l.starts_with(start));
        let line = line.unwrap_or_else(|| panic!("{start} is not in\n{text}"));
        line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number")
    }

    /// Of all lines of /metrics that begin so, the sum.
    pub(crate) fn metrics(&self, start: &str) -> f64 {
        let text = self.get("/metrics").text;
        let lines = text.lines().filter(|l| l.starts_with(start));
        lines
            .map(|l| l.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()).expect("a number"))
            .sum()
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().expect("kill").success());
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait("it ends", || {
            status = self.process.try_wait().expect("its status");
            status.is_some()
        });
        status.expect("it ended")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: ureq::http::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn of(mut response: ureq::http::Response<ureq::Body>) -> Answer {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.body_mut().read_to_string().expect("text");
        Answer { status, headers, text }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().expect("text"))
    }

    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// Checks that it is an error of the one shape that all have.
    pub(crate) fn error(&self, status: u16, param: Option<&str>, code: Option<&str>) {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(self.header("content-type"), "application/json");
        let body = self.json();
        let keys =
            |v: &Value| v.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&body), ["error"]);
        assert_eq!(keys(&body["error"]), ["message", "type", "param", "code"]);
        assert!(body["error"]["message"].as_str().is_some_and(|m| !m.is_empty()));
        assert_eq!(body["error"]["param"], json!(param), "{}", self.text);
        assert_eq!(body["error"]["code"], json!(code), "{}", self.text);
    }
}

/// The JSON of a whole stream's frames, after checking the framing byte by byte.
pub(crate) fn frames(mut stream: impl Read) -> Vec<Value> {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("UTF-8");
    let text = text.strip_suffix("data: [DONE]\n\n").expect("it ends with [DONE]");
    let frame = |frame: &str| {
        let json = frame.strip_prefix("data: ").expect(frame);
        assert!(json.starts_with('{') && !json.contains('\n'), "{json}");
        serde_json::from_str(json).expect(json)
    };
    text.split_terminator("\n\n").map(frame).collect()
}

pub(crate) fn chat(content: &str) -> Value {
    json!({"model": "ember", "messages": [{"role": "user", "content": content}], "temperature": 0})
}

pub(crate) fn story(max_tokens: u64) -> Value {
    json!({"model": "ember", "prompt": "Once upon a time", "temperature": 0, "max_tokens": max_tokens})
}

/// Runs until it is cut off.
pub(crate) fn endless() -> Value {
    with(story(2000), json!({"ignore_eos": true, "stream": true}))
}

#[allow(clippy::needless_pass_by_value, reason = "json!(…) is what all give")]
pub(crate) fn with(mut request: Value, more: Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    request.as_object_mut().expect("an object").extend(more);
    request
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const TEXT: &str = "/v1/completions";
