//! API keys.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use subtle::ConstantTimeEq;

use super::app::App;
use super::error::{ApiError, quoted};
use super::lanes::Client;
use super::limits::{Account, Limits, charged};
use super::routes;

/// The header in which Anthropic's clients bring a key.
pub(crate) const API_KEY: &str = "x-api-key";

/// The keys that requests may bring; without any, all may pass.
///
/// Only digests are kept: digests are of one length and compared in constant time, so that neither
/// a key nor its length can be found out from how long an answer takes.
#[derive(Debug, Default)]
pub(crate) struct Keys(Vec<Key>);

#[derive(Debug)]
struct Key {
    digest: [u8; 32],
    /// What it may use, where that is limited.
    account: Option<Arc<Account>>,
}

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
    /// Keys from the command line, and with their limits from a file; of those that were there `before`, what was used stays used.
    pub(crate) fn read(
        keys: &[String],
        file: Option<&Path>,
        before: &Keys,
    ) -> Result<Keys, String> {
        let mut all: Vec<(String, Limits)> =
            keys.iter().map(|key| (key.clone(), Limits::default())).collect();
        if let Some(path) = file {
            let fault = |message: String| format!("--api-key-file {}: {message}", path.display());
            let text = std::fs::read_to_string(path).map_err(|e| fault(e.to_string()))?;
            let listed = all.len();
            for (number, line) in (1..).zip(text.lines()) {
                let key = key_line(line).map_err(|e| fault(format!("line {number}: {e}")))?;
                all.extend(key);
            }
            if all.len() == listed {
                return Err(fault("holds no key".to_owned()));
            }
        }
        if all.iter().any(|(key, _)| key.is_empty()) {
            return Err("--api-key: expected a key, found nothing".to_owned());
        }
        let key = |(key, limits): (String, Limits)| {
            let digest: [u8; 32] = Sha256::digest(key).into();
            let before = before.0.iter().find(|key| key.digest == digest);
            let account = Account::open(limits, before.and_then(|key| key.account.as_deref()));
            Key { digest, account }
        };
        Ok(Keys(all.into_iter().map(key).collect()))
    }

    /// Whether all may pass.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who brings these headers, and what they may use, if they may pass.
    fn tenant(&self, headers: &HeaderMap) -> Result<(Tenant, Option<Arc<Account>>), ApiError> {
        if self.0.is_empty() {
            return Ok((Tenant(None), None));
        }
        let bare = || headers.get(API_KEY).map(|key| key.as_bytes().to_vec());
        let Some(given) = headers.get(header::AUTHORIZATION).and_then(key_of).or_else(bare) else {
            return Err(ApiError::unauthorized(
                "this server asks for an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            ));
        };
        let digest: [u8; 32] = Sha256::digest(given).into();
        // No early exit.
        let known = self.0.iter().fold(None, |known, key| {
            if bool::from(key.digest.ct_eq(&digest)) { Some(key) } else { known }
        });
        let known = known.ok_or_else(|| {
            ApiError::unauthorized("the API key is not one that this server knows")
        })?;
        Ok((Tenant(Some(digest)), known.account.clone()))
    }
}

/// A line of a file of keys: `KEY requests=60 tokens=100000`, both a minute and both optional; nothing in a comment or an empty line.
fn key_line(line: &str) -> Result<Option<(String, Limits)>, String> {
    let mut words = line.split_whitespace();
    let Some(key) = words.next().filter(|key| !key.starts_with('#')) else { return Ok(None) };
    let mut limits = Limits::default();
    for word in words {
        let fault = || {
            let found = quoted(word);
            format!("after the key, expected requests=N or tokens=N with N from 1, found `{found}`")
        };
        let (name, number) = word.split_once('=').ok_or_else(fault)?;
        let number = Some(number.parse().map_err(|_| fault())?);
        match name {
            "requests" => limits.requests = number,
            "tokens" => limits.tokens = number,
            _ => return Err(fault()),
        }
    }
    Ok(Some((key.to_owned(), limits)))
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

/// Lets pass who has a key and has not used all that it may, and everybody to what is open.
pub(crate) async fn check(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    if routes::is_open(request.uri().path()) {
        return next.run(request).await;
    }
    let (tenant, account) = match app.keys().tenant(request.headers()) {
        Ok(found) => found,
        Err(error) => return error.into_response(),
    };
    request.extensions_mut().insert(tenant);
    let Some(account) = account else { return next.run(request).await };
    // What only looks is free.
    let admitted = match request.method() {
        &Method::POST => account.admit(Instant::now()),
        _ => Ok(()),
    };
    let mut response = match admitted {
        Ok(()) => charged(Some(account.clone()), next.run(request)).await,
        Err(exceeded) => ApiError::rate(&exceeded).into_response(),
    };
    account.tell(response.headers_mut(), Instant::now());
    response
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
        let none = Keys::default();
        let keys = Keys::read(&["one".into(), "two".into()], None, &none).expect("keys");
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
        assert!(Keys::read(&[String::new()], None, &none).is_err());
    }

    #[test]
    fn keys_of_a_file_have_limits() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        let read = |text: &str, before: &Keys| {
            std::fs::write(&path, text).expect("written");
            Keys::read(&[], Some(&path), before)
        };
        let account = |keys: &Keys, key: &str| {
            let mut headers = HeaderMap::new();
            let value = format!("Bearer {key}").parse().expect("a header");
            headers.insert(header::AUTHORIZATION, value);
            keys.tenant(&headers).expect("a known key").1
        };
        let keys = read("# all of them\n\n one \ntwo requests=2 tokens=100\n", &Keys::default());
        let keys = keys.expect("keys");
        assert!(account(&keys, "one").is_none());
        let two = account(&keys, "two").expect("limits");
        let now = Instant::now();
        let admitted = |account: &Account| (0..9).filter(|_| account.admit(now).is_ok()).count();
        assert_eq!(admitted(&two), 2);
        // Read again, it has used what it had.
        let again = read("two requests=3\n", &keys).expect("keys");
        assert_eq!(admitted(&account(&again, "two").expect("limits")), 1);
        for wrong in ["k requests", "k requests=0", "k tokens=-1", "k coins=3", "k tokens=1e3"] {
            let message = read(&format!("one\n{wrong}\n"), &keys).expect_err(wrong);
            assert!(message.contains("line 2: after the key, expected requests=N"), "{message}");
        }
        assert!(read("# none\n", &keys).is_err());
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
