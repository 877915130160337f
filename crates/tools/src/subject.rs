//! What is measured.

use std::ops::Deref;
use std::path::PathBuf;

use infernum::ModelOptions;
use infernum_frontend_hf::Model;

use crate::report;

/// A model, or a bare config with random weights.
#[derive(clap::Args, Clone)]
pub(crate) struct Subject {
    /// A config.json to run with random weights, instead of a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model", help_heading = "Model")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

impl Subject {
    /// Opens it, as far as headers.
    pub(crate) fn open(&self) -> Result<Model, infernum::Error> {
        let Some(path) = &self.config else {
            return self.model.open_with_progress(&report::progress());
        };
        self.model.open_config(path)
    }

    /// What reports call it.
    pub(crate) fn name(&self, model: &Model) -> String {
        let name = || model.files.name().to_owned();
        self.config.as_ref().map_or_else(name, |path| path.display().to_string())
    }
}

/// Its options are those of the model.
impl Deref for Subject {
    type Target = ModelOptions;

    fn deref(&self) -> &ModelOptions {
        &self.model
    }
}
