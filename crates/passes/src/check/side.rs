//! Both sides of a rule, written out in primitives and computed.

use std::collections::HashMap;

use infernum_ir::body::{Emit, Env, apply, truth};
use infernum_ir::expr::Expr;
use infernum_ir::interp::{StepShape, Tensor};
use infernum_ir::{Attr, Eval, Graph, NodeKind, Op, OpCall, OperandDef, Param, Type, ValueId};

use super::sample::{Rng, Trial};
use super::{Element, LOSSY, TOLERANCE};
use crate::data::Numerics;
use crate::data::Rule;

/// How the sides of a rule fail to agree.
pub(super) enum Failure {
    /// The left side could not be computed.
    Left(String),
    /// The right side has no type or another.
    Untypable(String),
    /// Their values differ.
    Differs(String, Difference),
}

/// How the values of two sides differ, and on what.
pub(super) struct Difference {
    /// In units of the value's norm.
    pub(super) error: f64,
    /// What both sides were computed from.
    pub(super) operands: Vec<Option<Tensor>>,
    /// The element that differs most.
    pub(super) at: Element,
}

/// How the sides of a rule agree.
pub(super) struct Agreement {
    /// They are the same calls.
    pub(super) same_calls: bool,
    /// The largest difference, in units of the value's norm.
    pub(super) error: f64,
}

/// An op with its operands and attributes.
type Key = (&'static str, Vec<Option<ValueId>>, Vec<Attr>);

/// A graph of primitives in which equal calls are one: two values are the same calls just when
/// they have the same id.
struct Flat {
    graph: Graph,
    calls: HashMap<Key, Vec<ValueId>>,
}

impl Emit for Flat {
    type Value = ValueId;

    fn ty(&self, value: ValueId) -> Type {
        self.graph.ty(value).clone()
    }

    fn emit(
        &mut self,
        names: &[String],
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<ValueId>, String> {
        let types: Vec<Type> = operands.iter().flatten().map(|v| self.ty(*v)).collect();
        let mut given = types.iter();
        let types: Vec<Option<&Type>> =
            operands.iter().map(|v| v.and_then(|_| given.next())).collect();
        if let Some(fused) = &op.fused {
            op.infer(&types, &attrs).map_err(|e| format!("`{}`: {e}", op.name))?;
            let mut env = Env::default();
            let operand = |(def, v): (&OperandDef, &Option<ValueId>)| (def.name.to_owned(), *v);
            env.values.extend(op.operands.iter().zip(operands).map(operand));
            env.attrs.extend(op.attrs.iter().map(|d| d.name.to_owned()).zip(attrs));
            apply(&fused.body, self, &mut env)?;
            let result = |n: &String| {
                env.values.get(n).copied().flatten().ok_or_else(|| format!("`{n}` is not defined"))
            };
            return fused.results.iter().map(result).collect();
        }
        let key = (op.name, operands.to_vec(), attrs);
        if let Some(known) = self.calls.get(&key) {
            return Ok(known.clone());
        }
        let values = self.graph.call(names.to_vec(), op, operands, key.2.clone(), None)?;
        self.calls.insert(key, values.clone());
        Ok(values)
    }
}

/// A left side whose types are right.
pub(super) struct Planted {
    flat: Flat,
    params: Vec<Option<ValueId>>,
    env: Env<ValueId>,
}

/// Applies the left side to operands of the trial's types.
pub(super) fn plant(rule: &Rule, trial: &Trial) -> Result<Planted, String> {
    let mut flat = Flat { graph: Graph::new(&rule.name), calls: HashMap::new() };
    let mut env = Env::default();
    let mut params = Vec::new();
    for (i, ((name, _), ty)) in rule.values.iter().zip(&trial.types).enumerate() {
        let param = |ty: &Type| flat.graph.param(name, Param::Carry(i as u32), ty.clone());
        let value = ty.as_ref().map(param);
        env.values.insert(name.clone(), value);
        params.push(value);
    }
    env.attrs.extend(rule.attrs.iter().map(|(n, _)| n.clone()).zip(trial.attrs.iter().cloned()));
    apply(&rule.left, &mut flat, &mut env)?;
    Ok(Planted { flat, params, env })
}

impl Planted {
    /// Whether a condition holds; one that has no value does not.
    pub(super) fn holds(&self, condition: &Expr) -> bool {
        truth(condition, &self.flat, &self.env).unwrap_or(false)
    }

    /// Applies the right side and compares.
    pub(super) fn compare(
        mut self,
        rule: &Rule,
        trial: &Trial,
        rng: &mut Rng,
    ) -> Result<Agreement, Failure> {
        let left = self.env.values.clone();
        apply(&rule.right, &mut self.flat, &mut self.env).map_err(Failure::Untypable)?;
        let mut pairs = Vec::new();
        for root in &rule.roots {
            let value = |env: &HashMap<String, Option<ValueId>>| env.get(root).copied().flatten();
            let (Some(a), Some(b)) = (value(&left), value(&self.env.values)) else {
                return Err(Failure::Untypable(format!("`{root}` has no value")));
            };
            let (old, new) = (self.flat.ty(a), self.flat.ty(b));
            if old != new {
                let message = format!("`{root}` is {old} on the left and {new} on the right");
                return Err(Failure::Untypable(message));
            }
            pairs.push((root, a, b));
        }
        let operands = trial.operands(rule, rng);
        let mut values = Values::new(&self.flat.graph, &self.params, &operands);
        let wanted: Vec<ValueId> = pairs.iter().map(|p| p.1).collect();
        values.compute(&wanted, &trial.step).map_err(Failure::Left)?;
        let wanted: Vec<ValueId> = pairs.iter().map(|p| p.2).collect();
        values.compute(&wanted, &trial.step).map_err(Failure::Untypable)?;
        let mut largest = 0.0f64;
        for (root, a, b) in &pairs {
            let error = difference(values.get(*a), values.get(*b));
            if error.is_nan() || error > bound(rule) {
                let at = furthest(values.get(*a), values.get(*b));
                let difference = Difference { error, operands: operands.clone(), at };
                return Err(Failure::Differs(format!("`{root}` differs"), difference));
            }
            largest = largest.max(error);
        }
        Ok(Agreement { same_calls: pairs.iter().all(|(_, a, b)| a == b), error: largest })
    }
}

/// How far a rule's sides may be apart.
fn bound(rule: &Rule) -> f64 {
    if rule.numerics == Numerics::Lossy { LOSSY } else { TOLERANCE }
}

/// Most elements that a value of a trial may have: a mistaken rule must not fill memory.
const LARGEST: u64 = 1 << 20;

fn elements(ty: &Type, step: &StepShape) -> u64 {
    ty.tensor().map_or(0, |t| t.elements(&step.dims()))
}

/// What has been computed of a graph.
struct Values<'a> {
    graph: &'a Graph,
    done: Vec<Option<Vec<Tensor>>>,
}

impl<'a> Values<'a> {
    fn new(
        graph: &'a Graph,
        params: &[Option<ValueId>],
        operands: &[Option<Tensor>],
    ) -> Values<'a> {
        let mut done = vec![None; graph.len()];
        for (param, value) in params.iter().zip(operands) {
            if let (Some(param), Some(value)) = (param, value) {
                done[param.node] = Some(vec![value.clone()]);
            }
        }
        Values { graph, done }
    }

    fn get(&self, v: ValueId) -> &[f64] {
        self.done[v.node].as_ref().map_or(&[], |results| &results[v.result].data)
    }

    /// Computes these values and all that they need.
    fn compute(&mut self, wanted: &[ValueId], step: &StepShape) -> Result<(), String> {
        let mut needed = vec![false; self.graph.len()];
        for v in wanted {
            needed[v.node] = true;
        }
        for index in (0..self.graph.len()).rev().filter(|i| self.done[*i].is_none()) {
            if needed[index] {
                for v in self.graph.operands(index).iter().flatten() {
                    needed[v.node] = true;
                }
            }
        }
        for (index, node) in self.graph.nodes() {
            let NodeKind::Op { op, attrs } = &node.kind else { continue };
            if !needed[index] || self.done[index].is_some() {
                continue;
            }
            if node.types.iter().any(|ty| elements(ty, step) > LARGEST) {
                return Err(format!("`{}` is too large to try", node.names[0]));
            }
            let operands = self.graph.operands(index);
            let types: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.ty(v))).collect();
            let value = |v: ValueId| self.done[v.node].as_ref().map(|r| &r[v.result]);
            let inputs: Vec<_> = operands.iter().map(|v| v.and_then(value)).collect();
            let call = OpCall { op: *op, operands: &types, attrs };
            let eval = Eval { call, values: &inputs, results: &node.types, step };
            let results = (op.reference)(&eval).map_err(|e| format!("`{}`: {e}", op.name))?;
            self.done[index] = Some(results);
        }
        Ok(())
    }
}

/// How far `b` is from `a`, in units of the norm of `a`. Infinities and NaN must be in the same
/// places.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let (mut norm, mut error) = (0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        if x.is_finite() && y.is_finite() {
            norm += x * x;
            error += (x - y) * (x - y);
        } else if x.to_bits() != y.to_bits() && !(x.is_nan() && y.is_nan()) {
            return f64::INFINITY;
        }
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// The element in which two values differ most; one that is a number in one of them only comes first.
fn furthest(a: &[f64], b: &[f64]) -> Element {
    let distance = |i: usize| {
        let distance = (a[i] - b[i]).abs();
        if a[i].to_bits() == b[i].to_bits() || (a[i].is_nan() && b[i].is_nan()) {
            -1.0
        } else if distance.is_nan() {
            f64::INFINITY
        } else {
            distance
        }
    };
    let all = 0..a.len().min(b.len());
    let index = all.max_by(|i, j| distance(*i).total_cmp(&distance(*j))).unwrap_or(0);
    let value = |of: &[f64]| of.get(index).copied().unwrap_or(f64::NAN);
    Element { index, left: value(a), right: value(b) }
}

/// Plants a trial and computes the right side through each fused op's own reference.
#[cfg(test)]
pub(super) fn reference(rule: &Rule, rng: &mut Rng) -> Option<()> {
    let trial = Trial::sample(rule, rng).ok()?;
    let planted = plant(rule, &trial).ok()?;
    if !rule.requires.iter().all(|(_, e)| planted.holds(e)) {
        return None;
    }
    let mut graph = Graph::new("reference");
    let mut env = Env { attrs: planted.env.attrs.clone(), ..Env::default() };
    let mut params = Vec::new();
    for (i, ((name, _), ty)) in rule.values.iter().zip(&trial.types).enumerate() {
        let param = |ty: &Type| graph.param(name, Param::Carry(i as u32), ty.clone());
        let value = ty.as_ref().map(param);
        env.values.insert(name.clone(), value);
        params.push(value);
    }
    apply(&rule.left, &mut graph, &mut env).ok()?;
    apply(&rule.right, &mut graph, &mut env).unwrap_or_else(|e| panic!("{}: {e}", rule.name));
    let operands = trial.operands(rule, rng);
    let mut values = Values::new(&graph, &params, &operands);
    let roots: Vec<ValueId> = rule.roots.iter().map(|r| env.values[r].expect("a root")).collect();
    let mut flat = Values::new(&planted.flat.graph, &planted.params, &operands);
    let same: Vec<ValueId> =
        rule.roots.iter().map(|r| planted.env.values[r].expect("a root")).collect();
    flat.compute(&same, &trial.step).ok()?;
    values.compute(&roots, &trial.step).unwrap_or_else(|e| panic!("{}: {e}", rule.name));
    for (a, b) in same.iter().zip(&roots) {
        assert!(difference(flat.get(*a), values.get(*b)) <= bound(rule), "{}", rule.name);
    }
    Some(())
}

/// A trial's left side as a module; `None` where the trial is none.
#[cfg(test)]
pub(super) fn module(rule: &Rule, rng: &mut Rng) -> Option<infernum_ir::Module> {
    use infernum_ir::{Dim, Effect, Sym, TensorType};

    let trial = Trial::sample(rule, rng).ok()?;
    let planted = plant(rule, &trial).ok()?;
    if !rule.requires.iter().all(|(_, e)| planted.holds(e)) {
        return None;
    }
    let mut graph = Graph::new("planted");
    let mut env = Env { attrs: planted.env.attrs.clone(), ..Env::default() };
    let mut states = Vec::new();
    let writes = rule.left.iter().any(|s| s.op.effect == Effect::Writes);
    for (i, ((name, _), ty)) in rule.values.iter().zip(&trial.types).enumerate() {
        let param = |ty: &Type| {
            let param = match ty {
                Type::State(_) => Param::State(name.clone()),
                Type::Tensor(t) if t.constant => {
                    Param::Weight(infernum_ir::WeightRef { name: name.clone(), stack: None })
                }
                Type::Tensor(_) => Param::Carry(i as u32),
            };
            graph.param(name, param, ty.clone())
        };
        let mut value = ty.as_ref().map(param);
        if let (Some(plane), Some(Type::State(row)), false) = (value, ty, writes) {
            // What the rule reads is what this step has written.
            let shape = [Dim::sym(Sym::T), row.heads().into(), row.dim().into()];
            let (carried, named) = ((rule.values.len() + i) as u32, format!("{name}.rows"));
            let rows = TensorType::act(row.dtype, shape);
            let rows = graph.param(named, Param::Carry(carried), rows);
            let (op, named) = (Op::find("kv_write").ok()?, vec![format!("{name}.written")]);
            let next = graph.call(named, op, &[Some(plane), Some(rows)], Vec::new(), None).ok()?;
            value = next.first().copied();
        }
        states.extend(value.filter(|v| matches!(graph.ty(*v), Type::State(_))));
        env.values.insert(name.clone(), value);
    }
    apply(&rule.left, &mut graph, &mut env).ok()?;
    let defined = rule.left.iter().flat_map(|s| &s.results).filter_map(|r| env.values[r]);
    let written: Vec<ValueId> =
        defined.filter(|v| matches!(graph.ty(*v), Type::State(_))).collect();
    let anchor = rule.left.last()?.results.iter().filter_map(|r| env.values[r]);
    let mut results: Vec<ValueId> = anchor.collect();
    results.extend(if written.is_empty() { states } else { written });
    let mut seen = std::collections::HashSet::new();
    results.retain(|v| seen.insert(*v));
    graph.set_results(results);
    Some(infernum_ir::Module { name: "planted".to_owned(), graphs: vec![graph], schedule: vec![] })
}
