//! The ablation as an SVG: bars of time differences, rule by rule.

use std::fmt::{self, Write};

use super::noise::Difference;
use super::{Ablated, Row};
use crate::svg::{escape, line, text};

const STYLE: &str = "\
svg { color-scheme: light dark; --paper: #fff; --ink: #1d1d20; --faint: #77747c; --line: #dedbd6;
  --prefill: #2f6fb7; --decode: #c8641b; --noise: #c9c6c1; }
@media (prefers-color-scheme: dark) { svg { --paper: #1b1b1f; --ink: #ececee; --faint: #9a98a0;
  --line: #3a3940; --prefill: #7db3f2; --decode: #f0a05e; --noise: #55535b; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); } .title { font-size: 15px; font-weight: 600; }
.faint { fill: var(--faint); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.prefill { fill: var(--prefill); } .decode { fill: var(--decode); } .noise { fill: var(--noise); }
line { stroke: var(--line); } .zero { stroke: var(--faint); }
.whisker { stroke: var(--ink); stroke-opacity: .6; }";

const NAMES: f64 = 176.0;
const PANEL: f64 = 250.0;
const LAUNCHES: f64 = 92.0;
const GAP: f64 = 26.0;
const ROW: f64 = 30.0;
const BAR: f64 = 9.0;
const TOP: f64 = 104.0;

/// One panel: how each rule's rows differ from their reference.
struct Panel<'a> {
    left: f64,
    title: &'a str,
    /// Launches of the reference.
    launches: usize,
    /// A row for each rule.
    rows: Vec<&'a Row>,
    /// The fraction at the end of the axis.
    reach: f64,
}

/// Draws an ablation.
pub(super) fn svg(ablated: &Ablated) -> Result<String, fmt::Error> {
    let rules = ablated.rules();
    let second = NAMES + PANEL + LAUNCHES + 2.0 * GAP;
    let (width, bottom) = (second + PANEL + LAUNCHES + GAP, TOP + ROW * rules.len() as f64);
    let height = bottom + 60.0;
    let mut out = String::new();
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\">\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>"
    )?;
    let title = format!("What each rule buys: {} on {}", ablated.model, ablated.device);
    text(&mut out, (16.0, 26.0), "title", &title)?;
    let measured = format!(
        "Prefill of {} tokens, decoding of {}; medians of {} pairs, each beside its reference.",
        ablated.prompt, ablated.generate, ablated.runs
    );
    text(&mut out, (16.0, 46.0), "faint", &measured)?;
    for (i, rule) in rules.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        text(&mut out, (NAMES - 8.0, y + ROW / 2.0 + 4.0), "end", rule)?;
    }
    let panel = |left, title, kind: fn(&str) -> String, reference: &str| {
        let find = |name: &str| ablated.rows.iter().find(|r| r.rules == name);
        let rows: Vec<&Row> = rules.iter().filter_map(|rule| find(&kind(rule))).collect();
        let launches = find(reference).map_or(0, |r| r.launches_per_step);
        let differences = rows.iter().flat_map(|r| [r.prefill, r.decode]);
        let reach = differences.map(Difference::reach).fold(0.02, f64::max);
        Panel { left, title, launches, rows, reach }
    };
    panel(NAMES, "Without it, against all rules", |r| format!("all but {r}"), "all")
        .draw(&mut out, bottom)?;
    panel(second, "It alone, against none", |r| format!("only {r}"), "none")
        .draw(&mut out, bottom)?;
    legend(&mut out, bottom + 40.0)?;
    writeln!(out, "</svg>")?;
    Ok(out)
}

impl Panel<'_> {
    fn x(&self, fraction: f64) -> f64 {
        self.left + PANEL / 2.0 * (1.0 + (fraction / self.reach).clamp(-1.0, 1.0))
    }

    fn draw(&self, out: &mut String, bottom: f64) -> fmt::Result {
        let end = self.left + PANEL + LAUNCHES;
        text(out, (self.left, TOP - 32.0), "", self.title)?;
        text(out, (end, TOP - 10.0), "faint end", "launches")?;
        for (tick, class) in [(-1.0, ""), (-0.5, ""), (0.0, "zero"), (0.5, ""), (1.0, "")] {
            let (x, at) = (self.x(tick * self.reach), tick * self.reach);
            line(out, class, (x, TOP - 4.0), (x, bottom))?;
            text(out, (x, TOP - 10.0), "faint middle", &percent(at))?;
        }
        for (i, row) in self.rows.iter().enumerate() {
            let y = TOP + ROW * i as f64 + ROW / 2.0 - BAR;
            self.bar(out, y, row.prefill, "prefill", &row.rules)?;
            self.bar(out, y + BAR, row.decode, "decode", &row.rules)?;
            let more = row.launches_per_step as i64 - self.launches as i64;
            let shown = match more {
                0 => format!("{}", row.launches_per_step),
                _ => format!("{} ({more:+})", row.launches_per_step),
            };
            let class = if more == 0 { "faint end" } else { "end" };
            text(out, (end, y + BAR + 4.0), class, &shown)?;
        }
        Ok(())
    }

    fn bar(&self, out: &mut String, y: f64, d: Difference, class: &str, of: &str) -> fmt::Result {
        let (zero, end) = (self.x(0.0), self.x(d.median));
        let (x, width) = (zero.min(end), (end - zero).abs());
        let shown = if d.significant { class } else { "noise" };
        let height = BAR - 1.0;
        write!(out, "<rect class=\"{shown}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" ")?;
        write!(out, "height=\"{height}\"><title>")?;
        let said = if d.significant { "" } else { ", within the noise" };
        escape(
            out,
            &format!("{of}: {class} takes {} ± {}{said}", percent(d.median), plain(d.spread)),
        )?;
        writeln!(out, "</title></rect>")?;
        let middle = y + height / 2.0;
        let (from, to) = (self.x(d.median - d.spread), self.x(d.median + d.spread));
        if d.spread > 0.0 { line(out, "whisker", (from, middle), (to, middle)) } else { Ok(()) }
    }
}

fn legend(out: &mut String, y: f64) -> fmt::Result {
    let mut x = NAMES;
    for (class, label) in
        [("prefill", "prefill time"), ("decode", "decode time"), ("noise", "within the noise")]
    {
        writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"12\" height=\"12\"/>",
            y - 10.0
        )?;
        text(out, (x + 18.0, y), "", label)?;
        x += 118.0;
    }
    text(out, (x + 16.0, y), "faint", "right of the line: slower; launches of a decode step")
}

fn percent(fraction: f64) -> String {
    let percent = fraction * 100.0;
    match percent.abs() {
        p if p < 0.05 => "0".to_owned(),
        p if p < 10.0 => format!("{percent:+.1} %"),
        _ => format!("{percent:+.0} %"),
    }
}

fn plain(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}
