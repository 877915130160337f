//! Modules that make one call of an op, for checks of its kernels.

use std::collections::HashMap;

use infernum_ir::{
    Attr, CallSite, DType, Dim, Effect, Graph, Loc, Module, NodeKind, Op, Param, StateType,
    StepInput, Sym, TensorType, Type, ValueId, WeightRef, verify,
};

use super::sample::{Rng, attr, dims};
use crate::data::{DimPattern, Kernels, Signature, Sizes, VarType};

/// Sizes of dimensions: 1, odd, unequal; the width of a warp, more than one block.
const SIZES: [u64; 9] = [1, 2, 3, 5, 8, 12, 32, 64, 300];
/// Tokens that a step's ids are below: rows of what is looked up.
const ROWS: u64 = 31;
/// Elements of an operand, at most, where the sizes are not given.
const LARGEST: u64 = 1 << 18;
/// Attempts at a call whose sizes and attributes fit one another.
const ATTEMPTS: usize = 2000;

/// A module whose graph makes one call, and what the call is.
#[derive(Clone, Debug)]
pub struct CallModule {
    /// The module.
    pub module: Module,
    /// The call's operands and attributes.
    pub shown: String,
}

/// Makes `count` calls of `op` as its signature says (that of its file, or of a rule that makes it), with
/// activations of `dtype`: small sizes at random, and those that its file gives. The same seed makes
/// the same calls.
pub fn calls(
    kernels: &Kernels,
    op: Op,
    dtype: DType,
    seed: u64,
    count: usize,
) -> Result<Vec<CallModule>, String> {
    let signature = kernels.signature(op).ok_or_else(|| {
        format!(
            "nothing says what `{}` is called with: give its operands' types as `vars` in its file, or \
             write a rule that makes it of the rule's variables",
            op.name
        )
    })?;
    let name = op.name.bytes().fold(seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mut rng = Rng::new(name);
    let given = signature.sizes.iter().map(Some).chain(std::iter::repeat_n(None, count));
    let mut made = Vec::new();
    for sizes in given {
        let mut why = String::new();
        let mut attempts = 0..ATTEMPTS;
        let found = attempts.find_map(|_| {
            let call = CallMaker { op, signature: &signature, dtype, sizes };
            call.module(&mut rng).map_err(|e| why = e).ok()
        });
        made.push(found.ok_or_else(|| format!("no call of `{}` could be made: {why}", op.name))?);
    }
    Ok(made)
}

struct CallMaker<'a> {
    op: Op,
    signature: &'a Signature,
    dtype: DType,
    /// Sizes that the file gives.
    sizes: Option<&'a HashMap<String, u64>>,
}

impl CallMaker<'_> {
    fn module(&self, rng: &mut Rng) -> Result<CallModule, String> {
        let sizes = self.sizes(rng);
        let mut parts = Parts { graph: Graph::new("check"), dtype: self.dtype, rows: None };
        let mut operands = Vec::new();
        for (def, ty) in self.op.operands.iter().zip(&self.signature.operands) {
            let Some(ty) = ty.as_ref().filter(|ty| !ty.optional || rng.coin()) else {
                operands.push(None);
                continue;
            };
            let shape = dims(ty, &sizes).ok_or_else(|| format!("`{}` has no size", def.name))?;
            if self.sizes.is_none() && elements(&shape) > LARGEST {
                return Err("the operands are too large".to_owned());
            }
            let below = ty.below.as_ref().and_then(|d| d.eval(&sizes));
            let written = self.op.effect == Effect::Writes;
            operands.push(Some(parts.operand(def.name, ty, &shape, below, written)?));
        }
        let attrs = self.op.attrs.iter().map(|def| {
            match self.signature.samples.iter().find(|(n, _)| n == def.name) {
                Some((_, given)) => Ok(rng.sample(given)),
                None => attr(def.name, def, rng),
            }
        });
        let attrs = attrs.collect::<Result<Vec<Attr>, String>>()?;
        let shown = self.shown(&parts.graph, &operands, &attrs);
        parts
            .finish(self.op, &operands, attrs, rng.coin())
            .map(|module| CallModule { module, shown })
    }

    fn sizes(&self, rng: &mut Rng) -> Sizes {
        let mut sizes = Sizes { rest: Some(vec![Dim::sym(Sym::T)]), ..Sizes::default() };
        for ty in self.signature.operands.iter().flatten() {
            // `u32 [m] < n` picks rows of the step's tokens.
            let picks = matches!(ty.below, Some(DimPattern::Any(_)));
            for dim in ty.dims.iter().chain(&ty.below) {
                dim.names(&mut |name| {
                    let symbol = if picks && ty.dims.contains(dim) { Sym::B } else { Sym::T };
                    let size = match (dim, self.sizes.and_then(|s| s.get(name))) {
                        (_, Some(size)) => Dim::Const(*size),
                        (DimPattern::Any(_), None) => Dim::sym(symbol),
                        (_, None) => Dim::Const(rng.pick(&SIZES)),
                    };
                    sizes.vars.entry(name.to_owned()).or_insert(size);
                });
            }
        }
        sizes
    }

    fn shown(&self, graph: &Graph, operands: &[Option<ValueId>], attrs: &[Attr]) -> String {
        let operand = |(def, v): (&infernum_ir::OperandDef, &Option<ValueId>)| match v {
            Some(v) => format!("{}: {}", def.name, graph.ty(*v)),
            None => format!("{}: _", def.name),
        };
        let operands = self.op.operands.iter().zip(operands).map(operand);
        let attrs = self.op.attrs.iter().zip(attrs).map(|(def, a)| format!("{}: {a}", def.name));
        format!(
            "({}) {{{}}}",
            operands.collect::<Vec<_>>().join(", "),
            attrs.collect::<Vec<_>>().join(", ")
        )
    }
}

fn elements(shape: &[Dim]) -> u64 {
    shape.iter().filter_map(|d| d.as_const()).fold(1, u64::saturating_mul)
}

/// The graph that a call's operands are made in.
struct Parts {
    graph: Graph,
    dtype: DType,
    /// The ids of the step's tokens, once something is looked up by them.
    rows: Option<ValueId>,
}

impl Parts {
    /// A value of a type. `written` where the op writes planes: it finds them as they are, and another
    /// op finds them filled.
    fn operand(
        &mut self,
        name: &str,
        ty: &VarType,
        shape: &[Dim],
        below: Option<Dim>,
        written: bool,
    ) -> Result<ValueId, String> {
        let dtype = ty.dtype.unwrap_or(self.dtype);
        let (t, b, s) = (Dim::sym(Sym::T), Dim::sym(Sym::B), Dim::sym(Sym::S));
        let constants = |dims: &[Dim]| dims.iter().all(|d| d.as_const().is_some());
        let [first, rest @ ..] = shape else {
            return Err(format!("`{name}` has no dimensions"));
        };
        let is_index = matches!(dtype, DType::I32 | DType::U32);
        if ty.slot {
            let shape = shape.iter().map(|d| d.as_const()).collect::<Option<Vec<u64>>>();
            let shape = shape.ok_or("no state of a fixed size")?;
            let at = format!("s{}", self.graph.len());
            let ty = StateType::slot(dtype, &shape);
            return Ok(self.graph.param(at, Param::State(name.to_owned()), ty));
        }
        if ty.state {
            let [heads, dim] = [first.as_const(), rest.first().and_then(|d| d.as_const())];
            let (Some(heads), Some(dim)) = (heads, dim) else { return Err("no plane".to_owned()) };
            let state = self.plane(name, heads, dim);
            if written {
                return Ok(state);
            }
            let rows = self.tokens(&format!("{name}.rows"), self.dtype, &[t, *first, rest[0]])?;
            return self.one("kv_write", &[Some(state), Some(rows)], vec![]);
        }
        if ty.constant && dtype.is_float() && constants(shape) {
            return Ok(self.weight(name, dtype, shape));
        }
        match (*first, is_index) {
            (first, true) if first == t && rest.is_empty() && dtype == DType::I32 => {
                Ok(self.step(StepInput::Positions, dtype, t))
            }
            (first, true) if first == t && rest.is_empty() => match below {
                // A step's tokens would be too many.
                Some(Dim::Const(..ROWS)) => {
                    let chosen = self.chosen(name, &[Dim::Const(1)], below)?;
                    self.one("reshape", &[Some(chosen)], vec![Attr::Dims(vec![t])])
                }
                _ => Ok(self.ids()),
            },
            (first, true) if first == s && rest.is_empty() && dtype == DType::I32 => {
                Ok(self.step(StepInput::ContextPositions, dtype, s))
            }
            (first, true) if first == b && rest.is_empty() && dtype == DType::U32 => {
                Ok(self.step(StepInput::OutputRows, dtype, b))
            }
            (first, true) if first == t && dtype == DType::U32 => self.chosen(name, rest, below),
            (first, false) if first == t && constants(rest) => {
                let x = self.tokens(name, dtype, shape)?;
                // A square is not negative.
                let square = ty.not_negative.then(|| self.one("mul", &[Some(x); 2], vec![]));
                square.unwrap_or(Ok(x))
            }
            (first, false) if first == b && constants(rest) => {
                let all = self.tokens(name, dtype, &[&[t], rest].concat())?;
                let rows = self.step(StepInput::OutputRows, DType::U32, b);
                self.one("gather_rows", &[Some(all), Some(rows)], vec![])
            }
            // The rows of a context are those of a plane of the cache.
            (first, false) if first == s && rest.len() == 2 && constants(rest) => {
                let [heads, dim] = [rest[0].as_const(), rest[1].as_const()].map(|d| d.unwrap_or(1));
                let state = self.plane(&format!("{name}.plane"), heads, dim);
                let rows = self.tokens(&format!("{name}.rows"), dtype, &[&[t], rest].concat())?;
                let state = self.one("kv_write", &[Some(state), Some(rows)], vec![])?;
                self.one("kv_read", &[Some(state)], vec![])
            }
            _ => {
                let ty = TensorType { constant: ty.constant, ..TensorType::act(dtype, shape) };
                Err(format!("no operand `{name}` of {ty} can be made for a check"))
            }
        }
    }

    fn one(
        &mut self,
        op: &str,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
    ) -> Result<ValueId, String> {
        let name = format!("v{}", self.graph.len());
        Ok(self.graph.call(vec![name], Op::find(op)?, operands, attrs, None::<Loc>)?[0])
    }

    fn weight(&mut self, name: &str, dtype: DType, shape: &[Dim]) -> ValueId {
        let ty = TensorType { constant: true, ..TensorType::act(dtype, shape) };
        let weight = WeightRef { name: name.to_owned(), stack: None };
        self.graph.param(format!("w{}", self.graph.len()), Param::Weight(weight), ty)
    }

    fn plane(&mut self, name: &str, heads: u64, dim: u64) -> ValueId {
        let ty = StateType::paged(self.dtype, heads, dim);
        self.graph.param(format!("s{}", self.graph.len()), Param::State(name.to_owned()), ty)
    }

    fn step(&mut self, input: StepInput, dtype: DType, dim: Dim) -> ValueId {
        let known = self.graph.params().find(|(_, p, _)| **p == Param::Step(input));
        if let Some((value, ..)) = known {
            return value;
        }
        let ty = TensorType::act(dtype, [dim]);
        self.graph.param(input.name(), Param::Step(input), ty)
    }

    fn ids(&mut self) -> ValueId {
        let ids = self.step(StepInput::Tokens, DType::U32, Dim::sym(Sym::T));
        *self.rows.get_or_insert(ids)
    }

    /// Activations [T, ..]: rows of a random table, by the step's tokens.
    fn tokens(&mut self, name: &str, dtype: DType, shape: &[Dim]) -> Result<ValueId, String> {
        let width = elements(&shape[1..]);
        let table = self.weight(name, dtype, &[Dim::Const(ROWS), Dim::Const(width)]);
        let ids = self.ids();
        let rows = self.one("embedding", &[Some(ids), Some(table)], vec![])?;
        if shape.len() == 2 {
            return Ok(rows);
        }
        self.one("reshape", &[Some(rows)], vec![Attr::Dims(shape.to_vec())])
    }

    /// Ids of experts [T, k], those of a token all different.
    fn chosen(&mut self, name: &str, rest: &[Dim], below: Option<Dim>) -> Result<ValueId, String> {
        let (Some(Dim::Const(k)), Some(Dim::Const(all))) = (rest.first(), below) else {
            return Err(format!("`{name}`: ids need a bound, as in `u32 [T, A] < X`"));
        };
        let scores = self.tokens(name, DType::F32, &[Dim::sym(Sym::T), Dim::Const(all)])?;
        let attrs = vec![Attr::Int(*k as i64), Attr::Int(1), Attr::Int(1)];
        let names = ["best", "ids"].map(|n| format!("{n}{}", self.graph.len())).to_vec();
        let op = Op::find("topk")?;
        Ok(self.graph.call(names, op, &[Some(scores), None], attrs, None::<Loc>)?[1])
    }

    /// Makes the call and yields its results: of planes of rows that it wrote, what their sequences find there.
    /// What states of a fixed size are shows in what the next step yields.
    /// With `keep` the operands outlive the call, so that no result may take their place.
    fn finish(
        mut self,
        op: Op,
        operands: &[Option<ValueId>],
        attrs: Vec<Attr>,
        keep: bool,
    ) -> Result<Module, String> {
        let count = op.fused.as_ref().map_or(1, |f| f.results.len());
        let names = (0..count).map(|i| format!("r{i}")).collect();
        let results = self.graph.call(names, op, operands, attrs, None::<Loc>)?;
        let is_state = |graph: &Graph, v: &ValueId| matches!(graph.ty(*v), Type::State(_));
        let (states, mut returned): (Vec<_>, Vec<_>) =
            results.iter().copied().partition(|v| is_state(&self.graph, v));
        let rows = |v: &&ValueId| self.graph.ty(**v).state().is_ok_and(|s| !s.is_slot());
        let rows: Vec<ValueId> = states.iter().filter(rows).copied().collect();
        for state in &rows {
            returned.push(self.one("kv_read", &[Some(*state)], vec![])?);
        }
        if keep {
            let made = |v: &ValueId| matches!(self.graph.node(v.node).kind, NodeKind::Op { .. });
            let kept = operands.iter().flatten().filter(|v| made(v) && !is_state(&self.graph, v));
            returned.extend(kept.copied().collect::<Vec<_>>());
        }
        // The last version of every plane is returned.
        let written = self.graph.nodes().filter(
            |(_, n)| matches!(n.kind, NodeKind::Op { op, .. } if op.effect == Effect::Writes),
        );
        let written: Vec<ValueId> = written
            .flat_map(|(node, n)| (0..n.types.len()).map(move |result| ValueId { node, result }))
            .filter(|v| is_state(&self.graph, v))
            .collect();
        let replaced: Vec<ValueId> =
            written.iter().filter_map(|v| self.graph.state_source(*v)).collect();
        returned.extend(written.into_iter().filter(|v| !replaced.contains(v)));
        let mut seen = Vec::new();
        returned.retain(|v| {
            !seen.contains(v) && {
                seen.push(*v);
                true
            }
        });
        self.graph.set_results(returned);
        let schedule = vec![CallSite { graph: 0, layer: Some(0) }];
        let module = Module { name: "check".to_owned(), graphs: vec![self.graph], schedule };
        verify(&module).map_err(|e| e.to_string())?;
        Ok(module)
    }
}
