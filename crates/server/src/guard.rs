//! What a request must be, whoever sends it: that no web page can drive a server that its user's
//! browser reaches and its author does not.
//!
//! A page of another origin may send a POST of `text/plain` without asking, and one whose name was
//! bound to 127.0.0.1 (DNS rebinding) is of the same origin to the browser. So bodies must be
//! `application/json`, which a browser asks about before it sends it to another origin; a request that
//! a browser says comes from another origin is refused; and a server that anyone on this machine may
//! use knows the names it is called by.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::error::{ApiError, quoted};
use super::listen::Address;
use super::routes;

/// Which names and origins requests may bring.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    /// Names for the header `host`, in lower case; all may pass where this is `None`.
    hosts: Option<Vec<String>>,
    /// Origins whose pages may call, as `--cors-origin` gives them; `*` is all.
    origins: Vec<String>,
}

impl Guard {
    /// `addresses` are listened on. Names are checked where they are this machine's alone and `open`, that is
    /// without keys, and wherever some are `allowed`.
    pub(crate) fn new(
        addresses: &[Address],
        open: bool,
        allowed: &[String],
        origins: &[String],
    ) -> Guard {
        let checks = !allowed.is_empty() || (open && addresses.iter().all(Address::is_local));
        let of_network = addresses.iter().filter_map(|address| match address {
            Address::Tcp(address) => Some(address.ip().to_string()),
            Address::Unix(_) => None,
        });
        let own = std::iter::once("localhost".to_owned()).chain(of_network);
        let hosts = own.chain(allowed.iter().map(|name| name.to_lowercase())).collect();
        Guard { hosts: checks.then_some(hosts), origins: origins.to_vec() }
    }

    /// Whether this server is called by one of its names.
    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        // Without the header, as HTTP/1.0 may be, it is no browser.
        let given = request.headers().get(header::HOST);
        let target = request.uri().authority().cloned();
        let named = given.map(|h| authority(h).ok_or_else(|| text(h)));
        for name in named.into_iter().chain(target.map(Ok)) {
            let known = name.as_ref().is_ok_and(|name| is_host(hosts, name));
            if !known {
                let name = name.map_or_else(|text| text, |name| name.to_string());
                return Err(ApiError::host(&name));
            }
        }
        Ok(())
    }

    /// Whether no browser says that a page of another origin asks (Fetch Metadata; RFC 6454).
    fn check_origin(&self, request: &Request) -> Result<(), ApiError> {
        let headers = request.headers();
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
        let own = headers.get("sec-fetch-site").is_some_and(|site| site == "same-origin");
        let listed = self.origins.iter().any(|o| o == "*" || o.as_bytes() == origin.as_bytes());
        // HTTP/2 has the host in the target.
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let host = host.or_else(|| request.uri().authority().map(Authority::as_str));
        if own || listed || is_same(origin, host) {
            return Ok(());
        }
        Err(ApiError::origin(&text(origin)))
    }
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn authority(value: &HeaderValue) -> Option<Authority> {
    Authority::try_from(value.as_bytes()).ok()
}

/// Whether a name, whatever its port, is one of `hosts` or an address of this machine alone.
fn is_host(hosts: &[String], name: &Authority) -> bool {
    let name = name.host().trim_end_matches('.').to_lowercase();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let loopback = address.parse::<IpAddr>().is_ok_and(|a| a.is_loopback());
    loopback || hosts.iter().any(|host| *host == name || host == address)
}

/// Whether an origin is that of the server itself, as the client calls it.
fn is_same(origin: &HeaderValue, host: Option<&str>) -> bool {
    let origin = origin.to_str().ok().and_then(|o| o.split_once("://"));
    origin.zip(host).is_some_and(|((_, origin), host)| origin.eq_ignore_ascii_case(host))
}

/// Lets pass who may call, and everybody to what is open.
pub(crate) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let checked = app.guard.check_host(&request);
    let checked = checked.and_then(|()| app.guard.check_origin(&request));
    match checked {
        Err(error) if !routes::is_open(request.uri().path()) => error.into_response(),
        _ => next.run(request).await,
    }
}

/// Lets pass bodies of JSON, and requests without a body that no page sends.
pub(crate) async fn json_only(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() && !request.headers().contains_key(header::ORIGIN) {
        return next.run(request).await;
    }
    let kind = request.headers().get(header::CONTENT_TYPE);
    let essence = kind.and_then(|k| k.to_str().ok()).map(|k| k.split(';').next().unwrap_or(k));
    let json = essence.is_some_and(|k| k.trim().eq_ignore_ascii_case("application/json"));
    if request.method() != Method::POST || json {
        return next.run(request).await;
    }
    let found = kind.map_or("none".to_owned(), |k| format!("`{}`", quoted(&text(k))));
    ApiError::media_type(&found).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::HeaderName;

    use super::*;

    fn guard(host: &str, open: bool, allowed: &[&str], origins: &[&str]) -> Guard {
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let address = format!("{host}:8000").parse().expect("an address");
        Guard::new(&[address], open, &owned(allowed), &owned(origins))
    }

    fn host(guard: &Guard, host: &str) -> bool {
        let request = axum::http::Request::get("/version").header("host", host);
        guard.check_host(&request.body(Body::empty()).expect("a request")).is_ok()
    }

    #[test]
    fn a_server_for_this_machine_knows_its_names() {
        let local = guard("127.0.0.1", true, &["Box.lan"], &[]);
        for name in
            ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "box.lan:80", "localhost."]
        {
            assert!(host(&local, name), "{name}");
        }
        for name in [
            "evil.example",
            "localhost.evil.example",
            "192.168.0.1",
            "127.0.0.1.evil.example",
            "",
            "a b",
        ] {
            assert!(!host(&local, name), "{name}");
        }
        assert!(host(&guard("0.0.0.0", true, &[], &[]), "any.example"));
        assert!(host(&guard("127.0.0.1", false, &[], &[]), "any.example"), "it asks for a key");
        assert!(!host(&guard("0.0.0.0", false, &["x"], &[]), "any.example"), "names were given");
        // The target of a proxy's request counts, too.
        let request = axum::http::Request::get("http://evil.example/").header("host", "localhost");
        assert!(local.check_host(&request.body(Body::empty()).expect("a request")).is_err());
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let asks = |guard: &Guard, headers: &[(&'static str, &'static str)]| {
            let pair = |(name, value): &(&'static str, &'static str)| {
                (HeaderName::from_static(name), HeaderValue::from_static(value))
            };
            let mut request = Request::default();
            request.headers_mut().extend(headers.iter().map(pair));
            guard.check_origin(&request).is_ok()
        };
        let none = guard("127.0.0.1", true, &[], &[]);
        let own = ("host", "localhost:8000");
        assert!(asks(&none, &[own]), "no browser");
        assert!(asks(&none, &[own, ("origin", "http://localhost:8000")]));
        for origin in ["http://localhost:3000", "https://evil.example", "null", ""] {
            assert!(!asks(&none, &[own, ("origin", origin)]), "{origin}");
        }
        // Behind a proxy that has a name of its own.
        let proxied = [own, ("origin", "https://llm.example"), ("sec-fetch-site", "same-origin")];
        assert!(asks(&none, &proxied));
        assert!(!asks(&none, &[proxied[0], proxied[1], ("sec-fetch-site", "same-site")]));
        let some = guard("127.0.0.1", true, &[], &["https://app.example"]);
        assert!(asks(&some, &[own, ("origin", "https://app.example")]));
        assert!(!asks(&some, &[own, ("origin", "https://app.example.evil")]));
        assert!(asks(&guard("[::1]", true, &[], &["*"]), &[own, ("origin", "null")]));
    }
}
