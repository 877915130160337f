//! `infernum health`: asks a running server whether it is ready, for container and service managers.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use infernum_tools::report::{self, Outcome};

#[derive(clap::Args)]
pub(crate) struct Args {
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

pub(crate) fn run(args: &Args) -> Outcome {
    let port = match (args.port, std::env::var("INFERNUM_PORT")) {
        (Some(port), _) => port,
        (None, Ok(text)) => {
            text.parse().map_err(|e| format!("INFERNUM_PORT: `{text}` is no port: {e}"))?
        }
        (None, Err(_)) => 8000,
    };
    let place = format!("{}:{port}", args.host);
    let answer = ask(&place, Duration::from_secs(args.timeout))
        .map_err(|e| format!("no answer from http://{place}/health: {e}"))?;
    match answer.split(' ').nth(1) {
        Some("200") => report::line("ready"),
        Some("503") => Err("the server runs, but is not ready (503)".into()),
        _ => {
            Err(format!("expected HTTP status 200 from http://{place}/health, found `{answer}`")
                .into())
        }
    }
}

/// The first line of the answer to `GET /health`.
fn ask(place: &str, timeout: Duration) -> std::io::Result<String> {
    let none = || std::io::Error::other("the name has no address");
    let address = place.to_socket_addrs()?.next().ok_or_else(none)?;
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    write!(stream, "GET /health HTTP/1.1\r\nhost: {place}\r\nconnection: close\r\n\r\n")?;
    let mut line = String::new();
    let limited = std::io::Read::take(stream, 1024);
    BufReader::new(limited).read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
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
        assert_eq!(said("HTTP/1.1 200 OK\r\n\r\n"), Ok(()));
        assert!(
            said("HTTP/1.1 503 Service Unavailable\r\n\r\n")
                .is_err_and(|e| e.contains("not ready"))
        );
        assert!(
            said("HTTP/1.1 404 Not Found\r\n\r\n")
                .is_err_and(|e| e.contains("found `HTTP/1.1 404"))
        );
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
