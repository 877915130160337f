//! What can go wrong.

use std::fmt;

use infernum_ir::Dims;
use infernum_ir::encoding::{Element, Unsound};

/// Why a plan could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The plan is not one that this executor runs.
    #[error("the plan cannot run here: {0}; compile it again")]
    Plan(String),
    /// The checkpoint lacks what the plan needs. All problems, in the order of the plan.
    #[error("the checkpoint does not fit the plan ({} problem(s)):{}", .0.len(), lines(.0))]
    Tensors(Vec<TensorProblem>),
    /// A launch that no kernel can do.
    #[error("{launch}: {message}")]
    Kernel {
        /// The launch, by program and value.
        launch: String,
        /// What was expected and found.
        message: String,
    },
    /// Memory that the machine does not have.
    #[error("cannot allocate {bytes} bytes for {what}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: u64,
    },
    /// The GPU, or its driver.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The thread pool did not start.
    #[error("cannot start the threads: {0}")]
    Threads(String),
}

/// One thing wrong with the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    /// It is not there.
    #[error("tensor `{name}` is missing: expected {}", shape(*.element, .expected))]
    Missing {
        /// Its name.
        name: String,
        /// Its element type.
        element: Element,
        /// Its shape.
        expected: Vec<u64>,
    },
    /// It is not what the plan was made for.
    #[error(
        "tensor `{name}`: expected {}, found {}",
        shape(.expected.0, &.expected.1), shape(.found.0, &.found.1)
    )]
    Mismatch {
        /// Its name.
        name: String,
        /// What the plan needs.
        expected: (Element, Vec<u64>),
        /// What the checkpoint has.
        found: (Element, Vec<u64>),
    },
    /// It holds what no weight of its encoding can.
    #[error(
        "tensor `{name}` in {file}: {unsound}; the file is damaged, or was not written well: fetch or convert it again"
    )]
    Damaged {
        /// The file that holds it.
        file: String,
        /// Its name.
        name: String,
        /// The element, what it may be and what it is.
        unsound: Unsound,
    },
    /// A constant that could not be computed.
    #[error("a constant made by `{op}`: {message}")]
    Constant {
        /// The op.
        op: String,
        /// What went wrong.
        message: String,
    },
}

/// Why a step failed. Nothing of it may be used; the KV rows of its tokens are undefined.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// More than the plan's buffers hold.
    #[error("the step has {found} {what}, the plan holds at most {limit}; split the step")]
    TooLarge {
        /// Which size.
        what: &'static str,
        /// The step's.
        found: u64,
        /// The plan's.
        limit: u64,
    },
    /// A step of a kind that the plan was not made for.
    #[error(
        "the plan has no schedule for {} of {tokens} token(s); compile it for more buckets",
        if *.decode_only { "a decode step" } else { "a step" }
    )]
    Bucket {
        /// The step's tokens.
        tokens: u64,
        /// Whether each of its sequences has one token.
        decode_only: bool,
    },
    /// An ill-formed step.
    #[error("the step's inputs: {0}")]
    Inputs(String),
    /// An adapter that cannot be taken.
    #[error("the adapter: {0}")]
    Adapter(String),
    /// A launch failed.
    #[error("{launch}: {message}")]
    Launch {
        /// The launch, by program, layer and value.
        launch: String,
        /// What went wrong.
        message: String,
    },
    /// The GPU, or its driver. Nothing more can run on it after a failed kernel.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A ticket that was not the last one given out.
    #[error("this ticket is for another step than the last one submitted")]
    Ticket,
}

/// A GPU's driver is missing, or a call of it failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum GpuError {
    #[error(
        "no NVIDIA driver: libcuda.so.1 was not found on the loader's path; run on the CPU with --device cpu"
    )]
    NoDriver,
    #[error("there is no GPU {ordinal}: the driver shows {count}")]
    NoDevice { ordinal: i32, count: i32 },
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
    #[error(
        "the GPU has not enough memory for {what}: {bytes} bytes are needed, {free} of {total} are \
         free; choose shorter or fewer sequences, or a smaller model"
    )]
    Memory { what: &'static str, bytes: u64, free: u64, total: u64 },
}

impl ExecError {
    pub(crate) fn adapter(message: &str) -> ExecError {
        ExecError::Adapter(message.to_owned())
    }

    /// Checks a step's sizes against a plan's.
    pub(crate) fn check_limits(found: &Dims, limits: &Dims) -> Result<(), ExecError> {
        let sizes = [
            ("token(s)", found.t, limits.t),
            ("sequence(s)", found.seqs, limits.seqs),
            ("row(s) of output", found.b, limits.b),
            ("context row(s)", found.s, limits.s),
            ("token-context pair(s)", found.pairs, limits.pairs),
        ];
        match sizes.into_iter().find(|(_, found, limit)| found > limit) {
            Some((what, found, limit)) => Err(ExecError::TooLarge { what, found, limit }),
            None => Ok(()),
        }
    }
}

fn shape(element: Element, dims: &[u64]) -> String {
    format!("{element}{dims:?}")
}

fn lines(problems: &[TensorProblem]) -> String {
    problems.iter().fold(String::new(), |mut out, p| {
        // Writing to a `String` cannot fail.
        let _ = fmt::Write::write_fmt(&mut out, format_args!("\n  {p}"));
        out
    })
}
