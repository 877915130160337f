//! A recurrence for operands of known shapes: loops.

use super::{Named, Recurrence};
use crate::expr::ScalarFn;
use crate::{Dim, Sym, TensorType};

/// Elements of a state at most.
const MAX_STATE: u64 = 1 << 32;

/// A recurrence for operands of known shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Sizes of the state's axes.
    pub sizes: Vec<usize>,
    /// Of each input: elements a token, or of all where it does not depend on the token.
    pub inputs: Vec<InputShape>,
    /// Elements of what statements make beside the state, in order; one of them is the result.
    pub values: Vec<usize>,
    /// Which of `values` the result is.
    pub result: usize,
    /// The axis that is summed over.
    pub summed: Option<usize>,
    /// What is computed for a token, in order.
    pub loops: Vec<Loop>,
}

/// An input's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputShape {
    /// How many: of a token, if it is one's.
    pub elements: usize,
    /// Whether each token has its own.
    pub per_token: bool,
}

/// One statement: a loop over `axes`, which are in the order of the state's.
#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    /// What is computed for each element, over `args`.
    pub value: ScalarFn,
    /// What the expression's arguments are.
    pub args: Vec<(Term, Vec<Stride>)>,
    /// The axes that it loops over.
    pub axes: Vec<usize>,
    /// What is made, and where each element of the loop goes; several to one place are added up.
    pub to: (Term, Vec<Stride>),
    /// Whether they are.
    pub sum: bool,
}

/// A value of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    /// The state: before the statement that makes the next one, and after it.
    State,
    /// One of the inputs.
    Input(usize),
    /// One of [`Program::values`].
    Value(usize),
}

/// How far an element is from the first, by its place along an axis: `place / share * step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// How many neighbours share an element.
    pub share: usize,
    /// Elements from one to the next; 0 along an axis that a value lacks.
    pub step: usize,
}

impl Recurrence {
    /// The loops for a state of this shape and inputs of these types, `[T, ..]` or, where they do not depend
    /// on the token, `[..]`.
    pub fn program(&self, state: &[u64], inputs: &[&TensorType]) -> Result<Program, String> {
        let sizes: Vec<usize> = state.iter().map(|n| *n as usize).collect();
        if sizes.len() != self.axes.len() {
            let (expected, found) = (self.axes.len(), sizes.len());
            return Err(format!("expected a state of {expected} axes, found {found}"));
        }
        if state.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).is_none_or(|n| n > MAX_STATE) {
            return Err(format!(
                "expected a state of at most {MAX_STATE} elements, found {state:?}"
            ));
        }
        if inputs.len() != self.inputs.len() {
            let (expected, found) = (self.inputs.len(), inputs.len());
            return Err(format!("expected {expected} inputs, found {found}"));
        }
        let shapes: Vec<Shape> = self
            .inputs
            .iter()
            .zip(inputs)
            .map(|(named, ty)| self.shape(named, ty, &sizes))
            .collect::<Result<_, String>>()?;
        let made: Vec<&Named> = self.body.iter().map(|s| &s.to).collect();
        let values: Vec<&Named> = made.iter().copied().filter(|n| n.name != self.state).collect();
        let place = |name: &str| {
            if name == self.state {
                return Some((Term::State, (0..sizes.len()).collect(), sizes.clone()));
            }
            if let Some(i) = self.inputs.iter().position(|n| n.name == name) {
                return Some((Term::Input(i), self.inputs[i].axes.clone(), shapes[i].dims.clone()));
            }
            let i = values.iter().position(|n| n.name == name)?;
            let dims = values[i].axes.iter().map(|a| sizes[*a]).collect();
            Some((Term::Value(i), values[i].axes.clone(), dims))
        };
        let mut loops = Vec::new();
        for statement in &self.body {
            let mut names: Vec<&str> = Vec::new();
            statement.value.names(&mut |n| {
                if !names.contains(&n) {
                    names.push(n);
                }
            });
            let mut axes = self.axes_of(&statement.value);
            axes.extend(&statement.to.axes);
            axes.sort_unstable();
            axes.dedup();
            let term = |name: &str| {
                let (term, own, dims) = place(name)?;
                Some((term, strides(&axes, &own, &dims, &sizes)))
            };
            let args = names.iter().map(|name| {
                term(name).ok_or_else(|| format!("`{name}` is neither a value nor a parameter"))
            });
            let args = args.collect::<Result<_, String>>()?;
            let to = term(&statement.to.name).ok_or("a statement that makes nothing")?;
            let value = ScalarFn::compile(&statement.value, &names).map_err(|e| e.to_string())?;
            loops.push(Loop { value, args, axes, to, sum: statement.sum });
        }
        let elements = |n: &&Named| n.axes.iter().map(|a| sizes[*a]).product();
        let result = values.iter().position(|n| n.name == self.result.name);
        Ok(Program {
            inputs: shapes.iter().map(|s| s.own).collect(),
            values: values.iter().map(elements).collect(),
            result: result.ok_or("the result is the state")?,
            summed: self.summed(),
            loops,
            sizes,
        })
    }

    fn shape(&self, named: &Named, ty: &TensorType, sizes: &[usize]) -> Result<Shape, String> {
        let per_token = ty.shape.first() == Some(&Dim::sym(Sym::T));
        let shape = &ty.shape[usize::from(per_token)..];
        let dims: Option<Vec<usize>> =
            shape.iter().map(|d| d.as_const().map(|n| n as usize)).collect();
        let fits = |dims: &[usize]| {
            let mut pairs = dims.iter().zip(&named.axes);
            dims.len() == named.axes.len()
                && pairs.all(|(d, a)| *d > 0 && sizes[*a].is_multiple_of(*d))
        };
        let dims = dims.filter(|d| fits(d) && ty.dtype.is_float() && ty.encoding.is_none());
        let Some(dims) = dims else {
            let size = |a: &usize| format!("{} = {}", self.axes[*a], sizes[*a]);
            let axes: Vec<String> = named.axes.iter().map(size).collect();
            let (name, axes) = (&named.name, axes.join(", "));
            return Err(format!(
                "`{name}`: expected floats [{axes}], each or a whole part of it, with or without a first T, found {ty}"
            ));
        };
        let own = InputShape { elements: dims.iter().product(), per_token };
        Ok(Shape { dims, own })
    }
}

struct Shape {
    dims: Vec<usize>,
    own: InputShape,
}

/// Of a row-major value of axes `own` and dimensions `dims`, in a loop over `axes`.
fn strides(axes: &[usize], own: &[usize], dims: &[usize], sizes: &[usize]) -> Vec<Stride> {
    let along = |axis: &usize| match own.iter().position(|a| a == axis) {
        None => Stride { share: 1, step: 0 },
        Some(i) => Stride {
            share: (sizes[*axis] / dims[i].max(1)).max(1),
            step: dims[i + 1..].iter().product(),
        },
    };
    axes.iter().map(along).collect()
}

impl Program {
    /// Elements of the state.
    pub fn state(&self) -> usize {
        self.sizes.iter().product()
    }

    /// What one token does, in `f64`: `state` becomes the next one, and what is yielded is the result.
    pub fn token(&self, state: &mut [f64], inputs: &[&[f64]]) -> Vec<f64> {
        let mut values: Vec<Vec<f64>> = self.values.iter().map(|n| vec![0.0; *n]).collect();
        for work in &self.loops {
            let sizes: Vec<usize> = work.axes.iter().map(|a| self.sizes[*a]).collect();
            let mut places = vec![0; sizes.len()];
            let mut args = vec![0.0; work.args.len()];
            // All of the old state is read before any of the next is there.
            let mut made: Vec<(usize, f64)> = Vec::new();
            for _ in 0..sizes.iter().product() {
                let at = |strides: &[Stride]| -> usize {
                    places.iter().zip(strides).map(|(p, s)| p / s.share * s.step).sum()
                };
                for (arg, (term, strides)) in args.iter_mut().zip(&work.args) {
                    let from = match term {
                        Term::State => &*state,
                        Term::Input(i) => inputs[*i],
                        Term::Value(i) => &values[*i],
                    };
                    *arg = from[at(strides)];
                }
                made.push((at(&work.to.1), work.value.eval(&args)));
                for (place, size) in places.iter_mut().zip(&sizes).rev() {
                    *place = (*place + 1) % size;
                    if *place != 0 {
                        break;
                    }
                }
            }
            let to = match work.to.0 {
                Term::State => &mut *state,
                Term::Value(i) => &mut values[i],
                Term::Input(_) => continue,
            };
            for (at, value) in made {
                to[at] = if work.sum { to[at] + value } else { value };
            }
        }
        values.swap_remove(self.result)
    }
}
