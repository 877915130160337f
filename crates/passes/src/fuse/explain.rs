//! What the rules did and did not do, and why.

use std::fmt;
use std::time::Duration;

use infernum_ir::Loc;
use serde::Serialize;

use super::run::Stop;

/// A place in a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    /// The graph.
    pub graph: String,
    /// The value that the rule's last statement is.
    pub value: String,
    /// Where it was written, `file:line:col`.
    pub loc: Option<String>,
}

/// A rule that fired.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fired {
    /// The rule.
    pub rule: String,
    /// Where.
    pub site: Site,
    /// What its names stood for.
    pub bindings: Vec<(String, String)>,
    /// Whether what it made is in the result.
    pub outcome: Outcome,
}

/// What became of what a rule made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is in the result.
    Kept,
    /// It is not: another rule went on from it, or something cheaper was there.
    Dropped {
        /// How many microseconds dearer a call of the graph would be with it; looked for when
        /// explaining.
        by_us: Option<f64>,
    },
}

/// A match that a condition refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The rule.
    pub rule: String,
    /// Where.
    pub site: Site,
    /// The condition that does not hold.
    pub condition: String,
    /// The names it mentions, and what they are.
    pub values: Vec<(String, String)>,
}

/// A place where a rule's pattern began to match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NearMiss {
    /// The rule.
    pub rule: String,
    /// Where.
    pub site: Site,
    /// Statements of the left side that matched, from the last one on.
    pub matched: usize,
    /// Statements that it has.
    pub statements: usize,
    /// The call looked for next.
    pub expected: String,
    /// What stood in its place.
    pub found: String,
}

/// A call of the result that costs something.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PricedCall {
    /// The op.
    pub op: String,
    /// Microseconds.
    pub us: f64,
    /// Whether they were measured; else they are what the target's speeds say.
    pub measured: bool,
}

/// What happened to one graph.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GraphReport {
    /// Its name.
    pub graph: String,
    /// Nodes of the e-graph before and after saturation.
    pub nodes: (usize, usize),
    /// Classes after it.
    pub classes: usize,
    /// Rounds of all rules.
    pub rounds: usize,
    /// Why saturation ended.
    pub stop: Stop,
    /// Microseconds of a call, before and after.
    pub cost_us: (f64, f64),
    /// Calls that are launched, before and after.
    pub launches: (usize, usize),
    /// How far below `cost_us.1` the optimum may be: 0 unless the search was capped.
    pub gap_us: f64,
    /// What the calls of the result cost, and whether that was measured.
    pub calls: Vec<PricedCall>,
    /// Nodes of the extraction's search.
    pub searched: usize,
    /// Time to saturate and to extract. Not part of what is serialised: it differs from run to run.
    #[serde(skip)]
    pub took: (Duration, Duration),
}

/// What fusing a module did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Each graph.
    pub graphs: Vec<GraphReport>,
    /// Rules that fired, in order.
    pub fired: Vec<Fired>,
    /// Matches refused.
    pub refused: Vec<Refused>,
    /// Near misses, the best few a rule.
    pub near_misses: Vec<NearMiss>,
    /// What limits cut short.
    pub warnings: Vec<String>,
}

impl Site {
    pub(super) fn new(graph: &str, value: &str, loc: Option<&Loc>) -> Site {
        Site { graph: graph.to_owned(), value: value.to_owned(), loc: loc.map(ToString::to_string) }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %{}", self.graph, self.value)?;
        self.loc.as_ref().map_or(Ok(()), |loc| write!(f, " ({loc})"))
    }
}

fn pairs(list: &[(String, String)], separator: &str) -> String {
    let pairs: Vec<String> = list.iter().map(|(k, v)| format!("{k} = {v}")).collect();
    pairs.join(separator)
}

impl fmt::Display for PricedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PricedCall { op, us, measured } = self;
        write!(f, "{op}: {us:.2} us, {}", if *measured { "measured" } else { "modelled" })
    }
}

impl fmt::Display for Fired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.outcome == Outcome::Kept { "fired" } else { "fired, not kept" };
        write!(f, "{what}: {} at {}", self.rule, self.site)?;
        if let Outcome::Dropped { by_us: Some(us) } = self.outcome {
            write!(f, "\n    with it a call costs {us:.2} us more")?;
        }
        self.bindings.iter().try_for_each(|(name, value)| write!(f, "\n    {name} = {value}"))
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused: {} at {}\n    {}", self.rule, self.site, self.condition)?;
        if self.values.is_empty() {
            return Ok(());
        }
        write!(f, "\n    where {}", pairs(&self.values, ", "))
    }
}

impl fmt::Display for NearMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NearMiss { rule, site, matched, statements, expected, found } = self;
        write!(
            f,
            "near miss: {rule} at {site}\n    {matched} of {statements} statements matched, then \
             expected {expected}, found {found}"
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for g in &self.graphs {
            let (from, to) = g.cost_us;
            let (before, after) = g.launches;
            writeln!(
                f,
                "{}: {before} launches, {from:.1} us -> {after} launches, {to:.1} us",
                g.graph
            )?;
            // Without a measurement all are modelled, and there is nothing to tell apart.
            if g.calls.iter().any(|c| c.measured) {
                g.calls.iter().try_for_each(|c| writeln!(f, "    {c}"))?;
            }
        }
        self.warnings.iter().try_for_each(|w| writeln!(f, "warning: {w}"))?;
        self.fired.iter().try_for_each(|r| writeln!(f, "{r}"))?;
        self.refused.iter().try_for_each(|r| writeln!(f, "{r}"))?;
        self.near_misses.iter().try_for_each(|r| writeln!(f, "{r}"))
    }
}
