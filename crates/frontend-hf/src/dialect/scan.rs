//! Finding markers in a text that is not complete, and the ends of JSON values.

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A marker, from and to, and which it is.
    Marker(usize, usize, usize),
    /// None that begins before this byte; from there on, one may.
    Maybe(usize),
}

/// The first of some markers; of those that begin together, the longest. Where a text goes on after its end, what may
/// become a marker, or a longer one, is not decided.
pub(super) fn find(text: &str, markers: &[&str], last: bool) -> Found {
    let full =
        markers.iter().enumerate().filter_map(|(which, m)| Some((text.find(m)?, m.len(), which)));
    let first = full.min_by_key(|(at, length, which)| (*at, usize::MAX - *length, *which));
    let unfinished =
        if last { None } else { markers.iter().filter_map(|m| partial(text, m)).min() };
    match (first, unfinished) {
        (Some((at, length, which)), maybe) if maybe.is_none_or(|maybe| maybe > at) => {
            Found::Marker(at, at + length, which)
        }
        (_, Some(maybe)) => Found::Maybe(maybe),
        (_, None) => Found::Maybe(text.len()),
    }
}

/// Where a marker begins of which the text has but the beginning.
fn partial(text: &str, marker: &str) -> Option<usize> {
    let most = text.len().min(marker.len().saturating_sub(1));
    let starts = (text.len() - most..text.len()).filter(|at| text.is_char_boundary(*at));
    starts.into_iter().find(|at| marker.starts_with(&text[*at..]))
}

/// What a text begins with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// A marker, so long, and which it is.
    With(usize, usize),
    /// None.
    Otherwise,
    /// That is not decided.
    Undecided,
}

/// What a text begins with; the longest of several.
pub(super) fn begins(text: &str, markers: &[&str], last: bool) -> Begins {
    let longer = |m: &&&str| m.len() > text.len() && m.starts_with(text);
    if !last && markers.iter().any(|m| longer(&m)) {
        return Begins::Undecided;
    }
    let found = markers.iter().enumerate().filter(|(_, m)| text.starts_with(**m));
    let longest = found.max_by_key(|(_, m)| m.len());
    longest.map_or(Begins::Otherwise, |(which, m)| Begins::With(m.len(), which))
}

/// Follows a JSON value to its end.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonScan {
    depth: usize,
    string: bool,
    escaped: bool,
    begun: bool,
}

impl JsonScan {
    /// How many bytes of a text belong to the value, and whether it ends there.
    pub(super) fn take(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            if self.string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.string = false;
                        if self.depth == 0 {
                            return (at + 1, true);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' | b',' if self.depth == 0 => return (at, true),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                byte if byte.is_ascii_whitespace() && self.depth == 0 && self.begun => {
                    return (at, true);
                }
                byte if byte.is_ascii_whitespace() => continue,
                _ => {}
            }
            self.begun = true;
        }
        (text.len(), false)
    }
}
