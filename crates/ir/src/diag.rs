//! Errors that point into a text the user wrote.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

/// Something wrong at a place in a file: prints as `error: ..`, `file:line:col`, the line and a
/// caret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    /// The file, as the user named it.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub col: usize,
    /// What was expected and found, and what to do.
    pub message: String,
    // The line shown, with the byte range to mark in it.
    source_line: String,
    mark: Range<usize>,
    // Calls that led there, the innermost first. (A slice, as errors should be small.)
    calls: Box<[String]>,
}

/// Longest line shown whole; a longer one (a minified file) is cut around the mark.
const MAX_LINE: usize = 400;
/// Calls shown at either end of a longer list.
const SHOWN_CALLS: usize = 4;

impl SourceError {
    /// An error about `span`, a byte range of `text`.
    pub fn new(file: &str, text: &str, span: Range<usize>, message: impl Into<String>) -> Self {
        let at = floor_boundary(text, span.start);
        let line_start = text[..at].rfind('\n').map_or(0, |n| n + 1);
        let line_end = text[at..].find('\n').map_or(text.len(), |n| at + n);
        let from = floor_boundary(text, line_start.max(at.saturating_sub(MAX_LINE / 2)));
        let to = floor_boundary(text, line_end.min(from + MAX_LINE)).max(at);
        let mark_end = floor_boundary(text, span.end.clamp(at, to)).max(at);
        SourceError {
            file: file.to_owned(),
            line: text[..line_start].matches('\n').count() + 1,
            col: text[line_start..at].chars().count() + 1,
            message: message.into(),
            source_line: text[from..to].to_owned(),
            mark: at - from..mark_end - from,
            calls: Box::default(),
        }
    }

    /// The same error, found while following the call at `place`.
    #[must_use]
    pub fn called_from(mut self, place: &SourceError) -> Self {
        let call = format!("{}:{}:{}", place.file, place.line, place.col);
        self.calls = self.calls.into_iter().chain([call]).collect();
        self
    }

    /// Byte offset of `line` and `col` (from 1, in characters) in `text`.
    pub fn offset(text: &str, line: usize, col: usize) -> usize {
        let start = match line {
            0 | 1 => 0,
            _ => text.match_indices('\n').nth(line - 2).map_or(text.len(), |(i, _)| i + 1),
        };
        let rest = &text[start..];
        start + rest.char_indices().nth(col.saturating_sub(1)).map_or(rest.len(), |(i, _)| i)
    }
}

fn floor_boundary(text: &str, mut at: usize) -> usize {
    at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Something in a file that is allowed and likely a mistake. Prints as an error does, as `warning: ..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceWarning(pub SourceError);

impl SourceWarning {
    /// Where it is: the file, line and column.
    pub fn place(&self) -> (String, usize, usize) {
        (self.0.file.clone(), self.0.line, self.0.col)
    }
}

impl fmt::Display for SourceWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.render(&Level::WARNING, f)
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.render(&Level::ERROR, f)
    }
}

impl SourceError {
    fn render(&self, level: &Level<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = format!("{}:{}:{}", self.file, self.line, self.col);
        let report = &[level.clone().primary_title(&self.message).element(
            Snippet::source(&self.source_line)
                .line_start(self.line)
                .annotation(AnnotationKind::Primary.span(self.mark.clone())),
        )];
        let rendered = Renderer::plain().render(report);
        // The renderer counts columns within the line shown, which may be cut: name the place
        // ourselves.
        let mut lines = rendered.lines();
        writeln!(f, "{path}: {}", lines.next().unwrap_or_default())?;
        let body: Vec<&str> = lines.collect();
        f.write_str(&body.join("\n"))?;
        let all = self.calls.len();
        let hidden = SHOWN_CALLS..all.saturating_sub(SHOWN_CALLS);
        for (i, place) in self.calls.iter().enumerate() {
            if !hidden.contains(&i) {
                write!(f, "\ncalled from {place}")?;
            } else if i == hidden.start {
                write!(f, "\n.. {} more call(s)", hidden.len())?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for SourceError {}
