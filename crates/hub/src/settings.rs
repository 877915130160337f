//! Where the hub and its cache are, and who asks: what Hugging Face's tools read from the environment.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::HubError;

/// The hub, where no other is named.
const ENDPOINT: &str = "https://huggingface.co";

/// What is asked, and how.
#[derive(Clone)]
pub struct Settings {
    /// The hub's address.
    pub endpoint: String,
    /// The folder that repositories lie in; none where there is no home.
    pub cache: Option<PathBuf>,
    /// Who asks.
    pub token: Option<String>,
    /// Ask nobody.
    pub offline: bool,
    /// PEM file of the certificates that are trusted, in place of those that browsers trust.
    pub certificates: Option<PathBuf>,
    /// How often something is tried that fails without getting further.
    pub tries: u32,
    /// How long the first wait between tries is; each is twice as long as the one before.
    pub pause: Duration,
    /// How long the hub may be silent.
    pub patience: Duration,
}

/// Says all but the token.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// As the environment has it.
    pub fn from_env() -> Result<Settings, HubError> {
        Settings::of(&|name| std::env::var(name).ok())
    }

    /// As these variables have it.
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Settings, HubError> {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let user = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        let home = path("HF_HOME").or_else(|| user.map(|cache| cache.join("huggingface")));
        let hub = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file =
            path("HF_TOKEN_PATH").or_else(|| home.as_ref().map(|home| home.join("token")));
        let token = match get("HF_TOKEN").or_else(|| get("HUGGING_FACE_HUB_TOKEN")) {
            Some(token) => Some(token),
            None => token_file.map(read_token).transpose()?.flatten(),
        };
        Ok(Settings {
            endpoint: get("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()),
            cache: hub.or_else(|| home.map(|home| home.join("hub"))),
            token: token.map(|token| token.trim().to_owned()),
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
                .iter()
                .any(|n| get(n).is_some_and(|v| is_on(&v))),
            certificates: path("SSL_CERT_FILE"),
            tries: 5,
            pause: Duration::from_millis(500),
            patience: Duration::from_secs(30),
        })
    }
}

/// The token that a login has left, if there was one.
fn read_token(path: PathBuf) -> Result<Option<String>, HubError> {
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text).filter(|text| !text.trim().is_empty())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HubError::Io { path, source }),
    }
}

fn is_on(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.trim().to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn of(set: &[(&str, &str)]) -> Settings {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Settings::of(&find).expect("settings")
    }

    #[test]
    fn the_cache_is_where_other_tools_have_it() {
        let cache = |set: &[(&str, &str)]| of(set).cache;
        let found = |path: &str| Some(PathBuf::from(path));
        assert_eq!(cache(&[("HOME", "/h")]), found("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), found("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/f")]), found("/f/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), found("/c"));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn a_token_is_of_the_environment_or_of_a_login() {
        let dir = tempfile::tempdir().expect("a folder");
        let home = dir.path().to_str().expect("UTF-8");
        assert_eq!(of(&[("HF_HOME", home)]).token, None);
        std::fs::write(dir.path().join("token"), "hf_login\n").expect("written");
        assert_eq!(of(&[("HF_HOME", home)]).token.as_deref(), Some("hf_login"));
        let given = of(&[("HF_HOME", home), ("HF_TOKEN", " hf_given ")]);
        assert_eq!(given.token.as_deref(), Some("hf_given"));
        assert!(!format!("{given:?}").contains("hf_given"), "{given:?}");
        let path = Path::new(home).join("token").display().to_string();
        assert_eq!(of(&[("HF_TOKEN_PATH", &path)]).token.as_deref(), Some("hf_login"));
    }

    #[test]
    fn offline_is_a_switch() {
        for (value, expected) in [("1", true), ("YES", true), ("0", false), ("", false)] {
            assert_eq!(of(&[("HF_HUB_OFFLINE", value)]).offline, expected, "{value}");
        }
        assert_eq!(of(&[]).endpoint, ENDPOINT);
    }
}
