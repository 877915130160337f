//! Arguments as Python writes them, as JSON.

use serde_json::{Map, Value};

/// How deep values are nested at most.
const DEEPEST: usize = 64;

/// Follows `(…)` to its end: quotes and brackets hide what they hold.
#[derive(Clone, Debug, Default)]
pub(super) struct ParenScan {
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
}

impl ParenScan {
    /// How many bytes stand before the bracket that closes; `None` where it is not there yet.
    pub(super) fn take(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match (self.quote, byte) {
                _ if self.escaped => self.escaped = false,
                (Some(_), b'\\') => self.escaped = true,
                (Some(quote), byte) if quote == byte => self.quote = None,
                (None, b'"' | b'\'') => self.quote = Some(byte),
                (None, b'(' | b'[' | b'{') => self.depth += 1,
                (None, b')' | b']' | b'}') if self.depth == 0 => return Some(at),
                (None, b')' | b']' | b'}') => self.depth -= 1,
                _ => {}
            }
        }
        None
    }
}

/// `a=1, b="x"` as an object; `None` where it is none.
pub(super) fn arguments(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text };
    let mut all = Map::new();
    loop {
        reader.blank();
        if reader.rest.is_empty() {
            return Some(Value::Object(all));
        }
        let end = reader.rest.find('=')?;
        let name = reader.rest[..end].trim();
        if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
            return None;
        }
        reader.rest = &reader.rest[end + 1..];
        all.insert(name.to_owned(), reader.value(DEEPEST)?);
        reader.blank();
        if !reader.rest.is_empty() && !reader.takes(",") {
            return None;
        }
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn blank(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn takes(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, left: usize) -> Option<Value> {
        let left = left.checked_sub(1)?;
        self.blank();
        match self.rest.as_bytes().first()? {
            b'"' | b'\'' => self.string().map(Value::String),
            b'[' => self.items("]", left).map(Value::Array),
            b'(' => self.items(")", left).map(Value::Array),
            b'{' => self.fields(left).map(Value::Object),
            _ => self.word(),
        }
    }

    /// A number, or a name of Python's or JSON's.
    fn word(&mut self) -> Option<Value> {
        let stops = |c: char| ",)]}:".contains(c) || c.is_whitespace();
        let end = self.rest.find(stops).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            number => serde_json::from_str(number).ok(),
        }
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.rest.chars().next().filter(|c| ['"', '\''].contains(c))?;
        let (mut out, mut chars) = (String::new(), self.rest[1..].char_indices());
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.rest = &self.rest[at + 2..];
                    return Some(out);
                }
                '\\' => match chars.next()?.1 {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'u' => {
                        let hex: String = chars.by_ref().take(4).map(|(_, c)| c).collect();
                        out.push(char::from_u32(u32::from_str_radix(&hex, 16).ok()?)?);
                    }
                    other => out.push(other),
                },
                c => out.push(c),
            }
        }
        None
    }

    fn items(&mut self, end: &str, left: usize) -> Option<Vec<Value>> {
        self.rest = &self.rest[1..];
        let mut all = Vec::new();
        loop {
            self.blank();
            if self.takes(end) {
                return Some(all);
            }
            all.push(self.value(left)?);
            self.blank();
            if !self.takes(",") && !self.rest.starts_with(end) {
                return None;
            }
        }
    }

    fn fields(&mut self, left: usize) -> Option<Map<String, Value>> {
        self.rest = &self.rest[1..];
        let mut all = Map::new();
        loop {
            self.blank();
            if self.takes("}") {
                return Some(all);
            }
            let key = self.string()?;
            self.blank();
            if !self.takes(":") {
                return None;
            }
            all.insert(key, self.value(left)?);
            self.blank();
            if !self.takes(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
    }
}
