//! Extraction problems as plain data, for solvers other than our own.

use infernum_ir::Module;
use serde::Serialize;

use super::convert::Imported;
use super::extract::solve;
use super::rule::Pattern;
use super::run::saturate;
use super::{FuseError, FuseOptions, context, select};
use crate::data;

/// What extraction has to choose from for one graph, and what it chose. An answer picks one node for
/// every class that a root or a picked node takes, such that the picks make no cycle and no state is
/// written by two; it costs the sum of its nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExtractionProblem {
    /// The graph.
    pub graph: String,
    /// Number of classes.
    pub classes: usize,
    /// Classes that must be computed.
    pub roots: Vec<usize>,
    /// Ways to compute them.
    pub nodes: Vec<ExtractionNode>,
}

/// One way to compute a class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExtractionNode {
    /// The class.
    pub class: usize,
    /// Microseconds.
    pub cost: f64,
    /// Classes that it takes.
    pub children: Vec<usize>,
    /// States, by class, whose next version it writes.
    pub writes: Vec<usize>,
}

/// What our own extraction makes of a problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extracted {
    /// Microseconds.
    pub cost: f64,
    /// How far below the optimum may be.
    pub gap: f64,
}

/// The extraction problem of each graph of a module, saturated, with our answer.
pub fn extraction_problems(
    module: &Module,
    kernels: &data::Kernels,
    options: &FuseOptions,
) -> Result<Vec<(ExtractionProblem, Extracted)>, FuseError> {
    let patterns: Vec<_> = select(kernels, options)?.into_iter().map(Pattern::new).collect();
    let of = |graph: &infernum_ir::Graph| {
        let error = |message| FuseError::Graph { graph: graph.name.clone(), message };
        let mut imported = Imported::new(graph).map_err(error)?;
        saturate(&mut imported, &patterns, &context(options), &options.limits);
        let extraction = imported.problem(&options.prices());
        let start = imported.unchanged(&extraction);
        let solution = solve(&extraction.problem, Some(start), options.limits.search)
            .ok_or_else(|| error("no way to compute its results was found".to_owned()))?;
        let problem = &extraction.problem;
        let node = |n: &super::extract::Candidate| ExtractionNode {
            class: n.class,
            cost: n.cost,
            children: n.children.clone(),
            writes: n.writes.clone(),
        };
        let problem = ExtractionProblem {
            graph: graph.name.clone(),
            classes: problem.classes.len(),
            roots: problem.roots.clone(),
            nodes: problem.nodes.iter().map(node).collect(),
        };
        Ok((problem, Extracted { cost: solution.cost, gap: solution.gap }))
    };
    module.graphs.iter().map(of).collect()
}
