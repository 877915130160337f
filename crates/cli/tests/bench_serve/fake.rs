//! A small OpenAI server whose times and mistakes are known.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// How the server behaves.
#[derive(Clone, Copy, Default)]
pub(crate) struct Manners {
    /// Before the first piece of text, and before each other.
    pub(crate) first: Duration,
    pub(crate) between: Duration,
    /// Each n-th completion is refused with 429, each n-th of the others breaks off; 0 for none.
    pub(crate) refuse_each: usize,
    pub(crate) break_each: usize,
    /// Refuses prompts of ids.
    pub(crate) text_only: bool,
    /// Tokens that come in one piece.
    pub(crate) together: usize,
    /// Tells how many tokens there were.
    pub(crate) usage: bool,
}

/// A running server; its thread ends with the test.
pub(crate) struct Fake {
    pub(crate) url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    manners: Manners,
    completions: AtomicUsize,
    hung_up: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
    bodies: Mutex<Vec<Value>>,
}

impl Fake {
    pub(crate) fn start(manners: Manners) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let state = Arc::new(State { manners, ..State::default() });
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                // A client that hangs up ends its connection's thread.
                thread::spawn(move || state.connection(stream));
            }
        });
        Fake { url, state }
    }

    /// Requests that were streaming when their clients went away.
    pub(crate) fn hung_up(&self) -> usize {
        self.state.hung_up.load(Ordering::SeqCst)
    }

    pub(crate) fn most_running(&self) -> usize {
        self.state.most_running.load(Ordering::SeqCst)
    }

    /// The completions that were asked for.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.state.bodies.lock().expect("no thread panics with it").clone()
    }
}

impl State {
    fn connection(&self, stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut writer = stream.try_clone().ok()?;
        let mut reader = BufReader::new(stream);
        loop {
            let (mut line, mut length) = (String::new(), 0);
            reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
            let path = line.split(' ').nth(1)?.to_owned();
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let Some((name, value)) = header.trim().split_once(':') else { break };
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse().ok()?;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).ok()?;
            match path.as_str() {
                "/health" => answer(&mut writer, "200 OK", "", "{}")?,
                "/v1/models" => {
                    let models = json!({"data": [{"id": "fake", "max_model_len": 400}]});
                    answer(&mut writer, "200 OK", "", &models.to_string())?;
                }
                "/metrics" => answer(&mut writer, "200 OK", "", &self.metrics())?,
                _ => self.completion(&mut writer, &path, &serde_json::from_slice(&body).ok()?)?,
            }
        }
    }

    /// Each completion waited for half a second.
    fn metrics(&self) -> String {
        let (n, name) = (self.completions.load(Ordering::SeqCst), "request_queue_time_seconds");
        let sum = n as f64 * 0.5;
        format!(
            "infernum:{name}_bucket{{le=\"0.4\"}} 0\ninfernum:{name}_bucket{{le=\"0.8\"}} {n}\n\
             infernum:{name}_bucket{{le=\"+Inf\"}} {n}\ninfernum:{name}_sum {sum}\n\
             infernum:{name}_count {n}\ninfernum:num_requests_running 0\n"
        )
    }

    fn completion(&self, writer: &mut TcpStream, path: &str, body: &Value) -> Option<()> {
        let manners = self.manners;
        let error = |message: &str| json!({"error": {"message": message}}).to_string();
        if manners.text_only && body["prompt"].is_array() {
            return answer(writer, "422 Unprocessable", "", &error("no ids"));
        }
        self.bodies.lock().ok()?.push(body.clone());
        let number = self.completions.fetch_add(1, Ordering::SeqCst) + 1;
        let each = |n: usize| n > 0 && number.is_multiple_of(n);
        if each(manners.refuse_each) {
            return answer(writer, "429 Too Many", "retry-after: 0\r\n", &error("full"));
        }
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        let streamed = self.stream(writer, path.contains("chat"), body, each(manners.break_each));
        if streamed.is_none() {
            self.running.fetch_sub(1, Ordering::SeqCst);
            let gone = usize::from(!each(manners.break_each));
            self.hung_up.fetch_add(gone, Ordering::SeqCst);
        }
        streamed
    }

    fn stream(&self, out: &mut TcpStream, chat: bool, body: &Value, breaks: bool) -> Option<()> {
        let manners = self.manners;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        out.write_all(head.as_bytes()).ok()?;
        if chat {
            event(out, &json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))?;
        }
        let (tokens, together) = (body["max_tokens"].as_u64()? as usize, manners.together.max(1));
        for piece in 0..tokens.div_ceil(together) {
            thread::sleep(if piece == 0 { manners.first } else { manners.between });
            let text = format!("é{piece} ");
            let choice =
                if chat { json!({"delta": {"content": text}}) } else { json!({"text": text}) };
            event(out, &json!({"choices": [choice], "usage": null}))?;
            if breaks {
                return None;
            }
        }
        event(out, &json!({"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]}))?;
        if manners.usage {
            let prompt = body["prompt"].as_array().map_or(7, Vec::len);
            event(
                out,
                &json!({"choices": [], "usage": {"prompt_tokens": prompt,
                "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 4}}}),
            )?;
        }
        // The client may send its next request once it has seen the end.
        self.running.fetch_sub(1, Ordering::SeqCst);
        chunk(out, b"data: [DONE]\n\n")?;
        out.write_all(b"0\r\n\r\n").ok()
    }
}

/// An event, cut in the middle of a character where it has one beyond ASCII.
fn event(out: &mut TcpStream, data: &Value) -> Option<()> {
    let text = format!(": alive\n\ndata: {data}\n\n");
    let cut = text.bytes().position(|b| b >= 0x80).map_or(text.len() / 2, |at| at + 1);
    chunk(out, &text.as_bytes()[..cut])?;
    chunk(out, &text.as_bytes()[cut..])
}

fn chunk(out: &mut TcpStream, bytes: &[u8]) -> Option<()> {
    let framed = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
    out.write_all(&framed).ok()
}

fn answer(out: &mut TcpStream, status: &str, headers: &str, body: &str) -> Option<()> {
    let length = body.len();
    write!(out, "HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}").ok()
}
