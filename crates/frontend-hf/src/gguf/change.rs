//! What converters to GGUF change about weights, undone when these are read.

use std::borrow::Cow;

use half::{bf16, f16};
use infernum_ir::encoding::Element;
use infernum_ir::expr::ScalarFn;

/// How a tensor becomes what the model's specs expect.
#[derive(Clone, Debug)]
pub enum Change {
    /// Its rows in another order. An encoded weight's rows are whole blocks, so that they move as they are stored.
    Rows(RowOrder),
    /// Each of its values, by an expression of it.
    Values(ScalarFn),
}

/// An order of rows: the first dimension taken apart into `dims`, whose axes are put in another order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowOrder {
    /// As stored. One that is `None` is what the others leave.
    pub dims: Vec<Option<u64>>,
    /// Which of these comes first, second and so on.
    pub axes: Vec<usize>,
}

impl RowOrder {
    /// The order that undoes this one.
    pub(super) fn inverse(&self) -> RowOrder {
        let dims = self.axes.iter().map(|axis| self.dims[*axis]).collect();
        let place = |axis| self.axes.iter().position(|a| *a == axis).unwrap_or(axis);
        RowOrder { dims, axes: (0..self.axes.len()).map(place).collect() }
    }

    /// Where each row is read from, of so many rows; an error where these cannot be taken apart so.
    fn sources(&self, rows: u64) -> Result<Vec<usize>, String> {
        let fault =
            || format!("rows: expected a number of them that fits {:?}, found {rows}", self.dims);
        let known = self
            .dims
            .iter()
            .flatten()
            .try_fold(1u64, |n, d| n.checked_mul(*d))
            .ok_or_else(fault)?;
        let rest = rows.checked_div(known).ok_or_else(fault)?;
        let dims: Vec<u64> = self.dims.iter().map(|d| d.unwrap_or(rest)).collect();
        if dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d)) != Some(rows) {
            return Err(fault());
        }
        let strides: Vec<u64> = (0..dims.len()).map(|i| dims[i + 1..].iter().product()).collect();
        let mut sources = vec![0u64];
        for axis in &self.axes {
            let steps = |from: u64| (0..dims[*axis]).map(move |i| (from, i));
            sources = sources
                .into_iter()
                .flat_map(steps)
                .map(|(from, i)| from + i * strides[*axis])
                .collect();
        }
        Ok(sources.into_iter().map(|row| row as usize).collect())
    }
}

impl Change {
    /// Whether tensors of that shape can be changed so.
    pub fn check(&self, shape: &[u64], element: Option<Element>) -> Result<(), String> {
        match self {
            Change::Rows(order) => {
                let rows = shape.first().copied().unwrap_or(1);
                if rows > 1 << 32 {
                    return Err(format!("rows: expected at most 2^32, found {rows}"));
                }
                order.sources(rows).map(drop)
            }
            Change::Values(_) => match element {
                Some(Element::F32 | Element::F16 | Element::Bf16) => Ok(()),
                _ => Err("values of a tensor that is quantised are not changed".to_owned()),
            },
        }
    }

    /// A tensor of `rows` rows, changed.
    pub fn apply<'a>(
        &self,
        bytes: &'a [u8],
        rows: u64,
        element: Element,
    ) -> Result<Cow<'a, [u8]>, String> {
        match self {
            Change::Rows(order) => {
                let sources = order.sources(rows)?;
                let row = bytes.len().checked_div(sources.len()).unwrap_or(0);
                let parts = sources
                    .into_iter()
                    .map(|i| bytes.get(i * row..(i + 1) * row).unwrap_or_default());
                Ok(Cow::Owned(parts.collect::<Vec<_>>().concat()))
            }
            Change::Values(f) => {
                let new = |x: f64| f.eval(&[x]);
                let two = |f: fn([u8; 2]) -> f64, to: fn(f64) -> [u8; 2]| -> Vec<u8> {
                    bytes.as_chunks().0.iter().flat_map(|b| to(new(f(*b)))).collect()
                };
                Ok(Cow::Owned(match element {
                    Element::F32 => {
                        let values = bytes.as_chunks().0.iter();
                        values
                            .flat_map(|b| (new(f32::from_le_bytes(*b).into()) as f32).to_le_bytes())
                            .collect()
                    }
                    Element::F16 => {
                        two(|b| f16::from_le_bytes(b).into(), |x| f16::from_f64(x).to_le_bytes())
                    }
                    Element::Bf16 => {
                        two(|b| bf16::from_le_bytes(b).into(), |x| bf16::from_f64(x).to_le_bytes())
                    }
                    other => return Err(format!("values of {other} are not changed")),
                }))
            }
        }
    }
}
