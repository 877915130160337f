//! A plan may come from a file: whatever an executor indexes, sizes or calls by it is checked before.
//!
//! [`Plan::check`] needs nothing but the plan. [`Plan::read`] checks what comes from a file further:
//! that launches are calls of known ops which type. The text of kernels is code, and taken as it is.

mod launch;
mod weight;

use std::collections::BTreeMap;

use infernum_ir::{Dim, OpSet, StepInput, Sym, TensorType, Type};

use crate::buckets::{MAX_ARENA, covers};
use crate::plan::{Arg, Plan, Program, ProgramCall, VERSION, Value, Yields};
use crate::planner::aligned;

/// What a plan has at a place, and should not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct PlanFault {
    /// Where in the plan, as one would write it in JSON.
    pub place: String,
    /// What was expected and found.
    pub message: String,
    /// What kind of fault it is.
    pub kind: FaultKind,
}

/// What a reader of a plan can do about a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It is malformed, or of another version: it must be compiled again.
    Malformed,
    /// It calls an op of this name, which is none of those that it was read with.
    UnknownOp(String),
}

pub(crate) type Checked = Result<(), PlanFault>;

pub(crate) fn fault<T>(
    place: impl Into<String>,
    message: impl Into<String>,
) -> Result<T, PlanFault> {
    Err(PlanFault { place: place.into(), message: message.into(), kind: FaultKind::Malformed })
}

/// Tokens and sequences of a step: what tables of a step's inputs are sized by.
const MAX_TOKENS: u64 = 1 << 24;
/// Context rows, which kernels count in 32 bits with a sign, and pairs of tokens and rows.
pub(crate) const MAX_ROWS: u64 = i32::MAX as u64;
const MAX_PAIRS: u64 = 1 << 62;
/// The highest bit of a token marks one that is still to come.
const MAX_VOCABULARY: u64 = 1 << 31;
/// Elements of one row of the cache, or of a state of fixed size, and dimensions of such a state.
const MAX_CACHE_ROW: u64 = 1 << 32;
const MAX_SLOT_RANK: usize = 8;

impl Plan {
    /// Reads a plan in JSON, of an executor that has these ops.
    pub fn read(json: &[u8], ops: &OpSet) -> Result<Plan, PlanFault> {
        /// The version alone: what else a plan of another has is not known.
        #[derive(serde::Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |e: serde_json::Error| PlanFault {
            place: format!("line {}, column {}", e.line(), e.column()),
            message: e.to_string(),
            kind: FaultKind::Malformed,
        };
        let Versioned { version } = serde_json::from_slice(json).map_err(malformed)?;
        if version != VERSION {
            return fault("version", format!("expected {VERSION}, found {version}"));
        }
        let plan: Plan = serde_json::from_slice(json).map_err(malformed)?;
        plan.check()?;
        for program in plan.programs.iter().enumerate() {
            launch::ops_are_known(program, ops)?;
            launch::types(program, plan.token_rows, ops)?;
        }
        Ok(plan)
    }

    /// Checks every index, place and size.
    pub fn check(&self) -> Checked {
        self.check_sizes()?;
        for (i, weight) in self.weights.iter().enumerate() {
            weight::check(&format!("weights[{i}]"), weight, &self.weights)?;
        }
        if let Some((i, _, ty)) = self.banks().find(|(_, _, ty)| self.bank_rows(ty).is_none()) {
            let adapters = self.adapters;
            return fault(
                format!("weights[{i}]"),
                format!(
                    "expected a bank of as many rows for each of {adapters} adapters, found {ty}"
                ),
            );
        }
        for (i, state) in self.states.iter().enumerate() {
            let (place, ty) = (format!("states[{i}]"), &state.ty);
            let rank = if ty.is_slot() { 1..=MAX_SLOT_RANK } else { 2..=2 };
            let is_sized = (1..=MAX_CACHE_ROW).contains(&ty.elements());
            let has_bytes = ty.dtype.bytes(ty.elements()).is_some();
            if !(is_sized && has_bytes && rank.contains(&ty.shape.len())) {
                return fault(place, format!("expected 1 to {MAX_CACHE_ROW} elements, found {ty}"));
            }
        }
        for (i, program) in self.programs.iter().enumerate() {
            self.check_program(&format!("programs[{i}] `{}`", program.name), program)?;
        }
        let bound: Vec<Bound<'_>> =
            self.programs.iter().map(Bound::of).collect::<Result<_, _>>()?;
        for (i, schedule) in self.schedules.iter().enumerate() {
            for (j, call) in schedule.calls.iter().enumerate() {
                self.check_call(&format!("schedules[{i}].calls[{j}]"), call, &bound)?;
            }
        }
        self.check_outputs()?;
        self.check_apart()?;
        covers(self).or_else(|e| fault("schedules", e.to_string()))
    }

    fn check_sizes(&self) -> Checked {
        let limits = self.limits;
        let sizes = [
            ("t", limits.t, MAX_TOKENS),
            ("b", limits.b, MAX_TOKENS),
            ("seqs", limits.seqs, MAX_TOKENS),
            ("s", limits.s, MAX_ROWS),
            ("pairs", limits.pairs, MAX_PAIRS),
        ];
        for (name, found, most) in sizes {
            if found == 0 || found > most {
                return fault(
                    format!("limits.{name}"),
                    format!("expected 1 to {most}, found {found}"),
                );
            }
        }
        let regions = || self.programs.iter().flat_map(|p| &p.buffers);
        let end = regions().map(|r| aligned(r.offset.saturating_add(r.bytes))).max().unwrap_or(0);
        if self.arena_bytes > end.min(MAX_ARENA) {
            let found = self.arena_bytes;
            return fault(
                "arena_bytes",
                format!("expected at most {}, found {found}", end.min(MAX_ARENA)),
            );
        }
        for (i, kernel) in self.kernels.iter().enumerate() {
            if kernel.scratch > MAX_ARENA {
                let found = kernel.scratch;
                return fault(
                    format!("kernels[{i}].scratch"),
                    format!("expected at most {MAX_ARENA} bytes, found {found}"),
                );
            }
        }
        Ok(())
    }

    fn check_program(&self, place: &str, program: &Program) -> Checked {
        for (i, region) in program.buffers.iter().enumerate() {
            let end = region.offset.checked_add(region.bytes);
            if !region.offset.is_multiple_of(64) || end.is_none_or(|end| end > self.arena_bytes) {
                return fault(
                    format!("{place}.buffers[{i}]"),
                    format!(
                        "expected a multiple of 64 within {} bytes, found {region:?}",
                        self.arena_bytes
                    ),
                );
            }
        }
        for (i, launch) in program.launches.iter().enumerate() {
            let place = format!("{place}.launches[{i}] `%{}`", launch.name);
            self.check_launch(&place, program, launch)?;
        }
        for (i, result) in program.results.iter().enumerate() {
            let (arg, ty) = (Arg::Buffer(result.buffer), Type::Tensor(result.ty.clone()));
            self.check_value(&format!("{place}.results[{i}]"), program, &Value { arg, ty })?;
        }
        Ok(())
    }

    /// That a value's type is one that can lie there.
    pub(crate) fn check_value(&self, place: &str, program: &Program, value: &Value) -> Checked {
        let Value { arg, ty } = value;
        let empty = match ty {
            Type::Tensor(t) => t.shape.iter().any(|d| is_empty(*d)),
            Type::State(s) => s.elements() == 0,
        };
        if empty {
            return fault(place, format!("expected dimensions of at least 1, found {ty}"));
        }
        match (arg, ty) {
            (Arg::Buffer(b), Type::Tensor(t)) => {
                let Some(region) = program.buffers.get(*b as usize) else {
                    return fault(place, format!("there is no buffer {b}"));
                };
                let bytes = t.bytes(&self.limits);
                if bytes > region.bytes {
                    return fault(
                        place,
                        format!("{ty} takes {bytes} bytes, buffer {b} has {}", region.bytes),
                    );
                }
                Ok(())
            }
            (Arg::Weight(_), Type::Tensor(t)) if t.constant => Ok(()),
            (Arg::State(_), Type::State(_)) => Ok(()),
            (Arg::Step(input), Type::Tensor(t)) if self.input(*input).as_ref() == Some(t) => Ok(()),
            _ => fault(place, format!("{arg:?} cannot be {ty}")),
        }
    }

    /// The type of a step's input.
    fn input(&self, input: StepInput) -> Option<TensorType> {
        let by_rows = matches!(input, StepInput::OutputRows | StepInput::Picks);
        let rows = if by_rows { self.output_rows? } else { Sym::T };
        Some(input.ty(rows))
    }

    fn check_call(&self, place: &str, call: &ProgramCall, bound: &[Bound<'_>]) -> Checked {
        let Some(needs) = bound.get(call.program as usize) else {
            return fault(place, format!("there is no program {}", call.program));
        };
        let weight = |slot: u32| {
            let index = *call.weights.get(slot as usize)?;
            self.weights.get(index as usize).map(|w| Type::Tensor(w.ty.clone()))
        };
        let state = |slot: u32| {
            let index = *call.states.get(slot as usize)?;
            self.states.get(index as usize).map(|s| Type::State(s.ty.clone()))
        };
        for (arg, ty) in &needs.0 {
            let found = match arg {
                Arg::Weight(slot) => weight(*slot),
                Arg::State(slot) => state(*slot),
                Arg::Buffer(_) | Arg::Step(_) => continue,
            };
            if found.as_ref() != Some(*ty) {
                let found = found.map_or_else(|| "nothing".to_owned(), |ty| ty.to_string());
                return fault(place, format!("expected {ty} for {arg:?}, found {found}"));
            }
        }
        let known = |all: &[u32], n: usize| all.iter().all(|i| (*i as usize) < n);
        if known(&call.weights, self.weights.len()) && known(&call.states, self.states.len()) {
            Ok(())
        } else {
            fault(place, "it names a weight or a state that is not there")
        }
    }

    /// All steps leave the same, and tokens fit where they are kept.
    fn check_outputs(&self) -> Checked {
        let types = |results: &[crate::Carried]| -> Vec<TensorType> {
            results.iter().map(|c| c.ty.clone()).collect()
        };
        let first = types(self.outputs());
        for i in 0..self.schedules.len() {
            // A step that is greedy may leave tokens where others leave logits, too.
            let greedy = self.yields(i) == Some(Yields::Tokens) && self.picks();
            let expected = if greedy { first.get(1..2).unwrap_or_default() } else { &first[..] };
            if types(self.outputs_of(i)) != expected {
                return fault(
                    format!("schedules[{i}]"),
                    "it leaves another result than the first one",
                );
            }
        }
        match self.vocabulary().max(self.token_rows.unwrap_or(0)) {
            0..=MAX_VOCABULARY => Ok(()),
            n => {
                fault("token_rows", format!("expected at most {MAX_VOCABULARY} tokens, found {n}"))
            }
        }
    }
}

fn is_empty(dim: Dim) -> bool {
    matches!(dim, Dim::Const(0) | Dim::Sym { times: 0, .. })
}

/// The weights and planes that a program wants of its calls, with their types.
struct Bound<'a>(BTreeMap<Arg, &'a Type>);

impl<'a> Bound<'a> {
    fn of(program: &'a Program) -> Result<Bound<'a>, PlanFault> {
        let mut all = BTreeMap::new();
        for launch in &program.launches {
            let values = launch.operands.iter().flatten().chain(&launch.results);
            for value in values.filter(|v| matches!(v.arg, Arg::Weight(_) | Arg::State(_))) {
                let known = *all.entry(value.arg).or_insert(&value.ty);
                if *known != value.ty {
                    let place = format!("program `{}`, `%{}`", program.name, launch.name);
                    return fault(
                        place,
                        format!("{:?} is {known} elsewhere, here {}", value.arg, value.ty),
                    );
                }
            }
        }
        Ok(Bound(all))
    }
}
