//! Pieces of SVG that several plots need.

use std::fmt::{self, Write};

/// A point, in pixels from the upper left.
pub(crate) type Point = (f64, f64);

/// A straight line.
pub(crate) fn line(out: &mut String, class: &str, from: Point, to: Point) -> fmt::Result {
    let ((x1, y1), (x2, y2)) = (from, to);
    writeln!(
        out,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
    )
}

/// A line of text.
pub(crate) fn text(out: &mut String, (x, y): Point, class: &str, text: &str) -> fmt::Result {
    write!(out, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">")?;
    escape(out, text)?;
    writeln!(out, "</text>")
}

/// Text between tags.
pub(crate) fn escape(out: &mut String, text: &str) -> fmt::Result {
    text.chars().try_for_each(|c| match c {
        '<' => out.write_str("&lt;"),
        '>' => out.write_str("&gt;"),
        '&' => out.write_str("&amp;"),
        c => out.write_char(c),
    })
}
