//! The tensors of a checkpoint that a body declares: their names, renamed by the calls that lead to
//! them, their sizes, and their values where they are stored encoded.

use std::cell::Cell;

use infernum_ir::expr::Value;
use infernum_ir::{Attr, Dim, Op, Param, TensorType, Type, ValueId, WeightRef, nearest};

use super::StoredAs;
use super::body::{Builder, Frame, MAX_NAME};
use super::scope::{Scope, brief};
use crate::model::matches;
use crate::spec::{Argument, Entries, SpecCall, WeightDecl};

type Result<T> = std::result::Result<T, infernum_ir::SourceError>;

/// Longest name of a tensor in a checkpoint.
pub(super) const MAX_TENSOR_NAME: usize = 512;
/// Dimensions of a tensor, and tensors that may be stacked to one: each is looked up by name.
const MAX_RANK: usize = 8;
const MAX_STACK: u64 = 1 << 16;

/// A weight that was declared.
pub(super) enum Weight {
    /// It becomes a parameter when it is first used.
    Present(WeightRef, Vec<u64>),
    /// Its `when` is false.
    Absent,
}

/// What a family's checkpoints call what its blocks declare.
#[derive(Clone, Copy)]
pub(super) struct Names<'a> {
    /// Replaced in order.
    pub(super) always: &'a [(&'a str, &'a str)],
    /// Tried in order for a tensor that is not there.
    pub(super) also: &'a [(&'a str, &'a str)],
    /// Patterns of what is stored with its last two dimensions swapped.
    pub(super) transposed: &'a [&'a str],
}

impl Names<'_> {
    /// The name that checkpoints have.
    fn apply(self, mut name: String) -> String {
        for (from, to) in self.always {
            // Too long is refused; here it must only end.
            if name.len() > MAX_TENSOR_NAME {
                break;
            }
            if let Some(replaced) = replaced(&name, from, to) {
                name = replaced;
            }
        }
        name
    }

    /// The shape under which a tensor is stored, where that is not its own.
    fn swapped(self, name: &str, shape: &[u64]) -> Option<Vec<u64>> {
        let stored = self.transposed.iter().any(|pattern| matches(pattern, name));
        let mut shape = Some(shape).filter(|s| stored && s.len() >= 2)?.to_vec();
        let last = shape.len() - 1;
        shape.swap(last - 1, last);
        Some(shape)
    }

    /// Other names that it may have.
    fn others(self, name: &str) -> impl Iterator<Item = String> {
        self.also.iter().filter_map(move |(from, to)| replaced(name, from, to))
    }
}

/// `name` with `to` in place of its parts between dots that are `from`, where it has them: at their first place.
pub(crate) fn replaced(name: &str, from: &str, to: &str) -> Option<String> {
    let at = name.match_indices(from).map(|(at, _)| at).find(|&at| {
        let (before, after) = (&name[..at], &name[at + from.len()..]);
        let starts = before.is_empty() || before.ends_with('.');
        starts && (after.is_empty() || after.starts_with('.') || from.ends_with('.'))
    })?;
    Some(format!("{}{to}{}", &name[..at], &name[at + from.len()..]))
}

/// What a call renames of its block's tensors.
pub(super) struct Rename<'a> {
    /// Put before the names of the block's tensors.
    pub(super) base: String,
    /// What the block calls it, or what begins with it and a dot.
    pub(super) from: &'a str,
    /// What the checkpoint calls it.
    pub(super) to: String,
    pub(super) used: Cell<bool>,
}

impl<'a> Builder<'a> {
    /// A name of tensors with the parameters in it filled in; `text` is a piece of a source.
    pub(super) fn filled(&self, scope: &Scope<'_>, text: &str) -> Result<String> {
        fill(scope, text, self.layer.is_some())
            .map_err(|(place, message)| self.cx.at(place, message))
    }

    /// Evaluates the declarations of a body's weights.
    pub(super) fn declare_weights(
        &self,
        frame: &mut Frame<'a>,
        decls: &'a Entries<'a, WeightDecl<'a>>,
    ) -> Result<()> {
        for (name, decl) in decls.iter() {
            let weight = if frame.scope.holds(name, decl.when)? {
                self.weight_ref(frame, name, decl)?
            } else {
                // That it is absent here is no mistake of who renames it.
                self.renamed(format!("{}{name}", frame.weight_prefix));
                Weight::Absent
            };
            frame.weights.insert(name, weight);
        }
        Ok(())
    }

    fn weight_ref(&self, frame: &Frame<'a>, name: &str, decl: &WeightDecl<'a>) -> Result<Weight> {
        let scope = &frame.scope;
        let tied = match decl.same_as {
            None => Value::Null,
            Some(arg) => scope.eval(arg)?,
        };
        let own = self.filled(scope, name)?;
        let full = match (tied, decl.same_as) {
            (Value::Str(other), Some(arg)) => fill(scope, &other, self.layer.is_some())
                .map_err(|(_, message)| self.cx.at_arg(arg, name, message))?,
            (Value::Null, _) | (_, None) => self.renamed(format!("{}{own}", frame.weight_prefix)),
            (v, Some(arg)) => {
                return Err(scope.unexpected(name, arg, "a tensor's name or null", &v));
            }
        };
        let full = self.names.apply(full);
        if full.len() > MAX_TENSOR_NAME {
            return Err(self.cx.at(name, "the name of this tensor is too long"));
        }
        self.cx.spend(name, 256 + full.len())?;
        let stack = decl.stack.map(|n| scope.eval_int(name, n)).transpose()?;
        if stack.is_some() != full.contains(EXPERT) {
            let message = match stack {
                Some(_) => {
                    "`stack` is of the tensors for each `{expert}`: expected it in their names"
                }
                None => "expected `stack`, which says how many tensors `{expert}` stands for",
            };
            return Err(self.cx.at(name, message));
        }
        if stack.is_some_and(|n| n > MAX_STACK) {
            let message = format!("`stack`: expected at most {MAX_STACK} tensors");
            return Err(self.cx.at(name, message));
        }
        if decl.shape.len() + usize::from(stack.is_some()) > MAX_RANK {
            let message = format!("a tensor has at most {MAX_RANK} dimensions");
            return Err(self.cx.at(name, message));
        }
        let mut shape: Vec<u64> = stack.into_iter().collect();
        for dim in &decl.shape {
            if scope.eval(*dim)? != Value::Null {
                shape.push(scope.eval_int(name, *dim)?);
            }
        }
        if shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).is_none_or(|n| n > 1 << 60) {
            let message = format!("{shape:?} is larger than a tensor can be");
            return Err(self.cx.at(name, message));
        }
        Ok(Weight::Present(self.stored(WeightRef { name: full, stack }, &shape), shape))
    }

    /// The weight under the first of its names that the checkpoint has; under its own where it has none.
    fn stored(&self, weight: WeightRef, shape: &[u64]) -> WeightRef {
        let there = |w: &WeightRef| self.found(w, shape).0.is_some();
        if self.names.also.is_empty() || there(&weight) {
            return weight;
        }
        let others: Vec<String> = self.names.others(&weight.name).collect();
        let named = |name| WeightRef { name, stack: weight.stack };
        others.into_iter().map(named).find(there).unwrap_or(weight)
    }

    /// How the checkpoint stores a weight, and its shape there where its last two dimensions are swapped: encoded ones
    /// are as a product reads them.
    fn found(&self, weight: &WeightRef, shape: &[u64]) -> (Option<StoredAs>, Option<Vec<u64>>) {
        let request = self.cx.request;
        let Some(swapped) = self.names.swapped(&weight.name, shape) else {
            return (request.stored_as(weight, self.layer, shape), None);
        };
        match request.stored_as(weight, self.layer, shape) {
            found @ Some(StoredAs::Encoded(_)) => (found, None),
            _ => (request.stored_as(weight, self.layer, &swapped), Some(swapped)),
        }
    }

    pub(super) fn weight(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
        weight: &WeightRef,
        shape: &[u64],
    ) -> Result<ValueId> {
        if let Some(&value) = self.weights.get(weight) {
            let same =
                |ty: &TensorType| ty.shape.iter().copied().eq(shape.iter().map(|&d| Dim::Const(d)));
            return match self.graph.ty(value) {
                Type::Tensor(ty) if same(ty) => Ok(value),
                ty => Err(self.cx.at(name, format!("this tensor is already in use as {ty}"))),
            };
        }
        let letter = |c: char| c.is_ascii_alphanumeric() || "_.-{}".contains(c);
        if !name.chars().all(letter) || name.is_empty() || name.len() > 2 * MAX_NAME {
            let message = "expected a name of letters, digits, `_`, `-` and `.`, not too long";
            return Err(self.cx.at(name, message));
        }
        self.cx.spend(name, 1024)?;
        let request = self.cx.request;
        let (stored, swapped) = self.found(weight, shape);
        let shape = swapped.as_deref().unwrap_or(shape);
        let unique = self.unique(&frame.name_prefix, name);
        let param = Param::Weight(weight.clone());
        let value = match stored.unwrap_or(StoredAs::Plain(request.dtype)) {
            StoredAs::Plain(dtype) => {
                self.graph.param(unique, param, TensorType::weight(dtype, shape))
            }
            StoredAs::Encoded(encoding) => {
                let ty = TensorType::encoded(encoding, shape);
                let value = self.graph.param(unique, param, ty);
                self.dequantised(frame, name, value)?
            }
        };
        let value = match swapped {
            Some(_) => self.derived(frame, name, "transpose", value, Vec::new())?,
            None => value,
        };
        self.weights.insert(weight.clone(), value);
        Ok(value)
    }

    /// The values of an encoded weight, in the type of activations.
    fn dequantised(&mut self, frame: &Frame<'a>, name: &str, w: ValueId) -> Result<ValueId> {
        let dtype = Attr::DType(self.cx.request.dtype);
        self.derived(frame, name, "dequantise", w, vec![dtype])
    }

    /// What an op makes of a weight before anything uses it.
    fn derived(
        &mut self,
        frame: &Frame<'a>,
        name: &str,
        op: &str,
        w: ValueId,
        attrs: Vec<Attr>,
    ) -> Result<ValueId> {
        let at = |message: String| self.cx.at(name, message);
        let op = Op::find(op).map_err(at)?;
        let unique = self.unique(&frame.name_prefix, &format!("{name}.values"));
        let values = self.graph.call(vec![unique], op, &[Some(w)], attrs, None);
        Ok(values.map_err(|message| self.cx.at(name, message))?[0])
    }

    /// Takes the `rename` of a block's call.
    pub(super) fn push_renames(
        &mut self,
        frame: &Frame<'a>,
        inner: &Frame<'a>,
        call: &'a SpecCall<'a>,
    ) -> Result<()> {
        let names = match call.arg("rename") {
            None => return Ok(()),
            Some((_, Argument::Names(names))) => names,
            Some((key, _)) => {
                let message = "expected names of tensors, such as { \"o_proj\": \"dense\" }";
                return Err(self.cx.at(key, message));
            }
        };
        for (from, to) in names.iter() {
            if from.is_empty() || to.is_empty() {
                return Err(self.cx.at(from, "expected two names, found an empty one"));
            }
            let to = self.filled(&frame.scope, to)?;
            self.cx.spend(from, 64 + inner.weight_prefix.len() + to.len())?;
            let (base, used) = (inner.weight_prefix.clone(), Cell::new(false));
            self.renames.push(Rename { base, from, to, used });
        }
        Ok(())
    }

    /// The name of a tensor in the checkpoint: as the calls that lead to it have it, the innermost first.
    fn renamed(&self, mut name: String) -> String {
        for Rename { base, from, to, used } in self.renames.iter().rev() {
            if let Some(rest) = name.strip_prefix(base).and_then(|rest| rest.strip_prefix(from))
                && (rest.is_empty() || rest.starts_with('.'))
            {
                used.set(true);
                name = format!("{base}{to}{rest}");
            }
        }
        name
    }
}

const LAYER: &str = "{layer}";
const EXPERT: &str = "{expert}";

/// `text`, the name of a tensor or a part of one, with the numbers of parameters that stand in braces; else the place
/// where it says what it should not, and what is wrong. `{layer}` and `{expert}` stay: they are filled in for each layer that
/// runs the graph and for each tensor of a stack.
fn fill<'t>(
    scope: &Scope<'_>,
    text: &'t str,
    in_layer: bool,
) -> std::result::Result<String, (&'t str, String)> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(['{', '}']) {
        let (before, from) = rest.split_at(at);
        filled.push_str(before);
        let Some(end) = from.find('}').filter(|end| *end > 0) else {
            let message =
                "expected `{layer}`, `{expert}` or a parameter in braces, found one brace";
            return Err((&from[..1], message.to_owned()));
        };
        let (placeholder, after) = from.split_at(end + 1);
        match placeholder {
            EXPERT => filled.push_str(EXPERT),
            LAYER if in_layer => filled.push_str(LAYER),
            LAYER => {
                let message =
                    "`{layer}` is the layer's number, and there is none in `embed` and `head`";
                return Err((placeholder, message.to_owned()));
            }
            other => {
                let number = number(scope, &other[1..end]);
                filled += &number.map_err(|message| (placeholder, message))?;
            }
        }
        rest = after;
    }
    Ok(filled + rest)
}

/// The number that a parameter stands for in the name of a tensor.
fn number(scope: &Scope<'_>, name: &str) -> std::result::Result<String, String> {
    match scope.param(name) {
        Some(Value::Num(n)) if *n >= 0.0 && n.fract() == 0.0 && *n <= 9_007_199_254_740_992.0 => {
            Ok((*n as u64).to_string())
        }
        Some(found) => Err(format!(
            "a parameter in the name of a tensor is a number: expected `{name}` to be a whole number of at least 0, \
             found {}",
            brief(found)
        )),
        None => Err(format!(
            "unknown placeholder `{{{name}}}`: expected `{LAYER}`, the layer's number, `{EXPERT}`, a tensor's number in \
             a `stack`, or a parameter{}",
            nearest(name, scope.names().into_iter())
        )),
    }
}
