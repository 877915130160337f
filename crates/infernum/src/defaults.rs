//! What a checkpoint says of how its texts are made: `generation_config.json`, read in one place.

use infernum_frontend_hf::Config;
use infernum_frontend_hf::config::ConfigError;
use infernum_runtime::{Number, SamplingError, SamplingParams};
use serde_json::Value;

/// How a request that says nothing else is answered.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// How tokens are picked: as the checkpoint says, else as OpenAI's API has it, at temperature 1.
    /// A checkpoint that says `do_sample: false` is greedy.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub end: Vec<u32>,
    /// Keys that would change texts and are not supported: a user should be told of them.
    pub unsupported: Vec<String>,
    max_new_tokens: Option<usize>,
    max_length: Option<usize>,
}

/// `generation_config.json` holds what it should not.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum DefaultsError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("generation_config.json, `{key}`: {error}")]
    Range { key: &'static str, error: SamplingError },
}

/// Keys of `transformers` that change texts and are not supported, with the number that stands for
/// "without it", as null, false and an empty list do.
const UNSUPPORTED: [(&str, f64); 23] = [
    ("begin_suppress_tokens", 0.0),
    ("bad_words_ids", 0.0),
    ("constraints", 0.0),
    ("diversity_penalty", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("exponential_decay_length_penalty", 0.0),
    ("force_words_ids", 0.0),
    ("forced_bos_token_id", -1.0),
    ("forced_eos_token_id", -1.0),
    ("guidance_scale", 1.0),
    ("max_time", 0.0),
    ("min_length", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("num_beams", 1.0),
    ("penalty_alpha", 0.0),
    ("sequence_bias", 0.0),
    ("stop_strings", 0.0),
    ("suppress_tokens", 0.0),
    ("typical_p", 1.0),
    ("watermarking_config", 0.0),
];

impl GenerationDefaults {
    /// Reads them; `tokenizer_eos` is the end token that the tokenizer names.
    pub fn read(config: &Config, tokenizer_eos: Option<u32>) -> Result<Self, DefaultsError> {
        let mut sampling = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
        for option in SamplingParams::OPTIONS {
            let Some(key) = option.generation_key() else { continue };
            let found = config.generation_as(key, "a number", number)?;
            let set = found.map_or(Ok(()), |value| option.set(&mut sampling, value));
            set.map_err(|error| DefaultsError::Range { key, error })?;
        }
        let samples = config.generation_as("do_sample", "true or false", Value::as_bool)?;
        if samples == Some(false) {
            sampling.temperature = 0.0;
        }
        let whole = |key| {
            let read = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
            config.generation_as(key, "a whole number of at least 0", read)
        };
        let changes = |(key, neutral): &&(&str, f64)| {
            config.generation(key).is_some_and(|value| !is_neutral(value, *neutral))
        };
        Ok(GenerationDefaults {
            sampling,
            end: config.eos_ids(tokenizer_eos)?,
            unsupported: UNSUPPORTED.iter().filter(changes).map(|(k, _)| (*k).to_owned()).collect(),
            max_new_tokens: whole("max_new_tokens")?,
            max_length: whole("max_length")?,
        })
    }

    /// The tokens to generate after a prompt of `prompt` tokens, if the checkpoint says how many.
    pub fn max_tokens(&self, prompt: usize) -> Option<usize> {
        self.max_new_tokens.or_else(|| self.max_length.map(|all| all.saturating_sub(prompt)))
    }
}

fn number(value: &Value) -> Option<Number> {
    let whole = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    whole.map(Number::Whole).or_else(|| value.as_f64().map(Number::Real))
}

fn is_neutral(value: &Value, neutral: f64) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        Value::Bool(given) => !given,
        other => other.as_f64() == Some(neutral),
    }
}

#[cfg(test)]
mod tests {
    use infernum_frontend_hf::ModelFiles;

    use super::*;

    fn read(generation: &'static str) -> Result<GenerationDefaults, String> {
        let files: &'static [(&str, &[u8])] = Box::leak(Box::new([
            ("config.json", &br#"{"eos_token_id": 2}"#[..]),
            ("generation_config.json", generation.as_bytes()),
        ]));
        let config = Config::open(&ModelFiles::embedded("m", files)).map_err(|e| e.to_string())?;
        GenerationDefaults::read(&config, Some(9)).map_err(|e| e.to_string())
    }

    #[test]
    fn all_that_the_file_says_is_taken_or_named() {
        let found = read(
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
                "repetition_penalty": 1.05, "min_new_tokens": 3, "eos_token_id": [7, 2],
                "max_new_tokens": 50, "max_length": 90, "pad_token_id": 0, "num_beams": 1,
                "no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "suppress_tokens": [],
                "typical_p": 1.0, "transformers_version": "4.51.0"}"#,
        )
        .expect("defaults");
        let expected = SamplingParams {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.1,
            repetition_penalty: 1.05,
            min_tokens: 3,
            ..SamplingParams::GREEDY
        };
        assert_eq!(found.sampling, expected);
        assert_eq!(found.end, [7, 2, 9]);
        assert_eq!(found.max_tokens(10), Some(50));
        assert_eq!(found.unsupported, ["bad_words_ids", "no_repeat_ngram_size"]);
        let total = read(r#"{"max_length": 90}"#).expect("defaults");
        assert_eq!([total.max_tokens(10), total.max_tokens(100)], [Some(80), Some(0)]);
    }

    #[test]
    fn what_it_leaves_open_is_as_openai_has_it() {
        let open = read("{}").expect("defaults");
        assert_eq!(open.sampling, SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY });
        assert_eq!((open.end.as_slice(), open.max_tokens(1)), (&[2, 9][..], None));
        let greedy = read(r#"{"do_sample": false, "temperature": 0.6, "top_p": 0.9}"#);
        assert_eq!(greedy.expect("defaults").sampling.temperature, 0.0);
        let null = read(r#"{"temperature": null, "do_sample": null, "top_k": null}"#);
        assert_eq!(null.expect("defaults").sampling, open.sampling);
    }

    #[test]
    fn what_it_should_not_hold_is_an_error_that_names_file_and_key() {
        let cases = [
            (
                r#"{"temperature": "hot"}"#,
                "generation_config.json: `temperature`: expected a number",
            ),
            (r#"{"top_p": 1.5}"#, "generation_config.json, `top_p`: `top_p`: expected above 0"),
            (r#"{"do_sample": 1}"#, "`do_sample`: expected true or false, found 1"),
            (r#"{"max_new_tokens": -1}"#, "`max_new_tokens`: expected a whole number"),
            (
                r#"{"min_new_tokens": 1.5}"#,
                "`min_new_tokens`: `min_tokens`: expected a whole number",
            ),
            (r#"{"temperature": }"#, "generation_config.json: "),
            ("[]", "generation_config.json: expected an object"),
        ];
        for (text, expected) in cases {
            let error = read(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
