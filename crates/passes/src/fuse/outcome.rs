//! What became of what each firing made.

use std::collections::HashSet;

use super::convert::{Extraction, Imported};
use super::explain::Outcome;
use super::extract::Picks;
use super::language::Head;
use super::run::Firing;

/// What decides what became of a firing.
pub(super) struct Outcomes<'a, 'g> {
    imported: &'a Imported<'g>,
    extraction: &'a Extraction,
    picks: &'a Picks,
    live: Vec<bool>,
}

impl<'a, 'g> Outcomes<'a, 'g> {
    pub(super) fn new(
        imported: &'a Imported<'g>,
        extraction: &'a Extraction,
        picks: &'a Picks,
    ) -> Self {
        Outcomes { imported, extraction, picks, live: extraction.live(picks) }
    }

    /// What became of each firing. `price` says how much dearer the result is with a node.
    ///
    /// A stepping stone was made only for another rule to go on from it: it is absorbed if that rule's
    /// work was kept, or absorbed in turn. Rules run in rounds, so whatever goes on comes later.
    pub(super) fn judge(
        &self,
        firings: &[Firing],
        rule: &dyn Fn(&Firing) -> String,
        price: &dyn Fn(usize) -> Option<f64>,
    ) -> Vec<Outcome> {
        let own = self.own(firings);
        let mut into: Vec<Option<(usize, String)>> = vec![None; firings.len()];
        for i in (0..firings.len()).rev() {
            into[i] = self.kept(&own[i]).map(|op| (i, op)).or_else(|| {
                let later = firings.iter().enumerate().skip(i + 1);
                let goes_on = |(j, f): (usize, &Firing)| {
                    let (_, op) = into[j].as_ref()?;
                    self.uses(f, &firings[i]).then(|| (j, op.clone()))
                };
                // What was kept is a better answer than what was absorbed in turn.
                let (kept, rest): (Vec<_>, Vec<_>) =
                    later.filter_map(goes_on).partition(|(j, _)| self.kept(&own[*j]).is_some());
                kept.into_iter().chain(rest).next()
            });
        }
        let outcome = |(i, firing): (usize, &Firing)| match &into[i] {
            Some((j, _)) if *j == i => Outcome::Kept,
            Some((j, op)) => Outcome::Absorbed { into: op.clone(), by: rule(&firings[*j]) },
            None => Outcome::Dropped {
                by_us: self.numbers(firing).last().and_then(|n| price(*n)),
                instead: self.instead(firing),
            },
        };
        firings.iter().enumerate().map(outcome).collect()
    }

    /// The nodes that each firing was the first to make: those that cost something, if any does.
    fn own(&self, firings: &[Firing]) -> Vec<Vec<usize>> {
        let mut known: HashSet<usize> =
            self.imported.source_nodes().filter_map(|m| self.number(m)).collect();
        let own = |firing: &Firing| {
            let all = self.numbers(firing);
            let new: Vec<usize> = all.iter().copied().filter(|n| known.insert(*n)).collect();
            let of = if new.is_empty() { all } else { new };
            let nodes = &self.extraction.problem.nodes;
            let costly: Vec<usize> = of.iter().copied().filter(|n| nodes[*n].cost > 0.0).collect();
            if costly.is_empty() { of } else { costly }
        };
        firings.iter().map(own).collect()
    }

    fn numbers(&self, firing: &Firing) -> Vec<usize> {
        firing.made.iter().filter_map(|m| self.number(m)).collect()
    }

    fn number(&self, (id, node): &(egg::Id, super::language::Node)) -> Option<usize> {
        let class = self.extraction.number(self.imported.graph.find(*id))?;
        self.extraction.find(&self.imported.graph, class, node)
    }

    /// The op of the last of these nodes that is in the result.
    fn kept(&self, own: &[usize]) -> Option<String> {
        own.iter().rev().find_map(|&n| {
            let class = self.extraction.problem.nodes[n].class;
            (self.live[class] && self.picks[class] == Some(n)).then(|| self.op(n))?
        })
    }

    fn op(&self, n: usize) -> Option<String> {
        match self.extraction.node(&self.imported.graph, n).head {
            Head::Op(op) => Some(op.name.to_owned()),
            _ => None,
        }
    }

    /// Whether `later` matched something that `earlier` made.
    fn uses(&self, later: &Firing, earlier: &Firing) -> bool {
        let graph = &self.imported.graph;
        let made = |op, class| {
            earlier.made.iter().any(|(id, node)| {
                let id = graph.find(*id);
                let results = 0..graph.result_types(id).len();
                let mut projections = results.filter_map(|i| graph.projection(id, i));
                node.head == Head::Op(op)
                    && (id == class || projections.any(|p| graph.find(p) == class))
            })
        };
        later.matched.iter().any(|call| made(call.op, graph.find(call.class)))
    }

    /// The op that computes the anchor's value in the result, if anything does.
    fn instead(&self, firing: &Firing) -> Option<String> {
        let class = self.extraction.number(self.imported.graph.find(firing.anchor))?;
        let node = self.picks[class].filter(|_| self.live[class])?;
        match self.extraction.node(&self.imported.graph, node).head {
            Head::Proj(_) => {
                let tuple = *self.extraction.problem.nodes[node].children.first()?;
                self.op(self.picks[tuple]?)
            }
            _ => self.op(node),
        }
    }
}
