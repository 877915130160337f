//! The sizes of a step's parts.

use infernum_codegen::cuda::abi::Part;
use infernum_ir::Dims;

use crate::exec::StepInputs;

/// The sizes of a step, and of its generated rows, which come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartDims {
    pub(super) all: Dims,
    pub(super) generated: Dims,
}

impl PartDims {
    /// Those of a step.
    pub(super) fn new(inputs: &StepInputs) -> PartDims {
        let all = inputs.step().dims();
        let seqs = &inputs.step().seqs[..inputs.generated()];
        let (t, s) = (seqs.len() as u64, seqs.iter().map(|s| s.context as u64).sum());
        PartDims { all, generated: Dims { t, b: 0, s, pairs: s, seqs: t } }
    }

    /// Those of a step of generated rows alone.
    pub(super) fn decoding(all: Dims) -> PartDims {
        PartDims { all, generated: Dims { b: 0, ..all } }
    }

    /// The sizes of a part; output is of all rows.
    pub(super) fn of(&self, part: Part) -> Dims {
        let (all, own) = (self.all, self.generated);
        match part {
            Part::All => all,
            Part::Generated => own,
            Part::Prompt => Dims {
                t: all.t - own.t,
                b: 0,
                s: all.s - own.s,
                pairs: all.pairs - own.pairs,
                seqs: all.seqs - own.seqs,
            },
        }
    }

    /// The sizes of all rows before a part.
    pub(super) fn before(&self, part: Part) -> Dims {
        match part {
            Part::All | Part::Generated => Dims::default(),
            Part::Prompt => self.generated,
        }
    }

    /// Whether it has rows of both kinds.
    pub(super) fn is_mixed(&self) -> bool {
        self.generated.seqs > 0 && self.generated.seqs < self.all.seqs
    }
}
