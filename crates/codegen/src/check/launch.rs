//! Launches: their places, their kernels, and their types.

use infernum_ir::encoding::Packing;
use infernum_ir::encoding::quantised_rows::quantised_rows;
use infernum_ir::{Attr, DType, Dim, Op, OpSet, StepInput, Sym, TensorType, Type};

use super::{Checked, FaultKind, PlanFault, fault};
use crate::TileMap;
use crate::cuda::abi::Part;
use crate::plan::{
    Arg, Argument, KernelLaunch, Launch, Matmul, Plan, Program, Run, TargetKind, Value,
};

impl Plan {
    pub(super) fn check_launch(&self, place: &str, program: &Program, launch: &Launch) -> Checked {
        if launch.names.len() != launch.operands.len() + launch.results.len() {
            return fault(place, "expected a name for each operand and result");
        }
        let operands = || launch.operands.iter().flatten();
        for value in operands().chain(&launch.results) {
            self.check_value(place, program, value)?;
        }
        check_results(place, program, launch, self)?;
        if let Some(freed) = launch.frees.iter().find(|f| **f as usize >= program.buffers.len()) {
            return fault(place, format!("it frees buffer {freed}, which is not there"));
        }
        match &launch.run {
            None if self.target == TargetKind::Cuda && self.device.is_some() => {
                fault(place, "it has no kernel")
            }
            None => Ok(()),
            Some(Run::Parts { .. }) if !launch.has_parts() => {
                fault(place, "its kernels are for parts of the rows, which its values do not have")
            }
            Some(run @ (Run::Kernel(_) | Run::Parts { .. })) => {
                run.kernels().try_for_each(|(part, kernel)| {
                    self.check_kernel(place, launch, kernel)?;
                    // Where tiles lie is told to the copy engine once: a part begins anywhere.
                    if part != Part::All && (kernel.arguments.is_some() || !kernel.tiles.is_empty())
                    {
                        return fault(
                            place,
                            "its kernel cannot be launched for a part of the rows",
                        );
                    }
                    Ok(())
                })
            }
            Some(Run::Matmul(matmul)) => {
                check_matmul(launch, matmul).or_else(|e| fault(place, format!("product: {e}")))
            }
        }
    }

    fn check_kernel(&self, place: &str, launch: &Launch, run: &KernelLaunch) -> Checked {
        if run.kernel as usize >= self.kernels.len() {
            return fault(place, format!("there is no kernel {}", run.kernel));
        }
        let (grid, block) = (run.geometry.grid.len(), run.geometry.block);
        if grid > 3 || !(1..=1024).contains(&block) {
            return fault(place, format!("{grid} dimensions of blocks of {block} threads"));
        }
        let missing = |a: &Argument| match a {
            Argument::Value(i) => {
                launch.named_values().nth(*i as usize).and_then(|(_, v)| v).is_none()
            }
            _ => false,
        };
        if run.arguments.iter().flatten().any(missing) {
            return fault(place, "its kernel is given a value that is not there");
        }
        run.tiles.iter().try_for_each(|tile| check_tile(place, launch, tile))
    }

    /// The launches that belong to no program: those that pack weights, and the one that feeds tokens.
    pub(super) fn check_apart(&self) -> Checked {
        for (i, launch) in self.repacks.iter().enumerate() {
            self.check_repack(&format!("repacks[{i}]"), launch)?;
        }
        self.check_feed()
    }

    fn check_repack(&self, place: &str, launch: &Launch) -> Checked {
        let ([Some(from)], [to]) = (&launch.operands[..], &launch.results[..]) else {
            return fault(place, "expected one operand and one result");
        };
        let op = Op::find("repack").and_then(|op| op.infer(&[Some(&from.ty)], &[]));
        if op.as_deref() != Ok(std::slice::from_ref(&to.ty)) || launch.names.len() != 2 {
            return fault(place, "expected a weight as it is stored, and its packed form");
        }
        match &launch.run {
            Some(Run::Kernel(run)) if run.arguments.is_none() && run.tiles.is_empty() => {
                self.check_kernel(place, launch, run)
            }
            _ => fault(place, "expected a kernel"),
        }
    }

    fn check_feed(&self) -> Checked {
        let Some(launch) = &self.feed else { return Ok(()) };
        let ids = if self.picks() { self.outputs().get(1) } else { self.outputs().first() };
        let ids = ids.map(|c| &c.ty).filter(|_| self.picks() || self.yields_tokens());
        let Some(ids) = ids.filter(|_| self.output_rows == Some(Sym::B)) else {
            return fault("feed", "expected a token for each sequence");
        };
        let tokens = TensorType::act(DType::U32, [Sym::T.into()]);
        let is = |value: Option<&Value>, ty: &TensorType| {
            value.is_some_and(|v| v.ty.tensor().is_ok_and(|found| found == ty))
        };
        let one = launch.operands.len() == 1 && launch.results.len() == 1;
        let fits = is(launch.operands.first().and_then(Option::as_ref), ids)
            && is(launch.results.first(), &tokens)
            && launch.names.len() == 2;
        if !one || !fits {
            return fault(
                "feed",
                "expected one operand and one result, picked tokens and the step's",
            );
        }
        match &launch.run {
            Some(Run::Kernel(run)) if run.arguments.is_none() => {
                self.check_kernel("feed", launch, run)
            }
            _ => fault("feed", "expected a kernel"),
        }
    }
}

/// Results go to the arena, each to a place of its own or to that of an operand of the same size; or
/// they are the next versions of the planes that are operands, in order.
fn check_results(place: &str, program: &Program, launch: &Launch, plan: &Plan) -> Checked {
    let operands = || launch.operands.iter().flatten();
    let mut planes = operands().filter(|v| matches!(v.ty, Type::State(_)));
    let span = |value: &Value| match (value.arg, &value.ty) {
        (Arg::Buffer(b), Type::Tensor(ty)) => {
            let region = program.buffers.get(b as usize)?;
            Some((region.offset, region.offset + ty.bytes(&plan.limits)))
        }
        _ => None,
    };
    for (i, result) in launch.results.iter().enumerate() {
        match result.arg {
            Arg::Buffer(_) => {}
            Arg::State(_) if planes.next().is_some_and(|p| p == result) => continue,
            _ => return fault(place, format!("result {i} cannot go to {:?}", result.arg)),
        }
        let Some((start, end)) = span(result) else { continue };
        let meets = |other: &(u64, u64)| other.0 < end && start < other.1;
        let taken = operands().filter_map(span).filter(meets).any(|other| other != (start, end));
        let twice = launch.results[..i].iter().filter_map(span).any(|other| meets(&other));
        if taken || twice {
            return fault(place, format!("result {i} lies over another value"));
        }
    }
    Ok(())
}

/// A product reads operands of its launch, in sizes that go together.
fn check_matmul(launch: &Launch, m: &Matmul) -> Result<(), String> {
    let optional = [&m.add, &m.bias];
    let given = [&m.x, &m.w].into_iter().chain(optional.into_iter().flatten());
    let is_operand = |v: &&Value| launch.operands.iter().flatten().any(|o| o == *v);
    if !given.clone().all(|v| is_operand(&v)) {
        return Err("expected its values to be operands of the launch".to_owned());
    }
    let y = launch.results.first().ok_or("it has no result")?.ty.tensor()?;
    let (x, w) = (m.x.ty.tensor()?, m.w.ty.tensor()?);
    let (Some((k, rows)), [n, inner]) = (x.shape.split_last(), &w.shape[..]) else {
        return Err(format!("expected rows and a matrix, found {x} and {w}"));
    };
    let fits =
        k == inner && y.shape.split_last() == Some((n, rows)) && !y.is_ragged() && !x.is_ragged();
    let is = |v: &Option<Value>, shape: &[_]| {
        v.as_ref().is_none_or(|v| v.ty.tensor().is_ok_and(|t| t.shape == shape))
    };
    if fits && is(&m.add, &y.shape) && is(&m.bias, &[*n]) {
        Ok(())
    } else {
        Err(format!("{x} by {w} is not {y}"))
    }
}

/// That every launch is a call of an op that there is.
pub(super) fn ops_are_known((i, program): (usize, &Program), ops: &OpSet) -> Checked {
    for (j, launch) in program.launches.iter().enumerate() {
        if launch.op != Launch::COPY
            && let Err(message) = ops.find(&launch.op)
        {
            let place =
                format!("programs[{i}] `{}`.launches[{j}] `%{}`", program.name, launch.name);
            let kind = FaultKind::UnknownOp(launch.op.clone());
            return Err(PlanFault { place, message, kind });
        }
    }
    Ok(())
}

/// That every launch is a call of an op whose results are what it says, and that tokens have the rows that
/// they pick.
pub(super) fn types(
    (i, program): (usize, &Program),
    token_rows: Option<u64>,
    ops: &OpSet,
) -> Checked {
    for (j, launch) in program.launches.iter().enumerate() {
        let place = format!("programs[{i}] `{}`.launches[{j}] `%{}`", program.name, launch.name);
        call(launch, token_rows, ops).or_else(|e| fault(place, format!("`{}`: {e}", launch.op)))?;
    }
    Ok(())
}

fn call(launch: &Launch, token_rows: Option<u64>, ops: &OpSet) -> Result<(), String> {
    let operands: Vec<Option<&Type>> =
        launch.operands.iter().map(|v| v.as_ref().map(|v| &v.ty)).collect();
    let results = || launch.results.iter().map(|v| &v.ty);
    if launch.op == Launch::COPY {
        let copies = match (&operands[..], &results().collect::<Vec<_>>()[..]) {
            ([Some(Type::Tensor(x))], [Type::Tensor(y)]) => {
                (x.dtype, &x.shape) == (y.dtype, &y.shape)
            }
            _ => false,
        };
        return if copies { Ok(()) } else { Err("expected one tensor and its copy".to_owned()) };
    }
    let op = ops.find(&launch.op)?;
    if !op.attrs.iter().map(|d| d.name).eq(launch.attrs.iter().map(|(name, _)| name.as_str())) {
        return Err("its attributes are not those of the op".to_owned());
    }
    for (def, value) in op.operands.iter().zip(&launch.operands) {
        let by_tokens = value.as_ref().is_some_and(|v| v.arg == Arg::Step(StepInput::Tokens));
        let table =
            def.rows_of.filter(|_| by_tokens).and_then(|of| *operands.get(op.operand(of)?)?);
        let rows = table.and_then(|ty| ty.tensor().ok()?.shape.first()?.as_const());
        if let Some(rows) = rows.filter(|rows| token_rows.is_none_or(|n| n > *rows)) {
            let tokens = token_rows.map_or_else(|| "any number of".to_owned(), |n| n.to_string());
            return Err(format!("{tokens} tokens pick from {rows} row(s)"));
        }
    }
    let attrs: Vec<Attr> = launch.attrs.iter().map(|(_, attr)| attr.clone()).collect();
    let inferred = op.infer(&operands, &attrs)?;
    if inferred.iter().eq(results()) {
        Ok(())
    } else {
        Err("its results are of other types".to_owned())
    }
}

/// That the copy engine can read an operand in tiles as it is told to.
fn check_tile(place: &str, launch: &Launch, tile: &TileMap) -> Checked {
    let value = launch.named_values().nth(tile.value as usize).and_then(|(_, v)| v);
    let Some(ty) = value.and_then(|v| v.ty.tensor().ok()) else {
        return fault(place, format!("value {} cannot be read in tiles", tile.value));
    };
    let rows = ty.shape.split_last().and_then(|(_, rows)| Dim::product_of(rows)?.as_const());
    let packing = ty.encoding.as_ref().and_then(|e| e.packing());
    // Rows begin at multiples of 16 bytes. Of packed codes a matrix begins with a unit.
    let readable = match (&ty.encoding, packing) {
        (None, _) => {
            matches!(ty.dtype, DType::Bf16 | DType::F16)
                && ty.last_const().is_some_and(|n| n > 0 && n % 8 == 0)
        }
        (Some(_), Some(_)) => ty.rank() == 2 || rows_of_matrix(ty).is_some_and(|n| n % 8 == 0),
        (Some(encoding), None) => encoding == quantised_rows(),
    };
    if !readable {
        return fault(place, format!("value {} cannot be read in tiles", tile.value));
    }
    if !(1..=TileMap::MOST_ROWS).contains(&tile.rows) {
        return fault(place, format!("it reads tiles of {} rows", tile.rows));
    }
    let parts = if packing.is_some() { 8 } else { TileMap::DEALT };
    let parted = |n: u64| n.is_multiple_of(parts.into());
    let in_parts = parted(tile.rows.into()) && rows.is_some_and(parted);
    if (tile.dealt || packing.is_some()) && !in_parts {
        return fault(place, format!("expected rows of a tile in multiples of {parts}"));
    }
    let bytes = |p: &Packing| p.columns == 128 && p.planes.iter().map(|p| p.bits).eq([8]);
    if tile.dealt && packing.is_some_and(|p| !bytes(p)) {
        return fault(
            place,
            "expected codes of 8 bits in units of 128 columns where rows are dealt",
        );
    }
    Ok(())
}

/// The rows of each of several matrices.
fn rows_of_matrix(ty: &TensorType) -> Option<u64> {
    ty.shape.iter().rev().nth(1)?.as_const()
}
