//! Ops that move rows without computing.

use infernum_codegen::Arg;
use infernum_ir::{StateKind, TensorType};

use super::super::simd::{self, Codes, Isa};
use super::codes::CodedRow;
use super::linear::packed;
use super::parallel;
use super::{Args, Float, Ids, Kernel, Operand, Site, Source, act_mut, around, float};
use crate::exec::elements::size;

type Prepared = Result<Option<Box<dyn Kernel>>, String>;

/// Elements that a thread converts at a time.
const BLOCK: usize = 4096;

pub(super) fn copy(site: &Site<'_>) -> Prepared {
    let tensor = site.launch.operands.first().and_then(Option::as_ref);
    let known = tensor.is_some_and(|v| v.ty.tensor().is_ok());
    if known { Ok(Some(Box::new(Copy))) } else { Err("expected a tensor to copy".to_owned()) }
}

struct Copy;

impl Kernel for Copy {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let out = args.take(0)?;
        match args.operands[0] {
            Some(Operand::Weight(w, _)) => {
                let mut at = 0;
                for s in &w.segments {
                    out.get_mut(at..at + s.len()).ok_or("sizes differ")?.copy_from_slice(s);
                    at += s.len();
                }
            }
            Some(Operand::InPlace) => {}
            _ => out.copy_from_slice(args.view(0)?.bytes),
        }
        Ok(())
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

pub(super) fn cast(site: &Site<'_>) -> Prepared {
    Ok(match (site.activation(0), site.result(0)) {
        (Some(from), Some(to)) => Some(Box::new(Cast { from, to })),
        _ => None,
    })
}

struct Cast {
    from: Float,
    to: Float,
}

impl Kernel for Cast {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out, isa) = (args.source(0)?, args.take(0)?, args.isa);
        let Source::There(x) = x else { return Ok(()) };
        let (from, to) = (self.from, self.to);
        parallel::rows(out, BLOCK * to.size(), BLOCK / 4, |i, out| {
            let n = out.len() / to.size();
            let x = &x[i * BLOCK * from.size()..][..n * from.size()];
            parallel::scratch(0, n, |values| {
                simd::widen_bytes(isa, from, x, values);
                simd::narrow(isa, values, act_mut(to, out));
            });
        });
        Ok(())
    }
}

/// Bytes of an element, for tensors in the arena.
fn element(site: &Site<'_>, i: usize) -> Option<usize> {
    let value = site.launch.operands.get(i)?.as_ref()?;
    let readable = matches!(value.arg, Arg::Buffer(_) | Arg::Step(_));
    let dtype = value.ty.tensor().ok()?.dtype;
    readable.then(|| size(dtype))
}

pub(super) fn concat(site: &Site<'_>) -> Prepared {
    let (Some(size), Some(_)) = (element(site, 0), element(site, 1)) else { return Ok(None) };
    let axis = site.int("axis") as usize;
    let (a, b) = (site.tensor(0)?.clone(), site.tensor(1)?.clone());
    Ok(Some(Box::new(Concat { size, axis, a, b })))
}

struct Concat {
    size: usize,
    axis: usize,
    a: TensorType,
    b: TensorType,
}

impl Kernel for Concat {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (a, b, out) = (args.view(0)?.bytes, args.view(1)?.bytes, args.take(0)?);
        let part = |ty| {
            let (_, n, inner) = around(ty, self.axis, args.dims());
            n * inner * self.size
        };
        let (na, nb) = (part(&self.a), part(&self.b));
        parallel::rows(out, na + nb, (na + nb) / 16, |i, row| {
            row[..na].copy_from_slice(&a[i * na..][..na]);
            row[na..].copy_from_slice(&b[i * nb..][..nb]);
        });
        Ok(())
    }
}

pub(super) fn slice(site: &Site<'_>) -> Prepared {
    let Some(size) = element(site, 0) else { return Ok(None) };
    let axis = site.int("axis") as usize;
    let (start, len) = (site.int("start") as usize, site.int("len") as usize);
    Ok(Some(Box::new(Slice { size, axis, start, len, x: site.tensor(0)?.clone() })))
}

struct Slice {
    size: usize,
    axis: usize,
    start: usize,
    len: usize,
    x: TensorType,
}

impl Kernel for Slice {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, out) = (args.view(0)?.bytes, args.take(0)?);
        let (_, n, inner) = around(&self.x, self.axis, args.dims());
        let position = inner * self.size;
        let row_bytes = self.len * position;
        parallel::rows(out, row_bytes, row_bytes / 16, |i, row| {
            row.copy_from_slice(&x[(i * n + self.start) * position..][..row.len()]);
        });
        Ok(())
    }
}

pub(super) fn gather_rows(site: &Site<'_>) -> Prepared {
    let (Some(size), Some(_)) = (element(site, 0), element(site, 1)) else { return Ok(None) };
    let x = site.tensor(0)?.clone();
    Ok(Some(Box::new(GatherRows { size, x })))
}

struct GatherRows {
    size: usize,
    x: TensorType,
}

impl Kernel for GatherRows {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (x, ids, out) = (args.view(0)?.bytes, args.ids(1)?, args.take(0)?);
        let (_, rows, inner) = around(&self.x, 0, args.dims());
        gather(out, inner * self.size, ids, rows, |row| &x[row * inner * self.size..])
    }
}

pub(super) fn embedding(site: &Site<'_>) -> Prepared {
    let size = float(site.tensor(1)?.dtype).map(Float::size);
    let (Some(_), Some(size)) = (element(site, 0), size) else { return Ok(None) };
    let d = site.dim(1, 0)?;
    Ok(Some(Box::new(Embedding { row_bytes: d * size, y: site.result(0) })))
}

struct Embedding {
    row_bytes: usize,
    /// The result's type, if it is a float.
    y: Option<Float>,
}

impl Kernel for Embedding {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let (ids, out, row_bytes) = (args.ids(0)?, args.take(0)?, self.row_bytes);
        if let Some(Operand::Weight(w, _)) = args.operands[1] {
            if let (Some(table), Some(y)) = (packed(w, 0), self.y) {
                return unpacked_rows(args.isa, out, ids, &table, y);
            }
            return gather(out, row_bytes, ids, w.shape[0], |row| w.from(row * row_bytes));
        }
        let table = args.view(1)?.bytes;
        let rows = table.len() / row_bytes.max(1);
        gather(out, row_bytes, ids, rows, |row| &table[row * row_bytes..])
    }

    fn reads_values(&self, _: usize) -> bool {
        false
    }
}

/// The rows `ids` of a table in its packed form.
fn unpacked_rows(
    isa: Isa,
    out: &mut [u8],
    ids: Ids<'_>,
    table: &Codes<'_>,
    y: Float,
) -> Result<(), String> {
    let (reader, mut values) = (table.reader(isa), vec![0.0; table.columns()]);
    for (i, out) in out.chunks_exact_mut((table.columns() * y.size()).max(1)).enumerate() {
        reader.row(ids.row(i, table.rows())?, &mut values);
        simd::narrow(isa, &values, act_mut(y, out));
    }
    Ok(())
}

/// Copies the rows `ids`; `row` yields memory that begins with a row.
fn gather<'a>(
    out: &mut [u8],
    row_bytes: usize,
    ids: Ids<'_>,
    rows: usize,
    row: impl Fn(usize) -> &'a [u8],
) -> Result<(), String> {
    for (i, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let from = row(ids.row(i, rows)?);
        out.copy_from_slice(from.get(..out.len()).ok_or("a weight ends early")?);
    }
    Ok(())
}

pub(super) fn kv_write(site: &Site<'_>) -> Prepared {
    let row = CodedRow::of(site.state(0)?);
    let dtype = site.activation(1);
    if element(site, 1).is_none() || row.is_some() && dtype.is_none() {
        return Ok(None);
    }
    Ok(Some(Box::new(KvWrite { coded: row.zip(dtype) })))
}

struct KvWrite {
    /// How rows are stored, and what they are made of, unless they are copied.
    coded: Option<(CodedRow, Float)>,
}

impl Kernel for KvWrite {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let x = args.view(1)?.bytes;
        let plane = args.plane(0)?;
        let n = plane.row_bytes;
        let from = self.coded.map_or(n, |(row, dtype)| row.elements() * dtype.size());
        for (x, slot) in x.chunks_exact(from.max(1)).zip(args.step.slots()) {
            let to = &mut plane.bytes[slot * n..(slot + 1) * n];
            match self.coded {
                None => to.copy_from_slice(x),
                Some((row, dtype)) => row.write(args.isa, dtype, x, to),
            }
        }
        Ok(())
    }
}

pub(super) fn kv_read(site: &Site<'_>) -> Prepared {
    let state = site.state(0)?;
    let coded = CodedRow::of(state);
    let dtype = site.result(0);
    if coded.is_some() && dtype.is_none() {
        return Ok(None);
    }
    Ok(Some(Box::new(KvRead { kind: state.kind, coded: coded.zip(dtype) })))
}

struct KvRead {
    kind: StateKind,
    /// How rows are stored, and what they become, unless they are copied.
    coded: Option<(CodedRow, Float)>,
}

impl Kernel for KvRead {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let out = args.take(0)?;
        let plane = args.plane(0)?;
        let (bytes, stored, rows) = (&*plane.bytes, plane.row_bytes, args.step.rows());
        let n = self.coded.map_or(stored, |(row, dtype)| row.elements() * dtype.size());
        let isa = args.isa;
        parallel::rows(out, n, n / 16, |i, out| {
            let row = rows[i] as usize;
            let from = &bytes[row * stored..(row + 1) * stored];
            match self.coded {
                None => out.copy_from_slice(from),
                Some((row, dtype)) => row.read_all(isa, from, dtype, out),
            }
        });
        if self.kind == StateKind::Paged {
            return Ok(());
        }
        // What is kept no more: another's rows lie where they were.
        let mut start = 0;
        for seq in &args.step.step.seqs {
            let gone = self.kind.first_row(seq.context - seq.new);
            out[start * n..(start + gone) * n].fill(0);
            start += seq.context;
        }
        Ok(())
    }
}
