//! From a graph to an e-graph, and back from picks to a graph.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use egg::Id;
use infernum_ir::body::Emit;
use infernum_ir::{Effect, Graph, Loc, Node, NodeKind, Param, Type, ValueId};

use super::extract::{Candidate, Picks, Problem};
use super::language::{Data, EGraph, Head};
use super::price::Prices;

/// Where a class comes from: what to call it, and where to put it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin {
    /// False for a value of the graph, true for one that a rule made.
    pub(super) made: bool,
    /// The node of the graph that it is, or that the rule's anchor is.
    pub(super) node: usize,
    /// Counts what rules made.
    pub(super) serial: usize,
    /// Its name.
    pub(super) name: String,
}

/// A graph as an e-graph.
pub(super) struct Imported<'g> {
    pub(super) source: &'g Graph,
    pub(super) graph: EGraph,
    /// The class of each value of the source.
    values: Vec<Vec<Id>>,
    /// The nodes of the source, as they were added.
    nodes: Vec<(Id, super::language::Node)>,
    /// Each class's origins, under the names it had then.
    origins: Vec<(Id, Origin)>,
}

impl<'g> Imported<'g> {
    /// Adds every node of a graph. The graph must be well formed.
    pub(super) fn new(source: &'g Graph) -> Result<Imported<'g>, String> {
        let mut graph = EGraph::default();
        let mut values: Vec<Vec<Id>> = Vec::with_capacity(source.len());
        let mut origins = Vec::new();
        for (index, node) in source.nodes() {
            let ids = match &node.kind {
                NodeKind::Param(_) => vec![graph.param(node.types[0].clone())],
                NodeKind::Op { op, attrs } => {
                    let operands = source.operands(index).into_iter();
                    let operands: Vec<_> =
                        operands.map(|v| v.map(|v| values[v.node][v.result])).collect();
                    graph.emit(&node.names, *op, &operands, attrs.clone())?
                }
            };
            // A tuple goes by its first result's name.
            let tuple = graph.tuple(ids[0]).map(|tuple| (tuple, &node.names[0]));
            for (id, name) in ids.iter().copied().zip(&node.names).chain(tuple) {
                let origin = Origin { made: false, node: index, serial: 0, name: name.clone() };
                origins.push((id, origin));
            }
            values.push(ids);
        }
        graph.egg.rebuild();
        let nodes = std::mem::take(&mut graph.added);
        let nodes = nodes.into_iter().map(|(id, node, _)| (id, node)).collect();
        Ok(Imported { source, graph, values, nodes, origins })
    }

    /// Notes that a rule whose anchor is `site` made `class` and called it `name`.
    pub(super) fn made(&mut self, class: Id, site: &Origin, name: &str) {
        let serial = self.origins.len();
        let name =
            if name.is_empty() { site.name.clone() } else { format!("{}.{name}", site.name) };
        self.origins.push((class, Origin { made: true, node: site.node, serial, name }));
    }

    /// The first origin of each class under its present name: a value of the graph before one that
    /// was made.
    pub(super) fn origins(&self) -> HashMap<Id, &Origin> {
        let mut first: HashMap<Id, &Origin> = HashMap::new();
        for (id, origin) in &self.origins {
            let entry = first.entry(self.graph.find(*id)).or_insert(origin);
            if origin < *entry {
                *entry = origin;
            }
        }
        first
    }

    /// Where the node of an origin was written.
    pub(super) fn loc(&self, origin: &Origin) -> Option<Loc> {
        self.source.node(origin.node).loc.clone()
    }

    /// The nodes of the source, with their classes.
    pub(super) fn source_nodes(&self) -> impl Iterator<Item = &(Id, super::language::Node)> {
        self.nodes.iter()
    }

    /// The extraction problem of this e-graph.
    pub(super) fn problem(&self, prices: &Prices<'_>) -> Extraction {
        let mut out = Extraction::default();
        let roots = self.source.results().iter().map(|v| self.values[v.node][v.result]);
        let roots: Vec<usize> = roots.map(|id| out.class(self.graph.find(id))).collect();
        let mut at = 0;
        while at < out.ids.len() {
            let (class, id) = (at, out.ids[at]);
            at += 1;
            for (position, node) in self.graph.nodes(id).iter().enumerate() {
                let mut choice = Candidate { class, ..Candidate::default() };
                for child in &node.children {
                    let child = self.graph.find(*child);
                    // Leaves cost nothing and leave no choice.
                    if !self.is_leaf(child) {
                        choice.children.push(out.class(child));
                    }
                }
                choice.children.sort_unstable();
                choice.children.dedup();
                if let Some((op, types, attrs)) = self.graph.signature(node) {
                    let results = self.graph.result_types(id);
                    choice.cost = prices.price(op, &types, &attrs, results).us;
                    if op.effect == Effect::Writes {
                        let states = node.children.iter().map(|c| self.graph.find(*c));
                        let states = states
                            .filter(|c| matches!(self.graph.value_type(*c), Some(Type::State(_))));
                        choice.writes = states.map(|c| out.class(c)).collect();
                    }
                }
                out.problem.classes[class].push(out.problem.nodes.len());
                out.problem.nodes.push(choice);
                out.position.push(position);
            }
        }
        out.problem.roots = roots;
        out.problem.roots.dedup();
        out
    }

    fn is_leaf(&self, class: Id) -> bool {
        match self.graph.data(class) {
            Data::Attr(_) | Data::Absent => true,
            // Two planes may both be written: a state must stay a class to be told apart.
            Data::Value(Type::State(_)) => false,
            _ => self.graph.nodes(class).iter().any(|n| matches!(n.head, Head::Param(_))),
        }
    }

    /// The picks that give the source back. Valid: each class takes its first node of the source,
    /// whose operands come from earlier ones.
    pub(super) fn unchanged(&self, extraction: &Extraction) -> Picks {
        let mut picks: Picks = vec![None; extraction.ids.len()];
        for (id, node) in &self.nodes {
            if let Some(class) = extraction.number(self.graph.find(*id))
                && picks[class].is_none()
            {
                picks[class] = extraction.find(&self.graph, class, node);
            }
        }
        picks
    }

    /// Builds the graph of `picks`.
    pub(super) fn build(&self, extraction: &Extraction, picks: &Picks) -> Result<Graph, String> {
        Builder::new(self, extraction, picks).build()
    }
}

/// An extraction problem, and what its numbers stand for.
#[derive(Default)]
pub(super) struct Extraction {
    pub(super) problem: Problem,
    /// The class of each number.
    pub(super) ids: Vec<Id>,
    numbers: HashMap<Id, usize>,
    /// For each node, its place in its class.
    position: Vec<usize>,
}

impl Extraction {
    fn class(&mut self, id: Id) -> usize {
        *self.numbers.entry(id).or_insert_with(|| {
            self.ids.push(id);
            self.problem.classes.push(Vec::new());
            self.ids.len() - 1
        })
    }

    /// The number of a class, if it is one that the roots may need.
    pub(super) fn number(&self, id: Id) -> Option<usize> {
        self.numbers.get(&id).copied()
    }

    /// The number of a node of a class.
    pub(super) fn find(
        &self,
        graph: &EGraph,
        class: usize,
        node: &super::language::Node,
    ) -> Option<usize> {
        let node = graph.canonical(node);
        let nodes = &self.problem.classes[class];
        nodes.iter().copied().find(|&n| graph.canonical(self.node(graph, n)) == node)
    }

    /// The node that `n` stands for.
    pub(super) fn node<'a>(&self, graph: &'a EGraph, n: usize) -> &'a super::language::Node {
        &graph.nodes(self.ids[self.problem.nodes[n].class])[self.position[n]]
    }

    /// The classes that the roots need under these picks.
    pub(super) fn live(&self, picks: &Picks) -> Vec<bool> {
        let mut live = vec![false; self.ids.len()];
        let mut stack = self.problem.roots.clone();
        while let Some(class) = stack.pop() {
            if !std::mem::replace(&mut live[class], true)
                && let Some(n) = picks[class]
            {
                stack.extend(&self.problem.nodes[n].children);
            }
        }
        live
    }
}

struct Builder<'a, 'g> {
    from: &'a Imported<'g>,
    extraction: &'a Extraction,
    picks: &'a Picks,
    origins: HashMap<Id, &'a Origin>,
    names: HashSet<String>,
    out: Graph,
    built: HashMap<Id, ValueId>,
}

impl<'a, 'g> Builder<'a, 'g> {
    fn new(from: &'a Imported<'g>, extraction: &'a Extraction, picks: &'a Picks) -> Self {
        Builder {
            from,
            extraction,
            picks,
            origins: from.origins(),
            names: HashSet::new(),
            out: Graph::new(from.source.name.clone()),
            built: HashMap::new(),
        }
    }

    fn build(mut self) -> Result<Graph, String> {
        let live = self.extraction.live(self.picks);
        self.reserve_names(&live);
        let used = self.used_leaves(&live);
        for (value, param, ty) in self.from.source.params() {
            let id = self.from.graph.find(self.from.values[value.node][value.result]);
            if used.contains(&id) && !self.built.contains_key(&id) {
                let name = self.from.source.value_name(value).to_owned();
                let mut node = self.from.source.node(value.node).clone();
                node.kind = NodeKind::Param(Param::clone(param));
                (node.names, node.types) = (vec![name], vec![ty.clone()]);
                let value = self.out.add_node(node, &[]);
                self.built.insert(id, value);
            }
        }
        for class in self.order(&live) {
            self.call(class)?;
        }
        let result = |v: &ValueId| {
            let id = self.from.graph.find(self.from.values[v.node][v.result]);
            self.value(id)
        };
        let results = self.from.source.results().iter().map(result).collect::<Result<_, _>>()?;
        self.out.set_results(results);
        Ok(self.out)
    }

    fn picked(&self, class: usize) -> Option<&'a super::language::Node> {
        Some(self.extraction.node(&self.from.graph, self.picks[class]?))
    }

    /// What survives keeps its name, so what is made may not take it.
    fn reserve_names(&mut self, live: &[bool]) {
        for (_, node) in self.from.source.nodes() {
            if let NodeKind::Param(_) = node.kind {
                self.names.extend(node.names.iter().cloned());
            }
        }
        for id in self.extraction.ids.iter().zip(live).filter(|(_, l)| **l).map(|(id, _)| id) {
            if let Some(origin) = self.origins.get(id).filter(|o| !o.made) {
                self.names.insert(origin.name.clone());
            }
        }
    }

    fn used_leaves(&self, live: &[bool]) -> HashSet<Id> {
        let mut used: HashSet<Id> = HashSet::new();
        for (class, _) in live.iter().enumerate().filter(|(_, l)| **l) {
            let node = self.picked(class);
            used.extend(node.iter().flat_map(|n| &n.children).map(|c| self.from.graph.find(*c)));
            used.insert(self.extraction.ids[class]);
        }
        used
    }

    /// The live calls, operands first, otherwise in the order of the source.
    fn order(&self, live: &[bool]) -> Vec<usize> {
        let is_live = |c: &usize| live[*c];
        let children = |class: usize| {
            let node = self.picks[class].map(|n| &self.extraction.problem.nodes[n]);
            node.map_or(&[][..], |n| &n.children)
        };
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); live.len()];
        let mut waiting = vec![0; live.len()];
        for class in (0..live.len()).filter(is_live) {
            waiting[class] = children(class).len();
            for &child in children(class) {
                users[child].push(class);
            }
        }
        let key = |class: usize| {
            let id = self.extraction.ids[class];
            let tuple = |id: Id| {
                let of = |i| self.from.graph.projection(id, i).map(|p| self.from.graph.find(p));
                let results = (0..self.from.graph.result_types(id).len()).filter_map(of);
                results.filter_map(|p| self.origins.get(&p)).min().copied()
            };
            let origin = self.origins.get(&id).copied().or_else(|| tuple(id));
            Reverse((origin.map(|o| (o.node, o.made, o.serial)), class))
        };
        let ready = (0..live.len()).filter(is_live).filter(|c| waiting[*c] == 0);
        let mut ready: BinaryHeap<_> = ready.map(key).collect();
        let mut order = Vec::new();
        while let Some(Reverse((_, class))) = ready.pop() {
            order.push(class);
            for &user in &users[class] {
                waiting[user] -= 1;
                if waiting[user] == 0 {
                    ready.push(key(user));
                }
            }
        }
        order
    }

    fn call(&mut self, class: usize) -> Result<(), String> {
        let graph = &self.from.graph;
        let id = self.extraction.ids[class];
        let node = self.picked(class).ok_or("a class that is needed was not picked")?;
        let Some((op, operands, attrs)) = node.call() else {
            if let Head::Proj(i) = node.head {
                let tuple = self.value(graph.find(node.children[0]))?;
                self.built.insert(id, ValueId { node: tuple.node, result: i as usize });
            }
            return Ok(());
        };
        let operand = |c: &Id| match graph.data(*c) {
            Data::Absent => Ok(None),
            _ => self.value(graph.find(*c)).map(Some),
        };
        let operands = operands.iter().map(operand).collect::<Result<Vec<_>, _>>()?;
        let attr = |c: &Id| match graph.data(*c) {
            Data::Attr(attr) => Ok(attr.clone()),
            other => Err(format!("expected an attribute, found {other:?}")),
        };
        let attrs = attrs.iter().map(attr).collect::<Result<Vec<_>, _>>()?;
        let types = graph.result_types(id).to_vec();
        let tuple = matches!(graph.data(id), Data::Tuple(_));
        let results: Vec<Option<Id>> = (0..types.len())
            .map(|i| if tuple { graph.projection(id, i).map(|p| graph.find(p)) } else { Some(id) })
            .collect();
        let names =
            results.iter().enumerate().map(|(i, r)| self.name(class, i, *r, tuple)).collect();
        let origin = results.iter().flatten().filter_map(|r| self.origins.get(r)).min();
        let loc = origin.and_then(|o| self.from.loc(o));
        let node = Node { kind: NodeKind::Op { op, attrs }, names, types, loc };
        let value = self.out.add_node(node, &operands);
        self.built.insert(id, value);
        Ok(())
    }

    /// The name of result `i` of a call: that of its class, where it is what the class picked.
    fn name(&mut self, class: usize, i: usize, result: Option<Id>, tuple: bool) -> String {
        let origin = result.and_then(|r| self.origins.get(&r)).copied();
        let mine = !tuple
            || result.and_then(|r| self.extraction.number(r)).is_some_and(|number| {
                self.picked(number).is_some_and(|n| {
                    n.head == Head::Proj(i as u32)
                        && self.from.graph.find(n.children[0]) == self.extraction.ids[class]
                })
            });
        match origin {
            Some(origin) if mine && !origin.made => {
                self.names.insert(origin.name.clone());
                origin.name.clone()
            }
            _ => self.fresh(origin.map_or("v", |o| &o.name)),
        }
    }

    fn fresh(&mut self, base: &str) -> String {
        // Names are bounded; a chain of rewrites could grow one past that.
        let base = if base.len() > 200 { "v" } else { base };
        let numbered = (2..).map(|n| format!("{base}.{n}"));
        let mut names = std::iter::once(base.to_owned()).chain(numbered);
        let name = names.find(|n| !self.names.contains(n)).unwrap_or_default();
        self.names.insert(name.clone());
        name
    }

    fn value(&self, id: Id) -> Result<ValueId, String> {
        let missing = || {
            let name = self.origins.get(&id).map_or("?", |o| &o.name);
            format!("`{name}` is used before it is computed")
        };
        self.built.get(&id).copied().ok_or_else(missing)
    }
}
