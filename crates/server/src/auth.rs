//! API keys.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use subtle::ConstantTimeEq;

use super::app::App;
use super::error::ApiError;
use super::lanes::Client;
use super::routes;

/// The header in which Anthropic's clients bring a key.
pub(crate) const API_KEY: &str = "x-api-key";

/// The keys that requests may bring; without any, all may pass.
///
/// Only digests are kept: digests are of one length and compared in constant time, so that neither
/// a key nor its length can be found out from how long an answer takes.
#[derive(Debug, Default)]
pub(crate) struct Keys(Vec<[u8; 32]>);

/// Who asks: what keeps one tenant's cached prefixes from another's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Tenant(Option<[u8; 32]>);

impl Tenant {
    /// Whose share of the machine its requests use, where it has a key.
    pub(crate) fn client(self) -> Option<Client> {
        self.0.map(Client::Key)
    }

    /// The salt of its prefix cache. Requests with different `cache_salt` share nothing either.
    pub(crate) fn salt(self, cache_salt: Option<&str>) -> u64 {
        if self.0.is_none() && cache_salt.is_none() {
            return 0;
        }
        let mut digest = Sha256::new();
        digest.update(self.0.unwrap_or_default());
        digest.update(cache_salt.unwrap_or_default());
        let digest: [u8; 32] = digest.finalize().into();
        digest.iter().take(8).fold(0, |salt, byte| salt << 8 | u64::from(*byte))
    }
}

impl Keys {
    /// Keys from the command line and from a file.
    pub(crate) fn read(keys: &[String], file: Option<&Path>) -> Result<Keys, String> {
        let mut all = keys.to_vec();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .map_err(|e| format!("--api-key-file {}: {e}", path.display()))?;
            let lines =
                text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
            let before = all.len();
            all.extend(lines.map(str::to_owned));
            if all.len() == before {
                return Err(format!("--api-key-file {}: holds no key", path.display()));
            }
        }
        if all.iter().any(String::is_empty) {
            return Err("--api-key: expected a key, found nothing".to_owned());
        }
        Ok(Keys(all.iter().map(|k| Sha256::digest(k).into()).collect()))
    }

    /// Whether all may pass.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who brings these headers, if they may pass.
    fn tenant(&self, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if self.0.is_empty() {
            return Ok(Tenant(None));
        }
        let bare = || headers.get(API_KEY).map(|key| key.as_bytes().to_vec());
        let Some(given) = headers.get(header::AUTHORIZATION).and_then(key_of).or_else(bare) else {
            return Err(ApiError::unauthorized(
                "this server asks for an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            ));
        };
        let digest: [u8; 32] = Sha256::digest(given).into();
        // No early exit.
        let known = self.0.iter().fold(subtle::Choice::from(0), |k, key| k | key.ct_eq(&digest));
        if bool::from(known) {
            Ok(Tenant(Some(digest)))
        } else {
            Err(ApiError::unauthorized("the API key is not one that this server knows"))
        }
    }
}

/// The key of `Bearer KEY`, or of `Basic`, with which browsers ask their user, the password.
fn key_of(header: &axum::http::HeaderValue) -> Option<Vec<u8>> {
    let (scheme, rest) = header.to_str().ok()?.split_once(' ')?;
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = STANDARD.decode(rest).ok()?;
    let colon = pair.iter().position(|b| *b == b':')?;
    Some(pair[colon + 1..].to_vec())
}

/// Lets pass who has a key, and everybody to what is open.
pub(crate) async fn check(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    if !routes::is_open(request.uri().path()) {
        match app.keys.tenant(request.headers()) {
            Ok(tenant) => drop(request.extensions_mut().insert(tenant)),
            Err(error) => return error.into_response(),
        }
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn asked(keys: &Keys, value: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, value.parse().expect("a header"));
        keys.tenant(&headers).is_ok()
    }

    #[test]
    fn keys_open() {
        let keys = Keys::read(&["one".into(), "two".into()], None).expect("keys");
        assert!(asked(&keys, "Bearer one") && asked(&keys, "bearer two"));
        assert!(asked(&keys, &format!("Basic {}", STANDARD.encode("me:two"))));
        for wrong in ["Bearer three", "Bearer", "one", "Basic one", "Bearer one,two", "Bearer on"] {
            assert!(!asked(&keys, wrong), "{wrong}");
        }
        let bare = |key: &'static str| {
            let key = (HeaderName::from_static(API_KEY), HeaderValue::from_static(key));
            keys.tenant(&HeaderMap::from_iter([key])).is_ok()
        };
        assert!(bare("two") && !bare("three") && !bare("Bearer two"));
        assert!(keys.tenant(&HeaderMap::new()).is_err());
        assert!(Keys::default().tenant(&HeaderMap::new()).is_ok());
        assert!(Keys::read(&[String::new()], None).is_err());
    }

    #[test]
    fn tenants_share_no_cache() {
        let tenant = |key: u8| Tenant(Some([key; 32]));
        let salts = [
            Tenant(None).salt(None),
            Tenant(None).salt(Some("a")),
            tenant(1).salt(None),
            tenant(2).salt(None),
            tenant(1).salt(Some("a")),
        ];
        for (i, salt) in salts.iter().enumerate() {
            assert!(!salts[..i].contains(salt));
        }
        assert_eq!(tenant(1).salt(Some("a")), tenant(1).salt(Some("a")));
    }
}
