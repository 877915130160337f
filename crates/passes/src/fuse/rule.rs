//! Matching a rule's left side and building its right.

use std::collections::HashMap;

use egg::Id;
use infernum_ir::body::{self, AttrSource, Env, Stmt, attr_value, type_value};
use infernum_ir::expr::{BinaryOp, Expr, Value};
use infernum_ir::{Attr, Op, Pointwise, Recurrence};

use super::language::{Data, EGraph, Head, Node};
use crate::data::Rule;

/// A left side made ready to be searched for: its statements from the anchor on, each reached
/// through an operand of one before.
pub(super) struct Pattern<'a> {
    pub(super) rule: &'a Rule,
    /// The names bound, in a fixed order.
    names: Vec<&'a str>,
    /// In the order they are matched.
    clauses: Vec<Clause<'a>>,
}

struct Clause<'a> {
    stmt: &'a Stmt,
    /// Which result it is reached through, with the slot that holds it; `None` for the anchor.
    from: Option<(usize, usize)>,
    results: Vec<usize>,
    operands: Vec<Operand>,
    attrs: Vec<AttrPattern>,
    /// Whether its two operands may change places.
    commutes: bool,
}

enum Operand {
    Absent,
    /// A name's slot, and whether it may stand for an operand that is left out.
    Bound(usize, bool),
}

/// What an attribute must be.
enum AttrPattern {
    /// What a name's slot has.
    Bound(usize),
    /// A recurrence, with the slots of the names that stand for its numbers.
    Recurrence(Vec<(String, usize)>),
    /// As it is written, or computed.
    Written,
}

/// What a name of a pattern stands for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Bound {
    /// A class: a value, an attribute of its own, or an operand that is left out.
    Class(Id),
    /// A part of an attribute.
    Part(Attr),
}

/// A match: what each name of the pattern stands for.
pub(super) type Bindings = Vec<Option<Bound>>;

/// How far a pattern matched at one anchor, and what stood in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stuck {
    /// Statements matched.
    pub(super) matched: usize,
    /// The op that the next one calls.
    pub(super) expected: Op,
    /// The class that it was looked for in.
    pub(super) class: Id,
}

impl<'a> Pattern<'a> {
    /// Orders the statements of a rule's left side.
    pub(super) fn new(rule: &'a Rule) -> Pattern<'a> {
        let mut pattern = Pattern { rule, names: Vec::new(), clauses: Vec::new() };
        let mut left: Vec<&Stmt> = rule.left.iter().rev().collect();
        // Every statement is reached from the anchor: the reader of rules has seen to that.
        while !left.is_empty() {
            let next = left.iter().position(|s| {
                pattern.clauses.is_empty() || s.results.iter().any(|r| pattern.slot(r).is_some())
            });
            let stmt = left.remove(next.unwrap_or(0));
            pattern.push(stmt);
        }
        pattern
    }

    fn slot(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|n| *n == name)
    }

    fn bind(&mut self, name: &'a str) -> usize {
        self.slot(name).unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() - 1
        })
    }

    fn push(&mut self, stmt: &'a Stmt) {
        let from = (!self.clauses.is_empty())
            .then(|| {
                let mut reached = stmt.results.iter().enumerate();
                reached.find_map(|(i, r)| Some((i, self.slot(r)?)))
            })
            .flatten();
        let results = stmt.results.iter().map(|r| self.bind(r)).collect();
        let optional = |n: &str| self.rule.values.iter().any(|(v, ty)| v == n && ty.optional);
        let flags: Vec<bool> =
            stmt.operands.iter().map(|o| o.as_deref().is_some_and(optional)).collect();
        let operands = stmt.operands.iter().zip(flags).map(|(operand, optional)| match operand {
            Some(name) => Operand::Bound(self.bind(name), optional),
            None => Operand::Absent,
        });
        let operands = operands.collect();
        let attrs = stmt.attrs.iter().map(|source| match source {
            AttrSource::Value(Expr::Var(name)) => AttrPattern::Bound(self.bind(name)),
            AttrSource::Recurrence(body) => AttrPattern::Recurrence(
                body.free().into_iter().map(|name| (name.to_owned(), self.bind(name))).collect(),
            ),
            _ => AttrPattern::Written,
        });
        let attrs = attrs.collect();
        // Where no other statement tells the operands apart, both orders are one match.
        let others = self.rule.left.iter().filter(|s| !std::ptr::eq(*s, stmt));
        let mut told_apart =
            others.flat_map(|s| s.results.iter().chain(s.operands.iter().flatten()));
        let commutes =
            commutes(stmt.op) && told_apart.any(|n| stmt.operands.iter().flatten().any(|o| o == n));
        self.clauses.push(Clause { stmt, from, results, operands, attrs, commutes });
    }

    /// Every match, in order, without doubles.
    pub(super) fn search(&self, graph: &EGraph) -> Vec<Bindings> {
        let mut found = Vec::new();
        for class in graph.calls(self.anchor()) {
            self.search_at(graph, class, &mut found, &mut None);
        }
        found
    }

    /// Adds the matches whose anchor is a call in `class`, or says how far the best one came.
    pub(super) fn search_at(
        &self,
        graph: &EGraph,
        class: Id,
        found: &mut Vec<Bindings>,
        stuck: &mut Option<Stuck>,
    ) {
        let first = found.len();
        self.clause(graph, 0, class, &vec![None; self.names.len()], found, stuck);
        let mut kept = first;
        for i in first..found.len() {
            if !found[first..kept].contains(&found[i]) {
                found.swap(kept, i);
                kept += 1;
            }
        }
        found.truncate(kept);
    }

    /// The op that the anchor calls.
    pub(super) fn anchor(&self) -> Op {
        self.clauses[0].stmt.op
    }

    /// Statements of the left side.
    pub(super) fn len(&self) -> usize {
        self.clauses.len()
    }

    /// The ops of the left side, in the order they are matched.
    pub(super) fn ops(&self) -> impl Iterator<Item = &'static str> {
        self.clauses.iter().map(|c| c.stmt.op.name)
    }

    /// Matches statement `k` against the calls of `class` (a tuple, or the one result).
    fn clause(
        &self,
        graph: &EGraph,
        k: usize,
        class: Id,
        bound: &Bindings,
        found: &mut Vec<Bindings>,
        stuck: &mut Option<Stuck>,
    ) {
        let clause = &self.clauses[k];
        let mut any = false;
        for node in graph.nodes(class).iter().filter(|n| n.head == Head::Op(clause.stmt.op)) {
            for swapped in [false, true] {
                if swapped && !(clause.commutes && same_type(graph, node)) {
                    continue;
                }
                let mut bound = bound.clone();
                if clause.unify(graph, class, node, swapped, &mut bound).is_some() {
                    any = true;
                    self.next(graph, k + 1, bound, found, stuck);
                }
            }
        }
        if !any && stuck.as_ref().is_none_or(|s| s.matched < k) {
            *stuck = Some(Stuck { matched: k, expected: clause.stmt.op, class });
        }
    }

    fn next(
        &self,
        graph: &EGraph,
        k: usize,
        bound: Bindings,
        found: &mut Vec<Bindings>,
        stuck: &mut Option<Stuck>,
    ) {
        let Some(clause) = self.clauses.get(k) else {
            found.push(bound);
            return;
        };
        let Some((result, slot)) = clause.from else { return };
        let Some(Bound::Class(class)) = bound[slot] else { return };
        if clause.results.len() == 1 {
            return self.clause(graph, k, class, &bound, found, stuck);
        }
        for node in graph.nodes(class) {
            if node.head == Head::Proj(result as u32) {
                let tuple = graph.find(node.children[0]);
                self.clause(graph, k, tuple, &bound, found, stuck);
            }
        }
    }

    /// The names of a match, as bodies know them.
    pub(super) fn env(&self, graph: &EGraph, bound: &Bindings) -> Env<Id> {
        let mut env = Env::default();
        for (name, bound) in self.names.iter().zip(bound) {
            let id = match bound {
                None => continue,
                Some(Bound::Class(id)) => id,
                Some(Bound::Part(attr)) => {
                    env.attrs.insert((*name).to_owned(), attr.clone());
                    continue;
                }
            };
            match graph.data(*id) {
                Data::Attr(attr) => {
                    env.attrs.insert((*name).to_owned(), attr.clone());
                }
                Data::Absent => {
                    env.values.insert((*name).to_owned(), None);
                }
                _ => {
                    env.values.insert((*name).to_owned(), Some(*id));
                }
            }
        }
        env
    }

    /// Whether the attributes that the left side writes as expressions have those values.
    pub(super) fn attributes_agree(&self, graph: &EGraph, env: &Env<Id>) -> bool {
        self.clauses.iter().all(|clause| {
            let computed = |i: &usize| {
                matches!(clause.attrs[*i], AttrPattern::Written)
                    && !matches!(clause.stmt.attrs[*i], AttrSource::Given(_))
            };
            (0..clause.attrs.len()).filter(computed).all(|i| {
                let kind = clause.stmt.op.attrs[i].kind;
                let want = body::attr(&clause.stmt.attrs[i], kind, graph, env);
                let class = env.values.get(&clause.stmt.results[0]).copied().flatten();
                let Some(class) = class else { return false };
                let holds = |node: &Node| {
                    let Some((op, operands, _)) = node.call() else { return false };
                    let same = clause.stmt.operands.iter().zip(operands).all(|(name, &id)| {
                        let value = name.as_ref().and_then(|n| env.values.get(n)).copied();
                        value.flatten().is_none_or(|v| graph.find(v) == graph.find(id))
                    });
                    let attrs = graph.signature(node).map(|(_, _, attrs)| attrs);
                    let found = attrs.as_ref().and_then(|a| a.get(i));
                    op == clause.stmt.op && same && want.as_ref().ok() == found
                };
                graph.nodes(class).iter().any(holds)
            })
        })
    }

    /// The names and what they stand for, as a reader of an explanation wants them.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.names.iter().copied()
    }
}

impl Clause<'_> {
    /// Binds what one statement names to what one call has; `None` where they differ.
    fn unify(
        &self,
        graph: &EGraph,
        class: Id,
        node: &Node,
        swapped: bool,
        bound: &mut Bindings,
    ) -> Option<()> {
        let (_, operands, attrs) = node.call()?;
        let mut bind = |slot: usize, to: Bound| bind(graph, bound, slot, to);
        let class_of = |id: Id| Bound::Class(graph.find(id));
        if let [slot] = self.results[..] {
            bind(slot, class_of(class))?;
        } else {
            for (i, slot) in self.results.iter().enumerate() {
                bind(*slot, class_of(graph.projection(class, i)?))?;
            }
        }
        for (i, operand) in self.operands.iter().enumerate() {
            let id = operands[if swapped { 1 - i } else { i }];
            let absent = matches!(graph.data(id), Data::Absent);
            match operand {
                Operand::Absent => absent.then_some(())?,
                Operand::Bound(slot, optional) => {
                    (!absent || *optional).then_some(())?;
                    bind(*slot, class_of(id))?;
                }
            }
        }
        for ((source, pattern), &id) in self.stmt.attrs.iter().zip(&self.attrs).zip(attrs) {
            match (pattern, source, graph.data(id)) {
                (AttrPattern::Bound(slot), _, _) => bind(*slot, class_of(id))?,
                (_, AttrSource::Given(Attr::Recurrence(want)), Data::Attr(found)) => {
                    parts(want, found)?;
                }
                (_, AttrSource::Given(want), Data::Attr(found)) => {
                    (want == found).then_some(())?;
                }
                (
                    AttrPattern::Recurrence(slots),
                    AttrSource::Recurrence(want),
                    Data::Attr(found),
                ) => {
                    let numbers = parts(want, found)?;
                    for (name, slot) in slots {
                        let (_, n) = numbers.iter().find(|(known, _)| known == name)?;
                        bind(*slot, Bound::Part(Attr::Float(*n)))?;
                    }
                }
                // An expression needs every name bound: `holds` looks at it.
                _ => {}
            }
        }
        Some(())
    }
}

/// What names of a recurrence stand for in an attribute that is one.
fn parts(want: &Recurrence, found: &Attr) -> Option<Vec<(String, f64)>> {
    let Attr::Recurrence(found) = found else { return None };
    want.matches(found)
}

/// Has a name stand for something; `None` where it stands for something else.
fn bind(graph: &EGraph, bound: &mut Bindings, slot: usize, to: Bound) -> Option<()> {
    let Some(known) = &bound[slot] else {
        bound[slot] = Some(to);
        return Some(());
    };
    let same = match (known, &to) {
        (Bound::Class(id), Bound::Part(part)) | (Bound::Part(part), Bound::Class(id)) => {
            matches!(graph.data(*id), Data::Attr(attr) if attr == part)
        }
        (a, b) => a == b,
    };
    same.then_some(())
}

/// What conditions see besides a rule's own names.
pub(super) type Context = HashMap<&'static str, Value>;

/// The first condition that does not hold, with the values of the names in it. What `vars` says of
/// the variables comes first.
pub(super) fn refusal(
    rule: &Rule,
    graph: &EGraph,
    env: &Env<Id>,
    context: &Context,
) -> Option<(String, Vec<(String, String)>)> {
    let lookup = |name: &str| -> Option<Value> {
        if let Some(attr) = env.attrs.get(name) {
            return attr_value(attr);
        }
        match env.values.get(name) {
            Some(Some(id)) => graph.value_type(*id).map(type_value),
            Some(None) => Some(Value::Null),
            None => context.get(name).cloned(),
        }
    };
    let ty = |name: &str| {
        let id = env.values.get(name).copied().flatten();
        id.and_then(|id| graph.value_type(id)).cloned()
    };
    if let Err(e) = rule.fits(&ty, &|name| env.attrs.get(name).cloned()) {
        return Some((e, Vec::new()));
    }
    for (text, e) in rule.requires.iter().chain(&rule.when) {
        let reason = match e.eval(&lookup) {
            Ok(Value::Bool(true)) => continue,
            Ok(Value::Bool(false)) => text.clone(),
            Ok(other) => format!("{text} (it is {other}, neither true nor false)"),
            Err(e) => format!("{text} ({e})"),
        };
        let mut values: Vec<(String, String)> = Vec::new();
        e.names(&mut |name| {
            if !values.iter().any(|(n, _)| n == name) {
                let shown = match env.values.get(name).copied().flatten() {
                    Some(id) => graph.value_type(id).map(ToString::to_string),
                    None => lookup(name).map(|v| show(&v)),
                };
                values.push((name.to_owned(), shown.unwrap_or_else(|| "?".to_owned())));
            }
        });
        return Some((reason, values));
    }
    None
}

/// A value with the entries of maps.
fn show(value: &Value) -> String {
    match value {
        Value::Map(entries) => {
            let entries: Vec<_> =
                entries.iter().map(|(k, v)| format!("{k}: {}", show(v))).collect();
            format!("{{{}}}", entries.join(", "))
        }
        other => other.to_string(),
    }
}

/// Whether an op yields the same with its operands in the other order, given equal types.
fn commutes(op: Op) -> bool {
    let Pointwise::Fixed(text) = op.pointwise else { return false };
    let Ok(Expr::Binary(BinaryOp::Add | BinaryOp::Mul, a, b)) = text.parse() else { return false };
    let is_operand = |e: &Expr, i: usize| matches!(e, Expr::Var(n) if *n == op.operands[i].name);
    op.operands.len() == 2 && is_operand(&a, 0) && is_operand(&b, 1)
}

fn same_type(graph: &EGraph, node: &Node) -> bool {
    match (graph.value_type(node.children[0]), graph.value_type(node.children[1])) {
        (Some(a), Some(b)) => a == b,
        _ => false,
    }
}
