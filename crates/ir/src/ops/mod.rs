//! The table of primitive operations: one file an op, one list of them all.

pub(crate) mod common;
mod pointwise;

mod adapt;
mod add;
mod alibi;
mod argmax;
mod cast;
mod causal_conv;
mod combine_heads;
mod concat;
mod context_rows;
mod dequantise;
mod embedding;
mod expert_linear;
mod expert_slots;
mod gather_rows;
mod gelu;
mod gelu_tanh;
mod group_rows;
mod head_linear;
mod kv_read;
mod kv_write;
mod layernorm;
mod linear;
mod map;
mod mask;
mod mask_chunks;
mod mask_far;
mod mask_topk;
mod matmul;
mod mix;
mod mul;
mod pick;
mod quantise_rows;
mod reduce;
mod repack;
mod reshape;
mod rmsnorm;
mod rope;
mod round_groups;
mod scale;
mod scan;
mod scores;
mod silu;
mod slice;
mod softcap;
mod softmax;
mod table;
mod topk;
mod transpose;

pub use argmax::NO_TOKEN;
pub use context_rows::takes_whole;

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::attr::{Attr, AttrDef};
use crate::body::{AttrSource, Stmt};
use crate::expr::{Expr, ScalarFn, Value};
use crate::fused::{Fused, compose};
use crate::interp::{StepShape, Tensor};
use crate::names::nearest;
use crate::{Dims, Encoding, Type};

/// Every primitive, in alphabetical order.
pub static OPS: &[&OpDef] = &[
    &adapt::OP,
    &add::OP,
    &alibi::OP,
    &argmax::OP,
    &cast::OP,
    &causal_conv::OP,
    &combine_heads::OP,
    &concat::OP,
    &context_rows::OP,
    &dequantise::OP,
    &embedding::OP,
    &expert_linear::OP,
    &expert_slots::OP,
    &gather_rows::OP,
    &gelu::OP,
    &gelu_tanh::OP,
    &group_rows::OP,
    &head_linear::OP,
    &kv_read::OP,
    &kv_write::OP,
    &layernorm::OP,
    &linear::OP,
    &map::OP,
    &mask::OP,
    &mask_chunks::OP,
    &mask_far::OP,
    &mask_topk::OP,
    &matmul::OP,
    &mix::OP,
    &mul::OP,
    &pick::OP,
    &quantise_rows::OP,
    &reduce::OP,
    &repack::OP,
    &reshape::OP,
    &rmsnorm::OP,
    &rope::OP,
    &round_groups::OP,
    &scale::OP,
    &scan::OP,
    &scores::OP,
    &silu::OP,
    &slice::OP,
    &softcap::OP,
    &softmax::OP,
    &table::OP,
    &topk::OP,
    &transpose::OP,
];

/// Everything there is to know about an op. Printer, parser, verifier, interpreter, executors and
/// documentation all read it; no field has a default.
pub struct OpDef {
    /// Its name in IR text and in specs.
    pub name: &'static str,
    /// What it computes.
    pub doc: &'static str,
    /// Its operands, in order.
    pub operands: &'static [OperandDef],
    /// Its attributes, in order.
    pub attrs: &'static [AttrDef],
    /// The types of its results. Whether a result is constant follows from the operands.
    pub infer: fn(&OpCall<'_>) -> Result<Vec<Type>, String>,
    /// What it does besides computing.
    pub effect: Effect,
    /// Its meaning in plain loops over `f64`: the oracle for every kernel.
    pub reference: fn(&Eval<'_>) -> Result<Vec<Tensor>, String>,
    /// For an elementwise op, the expression it applies.
    pub pointwise: Pointwise,
    /// Bytes moved and operations done.
    pub work: fn(&OpCall<'_>, &[Type], &Dims) -> Work,
    /// What it needs of its operands, by which the work of a fused op follows from its body.
    pub reads: Reads,
    /// Stem of its CUDA template, if it has one.
    pub cuda: Option<&'static str>,
    /// How far a kernel may stray from the reference.
    pub tolerance: Tolerance,
    /// How its result comes of its operands' memory.
    pub memory: Memory,
    /// Its body, if it is a fused op; `None` for a primitive.
    pub fused: Option<Fused>,
}

/// Declares one operand.
#[derive(Clone, Copy, Debug)]
pub struct OperandDef {
    /// Its name in specs.
    pub name: &'static str,
    /// Whether it may be left out.
    pub optional: bool,
    /// For integers that pick rows: the operand whose first axis they count.
    pub rows_of: Option<&'static str>,
    /// What it may be stored in, besides its elements.
    pub stored: StoredIn,
}

/// What an operand may be stored in, besides its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredIn {
    /// Nothing else.
    Elements,
    /// An encoding, as it is stored or packed: a weight.
    Encoding,
    /// An encoding's packed form: a weight.
    Packed,
    /// 8 bits: activations, as `quantise_rows` makes them.
    QuantisedRows,
    /// Any of these.
    Any,
}

impl OperandDef {
    const fn required(name: &'static str) -> OperandDef {
        OperandDef { name, optional: false, rows_of: None, stored: StoredIn::Elements }
    }

    /// An operand that may be a weight stored in an encoding.
    const fn encoded(name: &'static str) -> OperandDef {
        OperandDef { stored: StoredIn::Encoding, ..OperandDef::required(name) }
    }

    /// An operand that may be an encoded weight in its packed form.
    const fn packed(name: &'static str) -> OperandDef {
        OperandDef { stored: StoredIn::Packed, ..OperandDef::required(name) }
    }

    /// An operand that may be activations of 8 bits: see `quantise_rows`.
    const fn quantised(name: &'static str) -> OperandDef {
        OperandDef { stored: StoredIn::QuantisedRows, ..OperandDef::required(name) }
    }

    const fn optional(name: &'static str) -> OperandDef {
        OperandDef { optional: true, ..OperandDef::required(name) }
    }

    /// Integers that pick rows of the operand `of`.
    const fn rows(name: &'static str, of: &'static str) -> OperandDef {
        OperandDef { rows_of: Some(of), ..OperandDef::required(name) }
    }
}

impl OperandDef {
    /// Whether it may be a weight, or activations, stored so.
    fn takes(&self, constant: bool, encoding: &Encoding) -> bool {
        match self.stored {
            StoredIn::Elements => false,
            StoredIn::Encoding => constant,
            StoredIn::Packed => constant && encoding.packing().is_some(),
            StoredIn::QuantisedRows => !constant,
            StoredIn::Any => true,
        }
    }
}

/// What an op does besides computing its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Pure,
    /// Nothing; its result is its first operand's bytes under another shape.
    View,
    /// Reads a KV-cache state.
    Reads,
    /// Makes the next version of a KV-cache state, in place; of a slot it reads the one before.
    Writes,
}

/// Whether an op is elementwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointwise {
    /// It is not.
    No,
    /// It applies this expression over operand and attribute names.
    Fixed(&'static str),
    /// It applies the expression in this attribute.
    Attr(&'static str),
    /// It is a fused op of elementwise ops: it applies what they compose to.
    Composed,
}

/// What an op needs of its operands.
#[derive(Clone, Copy)]
pub enum Reads {
    /// All of every one.
    All,
    /// Of one operand so many bytes, of the others all.
    Part {
        /// The operand's position.
        operand: usize,
        /// The bytes, from the call and the types of its results.
        bytes: fn(&OpCall<'_>, &[Type], &Dims) -> u64,
    },
    /// Of a token's context rows those within the window that this attribute holds; all where it is
    /// absent.
    Window(&'static str),
}

/// How result 0 of an op comes of the memory of its operands: what folding, layouts and the reuse of
/// buffers ask for. ([`Effect::View`] leaves it as it is.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// It is computed of any of their elements.
    Computed,
    /// Each of its rows is computed of the same row of operand 0, over which it may be written.
    Rowwise,
    /// It is operand 0, each element in another type; nothing is done where that is the same.
    Converted,
    /// It is computed in each step, even of constants: these stay as they are stored.
    Decoded,
    /// It is operand 0, an encoded weight, in its packed form.
    Repacked,
    /// It is a part of operand 0: attributes `axis`, `start` and `len`.
    Slice,
    /// It is all operands, one after another: attribute `axis`.
    Concat,
    /// It is operand 0 with its last two axes in each other's place.
    Transposed,
    /// It is rows of operand `table`, by the numbers in operand `rows`.
    Lookup {
        /// The operand that has the rows.
        table: usize,
        /// The operand that says which.
        rows: usize,
    },
}

/// Work of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes that must move between memory and the processor.
    pub bytes: u64,
    /// Floating-point operations, a multiply-add counting two.
    pub flops: u64,
}

/// Largest normalised root-mean-square error of a correct kernel against the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// With `f32` results.
    pub f32: f64,
    /// In units of the result's rounding step, with 16-bit results.
    pub ulps16: f64,
    /// What a value may differ by where operands are not the same bits, of an op that rounds to few: the next code in place
    /// of the nearest. 0 of others.
    pub code: f64,
}

impl Tolerance {
    /// Moves or selects values; computes nothing.
    pub const EXACT: Tolerance = Tolerance { f32: 0.0, ulps16: 0.0, code: 0.0 };
    /// A few operations an element.
    pub const POINTWISE: Tolerance = Tolerance { f32: 1e-6, ulps16: 1.0, code: 0.0 };
    /// A sum over many elements.
    pub const REDUCTION: Tolerance = Tolerance { f32: 1e-5, ulps16: 2.0, code: 0.0 };
}

/// A call being typed: operand types and attributes.
pub struct OpCall<'a> {
    /// The op called.
    pub op: Op,
    /// One entry an operand declared; `None` where an optional one is left out.
    pub operands: &'a [Option<&'a Type>],
    /// One entry an attribute declared.
    pub attrs: &'a [Attr],
}

/// A call being evaluated.
pub struct Eval<'a> {
    /// Types and attributes.
    pub call: OpCall<'a>,
    /// Operand values.
    pub values: &'a [Option<&'a Tensor>],
    /// Result types.
    pub results: &'a [Type],
    /// The step it belongs to.
    pub step: &'a StepShape,
}

/// A handle to an op's definition; two handles are equal when they name the same op.
#[derive(Clone, Copy)]
pub struct Op(&'static OpDef);

impl Op {
    /// The handle of a definition.
    pub(crate) fn of(def: &'static OpDef) -> Op {
        Op(def)
    }

    /// Looks an op up by name; the error suggests the nearest one.
    pub fn find(name: &str) -> Result<Op, String> {
        OPS.iter().find(|d| d.name == name).map(|d| Op(d)).ok_or_else(|| {
            let hint = nearest(name, OPS.iter().map(|d| d.name));
            format!("unknown op `{name}`{hint}")
        })
    }

    /// Every op.
    pub fn all() -> impl Iterator<Item = Op> {
        OPS.iter().map(|d| Op(d))
    }

    /// Position of an operand.
    pub fn operand(self, name: &str) -> Option<usize> {
        self.operands.iter().position(|o| o.name == name)
    }

    /// Position of an attribute.
    pub fn attr(self, name: &str) -> Option<usize> {
        self.attrs.iter().position(|a| a.name == name)
    }

    /// Checks operands and attributes against the declaration and types the results.
    pub fn infer(self, operands: &[Option<&Type>], attrs: &[Attr]) -> Result<Vec<Type>, String> {
        if operands.len() != self.operands.len() || attrs.len() != self.attrs.len() {
            return Err(format!(
                "`{}` takes {} operand(s) and {} attribute(s), found {} and {}",
                self.name,
                self.operands.len(),
                self.attrs.len(),
                operands.len(),
                attrs.len()
            ));
        }
        for (def, operand) in self.operands.iter().zip(operands) {
            if operand.is_none() && !def.optional {
                return Err(format!("`{}` needs operand `{}`", self.name, def.name));
            }
            if let Some(Type::Tensor(t)) = operand
                && let Some(encoding) = &t.encoding
                && !def.takes(t.constant, encoding)
            {
                let name = def.name;
                return Err(format!(
                    "operand `{name}`: expected plain elements, found {t}: `dequantise` it"
                ));
            }
        }
        for (def, attr) in self.attrs.iter().zip(attrs) {
            def.check(attr)?;
        }
        let mut results = (self.0.infer)(&OpCall { op: self, operands, attrs })?;
        let constant = self.memory != Memory::Decoded
            && operands.iter().flatten().all(|t| matches!(t, Type::Tensor(t) if t.constant));
        for result in &mut results {
            if let Type::Tensor(t) = result {
                t.constant = constant;
            }
        }
        Ok(results)
    }

    /// For an elementwise op, its expression with the attributes substituted, over operand names.
    pub fn pointwise(self, attrs: &[Attr]) -> Option<Result<Expr, String>> {
        let expr = match self.pointwise {
            Pointwise::No => return None,
            Pointwise::Fixed(text) => text.parse().map_err(|e| format!("{e}")),
            Pointwise::Attr(name) => match &attrs[self.attr(name)?] {
                Attr::Expr(e) => Ok(e.clone()),
                other => Err(format!("attribute `{name}`: expected an expression, found {other}")),
            },
            Pointwise::Composed => return Some(compose(self, attrs)),
        };
        let number = |name: &str| match attrs.get(self.attr(name)?)? {
            Attr::Float(x) => Some(Value::Num(*x)),
            Attr::Int(n) => Some(Value::Num(*n as f64)),
            _ => None,
        };
        Some(expr.and_then(|e| e.fold(&number).map_err(|e| e.to_string())))
    }

    /// Whether it is a fused op that a call of `map` can stand for.
    pub fn is_map(self) -> bool {
        self.pointwise == Pointwise::Composed && self.operands.len() <= map::OP.operands.len()
    }

    /// The call of `map`, over the same operands, that stands for a call of this op: the op and
    /// its attributes. `None` where it composes to too large an expression.
    pub fn as_map(self, attrs: &[Attr]) -> Option<(Op, Vec<Attr>)> {
        let expr = self.is_map().then(|| self.pointwise(attrs))??.ok()?;
        let names = || self.operands.iter().zip(map::OP.operands);
        let renamed = expr.substitute(&|name| {
            let (_, to) = names().find(|(from, _)| from.name == name)?;
            Some(Expr::Var(to.name.to_owned()))
        });
        Some((Op(&map::OP), vec![Attr::Expr(renamed)]))
    }

    /// The names that an expression in this attribute is over: the operands' (`i` where there are none), of
    /// the op in its body that a fused op hands it to.
    pub fn scalar_names(self, attr: &str) -> Vec<&'static str> {
        let handed = |s: &Stmt| {
            let at = s
                .attrs
                .iter()
                .position(|a| matches!(a, AttrSource::Value(Expr::Var(n)) if n == attr))?;
            Some((s.op, s.op.attrs[at].name))
        };
        if let Some((op, attr)) = self.fused.as_ref().and_then(|f| f.body.iter().find_map(handed)) {
            return op.scalar_names(attr);
        }
        if self.operands.is_empty() {
            vec!["i"]
        } else {
            self.operands.iter().map(|o| o.name).collect()
        }
    }

    /// [`Op::pointwise`], compiled over the operands in order.
    pub fn pointwise_fn(self, attrs: &[Attr]) -> Option<Result<ScalarFn, String>> {
        let names: Vec<&str> = self.operands.iter().map(|o| o.name).collect();
        let expr = self.pointwise(attrs)?;
        Some(expr.and_then(|e| ScalarFn::compile(&e, &names).map_err(|e| e.to_string())))
    }
}

impl std::ops::Deref for Op {
    type Target = OpDef;

    fn deref(&self) -> &OpDef {
        self.0
    }
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        self.name == other.name
    }
}

impl Eq for Op {}

impl Hash for Op {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl Ord for Op {
    fn cmp(&self, other: &Op) -> Ordering {
        self.name.cmp(other.name)
    }
}

impl PartialOrd for Op {
    fn partial_cmp(&self, other: &Op) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
