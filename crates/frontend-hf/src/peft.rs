//! Low-rank adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Which modules an adapter changes, and of what rank its part is there, the tensors say; the configuration says how
//! they are scaled. What would change the model in other ways than these products is refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use crate::safetensors::{Entry, Header, HeaderError, StoredType, shown};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Begins the names of tensors: PEFT's model around the model.
const PREFIX: &str = "base_model.model.";
/// Bytes of a configuration, and of the pattern that a key of it may be.
const MAX_CONFIG: u64 = 1 << 20;
const MAX_PATTERN: usize = 1 << 16;
/// Patterns at most: each is held against the name of each module.
const MAX_PATTERNS: usize = 1024;
/// Bytes of a file's header, besides those of its tensors.
const MAX_HEADER: u64 = 16 << 20;

/// An adapter could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AdapterError {
    #[error("{file}: {error}; expected a folder with {CONFIG} and {WEIGHTS}, as PEFT saves it")]
    Io { file: String, error: io::Error },
    #[error("{file}: is not a regular file")]
    NotAFile { file: String },
    #[error(
        "{file}: has {found} bytes, expected at most {limit}: more than adapters of the highest rank take"
    )]
    TooLarge { file: String, found: u64, limit: u64 },
    #[error("{file}: {error}")]
    Json { file: String, error: serde_json::Error },
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Key { file: String, key: String, expected: &'static str, found: String },
    #[error("{file}: {error}")]
    Header { file: String, error: HeaderError },
    #[error("{file}: tensor `{tensor}`: expected {expected}, found {found}")]
    Tensor { file: String, tensor: String, expected: String, found: String },
    #[error("{file}: holds no tensor: the adapter changes nothing")]
    Empty { file: String },
}

/// An adapter: for some modules of a model, two matrices whose product is added to the module's.
#[derive(Clone, Debug)]
pub struct Adapter {
    file: String,
    bytes: Vec<u8>,
    modules: BTreeMap<String, LowRank>,
    scales: Scales,
}

/// What an adapter adds to one module's product: `scale · b · a · x`. Of a module that is all experts of a layer, those of all stand
/// in the two matrices: expert e's row j of a is row e · rank + j, its column j of b column j · experts + e.
#[derive(Clone, Copy, Debug)]
pub struct LowRank {
    /// Columns of b, and rows of a.
    pub rank: u64,
    /// Rows of b.
    pub rows: u64,
    /// Columns of a.
    pub columns: u64,
    a: Entry,
    b: Entry,
}

impl Adapter {
    /// Reads the adapter in a folder, whose matrices may take so many bytes. It is read, not mapped: whoever may change
    /// the file later can do no harm.
    pub fn read(folder: &Path, limit: u64) -> Result<Adapter, AdapterError> {
        let config = read(&folder.join(CONFIG), MAX_CONFIG)?;
        let scales = Scales::parse(&folder.join(CONFIG).display().to_string(), &config)?;
        let path = folder.join(WEIGHTS);
        let bytes = read(&path, limit.saturating_add(MAX_HEADER))?;
        Adapter::parse(&path.display().to_string(), bytes, scales)
    }

    /// Reads an adapter's two files from memory.
    pub fn from_bytes(config: &[u8], weights: Vec<u8>) -> Result<Adapter, AdapterError> {
        Adapter::parse(WEIGHTS, weights, Scales::parse(CONFIG, config)?)
    }

    fn parse(file: &str, bytes: Vec<u8>, scales: Scales) -> Result<Adapter, AdapterError> {
        let header = Header::parse(&bytes)
            .map_err(|error| AdapterError::Header { file: file.to_owned(), error })?;
        let mut halves: BTreeMap<&str, [Option<&Entry>; 2]> = BTreeMap::new();
        let wrong = |tensor: &str, expected: &str, found: String| {
            let (file, tensor) = (file.to_owned(), shown(tensor));
            AdapterError::Tensor { file, tensor, expected: expected.to_owned(), found }
        };
        for entry in header.entries() {
            let name = header.name(&bytes, entry);
            let inner = name.strip_prefix(PREFIX);
            let half = |suffix| inner.and_then(|name: &str| name.strip_suffix(suffix));
            let (module, at) = match (half(".lora_A.weight"), half(".lora_B.weight")) {
                (Some(module), _) => (module, 0),
                (_, Some(module)) => (module, 1),
                _ => {
                    let expected =
                        "the lora_A.weight or lora_B.weight of a module below base_model.model";
                    return Err(wrong(
                        name,
                        expected,
                        "another tensor, which is not supported".to_owned(),
                    ));
                }
            };
            halves.entry(module).or_default()[at] = Some(entry);
        }
        let mut modules = BTreeMap::new();
        for (module, halves) in halves {
            let [Some(a), Some(b)] = halves else {
                let name = format!(
                    "{PREFIX}{module}.lora_{}.weight",
                    if halves[0].is_none() { "A" } else { "B" }
                );
                return Err(wrong(&name, "it beside the other matrix", "none".to_owned()));
            };
            let matrix = |entry: &Entry| {
                let (shape, dtype) = (header.shape(entry), entry.dtype());
                let known = matches!(dtype, StoredType::F32 | StoredType::F16 | StoredType::Bf16);
                match *shape {
                    [rows, columns] if known && rows > 0 && columns > 0 => Ok((rows, columns)),
                    _ => {
                        let found = format!("{dtype}{shape:?}");
                        Err(wrong(
                            header.name(&bytes, entry),
                            "a matrix of F32, F16 or BF16",
                            found,
                        ))
                    }
                }
            };
            let ((rank, columns), (rows, inner)) = (matrix(a)?, matrix(b)?);
            if inner != rank {
                let expected = format!("[{rows}, {rank}], the rank of lora_A");
                return Err(wrong(header.name(&bytes, b), &expected, format!("[{rows}, {inner}]")));
            }
            modules.insert(module.to_owned(), LowRank { rank, rows, columns, a: *a, b: *b });
        }
        if modules.is_empty() {
            return Err(AdapterError::Empty { file: file.to_owned() });
        }
        Ok(Adapter { file: file.to_owned(), bytes, modules, scales })
    }

    /// Where its matrices were read, for messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The modules that it changes, by their names in the model.
    pub fn modules(&self) -> impl Iterator<Item = (&str, &LowRank)> {
        self.modules.iter().map(|(name, low)| (name.as_str(), low))
    }

    /// What the product of a module is multiplied by, of this rank: the module goes by the first of these names that the
    /// configuration has a factor for.
    pub fn scale(&self, names: &[String], rank: u64) -> f64 {
        self.scales.of(names, rank)
    }

    /// The elements of a module's a, `[rank, columns]`, as they are stored.
    pub fn a(&self, low: &LowRank) -> (StoredType, &[u8]) {
        self.data(&low.a)
    }

    /// The elements of a module's b, `[rows, rank]`, as they are stored.
    pub fn b(&self, low: &LowRank) -> (StoredType, &[u8]) {
        self.data(&low.b)
    }

    fn data(&self, entry: &Entry) -> (StoredType, &[u8]) {
        let range = entry.offset() as usize..(entry.offset() + entry.len()) as usize;
        (entry.dtype(), self.bytes.get(range).unwrap_or_default())
    }
}

/// Reads a file of at most so many bytes.
fn read(path: &Path, limit: u64) -> Result<Vec<u8>, AdapterError> {
    let file = path.display().to_string();
    let failed = |error| AdapterError::Io { file: file.clone(), error };
    // A pipe would block the open: look before opening.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(AdapterError::NotAFile { file });
    }
    let opened = File::open(path).map_err(failed)?;
    let found = opened.metadata().map_err(failed)?.len();
    let mut bytes = Vec::new();
    if found <= limit {
        opened.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    }
    match found.max(bytes.len() as u64) {
        found if found > limit => Err(AdapterError::TooLarge { file, found, limit }),
        _ => Ok(bytes),
    }
}

/// How the products of an adapter are scaled.
#[derive(Clone, Debug)]
struct Scales {
    alpha: f64,
    /// By module: the first that matches its name.
    alphas: Vec<(Regex, f64)>,
    /// Divided by the rank's root, not by the rank (Kalajdzievski 2023).
    by_root: bool,
}

/// Keys that must be absent, or say that there is nothing of it: each changes the model in another way than by low-rank
/// parts of its products.
const REFUSED: &[(&str, &str)] = &[
    ("modules_to_save", "none: whole modules cannot be exchanged"),
    ("use_dora", "false: DoRA is not supported"),
    ("lora_bias", "false: biases are not supported"),
    ("trainable_token_indices", "none: embeddings cannot be adapted"),
    ("alora_invocation_tokens", "none: adapters hold for all tokens of a request"),
    ("layer_replication", "none: layers cannot be repeated"),
    ("use_qalora", "false: QALoRA is not supported"),
    ("use_bdlora", "none: block-diagonal matrices are not supported"),
    ("arrow_config", "none: routing among adapters is not supported"),
];

/// Ways to begin the training that change the model's own weights, too.
const CHANGES_BASE: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

impl Scales {
    fn parse(file: &str, json: &[u8]) -> Result<Scales, AdapterError> {
        let root: Map<String, Value> = serde_json::from_slice(json)
            .map_err(|error| AdapterError::Json { file: file.to_owned(), error })?;
        let wrong = |key: &str, expected: &'static str, found: &Value| AdapterError::Key {
            file: file.to_owned(),
            key: shown(key),
            expected,
            found: shown(&found.to_string()),
        };
        let at = |key: &str| root.get(key).unwrap_or(&Value::Null);
        if at("peft_type") != "LORA" {
            return Err(wrong("peft_type", "\"LORA\"", at("peft_type")));
        }
        if !matches!(at("bias"), Value::Null) && at("bias") != "none" {
            return Err(wrong("bias", "\"none\": biases are not supported", at("bias")));
        }
        for (key, expected) in REFUSED {
            if !says_nothing(at(key)) {
                return Err(wrong(key, expected, at(key)));
            }
        }
        let begun = at("init_lora_weights").as_str().unwrap_or_default().to_lowercase();
        if CHANGES_BASE.iter().any(|way| begun.starts_with(way)) {
            let expected = "a way to begin that leaves the model's weights as they are; convert the adapter with PEFT";
            return Err(wrong("init_lora_weights", expected, at("init_lora_weights")));
        }
        let number = |key: &str, value: &Value| {
            let number = value.as_f64().filter(|alpha| alpha.is_finite());
            number.ok_or_else(|| wrong(key, "a number", value))
        };
        let mut alphas = Vec::new();
        match at("alpha_pattern") {
            Value::Null => {}
            Value::Object(patterns) if patterns.len() > MAX_PATTERNS => {
                let found = Value::from(format!("{} of them", patterns.len()));
                return Err(wrong("alpha_pattern", "at most 1024 names or patterns", &found));
            }
            Value::Object(patterns) => {
                for (pattern, alpha) in patterns {
                    // As PEFT has it: the end of a module's name.
                    let whole = RegexBuilder::new(&format!("^(?:.*\\.)?(?:{pattern})$"))
                        .size_limit(MAX_PATTERN)
                        .build()
                        .map_err(|_| {
                            wrong("alpha_pattern", "names or patterns", &pattern.as_str().into())
                        })?;
                    alphas.push((whole, number("alpha_pattern", alpha)?));
                }
            }
            other => return Err(wrong("alpha_pattern", "an object", other)),
        }
        let by_root = match at("use_rslora") {
            Value::Null => false,
            Value::Bool(by_root) => *by_root,
            other => return Err(wrong("use_rslora", "true or false", other)),
        };
        Ok(Scales { alpha: number("lora_alpha", at("lora_alpha"))?, alphas, by_root })
    }

    fn of(&self, names: &[String], rank: u64) -> f64 {
        let is_meant = |pattern: &Regex| names.iter().any(|name| pattern.is_match(name));
        let own = self.alphas.iter().find(|(pattern, _)| is_meant(pattern));
        let rank = rank as f64;
        own.map_or(self.alpha, |(_, alpha)| *alpha) / if self.by_root { rank.sqrt() } else { rank }
    }
}

fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
