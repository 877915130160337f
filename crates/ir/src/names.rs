//! What names may look like, and "did you mean" hints.

/// Longest name in IR text. Error messages repeat names, so a bound on one bounds the other.
pub(crate) const MAX_NAME: usize = 256;

/// True for the characters of a name in IR text.
pub(crate) fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// True for a name that IR text can hold.
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(is_name_char)
}

/// ` (did you mean `x`?)` for the known name nearest to `name`, or nothing when none is near.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    // The distance is quadratic in the lengths; no real name is this long.
    if name.len() > 128 {
        return String::new();
    }
    known
        .into_iter()
        .map(|k| (strsim::jaro_winkler(name, k), k))
        .filter(|(score, _)| *score > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map_or_else(String::new, |(_, k)| format!(" (did you mean `{k}`?)"))
}
