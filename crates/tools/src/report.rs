//! How results and errors reach the user.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use infernum::{Progress, Stage};
use infernum_ir::SourceWarning;
use serde::Serialize;

/// What every command returns.
pub type Outcome = Result<(), Box<dyn Error>>;

/// Prints an error and what caused it.
pub fn error(e: &dyn Error) {
    anstream::eprintln!("\x1b[1;31merror\x1b[0m: {e}");
    let mut shown = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        // Transparent wrappers repeat what they wrap.
        let text = e.to_string();
        if !shown.contains(&text) {
            anstream::eprintln!("  because: {text}");
        }
        shown = text;
        cause = e.source();
    }
}

/// Prints what is likely a mistake, on standard error. A model may be compiled several times; the same
/// is said once.
pub fn warning(warning: &SourceWarning) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let text = warning.to_string();
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(text.clone()) {
        anstream::eprintln!("{text}");
    }
}

/// Prints what a user should know although it goes on.
pub fn notice(text: &str) {
    anstream::eprintln!("\x1b[1;33mwarning\x1b[0m: {text}");
}

/// A part of a whole in percent; a dash where there is no whole.
pub(crate) fn percent(part: f64, whole: f64, digits: usize) -> String {
    let percent = part / whole * 100.0;
    if percent.is_finite() { format!("{percent:.digits$}%") } else { "–".to_owned() }
}

/// An error and its causes, on one line.
pub(crate) fn chain(e: &dyn Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text
}

/// Whether an error only says that nobody reads the output any more.
pub fn is_broken_pipe(e: &(dyn Error + 'static)) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints a value as one line of JSON.
pub fn json(value: &impl Serialize) -> Outcome {
    line(&serde_json::to_string(value)?)
}

/// Prints a line to standard output.
pub fn line(text: &str) -> Outcome {
    writeln!(anstream::stdout().lock(), "{text}")?;
    Ok(())
}

/// Prints text to standard output as it is, at once.
pub fn text(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Draws how far the library is on standard error: a bar for each stage, hidden where that is no terminal.
pub fn progress() -> impl Fn(Progress<'_>) + Sync {
    let shown: Mutex<Option<ProgressBar>> = Mutex::new(None);
    move |progress| match (progress, &mut *shown.lock().unwrap_or_else(PoisonError::into_inner)) {
        (Progress::Begin { stage, total }, shown) => {
            let style = match stage {
                Stage::Download => {
                    "{msg} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left"
                }
                Stage::Weights => "{msg} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}",
                Stage::Compile => STEPS,
            };
            *shown = Some(bar(stage.to_string(), total, style));
        }
        (Progress::Advance(by), Some(bar)) => bar.inc(by),
        (Progress::End, shown) => {
            if let Some(bar) = shown.take() {
                bar.finish_and_clear();
            }
        }
        (Progress::Warning(warning), _) => self::warning(warning),
        (Progress::Notice(text), _) => notice(text),
        (Progress::Advance(_), None) => {}
    }
}

/// A bar over steps on standard error; hidden where that is no terminal.
pub(crate) fn steps_bar(what: &'static str, total: u64) -> ProgressBar {
    bar(what.to_owned(), total, STEPS)
}

const STEPS: &str = "{msg} {bar:30} {pos}/{len}";

fn bar(what: String, total: u64, style: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what);
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
