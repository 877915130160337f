//! What a checkpoint says of how its texts are made: `generation_config.json`, read in one place.

use infernum_frontend_hf::Config;
use infernum_frontend_hf::config::ConfigError;
use infernum_runtime::{SamplingError, SamplingParams};
use serde_json::Value;

/// How a request that says nothing else is answered.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// How tokens are picked: as the checkpoint says, else as OpenAI's API has it, at temperature 1.
    /// A checkpoint that says `do_sample: false` is greedy.
    pub sampling: SamplingParams,
    /// Tokens that end a text.
    pub end: Vec<u32>,
    max_new_tokens: Option<usize>,
}

/// `generation_config.json` holds what it should not.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum DefaultsError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("generation_config.json: {0}")]
    Range(#[from] SamplingError),
}

impl GenerationDefaults {
    /// Reads them; `tokenizer_eos` is the end token that the tokenizer names.
    pub fn read(config: &Config, tokenizer_eos: Option<u32>) -> Result<Self, DefaultsError> {
        let given = |key: &str| config.generation(key).and_then(Value::as_f64);
        let or = |key, default: f32| given(key).map_or(default, |x| x as f32);
        let greedy = config.generation("do_sample").and_then(Value::as_bool) == Some(false);
        let none = SamplingParams::default();
        let sampling = SamplingParams {
            temperature: if greedy { 0.0 } else { or("temperature", 1.0) },
            top_k: given("top_k").map_or(none.top_k, |k| k as u32),
            top_p: or("top_p", none.top_p),
            min_p: or("min_p", none.min_p),
            repetition_penalty: or("repetition_penalty", none.repetition_penalty),
            ..none
        };
        sampling.check()?;
        let max_new_tokens = given("max_new_tokens").map(|n| n as usize);
        Ok(GenerationDefaults { sampling, end: config.eos_ids(tokenizer_eos)?, max_new_tokens })
    }

    /// The tokens to generate after a prompt of `prompt` tokens, if the checkpoint says how many.
    pub fn max_tokens(&self, _prompt: usize) -> Option<usize> {
        self.max_new_tokens
    }
}
