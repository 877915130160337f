//! "Did you mean" hints.

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
