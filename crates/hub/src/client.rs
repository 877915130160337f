//! What is asked of a hub, and what it says.

use std::thread::sleep;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use ureq::http::{HeaderMap, HeaderValue, Method, Request, Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::{HubError, shown};
use crate::repository::{Repository, is_inside};
use crate::settings::Settings;

/// What stands for itself in a part of an address.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// Redirects that are followed.
const REDIRECTS: usize = 6;
/// Bytes of a repository's description; one with ten thousand files has some two million.
const LONGEST_INFO: u64 = 16 << 20;
/// The longest wait between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A hub as it is asked.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<HeaderValue>,
    pub(crate) tries: u32,
    pub(crate) pause: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// What a hub says of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    /// What the file is called by its content.
    pub(crate) etag: String,
    pub(crate) size: u64,
}

impl Metadata {
    /// The SHA-256 of the content: the etag of files that are stored by it, which large ones are.
    pub(crate) fn sha256(&self) -> Option<&str> {
        let is_digest = self.etag.len() == 64 && self.etag.bytes().all(|b| b.is_ascii_hexdigit());
        is_digest.then_some(&*self.etag)
    }
}

/// Which redirects are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    All,
    /// Those to the same host: what others say of a file is not what the hub says.
    SameHost,
}

impl Client {
    pub(crate) fn new(settings: &Settings) -> Result<Client, HubError> {
        let endpoint = settings.endpoint.trim().trim_end_matches('/').to_owned();
        let uri: Option<Uri> = endpoint.parse().ok();
        if uri.as_ref().and_then(origin).is_none() {
            return Err(HubError::Endpoint { found: shown(&endpoint) });
        }
        let token = settings.token.as_ref().map(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"));
            value.iter_mut().for_each(|v| v.set_sensitive(true));
            value.map_err(|_| HubError::Token)
        });
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0) // here, where it is known who gets the token
            .user_agent(concat!("infernum/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(10).min(settings.patience)))
            .timeout_recv_response(Some(settings.patience))
            .timeout_per_read(Some(settings.patience))
            .tls_config(TlsConfig::builder().root_certs(trusted(settings)?).build());
        Ok(Client {
            agent: config.build().into(),
            endpoint,
            token: token.transpose()?,
            tries: settings.tries.max(1),
            pause: settings.pause,
        })
    }

    /// The commit that the repository's revision is, and the names of its files.
    pub(crate) fn info(&self, repository: &Repository) -> Result<(String, Vec<String>), HubError> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let revision = utf8_percent_encode(repository.revision(), PLAIN);
        let url = format!("{}/api/models/{}/revision/{revision}", self.endpoint, repository.id());
        // Without a hub there may be the cache: no long wait for it.
        self.again_and_again(2, || {
            let (response, url) = self.send(&Method::GET, &url, None, Follow::All)?;
            let response = self.success(response, &url, repository, "")?;
            let answer = |message: String| HubError::Answer { url: url.clone(), message };
            let body = response.into_body().into_with_config().limit(LONGEST_INFO).read_to_vec();
            let body = body.map_err(|error| unreachable(&url, &error))?;
            let info: Info = serde_json::from_slice(&body)
                .map_err(|e| answer(format!("expected a model's description: {e}")))?;
            if !is_tag(&info.sha) {
                let found = shown(&info.sha);
                return Err(answer(format!("`sha`: expected a commit, found `{found}`")));
            }
            let names = info.siblings.into_iter().map(|s| s.rfilename);
            Ok((info.sha, names.filter(|name| is_inside(name)).collect()))
        })
    }

    /// What the hub says of a file.
    pub(crate) fn metadata(
        &self,
        (repository, commit): (&Repository, &str),
        name: &str,
    ) -> Result<Metadata, HubError> {
        let url = self.file_url(repository, commit, name);
        self.again_and_again(self.tries, || {
            let (response, url) = self.send(&Method::HEAD, &url, None, Follow::SameHost)?;
            let (headers, redirected) =
                (response.headers().clone(), response.status().is_redirection());
            if !redirected {
                self.success(response, &url, repository, name)?;
            }
            let answer = |message: String| HubError::Answer { url: url.clone(), message };
            let etag = text(&headers, "x-linked-etag").or_else(|| text(&headers, "etag"));
            let etag = etag.map(|tag| tag.trim_start_matches("W/").trim_matches('"'));
            let etag = etag.filter(|tag| is_tag(tag)).ok_or_else(|| {
                answer(format!("expected an etag of `{name}` that can be a file's name"))
            })?;
            // The length of a redirect is its own.
            let own = text(&headers, "content-length").filter(|_| !redirected);
            let size = text(&headers, "x-linked-size").or(own).and_then(|size| size.parse().ok());
            let size = size.ok_or_else(|| answer(format!("expected the size of `{name}`")))?;
            Ok(Metadata { name: name.to_owned(), etag: etag.to_owned(), size })
        })
    }

    /// A file's bytes from `start` on, and from where on they are.
    pub(crate) fn read(
        &self,
        (repository, commit): (&Repository, &str),
        name: &str,
        start: u64,
    ) -> Result<(u64, Body), HubError> {
        let url = self.file_url(repository, commit, name);
        let (response, url) = self.send(&Method::GET, &url, Some(start), Follow::All)?;
        let status = response.status().as_u16();
        if status == 416 {
            // There are not that many bytes: another beginning than this file's.
            let (response, url) = self.send(&Method::GET, &url, None, Follow::All)?;
            return Ok((0, self.success(response, &url, repository, name)?.into_body()));
        }
        let response = self.success(response, &url, repository, name)?;
        let range = text(response.headers(), "content-range");
        let from: Option<u64> =
            range.and_then(|r| r.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok());
        match (status, from) {
            (206, Some(from)) if from == start => Ok((start, response.into_body())),
            (206, _) => {
                let message = format!("expected `{name}` from byte {start} on, found another part");
                Err(HubError::Answer { url, message })
            }
            _ => Ok((0, response.into_body())),
        }
    }

    fn file_url(&self, repository: &Repository, commit: &str, name: &str) -> String {
        let parts: Vec<String> =
            name.split('/').map(|part| utf8_percent_encode(part, PLAIN).to_string()).collect();
        format!("{}/{}/resolve/{commit}/{}", self.endpoint, repository.id(), parts.join("/"))
    }

    /// Sends a request on, as far as redirects are to be followed. The token goes to the hub alone.
    fn send(
        &self,
        method: &Method,
        url: &str,
        start: Option<u64>,
        follow: Follow,
    ) -> Result<(Response<Body>, String), HubError> {
        let home = self.endpoint.parse().ok().as_ref().and_then(origin);
        let mut url = url.to_owned();
        for _ in 0..REDIRECTS {
            let answer =
                |message: &str| HubError::Answer { url: shown(&url), message: message.to_owned() };
            let uri: Uri = url.parse().map_err(|_| answer("is no address"))?;
            let at = origin(&uri).ok_or_else(|| answer("expected http:// or https://"))?;
            let mut request = Request::builder().method(method).uri(uri.clone());
            // Sizes are those of the file itself.
            request = request.header(header::ACCEPT_ENCODING, "identity");
            if let Some(start) = start.filter(|start| *start > 0) {
                request = request.header(header::RANGE, format!("bytes={start}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| home.as_ref() == Some(&at)) {
                request = request.header(header::AUTHORIZATION, token);
            }
            let request = request.body(()).map_err(|_| answer("is no address"))?;
            let response = self.agent.run(request).map_err(|error| unreachable(&url, &error))?;
            let location = text(response.headers(), "location");
            let Some(location) = location.filter(|_| response.status().is_redirection()) else {
                return Ok((response, url));
            };
            let next =
                join(&uri, location).ok_or_else(|| answer("redirects to what is no address"))?;
            let to = next.parse().ok().as_ref().and_then(origin);
            let to = to.ok_or_else(|| answer("redirects to what is no address"))?;
            if to != at && follow == Follow::SameHost {
                return Ok((response, url));
            }
            if at.scheme == "https" && to.scheme != "https" {
                return Err(answer("redirects to an address without encryption"));
            }
            url = next;
        }
        Err(HubError::Answer { url: shown(&url), message: "redirects again and again".to_owned() })
    }

    /// An answer that is one: else what is wrong, in words that say what to do.
    fn success(
        &self,
        response: Response<Body>,
        url: &str,
        repository: &Repository,
        file: &str,
    ) -> Result<Response<Body>, HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let (endpoint, id) = (self.endpoint.clone(), repository.id().to_owned());
        let (code, token) = (text(response.headers(), "x-error-code"), self.token.is_some());
        Err(match (status.as_u16(), code) {
            (401, Some("GatedRepo")) | (403, _) => HubError::Gated { endpoint, id, token },
            (404, Some("RevisionNotFound")) => {
                HubError::Revision { id, revision: repository.revision().to_owned() }
            }
            (404, Some("EntryNotFound")) => HubError::File { id, file: file.to_owned() },
            (401, _) if token => HubError::Refused { endpoint, id },
            // Who is not known is told of what is private as of what is not there.
            (401, _) => HubError::NotFound { endpoint, id, known: false },
            (404, _) => HubError::NotFound { endpoint, id, known: token },
            (status, _) => HubError::Status {
                url: shown(url.split('?').next().unwrap_or_default()),
                status,
                message: shown(text(response.headers(), "x-error-message").unwrap_or_default()),
            },
        })
    }

    /// What an attempt yields, of as many as `tries` while the error may pass.
    fn again_and_again<T>(
        &self,
        tries: u32,
        mut attempt: impl FnMut() -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        for tried in 1.. {
            match attempt() {
                Err(error) if error.is_passing() && tried < tries => self.wait(tried),
                done => return done,
            }
        }
        unreachable!("tries are counted up to their limit")
    }

    /// Waits after so many tries.
    pub(crate) fn wait(&self, tried: u32) {
        sleep(self.pause.saturating_mul(1 << tried.min(10)).min(LONGEST_PAUSE));
    }
}

/// Whose certificates are trusted.
fn trusted(settings: &Settings) -> Result<RootCerts, HubError> {
    let Some(path) = &settings.certificates else { return Ok(RootCerts::WebPki) };
    let bad = |message: String| HubError::Certificates { path: path.clone(), message };
    let pem = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
    let certificates: Vec<_> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
            Ok(_) => None,
            Err(error) => Some(Err(bad(error.to_string()))),
        })
        .collect::<Result<_, _>>()?;
    if certificates.is_empty() {
        return Err(bad("found none".to_owned()));
    }
    Ok(certificates.into())
}

/// Who answers at an address.
#[derive(Debug, PartialEq, Eq)]
struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

fn origin(uri: &Uri) -> Option<Origin> {
    let scheme = uri.scheme_str()?.to_lowercase();
    let port = match &*scheme {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let host = uri.host()?.to_lowercase();
    Some(Origin { scheme, host, port: uri.port_u16().unwrap_or(port) })
}

/// The address that one means by `location` which stands at `from`.
fn join(from: &Uri, location: &str) -> Option<String> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    if location.contains("://") {
        Some(location.to_owned())
    } else if location.starts_with("//") {
        Some(format!("{scheme}:{location}"))
    } else if location.starts_with('/') {
        Some(format!("{scheme}://{authority}{location}"))
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        Some(format!("{scheme}://{authority}{folder}/{location}"))
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// A commit or an etag, which becomes a file's name.
fn is_tag(text: &str) -> bool {
    (1..=128).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

fn unreachable(url: &str, error: &ureq::Error) -> HubError {
    // What stands after `?` may be a secret: addresses of files are signed there.
    let url = shown(url.split('?').next().unwrap_or_default());
    HubError::Unreachable { url, message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_joined_as_browsers_do() {
        let from: Uri = "https://a.example:8443/x/y?z".parse().expect("an address");
        for (location, expected) in [
            ("http://b/c", "http://b/c"),
            ("//b/c", "https://b/c"),
            ("/c?d", "https://a.example:8443/c?d"),
            ("c", "https://a.example:8443/x/c"),
        ] {
            assert_eq!(join(&from, location).as_deref(), Some(expected));
        }
    }

    #[test]
    fn another_port_is_another_origin() {
        let of = |text: &str| origin(&text.parse().expect("an address"));
        assert_eq!(of("https://HUB.example/x"), of("https://hub.example:443"));
        for other in ["http://hub.example", "https://hub.example:444", "https://x.hub.example"] {
            assert_ne!(of("https://hub.example"), of(other), "{other}");
        }
        assert!(of("ftp://hub.example").is_none() && of("/x").is_none());
    }

    #[test]
    fn what_becomes_a_file_name_is_plain() {
        assert!(is_tag("0123abcDEF-_2"));
        for tag in ["", ".", "..", "a/b", "a.b", "a\\b", "é"] {
            assert!(!is_tag(tag), "{tag}");
        }
    }
}
