//! What answers say beside what was asked for.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use super::read::Unknown;

/// Says what a request asked for and did not get.
pub(crate) const WARNING: HeaderName = HeaderName::from_static("x-infernum-warning");
/// Characters of that header: room for the names of unknown fields, and more.
const LONGEST_WARNING: usize = 2048;

/// What a request asked for and did not get.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Vec<String>);

impl Warnings {
    /// Names unknown fields, and those without effect.
    pub(crate) fn new(unknown: &Unknown, without_effect: &[&str]) -> Warnings {
        let mut warnings = Warnings::default();
        if let Some(names) = unknown.names() {
            warnings.add(format!("unknown fields were ignored: {names}"));
        }
        if !without_effect.is_empty() {
            warnings.add(format!("without effect here: {}", without_effect.join(", ")));
        }
        warnings
    }

    /// Adds others.
    pub(crate) fn join(&mut self, others: Warnings) {
        others.0.into_iter().for_each(|warning| self.add(warning));
    }

    pub(crate) fn add(&mut self, warning: String) {
        if !self.0.contains(&warning) {
            self.0.push(warning);
        }
    }

    /// Says them in a header.
    pub(crate) fn tell(&self, mut response: Response) -> Response {
        if self.0.is_empty() {
            return response;
        }
        let text = self.0.join("; ");
        let text: String = text.chars().filter(|c| (' '..='~').contains(c)).collect();
        let text: String = text.chars().take(LONGEST_WARNING).collect();
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().insert(WARNING, value);
        }
        response
    }
}
