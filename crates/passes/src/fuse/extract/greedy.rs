//! Local choices, with the groups that local choices miss.

use super::{EPSILON, Picks, Problem};

/// Greedy picks; then, for every class whose users would have to change together (the parts of
/// one multi-output call), the same with that group forced, kept where it is cheaper.
pub(super) fn with_groups(problem: &Problem, order: &[usize]) -> Option<Picks> {
    let mut forced: Picks = vec![None; problem.classes.len()];
    let mut best = picks(problem, order, &forced);
    let mut cost = problem.cost(&best);
    loop {
        let mut improved = false;
        for group in groups(problem) {
            let mut trial = forced.clone();
            for n in group {
                trial[problem.nodes[n].class] = Some(n);
            }
            let found = picks(problem, order, &trial);
            let Some(new) = problem.cost(&found) else { continue };
            if cost.is_none_or(|c| new < c - EPSILON) {
                (best, cost, forced, improved) = (found, Some(new), trial, true);
            }
        }
        if !improved {
            return cost.map(|_| best);
        }
    }
}

/// For each class, the free nodes of contested classes that take it.
fn groups(problem: &Problem) -> Vec<Vec<usize>> {
    let mut groups = vec![Vec::new(); problem.classes.len()];
    for nodes in problem.classes.iter().filter(|n| n.len() > 1) {
        for &n in nodes.iter().filter(|n| problem.nodes[**n].cost == 0.0) {
            problem.nodes[n].children.iter().for_each(|&c| groups[c].push(n));
        }
    }
    groups.retain(|g| !g.is_empty());
    groups
}

/// For each class the node with the cheapest set of classes below it, repeated to a fixed point
/// (after `greedy_dag` of extraction-gym).
fn picks(problem: &Problem, order: &[usize], forced: &Picks) -> Picks {
    let words = problem.classes.len().div_ceil(64);
    let mut picks: Picks = vec![None; problem.classes.len()];
    let mut below: Vec<(f64, Vec<u64>)> =
        vec![(f64::INFINITY, vec![0; words]); problem.classes.len()];
    // A bound on the rounds: classes in cycles settle late, and rounding could flip for ever.
    for _ in 0..8 {
        let mut changed = false;
        for &class in order.iter().rev() {
            for &n in &problem.classes[class] {
                if forced[class].is_some_and(|f| f != n) {
                    continue;
                }
                let node = &problem.nodes[n];
                let mut set = vec![0; words];
                for &c in &node.children {
                    set.iter_mut().zip(&below[c].1).for_each(|(a, b)| *a |= b);
                }
                let ready = node.children.iter().all(|&c| picks[c].is_some());
                if !ready || set[class / 64] >> (class % 64) & 1 == 1 {
                    continue;
                }
                let cost = node.cost + total(problem, &picks, &set);
                if cost < below[class].0 - EPSILON {
                    set[class / 64] |= 1 << (class % 64);
                    below[class] = (cost, set);
                    picks[class] = Some(n);
                    changed = true;
                }
            }
        }
        if !changed {
            break;
        }
    }
    picks
}

fn total(problem: &Problem, picks: &Picks, set: &[u64]) -> f64 {
    let mut total = 0.0;
    for (i, word) in set.iter().enumerate() {
        let mut word = *word;
        while word != 0 {
            let class = i * 64 + word.trailing_zeros() as usize;
            total += picks[class].map_or(0.0, |n| problem.nodes[n].cost);
            word &= word - 1;
        }
    }
    total
}
