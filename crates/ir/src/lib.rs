//! The typed intermediate representation.
#![doc = include_str!("../README.md")]

mod attr;
pub mod body;
mod diag;
mod dim;
mod dtype;
pub mod encoding;
pub mod expr;
mod files;
mod fused;
mod graph;
mod indices;
pub mod interp;
mod names;
mod ops;
pub mod picking;
pub mod random;
pub mod recurrence;
mod task;
pub mod text;
mod types;
mod verify;
mod windows;

pub use attr::{Attr, AttrDef, AttrKind, Default as AttrDefault, NUMBER};
pub use diag::{SourceError, SourceWarning};
pub use dim::{Dim, Dims, Sym};
pub use dtype::DType;
pub use encoding::Encoding;
pub use files::is_there;
pub use fused::{Fused, FusedDef, Instance, OpSet};
pub use graph::{
    CallSite, Graph, Loc, Module, Node, NodeKind, Param, StepInput, ValueId, WeightRef, in_layer,
};
pub use indices::{Indices, RowPick, row_picks, token_rows};
pub use names::nearest;
pub use ops::{
    Effect, Eval, Memory, NO_TOKEN, OPS, Op, OpCall, OpDef, OperandDef, Pointwise, Reads, StoredIn,
    Tolerance, Work, takes_whole,
};
pub use recurrence::Recurrence;
pub use task::Task;
pub use types::{StateKind, StateType, TensorType, Type};
pub use verify::{Finding, VerifyError, verify};
pub use windows::{Window, state_kinds, windows};
