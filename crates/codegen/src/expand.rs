//! Fused ops that a target has no kernel for become what they stand for.

use std::collections::HashSet;

use infernum_ir::body::{Emit, Env, apply};
use infernum_ir::{Attr, Graph, Loc, Module, NodeKind, Op, OpCall, Type, ValueId};

/// A fused op's body does not apply where the op does.
#[derive(Debug, thiserror::Error)]
#[error("graph `{graph}`: `%{value}`: {message}")]
pub struct ExpandError {
    /// The graph.
    pub graph: String,
    /// The op's first result.
    pub value: String,
    /// What was expected and found.
    pub message: String,
}

/// Puts its body in the place of every call of a fused op that `keep` refuses, and of those in the body.
/// What the ops compute stays, and so do the names of their results; values of a body are named
/// after the first one (`%n.sum`). Fused ops of constants always go: they are evaluated, not
/// launched. An op of elementwise ops becomes the one `map` that they compose to.
pub fn expand(module: &Module, keep: &dyn Fn(&OpCall<'_>) -> bool) -> Result<Module, ExpandError> {
    let graphs = module.graphs.iter().map(|g| expand_graph(g, keep));
    Ok(Module {
        name: module.name.clone(),
        graphs: graphs.collect::<Result<_, _>>()?,
        schedule: module.schedule.clone(),
    })
}

fn expand_graph(old: &Graph, keep: &dyn Fn(&OpCall<'_>) -> bool) -> Result<Graph, ExpandError> {
    let names = old.nodes().flat_map(|(_, n)| n.names.iter().cloned()).collect();
    let mut expansion = Expansion { graph: Graph::new(old.name.as_str()), keep, names };
    // The new values of each node's results.
    let mut values: Vec<Vec<ValueId>> = Vec::with_capacity(old.len());
    for (i, node) in old.nodes() {
        values.push(match &node.kind {
            NodeKind::Param(_) => vec![expansion.graph.add_node(node.clone(), &[])],
            NodeKind::Op { op, attrs } => {
                let operands = old.operands(i).into_iter();
                let operands: Vec<_> =
                    operands.map(|v| v.map(|v| values[v.node][v.result])).collect();
                expansion
                    .call(node.names.clone(), *op, &operands, attrs.clone(), node.loc.as_ref())
                    .map_err(|message| ExpandError {
                        graph: old.name.clone(),
                        value: node.names[0].clone(),
                        message,
                    })?
            }
        });
    }
    let results = old.results().iter().map(|v| values[v.node][v.result]).collect();
    expansion.graph.set_results(results);
    Ok(expansion.graph)
}

struct Expansion<'a> {
    graph: Graph,
    keep: &'a dyn Fn(&OpCall<'_>) -> bool,
    /// Names that are taken.
    names: HashSet<String>,
}

impl Expansion<'_> {
    fn call(
        &mut self,
        names: Vec<String>,
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
        loc: Option<&Loc>,
    ) -> Result<Vec<ValueId>, String> {
        let is_constant = |v: &ValueId| self.graph.ty(*v).tensor().is_ok_and(|t| t.constant);
        let constant = operands.iter().flatten().all(is_constant);
        let types: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.ty(v))).collect();
        let kept = !constant && (self.keep)(&OpCall { op, operands: &types, attrs: &attrs });
        let Some(fused) = op.fused.as_ref().filter(|_| !kept) else {
            return self.graph.call(names, op, operands, attrs, loc.cloned());
        };
        if let Some((map, attrs)) = op.as_map(&attrs).filter(|_| !constant) {
            let mut padded = operands.to_vec();
            padded.resize(map.operands.len(), None);
            return self.graph.call(names, map, &padded, attrs, loc.cloned());
        }
        let mut env = Env::default();
        let declared = op.operands.iter().zip(operands);
        env.values.extend(declared.map(|(def, value)| (def.name.to_owned(), *value)));
        env.attrs.extend(op.attrs.iter().map(|d| d.name.to_owned()).zip(attrs));
        let start = self.graph.len();
        apply(&fused.body, &mut Body { expansion: self, prefix: &names[0], loc }, &mut env)
            .map_err(|e| format!("in `{}`: {e}", op.name))?;
        let mut named = HashSet::new();
        let results = fused.results.iter().zip(names).map(|(result, name)| {
            let value = env.values.get(result).copied().flatten();
            let value = value
                .ok_or_else(|| format!("in `{}`: result `{result}` is not defined", op.name))?;
            if value.node >= start && named.insert(value) {
                self.graph.node_mut(value.node).names[value.result] = name;
            }
            Ok(value)
        });
        results.collect()
    }

    fn unused_name(&mut self, prefix: &str, name: &str) -> String {
        let wanted = format!("{prefix}.{name}");
        let mut found = wanted.clone();
        let mut n = 2;
        while !self.names.insert(found.clone()) {
            found = format!("{wanted}.{n}");
            n += 1;
        }
        found
    }
}

/// Where the statements of one body go.
struct Body<'a, 'b> {
    expansion: &'a mut Expansion<'b>,
    prefix: &'a str,
    loc: Option<&'a Loc>,
}

impl Emit for Body<'_, '_> {
    type Value = ValueId;

    fn ty(&self, value: ValueId) -> Type {
        self.expansion.graph.ty(value).clone()
    }

    fn emit(
        &mut self,
        names: &[String],
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<ValueId>, String> {
        let names = names.iter().map(|n| self.expansion.unused_name(self.prefix, n)).collect();
        self.expansion.call(names, op, operands, attrs, self.loc)
    }
}
