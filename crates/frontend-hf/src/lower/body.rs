//! Bodies to graph nodes: ops are added, blocks are inlined.

use std::collections::HashMap;

use infernum_ir::expr::Value;
use infernum_ir::{
    Attr, Effect, Graph, Loc, Op, Param, SourceError, StateType, TensorType, Type, ValueId,
    WeightRef, nearest,
};

use super::scope::{Scope, at, at_arg};
use super::{Blocks, Body, Request, attrs, step_input};
use crate::spec::{Arg, Argument, Block, Call, Entries, Source, StateDecl, WeightDecl};

/// Blocks may call blocks, but not themselves.
const MAX_DEPTH: usize = 16;

/// The names visible in one body.
pub(super) struct Frame<'a> {
    source: &'a Source,
    scope: Scope<'a>,
    /// Put before the names of values in the graph.
    name_prefix: String,
    pub(super) values: HashMap<String, ValueId>,
    weights: HashMap<String, Weight>,
    depth: usize,
}

impl<'a> Frame<'a> {
    pub(super) fn new(source: &'a Source, scope: Scope<'a>, name_prefix: String) -> Frame<'a> {
        Frame {
            source,
            scope,
            name_prefix,
            values: HashMap::new(),
            weights: HashMap::new(),
            depth: 0,
        }
    }
}

/// A weight that was declared.
enum Weight {
    /// It becomes a parameter when it is first used.
    Present(WeightRef, Vec<u64>),
    /// Its `when` is false.
    Absent,
}

/// Builds one graph.
pub(super) struct Builder<'a> {
    pub(super) graph: Graph,
    blocks: &'a Blocks<'a>,
    request: &'a Request<'a>,
    /// A layer that runs this graph: its weights say what element types to expect.
    layer: Option<u32>,
    weights: HashMap<WeightRef, ValueId>,
    steps: HashMap<String, ValueId>,
    /// Each cache plane's latest version, in the order declared.
    states: Vec<ValueId>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        graph: Graph,
        blocks: &'a Blocks<'a>,
        request: &'a Request<'a>,
        layer: Option<u32>,
    ) -> Builder<'a> {
        Builder {
            graph,
            blocks,
            request,
            layer,
            weights: HashMap::new(),
            steps: HashMap::new(),
            states: Vec::new(),
        }
    }

    pub(super) fn carry(&mut self, i: u32, name: &str, ty: &Type) -> ValueId {
        let name = self.unique(name);
        self.graph.param(name, Param::Carry(i), ty.clone())
    }

    /// Ends the graph: its results are `results` and the last version of every state.
    pub(super) fn finish(mut self, mut results: Vec<ValueId>) -> Graph {
        results.extend(&self.states);
        self.graph.set_results(results);
        self.graph
    }

    /// `name`, or with a number after it when it is taken.
    fn unique(&self, name: &str) -> String {
        if self.graph.find(name).is_none() {
            return name.to_owned();
        }
        let numbered = (2..).map(|i| format!("{name}_{i}"));
        numbered.into_iter().find(|n| self.graph.find(n).is_none()).unwrap_or_default()
    }

    /// Evaluates the declarations of a body's weights.
    pub(super) fn declare_weights(
        &self,
        frame: &mut Frame<'a>,
        decls: &Entries<'_, WeightDecl<'_>>,
        prefix: &str,
    ) -> Result<(), SourceError> {
        let (source, scope) = (frame.source, &frame.scope);
        for (name, decl) in decls.iter() {
            if !scope.holds(source, name, decl.when)? {
                frame.weights.insert(name.to_owned(), Weight::Absent);
                continue;
            }
            let dims = decl.shape.iter().map(|d| scope.eval_int(source, name, *d));
            let mut shape = dims.collect::<Result<Vec<u64>, _>>()?;
            let stack = decl.stack.map(|n| scope.eval_int(source, name, n.0)).transpose()?;
            shape.splice(0..0, stack);
            let tied = decl.same_as.map(|e| scope.eval(source, name, e.0)).transpose()?;
            let full = match tied {
                Some(Value::Str(other)) => other,
                None | Some(Value::Null) => format!("{prefix}{name}"),
                Some(v) => {
                    return Err(at(
                        source,
                        name,
                        format!("`same_as`: expected a tensor's name or null, found {v}"),
                    ));
                }
            };
            if shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).is_none_or(|n| n > 1 << 60) {
                return Err(at(source, name, format!("{shape:?} is not the shape of a tensor")));
            }
            frame
                .weights
                .insert(name.to_owned(), Weight::Present(WeightRef { name: full, stack }, shape));
        }
        Ok(())
    }

    fn declare_states(
        &mut self,
        frame: &mut Frame<'a>,
        decls: &Entries<'_, StateDecl<'_>>,
    ) -> Result<(), SourceError> {
        for (name, decl) in decls.iter() {
            let ty = StateType {
                dtype: self.request.dtype,
                heads: frame.scope.eval_int(frame.source, name, decl.heads)?,
                dim: frame.scope.eval_int(frame.source, name, decl.dim)?,
            };
            let plane = self.unique(&format!("{}{name}", frame.name_prefix));
            let value = self.graph.param(plane.clone(), Param::State(plane), ty);
            frame.values.insert(name.to_owned(), value);
            self.states.push(value);
        }
        Ok(())
    }

    /// Adds a body's calls in order. `prefix` is what the body's weights are named under.
    pub(super) fn body(
        &mut self,
        frame: &mut Frame<'a>,
        body: &Body<'_>,
        prefix: &str,
    ) -> Result<(), SourceError> {
        for (names, call) in body.iter() {
            if let Some(taken) =
                names.split(',').map(str::trim).find(|n| frame.weights.contains_key(*n))
            {
                return Err(at(frame.source, names, format!("`{taken}` is the name of a weight")));
            }
            let results = self.call(frame, names, call, prefix)?;
            let names = names.split(',').map(|n| n.trim().to_owned());
            frame.values.extend(names.zip(results));
        }
        Ok(())
    }

    fn call(
        &mut self,
        frame: &Frame<'a>,
        names: &str,
        call: &Call<'_>,
        prefix: &str,
    ) -> Result<Vec<ValueId>, SourceError> {
        let block = self.blocks.get(call.name).copied();
        let op = Op::find(call.name);
        let first = match (block, &op) {
            (Some((_, block)), _) => block.inputs.first().copied(),
            (None, Ok(op)) => op.operands.first().map(|o| o.name),
            (None, Err(_)) => {
                let known = self.blocks.keys().copied().chain(Op::all().map(|o| o.name));
                let hint = nearest(call.name, known);
                let message =
                    format!("`{}` is neither an op nor a block of this family{hint}", call.name);
                return Err(at(frame.source, call.name, message));
            }
        };
        if !self.wanted(frame, call)? {
            let operand = call.args.iter().find(|(k, _)| Some(*k) == first);
            let operand = operand.map(|(k, a)| self.operand(frame, k, a)).transpose()?.flatten();
            let missing = || {
                at(
                    frame.source,
                    call.name,
                    "`when` is false and there is no first operand to yield",
                )
            };
            return Ok(vec![operand.ok_or_else(missing)?]);
        }
        match (block, op) {
            (Some((source, block)), _) => {
                self.inline(frame, names, call, source, block, prefix).map(|v| vec![v])
            }
            (None, op) => {
                let op = op.map_err(|e| at(frame.source, call.name, e))?;
                self.op(frame, names, call, op)
            }
        }
    }

    /// Whether the call's `when` holds.
    fn wanted(&self, frame: &Frame<'a>, call: &Call<'_>) -> Result<bool, SourceError> {
        match call.args.iter().find(|(k, _)| *k == "when") {
            None => Ok(true),
            Some((key, Argument::One(arg))) => frame.scope.eval_bool(frame.source, key, *arg),
            Some((key, _)) => Err(at(frame.source, key, "expected a condition, found a list")),
        }
    }

    fn op(
        &mut self,
        frame: &Frame<'a>,
        names: &str,
        call: &Call<'_>,
        op: Op,
    ) -> Result<Vec<ValueId>, SourceError> {
        let source = frame.source;
        let known = || {
            op.operands
                .iter()
                .map(|o| o.name)
                .chain(op.attrs.iter().map(|a| a.name))
                .chain(["when"])
        };
        if let Some((key, _)) = call.args.iter().find(|(k, _)| !known().any(|n| n == *k)) {
            let list: Vec<&str> = known().collect();
            let hint = nearest(key, known());
            let message = format!(
                "`{}` has no argument `{key}`{hint}; it takes {}",
                op.name,
                list.join(", ")
            );
            return Err(at(source, key, message));
        }
        let written = |name: &str| call.args.iter().find(|(k, _)| *k == name);
        let mut operands = Vec::new();
        for def in op.operands {
            let value = match written(def.name) {
                Some((key, argument)) => {
                    let value = self.operand(frame, key, argument)?;
                    if value.is_none() && !def.optional {
                        return Err(at(
                            source,
                            key,
                            format!("`{}` needs `{}`, which is left out here", op.name, def.name),
                        ));
                    }
                    value
                }
                None if def.optional => None,
                None => {
                    return Err(at(
                        source,
                        call.name,
                        format!("`{}` needs operand `{}`", op.name, def.name),
                    ));
                }
            };
            operands.push(value);
        }
        let mut values = Vec::new();
        for def in op.attrs {
            values.push(match written(def.name) {
                Some((key, argument)) => attrs::attr(source, &frame.scope, op, def, key, argument)?,
                None => def.default_value().ok_or_else(|| {
                    at(
                        source,
                        call.name,
                        format!("`{}` needs attribute `{}`, {}", op.name, def.name, def.kind),
                    )
                })?,
            });
        }
        self.add(frame, names, call, op, &operands, values)
    }

    fn add(
        &mut self,
        frame: &Frame<'a>,
        names: &str,
        call: &Call<'_>,
        op: Op,
        operands: &[Option<ValueId>],
        values: Vec<Attr>,
    ) -> Result<Vec<ValueId>, SourceError> {
        let graph_names =
            names.split(',').map(|n| self.unique(&format!("{}{}", frame.name_prefix, n.trim())));
        let graph_names: Vec<String> = graph_names.collect();
        let place = at(frame.source, call.name, "");
        let loc =
            Loc { file: frame.source.file.clone(), line: place.line as u32, col: place.col as u32 };
        let results = self
            .graph
            .call(graph_names, op, operands, values, Some(loc))
            .map_err(|e| at(frame.source, call.name, format!("`{}`: {e}", op.name)))?;
        if op.effect == Effect::Writes
            && let (Some(Some(from)), Some(to)) = (operands.first(), results.first())
        {
            // `from` is stale now: what the graph returns is the version just made.
            self.states.iter_mut().filter(|s| *s == from).for_each(|s| *s = *to);
        }
        Ok(results)
    }

    /// The value an operand names; `None` for an absent weight or `None`.
    fn operand(
        &mut self,
        frame: &Frame<'a>,
        key: &str,
        argument: &Argument<'_>,
    ) -> Result<Option<ValueId>, SourceError> {
        match argument {
            Argument::One(Arg::Text(name)) => self.resolve(frame, name),
            Argument::One(Arg::Null) => Ok(None),
            _ => Err(at(frame.source, key, "expected the name of a value or weight")),
        }
    }

    /// The value of that name; `None` where it is a weight that is absent.
    pub(super) fn resolve(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
    ) -> Result<Option<ValueId>, SourceError> {
        if let Some(&value) = frame.values.get(name) {
            return Ok(Some(value));
        }
        match frame.weights.get(name) {
            Some(Weight::Absent) => return Ok(None),
            Some(Weight::Present(weight, shape)) => {
                return Ok(Some(self.weight(frame, name, weight, shape)));
            }
            None => {}
        }
        if let Some((input, ty)) = step_input(name, self.request.rows) {
            let graph = &mut self.graph;
            let value = self.steps.entry(name.to_owned());
            return Ok(Some(*value.or_insert_with(|| graph.param(name, Param::Step(input), ty))));
        }
        let steps = infernum_ir::StepInput::ALL.iter().map(|(_, n)| *n);
        let known =
            frame.values.keys().chain(frame.weights.keys()).map(String::as_str).chain(steps);
        Err(at(
            frame.source,
            name,
            format!("unknown value or weight `{name}`{}", nearest(name, known)),
        ))
    }

    fn weight(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
        weight: &WeightRef,
        shape: &[u64],
    ) -> ValueId {
        if let Some(&value) = self.weights.get(weight) {
            return value;
        }
        let tensor = weight.tensors(self.layer).into_iter().next().unwrap_or_default();
        let dtype = (self.request.weight_dtype)(&tensor).unwrap_or(self.request.dtype);
        let unique = self.unique(&format!("{}{name}", frame.name_prefix));
        let value = self.graph.param(
            unique,
            Param::Weight(weight.clone()),
            TensorType::weight(dtype, shape),
        );
        self.weights.insert(weight.clone(), value);
        value
    }

    fn inline(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
        call: &Call<'_>,
        source: &'a Source,
        block: &'a Block<'a>,
        prefix: &str,
    ) -> Result<ValueId, SourceError> {
        if frame.depth >= MAX_DEPTH {
            return Err(at(
                frame.source,
                call.name,
                format!("blocks nested deeper than {MAX_DEPTH}: does one call itself?"),
            ));
        }
        let known = || {
            block
                .inputs
                .iter()
                .copied()
                .chain(block.params.iter().map(|(n, _)| n))
                .chain(["when", "at"])
        };
        if let Some((key, _)) = call.args.iter().find(|(k, _)| !known().any(|n| n == *k)) {
            let list: Vec<&str> = known().collect();
            let message = format!(
                "block `{}` has no argument `{key}`{}; it takes {}",
                call.name,
                nearest(key, known()),
                list.join(", ")
            );
            return Err(at(frame.source, key, message));
        }
        let mut inner =
            Frame::new(source, frame.scope.child(), format!("{}{name}.", frame.name_prefix));
        inner.depth = frame.depth + 1;
        for input in &block.inputs {
            let Some((key, argument)) = call.args.iter().find(|(k, _)| k == input) else {
                return Err(at(
                    frame.source,
                    call.name,
                    format!("block `{}` needs `{input}`", call.name),
                ));
            };
            let value = self.operand(frame, key, argument)?;
            let value = value.ok_or_else(|| at(frame.source, key, "is left out here"))?;
            inner.values.insert((*input).to_owned(), value);
        }
        for (param, default) in block.params.iter() {
            let value = match call.args.iter().find(|(k, _)| *k == param) {
                Some((key, Argument::One(arg))) => frame.scope.eval(frame.source, key, *arg)?,
                Some((key, Argument::List(_))) => {
                    return Err(at(frame.source, key, "expected one value, found a list"));
                }
                None => inner.scope.eval_param(source, param, *default)?,
            };
            inner.scope.params.push((param.to_owned(), value));
        }
        inner.scope.check(source, &block.checks)?;
        let prefix = format!("{prefix}{}", self.at_prefix(frame, call)?);
        self.declare_weights(&mut inner, &block.weights, &prefix)?;
        self.declare_states(&mut inner, &block.state)?;
        self.body(&mut inner, &block.body, &prefix)?;
        let result = self.resolve(&inner, block.result)?;
        result.ok_or_else(|| at(source, block.result, "is left out here"))
    }

    /// The text of a block call's `at`.
    fn at_prefix<'c>(&self, frame: &Frame<'a>, call: &Call<'c>) -> Result<&'c str, SourceError> {
        match call.args.iter().find(|(k, _)| *k == "at") {
            None => Ok(""),
            Some((_, Argument::One(Arg::Text(text)))) => Ok(text),
            Some((key, Argument::One(arg))) => {
                Err(at_arg(frame.source, *arg, key, "expected a text"))
            }
            Some((key, _)) => Err(at(frame.source, key, "expected a text")),
        }
    }
}
