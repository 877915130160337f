//! A model folder with the family that serves it.

use std::path::Path;

use infernum_ir::expr::{Expr, Value};
use infernum_ir::{DType, Encoding, Graph, Indices, Module, Sym, Task, Type, row_picks};

use crate::binding::{binding_problems, cache_scheme, stored_as};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::{Config, ConfigError};
use crate::gguf::{ContainerMap, MapError, Mapped};
use crate::lower::{LowerError, Lowered, Request, lower};
use crate::near::nearest_families;
use crate::source::ModelFiles;
use crate::spec::{Library, LibraryError, Source, parse_family};

/// The `quant_method` of checkpoints that name the encodings of their weights, in `encodings`.
pub const OWN_METHOD: &str = "infernum";

/// How long a context is held when neither user nor config says.
const DEFAULT_LENGTH: u64 = 2048;
/// What configs call the longest sequence.
const LENGTHS: [&str; 5] =
    ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"];
/// What sentence-transformers cuts texts to.
const MEANT_LENGTH: &str = "modules.Transformer.max_seq_length";

/// A model could not be opened or does not fit its spec.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum ModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("{place}: {text}")]
    NoFamily { place: String, text: String },
    #[error(
        "{file}: activations of {dtype} are not supported: expected float32, float16 or bfloat16; \
         --dtype chooses another"
    )]
    Activations { file: String, dtype: DType },
    #[error("there is no encoding `{name}`{hint}; known: {known}")]
    NoEncoding { name: String, hint: String, known: String },
    #[error("quantization_config of config.json, encoding `{encoding}`: {message}")]
    Condition { encoding: String, message: String },
    #[error(
        "{place}: adapters name weights as in Hugging Face's format, for which {spec} has {expected} and for this file \
         {found}: they cannot be matched; load the model without adapters, or from a folder"
    )]
    Names { place: String, spec: String, expected: usize, found: usize },
    #[error("{place} does not fit {spec}:\n{}", problems.join("\n"))]
    Binding { place: String, spec: String, problems: Vec<String> },
}

/// A model's files, read as far as headers.
#[derive(Debug)]
pub struct Model {
    /// Where it comes from.
    pub files: ModelFiles,
    /// `config.json` and `generation_config.json`.
    pub config: Config,
    /// The weights; `None` for a bare config.
    pub checkpoint: Option<Checkpoint>,
    /// The family's spec.
    pub spec: Source,
    /// What its rows of output are.
    pub task: Task,
    /// Without a checkpoint: the encoding that matrices are taken to be stored in, where it can hold them.
    pub random_encoding: Option<String>,
    library: Library,
    /// How a GGUF file is read: nothing for a folder.
    container: Vec<Source>,
    /// Tensors that such a file may hold beside what is used.
    ignore: Vec<String>,
}

/// The choices made when a model is lowered.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions {
    /// Element type of activations and cache; the checkpoint's own when `None`.
    pub dtype: Option<DType>,
    /// The longest sequence; what the config says when `None`.
    pub max_length: Option<u64>,
    /// Logits for tokens that yield, as the last of each sequence does (`B`), or for every token (`T`).
    pub rows: Sym,
}

impl Model {
    /// Opens a folder with config and checkpoint. `spec` is a spec of the user's own; else the
    /// family whose `architectures` name the config's.
    pub fn open(
        files: ModelFiles,
        spec: Option<&Path>,
        library: &Library,
    ) -> Result<Model, ModelError> {
        if files.gguf().is_some() {
            return Model::open_gguf(files, spec, library);
        }
        let checkpoint = Checkpoint::open(&files);
        let mut model = Model::without_weights(files, spec, library)?;
        model.checkpoint = Some(checkpoint?);
        Ok(model)
    }

    /// Opens config and spec only: enough to compile.
    pub fn without_weights(
        files: ModelFiles,
        spec: Option<&Path>,
        library: &Library,
    ) -> Result<Model, ModelError> {
        if files.gguf().is_some() {
            let model = Model::open_gguf(files, spec, library)?;
            return Ok(Model { checkpoint: None, ..model });
        }
        let config = Config::open(&files)?;
        Model::assemble(files, config, spec, library)
    }

    /// Opens a GGUF file, which holds config and checkpoint.
    fn open_gguf(
        files: ModelFiles,
        spec: Option<&Path>,
        library: &Library,
    ) -> Result<Model, ModelError> {
        let checkpoint = Checkpoint::open(&files)?;
        let Some(tables) = checkpoint.gguf() else {
            let place = files.name().to_owned();
            return Err(CheckpointError::NoWeights { place, hint: "" }.into());
        };
        let Mapped { config, sources, changes, ignore } =
            Mapped::read(files.name(), tables, library)?;
        let model = Model::assemble(files, config, spec, library)?;
        let checkpoint = Some(checkpoint.with_changes(changes));
        Ok(Model { checkpoint, container: sources, ignore, ..model })
    }

    /// A model that is nothing but a config.
    pub fn from_config(
        config: Config,
        spec: Option<&Path>,
        library: &Library,
    ) -> Result<Model, ModelError> {
        let files = ModelFiles::embedded(config.file().to_owned(), &[]);
        Model::assemble(files, config, spec, library)
    }

    fn assemble(
        files: ModelFiles,
        config: Config,
        spec: Option<&Path>,
        library: &Library,
    ) -> Result<Model, ModelError> {
        let spec = match spec {
            Some(path) => Library::open(path)?,
            None => family_for(&files, &config, library)?,
        };
        let task = task(&spec, &config)?;
        Ok(Model {
            files,
            task,
            config,
            checkpoint: None,
            spec,
            random_encoding: None,
            library: library.clone(),
            container: Vec::new(),
            ignore: Vec::new(),
        })
    }

    /// Of a GGUF file, whether a tensor is f32 there whatever others are.
    pub fn is_wide(&self, name: &str) -> bool {
        let map = ContainerMap::read(&self.container);
        map.is_ok_and(|map| map.wide.iter().any(|pattern| matches(pattern, name)))
    }

    /// What a user should know of how the checkpoint would have its KV cache stored, where it says that: it is not followed.
    pub fn cache_notice(&self) -> Option<String> {
        let quantisation = self.config.value("quantization_config").unwrap_or(Value::Null);
        let said = cache_scheme(self.checkpoint.as_ref()?, &quantisation)?;
        Some(format!(
            "{}: {said} change nothing: rows are cached as they are or, with --kv-dtype fp8, with a scale that is computed \
             for each head",
            self.files.name()
        ))
    }

    /// How a GGUF file is read: nothing for a folder.
    pub(crate) fn container(&self) -> &[Source] {
        &self.container
    }

    /// The data files that it was opened with.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The element type of activations: the config's, or bf16.
    pub fn dtype(&self) -> Result<DType, ModelError> {
        match self.config.dtype()?.unwrap_or(DType::Bf16) {
            dtype @ (DType::F32 | DType::Bf16 | DType::F16) => Ok(dtype),
            dtype => Err(ModelError::Activations { file: self.config.file().to_owned(), dtype }),
        }
    }

    /// The longest sequence that the config says the model can hold, and for which tables of positions have rows; of one
    /// that does not generate, that it is meant for.
    pub fn context_length(&self) -> Result<u64, ModelError> {
        let own = LENGTHS.iter().map(|key| self.config.u64(key));
        let own = own.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next();
        let meant = if self.task.generates() { None } else { self.config.u64(MEANT_LENGTH)? };
        let longest = own.into_iter().chain(meant).min().unwrap_or(DEFAULT_LENGTH);
        // Where a table cannot be seen yet, lowering says why.
        let table = self.lower_as(1, DType::Bf16, &|_| None, Sym::B, &|_, _| None);
        let rows = table.ok().and_then(|lowered| position_rows(&lowered.module));
        Ok(rows.map_or(longest, |rows| longest.min(rows)))
    }

    /// Lowers the spec and, where there is a checkpoint, checks that every weight is there, that
    /// it has its shape, and that no tensor is left over.
    ///
    /// A weight is taken to be stored in one of `encodings` whose condition the config meets, where the first
    /// of its tensors is there. Without a checkpoint nothing is known to be encoded.
    pub fn lower<'e>(
        &self,
        options: LowerOptions,
        encodings: impl IntoIterator<Item = &'e Encoding>,
    ) -> Result<Lowered, ModelError> {
        let max_length = match options.max_length {
            Some(n) => n,
            None => self.context_length()?,
        };
        let dtype = match options.dtype {
            Some(dtype) => dtype,
            None => self.dtype()?,
        };
        let stored = |name: &str| self.checkpoint.as_ref()?.tensor(name)?.dtype.ir();
        let encodings: Vec<&Encoding> = encodings.into_iter().collect();
        let random = self.random_encoding.as_ref().filter(|_| self.checkpoint.is_none());
        let random = random.map(|name| named(&encodings, name)).transpose()?;
        let met = self.encodings(encodings.iter().copied())?;
        let encoding = |name: &str, shape: &[u64]| {
            if let (Some(random), [stack @ .., rows, columns]) = (random, shape) {
                // A stack of biases has two dimensions as well, but no product reads it.
                let is_matrix = stack.len() <= 1 && !name.ends_with("bias") && random.is_for(name);
                return (is_matrix && random.layout(*rows, *columns).is_ok())
                    .then(|| random.clone());
            }
            let checkpoint = self.checkpoint.as_ref()?;
            if let Some(number) = checkpoint.tensor(name).and_then(|t| t.blocks) {
                let of_type = |e: &&&Encoding| e.def().gguf == Some(number);
                return encodings
                    .iter()
                    .find(of_type)
                    .map(|e| (*e).clone())
                    .filter(|_| shape.len() == 2);
            }
            stored_as(checkpoint, &met, name, shape).cloned()
        };
        let lowered = self.lower_as(max_length, dtype, &stored, options.rows, &encoding)?;
        if let Some(checkpoint) = &self.checkpoint {
            self.check(checkpoint, &lowered, &met)?;
        }
        Ok(lowered)
    }

    /// Lowers the spec for a checkpoint of these types and encodings.
    fn lower_as(
        &self,
        max_length: u64,
        dtype: DType,
        weight_dtype: &dyn Fn(&str) -> Option<DType>,
        rows: Sym,
        encoding: &dyn Fn(&str, &[u64]) -> Option<Encoding>,
    ) -> Result<Lowered, LowerError> {
        let keys: Vec<&str> = self.config.keys().collect();
        let request = Request {
            config: &|key| self.config.value(key),
            config_keys: &keys,
            dtype,
            max_length,
            weight_dtype,
            encoding,
            rows,
            task: self.task,
            container: &self.container,
            names_only: false,
        };
        lower(&self.spec, &self.library, &request)
    }

    /// Lowers it in f32 without looking at weights, read as of another `container`, or with its tensors called as there.
    pub(crate) fn lower_in(
        &self,
        container: &[Source],
        names_only: bool,
        max_length: u64,
    ) -> Result<Module, LowerError> {
        let keys: Vec<&str> = self.config.keys().collect();
        let request = Request {
            config: &|key| self.config.value(key),
            config_keys: &keys,
            dtype: DType::F32,
            max_length,
            weight_dtype: &|_| None,
            encoding: &|_, _| None,
            rows: Sym::B,
            task: self.task,
            container,
            names_only,
        };
        Ok(lower(&self.spec, &self.library, &request)?.module)
    }

    /// The encodings whose conditions this config meets; those of weights alone, unless activations are meant, too.
    fn encodings<'e>(
        &self,
        all: impl IntoIterator<Item = &'e Encoding>,
    ) -> Result<Vec<Encoding>, ModelError> {
        let Some(config @ Value::Map(_)) = self.config.value("quantization_config") else {
            return Ok(Vec::new());
        };
        let key = |name: &str| Some(config.member(name));
        // What `infernum quantise` writes names its encodings.
        if config.member("quant_method") == Value::Str(OWN_METHOD.to_owned()) {
            let named = all_named(&config.member("encodings"), all)?;
            return Ok(named.into_iter().map(Encoding::of_weights_alone).collect());
        }
        let mut met = Vec::new();
        for encoding in all {
            let Some(when) = encoding.when() else { continue };
            let fault =
                |message| ModelError::Condition { encoding: encoding.name().to_owned(), message };
            let holds = |condition: &Expr| match condition.eval(&key) {
                Ok(Value::Bool(holds)) => Ok(holds),
                Ok(v) => Err(fault(format!("expected true or false, found {}", v.kind()))),
                Err(e) => Err(fault(e.message)),
            };
            if holds(when)? {
                let rounds = encoding.activations().map(holds).transpose()?.unwrap_or(true);
                met.push(if rounds { encoding.clone() } else { encoding.of_weights_alone() });
            }
        }
        Ok(met)
    }

    fn check(
        &self,
        checkpoint: &Checkpoint,
        lowered: &Lowered,
        encodings: &[Encoding],
    ) -> Result<(), ModelError> {
        let unused = encodings.iter().flat_map(Encoding::unused);
        let ignore: Vec<&String> =
            lowered.ignore.iter().chain(&self.ignore).chain(unused).collect();
        let mut problems = binding_problems(checkpoint, &lowered.module, &ignore);
        let is_encoded = |p: &Type| matches!(p, Type::Tensor(t) if t.encoding.is_some());
        let mut types = lowered.module.graphs.iter().flat_map(Graph::params).map(|(.., ty)| ty);
        // A config that asks for what no encoding knows is not followed in silence, but it may speak of the cache alone.
        if let Some(config @ Value::Map(_)) = self.config.value("quantization_config")
            && !types.any(is_encoded)
            && (!problems.is_empty() || self.cache_notice().is_none())
        {
            let method = config.member("quant_method");
            problems.push(format!(
                "  quantization_config of config.json: no encoding that is known (`infernum encodings`) is for \
                 these weights, whose quant_method is {method}; one can be added with --data. Where they are \
                 stored as plain numbers, leave quantization_config out"
            ));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(ModelError::Binding {
            place: self.files.name().to_owned(),
            spec: self.spec.file.to_string(),
            problems,
        })
    }
}

/// Rows of the smallest table that positions pick from.
fn position_rows(module: &Module) -> Option<u64> {
    let picks = row_picks(module).into_iter().filter(|pick| pick.by == Indices::Positions);
    picks.filter_map(|pick| pick.rows.as_const()).min()
}

fn named<'e>(encodings: &[&'e Encoding], name: &str) -> Result<&'e Encoding, ModelError> {
    let found = encodings.iter().find(|e| e.name() == name).copied();
    found.ok_or_else(|| {
        let known: Vec<&str> = encodings.iter().map(|e| e.name()).collect();
        let hint = infernum_ir::nearest(name, known.iter().copied());
        ModelError::NoEncoding { name: name.to_owned(), hint, known: known.join(", ") }
    })
}

fn family_for(
    files: &ModelFiles,
    config: &Config,
    library: &Library,
) -> Result<Source, ModelError> {
    let wanted = config.architectures()?;
    for source in library.families()? {
        let family = parse_family(&source).map_err(LowerError::from)?;
        if family.served().any(|a| wanted.contains(&a)) {
            return Ok(source.clone());
        }
    }
    let keys: Vec<&str> = config.keys().collect();
    let near: Vec<String> = nearest_families(&keys, library)?
        .iter()
        .take(3)
        .map(|n| format!("{} ({} of {})", n.family, n.reads.len(), n.keys))
        .collect();
    let (place, which) = match files.gguf() {
        Some(_) => ("its map", String::new()),
        None => (
            "config.json",
            format!(
                ": `infernum families --for {}` shows which, and which none reads",
                files.name()
            ),
        ),
    };
    let text = format!(
        "{place} names the architecture {}, which no family serves (`infernum families` lists them): write a \
         spec for it and give it with --spec. Nearest, by how many of its keys they read: {}{which}",
        if wanted.is_empty() { "nothing".to_owned() } else { wanted.join(", ") },
        near.join(", "),
    );
    Err(ModelError::NoFamily { place: files.name().to_owned(), text })
}

/// What a checkpoint is for: its architecture says, or that there is a pooling.
fn task(spec: &Source, config: &Config) -> Result<Task, ModelError> {
    let (family, wanted) = (parse_family(spec).map_err(LowerError::from)?, config.architectures()?);
    let names = |list: &[&str]| list.iter().any(|a| wanted.contains(a));
    Ok(if names(&family.classifiers) {
        Task::Score
    } else if names(&family.embedders) || config.get("modules.Pooling").is_some() {
        Task::Embed
    } else {
        Task::Generate
    })
}

/// The encodings of a list of names.
fn all_named<'e>(
    names: &Value,
    all: impl IntoIterator<Item = &'e Encoding>,
) -> Result<Vec<&'e Encoding>, ModelError> {
    let fault = |encoding: &str, message: &str| ModelError::Condition {
        encoding: encoding.to_owned(),
        message: message.to_owned(),
    };
    let Value::List(names) = names else {
        return Err(fault("?", "`encodings`: expected a list of names"));
    };
    let all: Vec<&Encoding> = all.into_iter().collect();
    let find = |name: &Value| match name {
        Value::Str(name) => all.iter().find(|e| e.name() == name).copied().ok_or_else(|| {
            let hint = infernum_ir::nearest(name, all.iter().map(|e| e.name()));
            fault(name, &format!("no encoding has that name{hint}; one can be added with --data"))
        }),
        _ => Err(fault("?", "`encodings`: expected names")),
    };
    names.iter().map(find).collect()
}

/// Whether `name` fits `pattern`, in which `*` stands for any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let mut ends_open = false;
    for part in parts {
        match rest.find(part) {
            // The last part must reach the end: take its last occurrence.
            Some(_) if pattern.ends_with(part) && !part.is_empty() && rest.ends_with(part) => {
                return true;
            }
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
        ends_open = part.is_empty();
    }
    rest.is_empty() || ends_open
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        assert!(matches("*.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"));
        assert!(matches("a.*", "a.b"));
        assert!(matches("a*c*e", "abcde"));
        assert!(matches("plain", "plain"));
        assert!(!matches("*.inv_freq", "x.inv_freq.y"));
        assert!(!matches("plain", "plainer"));
        assert!(!matches("a*c", "ab"));
    }
}
