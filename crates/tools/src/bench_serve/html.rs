//! The report as a page that holds all it needs.

use std::error::Error;

use serde::Serialize;

use super::configuration::{Configuration, Failure};
use super::load::{Load, Pace};
use super::plots::{self, Bars, Curve, Samples};
use super::report::{COLUMNS, Report, Row, Section, cell, lengths, notes};
use super::summary::Figures;
use super::wire::Ask;
use crate::page;

#[derive(Serialize)]
struct Page<'a> {
    report: Head<'a>,
    style: String,
    /// Configurations, each a colour.
    names: Vec<&'a str>,
    overviews: Vec<String>,
    /// Of the tables' columns.
    titles: Vec<&'a str>,
    repeats: u32,
    sections: Vec<Shown>,
}

/// The report without its runs.
#[derive(Serialize)]
struct Head<'a> {
    title: &'a str,
    version: &'a str,
    ask: &'a Ask,
    serve: &'a [String],
    failures: &'a [Failure],
}

#[derive(Serialize)]
struct Shown {
    name: String,
    lengths: String,
    rows: Vec<ShownRow>,
    plots: Vec<String>,
    /// Whether it is unfolded at first.
    open: bool,
}

#[derive(Serialize)]
struct ShownRow {
    series: usize,
    name: String,
    flags: String,
    /// Medians, and ranges where repetitions differ.
    cells: Vec<(String, Option<String>)>,
    same_text: Option<String>,
    peak: Option<String>,
    notes: Vec<String>,
}

/// Writes the report as HTML.
pub(super) fn page(report: &Report) -> Result<String, Box<dyn Error>> {
    let mut names: Vec<&str> = Vec::new();
    for run in &report.runs {
        if !names.contains(&run.configuration.as_str()) {
            names.push(&run.configuration);
        }
    }
    let sections = report.sections();
    let overviews = overviews(&sections, &names)?;
    let mut shown = Vec::with_capacity(sections.len());
    for (i, section) in sections.iter().enumerate() {
        // The last level of each workload: the heaviest, if they are in order.
        let next = sections.get(i + 1);
        let open = next.is_none_or(|s| s.load.workload != section.load.workload);
        shown.push(section_of(report, section, &names, open)?);
    }
    let page = Page {
        report: Head {
            title: &report.title,
            version: report.version,
            ask: &report.ask,
            serve: &report.serve,
            failures: &report.failures,
        },
        style: page::BASE_STYLE.to_owned() + include_str!("report.css"),
        names,
        overviews,
        titles: COLUMNS.iter().map(|c| c.title).collect(),
        repeats: report.runs.iter().map(|r| r.repeat + 1).max().unwrap_or(0),
        sections: shown,
    };
    Ok(page::render(include_str!("report.html"), &page)?)
}

fn series(names: &[&str], name: &str) -> usize {
    names.iter().position(|n| *n == name).unwrap_or(0)
}

/// Throughput against latency for each workload that was driven at several levels or by several servers.
fn overviews(sections: &[Section], names: &[&str]) -> Result<Vec<String>, std::fmt::Error> {
    let mut plots = Vec::new();
    let mut seen = Vec::new();
    for Section { load, .. } in sections {
        if seen.contains(&kind(load)) {
            continue;
        }
        seen.push(kind(load));
        let same: Vec<&Section> = sections.iter().filter(|s| kind(s.load) == kind(load)).collect();
        let curve = |name: &&str| {
            let rows = same.iter().flat_map(|s| s.rows.iter().filter(|r| r.configuration == *name));
            let point = |r: &Row| {
                let rate = r.spread(|f| Some(f.output_tokens_per_second))?;
                Some((rate, r.spread(|f| f.latency.map(|s| s.p99))?))
            };
            let points = rows.filter_map(point).collect();
            Curve { series: series(names, name), name: (*name).to_owned(), points }
        };
        let curves: Vec<Curve> = names.iter().map(curve).collect();
        let title = format!(
            "{}: latency P99 against throughput",
            load.name().split(',').next().unwrap_or("")
        );
        plots.push(plots::scatter(&title, ("output tok/s", "s"), &curves)?);
    }
    Ok(plots)
}

/// What loads of one curve have in common.
fn kind(load: &Load) -> Load {
    let pace = match load.pace {
        Pace::Concurrency(_) => Pace::Concurrency(0),
        Pace::Rate(_) => Pace::Rate(0.0),
    };
    Load { pace, requests: 0, seed: 0, ..load.clone() }
}

fn section_of(
    report: &Report,
    section: &Section,
    names: &[&str],
    open: bool,
) -> Result<Shown, std::fmt::Error> {
    const MS: f64 = 1e3;
    type Percentiles = [fn(&Figures) -> Option<f64>; 3];
    let ttft: Percentiles = [
        |f| f.ttft.map(|s| s.p50 * MS),
        |f| f.ttft.map(|s| s.p95 * MS),
        |f| f.ttft.map(|s| s.p99 * MS),
    ];
    let itl: Percentiles = [
        |f| f.itl.map(|s| s.p50 * MS),
        |f| f.itl.map(|s| s.p95 * MS),
        |f| f.itl.map(|s| s.p99 * MS),
    ];
    let bars = |of: Percentiles| {
        let bar = |r: &Row| Bars {
            series: series(names, r.configuration),
            name: r.configuration.to_owned(),
            values: of.map(|figure| r.spread(figure)),
        };
        section.rows.iter().map(bar).collect::<Vec<_>>()
    };
    let samples = |time| {
        let of = |r: &Row| Samples {
            series: series(names, r.configuration),
            name: r.configuration.to_owned(),
            sorted: r.samples(time).into_iter().map(|s| s * MS).collect(),
        };
        section.rows.iter().map(of).collect::<Vec<_>>()
    };
    let plots = vec![
        plots::bars("Time to first token", "ms", &bars(ttft))?,
        plots::bars("Time between pieces of text", "ms", &bars(itl))?,
        plots::cdf("Time to first token, all requests", "ms", &samples(|r| r.ttft))?,
        plots::cdf("Latency, all requests", "ms", &samples(|r| Some(r.latency)))?,
    ];
    let rows = section.rows.iter().map(|r| row_of(report, r, names)).collect();
    Ok(Shown { name: section.load.name(), lengths: lengths(section.load), rows, plots, open })
}

fn row_of(report: &Report, row: &Row, names: &[&str]) -> ShownRow {
    let flags = report.configurations.iter().find(|c| c.name == row.configuration);
    let same = row.spread(|f| f.same_text);
    let peak = row.spread(|f| f.server_peak_bytes.map(|b| b as f64));
    let mut all: Vec<String> = row.runs.iter().flat_map(|r| notes(&r.figures)).collect();
    all.dedup();
    ShownRow {
        series: series(names, row.configuration),
        name: row.configuration.to_owned(),
        flags: flags.map(Configuration::flags).unwrap_or_default(),
        cells: COLUMNS.iter().map(|c| cell(row.figure(c))).collect(),
        same_text: same.map(|s| format!("{:.1}", s.least * 100.0)),
        peak: peak.map(|p| format!("{:.0}", p.most / f64::from(1 << 20))),
        notes: all,
    }
}
