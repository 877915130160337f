//! JSON data for templates that prints as Python's `repr` prints it: a template may put a whole list
//! or object into its text, and the model has seen what Python made of it.

use std::fmt::{self, Formatter, Write};
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use serde_json::Value as Json;

use crate::pyjson::float_repr;

/// `json` as a template value.
pub(crate) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => (*b).into(),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.into(),
            (_, Some(n)) => n.into(),
            _ => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => container(items.iter().map(value).collect()),
        Json::Object(map) => {
            container(Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), value(v)))))
        }
    }
}

fn container(plain: Value) -> Value {
    match plain.as_object() {
        Some(inner) => Value::from_object(Container(inner.clone())),
        None => plain,
    }
}

/// A list or an object, as `inner` in all but its text.
#[derive(Debug)]
struct Container(DynObject);

impl Object for Container {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.0.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.enumerator_len()
    }

    fn render(self: &Arc<Self>, f: &mut Formatter<'_>) -> fmt::Result {
        let map = matches!(self.0.repr(), ObjectRepr::Map);
        f.write_char(if map { '{' } else { '[' })?;
        for (i, (key, value)) in self.0.try_iter_pairs().into_iter().flatten().enumerate() {
            f.write_str(if i == 0 { "" } else { ", " })?;
            if map {
                repr(&key, f)?;
                f.write_str(": ")?;
            }
            repr(&value, f)?;
        }
        f.write_char(if map { '}' } else { ']' })
    }
}

/// Python's `repr` of what JSON can hold.
fn repr(value: &Value, f: &mut Formatter<'_>) -> fmt::Result {
    match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), f),
        ValueKind::Number if !value.is_integer() => {
            f.write_str(&float_repr(f64::try_from(value.clone()).unwrap_or(f64::NAN)))
        }
        _ => write!(f, "{value}"),
    }
}

fn string(text: &str, f: &mut Formatter<'_>) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    f.write_char(quote)?;
    for c in text.chars() {
        match (c, u32::from(c)) {
            ('\\', _) => f.write_str("\\\\")?,
            ('\n', _) => f.write_str("\\n")?,
            ('\r', _) => f.write_str("\\r")?,
            ('\t', _) => f.write_str("\\t")?,
            (c, _) if c == quote => write!(f, "\\{c}")?,
            (c, _) if printable(c) => f.write_char(c)?,
            (_, code @ ..=0xff) => write!(f, "\\x{code:02x}")?,
            (_, code @ ..=0xffff) => write!(f, "\\u{code:04x}")?,
            (_, code) => write!(f, "\\U{code:08x}")?,
        }
    }
    f.write_char(quote)
}

/// Python's `str.isprintable`. Rust's own escaping draws the same line (no separators but the space,
/// no control, format, private or unassigned characters), except at the start of a text, where it
/// escapes combining marks too.
fn printable(c: char) -> bool {
    matches!(c, '"' | '\'') || String::from_iter(['a', c]).escape_debug().count() == 2
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_is_what_python_prints() {
        // Expectations are CPython 3.11's str() of json.loads of the same data.
        let cases = [
            (
                json!([1e-7, 1e16, 2.0, -0.5, 3, u64::MAX]),
                "[1e-07, 1e+16, 2.0, -0.5, 3, 18446744073709551615]",
            ),
            (
                json!({"a": null, "b": [true, false], "c": {}}),
                "{'a': None, 'b': [True, False], 'c': {}}",
            ),
            (json!(["it's", "\"", "'\"", "\\"]), r#"["it's", '"', '\'"', '\\']"#),
            (json!(["é\u{301}日🙂", "\u{301}"]), "['é\u{301}日🙂', '\u{301}']"),
            (
                json!(["\n\r\t\u{0}\u{7f}\u{a0}\u{2028}\u{200b}\u{e000}\u{f0000}"]),
                r"['\n\r\t\x00\x7f\xa0\u2028\u200b\ue000\U000f0000']",
            ),
        ];
        for (json, expected) in cases {
            assert_eq!(value(&json).to_string(), expected);
        }
        assert_eq!(value(&json!("it's")).to_string(), "it's", "a text alone is itself");
    }

    #[test]
    fn containers_are_the_lists_and_objects_they_hold() {
        let v = value(&json!({"b": [1, 2, 3], "a": {}}));
        assert_eq!(v, Value::from(minijinja::value::Serde(json!({"b": [1, 2, 3], "a": {}}))));
        assert_eq!((v.kind(), v.len()), (ValueKind::Map, Some(2)));
        let list = v.get_attr("b").unwrap();
        assert_eq!((list.kind(), list.len()), (ValueKind::Seq, Some(3)));
        assert_eq!(list.get_item_by_index(2).unwrap(), Value::from(3));
        assert!(!v.get_attr("a").unwrap().is_true());
        assert!(v.get_attr("none").unwrap().is_undefined());
    }
}
