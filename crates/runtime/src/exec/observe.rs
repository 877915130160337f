//! Looking into a step.

use infernum_ir::TensorType;

/// A value that a call carries on, widened.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// Its name in the IR.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Sizes in this step.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Vec<f64>,
}

/// How many different rows of a weight a launch reads, as its tokens chose them: experts of a mixture, rows of
/// a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickedRows {
    /// The op.
    pub op: String,
    /// Index into [`infernum_codegen::Plan::weights`].
    pub weight: usize,
    /// Rows that are read.
    pub rows: usize,
    /// Rows that there are.
    pub of: usize,
}

/// Called after each call of the schedule with what it carries on.
pub type Observer<'a> = dyn FnMut(usize, Vec<Observed>) + Send + 'a;
