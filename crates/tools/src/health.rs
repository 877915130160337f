//! `infernum health`: asks a running server whether it is ready, for container and service managers.

use std::time::Duration;

use hyper::StatusCode;

use crate::http::Http;
use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// Where the server listens.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Its port; INFERNUM_PORT, or 8000, when left out.
    #[arg(long)]
    port: Option<u16>,
    /// Seconds to wait for an answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
}

/// Asks; an error unless it is ready.
pub fn run(args: &Args) -> Outcome {
    let port = match (args.port, std::env::var("INFERNUM_PORT")) {
        (Some(port), _) => port,
        (None, Ok(text)) => {
            text.parse().map_err(|e| format!("INFERNUM_PORT: `{text}` is no port: {e}"))?
        }
        (None, Err(_)) => 8000,
    };
    let url = format!("http://{}:{port}", args.host);
    let status = ask(&url, Duration::from_secs(args.timeout))
        .map_err(|e| format!("no answer from {url}/health: {}", report::chain(&*e)))?;
    match status.as_u16() {
        200 => report::line("ready"),
        503 => Err("the server runs, but is not ready (503)".into()),
        other => Err(format!("expected HTTP status 200 from {url}/health, found {other}").into()),
    }
}

/// The status of the answer to `GET /health`.
fn ask(url: &str, timeout: Duration) -> Result<StatusCode, Box<dyn std::error::Error>> {
    let server = Http::new(url, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = async { tokio::time::timeout(timeout, server.get("/health")).await };
    let late = |_| format!("none within {} s", timeout.as_secs());
    let (status, _) = runtime.block_on(answer).map_err(late)??;
    Ok(status)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    /// What the command says to a server that answers one request with `answer`.
    fn said(answer: &'static str) -> Result<(), String> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("a request");
            let _ = stream.write_all(answer.as_bytes());
            line
        });
        let args = Args { host: "127.0.0.1".into(), port: Some(port), timeout: 5 };
        let outcome = run(&args).map_err(|e| e.to_string());
        assert_eq!(server.join().expect("no panic"), "GET /health HTTP/1.1\r\n");
        outcome
    }

    #[test]
    fn only_200_is_ready() {
        assert_eq!(said("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"), Ok(()));
        assert!(
            said("HTTP/1.1 503 Service Unavailable\r\n\r\n")
                .is_err_and(|e| e.contains("not ready"))
        );
        assert!(said("HTTP/1.1 404 Not Found\r\n\r\n").is_err_and(|e| e.contains("found 404")));
        assert!(said("").is_err());
    }

    #[test]
    fn silence_is_an_error() {
        let port = TcpListener::bind("127.0.0.1:0")
            .expect("a port")
            .local_addr()
            .expect("an address")
            .port();
        let args = Args { host: "127.0.0.1".into(), port: Some(port), timeout: 1 };
        assert!(run(&args).is_err_and(|e| e.to_string().contains("no answer")));
    }
}
