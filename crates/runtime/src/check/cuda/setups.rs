//! What is tried of the kernels: calls that are written, those that rules make, and those of each encoding.

use std::collections::HashSet;

use infernum_codegen::cuda::{CheckSizes, Library, TemplateError};
use infernum_ir::{DType, Encoding, Op, OpSet};
use infernum_passes::data::Kernels;

use super::super::batches::{
    DECODES, FEW, HUNDRED, HUNDREDS, LARGE, LONG, RAGGED, SINGLE, SIXTEEN,
};
use super::super::calls::{CASES, OF_CODES, OF_EIGHT_BITS, ON_GPUS, PRIMITIVES};
use super::super::cases::{Case, Tried, is_written, made};
use super::super::sizes::{HEADS, Sizes};
use super::super::{Batch, encodings};
use super::Setup;
use super::shapes::{CODED, CODED_FULL, CODED_ONCE, ROUNDED, SHAPES, Shape};

const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Rows that a warp, a block and a large block take.
const ROWS: [usize; 3] = [1024, 4096, 9216];

/// Heads as models have them: `[H, G, D, E]`.
const ATTENTION: [[usize; 4]; 7] = [
    [8, 2, 64, 64],
    [8, 2, 128, 128],
    [10, 2, 128, 128],
    [16, 1, 128, 128],
    [6, 2, 80, 48],
    [4, 2, 256, 256],
    [20, 2, 128, 64],
];

/// Heads of which a tile of queries holds few tokens.
const MANY_QUERIES: [[usize; 4]; 2] = [[16, 1, 64, 64], [16, 1, 128, 128]];

/// A call, and where it stands among those of its op.
struct Called {
    op: Op,
    case: &'static Case,
    index: usize,
    calls: usize,
    /// As its template says.
    sizes: CheckSizes,
    /// Whether rows of the cache are codes.
    codes: bool,
}

/// Everything that is tried, of ops whose names contain `only`.
pub(super) fn setups(
    kernels: &Kernels,
    library: &Library,
    only: &str,
    problem: &mut dyn FnMut(&str, String),
) -> Vec<Setup> {
    for op in kernels.ops.all().filter(|op| op.name.contains(only)) {
        match op.cuda.map(|t| library.template(t)) {
            // An op may name a template that is for no kernel of ours.
            None | Some(Ok(_) | Err(TemplateError::Missing { .. })) => {}
            Some(Err(e)) => problem(op.name, e.to_string()),
        }
    }
    let mut all = written(&kernels.ops, library);
    all.extend(coded(&kernels.ops, library));
    all.retain(|s| s.op.name.contains(only));
    match decoding(&kernels.ops, only) {
        Ok(setups) => all.extend(setups),
        Err(why) => problem(encodings::OP, why),
    }
    let mut has_template = |op: &Op| match op.cuda.map(|t| library.template(t)) {
        None => false,
        Some(Ok(_)) => true,
        Some(Err(e)) => {
            problem(op.name, e.to_string());
            false
        }
    };
    let wanted = kernels.ops.all().filter(|op| op.name.contains(only));
    let wanted: Vec<Op> = wanted.filter(|op| has_template(op)).collect();
    for op in wanted.into_iter().filter(|op| op.fused.is_some() && !is_written(*op)) {
        // Kernels are chosen by the most tokens that a step may have.
        let mut batches = vec![&RAGGED, &SINGLE, &FEW, &SIXTEEN, &DECODES];
        let sizes = op.cuda.and_then(|t| library.template(t).ok()).map(|t| t.check_sizes);
        if sizes == Some(CheckSizes::Products) {
            batches.extend([&LARGE, &HUNDRED]);
        }
        for dtype in FLOATS {
            match made(kernels, op, dtype, 1) {
                Ok(calls) => {
                    let calls =
                        calls.iter().flat_map(|call| batches.iter().map(move |b| (call, b)));
                    all.extend(calls.map(|(call, &batch)| Setup {
                        op,
                        call: call.clone(),
                        dtype,
                        batch,
                        variants: &[],
                    }));
                }
                Err(why) => {
                    problem(op.name, why);
                    break;
                }
            }
        }
    }
    all
}

/// What is tried of every encoding.
fn decoding(ops: &OpSet, only: &str) -> Result<Vec<Setup>, String> {
    let op = ops.find(encodings::OP)?;
    let wanted = if op.name.contains(only) { FLOATS } else { return Ok(Vec::new()) };
    let all = ops.encodings().flat_map(|e| wanted.map(|dtype| (e, dtype)));
    let mut setups = Vec::new();
    for (encoding, dtype) in all {
        let calls = [
            Some(encodings::call(encoding, dtype, ops)?),
            encodings::packed_call(encoding, dtype, ops)?,
        ];
        let calls = calls.into_iter().flatten();
        setups.extend(calls.map(|call| Setup { op, call, dtype, batch: &SINGLE, variants: &[] }));
    }
    Ok(setups)
}

/// Products whose weights are codes: of every encoding that has a packed form in the first call of an op that does nothing
/// beside, of one with minimums, one without and one of odd units elsewhere.
fn coded(ops: &OpSet, library: &Library) -> Vec<Setup> {
    // What kernels see of an encoding, each once.
    let mut seen = HashSet::new();
    let mut is_new = |e: &&Encoding| {
        e.packed().is_ok_and(|e| e.packing().is_some_and(|p| seen.insert(p.constants(&e))))
    };
    let packable: Vec<&Encoding> = ops.encodings().filter(|e| is_new(e)).collect();
    // Minimums, and no more scales than every variant takes.
    let scales = |e: &Encoding| Some(e.packed().ok()?.packing()?.scale_bytes());
    let is_rich = |e: &&&Encoding| e.minimum().is_some() && scales(e).is_some_and(|n| n <= 24);
    let richest = packable.iter().find(is_rich).or(packable.first()).copied();
    let is_bare =
        |e: &&&Encoding| e.packed().is_ok_and(|e| e.packing().is_some_and(|p| p.minimum.is_none()));
    let barest = packable.iter().find(is_bare).copied();
    // The copy engine's tiles begin at multiples of 128 bytes: of such units those of three warpgroups, parted in two, do not.
    let is_narrow =
        |e: &&&Encoding| e.packed().is_ok_and(|e| e.packing().is_some_and(|p| p.bytes % 32 != 0));
    let narrow = packable.iter().find(is_narrow).copied();
    let eights = packable.iter().find(|e| e.activations().is_some());
    let (mut all, mut seen_ops) = (Vec::new(), HashSet::new());
    let cases = CASES.iter().chain(ON_GPUS).chain(PRIMITIVES).filter(|c| c.may_be_coded());
    let cases = cases.map(|case| (case, false)).chain(OF_CODES.iter().map(|case| (case, true)));
    for (case, by_64) in cases {
        let Ok(op) = ops.find(case.op()) else { continue };
        let Some(Ok(template)) = op.cuda.map(|t| library.template(t)) else { continue };
        if template.check_sizes == CheckSizes::Experts {
            let sizes = Sizes::heads(HEADS[3]);
            let [outer, inner] = sizes.channels.map(|n| n as u64);
            // Experts' matrices are as wide as tokens, or as high.
            let fits = |e: &&&Encoding| {
                e.minimum().is_some()
                    && e.layout(outer, inner).is_ok()
                    && e.layout(inner, outer).is_ok()
            };
            let Some(encoding) = packable.iter().find(fits) else { continue };
            let call = Tried::Coded(case, sizes, encoding.name().to_owned());
            for batch in [&FEW, &SIXTEEN, &LARGE, &HUNDRED, &HUNDREDS] {
                let call = call.clone();
                all.push(Setup { op, call, dtype: DType::Bf16, batch, variants: &[] });
            }
            continue;
        }
        if template.check_sizes != CheckSizes::Products {
            continue;
        }
        // Every encoding in one call of the op: others differ in what is done with sums.
        let of_all = op.fused.is_none() && seen_ops.insert(op.name);
        let some: Vec<&Encoding> = richest.into_iter().chain(barest).chain(narrow).collect();
        let encodings = if of_all { &packable } else { &some };
        let each = CODED.iter().flat_map(|s| encodings.iter().map(move |e| (s, e)));
        let once = CODED_ONCE.iter().flat_map(|s| richest.iter().map(move |e| (s, e)));
        let full = CODED_FULL.iter().flat_map(|s| some.iter().map(move |e| (s, e)));
        for (shape, encoding) in each.chain(once).chain(full) {
            // Root mean squares are of 64 columns.
            if by_64 && shape.outputs() % 64 != 0 {
                continue;
            }
            // Some pack several rows into one number.
            if encoding.layout(shape.outputs() as u64, shape.inputs as u64).is_err() {
                continue;
            }
            for (dtype, batch) in shape.steps() {
                let sizes = Sizes::product(case, shape.inputs, shape.heads);
                let call = Tried::Coded(case, sizes, encoding.name().to_owned());
                // Of each encoding what differs by it; all variants of one.
                let few: &[&str] = if of_all {
                    &[
                        "codes1_two",
                        "codes8",
                        "codes16_pairs",
                        "codes16_direct",
                        "codes16_small",
                        "codes16_stream",
                        "codes16_pair",
                        "codes64",
                        "codes256",
                        "plain",
                    ]
                } else {
                    &["codes16_small", "codes16_stream", "codes16_pair", "codes64", "codes64_pair"]
                };
                let by_shape = Some(*encoding) == richest || !shape.variants.is_empty();
                let variants = if by_shape { shape.variants } else { few };
                all.push(Setup { op, call, dtype, batch, variants });
            }
        }
        if let Some(encoding) = eights {
            let shapes = CODED.iter().chain(&CODED_ONCE).chain(&CODED_FULL);
            let shapes = shapes.filter(|s| !by_64 || s.outputs() % 64 == 0);
            quantised(op, case, encoding.name(), shapes, ops, &mut all);
        }
    }
    for (case, encoding) in OF_EIGHT_BITS.iter().filter_map(|case| eights.map(|e| (case, e))) {
        let Ok(op) = ops.find(case.op()) else { continue };
        quantised(op, case, encoding.name(), ROUNDED.iter(), ops, &mut all);
    }
    all
}

/// The same with activations of 8 bits, of the shapes that have such.
fn quantised(
    op: Op,
    case: &'static Case,
    encoding: &str,
    shapes: impl Iterator<Item = &'static Shape>,
    ops: &OpSet,
    all: &mut Vec<Setup>,
) {
    for shape in shapes {
        for (dtype, batch) in shape.steps() {
            // Tensor cores keep too few bits of sums of such products for f32.
            if dtype == DType::F32 {
                continue;
            }
            let sizes = Sizes::product(case, shape.inputs, shape.heads);
            let call = Tried::Quantised(case, sizes, encoding.to_owned());
            if call.module(dtype, ops).is_ok() {
                all.push(Setup { op, call, dtype, batch, variants: shape.variants });
            }
        }
    }
}

/// What is tried of ops that calls are written of.
fn written(ops: &OpSet, library: &Library) -> Vec<Setup> {
    let cases = || CASES.iter().chain(ON_GPUS).chain(PRIMITIVES);
    let mut all = Vec::new();
    for case in cases() {
        let Ok(op) = ops.find(case.op()) else { continue };
        // A fused op may have a kernel on the CPU only.
        let Some(Ok(template)) = op.cuda.map(|t| library.template(t)) else { continue };
        let calls: Vec<_> = cases().filter(|c| c.op() == op.name).collect();
        let index = calls.iter().position(|c| std::ptr::eq(*c, case)).unwrap_or(0);
        let sizes = template.check_sizes;
        for codes in [false, true].into_iter().filter(|codes| !codes || case.takes_rows()) {
            let called = Called { op, case, index, calls: calls.len(), sizes, codes };
            called.small(&mut all);
            called.large(&mut all);
        }
    }
    all
}

impl Called {
    fn setup(&self, sizes: Sizes, dtype: DType, batch: &'static Batch) -> Setup {
        let tried = if self.codes { Tried::Cached } else { Tried::Written };
        let call = tried(self.case, sizes);
        Setup { op: self.op, call, dtype, batch, variants: &[] }
    }

    /// Small and odd sizes.
    fn small(&self, all: &mut Vec<Setup>) {
        for (i, sizes) in HEADS.map(Sizes::heads).into_iter().enumerate() {
            if !self.case.fits(sizes) {
                continue;
            }
            all.push(self.setup(sizes, DType::F32, &RAGGED));
            all.push(self.setup(sizes, DType::Bf16, &RAGGED));
            if i == 0 || i == HEADS.len() - 1 {
                // Fast products are tried in f16 at the size of a model.
                let few: &[&str] = &["plain", "library"];
                let variants = if self.sizes == CheckSizes::Products { few } else { &[] };
                all.push(Setup { variants, ..self.setup(sizes, DType::F16, &RAGGED) });
            }
        }
    }

    /// The shapes of products: an op's first call in bf16, the others in f16.
    fn products(&self, all: &mut Vec<Setup>) {
        for (i, shape) in SHAPES.iter().enumerate() {
            let sizes = Sizes::product(self.case, shape.inputs, shape.heads);
            for batch in shape.batches {
                let setup =
                    |dtype| Setup { variants: shape.variants, ..self.setup(sizes, dtype, batch) };
                if self.index == 0 {
                    all.push(setup(DType::Bf16));
                }
                if i == 0 && (self.index > 0 || self.calls == 1) {
                    all.push(setup(DType::F16));
                }
            }
        }
    }

    /// What admits its variants.
    fn large(&self, all: &mut Vec<Setup>) {
        if self.sizes == CheckSizes::Products {
            return self.products(all);
        }
        let mut push = |sizes, dtype, batch| {
            if self.case.fits(sizes) {
                all.push(self.setup(sizes, dtype, batch));
            }
        };
        match self.sizes {
            CheckSizes::Rows if self.index == 0 => {
                for (rows, dtype) in ROWS.into_iter().flat_map(|n| FLOATS.map(|d| (n, d))) {
                    push(Sizes::rows(rows), dtype, &RAGGED);
                }
                // 1152 are no whole number of warps' rounds.
                for (rows, dtype) in [(1152, DType::Bf16), (4096, DType::Bf16), (4096, DType::F16)]
                {
                    push(Sizes::rows(rows), dtype, &HUNDREDS);
                }
            }
            CheckSizes::Many => {
                for dtype in FLOATS {
                    push(Sizes::heads(HEADS[3]), dtype, &HUNDREDS);
                }
            }
            CheckSizes::Heads => {
                let dtype = if self.index == 1 { DType::F16 } else { DType::Bf16 };
                for heads in ATTENTION {
                    push(Sizes::heads(heads), dtype, &DECODES);
                }
                if self.index == 0 {
                    for heads in MANY_QUERIES {
                        push(Sizes::heads(heads), dtype, &LONG);
                    }
                }
            }
            CheckSizes::Decode => {
                for dtype in FLOATS {
                    push(Sizes::heads(HEADS[3]), dtype, &FEW);
                }
            }
            CheckSizes::Experts => {
                for batch in [&FEW, &SIXTEEN, &LARGE, &HUNDRED, &HUNDREDS] {
                    push(Sizes::heads(HEADS[3]), DType::Bf16, batch);
                }
                push(Sizes::heads(HEADS[3]), DType::F16, &LARGE);
            }
            CheckSizes::Small | CheckSizes::Rows | CheckSizes::Products => {}
        }
    }
}
