//! Weights: where they come from, and how recipes become memory.

use std::ops::{Deref, Range};
use std::sync::Arc;

use infernum_codegen::{Plan, Recipe, Weight};
use infernum_ir::encoding::{Decoder, Element, StoredTensor};
use infernum_ir::interp::{StepShape, Tensor};
use infernum_ir::{
    Attr, DType, Dims, Effect, Encoding, Eval, Memory, Op, OpCall, TensorType, Type,
};

use super::cores::on_all_cores;
use super::damage::damage;
use super::{LoadError, TensorProblem, elements};

/// Where tensors come from: a checkpoint, or a test.
pub trait WeightSource {
    /// The tensor of that name.
    fn tensor(&self, name: &str) -> Option<TensorBytes>;

    /// The tensor that is wanted, or what there is under its name. A source that does not know by itself how large a
    /// tensor is learns it here.
    fn find(&self, wanted: &StoredTensor) -> Option<TensorBytes> {
        self.tensor(&wanted.name)
    }

    /// The file that holds the tensor of that name, where one does: what comes of files is checked.
    fn file(&self, _name: &str) -> Option<&str> {
        None
    }
}

/// A stored tensor.
#[derive(Clone, Debug)]
pub struct TensorBytes {
    /// Element type.
    pub element: Element,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
    /// Row-major, little-endian; at any alignment.
    pub bytes: Bytes,
}

/// A part of some shared memory, such as a mapped file. Cloning copies no bytes.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All of `owner`'s bytes.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Bytes {
        let range = 0..(*owner).as_ref().len();
        Bytes { owner, range }
    }

    /// A part of these bytes; `None` outside.
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        let inside = start <= end && end <= self.range.end;
        inside.then(|| Bytes { owner: Arc::clone(&self.owner), range: start..end })
    }

    /// Whether `next` lies directly behind in the same memory.
    fn continues_in(&self, next: &Bytes) -> bool {
        Arc::ptr_eq(&self.owner, &next.owner) && self.range.end == next.range.start
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes::new(Arc::new(bytes))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // An owner that shrinks breaks its promise: no bytes, rather than a panic.
        (*self.owner).as_ref().get(self.range.clone()).unwrap_or(&[])
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}

/// A constant, ready for kernels.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    pub(crate) dtype: DType,
    /// How it is stored, unless as its elements.
    pub(crate) encoding: Option<Encoding>,
    pub(crate) shape: Vec<usize>,
    /// Its bytes, in order; views of the checkpoint wherever that is possible.
    pub(crate) segments: Vec<Bytes>,
    /// Of a weight that is yet to be packed: the types that its parts are stored in, to which the bytes belong one after
    /// another. A view of one has no bytes.
    pub(crate) unpacked: Vec<TensorType>,
    /// Its values, for all but matrices: filled by [`Loaded::widen`].
    pub(crate) values: Option<Vec<f32>>,
}

/// More pieces than this are copied into one: finding a row must stay cheap.
const MAX_SEGMENTS: usize = 64;

impl Loaded {
    /// Elements of one row along the last dimension.
    pub(crate) fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Joins neighbours, and copies what kernels cannot read piece by piece.
    fn settle(mut self) -> Loaded {
        self.segments.dedup_by(|next, s| {
            let joins = s.continues_in(next);
            if joins {
                s.range.end = next.range.end;
            }
            joins
        });
        let row = self.columns() * elements::size(self.dtype);
        // Of what is encoded, each stored tensor is a segment.
        let whole_rows = self.encoding.is_some()
            || self.segments.iter().all(|s| row > 0 && s.len().is_multiple_of(row));
        // Experts are found by their number.
        let experts = if self.shape.len() > 2 { self.shape[0] } else { 0 };
        if self.segments.len() > MAX_SEGMENTS.max(experts) || !whole_rows {
            self.join();
        }
        self
    }

    /// The bytes from `at` on, up to the end of their piece.
    pub(crate) fn from(&self, mut at: usize) -> &[u8] {
        for segment in &self.segments {
            if at < segment.len() {
                return &segment[at..];
            }
            at -= segment.len();
        }
        &[]
    }

    /// Rows from `start` on, as many as `ty` has, in the same memory; `None` outside or where a row
    /// is of another size.
    fn rows(&self, start: u64, ty: &TensorType) -> Option<Loaded> {
        let shape = sizes(ty);
        if self.encoding != ty.encoding
            || self.dtype != ty.dtype
            || self.shape.get(1..)? != shape.get(1..)?
        {
            return None;
        }
        let row = usize::try_from(infernum_codegen::row_bytes(ty)?).ok()?;
        if ty.encoding.as_ref().is_some_and(|e| e.packing().is_some()) {
            // Where it lies is known once it is packed.
            return Some(Loaded {
                shape,
                segments: Vec::new(),
                unpacked: Vec::new(),
                ..self.clone()
            });
        }
        let from = usize::try_from(start).ok()?.checked_mul(row)?;
        let to = from.checked_add(shape.first()?.checked_mul(row)?)?;
        let held: usize = self.segments.iter().map(|s| s.len()).sum();
        let segments = self.bytes(from, to - from);
        (to <= held).then_some(Loaded {
            dtype: self.dtype,
            encoding: self.encoding.clone(),
            shape,
            segments,
            unpacked: Vec::new(),
            values: None,
        })
    }

    /// Bytes `from..from + len`, in as many pieces as they lie in.
    pub(crate) fn bytes(&self, from: usize, len: usize) -> Vec<Bytes> {
        let (mut at, mut pieces) = (0, Vec::new());
        for segment in &self.segments {
            let (lo, hi) = (from.max(at), (from + len).min(at + segment.len()));
            pieces.extend((lo < hi).then(|| segment.slice(lo - at..hi - at)).flatten());
            at += segment.len();
        }
        pieces
    }

    /// Copies into one piece.
    fn join(&mut self) {
        if self.segments.len() > 1 {
            let pieces: Vec<&[u8]> = self.segments.iter().map(|s| &**s).collect();
            self.segments = vec![pieces.concat().into()];
        }
    }

    /// Of a bank: the bytes of an adapter's rows, which are all of one size.
    pub(crate) fn set_rows(&mut self, adapter: usize, bytes: &Bytes) -> Option<()> {
        let size = self.segments.first().map_or(0, |s| s.len()).max(1);
        let rows = bytes.len() / size;
        let segments = self.segments.get_mut(adapter.checked_mul(rows)?..)?.get_mut(..rows)?;
        for (row, segment) in segments.iter_mut().enumerate() {
            *segment = bytes.slice(row * size..(row + 1) * size)?;
        }
        Some(())
    }

    /// Makes `values`, if the type is a float.
    pub(crate) fn widen(&mut self) {
        if self.values.is_none() && self.dtype.is_float() && self.encoding.is_none() {
            self.values =
                self.decode().ok().map(|t| t.data.into_iter().map(|v| v as f32).collect());
        }
    }

    /// Its values in `f64`.
    pub(crate) fn decode(&self) -> Result<Tensor, String> {
        let mut data = Vec::with_capacity(self.elements());
        if self.encoding.is_none() {
            self.segments.iter().for_each(|s| elements::decode(self.dtype, s, &mut data));
        }
        let mut row = vec![0.0; self.columns()];
        for (decoder, n) in self.decoders()?.iter().flat_map(|d| (0..d.rows()).map(move |n| (d, n)))
        {
            decoder.row(n, 0, &mut row);
            data.extend(row.iter().map(|v| f64::from(*v)));
        }
        Ok(Tensor { shape: self.shape.clone(), data })
    }

    /// Of what is encoded, a decoder of each matrix; of anything else none.
    pub(crate) fn decoders(&self) -> Result<Vec<Decoder<'_>>, String> {
        let Some(encoding) = &self.encoding else { return Ok(Vec::new()) };
        if encoding.packing().is_some() {
            return Err(format!("{encoding}: values of its packed form are the kernels' business"));
        }
        let [leading @ .., rows, columns] = &self.shape[..] else {
            return Err(format!("{encoding}: expected a matrix, found {:?}", self.shape));
        };
        let (rows, columns) = (*rows as u64, *columns as u64);
        let size = encoding.layout(rows, columns)?.bytes;
        let tensors = encoding.tensors("", rows, columns)?;
        let count = leading.iter().product::<usize>() as u64;
        (0..count)
            .map(|i| {
                let part = |t: &StoredTensor| {
                    self.from((i * size + t.offset) as usize).get(..t.bytes as usize)
                };
                let parts = tensors.iter().map(part).collect::<Option<Vec<_>>>();
                let apart = || format!("{encoding}: a stored tensor is in pieces");
                encoding.decoder(rows, columns, parts.ok_or_else(apart)?)
            })
            .collect()
    }
}

/// Loads every weight of a plan; all problems are reported together.
pub(crate) fn load(plan: &Plan, source: &dyn WeightSource) -> Result<Vec<Loaded>, LoadError> {
    let mut problems = Vec::new();
    let is_view = |w: &Weight| matches!(w.recipe, Recipe::Rows { .. });
    let stored = |w: &Weight| {
        if is_view(w) { None } else { resolve(w, source, &mut problems).map(Loaded::settle) }
    };
    let mut loaded: Vec<Option<Loaded>> = plan.weights.iter().map(stored).collect();
    for (i, weight) in plan.weights.iter().enumerate() {
        if let Recipe::Rows { weight: of, start } = weight.recipe {
            // Of one that could not be loaded, that is told already.
            let of = of as usize;
            if plan.weights.get(of).is_none_or(is_view) {
                let message = format!("expected rows of a stored weight, found weight {of}");
                problems.push(TensorProblem::Constant { op: "rows".to_owned(), message });
            } else if let Some(whole) = &loaded[of] {
                match whole.rows(start, &weight.ty) {
                    Some(view) => loaded[i] = Some(view),
                    None => problems.push(TensorProblem::Constant {
                        op: "rows".to_owned(),
                        message: format!("{} from row {start} is outside weight {of}", weight.ty),
                    }),
                }
            }
        }
    }
    if problems.is_empty() {
        Ok(loaded.into_iter().flatten().collect())
    } else {
        problems.dedup();
        Err(LoadError::Tensors(problems))
    }
}

pub(super) fn sizes(ty: &TensorType) -> Vec<usize> {
    ty.sizes(&Dims::default())
}

fn resolve(
    weight: &Weight,
    source: &dyn WeightSource,
    problems: &mut Vec<TensorProblem>,
) -> Option<Loaded> {
    let ty = &weight.ty;
    let mut unpacked = Vec::new();
    let segments = match &weight.recipe {
        Recipe::Tensor(name) => tensors(name, ty, source, problems)?,
        Recipe::Bank(_) => zero_bank(ty)?,
        Recipe::Stack(parts) => {
            let ty = TensorType { shape: ty.shape.get(1..)?.to_vec(), ..ty.clone() };
            let part = |p: &Recipe| {
                let weight = Weight { ty: ty.clone(), recipe: p.clone() };
                Some(resolve(&weight, source, problems)?.segments)
            };
            // Every part is looked at, so that every problem is found.
            let parts: Vec<Option<Vec<Bytes>>> = parts.iter().map(part).collect();
            parts.into_iter().collect::<Option<Vec<_>>>()?.concat()
        }
        Recipe::Concat(parts) => {
            let parts: Vec<Option<Loaded>> =
                parts.iter().map(|p| resolve(p, source, problems)).collect();
            let parts = parts.into_iter().collect::<Option<Vec<_>>>()?;
            unpacked = parts.iter().flat_map(|p| p.unpacked.clone()).collect();
            match &ty.encoding {
                Some(encoding) if encoding.packing().is_none() => {
                    match joined(encoding, ty, &parts) {
                        Ok(bytes) => vec![bytes],
                        Err(message) => {
                            problems
                                .push(TensorProblem::Constant { op: "concat".to_owned(), message });
                            return None;
                        }
                    }
                }
                _ => parts.into_iter().flat_map(|p| p.segments).collect(),
            }
        }
        Recipe::Rows { .. } => {
            let message = "rows of a weight within a recipe".to_owned();
            problems.push(TensorProblem::Constant { op: "rows".to_owned(), message });
            return None;
        }
        Recipe::Op { op, attrs, operands: of, types, result } => {
            let operands: Vec<Option<Option<Loaded>>> = of
                .iter()
                .map(|w| match w {
                    Some(w) => resolve(w, source, problems).map(Some),
                    None => Some(None),
                })
                .collect();
            let operands = operands.into_iter().collect::<Option<Vec<_>>>()?;
            if let (Ok(Memory::Repacked), [Some(w)], [Some(stored)]) =
                (Op::find(op).map(|op| op.memory), &of[..], &operands[..])
            {
                unpacked.push(w.ty.clone());
                stored.segments.clone()
            } else if let Some(moved) =
                view(op, attrs, &operands).or_else(|| transposed(op, &operands))
            {
                moved
            } else {
                let evaluated = evaluate(op, attrs, &operands, types, *result as usize);
                match evaluated {
                    Ok(bytes) => vec![bytes],
                    Err(message) => {
                        problems.push(TensorProblem::Constant { op: op.clone(), message });
                        return None;
                    }
                }
            }
        }
    };
    let (dtype, encoding) = (ty.dtype, ty.encoding.clone());
    Some(Loaded { dtype, encoding, shape: sizes(ty), segments, unpacked, values: None })
}

/// A bank without adapters: its rows share one piece, until they are set.
fn zero_bank(ty: &TensorType) -> Option<Vec<Bytes>> {
    let rows = *sizes(ty).first()?;
    let row = usize::try_from(infernum_codegen::row_bytes(ty)?).ok()?;
    let zeros = Bytes::from(vec![0; row]);
    Some(vec![zeros; rows])
}

/// The result of an op that only selects contiguous parts of its operand.
fn view(op: &str, attrs: &[Attr], operands: &[Option<Loaded>]) -> Option<Vec<Bytes>> {
    let x = operands.first()?.as_ref()?;
    let op = Op::find(op).ok()?;
    match (op.memory, attrs, &x.segments[..]) {
        _ if op.effect == Effect::View => Some(x.segments.clone()),
        (Memory::Slice, [Attr::Int(axis), Attr::Int(start), Attr::Int(len)], [whole]) => {
            let (outer, rest) = x.shape.split_at_checked(*axis as usize)?;
            let (axis, inner) = rest.split_first()?;
            let position = inner.iter().product::<usize>() * elements::size(x.dtype);
            let parts = (0..outer.iter().product()).map(|o: usize| {
                let from = (o * axis + *start as usize) * position;
                whole.slice(from..from + *len as usize * position)
            });
            parts.collect()
        }
        _ => None,
    }
}

/// Matrices whose axes change places: large ones are moved as they are, where the op's reference would take each element
/// through `f64`.
fn transposed(op: &str, operands: &[Option<Loaded>]) -> Option<Vec<Bytes>> {
    let x = operands.first()?.as_ref()?;
    let [.., rows, columns] = x.shape[..] else { return None };
    if Op::find(op).ok()?.memory != Memory::Transposed || x.encoding.is_some() {
        return None;
    }
    let turn = match elements::size(x.dtype) {
        1 => turn::<1>,
        2 => turn::<2>,
        4 => turn::<4>,
        _ => return None,
    };
    let matrix = (rows * columns * elements::size(x.dtype)).max(1);
    // Each matrix lies in one piece, or all are brought together.
    let in_pieces = x.segments.iter().any(|s| !s.len().is_multiple_of(matrix));
    let joined = if in_pieces {
        x.segments.iter().map(|s| &**s).collect::<Vec<_>>().concat()
    } else {
        Vec::new()
    };
    let pieces =
        if in_pieces { vec![&joined[..]] } else { x.segments.iter().map(|s| &**s).collect() };
    let from: Vec<&[u8]> = pieces.iter().flat_map(|p| p.chunks_exact(matrix)).collect();
    let mut bytes = vec![0; from.len() * matrix];
    // Experts are many and large.
    let work = from.into_iter().zip(bytes.chunks_exact_mut(matrix)).collect();
    on_all_cores(work, |(from, to)| turn(from, to, rows, columns));
    Some(vec![bytes.into()])
}

/// `[rows, columns]` elements of `N` bytes as `[columns, rows]`, square by square, so that both stay in the cache.
fn turn<const N: usize>(from: &[u8], to: &mut [u8], rows: usize, columns: usize) {
    const SIDE: usize = 32;
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<N>().0);
    for row0 in (0..rows).step_by(SIDE) {
        for column0 in (0..columns).step_by(SIDE) {
            for column in column0..columns.min(column0 + SIDE) {
                for row in row0..rows.min(row0 + SIDE) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
}

/// The bytes of encoded weights joined along their rows: each stored tensor of one behind that of the
/// other.
fn joined(encoding: &Encoding, ty: &TensorType, parts: &[Loaded]) -> Result<Bytes, String> {
    let matrix = |shape: &[usize]| match shape {
        [rows, columns] => encoding.tensors("", *rows as u64, *columns as u64),
        _ => Err(format!("{encoding}: expected a matrix, found {shape:?}")),
    };
    let mut bytes = vec![0; ty.bytes(&Dims::default()) as usize];
    for (i, whole) in matrix(&sizes(ty))?.iter().enumerate() {
        let mut at = whole.offset as usize;
        for part in parts {
            let stored = &matrix(&part.shape)?[i];
            let len = stored.bytes as usize;
            let from = part.from(stored.offset as usize).get(..len);
            let to = bytes.get_mut(at..at + len);
            let (Some(from), Some(to)) = (from, to) else {
                return Err(format!("{encoding}: parts do not make {ty}"));
            };
            to.copy_from_slice(from);
            at += len;
        }
    }
    Ok(bytes.into())
}

/// The stored tensors that are the weight `name`, as they lie one after another.
fn tensors(
    name: &str,
    ty: &TensorType,
    source: &dyn WeightSource,
    problems: &mut Vec<TensorProblem>,
) -> Option<Vec<Bytes>> {
    let size = ty.bytes(&Dims::default());
    let wanted = match stored_tensors(name, ty) {
        Ok(wanted) => wanted,
        Err(message) => {
            problems.push(TensorProblem::Constant { op: "dequantise".to_owned(), message });
            return None;
        }
    };
    // Every one is looked at, so that every problem is found.
    let found: Vec<_> =
        wanted.iter().map(|t| (t.offset, tensor(t.clone(), source, problems))).collect();
    let found = found.into_iter().map(|(at, bytes)| Some((at as usize, bytes?)));
    let found = found.collect::<Option<Vec<_>>>()?;
    let matrices = match (&ty.encoding, &sizes(ty)[..]) {
        (Some(_), [leading @ .., _, _]) => leading.iter().product(),
        _ => 1,
    };
    if let Some(problem) = damage(ty, matrices, &wanted, &found, source) {
        problems.push(problem);
        return None;
    }
    let end = size as usize / matrices;
    let zeros = |segments: &mut Vec<Bytes>, count: usize| {
        if count > 0 {
            segments.push(vec![0; count].into());
        }
    };
    // Each matrix has its part of every tensor.
    let mut segments = Vec::new();
    for matrix in 0..matrices {
        let mut at = 0;
        for (offset, bytes) in &found {
            zeros(&mut segments, offset - at);
            let len = bytes.len() / matrices;
            segments.push(bytes.slice(matrix * len..(matrix + 1) * len)?);
            at = offset + len;
        }
        zeros(&mut segments, end - at);
    }
    Some(segments)
}

/// What the checkpoint holds for the weight `name`.
pub(crate) fn stored_tensors(name: &str, ty: &TensorType) -> Result<Vec<StoredTensor>, String> {
    let shape: Vec<u64> = sizes(ty).into_iter().map(|n| n as u64).collect();
    match &ty.encoding {
        None => Ok(vec![StoredTensor::plain(name.to_owned(), ty.dtype.into(), shape)]),
        Some(encoding) => encoding.tensors_of(name, &shape),
    }
}

fn tensor(
    wanted: StoredTensor,
    source: &dyn WeightSource,
    problems: &mut Vec<TensorProblem>,
) -> Option<Bytes> {
    let Some(found) = source.find(&wanted) else {
        let StoredTensor { name, element, shape: expected, .. } = wanted;
        problems.push(TensorProblem::Missing { name, element, expected });
        return None;
    };
    let TensorBytes { element, shape, bytes } = found;
    let size = shape.iter().try_fold(element.size(), |n, d| n.checked_mul(*d));
    let whole = size == Some(bytes.len() as u64);
    if !whole || !wanted.is_held_by(element, &shape) {
        problems.push(TensorProblem::Mismatch {
            name: wanted.name,
            expected: (wanted.element, wanted.shape),
            found: (element, shape),
        });
        return None;
    }
    Some(wanted.adapted(element, &shape, &bytes).map_or(bytes, Bytes::from))
}

/// Runs an op's reference on constants.
fn evaluate(
    op: &str,
    attrs: &[Attr],
    operands: &[Option<Loaded>],
    types: &[TensorType],
    result: usize,
) -> Result<Bytes, String> {
    let op = Op::find(op)?;
    let values: Vec<Option<Tensor>> = operands
        .iter()
        .map(|w| w.as_ref().map(Loaded::decode).transpose())
        .collect::<Result<_, _>>()?;
    let operand_types: Vec<Option<Type>> = operands
        .iter()
        .map(|w| {
            w.as_ref().map(|w| {
                let shape: Vec<u64> = w.shape.iter().map(|&n| n as u64).collect();
                TensorType::weight(w.dtype, &shape).into()
            })
        })
        .collect();
    let operand_types: Vec<Option<&Type>> = operand_types.iter().map(Option::as_ref).collect();
    let values: Vec<Option<&Tensor>> = values.iter().map(Option::as_ref).collect();
    let results: Vec<Type> = types.iter().cloned().map(Type::from).collect();
    let call = OpCall { op, operands: &operand_types, attrs };
    let eval = Eval { call, values: &values, results: &results, step: &StepShape::default() };
    let tensors = (op.reference)(&eval)?;
    let (tensor, ty) = tensors.get(result).zip(types.get(result)).ok_or("no such result")?;
    let mut bytes = vec![0; tensor.data.len() * elements::size(ty.dtype)];
    elements::encode(ty.dtype, &tensor.data, &mut bytes)?;
    Ok(bytes.into())
}
