//! What a model is called: `ORG/NAME[@REVISION][:FILE]`.

use std::fmt;
use std::str::FromStr;

/// Characters of an organisation's or a model's name.
const LONGEST: usize = 96;

/// A model of the hub, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// `ORG/NAME`.
    id: String,
    revision: Option<String>,
    file: Option<String>,
}

/// No name of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected ORG/NAME, ORG/NAME@REVISION or ORG/NAME:Q4_K_M, found `{found}`")]
pub struct RepositoryError {
    /// What was given.
    pub found: String,
}

impl Repository {
    /// `ORG/NAME`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Which of a repository's GGUF files: a name, or how it is quantised.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Its folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}", self.id.replace('/', "--"))
    }
}

impl FromStr for Repository {
    type Err = RepositoryError;

    fn from_str(text: &str) -> Result<Repository, RepositoryError> {
        let error = || RepositoryError { found: text.chars().take(200).collect() };
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (id, revision) = match rest.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (rest, None),
        };
        let (organisation, name) = id.split_once('/').ok_or_else(error)?;
        let valid = is_name(organisation)
            && is_name(name)
            && revision.is_none_or(is_revision)
            && file.is_none_or(is_inside);
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let repository =
            Repository { id: id.to_owned(), revision: owned(revision), file: owned(file) };
        if valid { Ok(repository) } else { Err(error()) }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        self.revision.iter().try_for_each(|r| write!(f, "@{r}"))?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

/// What the hub takes as a name: `--` is what folders of the cache have in place of `/`.
fn is_name(text: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: char| c == '-' || c == '.';
    (1..=LONGEST).contains(&text.len())
        && text.chars().all(known)
        && !text.starts_with(edge)
        && !text.ends_with(edge)
        && !text.contains("--")
        && !text.contains("..")
}

fn is_revision(text: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
    is_inside(text) && text.chars().all(known)
}

/// Whether a path with `/` between its parts stays in the folder that it starts from, on every system.
pub(crate) fn is_inside(path: &str) -> bool {
    let plain = |part: &str| {
        (1..=255).contains(&part.len())
            && part != "."
            && part != ".."
            && !part.contains(['\\', ':'])
            && !part.contains(char::is_control)
    };
    path.len() <= 1024 && path.split('/').all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let parts = |text: &str| {
            let r: Repository = text.parse().expect(text);
            assert_eq!(r.to_string(), text);
            (r.id().to_owned(), r.revision().to_owned(), r.file().map(str::to_owned), r.folder())
        };
        let owned = str::to_owned;
        assert_eq!(
            parts("Qwen/Qwen3-0.6B"),
            (owned("Qwen/Qwen3-0.6B"), owned("main"), None, owned("models--Qwen--Qwen3-0.6B"))
        );
        let (id, revision, file, _) = parts("a/b@refs/pr/1:UD-Q4_K_XL/x.gguf");
        assert_eq!((&*id, &*revision), ("a/b", "refs/pr/1"));
        assert_eq!(file.as_deref(), Some("UD-Q4_K_XL/x.gguf"));
    }

    #[test]
    fn what_could_leave_a_folder_is_no_name() {
        for text in [
            "", "a", "a/", "/a", "/a/b", "a/b/c", "./a", "../a", "a/..", "a/b..c", "a/-b", "a/b.",
            "a--b/c", "~/a", "a/b@", "a/b@../x", "a/b@/x", "a/b@x//y", "a/b:", "a/b:../x",
            "a/b:/x", "a/b:c\\d", "a b/c", "a/b\n", "ä/b",
        ] {
            assert!(text.parse::<Repository>().is_err(), "{text:?}");
        }
        assert!(format!("{}/b", "a".repeat(97)).parse::<Repository>().is_err());
    }
}
