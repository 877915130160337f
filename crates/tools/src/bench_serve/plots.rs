//! Plots as SVG, coloured by the page's style.

use std::fmt::{self, Write};

use super::stats::Spread;
use crate::svg::{Point, escape, line, text};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 44.0;
/// Points of a curve: more cannot be seen.
const POINTS: usize = 160;

/// A figure of a load, against another.
pub(super) struct Curve {
    /// Its colour's number.
    pub(super) series: usize,
    pub(super) name: String,
    pub(super) points: Vec<(Spread, Spread)>,
}

/// Percentiles of a configuration.
pub(super) struct Bars {
    pub(super) series: usize,
    pub(super) name: String,
    /// P50, P95 and P99.
    pub(super) values: [Option<Spread>; 3],
}

/// Samples of a configuration, ascending.
pub(super) struct Samples {
    pub(super) series: usize,
    pub(super) name: String,
    pub(super) sorted: Vec<f64>,
}

/// Where values lie.
struct Axes {
    most: Point,
    /// The smallest value of a logarithmic x axis.
    log_from: Option<f64>,
}

impl Axes {
    fn at(&self, (x, y): Point) -> Point {
        let part = match self.log_from {
            Some(from) => (x.max(from) / from).ln() / (self.most.0 / from).ln(),
            None => x / self.most.0,
        };
        let (width, height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        (LEFT + width * part.clamp(0.0, 1.0), HEIGHT - BOTTOM - height * (y / self.most.1))
    }

    fn draw(
        &self,
        out: &mut String,
        labels: (&str, &str),
        y_tick: fn(f64) -> String,
    ) -> fmt::Result {
        let xs = match self.log_from {
            Some(from) => decades(from, self.most.0),
            None => ticks(self.most.0),
        };
        for x in xs {
            let (px, py) = self.at((x, 0.0));
            line(out, "", (px, TOP), (px, py))?;
            text(out, (px, py + 16.0), "faint middle", &short(x))?;
        }
        for y in ticks(self.most.1) {
            let (px, py) = self.at((0.0, y));
            line(out, "", (px, py), (WIDTH - RIGHT, py))?;
            text(out, (px - 6.0, py + 4.0), "faint end", &y_tick(y))?;
        }
        text(out, (WIDTH - RIGHT, HEIGHT - 8.0), "faint end", labels.0)?;
        text(out, (8.0, TOP - 10.0), "faint", labels.1)
    }
}

/// One figure against another, a point for each load.
pub(super) fn scatter(
    title: &str,
    labels: (&str, &str),
    curves: &[Curve],
) -> Result<String, fmt::Error> {
    let points = || curves.iter().flat_map(|c| &c.points);
    let most = (round_up(points().map(|p| p.0.most)), round_up(points().map(|p| p.1.most)));
    let axes = Axes { most, log_from: None };
    let mut out = start(title, HEIGHT)?;
    axes.draw(&mut out, labels, short)?;
    for curve in curves {
        writeln!(out, "<g style=\"--series:{}\">", curve.series)?;
        let place = |p: &(Spread, Spread)| axes.at((p.0.median, p.1.median));
        path(&mut out, &curve.points.iter().map(place).collect::<Vec<_>>(), &curve.name)?;
        for (x, y) in &curve.points {
            let at = axes.at((x.median, y.median));
            line(&mut out, "whisker", axes.at((x.least, y.median)), axes.at((x.most, y.median)))?;
            line(&mut out, "whisker", axes.at((x.median, y.least)), axes.at((x.median, y.most)))?;
            let said = format!("{}: {}, {}", curve.name, short(x.median), short(y.median));
            write!(out, "<circle class=\"dot\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\">", at.0, at.1)?;
            titled(&mut out, &said, "circle")?;
        }
        writeln!(out, "</g>")?;
    }
    end(out)
}

/// The part of samples at or below each value; the axis is logarithmic.
pub(super) fn cdf(title: &str, label: &str, all: &[Samples]) -> Result<String, fmt::Error> {
    let ends = || all.iter().filter_map(|s| s.sorted.first().zip(s.sorted.last()));
    let least = ends().map(|(a, _)| *a).fold(f64::INFINITY, f64::min);
    let most = ends().map(|(_, b)| *b).fold(0.0, f64::max);
    if !(least.is_finite() && most > 0.0) {
        return Ok(String::new());
    }
    let from = least.max(most * 1e-6) * 0.9;
    let axes = Axes { most: (most * 1.05, 1.0), log_from: Some(from) };
    let mut out = start(title, HEIGHT)?;
    axes.draw(&mut out, (label, "requests"), |y| format!("{:.0} %", y * 100.0))?;
    for samples in all.iter().filter(|s| !s.sorted.is_empty()) {
        let (sorted, count) = (&samples.sorted, samples.sorted.len());
        let steps = POINTS.min(count);
        let at = |k: usize| {
            let rank = (k * count).div_ceil(steps);
            axes.at((sorted[rank.max(1) - 1], rank as f64 / count as f64))
        };
        let points: Vec<Point> = (0..=steps).map(at).collect();
        writeln!(out, "<g style=\"--series:{}\">", samples.series)?;
        path(&mut out, &points, &samples.name)?;
        writeln!(out, "</g>")?;
    }
    end(out)
}

/// P50, P95 and P99 of each configuration: the darker, the lower.
pub(super) fn bars(title: &str, unit: &str, rows: &[Bars]) -> Result<String, fmt::Error> {
    const NAMES: f64 = 150.0;
    const TOP: f64 = 34.0;
    const ROW: f64 = 26.0;
    let values = rows.iter().flat_map(|r| r.values).flatten();
    let most = round_up(values.map(|s| s.most));
    let bottom = TOP + 18.0 + ROW * rows.len() as f64;
    let x = |value: f64| NAMES + (WIDTH - NAMES - RIGHT) * (value / most).min(1.0);
    let mut out = start(title, bottom + 12.0)?;
    for tick in ticks(most) {
        line(&mut out, "", (x(tick), TOP + 14.0), (x(tick), bottom))?;
        text(&mut out, (x(tick), TOP + 8.0), "faint middle", &short(tick))?;
    }
    text(&mut out, (8.0, TOP + 8.0), "faint", unit)?;
    for (i, row) in rows.iter().enumerate() {
        let y = TOP + 18.0 + ROW * i as f64;
        text(&mut out, (NAMES - 8.0, y + 15.0), "end", &row.name)?;
        writeln!(out, "<g style=\"--series:{}\">", row.series)?;
        for (name, value) in ["P99", "P95", "P50"].iter().zip(row.values.iter().rev()) {
            let Some(Spread { median, least, most }) = *value else { continue };
            let width = x(median) - NAMES;
            write!(
                out,
                "<rect class=\"bar {name}\" x=\"{NAMES}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\">",
                y + 2.0
            )?;
            titled(&mut out, &format!("{} {name}: {} {unit}", row.name, short(median)), "rect")?;
            if least < most {
                line(&mut out, "whisker", (x(least), y + 11.0), (x(most), y + 11.0))?;
            }
        }
        writeln!(out, "</g>")?;
    }
    end(out)
}

fn start(title: &str, height: f64) -> Result<String, fmt::Error> {
    let mut out = String::new();
    writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">")?;
    text(&mut out, (8.0, 16.0), "name", title)?;
    Ok(out)
}

fn end(mut out: String) -> Result<String, fmt::Error> {
    writeln!(out, "</svg>")?;
    Ok(out)
}

fn path(out: &mut String, points: &[Point], name: &str) -> fmt::Result {
    write!(out, "<polyline class=\"curve\" points=\"")?;
    for (x, y) in points {
        write!(out, "{x:.1},{y:.1} ")?;
    }
    write!(out, "\">")?;
    titled(out, name, "polyline")
}

fn titled(out: &mut String, said: &str, element: &str) -> fmt::Result {
    write!(out, "<title>")?;
    escape(out, said)?;
    writeln!(out, "</title></{element}>")
}

/// The next round number from the largest value.
fn round_up(values: impl Iterator<Item = f64>) -> f64 {
    let most = values.fold(0.0, f64::max);
    if most <= 0.0 || !most.is_finite() {
        return 1.0;
    }
    let unit = 10f64.powf(most.log10().floor());
    let steps = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|s| s * unit).find(|s| *s >= most * 0.999).unwrap_or(10.0 * unit)
}

/// Four or five equal steps up to a round number, zero with them.
fn ticks(most: f64) -> Vec<f64> {
    let least = most / 5.0;
    let unit = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|s| s * unit);
    let step = steps.into_iter().find(|s| *s >= least * 0.999).unwrap_or(least);
    (0..=5).map(|i| f64::from(i) * step).filter(|t| *t <= most * 1.001).collect()
}

/// 1, 2 and 5 times powers of ten within an interval; powers alone where it is long.
fn decades(from: f64, to: f64) -> Vec<f64> {
    let steps: &[f64] = if to / from < 300.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = from.log10().floor() as i32..=to.log10().ceil() as i32;
    let all = powers.flat_map(|p| steps.iter().map(move |s| s * 10f64.powi(p)));
    all.filter(|t| (from..=to).contains(t)).collect()
}

fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 10_000.0 => format!("{:.0}k", value / 1e3),
        v if v >= 1_000.0 && v % 1_000.0 != 0.0 => format!("{:.1}k", value / 1e3),
        v if v >= 1_000.0 => format!("{:.0}k", value / 1e3),
        v if v == v.trunc() => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.1}"),
        _ => format!("{}", (value * 1e3).round() / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (most, end) in [(0.0, 1.0), (7.2, 8.0), (0.031, 0.04), (1500.0, 1500.0), (9.99, 10.0)] {
            assert!((round_up([most].into_iter()) - end).abs() < 1e-9, "{most}");
        }
        assert_eq!(ticks(8.0), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(decades(3.0, 70.0), [5.0, 10.0, 20.0, 50.0]);
    }

    #[test]
    fn plots_of_nothing_and_of_one_value_are_drawn() {
        let samples = |sorted| Samples { series: 0, name: "<a>".into(), sorted };
        assert_eq!(cdf("t", "ms", &[samples(vec![])]).expect("a plot"), "");
        let drawn = cdf("t", "ms", &[samples(vec![2.0]), samples(vec![])]).expect("a plot");
        assert!(drawn.contains("&lt;a&gt;") && !drawn.contains("NaN"), "{drawn}");
        assert!(!scatter("t", ("x", "y"), &[]).expect("a plot").contains("NaN"));
        let row = Bars { series: 0, name: "a".into(), values: [None; 3] };
        assert!(!bars("t", "ms", &[row]).expect("a plot").contains("NaN"));
    }
}
