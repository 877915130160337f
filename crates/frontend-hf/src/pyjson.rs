//! Python's `json.dumps`, for templates: `transformers` gives them that, and models were trained on
//! its separators and its numbers.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting written; beyond it a template is at fault, not the data.
const MAX_DEPTH: usize = 256;

/// The arguments of `json.dumps` that `transformers` passes on.
pub(crate) struct Style {
    pub(crate) ensure_ascii: bool,
    /// Text of one indentation step; `None` writes a single line.
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

/// Writes `value` as `json.dumps` does.
pub(crate) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut writer = Writer { style, out: String::new(), depth: 0 };
    writer.value(value)?;
    Ok(writer.out)
}

struct Writer<'a> {
    style: &'a Style,
    out: String,
    depth: usize,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(('[', ']'), &items, Self::value)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.style.sort_keys {
                    keys.sort();
                }
                self.container(('{', '}'), &keys, |w, key| {
                    w.key(key)?;
                    w.out.push_str(&w.style.key_separator);
                    w.value(&value.get_item(key)?)
                })?;
            }
            kind => {
                let detail = format!("a value of type {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        let text = match key.kind() {
            ValueKind::String => return self.value(key),
            ValueKind::None => "null".into(),
            ValueKind::Bool => key.is_true().to_string(),
            ValueKind::Number => number(key),
            kind => {
                let detail = format!("a value of type {kind} cannot be a JSON key");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        };
        self.string(&text);
        Ok(())
    }

    fn container(
        &mut self,
        (open, close): (char, char),
        items: &[Value],
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let detail = format!("tojson: nested deeper than {MAX_DEPTH}");
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.style.item_separator);
            }
            self.line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.line();
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self) {
        if let Some(step) = &self.style.indent {
            self.out.push('\n');
            (0..self.depth).for_each(|_| self.out.push_str(step));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}"); // a String takes every write
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float_repr(number),
        _ => value.to_string(),
    }
}

/// A float as Python's `repr` writes it, with the non-finite names of its `json`.
pub(crate) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    // Both languages print the shortest digits that read back; they part on where to put exponents.
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e) if x != 0.0 && !(-4..16).contains(&e) => {
            let sign = if e < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", e.abs())
        }
        _ => format!("{x:?}"),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;

    use super::*;

    fn style() -> Style {
        Style {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
        }
    }

    fn value(json: &str) -> Value {
        Value::from(Serde(serde_json::from_str::<serde_json::Value>(json).unwrap()))
    }

    // Expectations are the output of CPython 3.11's json.dumps.
    #[test]
    fn floats_are_pythons() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (123_456.789, "123456.789"),
            (f64::INFINITY, "Infinity"),
        ];
        for (x, expected) in cases {
            assert_eq!(float_repr(x), expected);
        }
    }

    #[test]
    fn one_line_keeps_order_and_unicode() {
        let v = value(
            r#"{"b": [1, -2, 2.0, true, null], "a": {}, "é": "<\"\\\n\u0001\u007f'😀>", "c": []}"#,
        );
        assert_eq!(
            dumps(&v, &style()).unwrap(),
            r#"{"b": [1, -2, 2.0, true, null], "a": {}, "é": "<\"\\\n\u0001"#.to_owned()
                + "\u{7f}'😀>\", \"c\": []}"
        );
        let ascii = Style { ensure_ascii: true, sort_keys: true, ..style() };
        assert_eq!(
            dumps(&v, &ascii).unwrap(),
            r#"{"a": {}, "b": [1, -2, 2.0, true, null], "c": [], "\u00e9": "<\"\\\n\u0001\u007f'\ud83d\ude00>"}"#
        );
    }

    #[test]
    fn indentation_leaves_empty_containers_closed() {
        let pretty = Style { indent: Some("  ".into()), item_separator: ",".into(), ..style() };
        let v = value(r#"{"a": [1, {"b": 2}], "c": [], "d": {}}"#);
        let expected = "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": [],\n  \"d\": {}\n}";
        assert_eq!(dumps(&v, &pretty).unwrap(), expected);
    }

    #[test]
    fn what_json_cannot_say_is_an_error() {
        assert!(dumps(&Value::UNDEFINED, &style()).is_err());
        let deep = (0..1000).fold(Value::from(1), |v, _| Value::from(vec![v]));
        assert!(dumps(&deep, &style()).is_err());
    }
}
