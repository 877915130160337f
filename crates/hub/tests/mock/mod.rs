//! A hub in a few lines, as far as its clients see it: the description of a model, metadata of files, and the files, of
//! which the large ones are elsewhere.
#![allow(dead_code, reason = "tests use what they need of it")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const ID: &str = "org/name";

/// A model and how its hub behaves.
#[derive(Default)]
pub(crate) struct Model {
    /// Names and contents; what is at least [`LARGE`] bytes long is stored elsewhere.
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// Who may read it; all, where it is empty.
    pub(crate) token: &'static str,
    /// Names that are told beside those of files.
    pub(crate) also: Vec<String>,
    /// Answers to begin with that end after so many bytes.
    pub(crate) cuts: AtomicUsize,
    pub(crate) cut_after: usize,
    /// What is sent in place of an answer: a status and a code.
    pub(crate) refusal: Option<(u16, &'static str)>,
    pub(crate) ignores_ranges: bool,
    /// Contents of large files are sent with a byte changed, so many times.
    pub(crate) lies: AtomicUsize,
    /// More is sent than was told.
    pub(crate) longer: bool,
    /// What is told of the sizes of large files, in place of the truth.
    pub(crate) size: Option<usize>,
}

pub(crate) const LARGE: usize = 1000;

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) token: Option<String>,
    /// Whether it came to the host of large files.
    pub(crate) elsewhere: bool,
}

pub(crate) struct Mock {
    pub(crate) endpoint: String,
    pub(crate) model: Arc<Model>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Mock {
    pub(crate) fn start(model: Model) -> Mock {
        let (model, seen) = (Arc::new(model), Arc::new(Mutex::new(Vec::new())));
        let listen = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (hub, elsewhere) = (listen(), listen());
        let address = |l: &TcpListener| format!("http://{}", l.local_addr().expect("an address"));
        let (endpoint, other) = (address(&hub), address(&elsewhere));
        for (listener, is_elsewhere) in [(hub, false), (elsewhere, true)] {
            let (model, seen, other) = (model.clone(), seen.clone(), other.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (model, seen, other) = (model.clone(), seen.clone(), other.clone());
                    std::thread::spawn(move || {
                        let _ = answer(&stream, &model, &seen, (&other, is_elsewhere));
                    });
                }
            });
        }
        Mock { endpoint, model, seen }
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no panic").clone()
    }
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// What the hub calls contents.
pub(crate) fn etag(bytes: &[u8]) -> String {
    let digest = digest(bytes);
    if bytes.len() >= LARGE { digest } else { digest[..40].to_owned() }
}

fn answer(
    stream: &TcpStream,
    model: &Model,
    all: &Mutex<Vec<Seen>>,
    (other, is_elsewhere): (&str, bool),
) -> std::io::Result<()> {
    let (mut lines, mut out) = (BufReader::new(stream).lines(), stream);
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (mut range, mut token) = (None, None);
    for line in lines {
        let line = line?;
        match line.split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("range") => {
                range = Some(value.to_owned());
            }
            Some((name, value)) if name.eq_ignore_ascii_case("authorization") => {
                token = Some(value.to_owned());
            }
            None => break,
            Some(_) => {}
        }
    }
    let seen = Seen { method, path, range, token, elsewhere: is_elsewhere };
    all.lock().expect("no panic").push(seen.clone());
    let mut head = |status: &str, headers: &str, length: usize| {
        let common =
            format!("X-Repo-Commit: {COMMIT}\r\nConnection: close\r\nContent-Length: {length}\r\n");
        write!(out, "HTTP/1.1 {status}\r\n{common}{headers}\r\n")
    };
    if let Some((status, code)) = model.refusal {
        return head(&format!("{status} No"), &format!("X-Error-Code: {code}\r\n"), 0);
    }
    if !is_elsewhere
        && !model.token.is_empty()
        && seen.token.as_deref() != Some(&*format!("Bearer {}", model.token))
    {
        return head("401 No", "X-Error-Code: RepoNotFound\r\n", 0);
    }
    if seen.path == format!("/api/models/{ID}/revision/main") {
        let names = model.files.iter().map(|(name, _)| name).chain(&model.also);
        let names: Vec<String> = names.map(|n| format!("{{\"rfilename\": {n:?}}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", names.join(", "));
        head("200 OK", "", body.len())?;
        return out.write_all(body.as_bytes());
    }
    if seen.path.starts_with("/api/") {
        return head("404 No", "X-Error-Code: RevisionNotFound\r\n", 0);
    }
    // Small files are one redirect away on the same host, as the hub has them.
    let direct = format!("/direct/{COMMIT}/");
    let named = seen.path.strip_prefix(&format!("/{ID}/resolve/{COMMIT}/"));
    let name = named.or_else(|| seen.path.strip_prefix(&direct)).unwrap_or_default();
    let Some((_, bytes)) = model.files.iter().find(|(known, _)| known == name) else {
        return head("404 No", "X-Error-Code: EntryNotFound\r\n", 0);
    };
    let is_large = bytes.len() >= LARGE;
    if named.is_some() && !is_elsewhere {
        let to = if is_large { format!("{other}{}", seen.path) } else { format!("{direct}{name}") };
        let size = model.size.unwrap_or(bytes.len());
        let linked = format!("X-Linked-Etag: \"{}\"\r\nX-Linked-Size: {size}\r\n", etag(bytes));
        let linked = if is_large { linked } else { String::new() };
        return head("302 There", &format!("Location: {to}\r\n{linked}"), 0);
    }
    let tag = format!("ETag: \"{}\"\r\n", etag(bytes));
    if seen.method == "HEAD" {
        return head("200 OK", &tag, bytes.len());
    }
    let start = seen.range.as_ref().filter(|_| !model.ignores_ranges);
    let start: Option<usize> =
        start.and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let mut bytes = bytes.clone();
    let take = |count: &AtomicUsize| {
        count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
    };
    if is_large && take(&model.lies) {
        bytes[0] ^= 1;
    }
    if model.longer && is_large {
        bytes.push(0);
    }
    let (status, range) = match start {
        Some(start) if start >= bytes.len() => return head("416 No", "", 0),
        Some(start) => {
            let all = bytes.len();
            bytes.drain(..start);
            ("206 Part", format!("Content-Range: bytes {start}-{}/{all}\r\n", all - 1))
        }
        None => ("200 OK", String::new()),
    };
    head(status, &format!("{tag}{range}"), bytes.len())?;
    if is_large && bytes.len() > model.cut_after && take(&model.cuts) {
        bytes.truncate(model.cut_after);
    }
    out.write_all(&bytes)
}
