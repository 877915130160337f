//! What was measured, as text and as tables.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::configuration::{Configuration, Failure};
use super::load::Load;
use super::record::{Outcome, Record};
use super::stats::{Spread, Summary};
use super::summary::{Figures, Run};
use super::wire::Ask;
use crate::report as terminal;

/// All that was measured.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) title: String,
    /// How requests were put.
    pub(super) ask: Ask,
    /// Flags of every server that was started.
    pub(super) serve: Vec<String>,
    pub(super) configurations: Vec<Configuration>,
    pub(super) failures: Vec<Failure>,
    pub(super) runs: Vec<Run>,
}

/// One load, and how each configuration fared.
pub(super) struct Section<'a> {
    pub(super) load: &'a Load,
    pub(super) rows: Vec<Row<'a>>,
}

/// A configuration's repetitions of a load.
pub(super) struct Row<'a> {
    pub(super) configuration: &'a str,
    pub(super) runs: Vec<&'a Run>,
}

/// A figure of a table.
pub(super) struct Column {
    pub(super) title: &'static str,
    figure: fn(&Figures) -> Option<f64>,
}

const MS: f64 = 1e3;

/// The figures of a table.
pub(super) const COLUMNS: [Column; 12] = [
    Column { title: "ok", figure: |f| Some(f.ok as f64) },
    Column { title: "not ok", figure: |f| Some((f.refused + f.failed) as f64) },
    Column { title: "req/s", figure: |f| Some(f.requests_per_second) },
    Column { title: "out tok/s", figure: |f| Some(f.output_tokens_per_second) },
    Column { title: "TTFT P50 ms", figure: |f| f.ttft.map(|s| s.p50 * MS) },
    Column { title: "TTFT P99 ms", figure: |f| f.ttft.map(|s| s.p99 * MS) },
    Column { title: "ITL P50 ms", figure: |f| f.itl.map(|s| s.p50 * MS) },
    Column { title: "ITL P99 ms", figure: |f| f.itl.map(|s| s.p99 * MS) },
    Column { title: "latency P50 ms", figure: |f| f.latency.map(|s| s.p50 * MS) },
    Column { title: "latency P99 ms", figure: |f| f.latency.map(|s| s.p99 * MS) },
    Column { title: "queue mean ms", figure: |f| f.queue_wait.map(|w| w.mean * MS) },
    Column { title: "cached %", figure: |f| f.cached_fraction().map(|c| c * 100.0) },
];

impl Figures {
    /// The part of the prompts' tokens that the server had in its cache.
    pub(super) fn cached_fraction(&self) -> Option<f64> {
        let cached = self.cached_tokens.filter(|_| self.prompt_tokens > 0)?;
        Some(cached as f64 / self.prompt_tokens as f64)
    }
}

impl Row<'_> {
    /// A column's figure over all repetitions.
    pub(super) fn figure(&self, column: &Column) -> Option<Spread> {
        self.spread(column.figure)
    }

    /// A figure over all repetitions.
    pub(super) fn spread(&self, figure: fn(&Figures) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs.iter().filter_map(|r| figure(&r.figures)).collect())
    }

    /// A time of every request that ended well, in all repetitions, ascending.
    pub(super) fn samples(&self, time: fn(&Record) -> Option<f64>) -> Vec<f64> {
        let records = self.runs.iter().flat_map(|r| &r.records);
        let well = records.filter(|r| r.outcome == Outcome::Ok);
        let mut samples: Vec<f64> = well.filter_map(time).collect();
        samples.sort_unstable_by(f64::total_cmp);
        samples
    }
}

impl Report {
    pub(super) fn new(title: Option<String>, ask: &Ask) -> Report {
        Report {
            version: env!("CARGO_PKG_VERSION"),
            title: title.unwrap_or_else(|| format!("Serving {}", ask.model)),
            ask: ask.clone(),
            serve: Vec::new(),
            configurations: Vec::new(),
            failures: Vec::new(),
            runs: Vec::new(),
        }
    }

    /// Requests that failed, and servers.
    pub(super) fn failed(&self) -> usize {
        self.runs.iter().map(|r| r.figures.failed).sum::<usize>() + self.failures.len()
    }

    /// Runs by load, in the order in which they came.
    pub(super) fn sections(&self) -> Vec<Section<'_>> {
        let mut sections: Vec<Section> = Vec::new();
        for run in &self.runs {
            // Repetitions differ in their seeds only.
            let same = |load: &Load| Load { seed: 0, ..load.clone() };
            let section = sections.iter().position(|s| same(s.load) == same(&run.load));
            let section = section.unwrap_or_else(|| {
                sections.push(Section { load: &run.load, rows: Vec::new() });
                sections.len() - 1
            });
            let rows = &mut sections[section].rows;
            match rows.iter_mut().find(|r| r.configuration == run.configuration) {
                Some(row) => row.runs.push(run),
                None => rows.push(Row { configuration: &run.configuration, runs: vec![run] }),
            }
        }
        sections
    }

    /// Notes how many texts are the same as the first configuration's of the same requests.
    pub(super) fn compare_texts(&mut self) {
        let mut first: HashMap<(u64, String, u32), u64> = HashMap::new();
        let Some(reference) = self.runs.first().map(|r| r.configuration.clone()) else { return };
        for run in &mut self.runs {
            let (seed, name) = (run.load.seed, run.load.name());
            let key = |r: &Record| (seed, name.clone(), r.index);
            let well = || run.records.iter().filter(|r| r.outcome == Outcome::Ok);
            if run.configuration == reference {
                first.extend(well().map(|r| (key(r), r.text)));
                continue;
            }
            let both = || well().filter_map(|r| Some((*first.get(&key(r))?, r.text)));
            let (same, all) = (both().filter(|(a, b)| a == b).count(), both().count());
            run.figures.same_text = (all > 0).then(|| same as f64 / all as f64);
        }
    }

    /// Prints tables, where there is anything to compare.
    pub(super) fn print(&self) -> terminal::Outcome {
        if self.runs.len() == 1 && self.configurations.is_empty() {
            return Ok(());
        }
        for section in self.sections() {
            let load = section.load;
            terminal::line(&format!("\n{} — {}", load.name(), lengths(load)))?;
            terminal::text(&table(&section))?;
        }
        Ok(())
    }
}

/// What a load asks for.
pub(super) fn lengths(load: &Load) -> String {
    let shared = match load.shared {
        0 => String::new(),
        n => format!("{n} shared + "),
    };
    let hang_up = match load.disconnect {
        0.0 => String::new(),
        part => format!(", {:.0} % hang up", part * 100.0),
    };
    let (requests, input, output) = (load.requests, load.input, load.output);
    format!("{requests} requests, {shared}{input} tokens in, {output} out{hang_up}")
}

/// A number with three digits that matter.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A median, and the least and most where they differ.
pub(super) fn cell(spread: Option<Spread>) -> (String, Option<String>) {
    let Some(Spread { median, least, most }) = spread else { return ("–".to_owned(), None) };
    let (median, least, most) = (number(median), number(least), number(most));
    let range = (least != most).then(|| format!("{least}–{most}"));
    (median, range)
}

fn table(section: &Section) -> String {
    let mut rows = vec![vec!["configuration".to_owned()]];
    rows[0].extend(COLUMNS.iter().map(|c| c.title.to_owned()));
    for row in &section.rows {
        let (mut cells, mut ranges) = (vec![row.configuration.to_owned()], vec![String::new()]);
        for column in &COLUMNS {
            let (median, range) = cell(row.figure(column));
            cells.push(median);
            ranges.push(range.unwrap_or_default());
        }
        rows.push(cells);
        if ranges.iter().any(|r| !r.is_empty()) {
            rows.push(ranges);
        }
    }
    let count = |text: &String| text.chars().count();
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|c| rows.iter().map(|row| count(&row[c])).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in &rows {
        for (i, (text, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to a string cannot fail.
            let _ = match i {
                0 => write!(out, "{text:<width$}"),
                _ => write!(out, "  {text:>width$}"),
            };
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}

/// Prints a run of its own, in full.
pub(super) fn print_run(run: &Run) -> terminal::Outcome {
    let f = &run.figures;
    terminal::line(&format!("{} · {}", run.load.name(), lengths(&run.load)))?;
    terminal::line(&format!(
        "  {} ok, {} refused, {} failed, {} hung up, {} retries, in {:.2} s",
        f.ok, f.refused, f.failed, f.disconnected, f.retries, f.seconds
    ))?;
    terminal::line(&format!(
        "  {} requests/s, {} output tok/s, {} tok/s with prompts",
        number(f.requests_per_second),
        number(f.output_tokens_per_second),
        number(f.total_tokens_per_second)
    ))?;
    let columns = ["mean", "P50", "P95", "P99", "max"].map(|c| format!("{c:>10}"));
    terminal::line(&format!("  {:<18}{}", "ms", columns.join("")))?;
    let times = [
        ("first token", f.ttft),
        ("between pieces", f.itl),
        ("per output token", f.tpot),
        ("whole request", f.latency),
    ];
    for (name, summary) in times {
        let Some(Summary { mean, p50, p95, p99, max, .. }) = summary else { continue };
        let cells = [mean, p50, p95, p99, max].map(|s| format!("{:>10.2}", s * MS)).join("");
        terminal::line(&format!("  {name:<18}{cells}"))?;
    }
    if let Some(wait) = f.queue_wait {
        let bound = |b: Option<f64>| {
            format!("{:>10}", b.map_or("–".into(), |b| format!("≤{}", number(b * MS))))
        };
        let bounds = [wait.p50_at_most, wait.p95_at_most, wait.p99_at_most].map(bound).join("");
        terminal::line(&format!("  {:<18}{:>10.2}{bounds}", "queue wait", wait.mean * MS))?;
    }
    notes(f).iter().try_for_each(|note| terminal::line(&format!("  {note}")))
}

/// What a reader should know of a run.
pub(super) fn notes(f: &Figures) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some((cached, part)) = f.cached_tokens.zip(f.cached_fraction()) {
        let (of, part) = (f.prompt_tokens, part * 100.0);
        notes.push(format!("{cached} of {of} prompt tokens were cached ({part:.1} %)"));
    }
    if !f.counted_by_server && f.ok > 0 {
        notes.push("the server did not count tokens: each piece of text counts as one".to_owned());
    }
    if f.other_length > 0 {
        notes.push(format!("{} outputs are not as long as was asked for", f.other_length));
    }
    if f.refused_without_retry_after > 0 {
        notes.push(format!("{} refusals had no Retry-After", f.refused_without_retry_after));
    }
    if let Some(late) = f.late.filter(|l| l.p99 > 0.01) {
        notes.push(format!("this client was late: P99 {} ms", number(late.p99 * MS)));
    }
    let after = f.after.unwrap_or_default();
    for (what, count) in [("running", after.running), ("waiting", after.waiting)] {
        if let Some(n) = count.filter(|n| *n > 0.0) {
            notes.push(format!(
                "the server still had {n} requests {what} two seconds after the end"
            ));
        }
    }
    notes.extend(f.errors.iter().take(8).map(|(message, n)| format!("{n} × {message}")));
    notes
}
