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

/// Called after each call of the schedule with what it carries on.
pub type Observer<'a> = dyn FnMut(usize, Vec<Observed>) + Send + 'a;
