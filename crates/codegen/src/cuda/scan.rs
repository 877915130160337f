//! What templates see of a launch that runs a recurrence, as `scan`.

use infernum_ir::recurrence::{Loop, Program, Stride, Term};
use infernum_ir::{Attr, DType, Instance, NodeKind, OpCall, OpSet, Recurrence, TensorType, Type};
use minijinja::context;
use minijinja::value::Value as Jinja;

use super::c_expr;
use crate::Launch;

/// What a thread's elements of the state are called in C.
const STATE: &str = "own";
/// Elements that a block may bring to shared memory for one token.
const STAGED: usize = 1280;

/// How an input is read in one of the loops.
#[derive(Clone, Copy)]
struct Walk<'a> {
    axes: &'a [usize],
    strides: &'a [Stride],
}

impl Walk<'_> {
    fn each(&self) -> impl Iterator<Item = (usize, Stride)> {
        self.axes.iter().copied().zip(self.strides.iter().copied()).filter(|(_, s)| s.step > 0)
    }
}

/// A launch's recurrence.
pub(super) struct Scan<'a> {
    body: Recurrence,
    program: Program,
    state: DType,
    /// The names of its operands that are inputs.
    operands: Vec<&'a str>,
}

impl<'a> Scan<'a> {
    /// That of a launch, if it has one.
    pub(super) fn of(launch: &'a Launch) -> Option<Scan<'a>> {
        let body = recurrence(launch.attrs.iter().map(|(_, attr)| attr))?;
        let given = launch.named_values().take(launch.operands.len());
        let given: Vec<_> = given.filter_map(|(name, v)| Some((name, &v?.ty))).collect();
        Scan::new(body, &given)
    }

    /// That of a launch of a fused op whose body is a recurrence, in the names of the op's operands.
    pub(super) fn within(launch: &'a Launch, ops: &OpSet) -> Option<Scan<'a>> {
        let op = ops.find(&launch.op).ok().filter(|op| op.fused.is_some())?;
        let types: Vec<Option<&Type>> =
            launch.operands.iter().map(|v| v.as_ref().map(|v| &v.ty)).collect();
        let attrs: Vec<Attr> = launch.attrs.iter().map(|(_, attr)| attr.clone()).collect();
        let instance = Instance::new(&OpCall { op, operands: &types, attrs: &attrs }).ok()?;
        let calls = instance.graph.nodes().filter_map(|(index, node)| match &node.kind {
            NodeKind::Op { attrs, .. } => Some((index, attrs)),
            NodeKind::Param(_) => None,
        });
        let [(index, attrs)] = calls.collect::<Vec<_>>()[..] else { return None };
        let given = instance.graph.operands(index).into_iter().flatten().map(|v| {
            let i = instance.params.iter().position(|p| *p == Some(v))?;
            Some((launch.names[i].as_str(), types[i]?))
        });
        Scan::new(recurrence(attrs.iter())?, &given.collect::<Option<Vec<_>>>()?)
    }

    /// Of operands, the first of which is the state.
    fn new(body: &Recurrence, operands: &[(&'a str, &Type)]) -> Option<Scan<'a>> {
        let [(_, state), inputs @ ..] = operands else { return None };
        let state = state.state().ok()?;
        let types: Vec<&TensorType> =
            inputs.iter().map(|(_, ty)| ty.tensor().ok()).collect::<Option<_>>()?;
        Some(Scan {
            program: body.program(&state.shape, &types).ok()?,
            body: body.clone(),
            state: state.dtype,
            operands: inputs.iter().map(|(name, _)| *name).collect(),
        })
    }

    /// Elements along the axis that is summed over; 1 if none is.
    pub(super) fn depth(&self) -> usize {
        self.program.summed.map_or(1, |axis| self.program.sizes[axis])
    }

    /// Places along all other axes together.
    pub(super) fn columns(&self) -> usize {
        self.program.state() / self.depth()
    }

    fn is_summed(&self, axis: usize) -> bool {
        self.program.summed == Some(axis)
    }

    /// Whether a value of these axes differs along a column, as all do where nothing is summed: a column is
    /// one element then.
    fn is_deep(&self, axes: &[usize]) -> bool {
        self.program.summed.is_none_or(|summed| axes.contains(&summed))
    }

    /// The place along an axis, in C.
    fn place(&self, axis: usize) -> String {
        if self.is_summed(axis) {
            "depth".to_owned()
        } else {
            format!("i_{}", self.body.axes()[axis])
        }
    }

    /// How far into a value of these strides an element is, in C.
    fn at(&self, axes: &[usize], strides: &[Stride]) -> String {
        let terms = axes.iter().zip(strides).filter(|(_, s)| s.step > 0).map(|(axis, s)| {
            let place = self.place(*axis);
            let place = if s.share > 1 { format!("{place} / {}", s.share) } else { place };
            if s.step > 1 { format!("{place} * {}", s.step) } else { place }
        });
        let terms: Vec<String> = terms.collect();
        if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }
    }

    /// The axes that are not summed over, outermost first.
    fn independent(&self) -> Vec<usize> {
        (0..self.program.sizes.len()).filter(|a| !self.is_summed(*a)).collect()
    }

    /// Columns from one place along an independent axis to the next.
    fn columns_of(&self, axis: usize) -> usize {
        let independent = self.independent();
        let inside = independent.iter().skip_while(|a| **a != axis).skip(1);
        inside.map(|a| self.program.sizes[*a]).product()
    }

    /// So many columns side by side, from a multiple of that on, read the same element of an input; 0 if all do.
    fn grain(&self, walk: Walk) -> usize {
        let over = walk.each().filter(|(axis, _)| !self.is_summed(*axis));
        over.fold(0, |so_far, (axis, s)| gcd(so_far, self.columns_of(axis) * s.share))
    }

    /// So many columns, from a multiple of that on, read elements of an input that lie side by side as they do; 0 if none.
    fn inner(&self, walk: Walk) -> usize {
        let beside = |(axis, s): &(usize, Stride)| {
            !self.is_summed(*axis) && self.columns_of(*axis) == 1 && s.share == 1 && s.step == 1
        };
        walk.each().find(beside).map_or(0, |(axis, _)| self.program.sizes[axis])
    }

    /// From one element along a column to the next, in elements of an input.
    fn depth_step(&self, walk: Walk) -> usize {
        walk.each()
            .find(|(axis, s)| self.is_summed(*axis) && s.share == 1)
            .map_or(0, |(_, s)| s.step)
    }

    /// The strides of a value whose axes are in this order, of the state's sizes.
    fn row_major(&self, axes: &[usize]) -> Vec<Stride> {
        let inside = |i: usize| axes[i + 1..].iter().map(|a| self.program.sizes[*a]).product();
        (0..axes.len()).map(|i| Stride { share: 1, step: inside(i) }).collect()
    }

    /// What a value is called in C; of one that has the summed axis, its element.
    fn term(&self, term: Term) -> String {
        match term {
            Term::State => format!("{STATE}[j]"),
            Term::Input(i) => {
                let input = &self.body.inputs()[i];
                self.element(format!("in_{}", input.name), &input.axes)
            }
            Term::Value(i) => {
                let to = self.made(i);
                self.element(format!("v_{}", to.name), &to.axes)
            }
        }
    }

    fn element(&self, name: String, axes: &[usize]) -> String {
        if self.is_deep(axes) { format!("{name}[j]") } else { name }
    }

    fn made(&self, value: usize) -> &infernum_ir::recurrence::Named {
        let of = |l: &&(&Loop, _)| l.0.to.0 == Term::Value(value);
        let all: Vec<_> = self.program.loops.iter().zip(self.body.body()).collect();
        all.iter().find(of).map_or(self.body.result(), |(_, s)| &s.to)
    }

    /// What a block of so many columns reads of each input for one token, where that is the same for all of them or lies side by
    /// side: where it stands in the block's shared memory, and how much it is. What lies along the depth comes first, so that
    /// four elements of it are aligned.
    fn staged(&self, columns: usize) -> Vec<Option<(usize, usize)>> {
        let inputs = self.body.inputs();
        let span = |i: usize| {
            let walk = self.walk(i)?;
            let alike = self.grain(walk).is_multiple_of(columns);
            let beside = self.inner(walk) > 0 && self.inner(walk).is_multiple_of(columns);
            match self.program.summed.is_some() && self.is_deep(&inputs[i].axes) {
                true => (alike && self.depth_step(walk) == 1).then(|| self.depth()),
                false if alike => Some(1),
                false => beside.then_some(columns),
            }
        };
        let mut places = vec![None; inputs.len()];
        let mut width = 0;
        for along_depth in [true, false] {
            for (i, input) in inputs.iter().enumerate() {
                let is_here = self.program.inputs[i].per_token
                    && self.is_deep(&input.axes) == along_depth
                    && self.columns().is_multiple_of(columns);
                if let Some(span) = span(i).filter(|s| is_here && width + s <= STAGED) {
                    places[i] = Some((width, span));
                    width += span;
                }
            }
        }
        places
    }

    /// How an input is read where it is read first.
    fn walk(&self, input: usize) -> Option<Walk<'_>> {
        self.program.loops.iter().find_map(|l| {
            let (_, strides) = l.args.iter().find(|(term, _)| *term == Term::Input(input))?;
            Some(Walk { axes: &l.axes, strides })
        })
    }

    /// All of it, for a template's text, whose blocks have so many columns.
    pub(super) fn described(&self, columns: usize) -> Jinja {
        let axes = self.independent().into_iter().map(|axis| {
            context! { name => self.place(axis), step => self.columns_of(axis), size => self.program.sizes[axis] }
        });
        let staged = self.staged(columns);
        let inputs = self.body.inputs().iter().enumerate().map(|(i, input)| {
            let shape = self.program.inputs[i];
            let at = self.walk(i).map(|w| self.at(w.axes, w.strides));
            context! {
                name => format!("in_{}", input.name), operand => self.operands[i], per_token => shape.per_token,
                elements => shape.elements, deep => self.is_deep(&input.axes),
                at => at.unwrap_or_else(|| "0".to_owned()),
                staged => staged[i].map(|(at, span)| context! { at, span }),
            }
        });
        let body = self.program.loops.iter().zip(self.body.body()).map(|(work, statement)| {
            let args: Vec<String> = work.args.iter().map(|(term, _)| self.term(*term)).collect();
            let is_state = work.to.0 == Term::State;
            let name = if is_state { STATE.to_owned() } else { format!("v_{}", statement.to.name) };
            context! {
                name, is_state, sum => work.sum, deep => self.is_deep(&statement.to.axes),
                value => c_expr::c_text(&work.value, &args),
            }
        });
        let result = self.body.result();
        let all: Vec<usize> = (0..self.program.sizes.len()).collect();
        context! {
            columns => self.columns(),
            depth => self.depth(),
            sums => self.program.summed.is_some(),
            inner_is_summed => self.program.summed == Some(self.program.sizes.len() - 1),
            axes => axes.collect::<Vec<_>>(),
            state => STATE,
            state_is_f32 => self.state == DType::F32,
            state_at => self.at(&all, &self.row_major(&all)),
            inputs => inputs.collect::<Vec<_>>(),
            staged => staged.iter().flatten().map(|(_, span)| span).sum::<usize>(),
            body => body.collect::<Vec<_>>(),
            result => context! {
                name => format!("v_{}", result.name), deep => self.is_deep(&result.axes),
                elements => self.program.values[self.program.result],
                at => self.at(&result.axes, &self.row_major(&result.axes)),
            },
        }
    }
}

/// The attribute that is a recurrence.
fn recurrence<'a>(mut attrs: impl Iterator<Item = &'a Attr>) -> Option<&'a Recurrence> {
    attrs.find_map(|attr| if let Attr::Recurrence(body) = attr { Some(body) } else { None })
}

/// The greatest common divisor; that of 0 and a number is the number.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
