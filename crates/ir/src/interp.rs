//! The reference interpreter: plain loops in `f64`, the oracle for everything else.

use std::collections::HashMap;
use std::ops::Range;

use half::bf16;

use crate::graph::{Graph, Module, NodeKind, Param, StepInput, ValueId, WeightRef};
use crate::ops::{Eval, OpCall};
use crate::picking::Picks;
use crate::{DType, Dims, StateType, Type};

/// A value: row-major, in `f64`.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Tensor {
    /// Outermost dimension first; a ragged `[H, T, S]` is `[H, pairs]`.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<f64>,
}

/// The sequences of one step.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct StepShape {
    /// In the order of their tokens.
    pub seqs: Vec<SeqShape>,
    /// Where in its sequence each second text begins, for those that have one: their places among the sequences, in order,
    /// and rows.
    pub seconds: Vec<(usize, usize)>,
    /// The adapters of sequences that have one: their places among the sequences, in order, and numbers from 1.
    pub adapters: Vec<(usize, u32)>,
    /// Tokens that yield a row of output, in order; the last of each sequence where this is empty.
    pub outputs: Vec<u32>,
    /// How the tokens after the rows of output are picked.
    pub picks: Picks,
}

/// One sequence's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqShape {
    /// Tokens computed in this step.
    pub new: usize,
    /// Rows its cache holds after the step, the new ones included.
    pub context: usize,
}

/// Where one token of a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPlace {
    /// Its sequence's first context row in the step.
    pub context_start: usize,
    /// Its sequence's context rows.
    pub context_len: usize,
    /// Its own row, counted from `context_start`.
    pub row: usize,
    /// Its first element in one head of a ragged value.
    pub pair_start: usize,
}

impl TokenPlace {
    /// Its elements in one head of a ragged value.
    pub fn pairs(&self) -> Range<usize> {
        self.pair_start..self.pair_start + self.context_len
    }
}

impl StepShape {
    /// A step of these sequences, of which the last token of each yields.
    pub fn of(seqs: Vec<SeqShape>) -> StepShape {
        StepShape { seqs, ..StepShape::default() }
    }

    /// A step of one sequence.
    pub fn one(new: usize, context: usize) -> StepShape {
        StepShape::of(vec![SeqShape { new, context }])
    }

    /// The tokens that yield a row of output, in order.
    pub fn output_rows(&self) -> impl Iterator<Item = u32> + '_ {
        let mut end = 0;
        let seqs = if self.outputs.is_empty() { &self.seqs[..] } else { &[] };
        let last = seqs.iter().map(move |s| {
            end += s.new as u32;
            end - 1
        });
        last.chain(self.outputs.iter().copied())
    }

    /// Which of its sequence's texts each token is of: 0, or 1.
    pub fn segments(&self) -> impl Iterator<Item = u32> + '_ {
        let mut seconds = self.seconds.iter().peekable();
        self.seqs.iter().enumerate().flat_map(move |(i, s)| {
            let second = seconds.next_if(|(seq, _)| *seq == i).map_or(usize::MAX, |(_, row)| *row);
            (s.context - s.new..s.context).map(move |row| u32::from(row >= second))
        })
    }

    /// The adapter of each token, from 1; 0 for none.
    pub fn token_adapters(&self) -> impl Iterator<Item = u32> + '_ {
        let mut adapters = self.adapters.iter().peekable();
        self.seqs.iter().enumerate().flat_map(move |(i, s)| {
            let own = adapters.next_if(|(seq, _)| *seq == i).map_or(0, |(_, adapter)| *adapter);
            std::iter::repeat_n(own, s.new)
        })
    }

    /// The step's sizes.
    pub fn dims(&self) -> Dims {
        let sum = |f: fn(&SeqShape) -> usize| self.seqs.iter().map(f).sum::<usize>() as u64;
        Dims {
            t: sum(|s| s.new),
            b: if self.outputs.is_empty() { self.seqs.len() } else { self.outputs.len() } as u64,
            s: sum(|s| s.context),
            pairs: sum(|s| s.new * s.context),
            seqs: self.seqs.len() as u64,
        }
    }

    /// Every token's place, in order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenPlace> + '_ {
        let (mut context_start, mut pair_start) = (0, 0);
        self.seqs.iter().flat_map(move |s| {
            let (context, pairs) = (context_start, pair_start);
            context_start += s.context;
            pair_start += s.new * s.context;
            let s = *s;
            (0..s.new).map(move |i| TokenPlace {
                context_start: context,
                context_len: s.context,
                row: s.context - s.new + i,
                pair_start: pairs + i * s.context,
            })
        })
    }
}

/// Where results are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Nowhere: every result keeps `f64`.
    Exact,
    /// Each op's results to their element type.
    ToType,
}

/// The KV cache between steps: for each layer and plane, each sequence's rows or its one state.
#[derive(Clone, Debug, Default)]
pub struct States(HashMap<(Option<u32>, String), Vec<Vec<f64>>>);

/// Reads weights for the interpreter: each gets the layer of the call.
pub type Weights<'a> = dyn Fn(&WeightRef, Option<u32>, &Type) -> Result<Tensor, String> + 'a;

/// Runs modules and graphs.
pub struct Interpreter<'a> {
    weights: &'a Weights<'a>,
    rounding: Rounding,
}

/// What one call computed: its tensor results (states are kept in [`States`]).
pub type Carried = Vec<Tensor>;

impl<'a> Interpreter<'a> {
    /// An interpreter over these weights.
    pub fn new(weights: &'a Weights<'a>, rounding: Rounding) -> Interpreter<'a> {
        Interpreter { weights, rounding }
    }

    /// Runs one step of a module; `observe` sees what each call of the schedule carries on.
    pub fn step(
        &self,
        module: &Module,
        step: &StepShape,
        tokens: &[u32],
        states: &mut States,
        observe: &mut dyn FnMut(usize, &Carried),
    ) -> Result<Carried, String> {
        let mut carried = Vec::new();
        for (i, site) in module.schedule.iter().enumerate() {
            let graph = &module.graphs[site.graph];
            carried = self.graph(graph, site.layer, step, tokens, &carried, states)?;
            observe(i, &carried);
        }
        Ok(carried)
    }

    /// Runs one graph.
    pub fn graph(
        &self,
        graph: &Graph,
        layer: Option<u32>,
        step: &StepShape,
        tokens: &[u32],
        carried: &[Tensor],
        states: &mut States,
    ) -> Result<Carried, String> {
        let mut values: Vec<Vec<Tensor>> = Vec::with_capacity(graph.len());
        // Which plane a state value is a version of.
        let mut planes: HashMap<ValueId, String> = HashMap::new();
        for (index, node) in graph.nodes() {
            let id = ValueId { node: index, result: 0 };
            let results = match &node.kind {
                NodeKind::Param(param) => {
                    if let Param::State(plane) = param {
                        planes.insert(id, plane.clone());
                    }
                    let ty = &node.types[0];
                    vec![self.param(param, ty, layer, step, tokens, carried, states)?]
                }
                NodeKind::Op { op, attrs } => {
                    let operands = graph.operands(index);
                    for result in 0..node.types.len() {
                        let version = ValueId { node: index, result };
                        let from = graph.state_source(version);
                        if let Some(plane) = from.and_then(|v| planes.get(&v)) {
                            planes.insert(version, plane.clone());
                        }
                    }
                    let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
                    let inputs: Vec<_> =
                        operands.iter().map(|v| v.map(|v| &values[v.node][v.result])).collect();
                    let call = OpCall { op: *op, operands: &types, attrs };
                    let eval = Eval { call, values: &inputs, results: &node.types, step };
                    let mut results =
                        (op.reference)(&eval).map_err(|e| format!("%{}: {e}", node.names[0]))?;
                    if self.rounding == Rounding::ToType {
                        results.iter_mut().zip(&node.types).for_each(|(t, ty)| round(t, ty));
                    }
                    results
                }
            };
            values.push(results);
        }
        let mut out = Vec::new();
        for &v in graph.results() {
            let value = &values[v.node][v.result];
            match graph.ty(v) {
                Type::Tensor(_) => out.push(value.clone()),
                Type::State(ty) => {
                    let plane = planes.get(&v).ok_or("a state result of no plane")?;
                    states.store(layer, plane, (step, ty), value);
                }
            }
        }
        Ok(out)
    }

    #[allow(clippy::too_many_arguments, reason = "one call site, just above")]
    fn param(
        &self,
        param: &Param,
        ty: &Type,
        layer: Option<u32>,
        step: &StepShape,
        tokens: &[u32],
        carried: &[Tensor],
        states: &States,
    ) -> Result<Tensor, String> {
        let vector = |data: Vec<f64>| Tensor { shape: vec![data.len()], data };
        let value = match param {
            Param::Weight(weight) => (self.weights)(weight, layer, ty)?,
            Param::Bank(name) => {
                (self.weights)(&WeightRef { name: name.clone(), stack: None }, layer, ty)?
            }
            Param::Carry(i) => carried
                .get(*i as usize)
                .cloned()
                .ok_or_else(|| format!("carry {i} of {} value(s)", carried.len()))?,
            Param::State(plane) => states.load(layer, plane, step, ty)?,
            Param::Shared { plane, layer } => states.whole(*layer, plane, step, ty)?,
            Param::Step(StepInput::Tokens) => {
                vector(tokens.iter().map(|&t| f64::from(t)).collect())
            }
            Param::Step(StepInput::Positions) => {
                vector(step.tokens().map(|t| t.row as f64).collect())
            }
            Param::Step(StepInput::ContextPositions) => {
                vector(step.seqs.iter().flat_map(|s| (0..s.context).map(|p| p as f64)).collect())
            }
            Param::Step(StepInput::Segments) => vector(step.segments().map(f64::from).collect()),
            Param::Step(StepInput::Adapters) => {
                vector(step.token_adapters().map(f64::from).collect())
            }
            Param::Step(StepInput::OutputRows) => {
                let rows = ty.tensor()?.sizes(&step.dims())[0];
                if rows == step.dims().t as usize {
                    vector((0..rows).map(|r| r as f64).collect())
                } else {
                    vector(step.output_rows().map(f64::from).collect())
                }
            }
            Param::Step(StepInput::Picks) => {
                let shape = ty.tensor()?.sizes(&step.dims());
                let words = (0..shape[0]).flat_map(|row| step.picks.row(row).words());
                Tensor { data: words.map(f64::from).collect(), shape }
            }
        };
        if let Type::Tensor(t) = ty {
            let want = t.sizes(&step.dims());
            if value.shape != want || value.data.len() != want.iter().product() {
                return Err(format!("{param:?}: expected {want:?}, found {:?}", value.shape));
            }
        }
        Ok(value)
    }
}

impl States {
    fn load(
        &self,
        layer: Option<u32>,
        plane: &str,
        step: &StepShape,
        ty: &Type,
    ) -> Result<Tensor, String> {
        let row = ty.state()?;
        let past = self.0.get(&(layer, plane.to_owned()));
        let mut data = Vec::new();
        if row.is_slot() {
            let (shape, size) = (slot_shape(row, step), row.elements() as usize);
            for (i, seq) in step.seqs.iter().enumerate() {
                let state = past.and_then(|p| p.get(i)).filter(|_| seq.context > seq.new);
                match state {
                    Some(state) if state.len() == size => data.extend(state),
                    None if seq.context == seq.new => data.resize(data.len() + size, 0.0),
                    _ => return Err(format!("sequence {i} has no state of its tokens so far")),
                }
            }
            return Ok(Tensor { shape, data });
        }
        let (heads, dim) = (row.heads() as usize, row.dim() as usize);
        for (i, seq) in step.seqs.iter().enumerate() {
            let rows = past.and_then(|p| p.get(i)).map_or(&[][..], Vec::as_slice);
            let held = (seq.context - seq.new) * heads * dim;
            if rows.len() < held {
                return Err(format!("sequence {i} holds fewer rows than the step's context"));
            }
            data.extend(&rows[..held]);
            data.resize(data.len() + seq.new * heads * dim, f64::NAN);
        }
        Ok(Tensor { shape: vec![step.dims().s as usize, heads, dim], data })
    }

    /// A plane of a layer that has run in this step: all rows of its sequences.
    fn whole(
        &self,
        layer: u32,
        plane: &str,
        step: &StepShape,
        ty: &Type,
    ) -> Result<Tensor, String> {
        let row = ty.state()?;
        let (heads, dim) = (row.heads() as usize, row.dim() as usize);
        let stored = self.0.get(&(Some(layer), plane.to_owned()));
        let stored = stored.ok_or_else(|| format!("layer {layer} has written no `{plane}`"))?;
        let mut data = Vec::new();
        for (i, seq) in step.seqs.iter().enumerate() {
            let rows = stored.get(i).and_then(|rows| rows.get(..seq.context * heads * dim));
            data.extend(
                rows.ok_or_else(|| format!("sequence {i} holds fewer rows than its context"))?,
            );
        }
        Ok(Tensor { shape: vec![step.dims().s as usize, heads, dim], data })
    }

    fn store(
        &mut self,
        layer: Option<u32>,
        plane: &str,
        (step, ty): (&StepShape, &StateType),
        value: &Tensor,
    ) {
        let width: usize = value.shape[1..].iter().product();
        let mut at = 0;
        let rows = step.seqs.iter().map(|s| {
            let rows = if ty.is_slot() { 1 } else { s.context };
            let part = value.data[at..at + rows * width].to_vec();
            at += rows * width;
            part
        });
        self.0.insert((layer, plane.to_owned()), rows.collect());
    }
}

/// The shape of what a step's sequences have of a slot.
pub fn slot_shape(ty: &StateType, step: &StepShape) -> Vec<usize> {
    let own = ty.shape.iter().map(|n| *n as usize);
    [step.seqs.len()].into_iter().chain(own).collect()
}

/// Rounds every element to the type's element type, to nearest even, as a conversion that does not
/// saturate does: what is too large becomes infinite, or NaN in `f8e4m3`.
pub fn round(t: &mut Tensor, ty: &Type) {
    let Ok(ty) = ty.tensor() else { return };
    if ty.encoding.is_some() {
        return; // its values are what codes stand for
    }
    // Stored mantissa bits, smallest normal exponent, largest finite value, what lies beyond.
    let (bits, min_exponent, max, over) = match ty.dtype {
        DType::F32 => (23, -126, f64::from(f32::MAX), f64::INFINITY),
        DType::F16 => (10, -14, 65504.0, f64::INFINITY),
        DType::Bf16 => (7, -126, bf16::MAX.to_f64(), f64::INFINITY),
        DType::F8e4m3 => (3, -6, 448.0, f64::NAN),
        DType::F8e5m2 => (2, -14, 57344.0, f64::INFINITY),
        _ => return,
    };
    for v in t.data.iter_mut().filter(|v| v.is_finite()) {
        let exponent = ((v.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        let step = 2f64.powi(exponent.max(min_exponent) - bits);
        let rounded = (*v / step).round_ties_even() * step;
        *v = if rounded.abs() > max { over.copysign(*v) } else { rounded };
    }
}
