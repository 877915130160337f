//! What requests for chats and completions have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use infernum_frontend_hf::tokenizer::TokenizerError;
use infernum_runtime::Request;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::ToSchema;

use super::options::Options;
use super::read::{TokenId, whole};
use super::structure::{self, ResponseFormat, Schema, StructuredOutputs};
use super::warnings::Warnings;
use crate::app::App;
use crate::auth::Tenant;
use crate::budget::Held;
use crate::error::{ApiError, quoted};
use crate::exchange::Reading;
use crate::generation::{Generation, Job, MOST_CHOICES};
use crate::lanes::Client;
use crate::model::Served;
use crate::text::{Stops, TextRules};

/// Stop strings of one request at most.
const MOST_STOPS: usize = 64;
/// Bytes of them all together at most.
const MOST_STOP_BYTES: usize = 16 << 10;
/// Tokens of one request at most that end its text.
const MOST_STOP_TOKENS: usize = 256;
/// Tokens of one request at most that have a bias, which the host adds at every step.
const MOST_BIASES: usize = 1024;
/// Likeliest tokens that are told at most.
pub(crate) const MOST_LOGPROBS: i64 = 20;

/// Fields that chats and completions share.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct CommonFields {
    /// One of the models that `/v1/models` lists. May be left out where there is but one.
    pub(crate) model: Option<String>,
    /// Most tokens to generate. More than the model has room for is cut to that, and said in the header
    /// `x-infernum-warning`.
    #[schema(minimum = 0)]
    #[serde(default, deserialize_with = "whole")]
    pub(crate) max_tokens: Option<i64>,
    /// Up to 64 strings that end the text, of 16384 bytes together; they are not part of it.
    stop: Option<Stop>,
    /// Tokens that end the text, up to 256, beside the model's own; they are not part of it.
    #[schema(value_type = Option<Vec<u32>>, max_items = 256)]
    stop_token_ids: Option<Vec<TokenId>>,
    /// Make the stop string that ended the text, or the text of the token that did, part of it.
    include_stop_str_in_output: Option<bool>,
    /// Go on past the model's own end tokens.
    ignore_eos: Option<bool>,
    /// Give tokens such as `<|im_end|>` no text; true when left out.
    skip_special_tokens: Option<bool>,
    /// Only the last so many tokens of the prompt; -1 for as many as there is room for.
    #[schema(minimum = -1)]
    #[serde(default, deserialize_with = "whole")]
    truncate_prompt_tokens: Option<i64>,
    /// Tell the log-probabilities of the prompt's tokens, and of so many of the likeliest, as vLLM does.
    #[schema(minimum = 0, maximum = 20)]
    #[serde(default, deserialize_with = "whole")]
    prompt_logprobs: Option<i64>,
    /// How many choices.
    #[schema(minimum = 1, maximum = 128)]
    #[serde(default, deserialize_with = "whole")]
    n: Option<i64>,
    /// Added to the logits of tokens, -100 to 100, by token id; of up to 1024.
    logit_bias: Option<BTreeMap<String, f64>>,
    /// Send the text as it comes, as server-sent events.
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "prefix caches are kept apart by key")]
    user: Option<String>,
    /// The lower, the sooner, where the server runs with `--policy priority`.
    #[schema(minimum = -2_147_483_648_i64, maximum = 2_147_483_647_i64)]
    #[serde(default, deserialize_with = "whole")]
    priority: Option<i64>,
    /// Cached prefixes are shared among requests of one key with the same salt only.
    cache_salt: Option<String>,
    /// What the text is held to.
    response_format: Option<ResponseFormat>,
    /// What the text is held to, as vLLM has it.
    structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema that the text is held to, as an object or as text.
    #[schema(value_type = Option<Schema>)]
    guided_json: Option<Value>,
    /// Whether the text is a JSON object.
    guided_json_object: Option<bool>,
    /// A regular expression that all of the text matches.
    guided_regex: Option<String>,
    /// Texts to choose among.
    guided_choice: Option<Vec<String>>,
    /// A grammar in Lark's notation, or in GBNF, that the text is held to.
    guided_grammar: Option<String>,
}

/// One stop string, or several.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "the first is for the API's description")]
pub(crate) enum Stop {
    One(String),
    Several(Vec<String>),
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Stop, D::Error> {
        input.deserialize_any(StopVisitor)
    }
}

struct StopVisitor;

impl<'de> Visitor<'de> for StopVisitor {
    type Value = Stop;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string or a list of them")
    }

    fn visit_str<E>(self, text: &str) -> Result<Stop, E> {
        Ok(Stop::Several(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Stop, A::Error> {
        let mut stops = Vec::new();
        while let Some(stop) = items.next_element()? {
            stops.push(stop);
        }
        Ok(Stop::Several(stops))
    }
}

/// How it is streamed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Send a last chunk that says how many tokens were used.
    pub(crate) include_usage: Option<bool>,
}

/// What of a request was asked for in common fields, checked.
pub(crate) struct Common {
    pub(crate) n: usize,
    pub(crate) text: TextRules,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Likeliest tokens to tell with the prompt's log-probabilities, where they are told.
    pub(crate) prompt_logprobs: Option<usize>,
    truncate: Option<i64>,
    /// What the texts are held to.
    pub(crate) grammar: Option<structure::Asked>,
    /// For each choice but its prompt.
    template: Request,
}

impl CommonFields {
    /// Those of other APIs.
    pub(crate) fn of(
        stop: Option<Stop>,
        stream: Option<bool>,
        response_format: Option<ResponseFormat>,
    ) -> CommonFields {
        CommonFields { stop, stream, response_format, ..CommonFields::default() }
    }

    /// Checks all that does not depend on the prompt.
    pub(crate) fn check(
        &self,
        options: &Options,
        served: &Served,
        tenant: Tenant,
    ) -> Result<Common, ApiError> {
        let n = within("n", self.n.unwrap_or(1), 1, MOST_CHOICES as i64)? as usize;
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "stream_options: expected only with `stream`: true";
            return Err(ApiError::value("stream_options", message));
        }
        let usage = self.stream_options.as_ref().and_then(|o| o.include_usage);
        let low = i64::from(i32::MIN);
        let priority = within("priority", self.priority.unwrap_or(0), low, i64::from(i32::MAX))?;
        let sampling = options.sampling(served.frontend.defaults().sampling)?;
        let include_stop = self.include_stop_str_in_output.unwrap_or(false);
        let text = TextRules {
            stops: self.stops()?,
            include_stop,
            min_tokens: sampling.min_tokens as usize,
            skip_special: self.skip_special_tokens.unwrap_or(true),
            shown: Vec::new(),
        };
        let prompt_logprobs =
            self.prompt_logprobs.map(|n| within("prompt_logprobs", n, 0, MOST_LOGPROBS));
        let truncate = self.truncate_prompt_tokens;
        if truncate.is_some_and(|n| n < -1 || n == 0) {
            let message = "truncate_prompt_tokens: expected -1 or at least 1";
            return Err(ApiError::value("truncate_prompt_tokens", message));
        }
        let template = Request {
            stop: self.stop_tokens(served)?,
            tell_stop: include_stop,
            sampling,
            bias: self.bias(served)?,
            priority: priority as i32,
            salt: tenant.salt(self.cache_salt.as_deref()),
            ..Request::default()
        };
        Ok(Common {
            n,
            text,
            stream,
            include_usage: usage.unwrap_or(false),
            prompt_logprobs: prompt_logprobs.transpose()?.map(|n| n as usize),
            truncate,
            grammar: self.grammar()?,
            template,
        })
    }

    fn grammar(&self) -> Result<Option<structure::Asked>, ApiError> {
        let guided = structure::guided(
            self.guided_json.as_ref(),
            self.guided_regex.as_ref(),
            self.guided_choice.as_ref(),
            self.guided_grammar.as_ref(),
            self.guided_json_object,
        );
        structure::grammar(self.response_format.as_ref(), &guided, self.structured_outputs.as_ref())
    }

    fn stops(&self) -> Result<Stops, ApiError> {
        let refuse = |message: String| ApiError::value("stop", format!("stop: {message}"));
        let stops = match &self.stop {
            None => return Ok(Stops::default()),
            Some(Stop::One(stop)) => std::slice::from_ref(stop),
            Some(Stop::Several(stops)) => stops,
        };
        if stops.len() > MOST_STOPS {
            let found = stops.len();
            return Err(refuse(format!("expected at most {MOST_STOPS} strings, found {found}")));
        }
        let bytes: usize = stops.iter().map(String::len).sum();
        if bytes > MOST_STOP_BYTES {
            let message = format!("expected at most {MOST_STOP_BYTES} bytes in all, found {bytes}");
            return Err(refuse(message));
        }
        Stops::new(stops).map_err(|e| refuse(e.to_string()))
    }

    /// Tokens that end the text.
    fn stop_tokens(&self, served: &Served) -> Result<Vec<u32>, ApiError> {
        let given: Vec<u32> = self.stop_token_ids.iter().flatten().map(|t| t.0).collect();
        let refuse = |message| Err(ApiError::value("stop_token_ids", message));
        if given.len() > MOST_STOP_TOKENS {
            let found = given.len();
            return refuse(format!(
                "stop_token_ids: expected at most {MOST_STOP_TOKENS} tokens, found {found}"
            ));
        }
        if let Some(token) = given.iter().find(|t| **t as usize >= served.vocab) {
            let vocab = served.vocab;
            return refuse(format!(
                "stop_token_ids: token {token} is outside the vocabulary of {vocab}"
            ));
        }
        let end = &served.frontend.defaults().end;
        let own: &[u32] = if self.ignore_eos == Some(true) { &[] } else { end };
        Ok(own.iter().copied().chain(given).collect())
    }

    fn bias(&self, served: &Served) -> Result<Vec<(u32, f32)>, ApiError> {
        let refuse =
            |message: String| ApiError::value("logit_bias", format!("logit_bias: {message}"));
        let pair = |(key, bias): (&String, &f64)| {
            let token = key.parse::<u32>().ok().filter(|t| (*t as usize) < served.vocab);
            let token = token.ok_or_else(|| {
                refuse(format!(
                    "expected token ids below {}, found `{}`",
                    served.vocab,
                    quoted(key)
                ))
            })?;
            if !(-100.0..=100.0).contains(bias) {
                return Err(refuse(format!("expected -100 to 100 for token {key}, found {bias}")));
            }
            Ok((token, *bias as f32))
        };
        let biases = self.logit_bias.as_ref().map_or(0, BTreeMap::len);
        if biases > MOST_BIASES {
            return Err(refuse(format!("expected at most {MOST_BIASES} tokens, found {biases}")));
        }
        self.logit_bias.iter().flatten().map(pair).collect()
    }
}

impl Common {
    /// Makes the grammar ready, if there is one; it may take seconds.
    pub(crate) fn compile_grammar(&mut self, served: &Served) -> Result<(), ApiError> {
        let compiled = self.grammar.as_ref().map(|asked| structure::compile(served, asked));
        self.template.constraint = compiled.transpose()?;
        Ok(())
    }

    /// Holds the texts to a grammar that is none of the client's.
    pub(crate) fn hold_to(
        &mut self,
        served: &Served,
        asked: &structure::Asked,
    ) -> Result<(), ApiError> {
        self.template.constraint = Some(structure::compile(served, asked)?);
        Ok(())
    }

    /// A request for a choice, counted from 0. Each has a seed of its own.
    pub(crate) fn request(
        &self,
        tokens: Vec<u32>,
        max_tokens: usize,
        choice: usize,
        logprobs: Option<usize>,
    ) -> Request {
        let mut request = self.template.clone();
        request.sampling.seed = derived_seed(request.sampling.seed, choice as u64);
        Request { tokens, max_tokens, logprobs, prompt_logprobs: self.prompt_logprobs, ..request }
    }

    /// Tokens that a prompt may have before it is cut: what there is room for, or where it is to be
    /// cut a few times that.
    pub(crate) fn readable(&self, served: &Served) -> usize {
        served.max_length.saturating_mul(if self.truncate.is_some() { 4 } else { 1 })
    }

    /// How many tokens at the end of a prompt are taken; all where nothing is said.
    pub(crate) fn taken(&self, wanted: Option<usize>, served: &Served) -> usize {
        match self.truncate {
            None => usize::MAX,
            // Room for one token of the answer, at least.
            Some(-1) => served.max_length.saturating_sub(wanted.unwrap_or(1)).max(1),
            Some(n) => n as usize,
        }
    }

    /// Refuses fewer tokens than there must be.
    pub(crate) fn check_least(&self, wanted: Option<usize>) -> Result<(), ApiError> {
        let least = self.text.min_tokens;
        let Some(most) = wanted.filter(|most| *most < least) else { return Ok(()) };
        let message = format!("min_tokens: expected at most max_tokens, {most}, found {least}");
        Err(ApiError::value("min_tokens", message))
    }
}

/// The seed of a choice: the request's own for the first, well mixed ones for the rest
/// (SplitMix64, Steele et al. 2014).
fn derived_seed(seed: u64, choice: u64) -> u64 {
    if choice == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(choice.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A whole number in its range.
pub(crate) fn within(name: &str, x: i64, low: i64, high: i64) -> Result<i64, ApiError> {
    if (low..=high).contains(&x) {
        return Ok(x);
    }
    Err(ApiError::value(name, format!("{name}: expected {low} to {high}, found {x}")))
}

/// Tokens that may follow a prompt: what was asked for, as far as there is room; where there is less,
/// that is said.
pub(crate) fn room_for(
    param: &str,
    prompt: usize,
    wanted: Option<usize>,
    served: &Served,
    warnings: &mut Warnings,
) -> Result<usize, ApiError> {
    let limit = served.max_length;
    let left = limit.saturating_sub(prompt);
    if prompt > limit || (left == 0 && wanted != Some(0)) {
        let message = format!(
            "this model's maximum context length is {limit} tokens, and the prompt has {prompt}; \
             shorten it, or send `truncate_prompt_tokens`"
        );
        return Err(ApiError::too_long(param, message));
    }
    if let Some(wanted) = wanted.filter(|n| *n > left) {
        warnings.add(format!("max_tokens: {wanted} were asked for, and there is room for {left}"));
    }
    let most = wanted.or_else(|| served.frontend.defaults().max_tokens(prompt)).unwrap_or(left);
    Ok(most.min(left))
}

/// Checks `max_tokens` or its like.
pub(crate) fn token_limit(
    name: &str,
    given: Option<i64>,
    least: i64,
) -> Result<Option<usize>, ApiError> {
    given.map(|n| within(name, n, least, i64::MAX).map(|n| n as usize)).transpose()
}

/// Token ids of a text, of which there may be `limit`: most often what the model has room for.
pub(crate) fn encode(
    served: &Served,
    param: &str,
    text: &str,
    add_special: bool,
    limit: usize,
) -> Result<Vec<u32>, ApiError> {
    let tokens = served.frontend.tokenizer().encode_within(text, add_special, limit);
    tokens.map_err(|error| match error {
        TokenizerError::TooLong { limit } if limit == served.max_length => too_long(
            param,
            &format!(
                "this model's maximum context length is {limit} tokens, and the prompt has more"
            ),
        ),
        TokenizerError::TooLong { limit } => too_long(
            param,
            &format!("at most {limit} tokens are taken at a time, and the text has more"),
        ),
        error => encode_error(param, &error),
    })
}

/// Refuses more tokens than `limit` that were given as such.
pub(crate) fn check_count(param: &str, found: usize, limit: usize) -> Result<(), ApiError> {
    if found <= limit {
        return Ok(());
    }
    Err(too_long(param, &format!("at most {limit} tokens are taken at a time, found {found}")))
}

fn too_long(param: &str, message: &str) -> ApiError {
    ApiError::too_long(param, format!("{message}; shorten it"))
}

/// What the tokenizer could not do.
pub(crate) fn encode_error(param: &str, error: &TokenizerError) -> ApiError {
    ApiError::value(param, error.to_string())
}

/// Leaves out the beginning of a prompt; true where there was something to leave out.
pub(crate) fn take_last(tokens: &mut Vec<u32>, most: usize) -> bool {
    let left_out = tokens.len().saturating_sub(most);
    tokens.drain(..left_out);
    left_out > 0
}

/// What all answers begin with.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Head {
    pub(crate) fn new(prefix: &str, served: &Served) -> Head {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Head {
            id: format!("{prefix}{}", crate::app::random_id()),
            created: now.unwrap_or_default().as_secs(),
            model: served.name.clone(),
        }
    }
}

/// What comes with every request for text.
pub(crate) struct Asked {
    pub(crate) bytes: axum::body::Bytes,
    pub(crate) tenant: Tenant,
    /// Whose share of the machine it uses.
    pub(crate) client: Client,
    pub(crate) request_id: String,
    /// The memory that `bytes` take.
    held: Held,
}

impl Asked {
    /// Reads a request.
    pub(crate) async fn read(
        app: &App,
        request: axum::extract::Request,
    ) -> Result<Asked, ApiError> {
        let (parts, body) = request.into_parts();
        let tenant: Tenant = parts.extensions.get().copied().unwrap_or_default();
        let client = Client::of(&parts.extensions);
        let (bytes, held) = app.body(client, body).await?;
        if let Some(reading) = parts.extensions.get::<Reading>() {
            reading.done();
        }
        let request_id = crate::app::request_id(&parts.extensions);
        Ok(Asked { bytes, tenant, client, request_id, held })
    }

    /// Takes memory for an earlier conversation, with which the body may be no larger than one.
    pub(crate) fn hold(&mut self, app: &App, earlier: usize) -> Result<(), ApiError> {
        let all = self.bytes.len().saturating_add(earlier);
        if all > app.max_body {
            let what = "the body, with the conversation that it goes on from,";
            return Err(ApiError::too_large(what, app.max_body));
        }
        if self.held.grow_to(all) { Ok(()) } else { Err(ApiError::too_many_bodies()) }
    }

    /// Makes of it what is asked for, off the runtime.
    pub(crate) async fn prepare<T: Send + 'static>(
        self,
        app: &Arc<App>,
        work: fn(&App, &Asked) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let (client, bytes, shared) = (self.client, self.bytes.len(), app.clone());
        app.lanes.run(client, bytes, move || work(&shared, &self)).await
    }
}

/// A request for text that was read and checked.
pub(crate) struct Prepared<P> {
    pub(crate) served: Arc<Served>,
    pub(crate) job: Job,
    /// How it is to be answered.
    pub(crate) plan: P,
    pub(crate) warnings: Warnings,
}

/// A request for text that the engine has.
pub(crate) struct Begun<P> {
    pub(crate) client: Client,
    pub(crate) served: Arc<Served>,
    pub(crate) plan: P,
    pub(crate) warnings: Warnings,
    pub(crate) generation: Generation,
}

/// Reads a request for text, checks it by `prepare`, and hands it to the engine.
pub(crate) async fn begin<P: Send + 'static>(
    app: &Arc<App>,
    request: axum::extract::Request,
    prepare: fn(&App, &Asked) -> Result<Prepared<P>, ApiError>,
) -> Result<Begun<P>, ApiError> {
    let asked = Asked::read(app, request).await?;
    let client = asked.client;
    let Prepared { served, job, plan, warnings } = asked.prepare(app, prepare).await?;
    let generation = Generation::start(app, &served, job).await?;
    Ok(Begun { client, served, plan, warnings, generation })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_choices_differ() {
        assert_eq!(derived_seed(7, 0), 7);
        let mut seeds: Vec<u64> = (0..100).map(|i| derived_seed(7, i)).collect();
        seeds.extend((0..100).map(|i| derived_seed(8, i)));
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 200);
    }
}
