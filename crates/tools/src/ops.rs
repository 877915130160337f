//! `infernum ops`.

use std::path::PathBuf;

use infernum_frontend_hf::spec::Library;
use infernum_passes::data::Kernels;
use infernum_passes::reference;

use crate::report::{self, Outcome};

/// The command line.
#[derive(clap::Args)]
pub struct Args {
    /// An op, a fused op, a block, or a structure of data files such as `Family`; the whole reference when
    /// left out.
    name: Option<String>,
    /// Folder whose models/ and kernels/ override and add to the built-in files.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// Prints the reference of ops, expressions, specs, fused ops and rules, or one entry.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let kernels = Kernels::load(args.data.as_deref(), &[])?;
    let library = Library::new(args.data.as_deref());
    let text = match &args.name {
        Some(name) => reference::entry(name, &kernels, &library)?,
        None => reference::page(&kernels, &library)?,
    };
    report::text(&text)
}
