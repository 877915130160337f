//! Where the operands and results of a launch lie.

use infernum_codegen::cuda::launch_arguments;
use infernum_codegen::{Arg, Argument, CacheLayout, Launch, Matmul, Program, ProgramCall, Value};
use infernum_ir::expr::Expr;
use infernum_ir::{Dim, Dims};

use super::blas::{Places, Shape};
use super::driver::DeviceMemory;
use super::inputs::Layout;
use super::upload::Weights;
use crate::exec::StepInputs;

/// What a launch's places are resolved against.
pub(crate) struct Frame<'a> {
    pub(super) program: &'a Program,
    pub(super) call: &'a ProgramCall,
    /// Where activations begin.
    pub(super) arena: u64,
    /// Bytes before each plane of the cache.
    pub(super) margin: u64,
    pub(super) weights: &'a Weights,
    /// How planes of the cache share its arrays, and these.
    pub(super) cache: &'a CacheLayout,
    pub(super) arrays: &'a [DeviceMemory],
    pub(super) layout: &'a Layout,
}

impl Frame<'_> {
    /// A buffer's address and size.
    pub(crate) fn buffer(&self, buffer: u32) -> Option<(u64, u64)> {
        let region = self.program.buffers.get(buffer as usize)?;
        Some((self.arena + region.offset, region.bytes))
    }

    /// The array of the cache that a call's state is.
    pub(crate) fn array(&self, slot: u32) -> Option<usize> {
        let state = *self.call.states.get(slot as usize)?;
        Some(self.cache.planes.get(state as usize)?.array)
    }

    /// The group of a launch's planes.
    pub(crate) fn group(&self, launch: &Launch) -> usize {
        self.cache.group(self.call, launch)
    }

    /// Bytes of a row of an array of the cache.
    pub(crate) fn row_bytes(&self, array: usize) -> u64 {
        self.cache.arrays.get(array).copied().unwrap_or(0)
    }

    /// Where a slot lies among its blocks, as `slot_at` of the kernels' prelude takes it apart: the first block and, in
    /// the low half, the bytes of one.
    fn slot_place(&self, value: &Value) -> Result<Option<u64>, String> {
        let (Arg::State(slot), Ok(ty)) = (value.arg, value.ty.state()) else { return Ok(None) };
        if !ty.is_slot() {
            return Ok(None);
        }
        let plane = self.call.states.get(slot as usize);
        let place = plane.and_then(|i| self.cache.planes.get(*i as usize));
        let place = place.ok_or_else(|| format!("{:?} is not bound", value.arg))?;
        let block = self.row_bytes(place.array).saturating_mul(StepInputs::BLOCK_SIZE as u64);
        if block.max(place.first).max(ty.bytes()) > u64::from(u32::MAX) {
            let bytes = ty.bytes();
            return Err(format!(
                "a state of {bytes} bytes, {} blocks of {block} bytes before it: kernels count these in 32 bits",
                place.first
            ));
        }
        Ok(Some(place.first << 32 | block))
    }

    pub(crate) fn address(&self, value: &Value) -> Result<u64, String> {
        let missing = || format!("{:?} is not bound", value.arg);
        match value.arg {
            Arg::Buffer(b) => self.buffer(b).map(|(at, _)| at).ok_or_else(missing),
            Arg::Weight(slot) => {
                let index = self.call.weights.get(slot as usize);
                index.and_then(|i| self.weights.address(*i)).ok_or_else(missing)
            }
            Arg::State(slot) => {
                let array = self.array(slot).and_then(|i| self.arrays.get(i));
                array.map(|s| s.address() + self.margin).ok_or_else(missing)
            }
            Arg::Step(input) => Ok(self.layout.input(input)),
        }
    }

    /// The addresses of a launch's values, for the rows that come after `before`; of a slot also its place.
    pub(super) fn arguments(&self, launch: &Launch, before: &Dims) -> Result<Vec<u64>, String> {
        let mut all = Vec::new();
        for (_, value) in launch_arguments(launch) {
            // Of what has no parts, all is launched at once.
            all.push(self.address(value)? + value.part_offset(before).unwrap_or(0));
            all.extend(self.slot_place(value)?);
        }
        Ok(all)
    }

    /// What a foreign kernel is given, 8 bytes each; smaller numbers are in the low ones.
    pub(super) fn foreign(
        &self,
        launch: &Launch,
        arguments: &[Argument],
        scratch: Option<u64>,
        number: &dyn Fn(&Expr) -> Result<f64, String>,
    ) -> Result<Vec<u64>, String> {
        let one = |argument: &Argument| match argument {
            Argument::Value(i) => {
                let value = launch.named_values().nth(*i as usize).and_then(|(_, v)| v);
                self.address(value.ok_or("an argument is left out")?)
            }
            Argument::Scratch => Ok(scratch.unwrap_or(0)),
            Argument::Null => Ok(0),
            Argument::I32(e) => Ok(u64::from(number(e)? as i32 as u32)),
            Argument::I64(e) => Ok(number(e)? as i64 as u64),
            Argument::F32(e) => Ok(u64::from((number(e)? as f32).to_bits())),
        };
        arguments.iter().map(one).collect()
    }

    pub(super) fn matmul(
        &self,
        launch: &Launch,
        m: &Matmul,
        dims: &Dims,
    ) -> Result<(Shape, Places), String> {
        let optional = |v: &Option<Value>| v.as_ref().map_or(Ok(0), |v| self.address(v));
        let y = launch.results.first().ok_or("it has no result")?;
        let places = Places {
            x: self.address(&m.x)?,
            w: self.address(&m.w)?,
            bias: optional(&m.bias)?,
            add: optional(&m.add)?,
            y: self.address(y)?,
        };
        Ok((shape(launch, m, dims)?, places))
    }
}

/// The sizes of a library's product.
pub(super) fn shape(launch: &Launch, m: &Matmul, dims: &Dims) -> Result<Shape, String> {
    let (x, w) = (m.x.ty.tensor()?, m.w.ty.tensor()?);
    let y = launch.results.first().ok_or("it has no result")?.ty.tensor()?;
    let rows = Dim::product_of(&x.shape[..x.rank().saturating_sub(1)]);
    let [n, k] = w.shape[..] else { return Err(format!("expected a matrix, found {w}")) };
    Ok(Shape {
        m: rows.ok_or("too many rows")?.eval(dims),
        n: n.eval(dims),
        k: k.eval(dims),
        input: x.dtype,
        output: y.dtype,
        bias: m.bias.as_ref().map(|b| b.ty.tensor().map(|t| t.dtype)).transpose()?,
        add: m.add.is_some(),
    })
}
