//! `config.json` and `generation_config.json`: lookups whose errors name the file and the key.

use serde_json::{Map, Value};

use infernum_ir::{DType, expr};

use crate::modules;
use crate::safetensors::shown;
use crate::source::{ModelFiles, SourceError};

const CONFIG: &str = "config.json";
/// Settings of the modules of sentence-transformers, by their kinds.
const MODULES: &str = "modules";
const GENERATION: &str = "generation_config.json";
/// Where multimodal wrappers keep the language model's settings.
const NESTED: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// A configuration could not be read, or does not say what is needed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum ConfigError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{place}: holds no config.json; give a folder in Hugging Face format, or a .gguf file")]
    NoConfig { place: String },
    #[error("{file}: {error}")]
    Json { file: String, error: serde_json::Error },
    #[error("{file}: expected an object at the top, found {found}")]
    NotAnObject { file: String, found: String },
    #[error("{file}: `{key}` is missing{}", nearest.as_ref().map_or(String::new(), |n| format!("; did you mean `{n}`?")))]
    Missing { file: String, key: String, nearest: Option<String> },
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Type { file: String, key: String, expected: &'static str, found: String },
    #[error(
        "modules.json: the module `{kind}` is not supported, or there twice: expected one each of {known} at most"
    )]
    Module { kind: String, known: String },
}

/// A model's configuration. Keys may be dotted paths (`rope_scaling.factor`); an explicit `null`
/// counts as absent; a key absent at the top is looked for in `text_config`.
#[derive(Clone, Debug)]
pub struct Config {
    main: Document,
    generation: Option<Document>,
}

/// One JSON file whose top is an object.
#[derive(Clone, Debug)]
struct Document {
    file: String,
    root: Map<String, Value>,
}

impl Config {
    /// Reads `config.json`, and `generation_config.json` where there is one. What `modules.json` says, if it is there, is
    /// the value of the key `modules`.
    pub fn open(files: &ModelFiles) -> Result<Config, ConfigError> {
        let Some(main) = files.read(CONFIG)? else {
            return Err(ConfigError::NoConfig { place: files.name().into() });
        };
        let generation = files.read(GENERATION)?;
        let mut main = Document::parse(CONFIG, &main)?;
        if let Some(modules) = modules::read(files)? {
            main.root.insert(MODULES.to_owned(), Value::Object(modules));
        }
        Ok(Config {
            main,
            generation: generation.map(|json| Document::parse(GENERATION, &json)).transpose()?,
        })
    }

    /// Reads a configuration from JSON text; `file` names it in errors.
    pub fn parse(file: &str, json: &[u8]) -> Result<Config, ConfigError> {
        Ok(Config { main: Document::parse(file, json)?, generation: None })
    }

    /// A configuration that comes of another `file`.
    pub fn of(
        file: &str,
        root: Map<String, Value>,
        generation: Option<Map<String, Value>>,
    ) -> Config {
        let document = |root| Document { file: file.to_owned(), root };
        Config { main: document(root), generation: generation.map(document) }
    }

    /// Takes further tokens that end texts to those of `generation_config.json`.
    pub(crate) fn add_ends(&mut self, ends: Vec<u32>) {
        let Some(generation) = &mut self.generation else { return };
        let none = || Value::Array(Vec::new());
        let known = generation.root.entry("eos_token_id").or_insert_with(none);
        if let Value::Array(known) = known {
            known.extend(ends.into_iter().map(Value::from));
        }
    }

    /// The file's name, for messages.
    pub fn file(&self) -> &str {
        &self.main.file
    }

    /// The top object.
    pub fn root(&self) -> &Map<String, Value> {
        &self.main.root
    }

    /// The value at `key`, or `None` where it is absent or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let root = &self.main.root;
        lookup(root, key).or_else(|| {
            NESTED.iter().find_map(|nested| lookup(root.get(*nested)?.as_object()?, key))
        })
    }

    /// The value at `key` as expressions see it, or `None` where it is absent or null.
    pub fn value(&self, key: &str) -> Option<expr::Value> {
        self.get(key).map(expr_value)
    }

    /// Every key, those of a nested language model included.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let root = &self.main.root;
        let nested = NESTED.iter().filter_map(|n| root.get(*n)?.as_object());
        std::iter::once(root).chain(nested).flat_map(Map::keys).map(String::as_str)
    }

    /// The value at `key`; its absence is an error that offers the nearest key there is.
    pub fn require(&self, key: &str) -> Result<&Value, ConfigError> {
        self.get(key).ok_or_else(|| self.missing(key))
    }

    /// A whole number. `4096.0` and `1e6` count, since JSON has one kind of number.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        self.main.typed(key, self.get(key), "a whole number of at least 0", whole)
    }

    /// A finite number.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.main.typed(key, self.get(key), "a number", Value::as_f64)
    }

    /// `true` or `false`.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.main.typed(key, self.get(key), "true or false", Value::as_bool)
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        self.main.typed(key, self.get(key), "a string", Value::as_str)
    }

    /// The error for an absent `key`.
    pub fn missing(&self, key: &str) -> ConfigError {
        let nearest = self
            .keys()
            .map(|k| (strsim::jaro_winkler(k, key), k))
            .filter(|(score, _)| *score > 0.85)
            .max_by(|a, b| a.0.total_cmp(&b.0));
        ConfigError::Missing {
            file: self.main.file.clone(),
            key: key.into(),
            nearest: nearest.map(|(_, k)| shown(k)),
        }
    }

    /// The error for a `key` that holds something other than `expected`.
    pub fn wrong_type(&self, key: &str, expected: &'static str, found: &Value) -> ConfigError {
        self.main.wrong_type(key, expected, found)
    }

    /// `architectures` of the whole model (not of a nested language model).
    pub fn architectures(&self) -> Result<Vec<&str>, ConfigError> {
        let value = lookup(&self.main.root, "architectures");
        let names = self.main.typed("architectures", value, "a list of strings", strings)?;
        Ok(names.unwrap_or_default())
    }

    /// `model_type` of the whole model.
    pub fn model_type(&self) -> Result<Option<&str>, ConfigError> {
        let value = lookup(&self.main.root, "model_type");
        self.main.typed("model_type", value, "a string", Value::as_str)
    }

    /// The type that the weights are meant for: `dtype`, or `torch_dtype` as it was called before.
    /// `auto` counts as absent.
    pub fn dtype(&self) -> Result<Option<DType>, ConfigError> {
        const EXPECTED: &str = "one of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2";
        let Some((key, value)) =
            ["dtype", "torch_dtype"].into_iter().find_map(|key| Some((key, self.get(key)?)))
        else {
            return Ok(None);
        };
        let name = value.as_str().unwrap_or_default();
        match name.strip_prefix("torch.").unwrap_or(name) {
            "auto" => Ok(None),
            "float32" | "float" => Ok(Some(DType::F32)),
            "float16" | "half" => Ok(Some(DType::F16)),
            "bfloat16" => Ok(Some(DType::Bf16)),
            "float8_e4m3fn" => Ok(Some(DType::F8e4m3)),
            "float8_e5m2" => Ok(Some(DType::F8e5m2)),
            _ => Err(self.wrong_type(key, EXPECTED, value)),
        }
    }

    /// A value of `generation_config.json`, or `None` where it or the file is absent.
    pub fn generation(&self, key: &str) -> Option<&Value> {
        lookup(&self.generation.as_ref()?.root, key)
    }

    /// As [`Config::generation`], read as something; an error names the file, the key and what was
    /// `expected`.
    pub fn generation_as<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(generation) = &self.generation else { return Ok(None) };
        generation.typed(key, lookup(&generation.root, key), expected, read)
    }

    /// The tokens that end generation: those of `generation_config.json`, of `config.json` and the
    /// tokenizer's own, each once, in that order.
    pub fn eos_ids(&self, tokenizer_eos: Option<u32>) -> Result<Vec<u32>, ConfigError> {
        const KEY: &str = "eos_token_id";
        let mut ids = Vec::new();
        if let Some(generation) = &self.generation {
            generation.token_ids(KEY, lookup(&generation.root, KEY), &mut ids)?;
        }
        self.main.token_ids(KEY, self.get(KEY), &mut ids)?;
        ids.extend(tokenizer_eos);
        let mut seen = std::collections::HashSet::new();
        ids.retain(|id| seen.insert(*id));
        Ok(ids)
    }
}

impl Document {
    fn parse(file: &str, json: &[u8]) -> Result<Document, ConfigError> {
        // serde_json limits nesting to 128 levels and refuses NaN and numbers beyond f64.
        let written = std::str::from_utf8(json).ok().filter(|text| text.contains(INFINITY));
        let written = written.map(with_infinities);
        match serde_json::from_slice(written.as_ref().map_or(json, String::as_bytes)) {
            Ok(Value::Object(root)) => Ok(Document { file: file.into(), root }),
            Ok(other) => Err(ConfigError::NotAnObject { file: file.into(), found: brief(&other) }),
            Err(error) => Err(ConfigError::Json { file: file.into(), error }),
        }
    }

    fn typed<'a, T>(
        &self,
        key: &str,
        value: Option<&'a Value>,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong_type(key, expected, value))
    }

    fn wrong_type(&self, key: &str, expected: &'static str, found: &Value) -> ConfigError {
        ConfigError::Type {
            file: self.file.clone(),
            key: key.into(),
            expected,
            found: brief(found),
        }
    }

    /// Appends one id or a list of them. A negative id is how some configurations say "none".
    fn token_ids(
        &self,
        key: &str,
        value: Option<&Value>,
        ids: &mut Vec<u32>,
    ) -> Result<(), ConfigError> {
        let list = match value {
            None => return Ok(()),
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        for item in list {
            if item.as_i64().is_some_and(|id| id < 0) {
                continue;
            }
            let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
            ids.push(
                id.ok_or_else(|| self.wrong_type(key, "a token id, or a list of them", item))?,
            );
        }
        Ok(())
    }
}

/// Follows a dotted path; a key that itself has dots wins. Null is absence.
fn lookup<'a>(object: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = object.get(path) {
        return (!value.is_null()).then_some(value);
    }
    let (first, rest) = path.split_once('.')?;
    lookup(object.get(first)?.as_object()?, rest)
}

fn strings(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}

fn whole(value: &Value) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0; // 2^53
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (0.0..=EXACT).contains(&number)).then_some(number as u64)
    })
}

pub(crate) fn expr_value(value: &Value) -> expr::Value {
    match value {
        Value::Null => expr::Value::Null,
        Value::Bool(b) => expr::Value::Bool(*b),
        // Every JSON number is a finite f64, or nearest to one.
        Value::Number(n) => n.as_f64().map_or(expr::Value::Null, expr::Value::Num),
        Value::String(s) => expr::Value::Str(s.clone()),
        Value::Array(items) => expr::Value::List(items.iter().map(expr_value).collect()),
        // As transformers 5 writes it.
        Value::Object(map) if map.len() == 1 && map.get("__float__").is_some_and(is_infinity) => {
            expr::Value::Num(f64::INFINITY)
        }
        Value::Object(map) => {
            expr::Value::Map(map.iter().map(|(k, v)| (k.clone(), expr_value(v))).collect())
        }
    }
}

fn is_infinity(value: &Value) -> bool {
    value.as_str() == Some(INFINITY)
}

/// How Python writes a limit that is none, which is no JSON.
const INFINITY: &str = "Infinity";

/// The text with [`INFINITY`] as transformers 5 writes it, wherever it stands outside of quotes.
fn with_infinities(json: &str) -> String {
    let (mut out, mut rest, mut quoted) = (String::with_capacity(json.len()), json, false);
    while let Some(first) = rest.chars().next() {
        let n = if quoted && first == '\\' {
            1 + rest[1..].chars().next().map_or(0, char::len_utf8)
        } else if !quoted && rest.starts_with(INFINITY) {
            out += "{\"__float__\": \"Infinity\"}";
            rest = &rest[INFINITY.len()..];
            continue;
        } else {
            first.len_utf8()
        };
        quoted ^= first == '"';
        out += &rest[..n];
        rest = &rest[n..];
    }
    out
}

/// A value as it may stand in a message.
pub(crate) fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::String(text) => format!("\"{}\"", shown(text)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> Config {
        Config::parse("config.json", json.as_bytes()).unwrap()
    }

    #[test]
    fn lookups_follow_paths_and_take_null_for_absence() {
        let c = config(
            r#"{"rope_scaling": {"factor": 8, "type": null}, "head_dim": null, "a.b": 1,
                "hidden_size": 64.0, "tie": false, "eps": 1e-6}"#,
        );
        assert_eq!(c.f64("rope_scaling.factor").unwrap(), Some(8.0));
        assert_eq!(c.get("rope_scaling.type"), None);
        assert_eq!(c.get("head_dim"), None);
        assert_eq!(c.get("head_dim.x"), None);
        assert_eq!(c.u64("a.b").unwrap(), Some(1));
        assert_eq!(c.u64("hidden_size").unwrap(), Some(64));
        assert_eq!(c.bool("tie").unwrap(), Some(false));
        assert_eq!(c.f64("eps").unwrap(), Some(1e-6));
    }

    #[test]
    fn wrapped_language_models_are_found() {
        let c = config(
            r#"{"model_type": "gemma3", "tie": null, "architectures": ["A", "B"],
                "text_config": {"model_type": "gemma3_text", "hidden_size": 8, "tie": true}}"#,
        );
        assert_eq!(c.u64("hidden_size").unwrap(), Some(8));
        assert_eq!(c.bool("tie").unwrap(), Some(true));
        assert_eq!(c.model_type().unwrap(), Some("gemma3"));
        assert_eq!(c.architectures().unwrap(), ["A", "B"]);
        assert!(config("{}").architectures().unwrap().is_empty());
    }

    #[test]
    fn errors_name_file_key_and_what_was_found() {
        let c = config(r#"{"hidden_sizes": "12", "n": -1, "m": 1.5, "architectures": [1]}"#);
        let messages = [
            (
                c.require("hidden_size").unwrap_err(),
                "`hidden_size` is missing; did you mean `hidden_sizes`?",
            ),
            (c.require("vocab").unwrap_err(), "config.json: `vocab` is missing"),
            (
                c.u64("hidden_sizes").unwrap_err(),
                "expected a whole number of at least 0, found \"12\"",
            ),
            (c.u64("n").unwrap_err(), "found -1"),
            (c.u64("m").unwrap_err(), "found 1.5"),
            (c.architectures().unwrap_err(), "expected a list of strings, found a list of 1"),
        ];
        for (error, expected) in messages {
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn hostile_json_is_an_error() {
        let deep = "[".repeat(100_000);
        let deep_objects = "{\"a\":".repeat(100_000);
        for json in [
            "",
            "[]",
            "{\"a\": NaN}",
            "{\"a\": 1e999}",
            "{\"a\": \"\\ud800\"}",
            &deep,
            &deep_objects,
        ] {
            assert!(Config::parse("config.json", json.as_bytes()).is_err(), "{json:.20}");
        }
        assert!(Config::parse("config.json", b"\xff{}").is_err());
        let huge = config(r#"{"a": 123456789012345678901234567890}"#);
        assert!(huge.u64("a").is_err());
        assert!(huge.f64("a").is_ok());
    }

    #[test]
    fn limits_may_be_infinite() {
        let infinite = Some(expr::Value::Num(f64::INFINITY));
        let c = config(r#"{"a": {"__float__": "Infinity"}, "b": Infinity, "c": "\"Infinity\""}"#);
        assert_eq!((c.value("a"), c.value("b")), (infinite.clone(), infinite));
        assert_eq!(c.str("c").unwrap(), Some("\"Infinity\""));
    }

    #[test]
    fn dtype_has_two_names() {
        assert_eq!(config(r#"{"torch_dtype": "bfloat16"}"#).dtype().unwrap(), Some(DType::Bf16));
        assert_eq!(config(r#"{"dtype": "torch.float16"}"#).dtype().unwrap(), Some(DType::F16));
        assert_eq!(config(r#"{"dtype": null, "torch_dtype": "auto"}"#).dtype().unwrap(), None);
        let message = config(r#"{"dtype": "int4"}"#).dtype().unwrap_err().to_string();
        assert!(message.contains("`dtype`: expected one of float32"), "{message}");
    }

    #[test]
    fn end_tokens_are_merged() {
        let files = ModelFiles::embedded(
            "m",
            &[
                ("config.json", br#"{"text_config": {"eos_token_id": 2}}"#),
                ("generation_config.json", br#"{"eos_token_id": [7, 2, -1], "temperature": 0.6}"#),
            ],
        );
        let c = Config::open(&files).unwrap();
        assert_eq!(c.eos_ids(Some(9)).unwrap(), [7, 2, 9]);
        assert_eq!(c.generation("temperature").and_then(Value::as_f64), Some(0.6));
        assert!(config("{}").eos_ids(None).unwrap().is_empty());
        assert!(config(r#"{"eos_token_id": "</s>"}"#).eos_ids(None).is_err());
        assert!(config(r#"{"eos_token_id": 4294967296}"#).eos_ids(None).is_err());
    }

    #[test]
    fn a_folder_without_config_says_so() {
        let message = Config::open(&ModelFiles::embedded("m", &[])).unwrap_err().to_string();
        assert_eq!(
            message,
            "m: holds no config.json; give a folder in Hugging Face format, or a .gguf file"
        );
    }
}
