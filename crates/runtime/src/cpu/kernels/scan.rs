//! `scan`: any recurrence, token by token. Parts of the state that know nothing of each other are shared among threads.

use infernum_codegen::{Arg, Value};
use infernum_ir::recurrence::{Loop, Program, Stride, Term};
use infernum_ir::{Attr, TensorType};

use super::super::simd;
use super::pointwise::{BLOCK, eval};
use super::{Args, Float, Kernel, Operand, Site, act_mut, float, parallel};

struct Scan {
    program: Program,
    state: Float,
    inputs: Vec<Float>,
    result: Float,
    /// Whether the state falls into parts along its first axis, which is the result's first, too.
    splits: bool,
}

/// Elements of the state that a part has at least.
const PART: usize = 1 << 12;

pub(super) fn scan(site: &Site<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let Attr::Recurrence(body) = site.attr("body") else {
        return Err("expected a recurrence".to_owned());
    };
    let given: Vec<&Value> = site.launch.operands.iter().skip(1).flatten().collect();
    let types: Vec<&TensorType> =
        given.iter().map(|v| v.ty.tensor()).collect::<Result<_, String>>()?;
    let state = site.launch.operands[0].as_ref().ok_or("no state")?.ty.state()?;
    let program = body.program(&state.shape, &types)?;
    let is_readable = |v: &&Value| matches!(v.arg, Arg::Buffer(_) | Arg::Weight(_));
    let floats = types.iter().map(|t| float(t.dtype)).collect::<Option<Vec<Float>>>();
    let (Some(inputs), Some(state), Some(result), true) =
        (floats, float(state.dtype), site.result(1), given.iter().all(is_readable))
    else {
        return Err("expected floats".to_owned());
    };
    let outermost = |axes: &[usize]| axes.first() == Some(&0) || !axes.contains(&0);
    let splits = program.summed != Some(0)
        && body.result().axes.first() == Some(&0)
        && body.body().iter().all(|s| outermost(&s.to.axes));
    Ok(Some(Box::new(Scan { program, state, inputs, result, splits })))
}

/// A part of the state: places `start..end` along its first axis.
#[derive(Clone, Copy)]
struct Part {
    start: usize,
    end: usize,
}

impl Kernel for Scan {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (isa, step, program) = (args.isa, args.step, &self.program);
        let (out, mut plane) = (args.take(1)?, args.plane(0)?);
        let mut inputs = Vec::new();
        for (i, dtype) in self.inputs.iter().enumerate() {
            inputs.push(match args.operands[i + 1] {
                Some(Operand::Weight(w, _)) => {
                    Elements::Wide(w.values.as_deref().ok_or("a constant was not widened")?)
                }
                _ => Elements::Stored(*dtype, args.view(i + 1)?.bytes),
            });
        }
        let (size, row) = (program.state(), program.values[program.result]);
        let along = program.sizes[0];
        // Work and memory of a place along the first axis.
        let (state_each, row_each) = (size / along, if self.splits { row / along } else { row });
        let each = if self.splits { PART.div_ceil(state_each).min(along) } else { along };
        // Of words, so that elements are aligned.
        let mut stored = vec![0u64; (size * self.state.size()).div_ceil(8)];
        let stored = &mut bytemuck::cast_slice_mut(&mut stored)[..size * self.state.size()];
        let mut state = vec![0.0f32; size];
        let mut token = 0;
        for (seq, [from, to]) in step.step.seqs.iter().zip(step.slot_blocks()) {
            plane.read_slot(from, step.block_size(), stored);
            simd::widen_bytes(isa, self.state, stored, &mut state);
            let tokens = token..token + seq.new;
            let mut rows = vec![0.0f32; seq.new * row];
            parallel::rows_of_two(
                (bytemuck::cast_slice_mut(&mut state), 4 * each * state_each),
                (bytemuck::cast_slice_mut(&mut rows), 4 * each * row_each * seq.new),
                8 * each * state_each * seq.new,
                |part, state, rows| {
                    let start = part * each;
                    let part = Part { start, end: along.min(start + each) };
                    let mut run = Run::new(program, part, isa);
                    let (state, rows) =
                        (bytemuck::cast_slice_mut(state), bytemuck::cast_slice_mut(rows));
                    let width = rows.len() / seq.new;
                    for (t, row) in tokens.clone().zip(rows.chunks_exact_mut(width.max(1))) {
                        run.token(state, &inputs, t);
                        row.copy_from_slice(&run.values[program.result]);
                    }
                },
            );
            simd::narrow(isa, &state, act_mut(self.state, stored));
            plane.write_slot(to, step.block_size(), stored);
            // Parts lie one after another, with the tokens within.
            let width = each * row_each;
            for t in 0..seq.new {
                let to = &mut out[(token + t) * row * self.result.size()..];
                for start in (0..row).step_by(width.max(1)) {
                    let n = width.min(row - start);
                    let from = &rows[start * seq.new + t * n..][..n];
                    let to = &mut to[start * self.result.size()..][..n * self.result.size()];
                    simd::narrow(isa, from, act_mut(self.result, to));
                }
            }
            token += seq.new;
        }
        Ok(())
    }
}

/// An input.
#[derive(Clone, Copy)]
enum Elements<'a> {
    Wide(&'a [f32]),
    Stored(Float, &'a [u8]),
}

/// What one thread computes a part with.
struct Run<'a> {
    program: &'a Program,
    part: Part,
    isa: simd::Isa,
    /// Each input's elements for the token and the part, and the place of the first among all of its own.
    inputs: Vec<(usize, Vec<f32>)>,
    values: Vec<Vec<f32>>,
    registers: Vec<f32>,
}

impl<'a> Run<'a> {
    fn new(program: &'a Program, part: Part, isa: simd::Isa) -> Run<'a> {
        let registers = program.loops.iter().map(|l| l.args.len() + l.value.stack_depth());
        let registers = vec![0.0; BLOCK * registers.max().unwrap_or(0)];
        let along = program.sizes[0];
        // A value that has the first axis has it outermost, and the part's places of it.
        let values = program.loops.iter().filter_map(|l| match l.to.0 {
            Term::Value(i) => Some((i, l)),
            _ => None,
        });
        let mut made = vec![Vec::new(); program.values.len()];
        for (i, work) in values {
            let has_first = work.axes.first() == Some(&0) && work.to.1[0].step > 0;
            let all = program.values[i];
            made[i] =
                vec![0.0; if has_first { all / along * (part.end - part.start) } else { all }];
        }
        let inputs = vec![(0, Vec::new()); program.inputs.len()];
        Run { program, part, isa, inputs, values: made, registers }
    }

    fn token(&mut self, state: &mut [f32], inputs: &[Elements<'_>], token: usize) {
        for ((own, shape), (_, loaded)) in
            inputs.iter().zip(&self.program.inputs).zip(&mut self.inputs)
        {
            // What all tokens share is read once.
            if !shape.per_token && !loaded.is_empty() {
                continue;
            }
            let start = if shape.per_token { token * shape.elements } else { 0 };
            loaded.resize(shape.elements, 0.0);
            match own {
                Elements::Wide(x) => loaded.copy_from_slice(&x[start..start + shape.elements]),
                Elements::Stored(dtype, bytes) => {
                    let (start, n) = (start * dtype.size(), shape.elements * dtype.size());
                    simd::widen_bytes(self.isa, *dtype, &bytes[start..start + n], loaded);
                }
            }
        }
        for work in &self.program.loops {
            self.run(work, state);
        }
    }

    /// One statement, in blocks of what its loop counts through.
    fn run(&mut self, work: &Loop, state: &mut [f32]) {
        let Part { start, end } = self.part;
        let size = |axis: &usize| if *axis == 0 { end - start } else { self.program.sizes[*axis] };
        let sizes: Vec<usize> = work.axes.iter().map(size).collect();
        let total: usize = sizes.iter().product();
        if let (Term::Value(i), true) = (work.to.0, work.sum) {
            self.values[i].fill(0.0);
        }
        let first = if work.axes.first() == Some(&0) { start } else { 0 };
        for from in (0..total).step_by(BLOCK) {
            let n = BLOCK.min(total - from);
            let (loaded, stack) = self.registers.split_at_mut(work.args.len() * BLOCK);
            for ((term, strides), to) in work.args.iter().zip(loaded.chunks_exact_mut(BLOCK)) {
                let (x, first): (&[f32], usize) = match term {
                    Term::State => (state, 0),
                    Term::Value(i) => (&self.values[*i], 0),
                    // Inputs are whole, whatever the part.
                    Term::Input(i) => (&self.inputs[*i].1, first),
                };
                spread(x, strides, (&sizes, first), from, &mut to[..n]);
            }
            eval(work.value.code(), loaded, stack, n);
            let to = match work.to.0 {
                Term::State => &mut *state,
                Term::Value(i) => &mut self.values[i],
                Term::Input(_) => return,
            };
            gather(&stack[..n], &work.to.1, &sizes, from, to, work.sum);
        }
    }
}

/// The rows of a loop's innermost axis that the elements `from..from + n` lie in: for each the first element,
/// how many, and where they lie in a value of these strides.
fn rows<'s>(
    strides: &'s [Stride],
    (sizes, first): (&'s [usize], usize),
    from: usize,
    n: usize,
) -> impl Iterator<Item = (usize, usize, usize)> + 's {
    let inner = sizes.last().copied().unwrap_or(1).max(1);
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == n {
            return None;
        }
        let (row, column) = ((from + at) / inner, (from + at) % inner);
        let count = (inner - column).min(n - at);
        let (mut rest, mut place) = (row, 0);
        for (axis, (size, stride)) in sizes.iter().zip(strides).enumerate().rev().skip(1) {
            let i = rest % size + if axis == 0 { first } else { 0 };
            place += i / stride.share * stride.step;
            rest /= size;
        }
        let found = (at, count, place);
        at += count;
        Some(found)
    })
}

/// The place of an element along a loop's innermost axis, in a value of such a stride.
fn along(column: usize, stride: Stride) -> usize {
    column / stride.share * stride.step
}

/// Fills `to` with a value's elements from `from` on, spread over the loop.
fn spread(x: &[f32], strides: &[Stride], sizes: (&[usize], usize), from: usize, to: &mut [f32]) {
    let Some(last) = strides.last().copied() else {
        to.fill(x[0]);
        return;
    };
    let inner = sizes.0.last().copied().unwrap_or(1).max(1);
    let first = if sizes.0.len() == 1 { sizes.1 } else { 0 };
    for (at, n, place) in rows(strides, sizes, from, to.len()) {
        let column = (from + at) % inner + first;
        let to = &mut to[at..at + n];
        match last {
            Stride { step: 0, .. } => to.fill(x[place]),
            Stride { step: 1, share: 1 } => to.copy_from_slice(&x[place + column..][..n]),
            _ => {
                for (i, v) in to.iter_mut().enumerate() {
                    *v = x[place + along(column + i, last)];
                }
            }
        }
    }
}

/// Puts the elements from `from` on where they belong, or adds them to what is there.
fn gather(
    values: &[f32],
    strides: &[Stride],
    sizes: &[usize],
    from: usize,
    to: &mut [f32],
    sum: bool,
) {
    let Some(last) = strides.last().copied() else {
        to[0] = values[0];
        return;
    };
    let inner = sizes.last().copied().unwrap_or(1).max(1);
    for (at, n, place) in rows(strides, (sizes, 0), from, values.len()) {
        let (column, values) = ((from + at) % inner, &values[at..at + n]);
        if last.step == 0 {
            to[place] += values.iter().sum::<f32>();
            continue;
        }
        for (i, value) in values.iter().enumerate() {
            let to = &mut to[place + along(column + i, last)];
            *to = if sum { *to + value } else { *value };
        }
    }
}
