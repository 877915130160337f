//! Fusion: rules applied in an e-graph, and the cheapest graph taken out of it.
//!
//! A graph becomes an e-graph (`convert`), in which every rule is tried at every place until
//! nothing is new (`run`); conditions are looked at, and both sides typed, before anything is
//! united (`rule`). The cheapest way to compute the results is then searched for on the cost of
//! the whole graph (`extract`, `cost`), and what happened is told (`explain`).

mod compare;
mod convert;
mod cost;
mod explain;
mod extract;
mod language;
mod measured;
mod outcome;
mod price;
mod problem;
mod rule;
mod run;

use std::collections::BTreeSet;
use std::time::Instant;

use infernum_ir::expr::Value;
use infernum_ir::{Graph, Module, OpCall, verify};

use crate::Pass;
use crate::data::{self, Numerics, Rule};
use convert::{Extraction, Imported};
use extract::{Solution, solve};
use language::{Data, Head};
use outcome::Outcomes;
use rule::{Context, Pattern};
use run::{Firing, Saturation, saturate};

pub use crate::Bucket;
pub use compare::{Group, groups};
pub use cost::{CostTable, Factor, Kernels, OpCost, Rates};
pub use explain::{
    Fired, GraphReport, NearMiss, Outcome, PricedCall, Refused, Report, Site, SiteCall,
};
pub use measured::{Measured, Measurements};
pub use price::{Price, Prices};
pub use problem::{Extracted, ExtractionNode, ExtractionProblem, extraction_problems};
pub use run::{Limits, Stop};

pub(crate) const PASS: Pass = Pass {
    name: "fuse",
    doc: "applies the rewrite rules in an e-graph and takes the cheapest graph out of it",
    run: |module, cx| {
        let fused = fuse(module, cx.kernels, &cx.fuse).map_err(|e| e.to_string())?;
        cx.report = fused.report;
        Ok(fused.module)
    },
};

/// Near misses told for each rule.
const NEAR_MISSES: usize = 3;

/// One in so many statements must have matched for a miss to be near.
const NEAR: usize = 3;

/// How to fuse.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// The rules to use, by name; all when `None`.
    pub rules: Option<Vec<String>>,
    /// Rules not to use, and fused ops not to make, by name.
    pub disabled: Vec<String>,
    /// What rules may do to the numbers, at most.
    pub numerics: Numerics,
    /// The steps that the module is for; conditions must hold on all of them.
    pub bucket: Bucket,
    /// The target, as conditions see it: `device.name`.
    pub device: String,
    /// What calls cost there.
    pub costs: CostTable,
    /// Context rows of a sequence that costs are computed for.
    pub context: u64,
    /// What the work may take.
    pub limits: Limits,
    /// Whether to look for near misses and for the price of what lost.
    pub explain: bool,
}

impl FuseOptions {
    /// All rules, whatever they do to the numbers, for one bucket on one target.
    pub fn new(device: &str, costs: CostTable, bucket: Bucket) -> FuseOptions {
        FuseOptions {
            rules: None,
            disabled: Vec::new(),
            numerics: Numerics::Rounds,
            bucket,
            device: device.to_owned(),
            costs,
            context: 1024,
            limits: Limits::default(),
            explain: false,
        }
    }

    /// What calls cost in these steps on this target.
    pub fn prices(&self) -> Prices<'_> {
        Prices::new(&self.costs, &self.device, self.bucket, self.context)
    }
}

/// A fused module, and what was done to get it.
#[derive(Clone, Debug)]
pub struct FusedModule {
    /// The module.
    pub module: Module,
    /// What happened.
    pub report: Report,
}

/// A module could not be fused.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum FuseError {
    #[error("there is no rule or fused op `{name}`{hint}")]
    UnknownName { name: String, hint: String },
    #[error("graph `{graph}`: {message}")]
    Graph { graph: String, message: String },
    #[error("fusing broke the module; rules that fired: {rules}\n{dump}")]
    Broken { rules: String, dump: String },
}

/// Rewrites every graph of a module into the cheapest that the rules can make of it. A graph in which
/// nothing pays comes back as it was.
pub fn fuse(
    module: &Module,
    kernels: &data::Kernels,
    options: &FuseOptions,
) -> Result<FusedModule, FuseError> {
    let rules = select(kernels, options)?;
    let patterns: Vec<Pattern<'_>> = rules.into_iter().map(Pattern::new).collect();
    let mut report = Report::default();
    let mut graphs = Vec::with_capacity(module.graphs.len());
    for graph in &module.graphs {
        let fused = fuse_graph(graph, &patterns, options, &mut report)
            .map_err(|message| FuseError::Graph { graph: graph.name.clone(), message })?;
        graphs.push(fused);
    }
    if options.explain {
        report.silent = silent(&patterns, &report);
    }
    let module = Module { graphs, ..module.clone() };
    verify(&module).map_err(|e| {
        let rules: BTreeSet<&str> = report.fired.iter().map(|f| f.rule.as_str()).collect();
        let rules = rules.into_iter().collect::<Vec<_>>().join(", ");
        FuseError::Broken { rules, dump: e.to_string() }
    })?;
    Ok(FusedModule { module, report })
}

/// The rules of which there is nothing to tell.
fn silent(patterns: &[Pattern<'_>], report: &Report) -> Vec<String> {
    let told: BTreeSet<&String> = (report.fired.iter().map(|r| &r.rule))
        .chain(report.refused.iter().map(|r| &r.rule))
        .chain(report.near_misses.iter().map(|r| &r.rule))
        .collect();
    patterns.iter().map(|p| p.rule.name.clone()).filter(|name| !told.contains(name)).collect()
}

/// The rules to run, in their order.
fn select<'k>(
    kernels: &'k data::Kernels,
    options: &FuseOptions,
) -> Result<Vec<&'k Rule>, FuseError> {
    let rules = || kernels.rules.iter().map(|r| r.name.as_str());
    let ops = || kernels.ops.fused().map(|op| op.name);
    let unknown = |name: &String, known: &mut dyn Iterator<Item = &str>| {
        let known: Vec<&str> = known.collect();
        let hint = infernum_ir::nearest(name, known.iter().copied());
        let missing = !known.contains(&name.as_str());
        missing.then(|| FuseError::UnknownName { name: name.clone(), hint })
    };
    for name in options.rules.iter().flatten() {
        unknown(name, &mut rules()).map_or(Ok(()), Err)?;
    }
    for name in &options.disabled {
        unknown(name, &mut rules().chain(ops())).map_or(Ok(()), Err)?;
    }
    let off = |name: &str| options.disabled.iter().any(|d| d == name);
    let wanted = |rule: &&Rule| {
        options.rules.as_ref().is_none_or(|names| names.contains(&rule.name))
            && rule.numerics <= options.numerics
            && !off(&rule.name)
            && !rule.right.iter().any(|stmt| off(stmt.op.name))
    };
    Ok(kernels.rules.iter().filter(wanted).collect())
}

fn fuse_graph(
    graph: &Graph,
    patterns: &[Pattern<'_>],
    options: &FuseOptions,
    report: &mut Report,
) -> Result<Graph, String> {
    let started = Instant::now();
    let mut imported = Imported::new(graph)?;
    let before = imported.graph.egg.total_number_of_nodes();
    let saturation = saturate(&mut imported, patterns, &context(options), &options.limits);
    let saturated = Instant::now();
    let prices = options.prices();
    let extraction = imported.problem(&prices);
    let start = imported.unchanged(&extraction);
    let cost_before = extraction.problem.cost(&start);
    let launches_before = launches(&extraction, &start);
    let mut solution = solve(&extraction.problem, Some(start.clone()), options.limits.search)
        .ok_or("no way to compute its results was found")?;
    extraction.problem.prefer(&start, &mut solution);
    let took = (saturated - started, saturated.elapsed());
    let pays = cost_before.is_none_or(|before| solution.cost < before - 1e-9);
    report.graphs.push(GraphReport {
        graph: graph.name.clone(),
        nodes: (before, imported.graph.egg.total_number_of_nodes()),
        classes: imported.graph.egg.number_of_classes(),
        rounds: saturation.rounds,
        stop: saturation.stop,
        cost_us: (cost_before.unwrap_or(f64::NAN), solution.cost),
        launches: (launches_before, launches(&extraction, &solution.picks)),
        gap_us: solution.gap,
        calls: calls(&imported, &extraction, &solution.picks, &prices),
        searched: solution.searched,
        took,
    });
    let (solution, prices) = (&solution, &prices);
    let told = Told { imported: &imported, extraction: &extraction, solution, options, prices };
    told.warn(&saturation, report);
    told.fired(patterns, &saturation.firings, report);
    told.refused(patterns, &saturation, report);
    if options.explain {
        told.near_misses(patterns, &saturation, report);
    }
    if !pays {
        return Ok(graph.clone());
    }
    let built = imported.build(&extraction, &solution.picks)?;
    let results: BTreeSet<_> = built.results().iter().collect();
    // A rule that makes two results one value would leave a graph that returns it twice.
    if results.len() < graph.results().iter().collect::<BTreeSet<_>>().len() {
        return Ok(graph.clone());
    }
    Ok(built)
}

/// Calls that cost something.
fn launches(extraction: &Extraction, picks: &extract::Picks) -> usize {
    let live = extraction.live(picks);
    let picked = picks.iter().zip(live).filter_map(|(n, live)| n.filter(|_| live));
    picked.filter(|n| extraction.problem.nodes[*n].cost > 0.0).count()
}

/// The calls that cost something, in no order that matters but always the same.
fn calls(
    imported: &Imported<'_>,
    extraction: &Extraction,
    picks: &extract::Picks,
    prices: &Prices<'_>,
) -> Vec<PricedCall> {
    let live = extraction.live(picks);
    let picked = picks.iter().zip(live).filter_map(|(n, live)| n.filter(|_| live));
    let priced = picked.filter_map(|n| {
        let (graph, class) = (&imported.graph, extraction.problem.nodes[n].class);
        let (op, operands, attrs) = graph.signature(extraction.node(graph, n))?;
        let results = graph.result_types(extraction.ids[class]);
        let Price { us, measured } = prices.price(op, &operands, &attrs, results);
        (us > 0.0).then(|| PricedCall { op: op.name.to_owned(), us, measured })
    });
    priced.collect()
}

/// The names that conditions may use besides a rule's own: `tokens` is the bucket's interval.
fn context(options: &FuseOptions) -> Context {
    let number = |n: u64| Value::Num(n as f64);
    let map = |entries: Vec<(&str, Value)>| {
        Value::Map(entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
    };
    let sm = options.costs.sm.map_or(Value::Null, |sm| number(sm.into()));
    let device = map(vec![
        ("kind", Value::Str(options.costs.kind.clone())),
        ("name", Value::Str(options.device.clone())),
        ("sm", sm),
    ]);
    Context::from([
        ("tokens", options.bucket.tokens()),
        ("decode", Value::Bool(options.bucket.decode)),
        ("device", device),
    ])
}

/// What a node is called, where it stands for a value.
fn head_name(node: &language::Node) -> Option<String> {
    match node.head {
        Head::Op(op) => Some(op.name.to_owned()),
        Head::Param(_) => Some("the parameter".to_owned()),
        Head::Proj(_) | Head::Attr(_) | Head::Absent => None,
    }
}

/// What happened to one graph, to be told.
struct Told<'a, 'g> {
    imported: &'a Imported<'g>,
    extraction: &'a Extraction,
    solution: &'a Solution,
    options: &'a FuseOptions,
    prices: &'a Prices<'a>,
}

impl Told<'_, '_> {
    fn site(&self, origin: &convert::Origin) -> Site {
        let loc = self.imported.loc(origin);
        Site::new(&self.imported.source.name, &origin.name, loc.as_ref())
    }

    fn warn(&self, saturation: &Saturation, report: &mut Report) {
        let name = &self.imported.source.name;
        let limits = &self.options.limits;
        let cut = match saturation.stop {
            Stop::Saturated => None,
            Stop::NodeCap => Some(format!("{} nodes", limits.nodes)),
            Stop::RoundCap => Some(format!("{} rounds", limits.rounds)),
        };
        report.warnings.extend(cut.map(|at| format!("{name}: the rules were cut off at {at}")));
        if self.solution.gap > 0.0 {
            let gap = self.solution.gap;
            report.warnings.push(format!(
                "{name}: the search was cut off at {} nodes, at most {gap:.2} us from the best",
                limits.search
            ));
        }
    }

    fn fired(&self, patterns: &[Pattern<'_>], firings: &[Firing], report: &mut Report) {
        let outcomes = Outcomes::new(self.imported, self.extraction, &self.solution.picks);
        let rule = |firing: &Firing| patterns[firing.pattern].rule.name.clone();
        let outcomes = outcomes.judge(firings, &rule, &|node| self.price(node));
        let no_kernel = |firing: &Firing| -> Vec<String> {
            let op = |node: &language::Node| {
                let (op, operands, attrs) = self.imported.graph.signature(node)?;
                self.prices.without_kernel(&OpCall { op, operands: &operands, attrs: &attrs })
            };
            firing.made.iter().filter_map(|(_, node)| op(node)).collect()
        };
        let call = |m: &run::Matched| SiteCall {
            op: m.op.name.to_owned(),
            value: m.origin.as_ref().map_or_else(String::new, |o| o.name.clone()),
            // What a rule made was written nowhere.
            loc: (m.origin.as_ref().filter(|o| !o.made))
                .and_then(|o| self.imported.loc(o))
                .map(|loc| loc.to_string()),
        };
        report.fired.extend(firings.iter().zip(outcomes).map(|(firing, outcome)| Fired {
            rule: rule(firing),
            site: self.site(&firing.site),
            bindings: firing.bindings.clone(),
            replaced: firing.matched.iter().map(call).collect(),
            made: firing.made.iter().filter_map(|(_, node)| head_name(node)).collect(),
            no_kernel: no_kernel(firing),
            outcome,
        }));
    }

    /// How much dearer the graph is with this node.
    fn price(&self, node: usize) -> Option<f64> {
        if !self.options.explain {
            return None;
        }
        let forced = self.extraction.problem.forcing(node);
        let search = self.options.limits.search.min(2000);
        solve(&forced, None, search).map(|s| s.cost - self.solution.cost)
    }

    fn refused(&self, patterns: &[Pattern<'_>], saturation: &Saturation, report: &mut Report) {
        report.refused.extend(saturation.refusals.iter().map(|r| Refused {
            rule: patterns[r.pattern].rule.name.clone(),
            site: self.site(&r.site),
            condition: r.condition.clone(),
            values: r.values.clone(),
        }));
    }

    /// For each rule, the anchors where its pattern came furthest without matching.
    fn near_misses(&self, patterns: &[Pattern<'_>], saturation: &Saturation, report: &mut Report) {
        let graph = &self.imported.graph;
        let origins = self.imported.origins();
        for (i, pattern) in patterns.iter().enumerate() {
            let firings = || saturation.firings.iter().filter(|f| f.pattern == i);
            // What is part of a match did not nearly match: it did.
            let parts = firings().flat_map(|f| f.matched.iter().map(|m| m.class));
            let anchors = firings().map(|f| f.anchor).chain(parts);
            let refused = saturation.refusals.iter().filter(|r| r.pattern == i).map(|r| r.anchor);
            let matched: BTreeSet<_> = anchors.chain(refused).map(|a| graph.find(a)).collect();
            let mut misses = Vec::new();
            for class in graph.calls(pattern.anchor()) {
                let (mut found, mut stuck) = (Vec::new(), None);
                if !matched.contains(&class) {
                    pattern.search_at(graph, class, &mut found, &mut stuck);
                }
                let near = stuck.filter(|s| s.matched * NEAR >= pattern.len());
                if let (true, Some(stuck), Some(origin)) =
                    (found.is_empty(), near, origins.get(&class).filter(|o| !o.made))
                {
                    misses.push((stuck, *origin));
                }
            }
            misses.sort_by(|(a, x), (b, y)| b.matched.cmp(&a.matched).then(x.cmp(y)));
            report.near_misses.extend(misses.into_iter().take(NEAR_MISSES).map(
                |(stuck, origin)| NearMiss {
                    rule: pattern.rule.name.clone(),
                    site: self.site(origin),
                    matched: pattern.ops().take(stuck.matched).map(str::to_owned).collect(),
                    statements: pattern.len(),
                    expected: stuck.expected.name.to_owned(),
                    found: self.stands(&stuck),
                },
            ));
        }
    }

    /// What a pattern got stuck on: the calls that compute a class, or the parameter that it is.
    fn stands(&self, stuck: &rule::Stuck) -> String {
        let graph = &self.imported.graph;
        let class = graph.find(stuck.class);
        let origins = self.imported.origins();
        let name = origins.get(&class).map(|o| format!(" %{}", o.name)).unwrap_or_default();
        if let Data::Absent = graph.data(class) {
            return "an operand that is left out".to_owned();
        }
        let mut heads: Vec<String> = graph.nodes(class).iter().filter_map(head_name).collect();
        heads.dedup();
        let heads = if heads.iter().any(|h| h == stuck.expected.name) {
            format!("{} of other operands or attributes,", stuck.expected.name)
        } else {
            heads.join(" or ")
        };
        format!("{heads}{name}")
    }
}
