//! Options that several commands share.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::PathBuf;

use clap::Args;
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Model, ModelError, ModelFiles};
use infernum_ir::DType;
use infernum_passes::check::Cache;
use infernum_passes::data::{DataError, Kernels};
use infernum_passes::fuse::{CostTable, Measurements};
use infernum_passes::{Pipeline, PipelineError};

/// Which model, and how it is compiled.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// Folder in Hugging Face format; the built-in demo model when left out.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) compile: CompileArgs,
}

/// How a model is compiled.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompileArgs {
    /// Spec of your own, instead of the family that config.json names.
    #[arg(long, value_name = "FILE")]
    pub(crate) spec: Option<PathBuf>,
    /// Folder whose models/ and kernels/ override and add to the built-in data files.
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Pass pipeline: a file, a name, or `none` to run the graph as the spec wrote it.
    #[arg(long, value_name = "FILE|NAME", default_value = "default")]
    pub(crate) passes: String,
    /// Rule files of your own, beside the built-in ones.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) rules: Vec<PathBuf>,
    /// Rules and fused ops not to use, by name.
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) disable: Vec<String>,
    /// Use rules of your own that have not been checked, or that failed.
    #[arg(long)]
    pub(crate) allow_unchecked: bool,
    /// Measured microseconds of calls, which go before the target's cost model.
    #[arg(long, value_name = "FILE")]
    pub(crate) costs: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    /// Element type of activations and KV cache; the checkpoint's own when left out.
    #[arg(long, value_parser = activation_dtype)]
    pub(crate) dtype: Option<DType>,
    /// Longest sequence in tokens; what the model allows, up to 4096, when left out.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_length: Option<u64>,
}

/// Where what was worked out once is kept.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheArgs {
    /// Folder for what need not be worked out twice, such as verdicts on rules;
    /// $XDG_CACHE_HOME/infernum or ~/.cache/infernum when left out.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Neither read nor write the cache.
    #[arg(long, conflicts_with = "cache_dir")]
    no_cache: bool,
}

impl CacheArgs {
    /// The verdicts on rules.
    pub(crate) fn verdicts(&self) -> Cache {
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

fn activation_dtype(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::Bf16 | DType::F16)) => Ok(dtype),
        _ => Err(format!("expected f32, bf16 or f16, found `{text}`")),
    }
}

/// A model's options are those of its compilation, too.
impl Deref for ModelArgs {
    type Target = CompileArgs;

    fn deref(&self) -> &CompileArgs {
        &self.compile
    }
}

impl ModelArgs {
    /// The model's files.
    pub(crate) fn files(&self) -> Result<ModelFiles, Box<dyn std::error::Error>> {
        Ok(match &self.model {
            Some(path) => ModelFiles::folder(path)?,
            None => infernum_frontend_hf::demo(),
        })
    }

    /// Opens the model with its checkpoint.
    pub(crate) fn open(&self) -> Result<Model, Box<dyn std::error::Error>> {
        Ok(Model::open(self.files()?, self.spec.as_deref(), &self.library())?)
    }

    /// Opens the model without a checkpoint.
    pub(crate) fn open_bare(&self) -> Result<Model, Box<dyn std::error::Error>> {
        Ok(Model::without_weights(self.files()?, self.spec.as_deref(), &self.library())?)
    }
}

impl CompileArgs {
    /// The data files.
    pub(crate) fn library(&self) -> Library {
        Library::new(self.data.as_deref())
    }

    /// The passes to run, less what is disabled; `default` stands for the target's own.
    pub(crate) fn pipeline(&self, default: &str) -> Result<Pipeline, PipelineError> {
        let name = if self.passes == "default" { default } else { &self.passes };
        let mut pipeline = Pipeline::named(name, self.data.as_deref())?;
        pipeline.disabled.extend(self.disable.iter().cloned());
        Ok(pipeline)
    }

    /// Fused ops and rules. Rules that are not built in are tried first, unless that is not wanted.
    pub(crate) fn kernels(&self) -> Result<Kernels, Box<dyn std::error::Error>> {
        let kernels = Kernels::load(self.data.as_deref(), &self.rules)?;
        if !self.allow_unchecked {
            refuse_wrong(&kernels, &self.cache.verdicts())?;
        }
        Ok(kernels)
    }

    /// What calls cost on `target`: its table, and what was measured.
    pub(crate) fn cost_table(&self, target: &str) -> Result<CostTable, DataError> {
        let mut table = CostTable::named(target, self.data.as_deref())?;
        if let Some(path) = &self.costs {
            table.measured = Measurements::open(path)?;
        }
        Ok(table)
    }

    /// The longest sequence to hold.
    pub(crate) fn length(&self, model: &Model) -> Result<u64, ModelError> {
        /// Long enough for a chat; a model's own limit may ask for gigabytes of cache.
        const DEFAULT: u64 = 4096;
        Ok(match self.max_length {
            Some(n) => n.max(1),
            None => model.context_length()?.clamp(1, DEFAULT),
        })
    }
}

/// Trials that a rule of the user's own must pass before it is used.
const TRIALS: usize = 100;

/// Tries every rule that is not built in: one that fails is refused.
fn refuse_wrong(kernels: &Kernels, cache: &Cache) -> Result<(), Box<dyn std::error::Error>> {
    for rule in kernels.rules.iter().filter(|r| !r.built_in) {
        let verdict = cache.check_rule(rule, 1, TRIALS);
        if !verdict.passed() {
            return Err(format!(
                "{verdict}\n(--allow-unchecked uses it all the same; `infernum check-rules` checks all)"
            )
            .into());
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
