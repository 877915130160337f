//! A report as text, plain (`to_string`) or with colours.

use std::fmt;

use anstyle::{AnsiColor, Effects, Style};

use super::{Fired, GraphReport, NearMiss, Outcome, Refused, Report, Site};

/// How the parts of a report look.
#[derive(Clone, Copy, Default)]
struct Theme {
    title: Style,
    kept: Style,
    absorbed: Style,
    lost: Style,
    refused: Style,
    near: Style,
    rule: Style,
    /// Places, and what else a reader looks at last.
    faint: Style,
}

const COLOURS: Theme = Theme {
    title: Style::new().effects(Effects::BOLD.insert(Effects::UNDERLINE)),
    kept: AnsiColor::Green.on_default().effects(Effects::BOLD),
    absorbed: AnsiColor::Green.on_default(),
    lost: AnsiColor::Red.on_default(),
    refused: AnsiColor::Yellow.on_default(),
    near: AnsiColor::Blue.on_default(),
    rule: Style::new().effects(Effects::BOLD),
    faint: Style::new().effects(Effects::DIMMED),
};

/// Width of the column that says what happened.
const VERDICT: usize = 10;
/// Spaces before what belongs to a line above.
const INDENT: usize = VERDICT + 4;
/// Differences of microseconds below this are shown as none: they would print as 0.00.
const AS_LONG: f64 = 0.005;
/// Bindings are wrapped before this column.
const WIDTH: usize = 100;

/// A report with colours, for a terminal.
pub struct Coloured<'a>(&'a Report);

impl Report {
    /// The text of the report with ANSI colours.
    pub fn coloured(&self) -> Coloured<'_> {
        Coloured(self)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printer { f, theme: Theme::default() }.report(self)
    }
}

impl fmt::Display for Coloured<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printer { f, theme: COLOURS }.report(self.0)
    }
}

struct Printer<'a, 'f> {
    f: &'a mut fmt::Formatter<'f>,
    theme: Theme,
}

impl Printer<'_, '_> {
    fn report(&mut self, r: &Report) -> fmt::Result {
        for graph in &r.graphs {
            let here = |site: &Site| site.graph == graph.graph;
            self.graph(graph)?;
            let fired: Vec<_> = r.fired.iter().filter(|x| here(&x.site)).collect();
            fired.iter().try_for_each(|x| self.kept(x))?;
            fired.iter().try_for_each(|x| self.absorbed(x))?;
            fired.iter().try_for_each(|x| self.lost(x))?;
            r.refused.iter().filter(|x| here(&x.site)).try_for_each(|x| self.refused(x))?;
            r.near_misses.iter().filter(|x| here(&x.site)).try_for_each(|x| self.near(x))?;
            writeln!(self.f)?;
        }
        if !r.silent.is_empty() {
            let silent = r.silent.join(", ");
            let Theme { faint, .. } = self.theme;
            writeln!(self.f, "{faint}nothing looks like the left side of: {silent}{faint:#}")?;
        }
        let Theme { refused, .. } = self.theme;
        r.warnings.iter().try_for_each(|w| writeln!(self.f, "{refused}warning{refused:#}: {w}"))
    }

    fn graph(&mut self, g: &GraphReport) -> fmt::Result {
        let (title, (before, after), (from, to)) = (self.theme.title, g.launches, g.cost_us);
        let launches = if before == 1 { "launch" } else { "launches" };
        write!(self.f, "{title}{}{title:#}: {before} {launches}, {from:.1} us -> ", g.graph)?;
        let measured = g.calls.iter().filter(|c| c.measured).count();
        if measured == 0 {
            return writeln!(self.f, "{after}, {to:.1} us (as costs are estimated)");
        }
        let modelled = g.calls.len() - measured;
        writeln!(self.f, "{after}, {to:.1} us ({measured} measured, {modelled} modelled)")?;
        g.calls.iter().try_for_each(|c| {
            let how = if c.measured { "measured" } else { "modelled" };
            writeln!(self.f, "  {}: {:.2} us, {how}", c.op, c.us)
        })
    }

    /// The line that a record begins with.
    fn head(&mut self, style: Style, what: &str, rule: &str) -> fmt::Result {
        let name = self.theme.rule;
        write!(self.f, "  {style}{what:<VERDICT$}{style:#}  {name}{rule}{name:#}")
    }

    fn place(&mut self, loc: Option<&String>) -> fmt::Result {
        let faint = self.theme.faint;
        loc.map_or(Ok(()), |loc| write!(self.f, " {faint}({loc}){faint:#}"))?;
        writeln!(self.f)
    }

    fn kept(&mut self, r: &Fired) -> fmt::Result {
        if r.outcome != Outcome::Kept {
            return Ok(());
        }
        self.head(self.theme.kept, "fired", &r.rule)?;
        writeln!(self.f, " at %{}", r.site.value)?;
        self.replaced(r)?;
        self.no_kernel(r)?;
        self.bindings(r)
    }

    fn absorbed(&mut self, r: &Fired) -> fmt::Result {
        let Outcome::Absorbed { into, by } = &r.outcome else { return Ok(()) };
        self.head(self.theme.absorbed, "absorbed", &r.rule)?;
        write!(self.f, " at %{} became part of {into}: {by} went on from it", r.site.value)?;
        self.place(r.site.loc.as_ref())
    }

    fn lost(&mut self, r: &Fired) -> fmt::Result {
        let Outcome::Dropped { by_us, instead } = &r.outcome else { return Ok(()) };
        self.head(self.theme.lost, "lost", &r.rule)?;
        write!(self.f, " at %{}", r.site.value)?;
        match by_us {
            Some(us) if *us < AS_LONG => {
                write!(
                    self.f,
                    ": a call of {} would take as long; what was there stays",
                    r.site.graph
                )?;
            }
            Some(us) => write!(self.f, ": a call of {} would take {us:.2} us more", r.site.graph)?,
            None => {}
        }
        if let Some(op) = instead {
            write!(self.f, "; {op} computes it")?;
        }
        writeln!(self.f)?;
        self.replaced(r)?;
        self.no_kernel(r)
    }

    /// Why what a rule made cost what its body costs.
    fn no_kernel(&mut self, r: &Fired) -> fmt::Result {
        r.no_kernel
            .iter()
            .try_for_each(|why| writeln!(self.f, "{:INDENT$}{why}: its body was priced", ""))
    }

    /// What a rule replaced, a call a line, and by what.
    fn replaced(&mut self, r: &Fired) -> fmt::Result {
        let widest = r.replaced.iter().map(|c| c.op.len()).max().unwrap_or(0);
        for call in &r.replaced {
            write!(self.f, "{:INDENT$}{:<widest$} %{}", "", call.op, call.value)?;
            self.place(call.loc.as_ref())?;
        }
        writeln!(self.f, "{:INDENT$}-> {}", "", r.made.join(", "))
    }

    /// What names stood for, but for the calls that were replaced: those have their own lines.
    fn bindings(&mut self, r: &Fired) -> fmt::Result {
        let replaced = |value: &str| {
            let name = value.split(" : ").next().and_then(|v| v.strip_prefix('%'));
            name.is_some_and(|name| r.replaced.iter().any(|c| c.value == name))
        };
        let shown = r.bindings.iter().filter(|(_, value)| value != "none" && !replaced(value));
        let faint = self.theme.faint;
        let mut column = WIDTH;
        for (i, (name, value)) in shown.enumerate() {
            let width = name.chars().count() + value.chars().count() + 5;
            match column + width > WIDTH {
                true if i == 0 => write!(self.f, "{:INDENT$}", "")?,
                true => write!(self.f, "\n{:INDENT$}", "")?,
                false => write!(self.f, "  ")?,
            }
            column = if column + width > WIDTH { INDENT } else { column } + width;
            write!(self.f, "{faint}{name} ={faint:#} {value}")?;
        }
        if column == WIDTH && r.bindings.is_empty() { Ok(()) } else { writeln!(self.f) }
    }

    fn refused(&mut self, r: &Refused) -> fmt::Result {
        self.head(self.theme.refused, "refused", &r.rule)?;
        write!(self.f, " at %{}", r.site.value)?;
        self.place(r.site.loc.as_ref())?;
        writeln!(self.f, "{:INDENT$}needs {}", "", r.condition)?;
        if r.values.is_empty() {
            return Ok(());
        }
        let values: Vec<String> = r.values.iter().map(|(k, v)| format!("{k} = {v}")).collect();
        writeln!(self.f, "{:INDENT$}but {}", "", values.join(", "))
    }

    fn near(&mut self, r: &NearMiss) -> fmt::Result {
        let NearMiss { rule, site, matched, statements, expected, found } = r;
        self.head(self.theme.near, "near miss", rule)?;
        write!(self.f, " at %{}", site.value)?;
        self.place(site.loc.as_ref())?;
        let (matched, so_far) = (matched.join(", "), matched.len());
        write!(self.f, "{:INDENT$}{matched} matched ({so_far} of {statements}); ", "")?;
        writeln!(self.f, "then {expected} was expected, found {found}")
    }
}
