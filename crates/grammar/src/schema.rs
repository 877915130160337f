//! Schemas as llguidance takes them: what it would hold a text to less strictly than they say is said in other words, or refused.

use serde_json::{Map, Value, json};

use crate::GrammarError;

/// White space between two parts of a JSON text at most, where a schema says nothing else: a model must not go on
/// with it for ever.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,48}";
/// What may follow a backslash. Without `u` a name can be written in one way only, so that none of a schema's own names
/// passes for a further one; nor does a text then have control characters that are nothing but numbers.
const ESCAPES: &str = "nrbtf\\\"";

/// Fields whose values are schemas by names that anybody chose.
const NAMED: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Fields whose values are not schemas, and hold a text to nothing.
const NOTES: [&str; 4] = ["default", "examples", "title", "description"];

/// A day that there is: of February the 29th in leap years only, and no year 0, which most calendars do not have.
const DATE: &str = concat!(
    "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-",
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29",
);
/// A time of day. Minutes of 61 seconds are known after the event only.
const TIME: &str = concat!(
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?",
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// Characters of a host's name, and of an address at one.
const HOST: u64 = 253;
const ADDRESS: u64 = 254;
/// An address: its part before the @, and the labels behind it, are bounded too.
const PARTS: &str = r"^[^@]{1,64}@[^@.]{1,63}(?:\.[^@.]{1,63})*$";

/// A schema as llguidance takes it; in grammars, too, after `%json`.
pub fn schema(schema: &Value) -> Result<Value, GrammarError> {
    let mut fields = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(true) => Map::new(),
        _ => return Err(refused("expected a schema that is an object")),
    };
    hold(&mut fields)?;
    let options = json!({"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES});
    fields.insert("x-guidance".to_owned(), options);
    Ok(Value::Object(fields))
}

fn refused(message: impl Into<String>) -> GrammarError {
    GrammarError::Refused(message.into())
}

/// Rewrites a schema and those in it.
fn hold(fields: &mut Map<String, Value>) -> Result<(), GrammarError> {
    check_repeated(fields)?;
    for (name, value) in fields.iter_mut() {
        match name.as_str() {
            "const" | "enum" => check_literal(value)?,
            "minimum" => round(value, f64::next_up, i128::ge),
            "maximum" => round(value, f64::next_down, i128::le),
            name if NOTES.contains(&name) => {}
            name if NAMED.contains(&name) => {
                let mut all = value.as_object_mut().into_iter().flat_map(Map::values_mut);
                all.try_for_each(hold_one)?;
            }
            _ => hold_one(value)?,
        }
    }
    narrow(fields);
    Ok(())
}

fn hold_one(value: &mut Value) -> Result<(), GrammarError> {
    match value {
        Value::Object(fields) => hold(fields),
        Value::Array(items) => items.iter_mut().try_for_each(hold_one),
        _ => Ok(()),
    }
}

/// Refuses what a text is to be word for word, where it would come out as something else.
fn check_literal(value: &Value) -> Result<(), GrammarError> {
    match value {
        Value::Number(number) if is_rounded(value) => {
            Err(refused(format!("expected numbers that a double is exactly, found {number}")))
        }
        Value::String(text) => check_characters(text),
        Value::Array(items) => items.iter().try_for_each(check_literal),
        Value::Object(fields) => fields.values().try_for_each(check_literal),
        _ => Ok(()),
    }
}

fn check_characters(text: &str) -> Result<(), GrammarError> {
    let short = ['\u{8}', '\u{c}', '\n', '\r', '\t'];
    match text.chars().find(|c| *c < ' ' && !short.contains(c)) {
        Some(found) => Err(refused(format!(
            "control characters in `const` and `enum` are not supported, found {found:?}"
        ))),
        None => Ok(()),
    }
}

/// A whole number as it is written.
fn whole(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from))
}

/// Whether a number becomes another one where it is read as a double.
fn is_rounded(value: &Value) -> bool {
    whole(value).is_some_and(|number| number as f64 as i128 != number)
}

/// Makes a bound one that a double is exactly, the next that keeps to it.
fn round(value: &mut Value, inward: fn(f64) -> f64, keeps: fn(&i128, &i128) -> bool) {
    let Some(bound) = whole(value).filter(|_| is_rounded(value)) else { return };
    let mut nearest = bound as f64;
    if !keeps(&(nearest as i128), &bound) {
        nearest = inward(nearest);
    }
    // As a whole number where it is one that JSON has so, as integers are told from others by how they are written.
    let nearest = nearest as i128;
    *value = i64::try_from(nearest).map_or_else(|_| json!(nearest as f64), |whole| json!(whole));
}

/// Refuses a number of properties that a name which comes twice would seem to reach.
fn check_repeated(fields: &Map<String, Value>) -> Result<(), GrammarError> {
    let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let closed = fields.get("additionalProperties") == Some(&Value::Bool(false))
        && !fields.contains_key("patternProperties");
    if closed || least <= required + 1 {
        return Ok(());
    }
    Err(refused(format!(
        "minProperties is only supported up to one more than are required, where names are free: expected at most {}, found {least}",
        required + 1
    )))
}

/// Has formats be as narrow as their standards: days and times are those that there are, and names of hosts as long as they may be.
fn narrow(fields: &mut Map<String, Value>) {
    let pattern = match fields.get("format").and_then(Value::as_str) {
        Some("date") => format!("^(?:{DATE})$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^(?:{DATE})[tT]{TIME}$"),
        Some("hostname") => return at_most(fields, HOST),
        Some("email") => {
            at_most(fields, ADDRESS);
            return both(fields, PARTS);
        }
        _ => return,
    };
    fields.remove("format");
    both(fields, &pattern);
}

/// Has a text be no longer.
fn at_most(fields: &mut Map<String, Value>, length: u64) {
    let given = fields.get("maxLength").map(Value::as_u64);
    // What is no length is refused later.
    if given.is_none_or(|given| given.is_some_and(|given| given > length)) {
        fields.insert("maxLength".to_owned(), json!(length));
    }
}

/// Adds a pattern to the one that there may be.
fn both(fields: &mut Map<String, Value>, pattern: &str) {
    let Some(other) = fields.insert("pattern".to_owned(), json!(pattern)) else { return };
    let all = fields.entry("allOf").or_insert_with(|| json!([]));
    if let Some(all) = all.as_array_mut() {
        all.push(json!({"pattern": other}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(given: &Value) -> Value {
        let mut held = schema(given).expect("a schema");
        held.as_object_mut()
            .and_then(|fields| fields.remove("x-guidance"))
            .expect("how it is written");
        held
    }

    fn refusal(given: &Value) -> String {
        schema(given).expect_err("refused").to_string()
    }

    #[test]
    fn bounds_are_doubles_that_keep_to_them() {
        let bounds = json!({"minimum": i64::MIN + 1, "maximum": i64::MAX});
        let held_to = held(&json!({"properties": {"maximum": bounds}, "default": bounds}));
        let inner = &held_to["properties"]["maximum"];
        assert_eq!(inner["maximum"], json!(9_223_372_036_854_774_784_i64));
        assert_eq!(inner["minimum"], json!(-9_223_372_036_854_774_784_i64));
        assert_eq!(held_to["default"], bounds);
        let exact = json!({"minimum": 1_i64 << 53, "maximum": u64::MAX - 4095, "multipleOf": 3});
        assert_eq!(held(&exact), exact);
    }

    #[test]
    fn what_would_come_out_as_something_else_is_refused() {
        for literal in [json!([{"a": 9_007_199_254_740_993_i64}]), json!(u64::MAX)] {
            assert!(refusal(&json!({"items": {"const": literal}})).contains("a double is exactly"));
            held(&json!({"default": literal, "properties": {"const": {"type": "string"}}}));
        }
        assert!(refusal(&json!({"enum": ["a", "\u{1}"]})).contains("control characters"));
        held(&json!({"enum": ["a", "\n\t\"\\", 0.1, 9_007_199_254_740_992_i64, i64::MIN]}));
        let free = json!({"type": "object", "minProperties": 3, "required": ["a"]});
        assert!(refusal(&free).contains("expected at most 2, found 3"));
        held(&json!({"minProperties": 2, "required": ["a"]}));
        held(&json!({"minProperties": 3, "additionalProperties": false, "properties": {}}));
    }

    #[test]
    fn days_and_times_are_those_that_there_are() {
        let pattern = |format: &str| {
            let held = held(&json!({"format": format, "pattern": "x"}));
            assert_eq!(held["allOf"], json!([{"pattern": "x"}]));
            regex::Regex::new(held["pattern"].as_str().expect("a pattern")).expect("it is one")
        };
        let (date, time, both) = (pattern("date"), pattern("time"), pattern("date-time"));
        for year in 0..=9999 {
            let leaps = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) && year != 0;
            assert_eq!(date.is_match(&format!("{year:04}-02-29")), leaps, "{year}");
            assert_eq!(date.is_match(&format!("{year:04}-02-28")), year != 0, "{year}");
        }
        for (month, days) in [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].iter().enumerate() {
            let there = |day: i32| date.is_match(&format!("2023-{:02}-{day:02}", month + 1));
            assert_eq!(
                (0..=40).filter(|day| there(*day)).collect::<Vec<_>>(),
                (1..=*days).collect::<Vec<_>>()
            );
        }
        assert!(time.is_match("23:59:59.5z") && time.is_match("00:00:00+23:59"));
        assert!(
            !time.is_match("23:59:60Z")
                && !time.is_match("24:00:00Z")
                && !time.is_match("12:00:00")
        );
        assert!(both.is_match("2024-02-29T12:00:00Z") && !both.is_match("2023-02-29T12:00:00Z"));
        assert_eq!(held(&json!({"format": "hostname"}))["maxLength"], 253);
        assert_eq!(held(&json!({"format": "hostname", "maxLength": 9}))["maxLength"], 9);
        assert_eq!(held(&json!({"format": "email", "maxLength": 900}))["maxLength"], 254);
        let address = pattern("email");
        assert!(
            address.is_match("a.b@c.d") && !address.is_match(&format!("a@{}.d", "c".repeat(64)))
        );
        assert_eq!(held(&json!({"format": "uuid"})), json!({"format": "uuid"}));
    }
}
