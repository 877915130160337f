//! What the rules did and did not do, and why.

mod text;

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

/// A call in a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SiteCall {
    /// The op.
    pub op: String,
    /// The value that is its first result.
    pub value: String,
    /// Where it was written, `file:line:col`; `None` for what a rule made.
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
    /// The calls that its left side matched.
    pub replaced: Vec<SiteCall>,
    /// The ops that it put in their place.
    pub made: Vec<String>,
    /// For each of those that the target does not run as one call, why: its body was priced.
    pub no_kernel: Vec<String>,
    /// Whether what it made is in the result.
    pub outcome: Outcome,
}

/// What became of what a rule made.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is in the result.
    Kept,
    /// It was a stepping stone: another rule went on from it, and that is in the result.
    Absorbed {
        /// The op of the result that it became part of.
        into: String,
        /// The rule that went on from it.
        by: String,
    },
    /// It lost on cost: something cheaper was there.
    Dropped {
        /// How many microseconds dearer a call of the graph would be with it; looked for when
        /// explaining. 0 where it is as dear as what was there: of two such the graph keeps what it
        /// had.
        by_us: Option<f64>,
        /// The op that computes the value instead, unless nothing does any more.
        instead: Option<String>,
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
    /// Ops of the left side that matched, from the last one on.
    pub matched: Vec<String>,
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
    /// Rules that are not mentioned above: nothing in the module looks like their left sides. Listed
    /// when explaining.
    pub silent: Vec<String>,
    /// What limits cut short.
    pub warnings: Vec<String>,
}

impl Site {
    pub(super) fn new(graph: &str, value: &str, loc: Option<&Loc>) -> Site {
        Site { graph: graph.to_owned(), value: value.to_owned(), loc: loc.map(ToString::to_string) }
    }
}
