//! Requests from JSON: what is wrong is said by its path, in words for those who wrote it.

use serde::de::{DeserializeOwned, Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};

use super::options::Options;
use crate::error::{ApiError, quoted};

/// Unknown fields that are named, and bytes of each.
const MOST_UNKNOWN: usize = 16;
const UNKNOWN_BYTES: usize = 64;

/// Fields of a request that nobody knows: the first ones by name, the rest by number.
#[derive(Debug, Default)]
pub(crate) struct Unknown {
    names: Vec<String>,
    more: usize,
}

impl Unknown {
    fn add(&mut self, path: &serde_ignored::Path<'_>) {
        if self.names.len() == MOST_UNKNOWN {
            self.more += 1;
            return;
        }
        // An option that is there is a step of its own: `?`.
        let path = path.to_string().replace(".?", "");
        let shown = path.chars().filter(|c| (' '..='~').contains(c)).take(UNKNOWN_BYTES);
        self.names.push(shown.collect());
    }

    /// Their names, for a header; `None` where there is none.
    pub(crate) fn names(&self) -> Option<String> {
        let names = self.names.join(", ");
        match (names.is_empty(), self.more) {
            (true, _) => None,
            (false, 0) => Some(names),
            (false, more) => Some(format!("{names}, and {more} more")),
        }
    }
}

/// Reads JSON. Also gives the fields that the type does not have.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Unknown), ApiError> {
    let mut unknown = Unknown::default();
    let value = read(bytes, |path| unknown.add(path))?;
    Ok((value, unknown))
}

/// Reads JSON, and tells of each field that the type does not have.
fn read<T: DeserializeOwned>(
    bytes: &[u8],
    mut ignored: impl FnMut(&serde_ignored::Path<'_>),
) -> Result<T, ApiError> {
    // serde would take a list for the fields in order.
    if bytes.trim_ascii_start().first().is_some_and(|b| *b != b'{') {
        return Err(ApiError::malformed("the body is not JSON: expected an object"));
    }
    let mut track = serde_path_to_error::Track::new();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
    let read = serde_ignored::deserialize(tracked, |path| ignored(&path));
    match read.and_then(|value: T| json.end().map(|()| value)) {
        Ok(value) => Ok(value),
        Err(error) if error.is_data() => Err(data_error(&track.path().to_string(), &error)),
        Err(error) => Err(ApiError::malformed(format!("the body is not JSON: {error}"))),
    }
}

/// A request of parts that stand in one object.
pub(crate) struct Parts<T, C> {
    pub(crate) own: T,
    pub(crate) common: C,
    pub(crate) options: Options,
    pub(crate) unknown: Unknown,
}

/// Reads a request for text: a route's own fields, those that it shares with others, and what tables know.
pub(crate) fn parse_parts<T: DeserializeOwned, C: DeserializeOwned>(
    bytes: &[u8],
) -> Result<Parts<T, C>, ApiError> {
    let mut unknown = Unknown::default();
    let options = read_options(bytes, &[field_names::<T>(), field_names::<C>()], &mut unknown)?;
    let (own, common) = (read_deeper(bytes, &mut unknown)?, read_deeper(bytes, &mut unknown)?);
    Ok(Parts { own, common, options, unknown })
}

/// Reads a request of a type that has all fields but those of tables.
pub(crate) fn parse_own<T: DeserializeOwned>(
    bytes: &[u8],
) -> Result<(T, Options, Unknown), ApiError> {
    let mut unknown = Unknown::default();
    let options = read_options(bytes, &[field_names::<T>()], &mut unknown)?;
    Ok((read_deeper(bytes, &mut unknown)?, options, unknown))
}

/// Reads what tables know, and tells of fields that neither they nor `types` have.
fn read_options(
    bytes: &[u8],
    types: &[&[&str]],
    unknown: &mut Unknown,
) -> Result<Options, ApiError> {
    use serde_ignored::Path::{Map, Root};
    let mut options: Options = read(bytes, |path| match path {
        Map { parent: Root, key } if types.iter().any(|names| names.contains(&&**key)) => {}
        path => unknown.add(path),
    })?;
    types.iter().for_each(|names| options.leave(names));
    Ok(options)
}

/// Reads one type of several. Of the object itself all fields have been seen; this tells of what lies deeper.
fn read_deeper<T: DeserializeOwned>(bytes: &[u8], unknown: &mut Unknown) -> Result<T, ApiError> {
    use serde_ignored::Path::{Map, Root};
    read(bytes, |path| match path {
        Map { parent: Root, .. } => {}
        path => unknown.add(path),
    })
}

/// The names of a struct's fields, as they stand in JSON.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    /// Asks a type how it wants to be read, and leaves it at that.
    struct Asker<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Asker<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Error::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            Err(Error::custom("only its fields are asked for"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
            option unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier
            ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    let _ = T::deserialize(Asker(&mut names)); // an error, once the names are known
    names
}

/// What is wrong with a value. serde's words for it are Rust's; a client's author wants JSON's.
fn data_error(path: &str, error: &serde_json::Error) -> ApiError {
    let path = path.replace('[', ".").replace(']', "");
    let text = error.to_string();
    // Where it stands is told by its path.
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
    let named = |start: &str| text.strip_prefix(start).and_then(|rest| rest.strip_suffix('`'));
    let within = |field: &str| match path.as_str() {
        "." => field.to_owned(),
        path => format!("{path}.{field}"),
    };
    let (param, message) = if let Some(field) = named("missing field `") {
        (within(field), "is missing".to_owned())
    } else if let Some(field) = named("duplicate field `") {
        (within(field), "is given twice".to_owned())
    } else if let Some((found, expected)) = unknown_variant(text) {
        (path, format!("expected {expected}, found {}", quoted(found)))
    } else if let Some((found, expected)) = unexpected(text) {
        (path, format!("expected {}, found {}", in_json(expected), found_in_json(found)))
    } else {
        (path, quoted(text)) // our own words
    };
    if param == "." {
        return ApiError::malformed(message);
    }
    ApiError::malformed(format!("{}: {message}", quoted(&param))).param(param)
}

/// A word that is none of those that were expected, and these.
fn unknown_variant(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix("unknown variant ")?.rsplit_once(", expected ")
}

/// What serde found, and expected.
fn unexpected(text: &str) -> Option<(&str, &str)> {
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    let rest = kinds.iter().find_map(|kind| text.strip_prefix(kind))?;
    rest.rsplit_once(", expected ")
}

/// What serde expected, as JSON calls it.
fn in_json(expected: &str) -> &str {
    match expected {
        "f64" | "f32" => "a number",
        "bool" | "a boolean" => "true or false",
        "i64" | "u64" | "i32" | "u32" | "usize" => "a whole number",
        "a sequence" => "a list",
        "string" => "a string",
        _ if expected == "a map" || expected.starts_with("struct ") => "an object",
        _ => expected,
    }
}

/// What serde found, as JSON calls it: a value that may be long is cut.
fn found_in_json(found: &str) -> String {
    let value = found.strip_suffix('`').and_then(|f| f.split_once('`')).map(|(_, value)| value);
    match (found, value) {
        ("map", _) => "an object".to_owned(),
        ("sequence", _) => "a list".to_owned(),
        ("unit value" | "Option value", _) => "null".to_owned(),
        (_, Some(value)) => quoted(value),
        _ => quoted(found.strip_prefix("string ").unwrap_or(found)),
    }
}

/// Reads a whole number; `2.0` is one, as JSON schemas have it.
pub(crate) fn whole<'de, D: Deserializer<'de>>(input: D) -> Result<Option<i64>, D::Error> {
    Ok(Option::<Whole>::deserialize(input)?.map(|n| n.0))
}

/// As [`whole`], for lists of token ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenId(pub(crate) u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<TokenId, D::Error> {
        let Whole(n) = Whole::deserialize(input)?;
        u32::try_from(n).map(TokenId).map_err(|_| D::Error::custom(format!("{n} is no token id")))
    }
}

struct Whole(i64);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Whole, D::Error> {
        input.deserialize_any(WholeVisitor)
    }
}

struct WholeVisitor;

impl Visitor<'_> for WholeVisitor {
    type Value = Whole;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E>(self, n: i64) -> Result<Whole, E> {
        Ok(Whole(n))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Whole, E> {
        // Out of every range, and told so there.
        Ok(Whole(i64::try_from(n).unwrap_or(i64::MAX)))
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Whole, E> {
        if x.fract() == 0.0 {
            return Ok(Whole(x as i64));
        }
        Err(E::invalid_type(Unexpected::Float(x), &self))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::chat::ChatFields;
    use super::super::common::CommonFields;
    use super::super::completions::CompletionFields;
    use super::*;

    fn error<T: DeserializeOwned>(json: &str) -> (Value, String) {
        let error = parse_parts::<T, CommonFields>(json.as_bytes())
            .err()
            .unwrap_or_else(|| panic!("{json}"));
        let body = serde_json::to_value(error.response()).expect("JSON");
        let message = body["error"]["message"].as_str().expect("text").to_owned();
        for internal in ["untagged", "enum", "struct", "variant", "invalid type", "f64", "at line"]
        {
            // Where a text ceases to be JSON is the client's business.
            let place = internal == "at line" && message.starts_with("the body is not JSON");
            assert!(place || !message.contains(internal), "{message}");
        }
        (body["error"]["param"].clone(), message)
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path_in_words_of_json() {
        let cases = [
            (
                r#"{"prompt": 3}"#,
                "prompt",
                "prompt: expected a text, token ids, or a list of either, found 3",
            ),
            (
                r#"{"prompt": {}}"#,
                "prompt",
                "prompt: expected a text, token ids, or a list of either, found an object",
            ),
            (
                r#"{"prompt": [1, "x"]}"#,
                "prompt.1",
                "prompt.1: expected a whole number, found \"x\"",
            ),
            (r#"{"prompt": [[1], 2]}"#, "prompt.1", "prompt.1: expected a list, found 2"),
            (r#"{"prompt": ["x", null]}"#, "prompt.1", "prompt.1: expected a string, found null"),
            (r#"{"prompt": [1.5]}"#, "prompt.0", "prompt.0: expected a whole number, found 1.5"),
            (r#"{"prompt": [[-1]]}"#, "prompt.0.0", "prompt.0.0: -1 is no token id"),
            ("{}", "prompt", "prompt: is missing"),
            (
                r#"{"prompt": "x", "stop": {"a": 1}}"#,
                "stop",
                "stop: expected a string or a list of them, found an object",
            ),
            (
                r#"{"prompt": "x", "stop": ["a", 1]}"#,
                "stop.1",
                "stop.1: expected a string, found 1",
            ),
            (
                r#"{"prompt": "x", "stream_options": 1}"#,
                "stream_options",
                "stream_options: expected an object, found 1",
            ),
            (
                r#"{"prompt": "x", "stream_options": {"include_usage": 1}}"#,
                "stream_options.include_usage",
                "stream_options.include_usage: expected true or false, found 1",
            ),
            (
                r#"{"prompt": "x", "temperature": "hot"}"#,
                "temperature",
                "temperature: expected a number, found \"hot\"",
            ),
            (
                r#"{"prompt": "x", "top_k": [1]}"#,
                "top_k",
                "top_k: expected a whole number, found a list",
            ),
            (
                r#"{"prompt": "x", "logit_bias": {"5": "x"}}"#,
                "logit_bias.5",
                "logit_bias.5: expected a number, found \"x\"",
            ),
            (
                r#"{"prompt": "x", "response_format": {"type": "xml"}}"#,
                "response_format.type",
                "response_format.type: expected one of `text`, `json_object`, `json_schema`, found `xml`",
            ),
            (r#"{"prompt": "x", "n": 1, "n": 2}"#, "n", "n: is given twice"),
            (r#"{"prompt": "x", "top_p": 1, "top_p": 1}"#, "top_p", "top_p: is given twice"),
        ];
        for (text, param, message) in cases {
            assert_eq!(
                error::<CompletionFields>(text),
                (json!(param), message.to_owned()),
                "{text}"
            );
        }
        let (param, message) = error::<ChatFields>(r#"{"messages": ["x"]}"#);
        assert_eq!(
            (param, message.as_str()),
            (json!("messages.0"), "messages.0: expected an object, found \"x\"")
        );
        for body in ["", "{", "[1]", "3", "\"x\"", r#"{"prompt": "x"} x"#, "{\"prompt\": nul}"] {
            let (param, message) = error::<CompletionFields>(body);
            assert!(param.is_null() && message.starts_with("the body is not JSON: "), "{message}");
        }
    }

    #[test]
    fn what_is_told_back_is_short() {
        let long = "y".repeat(100_000);
        for text in [
            format!("{{\"prompt\": \"x\", \"temperature\": \"{long}\"}}"),
            format!("{{\"prompt\": \"x\", \"logit_bias\": {{\"{long}\": \"x\"}}}}"),
            format!("{{\"prompt\": \"x\", \"stop\": [1, \"{long}\"]}}"),
        ] {
            let (param, message) = error::<CompletionFields>(&text);
            let param = param.as_str().expect("a path").len();
            assert!(message.len() < 500 && param <= 200, "{message}");
        }
    }

    #[test]
    fn unknown_fields_are_named_once_and_bounded() {
        let read = |text: &str| parse_parts::<CompletionFields, CommonFields>(text.as_bytes());
        let parts = read(
            r#"{"prompt": "x", "x": 1, "temperature": 1, "stream_options": {"y": [2]}, "n": null,
                "functions": [{"name": "f"}], "store": true, "metadata": null}"#,
        );
        let parts = parts.expect("a request");
        assert_eq!(parts.unknown.names().as_deref(), Some("x, stream_options.y"));
        assert_eq!(parts.options.without_effect(), ["store"]);
        assert!(parts.options.check().is_err());
        let many = |n: usize| {
            let fields: Vec<String> = (0..n).map(|i| format!(", \"f{i}\": 0")).collect();
            let fields = fields.concat();
            read(&format!("{{\"prompt\": \"x\"{fields}}}"))
        };
        let named = many(200).expect("a request").unknown.names().expect("names");
        assert!(named.starts_with("f0, f1, ") && named.ends_with("f15, and 184 more"), "{named}");
        let time = |n: usize| {
            let start = std::time::Instant::now();
            assert!(many(n).is_ok());
            start.elapsed()
        };
        let (few, all) = (time(20_000), time(200_000));
        assert!(all < 40 * few, "{few:?} for a tenth, {all:?}: no more than in proportion");
    }
}
