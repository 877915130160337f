//! Fused ops: ops that are data. Their meaning is a body of other ops.

use std::collections::BTreeMap;

use crate::attr::{Attr, AttrDef};
use crate::body::{Emit, Env, Stmt, apply};
use crate::expr::Expr;
use crate::graph::{Graph, NodeKind, Param, ValueId};
use crate::interp::Tensor;
use crate::names::nearest;
use crate::ops::common::bytes_of;
use crate::ops::{
    Effect, Eval, Memory, Op, OpCall, OpDef, OperandDef, Pointwise, Reads, StoredIn, Tolerance,
    Work,
};
use crate::{DType, Dims, Encoding, OPS, TensorType, Type};

/// What makes an op a fused one.
#[derive(Clone, Debug)]
pub struct Fused {
    /// What it computes, in primitives and other fused ops.
    pub body: Vec<Stmt>,
    /// The body's names that it yields.
    pub results: Vec<String>,
}

/// A fused op to be defined.
#[derive(Clone, Debug)]
pub struct FusedDef {
    /// Its name.
    pub name: String,
    /// What it computes.
    pub doc: String,
    /// Its operands, in order, and whether each may be left out.
    pub operands: Vec<(String, bool)>,
    /// Its attributes.
    pub attrs: Vec<AttrDef>,
    /// Its meaning.
    pub fused: Fused,
    /// Stem of its CUDA template.
    pub template: Option<String>,
}

/// What a module may use: the primitives, and the fused ops and encodings that were loaded.
#[derive(Clone, Debug)]
pub struct OpSet {
    ops: BTreeMap<&'static str, Op>,
    encodings: BTreeMap<String, Encoding>,
}

impl Default for OpSet {
    fn default() -> Self {
        let ops = OPS.iter().map(|d| (d.name, Op::of(d))).collect();
        OpSet { ops, encodings: BTreeMap::new() }
    }
}

impl OpSet {
    /// Looks an op up; the error suggests the nearest name.
    pub fn find(&self, name: &str) -> Result<Op, String> {
        self.ops.get(name).copied().ok_or_else(|| {
            let hint = nearest(name, self.ops.keys().copied());
            format!("unknown op `{name}`{hint}")
        })
    }

    /// Every op, by name.
    pub fn all(&self) -> impl Iterator<Item = Op> + '_ {
        self.ops.values().copied()
    }

    /// The fused ops, by name.
    pub fn fused(&self) -> impl Iterator<Item = Op> + '_ {
        self.all().filter(|op| op.fused.is_some())
    }

    /// Defines a fused op. One of the same name takes the place of the one before; a primitive's
    /// name is refused. Definitions live as long as the process: they are loaded once, from files.
    pub fn define(&mut self, def: FusedDef) -> Result<Op, String> {
        if OPS.iter().any(|d| d.name == def.name) {
            return Err(format!("`{}` is the name of a primitive", def.name));
        }
        expanded(&def.fused.body, MAX_DEPTH)?;
        let leak = |s: String| -> &'static str { Box::leak(s.into_boxed_str()) };
        let operands: Vec<OperandDef> = def
            .operands
            .into_iter()
            .map(|(name, optional)| OperandDef {
                name: leak(name),
                optional,
                rows_of: None,
                // The ops of the body say.
                stored: StoredIn::Any,
            })
            .collect();
        let effects: Vec<Effect> = def.fused.body.iter().map(|s| s.op.effect).collect();
        let effect = [Effect::Writes, Effect::Reads].into_iter().find(|e| effects.contains(e));
        let elementwise = def.fused.results.len() == 1
            && def.fused.body.iter().all(|s| s.op.pointwise != Pointwise::No);
        let pointwise = if elementwise { Pointwise::Composed } else { Pointwise::No };
        let tolerances = def.fused.body.iter().map(|s| s.op.tolerance);
        let op = OpDef {
            name: leak(def.name),
            doc: leak(def.doc),
            operands: Vec::leak(operands),
            attrs: Vec::leak(def.attrs),
            infer: |call| Ok(Instance::new(call)?.result_types()),
            effect: effect.unwrap_or(Effect::Pure),
            reference,
            pointwise,
            work,
            reads: Reads::All,
            cuda: def.template.map(leak),
            tolerance: tolerances.fold(Tolerance::EXACT, |a, b| Tolerance {
                f32: a.f32.max(b.f32),
                // Results between its parts are not rounded, so one rounding is left.
                ulps16: a.ulps16.max(b.ulps16),
                code: a.code.max(b.code),
            }),
            memory: Memory::Computed,
            fused: Some(def.fused),
        };
        let op = Op::of(Box::leak(Box::new(op)));
        self.ops.insert(op.name, op);
        Ok(op)
    }

    /// The encoding of that name.
    pub fn encoding(&self, name: &str) -> Option<&Encoding> {
        self.encodings.get(name)
    }

    /// Every encoding, by name.
    pub fn encodings(&self) -> impl Iterator<Item = &Encoding> {
        self.encodings.values()
    }

    /// Adds an encoding; one of the same name takes the place of the one before.
    pub fn define_encoding(&mut self, encoding: Encoding) {
        self.encodings.insert(encoding.name().to_owned(), encoding);
    }
}

/// Calls that a fused op may come to when the fused ops in its body are written out, and so on, each
/// counted itself too. Typing a call types all of them; without a bound it would take twice as long
/// with each level at which an op is used twice. Those that ship come to a few tens.
const MAX_CALLS: usize = 512;

/// How deep fused ops may be nested.
const MAX_DEPTH: usize = 32;

/// How many calls a body comes to; an error when they are more than one may. Ops that are defined
/// are within the bounds themselves, so that this ends soon.
fn expanded(body: &[Stmt], depth: usize) -> Result<usize, String> {
    if depth == 0 {
        return Err(format!("fused ops are nested more than {MAX_DEPTH} deep"));
    }
    body.iter().try_fold(0, |calls: usize, stmt| {
        let inner = match &stmt.op.fused {
            Some(fused) => expanded(&fused.body, depth - 1)?,
            None => 0,
        };
        match calls + 1 + inner {
            calls @ 0..=MAX_CALLS => Ok(calls),
            _ => Err(format!(
                "the body comes to more than {MAX_CALLS} calls once the fused ops in it are written out"
            )),
        }
    })
}

/// A fused op's body applied to operands of given types.
pub struct Instance {
    /// The body's calls.
    pub graph: Graph,
    /// One parameter an operand.
    pub params: Vec<Option<ValueId>>,
    /// The values that the op yields.
    pub results: Vec<ValueId>,
}

impl Instance {
    /// Applies the body of the op called; an error says which of its calls does not type.
    pub fn new(call: &OpCall<'_>) -> Result<Instance, String> {
        let fused = call.op.fused.as_ref().ok_or("not a fused op")?;
        let mut graph = Graph::new(call.op.name);
        let mut env = Env::default();
        let mut params = Vec::new();
        for (i, (def, ty)) in call.op.operands.iter().zip(call.operands).enumerate() {
            let value = ty.map(|ty| graph.param(def.name, Param::Carry(i as u32), ty.clone()));
            env.values.insert(def.name.to_owned(), value);
            params.push(value);
        }
        let attrs = call.op.attrs.iter().map(|d| d.name.to_owned()).zip(call.attrs.iter().cloned());
        env.attrs.extend(attrs);
        apply(&fused.body, &mut graph, &mut env)
            .map_err(|e| format!("in `{}`: {e}", call.op.name))?;
        let result = |name: &String| {
            let value = env.values.get(name).copied().flatten();
            value.ok_or_else(|| format!("in `{}`: result `{name}` is not defined", call.op.name))
        };
        let results = fused.results.iter().map(result).collect::<Result<Vec<_>, _>>()?;
        Ok(Instance { graph, params, results })
    }

    fn result_types(&self) -> Vec<Type> {
        self.results.iter().map(|v| self.graph.ty(*v).clone()).collect()
    }
}

fn reference(eval: &Eval<'_>) -> Result<Vec<Tensor>, String> {
    let instance = Instance::new(&eval.call)?;
    let mut values: Vec<Vec<Tensor>> = vec![Vec::new(); instance.graph.len()];
    for (param, value) in instance.params.iter().zip(eval.values) {
        if let (Some(param), Some(value)) = (param, value) {
            values[param.node] = vec![(*value).clone()];
        }
    }
    for (index, node) in instance.graph.nodes() {
        let NodeKind::Op { op, attrs } = &node.kind else { continue };
        let operands = instance.graph.operands(index);
        let types: Vec<_> = operands.iter().map(|v| v.map(|v| instance.graph.ty(v))).collect();
        let inputs: Vec<_> =
            operands.iter().map(|v| v.map(|v| &values[v.node][v.result])).collect();
        let call = OpCall { op: *op, operands: &types, attrs };
        let eval = Eval { call, values: &inputs, results: &node.types, step: eval.step };
        values[index] = (op.reference)(&eval)?;
    }
    Ok(instance.results.iter().map(|v| values[v.node][v.result].clone()).collect())
}

/// What the body reads of the operands moves once, and so do results and cache rows; what lies between
/// stays on the chip. Every operation of the body is done, but nothing for context rows that all of
/// its masks hide.
fn work(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Work {
    let seen = masks(call.op).then(|| window(call)).flatten();
    let dims = &seen.map_or(*dims, |rows| dims.within(rows));
    let needs = needs(call, results, dims);
    let moved = needs.operands.into_iter().chain(results.iter().map(|t| bytes_of(t, dims)));
    Work { bytes: moved.fold(needs.cache, u64::saturating_add), flops: needs.flops }
}

/// What a call needs to come on the chip, and to be done there.
struct Needs {
    /// Bytes of each operand.
    operands: Vec<u64>,
    /// Bytes of cache rows.
    cache: u64,
    flops: u64,
}

fn needs(call: &OpCall<'_>, results: &[Type], dims: &Dims) -> Needs {
    let whole = call.operands.iter().map(|t| t.map_or(0, |t| bytes_of(t, dims)));
    let mut whole: Vec<u64> = whole.collect();
    let Some(Ok(instance)) = call.op.fused.is_some().then(|| Instance::new(call)) else {
        if let Reads::Part { operand, bytes } = call.op.reads {
            whole[operand] = bytes(call, results, dims);
        }
        let work = (call.op.work)(call, results, dims);
        // A row is read or written: one of the two ways that the primitive's copy moves.
        let touches = matches!(call.op.effect, Effect::Reads | Effect::Writes);
        let cache = if touches { work.bytes / 2 } else { 0 };
        return Needs { operands: whole, cache, flops: work.flops };
    };
    let mut all = Needs { operands: vec![0; whole.len()], cache: 0, flops: 0 };
    for (index, node) in instance.graph.nodes() {
        let NodeKind::Op { op, attrs } = &node.kind else { continue };
        let operands = instance.graph.operands(index);
        let types: Vec<_> = operands.iter().map(|v| v.map(|v| instance.graph.ty(v))).collect();
        let part = needs(&OpCall { op: *op, operands: &types, attrs }, &node.types, dims);
        all.flops = all.flops.saturating_add(part.flops);
        all.cache = all.cache.saturating_add(part.cache);
        for (value, bytes) in operands.iter().zip(part.operands) {
            if let Some(i) = instance.params.iter().position(|p| p.is_some() && p == value) {
                // What is read twice moves once.
                all.operands[i] = all.operands[i].saturating_add(bytes).min(whole[i]);
            }
        }
    }
    all
}

/// Whether some body masks what tokens see.
fn masks(op: Op) -> bool {
    let in_body = |fused: &Fused| fused.body.iter().any(|stmt| masks(stmt.op));
    matches!(op.reads, Reads::Window(_)) || op.fused.as_ref().is_some_and(in_body)
}

/// The most context rows that a token sees in any mask of the body; `None` where one shows all.
fn window(call: &OpCall<'_>) -> Option<u64> {
    if let Reads::Window(attr) = call.op.reads {
        return call.maybe_int(attr);
    }
    let instance = Instance::new(call).ok()?;
    let mut most = None;
    for (index, node) in instance.graph.nodes() {
        let NodeKind::Op { op, attrs } = &node.kind else { continue };
        if masks(*op) {
            let operands = instance.graph.operands(index);
            let types: Vec<_> = operands.iter().map(|v| v.map(|v| instance.graph.ty(v))).collect();
            most = most.max(Some(window(&OpCall { op: *op, operands: &types, attrs })?));
        }
    }
    most
}

/// The expression, over operand names, that a body of elementwise ops composes to.
pub(crate) fn compose(op: Op, attrs: &[Attr]) -> Result<Expr, String> {
    let fused = op.fused.as_ref().ok_or("not a fused op")?;
    let mut symbolic = Symbolic::default();
    let mut env = Env::default();
    for def in op.operands {
        symbolic.0.push(Expr::Var(def.name.to_owned()));
        env.values.insert(def.name.to_owned(), Some(symbolic.0.len() - 1));
    }
    env.attrs.extend(op.attrs.iter().map(|d| d.name.to_owned()).zip(attrs.iter().cloned()));
    apply(&fused.body, &mut symbolic, &mut env)?;
    let result = fused.results.first().and_then(|r| env.values.get(r).copied().flatten());
    let expr = symbolic.0.swap_remove(result.ok_or("no result")?);
    // What the parser would refuse could not be printed and read back.
    let mut names = 0;
    expr.names(&mut |_| names += 1);
    if names > MAX_NAMES { Err("composes to too large an expression".to_owned()) } else { Ok(expr) }
}

/// Names in a composed expression: well within what [`Expr`]'s parser takes.
const MAX_NAMES: usize = 32;

/// Builds expressions where others build nodes.
#[derive(Default)]
struct Symbolic(Vec<Expr>);

impl Emit for Symbolic {
    type Value = usize;

    /// A placeholder: what an elementwise op computes does not depend on its operands' types.
    fn ty(&self, _: usize) -> Type {
        TensorType::act(DType::F32, []).into()
    }

    fn emit(
        &mut self,
        _: &[String],
        op: Op,
        operands: &[Option<usize>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<usize>, String> {
        let expr = op.pointwise(&attrs).ok_or("not an elementwise op")??;
        let named: Vec<(&str, &Expr)> = op
            .operands
            .iter()
            .zip(operands)
            .filter_map(|(def, v)| Some((def.name, self.0.get((*v)?)?)))
            .collect();
        let expr =
            expr.substitute(&|n| named.iter().find(|(k, _)| *k == n).map(|(_, e)| (*e).clone()));
        self.0.push(expr);
        Ok(vec![self.0.len() - 1])
    }
}

impl Emit for Graph {
    type Value = ValueId;

    fn ty(&self, value: ValueId) -> Type {
        Graph::ty(self, value).clone()
    }

    fn emit(
        &mut self,
        names: &[String],
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<ValueId>, String> {
        self.call(names.to_vec(), op, operands, attrs, None)
    }
}
