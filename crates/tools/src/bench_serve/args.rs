//! The command line of `infernum bench serve`.

use std::path::PathBuf;

use super::load::LoadArgs;
use super::wire::{Endpoint, PromptKind};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server, as http://HOST:PORT.
    #[arg(long, value_name = "URL", conflicts_with_all = ["sweep", "matrix"])]
    pub(super) url: Option<String>,
    /// Start a server for each configuration of a TOML file (see bench/README.md), one after the other.
    #[arg(long, value_name = "FILE", conflicts_with = "matrix")]
    pub(super) sweep: Option<PathBuf>,
    /// Start `infernum serve` once with each way to batch, to keep the KV cache and to schedule.
    #[arg(long)]
    pub(super) matrix: bool,
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(flatten)]
    pub(super) ask: AskArgs,
    /// Measured repetitions; configurations take turns, and the median counts.
    #[arg(long, value_name = "N")]
    pub(super) repeats: Option<u32>,
    /// Another build of `infernum` to start; this one when left out.
    #[arg(long, value_name = "FILE")]
    pub(super) program: Option<PathBuf>,
    /// Only configurations whose names hold one of these texts.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub(super) only: Vec<String>,
    /// Write settings, figures and every request as JSON.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Keep the time between all pieces of text in the JSON.
    #[arg(long, requires = "json")]
    pub(super) gaps: bool,
    /// Write a page with tables and plots.
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// What the page is about.
    #[arg(long, value_name = "TEXT")]
    pub(super) title: Option<String>,
    /// Flags for every `infernum serve` that is started.
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub(super) serve: Vec<String>,
}

/// How requests are put.
#[derive(clap::Args, Clone)]
pub(super) struct AskArgs {
    /// Name of the model; the first that the server lists when left out.
    #[arg(long, value_name = "NAME")]
    pub(super) model: Option<String>,
    /// The server's key.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    pub(super) endpoint: Endpoint,
    /// How prompts are given; ids where the server takes them when left out.
    #[arg(long, value_enum)]
    pub(super) prompt: Option<PromptKind>,
    /// Token ids are random below this.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) vocab: u32,
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(super) temperature: f64,
    /// Ask for whole answers, not streams.
    #[arg(long)]
    pub(super) no_stream: bool,
    /// Do not ask the server to go on after an end-of-text token.
    #[arg(long)]
    pub(super) stop_at_eos: bool,
    /// Send a refused request again up to so often, when the server says (Retry-After).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) retry: u32,
    /// Longest time that a request may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub(super) timeout: f64,
}
