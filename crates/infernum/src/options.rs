//! What can be chosen when a model is opened, compiled and run.
//!
//! With the feature `cli` each struct here is a `clap::Args`: a program with a command line flattens it into its
//! own, and an option is named, documented and checked once. Each has a heading in its help, under which whatever comes
//! after it stands, too: a program's own options go first.

use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use infernum_codegen::cuda;
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{CheckpointError, Config, Model, ModelError, ModelFiles};
use infernum_ir::DType;
use infernum_passes::check::Cache;
use infernum_passes::data::{DataError, Kernels};
use infernum_passes::fuse::{CostTable, Measurements};
use infernum_passes::{Adapters, KvDtype, Pipeline};

use crate::error::Error;
use crate::progress::Progress;

/// Which model, and how it is compiled.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", command(next_help_heading = "Model"))]
pub struct ModelOptions {
    /// Folder in Hugging Face format, GGUF file, or where neither is there a model of the Hugging Face hub, as ORG/NAME,
    /// ORG/NAME@REVISION or ORG/NAME:Q4_K_M; the built-in demo model when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR|FILE|ORG/NAME"))]
    pub model: Option<PathBuf>,
    /// Need no checkpoint: weights are random, of the activations' element type, and text is nonsense.
    #[cfg_attr(feature = "cli", arg(long, visible_alias = "config-only"))]
    pub random_weights: bool,
    /// What the matrices of random weights are stored in, instead of activations' elements: an encoding's name.
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAME"))]
    pub encoding: Option<String>,
    #[cfg_attr(feature = "cli", command(flatten))]
    /// How it is compiled.
    pub compile: CompileOptions,
}

/// Which of a model's files are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// All that it takes to run it.
    All,
    /// What it is and how its texts are read and written; no weights.
    Text,
}

/// What a model of the hub is called, where `path` names one: `ORG/NAME`, and which file of it. None where something is
/// there, which goes first, or where the hub is left out of the build.
pub fn name_on_hub(path: &Path) -> Option<String> {
    #[cfg(feature = "hub")]
    return crate::hub::repository(path).map(|repository| {
        let file = repository.file().map(|file| format!(":{file}"));
        format!("{}{}", repository.id(), file.unwrap_or_default())
    });
    #[cfg(not(feature = "hub"))]
    return {
        let _ = path;
        None
    };
}

/// The name that stands for the target's own pipeline.
const DEFAULT_PASSES: &str = "default";

/// The names in [`CompileOptions`] of what says how a graph is rewritten, for commands that rewrite none.
#[cfg(feature = "cli")]
pub const PASS_OPTIONS: [&str; 6] =
    ["passes", "reproducible", "rules", "disable", "allow_unchecked", "costs"];

/// How a model is compiled.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", command(next_help_heading = "Compilation"))]
pub struct CompileOptions {
    /// Spec of your own, instead of the family that config.json names.
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
    pub spec: Option<PathBuf>,
    /// Folder whose models/ and kernels/ override and add to the built-in data files.
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub data: Option<PathBuf>,
    /// Pass pipeline: a file, a name, or `none` to run the graph as the spec wrote it.
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE|NAME", default_value = DEFAULT_PASSES))]
    pub passes: String,
    /// Give a request the same bits whatever else is computed beside it: the pipeline `reproducible`, whose kernels sum in one
    /// order.
    #[cfg_attr(feature = "cli", arg(long, conflicts_with = "passes"))]
    pub reproducible: bool,
    /// Rule files of your own, beside the built-in ones: separated by commas, or one an option.
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE", value_delimiter = ','))]
    pub rules: Vec<PathBuf>,
    /// Rules and fused ops not to use, by name: separated by commas, or one an option.
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAME", value_delimiter = ','))]
    pub disable: Vec<String>,
    /// Use rules of your own that have not been checked, or that failed.
    #[cfg_attr(feature = "cli", arg(long))]
    pub allow_unchecked: bool,
    /// Measured microseconds of calls, which go before the target's cost model.
    #[cfg_attr(feature = "cli", arg(long, value_name = "FILE"))]
    pub costs: Option<PathBuf>,
    #[cfg_attr(feature = "cli", command(flatten))]
    /// Where verdicts on rules are kept.
    pub cache: CacheOptions,
    /// Element type of activations and KV cache; the checkpoint's own when left out.
    #[cfg_attr(feature = "cli", arg(long, value_parser = activation_dtype))]
    pub dtype: Option<DType>,
    /// What rows of the KV cache are stored in: activations' elements (auto), or 8-bit floats with a scale for each row and head (fp8),
    /// of which about twice as many fit.
    #[cfg_attr(feature = "cli", arg(long, value_name = "auto|fp8", default_value_t = KvDtype::Auto))]
    pub kv_dtype: KvDtype,
    /// Longest sequence in tokens; what the model allows, up to 4096, when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS"))]
    pub max_length: Option<u64>,
    #[cfg_attr(feature = "cli", command(flatten))]
    /// What adapters it has room for.
    pub lora: LoraOptions,
}

/// How a model is run.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", command(next_help_heading = "Running"))]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct RunOptions {
    /// cpu, cuda, or cuda:N for GPU N; the first GPU if there is one when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAME"))]
    pub device: Option<DeviceId>,
    /// Threads of the CPU; one a core when left out.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0, hide_default_value = true))]
    pub threads: usize,
    /// Most prompt tokens computed in one step; 256 on the CPU and 2048 on a GPU when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS"))]
    pub chunk: Option<usize>,
    /// Launch the kernels of every step one by one instead of replaying CUDA graphs.
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_graphs: bool,
    /// Let no kernel start before the one before it has ended.
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_overlap: bool,
    /// Part of the GPU's memory that may be used; the KV cache gets what weights leave of it.
    #[cfg_attr(feature = "cli", arg(long, value_name = "PART", default_value_t = GPU_MEMORY))]
    pub gpu_memory_utilization: f64,
    /// Run what `infernum compile --target ARCH --out DIR` wrote, instead of compiling.
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub plan: Option<PathBuf>,
    /// On a GPU that was never tuned: look for faster kernels first, for so many seconds.
    #[cfg_attr(feature = "cli", arg(long, value_name = "SECONDS"))]
    pub autotune: Option<u64>,
    /// Run the kernels that templates name first, whatever `infernum tune` found here or where it was made.
    #[cfg_attr(feature = "cli", arg(long))]
    pub untuned: bool,
    /// Folder of compiled kernels; a folder of the user's own when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub kernel_cache: Option<PathBuf>,
    #[cfg_attr(feature = "cli", arg(skip))]
    /// Measure the time that each op takes, which slows all of them down.
    pub profile: bool,
}

/// The part of a GPU's memory that is used where nothing else is said.
const GPU_MEMORY: f64 = 0.9;

impl Default for CompileOptions {
    fn default() -> CompileOptions {
        CompileOptions {
            spec: None,
            data: None,
            passes: DEFAULT_PASSES.to_owned(),
            reproducible: false,
            rules: Vec::new(),
            disable: Vec::new(),
            allow_unchecked: false,
            costs: None,
            cache: CacheOptions::default(),
            dtype: None,
            kv_dtype: KvDtype::Auto,
            lora: LoraOptions::default(),
            max_length: None,
        }
    }
}

/// What low-rank adapters a model is compiled for.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "cli", command(next_help_heading = "Adapters"))]
pub struct LoraOptions {
    /// Low-rank adapters (LoRA) to have room for: 0 for none.
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub max_loras: Option<u64>,
    /// The highest rank that an adapter may have; memory is taken for it, whatever ranks there are.
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = LORA_RANK))]
    pub max_lora_rank: u64,
    /// Modules that adapters may change, by the ends of their names, such as `q_proj,v_proj`: separated by commas, or one an option.
    /// Those of mixtures' experts are adapted only where they are named, all at once by `experts`.
    /// All products of the layers that can be adapted when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAME", value_delimiter = ','))]
    pub lora_targets: Vec<String>,
}

/// The highest rank where nothing else is said.
const LORA_RANK: u64 = 16;
/// Adapters, and ranks, at most: more are a mistake, and take memory before they fail.
const MOST_LORAS: u64 = 1024;

impl Default for LoraOptions {
    fn default() -> LoraOptions {
        LoraOptions { max_loras: None, max_lora_rank: LORA_RANK, lora_targets: Vec::new() }
    }
}

impl LoraOptions {
    /// The room for adapters, if there is to be some.
    pub fn adapters(&self) -> Result<Option<Adapters>, Error> {
        let slots = self.max_loras.unwrap_or(0);
        let sizes = [("--max-loras", slots.max(1)), ("--max-lora-rank", self.max_lora_rank)];
        if let Some((option, found)) =
            sizes.into_iter().find(|(_, n)| !(1..=MOST_LORAS).contains(n))
        {
            return Err(Error::Adapters { option, found, limit: MOST_LORAS });
        }
        let targets = Some(self.lora_targets.clone()).filter(|targets| !targets.is_empty());
        Ok((slots > 0).then_some(Adapters { slots, rank: self.max_lora_rank, targets }))
    }
}

impl Default for RunOptions {
    fn default() -> RunOptions {
        RunOptions {
            device: None,
            threads: 0,
            chunk: None,
            no_graphs: false,
            no_overlap: false,
            gpu_memory_utilization: GPU_MEMORY,
            plan: None,
            autotune: None,
            untuned: false,
            kernel_cache: None,
            profile: false,
        }
    }
}

/// A device by name: `cpu`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceId {
    /// The host.
    Cpu,
    /// The GPU of this number.
    Cuda(i32),
}

/// No device's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected cpu, cuda or cuda:N, found `{found}`")]
pub struct DeviceIdError {
    /// What was given.
    pub found: String,
}

impl FromStr for DeviceId {
    type Err = DeviceIdError;

    fn from_str(text: &str) -> Result<DeviceId, DeviceIdError> {
        let error = || DeviceIdError { found: text.to_owned() };
        match text.split_once(':').unwrap_or((text, "0")) {
            ("cpu", "0") => Ok(DeviceId::Cpu),
            ("cuda", number) => {
                let number = number.parse().ok().filter(|n| *n >= 0);
                Ok(DeviceId::Cuda(number.ok_or_else(error)?))
            }
            _ => Err(error()),
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Cpu => f.write_str("cpu"),
            DeviceId::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl RunOptions {
    /// What was found to be fastest on a device, if it is wanted: by the user's own `infernum tune`, then what is in
    /// the data folder, then what ships.
    pub fn tuned(
        &self,
        device: &str,
        data: Option<&Path>,
    ) -> Result<cuda::TunedVariants, cuda::TunedVariantsError> {
        if self.untuned {
            return Ok(cuda::TunedVariants::default());
        }
        let mut chosen = Vec::new();
        if let Some(path) = self.kernels().tuned_file(device)
            && let Some(own) = cuda::TunedFile::open(&path)?
        {
            chosen.push(cuda::Chosen { source: path.display().to_string(), sites: own.choices });
        }
        chosen.extend(cuda::TunedFile::shipped(device, data)?);
        Ok(cuda::TunedVariants::of(chosen))
    }

    /// Where compiled kernels are.
    pub fn kernels(&self) -> cuda::Cache {
        if let Some(folder) = &self.plan {
            return cuda::Cache::new(&folder.join("cubins"));
        }
        self.kernel_cache.as_deref().map_or_else(cuda::Cache::user, cuda::Cache::new)
    }
}

/// Where what was worked out once is kept.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct CacheOptions {
    /// Folder for what need not be worked out twice, such as verdicts on rules;
    /// $XDG_CACHE_HOME/infernum or ~/.cache/infernum when left out.
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR"))]
    pub cache_dir: Option<PathBuf>,
    /// Neither read nor write the cache.
    #[cfg_attr(feature = "cli", arg(long, conflicts_with = "cache_dir"))]
    pub no_cache: bool,
}

impl CacheOptions {
    /// The verdicts on rules.
    pub fn verdicts(&self) -> Cache {
        let dir = self.cache_dir.clone().or_else(|| {
            let variable = |name| std::env::var_os(name);
            default_cache(variable("XDG_CACHE_HOME"), variable("HOME"))
        });
        dir.filter(|_| !self.no_cache).map_or_else(Cache::off, |dir| Cache::at(&dir))
    }
}

/// As the XDG base directory specification has it: what is not an absolute path is ignored.
fn default_cache(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|p| p.is_absolute());
    let base = xdg.and_then(absolute);
    let base = base.or_else(|| home.and_then(absolute).map(|home| home.join(".cache")));
    base.map(|base| base.join("infernum"))
}

#[cfg(feature = "cli")]
fn activation_dtype(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::Bf16 | DType::F16)) => Ok(dtype),
        _ => Err(format!("expected f32, bf16 or f16, found `{text}`")),
    }
}

/// A value of an enumeration as files spell it: a parser for the command line.
#[cfg(feature = "cli")]
pub fn named<T: for<'de> serde::Deserialize<'de>>(text: &str) -> Result<T, String> {
    use serde::de::IntoDeserializer;
    let deserializer: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
        text.into_deserializer();
    T::deserialize(deserializer).map_err(|e| e.to_string())
}

/// A model's options are those of its compilation, too.
impl Deref for ModelOptions {
    type Target = CompileOptions;

    fn deref(&self) -> &CompileOptions {
        &self.compile
    }
}

impl ModelOptions {
    /// The model of a folder in Hugging Face format, compiled as it is best.
    pub fn folder(path: impl Into<PathBuf>) -> ModelOptions {
        ModelOptions { model: Some(path.into()), ..ModelOptions::default() }
    }

    /// The model's files; those of the hub are downloaded where they are not in its cache, which is told.
    pub fn files(
        &self,
        needs: Needs,
        progress: &dyn Fn(Progress<'_>),
    ) -> Result<ModelFiles, Error> {
        let Some(path) = &self.model else { return Ok(infernum_frontend_hf::demo()) };
        #[cfg(feature = "hub")]
        if let Some(repository) = crate::hub::repository(path) {
            return crate::hub::open(&repository, needs, progress);
        }
        let _ = (needs, progress);
        Ok(ModelFiles::open(path)?)
    }

    /// Opens the model with its checkpoint, unless weights are to be random.
    pub fn open(&self) -> Result<Model, Error> {
        self.open_with_progress(&|_| {})
    }

    /// The same, telling how far it is where files have to be downloaded.
    pub fn open_with_progress(&self, progress: &dyn Fn(Progress<'_>)) -> Result<Model, Error> {
        if self.random_weights {
            return self.bare(progress);
        }
        if let Some(encoding) = &self.encoding {
            return Err(Error::Encoding { encoding: encoding.clone() });
        }
        let model =
            Model::open(self.files(Needs::All, progress)?, self.spec.as_deref(), &self.library()?);
        model.map_err(|error| match error {
            ModelError::Checkpoint(CheckpointError::NoWeights { .. }) => {
                Error::NoWeights(Box::new(error))
            }
            error => error.into(),
        })
    }

    /// Opens a bare config.json instead of a folder: a model without weights.
    pub fn open_config(&self, path: &Path) -> Result<Model, Error> {
        let shown = path.display().to_string();
        let json =
            std::fs::read(path).map_err(|source| Error::Io { path: shown.clone(), source })?;
        let config = Config::parse(&shown, &json)?;
        let mut model = Model::from_config(config, self.spec.as_deref(), &self.library()?)?;
        model.random_encoding.clone_from(&self.encoding);
        Ok(model)
    }

    /// Opens the model without a checkpoint.
    pub fn open_bare(&self) -> Result<Model, Error> {
        self.bare(&|_| {})
    }

    fn bare(&self, progress: &dyn Fn(Progress<'_>)) -> Result<Model, Error> {
        let files = self.files(Needs::Text, progress)?;
        let mut model = Model::without_weights(files, self.spec.as_deref(), &self.library()?)?;
        model.random_encoding.clone_from(&self.encoding);
        Ok(model)
    }
}

impl CompileOptions {
    /// The data files; an error where the folder of the user's is none.
    pub fn library(&self) -> Result<Library, Error> {
        check_data(self.data.as_deref())?;
        Ok(Library::new(self.data.as_deref()))
    }

    /// The passes to run, less what is disabled; `default` stands for the target's own.
    pub fn pipeline(&self, default: &str) -> Result<Pipeline, Error> {
        let name = match &*self.passes {
            _ if self.reproducible => "reproducible",
            DEFAULT_PASSES => default,
            name => name,
        };
        let mut pipeline = Pipeline::named(name, self.data.as_deref())?;
        pipeline.disabled.extend(self.disable.iter().cloned());
        Ok(pipeline)
    }

    /// Fused ops and rules. Rules that are not built in are tried first, unless that is not wanted.
    pub fn kernels(&self) -> Result<Kernels, Error> {
        check_data(self.data.as_deref())?;
        let kernels = Kernels::load(self.data.as_deref(), &self.rules)?;
        if !self.allow_unchecked {
            refuse_wrong(&kernels, &self.cache.verdicts())?;
        }
        Ok(kernels)
    }

    /// What calls cost on `target`: its table, and what was measured.
    pub fn cost_table(&self, target: &str) -> Result<CostTable, Error> {
        let mut table = CostTable::named(target, self.data.as_deref())?;
        if let Some(path) = &self.costs {
            table.measured = Measurements::open(path)?;
        }
        Ok(table)
    }

    /// What calls cost on a GPU, and the name of the table that says so: a chip without one of its own has
    /// that of the one before it.
    pub fn device_costs(&self, device: &cuda::Device) -> Result<(String, CostTable), Error> {
        let known = cuda::Device::KNOWN.iter().rev().filter(|(_, sm, _)| *sm <= device.sm);
        for (name, ..) in known {
            match CostTable::named(name, self.data.as_deref()) {
                Err(DataError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
                found => {
                    found?;
                    return Ok(((*name).to_owned(), self.cost_table(name)?));
                }
            }
        }
        Err(Error::NoCosts { arch: device.arch.clone() })
    }

    /// The longest sequence to hold.
    pub fn length(&self, model: &Model) -> Result<u64, Error> {
        /// Long enough for a chat; a model's own limit may ask for gigabytes of cache.
        const DEFAULT: u64 = 4096;
        Ok(match self.max_length {
            Some(n) => n.max(1),
            None => model.context_length()?.clamp(1, DEFAULT),
        })
    }
}

/// Refuses what is no folder of data files (`--data`): one that is not there, or has neither `models/` nor
/// `kernels/` in it, so that nothing in it would be read.
pub fn check_data(folder: Option<&Path>) -> Result<(), Error> {
    let Some(folder) = folder else { return Ok(()) };
    let path = folder.display().to_string();
    let listed = std::fs::read_dir(folder).map(drop);
    listed.map_err(|source| Error::DataFolder { path: path.clone(), source })?;
    let holds = |folder: &Path| ["models", "kernels"].iter().any(|d| folder.join(d).is_dir());
    if holds(folder) {
        return Ok(());
    }
    let above = folder
        .ancestors()
        .skip(1)
        .map(|a| if a.as_os_str().is_empty() { Path::new(".") } else { a });
    let hint =
        above.take(2).find(|a| holds(a)).map(|a| format!(" (did you mean `{}`?)", a.display()));
    Err(Error::NoData { path, hint: hint.unwrap_or_default() })
}

/// Trials that a rule of the user's own must pass before it is used.
const TRIALS: usize = 100;

/// Tries every rule that is not built in: one that fails is refused.
fn refuse_wrong(kernels: &Kernels, cache: &Cache) -> Result<(), Error> {
    for rule in kernels.rules.iter().filter(|r| !r.built_in) {
        let verdict = cache.check_rule(rule, 1, TRIALS);
        if !verdict.passed() {
            return Err(Error::Rule { verdict: verdict.to_string() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::default_cache;

    #[test]
    fn the_cache_lies_where_the_xdg_specification_says() {
        let found = |xdg: &str, home: &str| {
            let set = |text: &str| (!text.is_empty()).then(|| text.into());
            default_cache(set(xdg), set(home)).map(|p| p.display().to_string())
        };
        assert_eq!(found("/c", "/h").as_deref(), Some("/c/infernum"));
        assert_eq!(found("", "/h").as_deref(), Some("/h/.cache/infernum"));
        assert_eq!(found("not/absolute", "/h").as_deref(), Some("/h/.cache/infernum"));
        assert_eq!(found("", ""), None);
    }
}
