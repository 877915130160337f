//! What requests for chats and completions have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use infernum_frontend_hf::tokenizer::TokenizerError;
use infernum_runtime::{Request, SamplingParams};
use serde::de::{DeserializeOwned, Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, forward_to_deserialize_any};
use utoipa::ToSchema;

use crate::serve::app::App;
use crate::serve::auth::Tenant;
use crate::serve::budget::Held;
use crate::serve::connections::Connection;
use crate::serve::error::ApiError;
use crate::serve::generation::{MOST_CHOICES, TokenLogprob, Used};
use crate::serve::lanes::Client;
use crate::serve::model::Served;
use crate::serve::text::{Spelling, Stops};

/// Names the fields of a request that nobody knows.
pub(crate) const WARNING: HeaderName = HeaderName::from_static("x-infernum-warning");

/// Stop strings of one request at most.
const MOST_STOPS: usize = 4;
/// Bytes of them all together at most.
const MOST_STOP_BYTES: usize = 16 << 10;
/// Tokens of one request that may be biased.
const MOST_BIASES: usize = 1024;
/// Unknown fields that are named, and bytes of each.
const MOST_UNKNOWN: usize = 16;
const UNKNOWN_BYTES: usize = 64;
/// Likeliest tokens that are told at most.
pub(crate) const MOST_LOGPROBS: i64 = 20;
/// Stands for minus infinity, which JSON has not.
const NEVER: f32 = -9999.0;

/// Fields that chats and completions share.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CommonFields {
    /// One of the models that `/v1/models` lists.
    pub(crate) model: String,
    /// Most tokens to generate. More than the model has room for is cut to that.
    #[schema(minimum = 0)]
    #[serde(default, deserialize_with = "whole")]
    pub(crate) max_tokens: Option<i64>,
    /// 0 picks the likeliest. The checkpoint's own (generation_config.json) when left out, else 1.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    /// Only the likeliest tokens that together have this probability. The checkpoint's, else 1.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// Only the K likeliest tokens; 0 and -1 for all. The checkpoint's, else all.
    #[schema(minimum = -1, maximum = 4_294_967_295_i64)]
    #[serde(default, deserialize_with = "whole")]
    top_k: Option<i64>,
    /// Only tokens at least this likely, relative to the likeliest.
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    /// Subtracted from a token's logit for each time it was generated.
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    /// Subtracted from a token's logit if it was generated.
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    /// Makes tokens seen in prompt or output less likely.
    #[schema(minimum = 0.01, maximum = 100)]
    repetition_penalty: Option<f64>,
    /// Up to four strings that end the text, of 16384 bytes together; they are not part of it.
    stop: Option<Stop>,
    /// Fixes the random choices.
    #[serde(default, deserialize_with = "whole")]
    seed: Option<i64>,
    /// How many choices.
    #[schema(minimum = 1, maximum = 128)]
    #[serde(default, deserialize_with = "whole")]
    n: Option<i64>,
    /// Added to the logits of tokens, -100 to 100, by token id; up to 1024 tokens.
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
    /// Go on past the model's end token.
    ignore_eos: Option<bool>,
}

/// One stop string, or several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Stop {
    One(String),
    Several(Vec<String>),
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
    pub(crate) stops: Stops,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// For each choice but its prompt.
    template: Request,
}

impl CommonFields {
    /// Checks all that does not depend on the prompt.
    pub(crate) fn check(&self, served: &Served, tenant: Tenant) -> Result<Common, ApiError> {
        let n = within("n", self.n.unwrap_or(1), 1, MOST_CHOICES as i64)? as usize;
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "stream_options: expected only with `stream`: true";
            return Err(ApiError::value("stream_options", message));
        }
        let usage = self.stream_options.as_ref().and_then(|o| o.include_usage);
        let low = i64::from(i32::MIN);
        let priority = within("priority", self.priority.unwrap_or(0), low, i64::from(i32::MAX))?;
        let stop = if self.ignore_eos == Some(true) { Vec::new() } else { served.stop.clone() };
        let template = Request {
            stop,
            sampling: self.sampling(served)?,
            bias: self.bias(served)?,
            priority: priority as i32,
            salt: tenant.salt(self.cache_salt.as_deref()),
            ..Request::default()
        };
        let include_usage = usage.unwrap_or(false);
        Ok(Common { n, stops: self.stops()?, stream, include_usage, template })
    }

    fn sampling(&self, served: &Served) -> Result<SamplingParams, ApiError> {
        let defaults = served.defaults.0;
        let number = |name, given: Option<f64>, default: f32, low: f64, high: f64| {
            let Some(x) = given else { return Ok(default) };
            if (low..=high).contains(&x) {
                return Ok(x as f32);
            }
            let message = format!("{name}: expected {low} to {high}, found {x}");
            Err(ApiError::value(name, message))
        };
        // What is above 0 must not be rounded to it.
        let least = |x: f64| if x > 0.0 { x.max(f64::from(f32::MIN_POSITIVE)) } else { x };
        let top_k = match self.top_k {
            None => defaults.top_k,
            Some(-1) => 0,
            Some(k) => within("top_k", k, -1, i64::from(u32::MAX))? as u32,
        };
        let sampling = SamplingParams {
            temperature: number("temperature", self.temperature, defaults.temperature, 0.0, 2.0)?,
            top_k,
            top_p: number("top_p", self.top_p.map(least), defaults.top_p, 0.0, 1.0)?,
            min_p: number("min_p", self.min_p, defaults.min_p, 0.0, 1.0)?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                0.01,
                100.0,
            )?,
            frequency_penalty: number("frequency_penalty", self.frequency_penalty, 0.0, -2.0, 2.0)?,
            presence_penalty: number("presence_penalty", self.presence_penalty, 0.0, -2.0, 2.0)?,
            seed: self.seed.map_or_else(|| fastrand::u64(..), |seed| seed as u64),
        };
        // What is left is what rounding made of it.
        sampling.check().map_err(|e| ApiError::value(e.name, e.to_string()))?;
        Ok(sampling)
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

    fn bias(&self, served: &Served) -> Result<Vec<(u32, f32)>, ApiError> {
        let refuse =
            |message: String| ApiError::value("logit_bias", format!("logit_bias: {message}"));
        let pair = |(key, bias): (&String, &f64)| {
            let token = key.parse::<u32>().ok().filter(|t| (*t as usize) < served.vocab);
            let token = token.ok_or_else(|| {
                refuse(format!("expected token ids below {}, found `{key}`", served.vocab))
            })?;
            if !(-100.0..=100.0).contains(bias) {
                return Err(refuse(format!("expected -100 to 100 for token {key}, found {bias}")));
            }
            Ok((token, *bias as f32))
        };
        let found = self.logit_bias.as_ref().map_or(0, BTreeMap::len);
        if found > MOST_BIASES {
            return Err(refuse(format!("expected at most {MOST_BIASES} tokens, found {found}")));
        }
        self.logit_bias.iter().flatten().map(pair).collect()
    }
}

impl Common {
    /// A request for a choice, counted from 0. Each has a seed of its own.
    pub(crate) fn request(
        &self,
        tokens: Vec<u32>,
        max_tokens: usize,
        choice: usize,
        logprobs: Option<usize>,
        prompt_logprobs: Option<usize>,
    ) -> Request {
        let mut request = self.template.clone();
        request.sampling.seed = derived_seed(request.sampling.seed, choice as u64);
        Request { tokens, max_tokens, logprobs, prompt_logprobs, ..request }
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

/// Tokens that may follow a prompt: what was asked for, as far as there is room.
pub(crate) fn room_for(
    param: &str,
    prompt: usize,
    wanted: Option<usize>,
    served: &Served,
) -> Result<usize, ApiError> {
    let limit = served.max_length;
    let left = limit.saturating_sub(prompt);
    if prompt > limit || (left == 0 && wanted != Some(0)) {
        let message = format!(
            "this model's maximum context length is {limit} tokens, and the prompt has {prompt}; \
             shorten it"
        );
        return Err(ApiError::too_long(param, message));
    }
    Ok(wanted.map_or(left, |n| n.min(left)))
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
    let tokens = served.tokenizer.encode_within(text, add_special, limit);
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
    let read = read.and_then(|value: T| json.end().map(|()| value));
    let error = match read {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !error.is_data() {
        return Err(ApiError::malformed(format!("the body is not JSON: {error}")));
    }
    let (path, message) = (track.path().to_string(), error.to_string());
    // serde names a missing field in its message only.
    let missing = message.strip_prefix("missing field `").and_then(|m| m.split_once('`'));
    let param = match missing {
        Some((field, _)) if path == "." => field.to_owned(),
        Some((field, _)) => format!("{path}.{field}"),
        None => path,
    };
    let error = ApiError::malformed(if param == "." {
        message.clone()
    } else {
        format!("{param}: {message}")
    });
    Err(if param == "." { error } else { error.param(param) })
}

/// Reads a request of two parts that stand in one object, `T` and [`CommonFields`].
pub(crate) fn parse_with_common<T: DeserializeOwned>(
    bytes: &[u8],
) -> Result<(T, CommonFields, Unknown), ApiError> {
    let (mut unknown, others) = (Unknown::default(), field_names::<CommonFields>());
    let own = read(bytes, |path| match path {
        // The other part may know a field of the object itself, or else nobody does.
        serde_ignored::Path::Map { parent: serde_ignored::Path::Root, key }
            if others.contains(&key.as_str()) => {}
        path => unknown.add(path),
    })?;
    let common = read(bytes, |path| match path {
        serde_ignored::Path::Map { parent: serde_ignored::Path::Root, .. } => {}
        path => unknown.add(path),
    })?;
    Ok((own, common, unknown))
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

/// Names unknown fields in a header.
pub(crate) fn warn(mut response: Response, unknown: &Unknown) -> Response {
    if unknown.names.is_empty() {
        return response;
    }
    let mut names: String = unknown.names.join(", ").chars().take(512).collect();
    if unknown.more > 0 {
        names = format!("{names}, and {} more", unknown.more);
    }
    if let Ok(value) = HeaderValue::from_str(&format!("unknown fields were ignored: {names}")) {
        response.headers_mut().insert(WARNING, value);
    }
    response
}

/// Tokens that a request used.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct PromptDetails {
    /// Tokens found in the prefix cache.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl From<Used> for Usage {
    fn from(used: Used) -> Usage {
        Usage {
            prompt_tokens: used.prompt,
            completion_tokens: used.completion,
            total_tokens: used.prompt + used.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: used.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: 0 },
        }
    }
}

/// One chunk of a stream.
#[derive(Serialize)]
pub(crate) struct Chunk<'a, C: Serialize> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: &'a [C],
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub(crate) usage: ChunkUsage,
}

/// What a chunk says of usage.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ChunkUsage {
    /// Nothing: it is not wanted.
    Absent,
    /// It is wanted: null in all chunks but the last.
    Told(Option<Usage>),
}

impl ChunkUsage {
    pub(crate) fn of(wanted: bool, usage: Option<Usage>) -> ChunkUsage {
        if wanted { ChunkUsage::Told(usage) } else { ChunkUsage::Absent }
    }

    fn is_absent(&self) -> bool {
        matches!(self, ChunkUsage::Absent)
    }
}

/// A token with its log-probability, as chats tell it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Likelihood {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    #[schema(required = true)]
    pub(crate) bytes: Option<Vec<u8>>,
}

/// A log-probability that JSON can hold.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(NEVER)
}

/// The likeliest tokens of one, spelt.
pub(crate) fn likeliest(spelling: &Spelling, of: &TokenLogprob) -> Vec<Likelihood> {
    of.top.iter().map(|(token, logprob)| likelihood(spelling, *token, *logprob)).collect()
}

/// A token, spelt.
pub(crate) fn likelihood(spelling: &Spelling, token: u32, logprob: f32) -> Likelihood {
    let bytes = spelling.bytes(token);
    Likelihood { token: Spelling::shown(&bytes), logprob: finite(logprob), bytes: Some(bytes) }
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
            id: format!("{prefix}-{}", crate::serve::app::random_id()),
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
    _held: Held,
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
        if let Some(connection) = parts.extensions.get::<Arc<Connection>>() {
            connection.read();
        }
        let request_id = crate::serve::app::request_id(&parts.extensions);
        Ok(Asked { bytes, tenant, client, request_id, _held: held })
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

    #[test]
    fn parsing_names_what_is_wrong_and_what_is_unknown() {
        let fails = |json: &str| {
            let error = parse::<CommonFields>(json.as_bytes()).expect_err(json);
            serde_json::to_value(error.response()).expect("JSON")["error"]["param"].clone()
        };
        assert_eq!(fails("{}"), "model");
        assert_eq!(fails("{"), serde_json::Value::Null);
        assert_eq!(fails("[]"), serde_json::Value::Null);
        assert_eq!(fails(r#"{"model":"m","temperature":"hot"}"#), "temperature");
        assert_eq!(
            fails(r#"{"model":"m","stream_options":{"include_usage":1}}"#),
            "stream_options.include_usage"
        );
        assert_eq!(fails(r#"{"model":"m"} x"#), serde_json::Value::Null);
        let (_, unknown) =
            parse::<CommonFields>(br#"{"model":"m","x":1,"stream_options":{"y":[2]},"n":null}"#)
                .expect("it is one");
        assert_eq!(unknown.names, ["x", "stream_options.y"]);
    }

    #[derive(Debug, Deserialize)]
    struct Own {
        #[allow(dead_code, reason = "it is only read")]
        colour: Option<Inner>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {}

    #[test]
    fn fields_of_either_part_are_known() {
        let json = br#"{"model":"m","colour":{"deep":1},"x":1,"stream_options":{"y":[2]}}"#;
        let (.., unknown) = parse_with_common::<Own>(json).expect("it is one");
        assert_eq!(unknown.names, ["colour.deep", "x", "stream_options.y"]);
        assert!(field_names::<CommonFields>().contains(&"logit_bias"));
    }

    /// Eight times the fields take about eight times as long, and only some are named.
    #[test]
    fn unknown_fields_cost_what_reading_them_costs() {
        let body = |n: usize| {
            let fields: Vec<String> = (0..n).map(|i| format!("\"f{i}\":1")).collect();
            format!("{{\"model\":\"m\",{}}}", fields.join(","))
        };
        let took = |n| {
            let body = body(n);
            let start = std::time::Instant::now();
            let (.., unknown) = parse_with_common::<Own>(body.as_bytes()).expect("it is one");
            assert_eq!((unknown.names.len(), unknown.more), (MOST_UNKNOWN, n - MOST_UNKNOWN));
            start.elapsed()
        };
        let (few, many) = (took(40_000), took(320_000));
        assert!(many < 24 * few, "{many:?} against {few:?}");
    }

    #[test]
    fn names_of_unknown_fields_are_cut() {
        let json = format!("{{\"model\":\"m\",\"{}\":1}}", "é\u{7f}x".repeat(100_000));
        let (_, unknown) = parse::<CommonFields>(json.as_bytes()).expect("it is one");
        assert_eq!(unknown.names, ["x".repeat(UNKNOWN_BYTES)]);
        let response = warn(Response::default(), &unknown);
        assert!(response.headers()[WARNING].len() < 600);
    }
}
