//! Fields of requests that tables know: sampling options ([`SamplingParams::OPTIONS`]), what is not
//! built yet, and what has no effect here.

use std::borrow::Cow;
use std::fmt;

use infernum_runtime::{Number, SamplingOption, SamplingParams};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::schema::{KnownFormat, Object, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::{RefOr, schema::SchemaType};
use utoipa::{PartialSchema, ToSchema};

use crate::error::ApiError;

/// Fields that would change the answer and are not built, with what they may say all the same, as
/// JSON (null, false and what is empty say nothing), and why they are refused.
const REFUSED: [(&str, &[&str], &str); 41] = [
    ("allowed_token_ids", &[], NOT_YET),
    ("audio", &[], "there are no models of audio here"),
    ("bad_words", &[], "not supported yet; `logit_bias` with -100 keeps single tokens out"),
    ("best_of", &["1"], "only completions have it; `n` asks for several answers"),
    ("chat_template", &[], "templates are the model's own, never a client's"),
    ("container", &[], "nothing is run for clients here"),
    ("context_management", &[], NOT_YET),
    ("documents", &[], "send them in `chat_template_kwargs`, if the model's template reads them"),
    ("dry_multiplier", &["0"], NOT_YET),
    ("dynatemp_range", &["0"], NOT_YET),
    ("echo", &[], "only completions have it"),
    ("function_call", &["\"none\""], FUNCTIONS),
    ("functions", &[], FUNCTIONS),
    ("grammar", &[], STRUCTURE),
    ("json_schema", &[], STRUCTURE),
    ("length_penalty", &["1"], BEAMS),
    ("logits_processors", &[], "code of clients is not run"),
    ("max_new_tokens", &[], "send `max_tokens`"),
    ("mcp_servers", &[], "the server calls no others"),
    ("mirostat", &["0"], NOT_YET),
    ("mirostat_mode", &["0"], NOT_YET),
    ("mm_processor_kwargs", &[], "there are no models of images or audio here"),
    ("modalities", &["[\"text\"]"], "only [\"text\"] is supported"),
    ("n_predict", &[], "send `max_tokens`"),
    ("no_repeat_ngram_size", &["0"], NOT_YET),
    ("num_beams", &["1"], BEAMS),
    ("prompt_embeds", &[], NOT_YET),
    ("repeat_penalty", &["1"], "send `repetition_penalty`"),
    ("return_token_ids", &[], NOT_YET),
    ("return_tokens_as_token_ids", &[], NOT_YET),
    ("stop_sequences", &[], "send `stop`"),
    ("suffix", &[], "only completions have it"),
    ("tfs_z", &["1"], NOT_YET),
    ("thinking", &[], TEMPLATE),
    ("top_a", &["0"], NOT_YET),
    ("top_n_sigma", &["0", "-1"], NOT_YET),
    ("typical_p", &["1"], NOT_YET),
    ("use_beam_search", &[], BEAMS),
    ("verbosity", &["\"medium\""], NOT_YET),
    ("web_search_options", &[], "there is no search here"),
    ("xtc_probability", &["0"], NOT_YET),
];

const NOT_YET: &str = "not supported yet";
const STRUCTURE: &str = "send `response_format` or `structured_outputs`";
const FUNCTIONS: &str = "send `tools` and `tool_choice`";
const BEAMS: &str = "there is no beam search; `best_of` chooses among samples";
const TEMPLATE: &str =
    "send it in `chat_template_kwargs`, by the name that the model's template has";

/// Fields that clients send and that change no answer here; they are told so.
const WITHOUT_EFFECT: [&str; 17] = [
    "cache_control",
    "diagnostics",
    "early_stopping",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "inference_geo",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "speed",
    "store",
    "user_profile_id",
    "workspace_id",
];

type Refused = (&'static str, &'static [&'static str], &'static str);

/// What of a request the tables know. It refuses nothing yet.
#[derive(Debug, Default)]
pub(crate) struct Options {
    given: Vec<(&'static SamplingOption, Number)>,
    refused: Vec<&'static Refused>,
    without_effect: Vec<&'static str>,
}

impl Options {
    /// Refuses what is not built.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let Some((name, _, why)) = self.refused.first() else { return Ok(()) };
        Err(ApiError::unsupported(name, format!("{name}: {why}")))
    }

    /// Leaves fields to a route that has its own of these names.
    pub(crate) fn leave(&mut self, names: &[&str]) {
        self.refused.retain(|row| !names.contains(&row.0));
        self.without_effect.retain(|name| !names.contains(name));
    }

    /// The defaults, with what is given in their place.
    pub(crate) fn sampling(&self, defaults: SamplingParams) -> Result<SamplingParams, ApiError> {
        let mut params = SamplingParams { seed: fastrand::u64(..), ..defaults };
        for (option, value) in &self.given {
            let set = option.set(&mut params, *value);
            set.map_err(|e| ApiError::value(option.name, e.to_string()))?;
        }
        Ok(params)
    }

    /// What has no effect, for a warning.
    pub(crate) fn without_effect(&self) -> &[&'static str] {
        &self.without_effect
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        let named = |row: &&Refused| row.0 == key;
        if let Some(option) = SamplingParams::option(key) {
            if self.given.iter().any(|(o, _)| o.name == option.name) {
                return Err(A::Error::duplicate_field(option.name));
            }
            let value = map.next_value_seed(OptionValue(option))?;
            self.given.extend(value.map(|value| (option, value)));
        } else if let Some(row) = REFUSED.iter().find(named) {
            if !says_nothing(&map.next_value::<Value>()?, row.1) {
                self.refused.push(row);
            }
        } else if let Some(name) = WITHOUT_EFFECT.iter().find(|name| **name == key) {
            let value = map.next_value::<Option<Anything>>()?;
            let new = value.filter(|_| !self.without_effect.contains(name));
            self.without_effect.extend(new.map(|_| name));
        } else {
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// Whether a value is as good as none: null, false, empty, or one of `also`.
fn says_nothing(value: &Value, also: &[&str]) -> bool {
    let same = |text: &&str| match serde_json::from_str::<Value>(text) {
        Ok(Value::Number(n)) => n.as_f64() == value.as_f64(),
        Ok(other) => other == *value,
        Err(_) => false,
    };
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) if text.is_empty() => true,
        Value::Array(items) if items.is_empty() => true,
        Value::Object(fields) if fields.is_empty() => true,
        _ => also.iter().any(same),
    }
}

/// A value that is known and passed over: not ignored, as unknown ones are.
struct Anything;

impl<'de> Deserialize<'de> for Anything {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Anything, D::Error> {
        Value::deserialize(input).map(|_| Anything)
    }
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Options, D::Error> {
        input.deserialize_map(OptionsVisitor)
    }
}

struct OptionsVisitor;

impl<'de> Visitor<'de> for OptionsVisitor {
    type Value = Options;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Options, A::Error> {
        let mut options = Options::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            options.read(&key, &mut map)?;
        }
        Ok(options)
    }
}

/// Reads an option's number; null is none.
struct OptionValue(&'static SamplingOption);

impl<'de> DeserializeSeed<'de> for OptionValue {
    type Value = Option<Number>;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Option<Number>, D::Error> {
        input.deserialize_any(self)
    }
}

impl Visitor<'_> for OptionValue {
    type Value = Option<Number>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.whole { "a whole number" } else { "a number" })
    }

    fn visit_unit<E>(self) -> Result<Option<Number>, E> {
        Ok(None)
    }

    fn visit_i64<E>(self, n: i64) -> Result<Option<Number>, E> {
        Ok(Some(Number::Whole(n.into())))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Option<Number>, E> {
        Ok(Some(Number::Whole(n.into())))
    }

    fn visit_f64<E>(self, x: f64) -> Result<Option<Number>, E> {
        Ok(Some(Number::Real(x)))
    }
}

/// The fields of [`SamplingParams::OPTIONS`], for the API's description.
#[derive(Serialize)]
pub(crate) struct SamplingFields {}

impl PartialSchema for SamplingFields {
    fn schema() -> RefOr<Schema> {
        let fields = SamplingParams::OPTIONS
            .iter()
            .fold(ObjectBuilder::new(), |all, option| all.property(option.name, property(option)));
        fields
            .description(Some(
                "How tokens are picked. What is left out is as the checkpoint says \
                                 (generation_config.json), else as OpenAI has it.",
            ))
            .build()
            .into()
    }
}

impl ToSchema for SamplingFields {}

fn property(option: &SamplingOption) -> Object {
    let range = option.range;
    let kinds = [if option.whole { Type::Integer } else { Type::Number }, Type::Null];
    let format = if option.whole { KnownFormat::Int64 } else { KnownFormat::Double };
    let bounds = ObjectBuilder::new()
        .schema_type(SchemaType::from_iter(kinds))
        .format(Some(SchemaFormat::KnownFormat(format)))
        .description(Some(option.doc()))
        .maximum(Some(range.high));
    let bounds = if range.open {
        bounds.exclusive_minimum(Some(range.low))
    } else {
        bounds.minimum(Some(range.low))
    };
    bounds.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Options {
        serde_json::from_str(json).expect(json)
    }

    #[test]
    fn what_is_not_built_is_refused_unless_it_says_nothing() {
        for (name, also, why) in &REFUSED {
            let error = read(&format!("{{\"{name}\": 7}}")).check().expect_err(name);
            let error = serde_json::to_value(error.response()).expect("JSON");
            assert_eq!(error["error"]["param"], *name);
            assert_eq!(error["error"]["code"], "unsupported_value");
            assert_eq!(error["error"]["message"], format!("{name}: {why}"));
            for nothing in ["null", "false", "[]", "{}", "\"\""].iter().chain(*also) {
                let options = read(&format!("{{\"{name}\": {nothing}}}"));
                assert!(options.check().is_ok(), "{name}: {nothing}");
            }
        }
        assert!(read(r#"{"repeat_penalty": 1.0, "top_n_sigma": -1.0}"#).check().is_ok());
        let mut options = read(r#"{"echo": true, "store": true}"#);
        options.leave(&["echo", "store"]);
        assert!(options.check().is_ok() && options.without_effect().is_empty(), "a route's own");
    }

    #[test]
    fn options_take_the_place_of_defaults() {
        let defaults = SamplingParams { top_k: 7, temperature: 0.5, ..SamplingParams::GREEDY };
        let options =
            read(r#"{"temperature": 1, "top_p": 0.5, "top_k": null, "seed": 3.0, "x": {}}"#);
        let expected = SamplingParams { temperature: 1.0, top_p: 0.5, seed: 3, ..defaults };
        assert_eq!(options.sampling(defaults).expect("in range"), expected);
        let error = read(r#"{"top_k": -2}"#).sampling(defaults).expect_err("too low");
        assert_eq!(
            serde_json::to_value(error.response()).expect("JSON")["error"]["param"],
            "top_k"
        );
        assert!(serde_json::from_str::<Options>(r#"{"top_k": 1, "top_k": 2}"#).is_err());
        assert!(serde_json::from_str::<Options>(r#"{"top_k": "7"}"#).is_err());
    }

    #[test]
    fn no_name_stands_in_two_tables() {
        let mut names: Vec<&str> = REFUSED.iter().map(|r| r.0).collect();
        names.extend(WITHOUT_EFFECT);
        names.extend(SamplingParams::OPTIONS.iter().map(|o| o.name));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
