//! How families of models write tool calls and reasoning: one file a family, in `models/dialects/`.
//!
//! A dialect is chosen by the model's chat template, which shows how calls are written. [`Parser`] takes a model's text
//! as it comes, and tells reasoning, content and calls apart; there is one for all dialects.

mod forms;
mod parser;
mod python;
mod scan;

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

pub use parser::{Parser, Part};

use crate::spec::{Library, LibraryError};

/// How a family writes calls and reasoning.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dialect {
    /// The file's name.
    pub name: String,
    /// Whose it is, in a line.
    pub doc: String,
    /// A template is of this dialect if it contains all texts of one of these lists.
    templates: Vec<Vec<String>>,
    /// It is not if it contains any of these.
    #[serde(default)]
    unless: Vec<String>,
    /// What stands around reasoning.
    #[serde(default)]
    pub reasoning: Option<Span>,
    /// How calls are written.
    #[serde(default)]
    pub calls: Option<Calls>,
    /// Markers around an answer that are no part of it.
    #[serde(default)]
    pub dropped: Vec<String>,
    /// Texts are messages with headers, of which each is reasoning, an answer or a call.
    #[serde(default)]
    pub channels: Option<Channels>,
    /// Characters of a call's id, where templates want so many.
    #[serde(default)]
    pub id_length: Option<usize>,
}

/// A text between two markers. White space at its ends is no part of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Before it.
    pub begin: String,
    /// After it.
    pub end: String,
}

/// How calls are written. Of several markers any is read, and the first is the one that is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    /// Around all calls of a turn.
    #[serde(default)]
    pub section: Option<Span>,
    /// Before a call, or, where calls form a list, before that.
    #[serde(default)]
    pub begin: Vec<String>,
    /// After it.
    #[serde(default)]
    pub end: Vec<String>,
    /// Between two calls.
    #[serde(default)]
    pub between: String,
    /// A text that begins with a call of a known tool is one, without a marker.
    #[serde(default)]
    pub bare: bool,
    /// How a call itself is written.
    pub form: Form,
}

/// How a call is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Form {
    /// `{"name": "f", "arguments": {…}}`
    Json {
        /// The key of the name.
        name: String,
        /// The key of the arguments; the first is the one that is written.
        arguments: Vec<String>,
        /// Calls are items of a list.
        #[serde(default)]
        list: bool,
        /// What is written before the name's key, such as an id.
        #[serde(default)]
        lead: String,
    },
    /// The name, a separator, and the arguments as JSON.
    Named {
        /// Before the name.
        #[serde(default)]
        before: String,
        /// Where the name ends: what comes after it and before the separator is a number of the call.
        #[serde(default)]
        cut: Option<String>,
        /// A number of the call is written between a colon and the separator.
        #[serde(default)]
        numbered: bool,
        /// Between name and arguments.
        separator: Vec<String>,
    },
    /// The name, then each argument between markers of its own, as text or JSON, as the tool's schema says.
    Tagged {
        /// After the name.
        after_name: Vec<String>,
        /// Before an argument's name.
        key: Vec<String>,
        /// Between an argument's name and its value, and what that is.
        value: Vec<(String, Kind)>,
        /// After an argument's value.
        value_end: Vec<String>,
        /// Between the last argument and the marker after a call.
        #[serde(default)]
        close: String,
    },
    /// `f(a=1, b="x")`, as Python has it.
    Python {
        /// Calls are items of a list.
        #[serde(default)]
        list: bool,
    },
}

/// What an argument's value is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum Kind {
    /// Text as it is.
    Text,
    /// JSON.
    Json,
    /// What the tool's schema says: text as it is for a string, JSON for all else.
    Typed,
}

/// Texts that are messages with headers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channels {
    /// Before a header. The first one is written by the template.
    pub start: String,
    /// Between a header and a body.
    pub body: String,
    /// After a body.
    pub end: Vec<String>,
    /// Before a tool's name, in headers of calls.
    pub recipient: String,
    /// A word in headers of reasoning.
    pub reasoning: String,
    /// The header of a call, written with `{name}`.
    pub call: String,
    /// The header of reasoning as it is written.
    pub thought: String,
}

/// A dialect's file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DialectError {
    /// It cannot be found or opened.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// It does not say what a dialect says.
    #[error("{file}:{line}:{column}: {message}")]
    Invalid {
        /// The file.
        file: String,
        /// Where.
        line: usize,
        /// Where in the line.
        column: usize,
        /// Why.
        message: String,
    },
}

impl Dialect {
    /// All dialects of a library, by name.
    pub fn all(library: &Library) -> Result<Vec<Dialect>, DialectError> {
        let files = library.folder("dialects")?;
        files.iter().map(|file| Dialect::read(&file.file, &file.text)).collect()
    }

    /// Of a file's text.
    pub fn read(file: &str, text: &str) -> Result<Dialect, DialectError> {
        let options = ron::Options::default()
            .with_default_extension(ron::extensions::Extensions::IMPLICIT_SOME);
        let invalid = |line, column, message| DialectError::Invalid {
            file: file.to_owned(),
            line,
            column,
            message,
        };
        let dialect: Dialect = options.from_str(text).map_err(|error| {
            invalid(error.span.start.line, error.span.start.col, error.code.to_string())
        })?;
        match dialect.problem() {
            Some(problem) => Err(invalid(1, 1, problem)),
            None => Ok(dialect),
        }
    }

    /// What would keep a parser from its work.
    fn problem(&self) -> Option<String> {
        let texts = |list: &[String], what: &str| {
            list.iter()
                .any(String::is_empty)
                .then(|| format!("{what}: expected texts that are not empty"))
        };
        if self.templates.iter().any(Vec::is_empty) {
            return Some("templates: expected lists of texts that are not empty".to_owned());
        }
        if let Some(span) = &self.reasoning
            && (span.begin.is_empty() || span.end.is_empty())
        {
            return Some("reasoning: expected texts that are not empty".to_owned());
        }
        let dropped = texts(&self.dropped, "dropped");
        let Some(calls) = &self.calls else { return dropped };
        if calls.begin.is_empty() && !calls.bare && calls.section.is_none() {
            return Some("calls: expected `begin`, `section` or `bare`".to_owned());
        }
        let (separators, kinds): (Vec<String>, &[Vec<String>]) = match &calls.form {
            Form::Named { separator, .. } => (separator.clone(), &[]),
            Form::Tagged { after_name, key, value, value_end, .. } => {
                let all = value.iter().map(|(text, _)| text.clone()).collect();
                (all, &[after_name.clone(), key.clone(), value_end.clone()])
            }
            Form::Json { .. } | Form::Python { .. } => (vec![String::from(" ")], &[]),
        };
        let missing = separators.is_empty() || kinds.iter().any(Vec::is_empty);
        let missing = missing.then(|| "form: expected a marker in each list".to_owned());
        let kinds = kinds.iter().find_map(|list| texts(list, "form"));
        let markers = texts(&calls.begin, "begin").or_else(|| texts(&calls.end, "end"));
        dropped.or(missing).or(kinds).or(markers).or_else(|| texts(&separators, "form"))
    }

    /// The dialect of a chat template: of several the one that names most of it.
    pub fn of_template(all: &[Dialect], template: &str) -> Option<Arc<Dialect>> {
        let said = |dialect: &Dialect| {
            let holds = |texts: &&Vec<String>| texts.iter().all(|text| template.contains(text));
            let size = |texts: &Vec<String>| texts.iter().map(String::len).sum::<usize>();
            let refused = dialect.unless.iter().any(|text| template.contains(text));
            let found = dialect.templates.iter().filter(holds).map(size).max();
            found.filter(|_| !refused)
        };
        let named = all.iter().filter_map(|dialect| Some((said(dialect)?, dialect)));
        // Of equals the first by name.
        let best = named.max_by(|a, b| a.0.cmp(&b.0).then(b.1.name.cmp(&a.1.name)));
        best.map(|(_, dialect)| Arc::new(dialect.clone()))
    }

    /// All texts that tell parts of an answer apart.
    pub fn markers(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.dropped.iter().map(String::as_str).collect();
        let spans =
            self.reasoning.iter().chain(self.calls.iter().filter_map(|c| c.section.as_ref()));
        all.extend(spans.flat_map(|s| [s.begin.as_str(), s.end.as_str()]));
        if let Some(calls) = &self.calls {
            all.extend(calls.begin.iter().chain(&calls.end).map(String::as_str));
            match &calls.form {
                Form::Named { separator, .. } => all.extend(separator.iter().map(String::as_str)),
                Form::Tagged { after_name, key, value, value_end, close } => {
                    let lists = after_name.iter().chain(key).chain(value_end);
                    all.extend(lists.map(String::as_str));
                    all.extend(value.iter().map(|(text, _)| text.as_str()));
                    all.push(close);
                }
                Form::Json { .. } | Form::Python { .. } => {}
            }
        }
        if let Some(c) = &self.channels {
            all.extend([&c.start, &c.body, &c.call, &c.thought].map(String::as_str));
            all.extend(c.end.iter().map(String::as_str));
        }
        all
    }

    /// Whether a prompt ends where reasoning has begun.
    pub fn begins_in_reasoning(&self, prompt: &str) -> bool {
        self.reasoning
            .as_ref()
            .is_some_and(|span| prompt.trim_end().ends_with(span.begin.trim_end()))
    }
}

/// The tools of a request: names, and schemas of their parameters.
#[derive(Clone, Debug, Default)]
pub struct Tools(pub Vec<(String, Value)>);

impl Tools {
    /// Whether there is a tool of that name.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(known, _)| known == name)
    }

    /// Whether an argument is a text, where its schema says that it is, or that it is not.
    pub fn is_text(&self, tool: &str, argument: &str) -> Option<bool> {
        let (_, schema) = self.0.iter().find(|(known, _)| known == tool)?;
        let kind = schema.get("properties")?.get(argument)?.get("type")?.as_str()?;
        Some(kind == "string")
    }
}

#[cfg(test)]
mod tests;
