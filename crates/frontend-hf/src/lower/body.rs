//! Bodies to graph nodes: ops are added, blocks are inlined.

use std::collections::{HashMap, HashSet};

use infernum_ir::expr::Value;
use infernum_ir::{
    Attr, Effect, Graph, Loc, Op, Param, SourceError, StateType, StepInput, Type, ValueId,
    WeightRef, nearest,
};

use super::attrs;
use super::scope::{Context, Scope};
use super::weights::{MAX_TENSOR_NAME, Names, Rename, Weight};
use crate::spec::{Arg, Argument, Block, Entries, SpecCall, StateDecl};

/// Blocks may call blocks, but not themselves.
const MAX_DEPTH: usize = 16;
/// Longest name that a spec may give to a value.
pub(super) const MAX_NAME: usize = 64;

type Result<T> = std::result::Result<T, SourceError>;

/// The blocks of a family by name.
pub(super) type Blocks<'a> = HashMap<&'a str, &'a Block<'a>>;

/// The names visible in one body.
pub(super) struct Frame<'a> {
    pub(super) scope: Scope<'a>,
    /// Put before the names of values in the graph.
    pub(super) name_prefix: String,
    /// Put before the names of weights in the checkpoint.
    pub(super) weight_prefix: String,
    pub(super) values: HashMap<&'a str, ValueId>,
    pub(super) weights: HashMap<&'a str, Weight>,
    depth: usize,
}

/// Builds one graph.
pub(super) struct Builder<'a> {
    pub(super) graph: Graph,
    pub(super) cx: &'a Context<'a>,
    /// What every block sees besides its own parameters.
    family: &'a Scope<'a>,
    /// What the family's checkpoints call what blocks declare.
    pub(super) names: Names<'a>,
    blocks: &'a Blocks<'a>,
    /// A layer that runs this graph: its weights say what element types to expect.
    pub(super) layer: Option<u32>,
    /// The names of values that are taken.
    taken: HashSet<String>,
    pub(super) weights: HashMap<WeightRef, ValueId>,
    steps: HashMap<StepInput, ValueId>,
    /// Each cache plane's latest version, in the order declared.
    states: Vec<ValueId>,
    /// The `rename`s of the calls that lead to where we are.
    pub(super) renames: Vec<Rename<'a>>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        name: &str,
        family: &'a Scope<'a>,
        blocks: &'a Blocks<'a>,
        names: Names<'a>,
        layer: Option<u32>,
    ) -> Builder<'a> {
        Builder {
            graph: Graph::new(name),
            cx: family.cx,
            family,
            names,
            blocks,
            layer,
            taken: HashSet::new(),
            weights: HashMap::new(),
            steps: HashMap::new(),
            states: Vec::new(),
            renames: Vec::new(),
        }
    }

    /// The frame of a part, which the values `carried` reach.
    pub(super) fn frame(&mut self, prefix: &str, carried: &[(&'a str, Type)]) -> Result<Frame<'a>> {
        let mut frame = Frame {
            scope: self.family.child(),
            name_prefix: String::new(),
            weight_prefix: self.filled(self.family, prefix)?,
            values: HashMap::new(),
            weights: HashMap::new(),
            depth: 0,
        };
        for (i, (name, ty)) in carried.iter().enumerate() {
            let unique = self.unique("", name);
            let value = self.graph.param(unique, Param::Carry(i as u32), ty.clone());
            frame.values.insert(name, value);
        }
        Ok(frame)
    }

    /// Ends the graph: its results are `results` and the last version of every state.
    pub(super) fn finish(mut self, mut results: Vec<ValueId>) -> Graph {
        results.extend(&self.states);
        self.graph.set_results(results);
        self.graph
    }

    /// `prefix` and `name`, or with a number after it when that is taken.
    pub(super) fn unique(&mut self, prefix: &str, name: &str) -> String {
        // A weight's `{expert}` is no part of a value's name.
        let name = name.replace(['{', '}'], "");
        let full = format!("{prefix}{name}");
        // Deep inlining makes long names: the last part will do.
        let full = if full.len() > 3 * MAX_NAME { name } else { full };
        let mut unique = full.clone();
        let mut i = 2;
        while !self.taken.insert(unique.clone()) {
            unique = format!("{full}_{i}");
            i += 1;
        }
        unique
    }

    fn declare_states(
        &mut self,
        frame: &mut Frame<'a>,
        decls: &'a Entries<'a, StateDecl<'a>>,
    ) -> Result<()> {
        for (name, decl) in decls.iter() {
            check_name(self.cx, name)?;
            self.cx.spend(name, 512)?;
            let ty = self.state_type(frame, name, decl)?;
            let plane = self.unique(&frame.name_prefix, name);
            let value = if let Some(layer) = self.owner(frame, name, decl)? {
                self.graph.param(plane.clone(), Param::Shared { plane, layer }, ty)
            } else {
                let value = self.graph.param(plane.clone(), Param::State(plane), ty);
                self.states.push(value);
                value
            };
            frame.values.insert(name, value);
        }
        Ok(())
    }

    fn state_type(
        &self,
        frame: &Frame<'a>,
        name: &str,
        decl: &'a StateDecl<'a>,
    ) -> Result<StateType> {
        let dtype = match decl.dtype {
            None => self.cx.request.dtype,
            Some(written) => attrs::dtype(&frame.scope, name, written)?,
        };
        match decl {
            StateDecl { heads: Some(heads), dim: Some(dim), slot: None, .. } => {
                let heads = frame.scope.eval_int(name, *heads)?;
                Ok(StateType::paged(dtype, heads, frame.scope.eval_int(name, *dim)?))
            }
            StateDecl { heads: None, dim: None, slot: Some(shape), .. } => {
                let sizes = shape.iter().map(|size| frame.scope.eval_int(name, *size));
                Ok(StateType::slot(dtype, &sizes.collect::<Result<Vec<_>>>()?))
            }
            _ => Err(self
                .cx
                .at(name, "expected `heads` and `dim` of its rows, or the shape of a `slot`")),
        }
    }

    /// The layer before whose plane it is; `None` for this layer's own.
    fn owner(&self, frame: &Frame<'a>, name: &str, decl: &StateDecl<'a>) -> Result<Option<u32>> {
        let Some(of) = decl.of else { return Ok(None) };
        let before = self.layer.unwrap_or(0);
        match frame.scope.eval(of)? {
            Value::Null => Ok(None),
            Value::Num(n) if n >= 0.0 && n.fract() == 0.0 && n < f64::from(before) => {
                Ok(Some(n as u32))
            }
            found => {
                let expected = format!("null or the number of a layer before layer {before}");
                Err(frame.scope.unexpected(name, of, &expected, &found))
            }
        }
    }

    /// Adds a body's calls in order.
    pub(super) fn body(
        &mut self,
        frame: &mut Frame<'a>,
        body: &'a Entries<'a, SpecCall<'a>>,
    ) -> Result<()> {
        for (written, call) in body.iter() {
            let names: Vec<&str> = written.split(',').map(str::trim).collect();
            for name in &names {
                check_name(self.cx, name)?;
                if frame.weights.contains_key(name) {
                    return Err(self.cx.at(name, format!("`{name}` is the name of a weight")));
                }
            }
            self.cx.spend(call.name, 64)?;
            match self.call(frame, &names, call)? {
                Some(results) => frame.values.extend(names.into_iter().zip(results)),
                None => frame.weights.extend(names.into_iter().map(|name| (name, Weight::Absent))),
            }
        }
        Ok(())
    }

    /// The results of a call; `None` where it is left out and its first operand is too.
    fn call(
        &mut self,
        frame: &Frame<'a>,
        names: &[&str],
        call: &'a SpecCall<'a>,
    ) -> Result<Option<Vec<ValueId>>> {
        let target = match (self.blocks.get(call.name), Op::find(call.name)) {
            (Some(block), _) => Target::Block(block),
            (None, Ok(op)) => Target::Op(op),
            (None, Err(_)) => {
                let known = self.blocks.keys().copied().chain(Op::all().map(|o| o.name));
                let hint = nearest(call.name, known);
                let message =
                    format!("`{}` is neither an op nor a block of this family{hint}", call.name);
                return Err(self.cx.at(call.name, message));
            }
        };
        target.check_args(self.cx, call)?;
        if !self.wanted(frame, call)? {
            let value = self.left_out(frame, names, call, target.first())?;
            return Ok(value.map(|v| vec![v]));
        }
        match target {
            Target::Op(op) => self.op(frame, names, call, op).map(Some),
            Target::Block(block) => {
                let results: Vec<&str> = block.result.split(',').map(str::trim).collect();
                if results.len() != names.len() {
                    let message = format!(
                        "block `{}` yields {} value(s) ({}), and {} are named here",
                        call.name,
                        results.len(),
                        block.result,
                        names.len()
                    );
                    return Err(self.cx.at(names[0], message));
                }
                self.inline(frame, names[0], call, block, &results).map(Some)
            }
        }
    }

    /// Whether the call's `when` holds.
    fn wanted(&self, frame: &Frame<'a>, call: &SpecCall<'a>) -> Result<bool> {
        match call.arg("when") {
            None => Ok(true),
            Some((key, Argument::One(arg))) => frame.scope.eval_bool(key, *arg),
            Some((key, _)) => Err(self.cx.at(key, "expected a condition, found a list")),
        }
    }

    /// What stands for a call whose `when` is false: its first operand; nothing, where that is a weight that is
    /// left out itself.
    fn left_out(
        &mut self,
        frame: &Frame<'a>,
        names: &[&str],
        call: &'a SpecCall<'a>,
        first: Option<&str>,
    ) -> Result<Option<ValueId>> {
        match first.and_then(|name| call.arg(name)) {
            Some((key, argument)) if names.len() == 1 => self.operand(frame, key, argument),
            _ => {
                let message = "`when` is false here, and there is no one operand to yield instead";
                Err(self.cx.at(call.name, message))
            }
        }
    }

    fn op(
        &mut self,
        frame: &Frame<'a>,
        names: &[&str],
        call: &'a SpecCall<'a>,
        op: Op,
    ) -> Result<Vec<ValueId>> {
        let mut operands = Vec::new();
        for def in op.operands {
            let written = call.arg(def.name);
            let value = match written {
                Some((key, argument)) => self.operand(frame, key, argument)?,
                None => None,
            };
            if value.is_none() && !def.optional {
                let why = written.map_or("", |_| ", which is left out here");
                let message = format!("`{}` needs operand `{}`{why}", op.name, def.name);
                return Err(self.cx.at(written.map_or(call.name, |(key, _)| key), message));
            }
            operands.push(value);
        }
        // What a scalar expression may range over: the operands there are, or a table's index.
        let free: Vec<&str> = match op.operands {
            [] => vec!["i"],
            all => all
                .iter()
                .zip(&operands)
                .filter(|(_, v)| v.is_some())
                .map(|(o, _)| o.name)
                .collect(),
        };
        let mut values = Vec::new();
        for def in op.attrs {
            values.push(match call.arg(def.name) {
                Some((key, argument)) => attrs::attr(&frame.scope, &free, def, key, argument)?,
                None => def.default_value().ok_or_else(|| {
                    let message =
                        format!("`{}` needs attribute `{}`, {}", op.name, def.name, def.kind);
                    self.cx.at(call.name, message)
                })?,
            });
        }
        self.add(frame, names, call, op, &operands, values)
    }

    fn add(
        &mut self,
        frame: &Frame<'a>,
        names: &[&str],
        call: &SpecCall<'a>,
        op: Op,
        operands: &[Option<ValueId>],
        values: Vec<Attr>,
    ) -> Result<Vec<ValueId>> {
        self.cx.spend(call.name, 640 * names.len() + values.iter().map(weight).sum::<usize>())?;
        let unique = names.iter().map(|n| self.unique(&frame.name_prefix, n)).collect();
        let place = self.cx.at(call.name, "");
        let loc = self.cx.place(call.name).map(|(source, _)| Loc {
            file: source.file.clone(),
            line: place.line as u32,
            col: place.col as u32,
        });
        let results = self.graph.call(unique, op, operands, values, loc).map_err(|e| {
            let named = e.starts_with(&format!("`{}`", op.name));
            let message = if named { e } else { format!("`{}`: {e}", op.name) };
            self.cx.at(call.name, message)
        })?;
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
        argument: &Argument<'a>,
    ) -> Result<Option<ValueId>> {
        match argument {
            Argument::One(Arg::Text(name)) => self.resolve(frame, name),
            Argument::One(Arg::Null) => Ok(None),
            _ => Err(self.cx.at(key, "expected the name of a value or weight, in quotes")),
        }
    }

    /// The value of that name; `None` where it is a weight that is absent.
    pub(super) fn resolve(&mut self, frame: &Frame<'a>, name: &str) -> Result<Option<ValueId>> {
        if let Some(&value) = frame.values.get(name) {
            return Ok(Some(value));
        }
        match frame.weights.get(name) {
            Some(Weight::Absent) => return Ok(None),
            Some(Weight::Present(weight, shape)) => {
                return self.weight(frame, name, weight, shape).map(Some);
            }
            None => {}
        }
        if let Some((input, _)) = StepInput::ALL.into_iter().find(|(_, n)| *n == name) {
            return Ok(Some(self.step_input(input)));
        }
        let steps = StepInput::ALL.iter().map(|(_, n)| *n);
        let known = frame.values.keys().chain(frame.weights.keys()).copied().chain(steps);
        let hint = nearest(name, known);
        Err(self.cx.at(name, format!("unknown value or weight `{name}`{hint}")))
    }

    fn step_input(&mut self, input: StepInput) -> ValueId {
        if let Some(&value) = self.steps.get(&input) {
            return value;
        }
        let (name, ty) = (self.unique("", input.name()), input.ty(self.cx.request.rows));
        let value = self.graph.param(name, Param::Step(input), ty);
        self.steps.insert(input, value);
        value
    }

    fn inline(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
        call: &'a SpecCall<'a>,
        block: &'a Block<'a>,
        results: &[&'a str],
    ) -> Result<Vec<ValueId>> {
        if frame.depth >= MAX_DEPTH {
            let message = format!("blocks nested deeper than {MAX_DEPTH}: does one call itself?");
            return Err(self.cx.at(call.name, message));
        }
        self.cx.spend(call.name, 512)?;
        let weight_prefix = format!("{}{}", frame.weight_prefix, self.at_prefix(frame, call)?);
        if weight_prefix.len() > MAX_TENSOR_NAME {
            return Err(self.cx.at(call.name, "the names of this block's tensors are too long"));
        }
        let mut inner = Frame {
            scope: self.family.child(),
            name_prefix: format!("{}{name}.", frame.name_prefix),
            weight_prefix,
            values: HashMap::new(),
            weights: HashMap::new(),
            depth: frame.depth + 1,
        };
        self.bind(frame, &mut inner, call, block)?;
        let before = self.renames.len();
        self.push_renames(frame, &inner, call)?;
        let entered = self.enter(&mut inner, block, results).map_err(|e| self.called(e, call));
        let renames = self.renames.split_off(before);
        let result = entered?;
        match renames.iter().find(|r| !r.used.get()) {
            None => Ok(result),
            Some(Rename { from, .. }) => {
                let stem = |name: &'a str| name.rsplit_once('.').map_or(name, |(stem, _)| stem);
                let names = block.weights.iter().flat_map(|(name, _)| [name, stem(name)]);
                let hint = nearest(from, names);
                let message = format!("block `{}` has no tensor `{from}`{hint}", call.name);
                Err(self.cx.at(from, message))
            }
        }
    }

    /// Adds a block's calls to the graph, once its operands and parameters are bound.
    fn enter(
        &mut self,
        inner: &mut Frame<'a>,
        block: &'a Block<'a>,
        results: &[&'a str],
    ) -> Result<Vec<ValueId>> {
        inner.scope.check(&block.checks)?;
        self.declare_weights(inner, &block.weights)?;
        self.declare_states(inner, &block.state)?;
        self.body(inner, &block.body)?;
        let mut values = Vec::new();
        for name in results {
            let value = self.resolve(inner, name)?;
            values.push(value.ok_or_else(|| self.cx.at(name, "this weight is left out here"))?);
        }
        Ok(values)
    }

    /// An error within a block, with the call that led there.
    fn called(&self, error: SourceError, call: &SpecCall<'a>) -> SourceError {
        error.called_from(&self.cx.at(call.name, ""))
    }

    /// Gives a block its operands and parameters.
    fn bind(
        &mut self,
        frame: &Frame<'a>,
        inner: &mut Frame<'a>,
        call: &'a SpecCall<'a>,
        block: &'a Block<'a>,
    ) -> Result<()> {
        for input in &block.inputs {
            let (key, argument) = call.arg(input).ok_or_else(|| {
                self.cx.at(call.name, format!("block `{}` needs operand `{input}`", call.name))
            })?;
            let value = self.operand(frame, key, argument)?;
            let missing = || {
                let message =
                    format!("block `{}` needs `{input}`, which is left out here", call.name);
                self.cx.at(key, message)
            };
            inner.values.insert(input, value.ok_or_else(missing)?);
        }
        for (param, default) in block.params.iter() {
            match call.arg(param) {
                None => {
                    inner.scope.define(param, *default).map_err(|e| self.called(e, call))?;
                }
                Some((_, Argument::One(arg))) => {
                    inner.scope.give(param, frame.scope.eval(*arg)?)?;
                }
                Some((key, Argument::List(_) | Argument::Names(_))) => {
                    return Err(self.cx.at(key, "expected one value, found several"));
                }
            }
        }
        Ok(())
    }

    /// The text of a block call's `at`.
    fn at_prefix(&self, frame: &Frame<'a>, call: &SpecCall<'a>) -> Result<String> {
        match call.arg("at") {
            None => Ok(String::new()),
            Some((_, Argument::One(Arg::Text(text)))) => self.filled(&frame.scope, text),
            Some((key, _)) => Err(self.cx.at(key, "expected a text such as \"self_attn.\"")),
        }
    }
}

/// What a call calls.
enum Target<'a> {
    Op(Op),
    Block(&'a Block<'a>),
}

impl<'a> Target<'a> {
    /// The name of its first operand.
    fn first(&self) -> Option<&'a str> {
        match self {
            Target::Op(op) => op.operands.first().map(|o| o.name),
            Target::Block(block) => block.inputs.first().copied(),
        }
    }

    /// Refuses an argument that it does not take.
    fn check_args(&self, cx: &Context<'a>, call: &SpecCall<'a>) -> Result<()> {
        let known: Vec<&str> = match self {
            Target::Op(op) => {
                let attrs = op.attrs.iter().map(|a| a.name);
                op.operands.iter().map(|o| o.name).chain(attrs).chain(["when"]).collect()
            }
            Target::Block(block) => {
                let params = block.params.iter().map(|(n, _)| n);
                let every = ["when", "at", "rename"];
                block.inputs.iter().copied().chain(params).chain(every).collect()
            }
        };
        let Some((key, _)) = call.args.iter().find(|(k, _)| !known.contains(k)) else {
            return Ok(());
        };
        let hint = nearest(key, known.iter().copied());
        let list = known.join(", ");
        let message = format!("`{}` has no argument `{key}`{hint}; it takes {list}", call.name);
        Err(cx.at(key, message))
    }
}

/// Refuses a name that IR text could not hold.
pub(super) fn check_name(cx: &Context<'_>, name: &str) -> Result<()> {
    let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if letters && !name.is_empty() && name.len() <= MAX_NAME {
        return Ok(());
    }
    let message = format!("expected a name of at most {MAX_NAME} letters, digits and `_`");
    Err(cx.at(name, message))
}

/// Bytes that an attribute takes besides its own size, at most.
fn weight(attr: &Attr) -> usize {
    match attr {
        Attr::Expr(e) => 24 * e.to_string().len(),
        Attr::Dims(dims) => 24 * dims.len(),
        Attr::Enum(s) => s.len(),
        _ => 0,
    }
}
