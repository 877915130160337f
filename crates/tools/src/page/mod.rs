//! `compile --html`: one page that shows what fusion did. It holds all it needs and asks no network.

mod drawn;
mod layout;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::error::Error;

use infernum_ir::{Attr, Graph, Module, NodeKind, Op, Type};
use infernum_passes::fuse::{self, Fired, GraphReport, NearMiss, Outcome, Refused, Report};
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, context};
use serde::Serialize;

use drawn::{Drawn, draw};

/// The style that all pages begin with.
pub(crate) const BASE_STYLE: &str = include_str!("base.css");

/// Renders a template of a page; what it is given is escaped.
pub(crate) fn render(template: &str, values: &impl Serialize) -> Result<String, minijinja::Error> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::Html);
    env.render_str(template, Value::from(Serde(values)))
}

/// What a call costs, in microseconds.
pub(crate) type Cost<'a> = &'a dyn Fn(Op, &[Option<&Type>], &[Attr], &[Type]) -> f64;

/// What was compiled for one kind of step.
pub(crate) struct Fusion<'a> {
    /// The steps, for people.
    pub(crate) steps: String,
    /// The module before and after fusion.
    pub(crate) before: &'a Module,
    pub(crate) after: &'a Module,
    pub(crate) report: &'a Report,
    pub(crate) cost: Cost<'a>,
}

/// What the page shows; the script draws it.
#[derive(Serialize)]
struct Page<'a> {
    model: &'a str,
    target: &'a str,
    buckets: Vec<Bucket<'a>>,
}

#[derive(Serialize)]
struct Bucket<'a> {
    steps: &'a str,
    graphs: Vec<Compared<'a>>,
    silent: &'a [String],
    warnings: &'a [String],
}

/// A graph before and after, and what rules did in it.
#[derive(Serialize)]
struct Compared<'a> {
    name: &'a str,
    /// Layers that it is run for.
    calls: usize,
    report: Option<&'a GraphReport>,
    before: Drawn,
    after: Drawn,
    groups: Vec<Group<'a>>,
    fired: Vec<Placed<'a, Fired>>,
    refused: Vec<Placed<'a, Refused>>,
    near_misses: Vec<Placed<'a, NearMiss>>,
}

/// Calls that took the place of others.
#[derive(Serialize)]
struct Group<'a> {
    /// The ops that are launched.
    ops: Vec<&'a str>,
    launches: (usize, usize),
    cost_us: (f64, f64),
}

/// A record, and the group that its site is in.
#[derive(Serialize)]
struct Placed<'a, T> {
    group: Option<usize>,
    #[serde(flatten)]
    record: &'a T,
}

/// The page as HTML.
pub(crate) fn html(
    model: &str,
    target: &str,
    fusions: &[Fusion<'_>],
) -> Result<String, Box<dyn Error>> {
    let page = Page { model, target, buckets: fusions.iter().map(bucket).collect() };
    // In JSON `<` only occurs in texts; written so, none can end the element that holds the data.
    let data = serde_json::to_string(&page)?.replace('<', "\\u003c");
    let (style, script) =
        (BASE_STYLE.to_owned() + include_str!("page.css"), include_str!("page.js"));
    let values = context! { model, target, style, script, data };
    Ok(render(include_str!("page.html"), &values)?)
}

fn bucket<'a>(fusion: &'a Fusion<'_>) -> Bucket<'a> {
    let pairs = fusion.before.graphs.iter().zip(&fusion.after.graphs).enumerate();
    Bucket {
        steps: &fusion.steps,
        graphs: pairs.map(|(i, (before, after))| compared(fusion, i, before, after)).collect(),
        silent: &fusion.report.silent,
        warnings: &fusion.report.warnings,
    }
}

fn compared<'a>(
    fusion: &'a Fusion<'_>,
    index: usize,
    before: &'a Graph,
    after: &'a Graph,
) -> Compared<'a> {
    let report = fusion.report;
    let groups = fuse::groups(before, after);
    let costs = (costs(before, fusion.cost), costs(after, fusion.cost));
    let mut of_before: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut of_after = of_before.clone();
    for (number, group) in groups.iter().enumerate() {
        group.before.iter().for_each(|n| of_before.entry(*n).or_default().push(number));
        group.after.iter().for_each(|n| of_after.entry(*n).or_default().push(number));
    }
    let find = |value: &str| {
        let in_graph = |graph: &Graph, of: &BTreeMap<usize, Vec<usize>>| {
            of.get(&graph.find(value)?.node)?.first().copied()
        };
        in_graph(before, &of_before).or_else(|| in_graph(after, &of_after))
    };
    // A rule belongs to the group that most of the calls it replaced are in.
    let fired = |record: &'a Fired| {
        let mut votes: BTreeMap<usize, usize> = BTreeMap::new();
        let replaced = record.replaced.iter().filter_map(|call| find(&call.value));
        replaced.for_each(|group| *votes.entry(group).or_default() += 1);
        let most = votes.into_iter().max_by_key(|(group, votes)| (*votes, Reverse(*group)));
        let dropped = matches!(record.outcome, Outcome::Dropped { .. });
        Placed { group: most.map(|(group, _)| group).filter(|_| !dropped), record }
    };
    let here = |graph: &str| graph == before.name;
    Compared {
        name: &before.name,
        calls: fusion.before.schedule.iter().filter(|call| call.graph == index).count(),
        report: report.graphs.iter().find(|g| here(&g.graph)),
        before: draw(before, &|n| costs.0[n], &|n| of_before.get(&n).cloned().unwrap_or_default()),
        after: draw(after, &|n| costs.1[n], &|n| of_after.get(&n).cloned().unwrap_or_default()),
        groups: groups.iter().map(|g| group(g, after, &costs)).collect(),
        fired: report.fired.iter().filter(|r| here(&r.site.graph)).map(fired).collect(),
        refused: (report.refused.iter().filter(|r| here(&r.site.graph)))
            .map(|record| Placed { group: None, record })
            .collect(),
        near_misses: (report.near_misses.iter().filter(|r| here(&r.site.graph)))
            .map(|record| Placed { group: None, record })
            .collect(),
    }
}

fn group<'a>(group: &fuse::Group, after: &'a Graph, costs: &(Vec<f64>, Vec<f64>)) -> Group<'a> {
    let before: Vec<f64> = group.before.iter().map(|&n| costs.0[n]).collect();
    let now: Vec<f64> = group.after.iter().map(|&n| costs.1[n]).collect();
    let launches = |costs: &[f64]| costs.iter().filter(|c| **c > 0.0).count();
    let launched = group.after.iter().filter(|&&n| costs.1[n] > 0.0);
    let name = |&n: &usize| match &after.node(n).kind {
        NodeKind::Op { op, .. } => Some(op.name),
        NodeKind::Param(_) => None,
    };
    Group {
        ops: launched.filter_map(name).collect(),
        launches: (launches(&before), launches(&now)),
        cost_us: (before.iter().sum(), now.iter().sum()),
    }
}

/// What each node costs.
fn costs(graph: &Graph, cost: Cost<'_>) -> Vec<f64> {
    let of = |index: usize| {
        let node = graph.node(index);
        let NodeKind::Op { op, attrs } = &node.kind else { return 0.0 };
        let operands = graph.operands(index);
        let operands: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
        cost(*op, &operands, attrs, &node.types)
    };
    (0..graph.len()).map(of).collect()
}
