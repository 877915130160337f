//! Logs: one line an event, on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// What is logged, and how.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Logs")]
pub(crate) struct LogArgs {
    /// text, or one JSON object a line.
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    log_format: String,
    /// error, warn, info, debug or trace, or directives such as `info,infernum=debug`; RUST_LOG
    /// when left out.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl LogArgs {
    /// Starts logging.
    pub(crate) fn init(&self) -> Result<(), Box<dyn std::error::Error>> {
        let variable = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|v| !v.is_empty());
        let directives = self.log_level.clone().or(variable).unwrap_or_else(|| "info".to_owned());
        let filter = EnvFilter::try_new(&directives)
            .map_err(|e| format!("--log-level: `{directives}`: {e}"))?;
        let lines = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_span_events(FmtSpan::NONE)
            .with_target(false)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
        // A second subscriber is refused; there is none.
        let _ = if self.log_format == "json" {
            lines.json().flatten_event(true).try_init()
        } else {
            lines.try_init()
        };
        Ok(())
    }
}
