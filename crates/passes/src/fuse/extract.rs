//! The cheapest way to compute the roots of an e-graph: one node a class, shared work paid once.
//!
//! The cost is that of the whole DAG, so a class's best node depends on what else is computed. A
//! greedy search (which tries multi-output groups as wholes) gives a first answer; branch and bound
//! proves it, or improves it: it decides class after class, users first, and of two ways to come to
//! the same set of classes still to be decided it follows the cheaper one only. The picks are acyclic, and no version of a state has two writers.

mod greedy;

use std::collections::HashMap;

/// One node: a way to compute its class.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidate {
    pub(super) class: usize,
    /// Classes it takes; sorted, no doubles.
    pub(super) children: Vec<usize>,
    /// Microseconds.
    pub(super) cost: f64,
    /// States (classes) that it writes the next version of.
    pub(super) writes: Vec<usize>,
}

/// What to extract from.
#[derive(Clone, Debug, Default)]
pub(super) struct Problem {
    pub(super) nodes: Vec<Candidate>,
    /// The nodes of each class.
    pub(super) classes: Vec<Vec<usize>>,
    pub(super) roots: Vec<usize>,
}

/// A node for each class that is needed.
pub(super) type Picks = Vec<Option<usize>>;

/// The best picks found.
#[derive(Clone, Debug)]
pub(super) struct Solution {
    pub(super) picks: Picks,
    pub(super) cost: f64,
    /// How far below the true optimum may be; 0 when the search was exhausted.
    pub(super) gap: f64,
    /// Search nodes visited.
    pub(super) searched: usize,
}

/// Differences below this are rounding.
const EPSILON: f64 = 1e-9;

impl Problem {
    /// The cost of picks, or `None` where one is missing, they form a cycle, or a state version has
    /// two writers.
    pub(super) fn cost(&self, picks: &Picks) -> Option<f64> {
        #[derive(Clone, Copy, PartialEq)]
        enum Mark {
            New,
            Open,
            Done,
        }
        let mut marks = vec![Mark::New; self.classes.len()];
        let mut written = vec![false; self.classes.len()];
        let mut total = 0.0;
        let mut stack: Vec<(usize, bool)> = self.roots.iter().map(|&c| (c, false)).collect();
        while let Some((class, leaving)) = stack.pop() {
            let node = &self.nodes[picks[class]?];
            match (leaving, marks[class]) {
                (true, _) => marks[class] = Mark::Done,
                (false, Mark::Done) => {}
                (false, Mark::Open) => return None,
                (false, Mark::New) => {
                    marks[class] = Mark::Open;
                    total += node.cost;
                    for &state in &node.writes {
                        if std::mem::replace(&mut written[state], true) {
                            return None;
                        }
                    }
                    stack.push((class, true));
                    // A child that is open closes a cycle; one that is new may be pushed twice.
                    stack.extend(node.children.iter().map(|&c| (c, false)));
                }
            }
        }
        Some(total)
    }

    /// The same problem in which `node` must be picked.
    pub(super) fn forcing(&self, node: usize) -> Problem {
        let mut forced = self.clone();
        let class = self.nodes[node].class;
        forced.classes[class] = vec![node];
        if !forced.roots.contains(&class) {
            forced.roots.push(class);
        }
        forced
    }

    /// Takes picks back to those of `start` wherever that costs no more, so that of what is as cheap
    /// the graph keeps what it had. A call of several results is taken back as a whole.
    pub(super) fn prefer(&self, start: &Picks, solution: &mut Solution) {
        let differs = |picks: &Picks, class: usize| {
            picks[class].is_some() && start[class].is_some() && picks[class] != start[class]
        };
        for class in 0..self.classes.len() {
            let is_result_of = |other: usize| {
                let node = solution.picks[other].map(|n| &self.nodes[n]);
                node.is_some_and(|n| n.cost == 0.0 && n.children == [class])
            };
            let users = (0..self.classes.len()).filter(|&c| is_result_of(c));
            let group = users.chain([class]).filter(|&c| differs(&solution.picks, c));
            let group: Vec<usize> = group.collect();
            if group.is_empty() {
                continue;
            }
            let mut picks = solution.picks.clone();
            group.into_iter().for_each(|c| picks[c] = start[c]);
            for (pick, before) in picks.iter_mut().zip(start) {
                *pick = pick.or(*before);
            }
            if self.cost(&picks).is_some_and(|cost| cost <= solution.cost + EPSILON) {
                solution.picks = picks;
            }
        }
    }

    /// Drops every node that another of its class makes needless: one no dearer, that takes and
    /// writes nothing more.
    fn prune(&mut self) {
        let subset = |a: &[usize], b: &[usize]| a.iter().all(|x| b.contains(x));
        for class in 0..self.classes.len() {
            let mut kept: Vec<usize> = Vec::new();
            for &n in &self.classes[class] {
                let by = |a: usize, b: usize| {
                    let (a, b) = (&self.nodes[a], &self.nodes[b]);
                    a.cost <= b.cost
                        && subset(&a.children, &b.children)
                        && subset(&a.writes, &b.writes)
                };
                let needs_itself = self.nodes[n].children.contains(&class);
                if needs_itself || kept.iter().any(|&k| by(k, n)) {
                    continue;
                }
                kept.retain(|&k| !by(n, k));
                kept.push(n);
            }
            self.classes[class] = kept;
        }
    }
}

/// Finds the cheapest picks. `start` are picks known to be valid, if any are; `cap` bounds the
/// search.
pub(super) fn solve(problem: &Problem, start: Option<Picks>, cap: usize) -> Option<Solution> {
    let mut problem = problem.clone();
    problem.prune();
    let plan = Plan::new(&problem);
    let mut best: Option<(f64, Picks)> = None;
    for picks in start.into_iter().chain(greedy::with_groups(&problem, &plan.order)) {
        if let Some(cost) = problem.cost(&picks)
            && best.as_ref().is_none_or(|(b, _)| cost < b - EPSILON)
        {
            best = Some((cost, picks));
        }
    }
    let mut search = Search::new(&problem, &plan, best, cap);
    let floor = search.bound(0);
    search.run(0);
    let (exhausted, searched) = (search.searched <= cap, search.searched);
    let (cost, picks) = search.best?;
    let gap = if exhausted { 0.0 } else { (cost - floor).max(0.0) };
    Some(Solution { picks, cost, gap, searched })
}

/// The order in which classes are decided, and what each costs at least.
struct Plan {
    /// Users before what they use, but for cycles.
    order: Vec<usize>,
    /// Where each class is in `order`.
    position: Vec<usize>,
    /// Where the cycle that a position is in begins; itself outside cycles.
    block: Vec<usize>,
    /// For each class, the positions of the classes that may use it, in order.
    users: Vec<Vec<usize>>,
    /// For each class, a floor of its cost when what is shared is divided among all possible users.
    floor: Vec<f64>,
}

impl Plan {
    fn new(problem: &Problem) -> Plan {
        let count = problem.classes.len();
        let mut plan = Plan {
            order: Vec::with_capacity(count),
            position: vec![usize::MAX; count],
            block: Vec::new(),
            users: vec![Vec::new(); count],
            floor: vec![0.0; count],
        };
        let mut cyclic = vec![false; count];
        // Components come with what they use before them; users shall come first.
        for component in components(problem).into_iter().rev() {
            let start = plan.order.len();
            for class in &component {
                cyclic[*class] = component.len() > 1;
                plan.position[*class] = plan.order.len();
                plan.order.push(*class);
                plan.block.push(start);
            }
        }
        for (position, &class) in plan.order.iter().enumerate() {
            for &n in &problem.classes[class] {
                for &child in &problem.nodes[n].children {
                    if plan.users[child].last() != Some(&position) {
                        plan.users[child].push(position);
                    }
                }
            }
        }
        // A class in a cycle may be decided before its users: it gets no share, to stay below.
        for &class in plan.order.iter().rev().filter(|c| !cyclic[**c]) {
            let shares = |&n: &usize| plan.node_floor(&problem.nodes[n], problem);
            let least = problem.classes[class].iter().map(shares).fold(f64::INFINITY, f64::min);
            plan.floor[class] = if least.is_finite() { least } else { 0.0 };
        }
        plan
    }

    /// How many may use a class; being a root counts as a use.
    fn shares(&self, class: usize, problem: &Problem) -> f64 {
        (self.users[class].len() + usize::from(problem.roots.contains(&class))).max(1) as f64
    }

    fn node_floor(&self, node: &Candidate, problem: &Problem) -> f64 {
        let child = |&c: &usize| self.floor[c] / self.shares(c, problem);
        node.cost + node.children.iter().map(child).sum::<f64>()
    }
}

/// Strongly connected components of the classes below the roots (Tarjan 1972), each after those it
/// uses.
fn components(problem: &Problem) -> Vec<Vec<usize>> {
    let count = problem.classes.len();
    let successors = |class: usize| {
        let nodes = problem.classes[class].iter();
        nodes.flat_map(|&n| problem.nodes[n].children.iter().copied()).collect::<Vec<usize>>()
    };
    let (mut index, mut low) = (vec![usize::MAX; count], vec![0; count]);
    let (mut open, mut pending, mut found) = (vec![false; count], Vec::new(), Vec::new());
    let mut next = 0;
    for &root in &problem.roots {
        let mut calls = vec![(root, successors(root), 0)];
        if index[root] != usize::MAX {
            continue;
        }
        while let Some((class, children, at)) = calls.last_mut() {
            let class = *class;
            if *at == 0 && index[class] == usize::MAX {
                (index[class], low[class], open[class]) = (next, next, true);
                pending.push(class);
                next += 1;
            }
            if let Some(&child) = children.get(*at) {
                *at += 1;
                if index[child] == usize::MAX {
                    calls.push((child, successors(child), 0));
                } else if open[child] {
                    low[class] = low[class].min(index[child]);
                }
                continue;
            }
            if low[class] == index[class] {
                let from = pending.iter().rposition(|c| *c == class).unwrap_or(0);
                let mut component = pending.split_off(from);
                for class in &component {
                    open[*class] = false;
                }
                component.reverse();
                found.push(component);
            }
            calls.pop();
            if let Some((parent, ..)) = calls.last() {
                low[*parent] = low[*parent].min(low[class]);
            }
        }
    }
    found
}

struct Search<'a> {
    problem: &'a Problem,
    plan: &'a Plan,
    picks: Picks,
    /// For each class, how many picks use it; being a root counts.
    needed: Vec<usize>,
    written: Vec<bool>,
    cost: f64,
    best: Option<(f64, Picks)>,
    /// The least cost at which each set of classes still to be decided was come to.
    seen: HashMap<(Vec<u64>, Vec<u64>), f64>,
    searched: usize,
    cap: usize,
}

impl<'a> Search<'a> {
    fn new(
        problem: &'a Problem,
        plan: &'a Plan,
        best: Option<(f64, Picks)>,
        cap: usize,
    ) -> Search<'a> {
        let count = problem.classes.len();
        let mut needed = vec![0; count];
        problem.roots.iter().for_each(|&r| needed[r] = 1);
        let (picks, written) = (vec![None; count], vec![false; count]);
        let seen = HashMap::new();
        Search { problem, plan, picks, needed, written, cost: 0.0, best, seen, searched: 0, cap }
    }

    /// A floor of what any completion costs, when the classes before `position` are decided.
    fn bound(&self, position: usize) -> f64 {
        let mut bound = self.cost;
        // Within a cycle not all are.
        let position = self.plan.block.get(position).copied().unwrap_or(position);
        for &class in &self.plan.order[position..] {
            if self.needed[class] > 0 && self.picks[class].is_none() {
                let users = &self.plan.users[class];
                let undecided = users.len() - users.partition_point(|p| *p < position);
                let shares = self.plan.shares(class, self.problem);
                bound += self.plan.floor[class] * (shares - undecided as f64) / shares;
            }
        }
        bound
    }

    fn run(&mut self, position: usize) {
        self.searched += 1;
        if self.searched > self.cap {
            return;
        }
        // Decide what leaves no choice without going deeper.
        let mut position = position;
        let mut decided = Vec::new();
        loop {
            let from = self.plan.block.get(position).copied().unwrap_or(position);
            let open = |c: &usize| self.needed[*c] > 0 && self.picks[*c].is_none();
            let Some(offset) = self.plan.order[from..].iter().position(open) else {
                self.complete();
                break;
            };
            let class = self.plan.order[from + offset];
            position = position.max(from + offset);
            match self.problem.classes[class][..] {
                [node] if self.allowed(class, node) => {
                    self.pick(class, node);
                    decided.push(class);
                }
                [] | [_] => break,
                _ => {
                    self.branch(class, position);
                    break;
                }
            }
        }
        decided.into_iter().rev().for_each(|class| self.unpick(class));
    }

    fn branch(&mut self, class: usize, position: usize) {
        let bound = self.bound(position);
        if self.best.as_ref().is_some_and(|(b, _)| bound >= b - EPSILON) {
            return;
        }
        if self.came_cheaper(position) {
            return;
        }
        let mut nodes: Vec<(f64, usize)> = self.problem.classes[class]
            .iter()
            .map(|&n| (self.plan.node_floor(&self.problem.nodes[n], self.problem), n))
            .collect();
        nodes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, node) in nodes {
            if self.allowed(class, node) {
                self.pick(class, node);
                self.run(position);
                self.unpick(class);
            }
        }
    }

    /// Whether the classes still to be decided are those of a state that was come to before, at no
    /// more cost: what follows depends on nothing else.
    fn came_cheaper(&mut self, position: usize) -> bool {
        if self.plan.block.get(position) != Some(&position) {
            // Inside a cycle it also depends on what was picked there.
            return false;
        }
        let open = |c: usize| self.needed[c] > 0 && self.picks[c].is_none();
        let key = (bits(self.needed.len(), open), bits(self.written.len(), |c| self.written[c]));
        let cheapest = self.seen.entry(key).or_insert(f64::INFINITY);
        let before = *cheapest <= self.cost + EPSILON;
        *cheapest = cheapest.min(self.cost);
        before
    }

    fn complete(&mut self) {
        if self.best.as_ref().is_none_or(|(b, _)| self.cost < b - EPSILON) {
            self.best = Some((self.cost, self.picks.clone()));
        }
    }

    /// Whether a node may be picked: no second writer, no cycle.
    fn allowed(&self, class: usize, node: usize) -> bool {
        let node = &self.problem.nodes[node];
        if node.writes.iter().any(|&s| self.written[s]) {
            return false;
        }
        // Only within a component can there be a cycle.
        let block = |c: usize| self.plan.block[self.plan.position[c]];
        let inside = |c: &usize| block(*c) == block(class);
        let mut stack: Vec<usize> = node.children.iter().copied().filter(inside).collect();
        let mut seen = Vec::new();
        while let Some(c) = stack.pop() {
            if c == class {
                return false;
            }
            if !seen.contains(&c) {
                seen.push(c);
                let children = self.picks[c].map(|n| &self.problem.nodes[n].children);
                stack.extend(children.into_iter().flatten().copied().filter(inside));
            }
        }
        true
    }

    fn pick(&mut self, class: usize, node: usize) {
        self.picks[class] = Some(node);
        let node = &self.problem.nodes[node];
        self.cost += node.cost;
        node.children.iter().for_each(|&c| self.needed[c] += 1);
        node.writes.iter().for_each(|&s| self.written[s] = true);
    }

    fn unpick(&mut self, class: usize) {
        let Some(node) = self.picks[class].take() else { return };
        let node = &self.problem.nodes[node];
        self.cost -= node.cost;
        node.children.iter().for_each(|&c| self.needed[c] -= 1);
        node.writes.iter().for_each(|&s| self.written[s] = false);
    }
}

/// The numbers below `count` that are `set`.
fn bits(count: usize, set: impl Fn(usize) -> bool) -> Vec<u64> {
    let mut words = vec![0; count.div_ceil(64)];
    (0..count).filter(|i| set(*i)).for_each(|i| words[i / 64] |= 1 << (i % 64));
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every way to pick, tried.
    fn brute_force(problem: &Problem) -> Option<f64> {
        fn go(problem: &Problem, class: usize, picks: &mut Picks, best: &mut Option<f64>) {
            if class == problem.classes.len() {
                if let Some(cost) = problem.cost(picks)
                    && best.is_none_or(|b| cost < b)
                {
                    *best = Some(cost);
                }
                return;
            }
            for &n in &problem.classes[class] {
                picks[class] = Some(n);
                go(problem, class + 1, picks, best);
            }
            picks[class] = None;
            if problem.classes[class].is_empty() {
                go(problem, class + 1, picks, best);
            }
        }
        let mut best = None;
        go(problem, 0, &mut vec![None; problem.classes.len()], &mut best);
        best
    }

    fn problems() -> impl Strategy<Value = Problem> {
        // Class 0 is the root; most children come later, some make cycles.
        let node = (0..8usize, prop::collection::vec((0..8usize, 0..10u8), 0..4), 0..6u32, 0..12u8);
        prop::collection::vec(node, 4..20).prop_map(|list| {
            let mut problem =
                Problem { classes: vec![Vec::new(); 8], roots: vec![0, 1], ..Problem::default() };
            for (class, children, cost, write) in list {
                let child = |(c, back): (usize, u8)| {
                    if back == 0 { c } else { (class + 1 + c % 4).min(8) }
                };
                let mut children: Vec<usize> =
                    children.into_iter().map(child).filter(|c| *c < 8 && *c != class).collect();
                children.sort_unstable();
                children.dedup();
                let writes = if write < 2 { vec![6 + usize::from(write)] } else { Vec::new() };
                problem.classes[class].push(problem.nodes.len());
                problem.nodes.push(Candidate { class, children, cost: f64::from(cost), writes });
            }
            problem
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn it_is_as_cheap_as_brute_force(problem in problems()) {
            let found = solve(&problem, None, 1_000_000);
            let best = brute_force(&problem);
            prop_assert_eq!(found.as_ref().map(|s| s.cost), best);
            if let Some(solution) = found {
                prop_assert_eq!(problem.cost(&solution.picks), Some(solution.cost));
                prop_assert_eq!(solution.gap, 0.0);
            }
        }

        #[test]
        fn a_capped_search_says_how_far_it_may_be(problem in problems()) {
            if let (Some(found), Some(best)) = (solve(&problem, None, 2), brute_force(&problem)) {
                prop_assert!(found.cost - found.gap <= best + 1e-9 && best <= found.cost + 1e-9);
            }
        }
    }

    /// Three projections of one call, dearer than each part alone and cheaper than all.
    #[test]
    fn a_group_is_found_that_no_local_choice_finds() {
        let node = |class, children: &[usize], cost| Candidate {
            class,
            children: children.to_vec(),
            cost,
            writes: Vec::new(),
        };
        let nodes = vec![
            node(0, &[1, 2, 3], 1.0),
            node(1, &[], 3.0),
            node(1, &[4], 0.0),
            node(2, &[], 3.0),
            node(2, &[4], 0.0),
            node(3, &[], 3.0),
            node(3, &[4], 0.0),
            node(4, &[], 5.0),
        ];
        let classes = vec![vec![0], vec![1, 2], vec![3, 4], vec![5, 6], vec![7]];
        let problem = Problem { nodes, classes, roots: vec![0] };
        assert_eq!(solve(&problem, None, 1).map(|s| s.cost), Some(6.0));
    }
}
