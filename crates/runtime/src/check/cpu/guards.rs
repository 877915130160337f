//! Kernels fenced in: what `check-kernels` runs them behind.
//!
//! Each result is written between guards of a known pattern and is poisoned before; what is only
//! read is compared with a copy. Vector kernels write through pointers, which nothing else watches.

use std::ops::Range;

use infernum_codegen::Launch;
use infernum_ir::Type;

use crate::cpu::HostMemory;
use crate::cpu::kernels::{Args, Kernel, Operand, Plane, ViewMut};
use crate::cpu::memory::MAX_ARGS;
use crate::exec::{Bytes, elements};

/// Bytes of each guard: as wide as four of the widest vectors, so that what lies between stays
/// aligned.
const GUARD: usize = 256;

/// No number that a kernel is likely to write.
const PATTERN: u8 = 0xa5;

/// A NaN in every float type.
const POISON: u8 = 0xff;

/// A kernel that fails where it writes anything but its results, or less than all of them.
pub(super) struct Guarded {
    kernel: Box<dyn Kernel>,
    /// Whether a result is a version of the cache.
    writes_cache: bool,
}

impl Guarded {
    pub(super) fn new(launch: &Launch, kernel: Box<dyn Kernel>) -> Guarded {
        let writes_cache = launch.results.iter().any(|r| matches!(r.ty, Type::State(_)));
        Guarded { kernel, writes_cache }
    }
}

impl Kernel for Guarded {
    fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
        let inputs = Inputs::of(args);
        let in_place = args.operands.iter().any(|o| matches!(o, Some(Operand::InPlace)));
        let mut results = [const { None }; MAX_ARGS];
        for (i, (fenced, result)) in results.iter_mut().zip(&args.results).enumerate() {
            let kept = |r: &ViewMut<'_>| (in_place && i == 0).then(|| r.bytes.to_vec());
            *fenced = result.as_ref().map(|r| Fenced::new(r.bytes.len(), kept(r))).transpose()?;
        }
        let mut planes = [const { None }; MAX_ARGS];
        for (fenced, plane) in planes.iter_mut().zip(&args.planes) {
            let copy = |p: &Plane<'_>| Fenced::new(p.bytes.len(), Some(p.bytes.to_vec()));
            *fenced = plane.as_ref().map(copy).transpose()?;
        }
        self.kernel.run(&mut fenced_args(args, &mut results, &mut planes))?;
        inputs.unchanged(args)?;
        for (i, (fenced, result)) in results.iter().zip(&mut args.results).enumerate() {
            let (Some(fenced), Some(result)) = (fenced, result) else { continue };
            let name = format!("result {i}");
            fenced.check(&name)?;
            if !(in_place && i == 0) {
                written(&name, fenced.bytes(), elements::size(result.dtype))?;
            }
            result.bytes.copy_from_slice(fenced.bytes());
        }
        let slots: Vec<usize> = if self.writes_cache { args.step.written_rows() } else { vec![] };
        for (i, (fenced, plane)) in planes.iter().zip(&mut args.planes).enumerate() {
            let (Some(fenced), Some(plane)) = (fenced, plane) else { continue };
            fenced.check(&format!("the cache of operand {i}"))?;
            let rows = plane.bytes.chunks(plane.row_bytes.max(1));
            let mut rows = rows.zip(fenced.bytes().chunks(plane.row_bytes.max(1))).enumerate();
            let changed = rows.find(|(row, (old, new))| old != new && !slots.contains(row));
            if let Some((row, _)) = changed {
                return Err(format!(
                    "writes row {row} of operand {i}'s cache, which is not its own"
                ));
            }
            plane.bytes.copy_from_slice(fenced.bytes());
        }
        Ok(())
    }

    fn reads_values(&self, operand: usize) -> bool {
        self.kernel.reads_values(operand)
    }

    fn is_reference(&self) -> bool {
        self.kernel.is_reference()
    }
}

/// The same launch on fenced memory.
fn fenced_args<'b>(
    args: &'b mut Args<'_>,
    results: &'b mut [Option<Fenced>; MAX_ARGS],
    planes: &'b mut [Option<Fenced>; MAX_ARGS],
) -> Args<'b> {
    let mut fenced = Args {
        step: args.step,
        operands: args.operands,
        results: [const { None }; MAX_ARGS],
        planes: [const { None }; MAX_ARGS],
        rope: &mut *args.rope,
        isa: args.isa,
    };
    for ((view, inner), outer) in fenced.results.iter_mut().zip(results).zip(&args.results) {
        if let (Some(inner), Some(outer)) = (inner, outer) {
            *view = Some(ViewMut { dtype: outer.dtype, bytes: inner.bytes_mut() });
        }
    }
    for ((plane, inner), outer) in fenced.planes.iter_mut().zip(planes).zip(&args.planes) {
        if let (Some(inner), Some(outer)) = (inner, outer) {
            *plane = Some(Plane {
                bytes: inner.bytes_mut(),
                row_bytes: outer.row_bytes,
                first: outer.first,
            });
        }
    }
    fenced
}

/// Memory between two guards.
struct Fenced {
    memory: HostMemory,
    inside: Range<usize>,
}

impl Fenced {
    /// With these contents, or poisoned.
    fn new(bytes: usize, contents: Option<Vec<u8>>) -> Result<Fenced, String> {
        let inside = GUARD..GUARD + bytes;
        let mut memory = HostMemory::zeroed(bytes + 2 * GUARD).ok_or("no memory for guards")?;
        memory.as_bytes_mut().fill(PATTERN);
        match contents {
            Some(contents) => memory.as_bytes_mut()[inside.clone()].copy_from_slice(&contents),
            None => memory.as_bytes_mut()[inside.clone()].fill(POISON),
        }
        Ok(Fenced { memory, inside })
    }

    fn bytes(&self) -> &[u8] {
        &self.memory.as_bytes()[self.inside.clone()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_bytes_mut()[self.inside.clone()]
    }

    fn check(&self, name: &str) -> Result<(), String> {
        let all = self.memory.as_bytes();
        let (before, after) = (&all[..self.inside.start], &all[self.inside.end..]);
        let wrong = |b: &u8| *b != PATTERN;
        if let Some(at) = before.iter().rposition(wrong) {
            return Err(format!("writes {} byte(s) before {name}", self.inside.start - at));
        }
        match after.iter().position(wrong) {
            Some(at) => Err(format!("writes {} byte(s) past the end of {name}", at + 1)),
            None => Ok(()),
        }
    }
}

/// Poison that is still there was not written, or was computed from memory that was not.
fn written(name: &str, bytes: &[u8], size: usize) -> Result<(), String> {
    let poisoned = |e: &[u8]| e.iter().all(|b| *b == POISON);
    match bytes.chunks(size.max(1)).position(poisoned) {
        Some(at) => Err(format!("leaves element {at} of {name} unwritten")),
        None => Ok(()),
    }
}

/// Copies of what a launch may only read.
struct Inputs(Vec<Vec<Vec<u8>>>);

impl Inputs {
    fn of(args: &Args<'_>) -> Inputs {
        let copy =
            |o: &Option<Operand<'_>>| parts(o.as_ref()).into_iter().map(<[u8]>::to_vec).collect();
        Inputs(args.operands.iter().map(copy).collect())
    }

    fn unchanged(&self, args: &Args<'_>) -> Result<(), String> {
        let mut pairs = self.0.iter().zip(&args.operands);
        match pairs.position(|(old, now)| {
            parts(now.as_ref()).into_iter().ne(old.iter().map(Vec::as_slice))
        }) {
            Some(i) => Err(format!("writes to operand {i}")),
            None => Ok(()),
        }
    }
}

/// The memory of an operand.
fn parts<'a>(operand: Option<&Operand<'a>>) -> Vec<&'a [u8]> {
    match operand {
        Some(Operand::Tensor(view)) => vec![view.bytes],
        Some(Operand::Weight(weight, _)) => {
            let values = weight.values.as_deref().map(bytemuck::cast_slice);
            let segments: &'a [Bytes] = &weight.segments;
            segments.iter().map(|s| &**s).chain(values).collect()
        }
        Some(Operand::InPlace | Operand::State) | None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Comparison, RAGGED, compare};
    use super::*;
    use crate::cpu::simd;

    /// The error that sums in f32 are allowed.
    const ALLOWED: f64 = 1e-5;

    /// A mistake in a kernel.
    #[derive(Clone, Copy)]
    enum Mistake {
        None,
        Before,
        Past,
        Unwritten,
        Input,
        Weight,
        Cache,
        /// One product among many is off by a ten-thousandth.
        Element,
    }

    /// Writes zeros (or products), and makes the mistake.
    struct Wrong(Mistake);

    impl Kernel for Wrong {
        fn run(&self, args: &mut Args<'_>) -> Result<(), String> {
            let plane = args.planes.iter_mut().find_map(Option::take);
            if let Some(Plane { bytes, row_bytes, .. }) = plane {
                args.step.slots().for_each(|s| bytes[s * row_bytes..][..row_bytes].fill(0));
                if let Mistake::Cache = self.0 {
                    let mut rows = 0..bytes.len() / row_bytes;
                    let free = rows.find(|row| args.step.slots().all(|s| s != *row));
                    bytes[free.unwrap_or(0) * row_bytes] = 0;
                }
                return Ok(());
            }
            let out = args.results[0].take().ok_or("no result")?.bytes;
            if let Mistake::Element = self.0 {
                let [a, b]: [&[f32]; 2] =
                    [0, 1].map(|i| bytemuck::cast_slice(parts(args.operands[i].as_ref())[0]));
                let out: &mut [f32] = bytemuck::cast_slice_mut(out);
                out.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a * b);
                // Where there are many, so that one does not show over the whole.
                if out.len() > 600 {
                    out[5] += 1e-4;
                }
                return Ok(());
            }
            let operand = parts(args.operands[1].as_ref())[0];
            let (end, last) = (out.len() as isize, out.len() - 4);
            out[..last].fill(0);
            match self.0 {
                Mistake::Unwritten => return Ok(()),
                Mistake::Before => simd::poke(out, -1, 0),
                Mistake::Past => simd::poke(out, end, 0),
                Mistake::Input | Mistake::Weight => simd::poke(operand, 5, !operand[5]),
                Mistake::None | Mistake::Cache | Mistake::Element => {}
            }
            out[last..].fill(0);
            Ok(())
        }
    }

    /// What the check says where the first kernel of `op` makes a mistake.
    fn found(op: &str, mistake: Mistake) -> Result<Comparison, String> {
        let module = "module m
graph g {
  %ids = step tokens : u32[T]
  %table = weight \"t\" : const f32[31, 8]
  %w = weight \"w\" : const f32[8, 8]
  %k0 = state k : state f32[2, 4]
  %x = embedding(%ids, %table) : f32[T, 8]
  %y = linear(%x, %w, _) {dtype: none} : f32[T, 8]
  %h = reshape(%x) {shape: [T, 2, 4]} : f32[T, 2, 4]
  %k1 = kv_write(%k0, %h) : state f32[2, 4]
  %z = mul(%x, %y) : f32[T, 8]
  return %x, %y, %z, %k1
}
schedule g 0..1\n";
        let module = infernum_ir::text::parse(module, "test").unwrap_or_else(|e| panic!("{e}"));
        let wrap = |launch: &Launch, kernel: Box<dyn Kernel>| -> Box<dyn Kernel> {
            let wrong = launch.op == op;
            let kernel: Box<dyn Kernel> = if wrong { Box::new(Wrong(mistake)) } else { kernel };
            Box::new(Guarded::new(launch, kernel))
        };
        compare((&module, &module), &RAGGED, 1, &wrap, ALLOWED)
    }

    #[test]
    fn what_a_kernel_does_outside_its_results_is_caught() {
        for (op, mistake, message) in [
            ("mul", Mistake::Before, "g 0/%z: writes 1 byte(s) before result 0"),
            ("mul", Mistake::Past, "g 0/%z: writes 1 byte(s) past the end of result 0"),
            ("mul", Mistake::Unwritten, "of result 0 unwritten"),
            ("mul", Mistake::Input, "g 0/%z: writes to operand 1"),
            ("linear", Mistake::Weight, "g 0/%y: writes to operand 1"),
            ("kv_write", Mistake::Cache, "of operand 0's cache, which is not its own"),
        ] {
            let error = found(op, mistake).expect_err(message);
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn wrong_numbers_are_left_to_the_comparison() {
        for op in ["mul", "linear"] {
            let compared = found(op, Mistake::None).unwrap_or_else(|e| panic!("{op}: {e}"));
            assert!(compared.error > 0.1, "{op}: {compared:?}");
            assert!(!compared.is_within(ALLOWED), "{op}: {compared:?}");
        }
        let right = found("", Mistake::None).unwrap_or_else(|e| panic!("{e}"));
        assert!(right.is_within(ALLOWED) && right.elements > 0, "{right:?}");
    }

    /// Over the whole of a result, what is wrong with one element does not show.
    #[test]
    fn one_wrong_element_of_a_kernel_is_caught() {
        let one = found("mul", Mistake::Element).unwrap_or_else(|e| panic!("{e}"));
        assert!(one.error < ALLOWED, "{one:?}");
        assert!(!one.is_within(ALLOWED), "{one:?}");
        assert_eq!(one.worst.map(|w| (w.result, w.index)), Some(("%z".to_owned(), 5)));
    }
}
