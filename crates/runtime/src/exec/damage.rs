//! Encoded weights of files whose bytes cannot be: a scale that is no number, a column of a group that is not there.

use std::sync::{Mutex, PoisonError};

use infernum_ir::TensorType;
use infernum_ir::encoding::{Stored, StoredTensor, Unsound};

use super::cores::on_all_cores;
use super::weights::sizes;
use super::{Bytes, TensorProblem, WeightSource};

/// Rows of blocks that are checked at a time.
const ROWS: usize = 256;

/// The first thing that cannot be of what is stored of encoded weights of this type, `matrices` of them one after another in each
/// of the tensors that were `found`. What does not come of a file is not checked.
pub(super) fn damage(
    ty: &TensorType,
    matrices: usize,
    wanted: &[StoredTensor],
    found: &[(usize, Bytes)],
    source: &dyn WeightSource,
) -> Option<TensorProblem> {
    let (encoding, sizes) = (ty.encoding.as_ref()?, sizes(ty));
    let [leading @ .., rows, columns] = &sizes[..] else { return None };
    source.file(&wanted.first()?.name)?;
    // Rows of blocks stand alone; those of tensors share elements.
    let is_blocks = matches!(encoding.def().stored, Stored::Blocks { .. });
    let step = if is_blocks { ROWS } else { *rows };
    let pieces = (0..matrices).flat_map(|m| (0..*rows).step_by(step).map(move |row| (m, row)));
    let first: Mutex<Option<((usize, usize), Unsound)>> = Mutex::new(None);
    on_all_cores(pieces.collect(), |(matrix, row)| {
        let count = step.min(rows - row);
        let parts: Vec<&[u8]> = found
            .iter()
            .map(|(_, bytes)| {
                let len = bytes.len() / matrices.max(1);
                let at = |row: usize| matrix * len + len / rows * row;
                let range = if is_blocks { at(row)..at(row + count) } else { at(0)..at(0) + len };
                bytes.get(range).unwrap_or_default()
            })
            .collect();
        if let Err(unsound) = encoding.check_stored(count as u64, *columns as u64, &parts) {
            let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(at, _)| (matrix, row) < *at) {
                *first = Some(((matrix, row), unsound));
            }
        }
    });
    let ((matrix, row), mut unsound) =
        first.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    if let (true, Some(n)) = (is_blocks, unsound.index.first_mut()) {
        *n += row as u64;
    }
    if !leading.is_empty() {
        unsound.index.insert(0, matrix as u64);
    }
    let name = wanted.get(unsound.tensor)?.name.clone();
    let file = source.file(&name).unwrap_or_default().to_owned();
    Some(TensorProblem::Damaged { file, name, unsound })
}
