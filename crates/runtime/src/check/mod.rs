//! What the checks of kernels against their ops' bodies share, whatever the kernels run on: random
//! weights, ragged batches on scattered blocks, and the comparison.

mod batches;
mod calls;
mod cases;
mod compare;
pub mod cpu;
pub mod cuda;
pub mod encodings;
mod sizes;

use std::collections::HashMap;
use std::fmt;

use infernum_codegen::Bucket;
use infernum_ir::encoding::StoredTensor;
use infernum_ir::interp::{Carried, Interpreter, Rounding, States, StepShape, Tensor};
use infernum_ir::picking::Edits;
use infernum_ir::{
    DType, Dims, Encoding, Module, Param, StateType, TensorType, Type, WeightRef, random,
};

pub use self::compare::{Comparison, Element, allowed};
use crate::exec::{
    GroupKind, Observed, PlanExecutor, StepInputs, TensorBytes, WeightSource, elements,
};
use crate::sampling::{SamplingParams, SeenToken, Tell, TokenPick};

/// How one kernel did on one case.
#[derive(Clone, Debug)]
pub struct KernelVerdict {
    /// The op.
    pub op: String,
    /// Which of its template's variants; `None` on the CPU.
    pub variant: Option<String>,
    /// Its activations' element type.
    pub dtype: DType,
    /// The call, and the sizes.
    pub case: String,
    /// What the op's tolerance allows.
    pub allowed: f64,
    /// How far its results are from what they should be, or why they could not be compared.
    pub outcome: Result<Comparison, String>,
}

impl KernelVerdict {
    /// That nothing could be tried.
    fn problem(op: &str, problem: String) -> KernelVerdict {
        KernelVerdict {
            op: op.to_owned(),
            variant: None,
            dtype: DType::F32,
            case: String::new(),
            allowed: 0.0,
            outcome: Err(problem),
        }
    }

    /// Whether the kernel is right.
    pub fn passed(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|c| c.is_within(self.allowed))
    }
}

impl fmt::Display for KernelVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.passed() { "ok  " } else { "FAIL" };
        write!(f, "{mark} {}", self.op)?;
        if let Some(variant) = &self.variant {
            write!(f, ".{variant}")?;
        }
        write!(f, " {} ({}): ", self.dtype, self.case)?;
        let compared = match &self.outcome {
            Err(problem) => return f.write_str(problem),
            Ok(compared) => compared,
        };
        let Comparison { elements, error, of_bound, worst, .. } = compared;
        write!(f, "error {error:.2e} of {:.2e}, ", self.allowed)?;
        write!(f, "of each of {elements} element(s) at most {of_bound:.2} of its bound")?;
        match worst {
            Some(Element { result, index, found, expected }) if *of_bound > 1.0 => {
                write!(f, ": element {index} of {result} is {found}, expected {expected}")
            }
            _ => Ok(()),
        }
    }
}

/// Steps of several sequences: of each the tokens that are new, and how many it has then.
struct Batch {
    name: &'static str,
    /// The kinds of steps that kernels are chosen for.
    buckets: &'static [Bucket],
    steps: &'static [&'static [(usize, usize)]],
    limits: Dims,
}

impl Batch {
    /// Blocks of the cache, none of which two sequences share.
    fn blocks(&self, block: usize) -> usize {
        self.sequences() * self.blocks_of_one(block)
    }

    fn sequences(&self) -> usize {
        self.steps.iter().map(|s| s.len()).max().unwrap_or(0)
    }

    fn blocks_of_one(&self, block: usize) -> usize {
        let longest = self.steps.iter().flat_map(|s| s.iter()).map(|s| s.1).max();
        longest.unwrap_or(0).div_ceil(block)
    }

    /// Every sequence has its part of the cache. None of its blocks lies behind another; but for the
    /// second sequence, whose blocks do.
    fn table(&self, sequence: usize, context: usize, block: usize) -> Vec<u32> {
        let (all, own) = (self.blocks_of_one(block), context.div_ceil(block));
        // A stride that has no divisor in common with the number of blocks visits each once.
        let stride = (7..8 + all).find(|s| gcd(*s, all) == 1).unwrap_or(1);
        let within = |b: usize| if sequence == 1 { b } else { b * stride % all };
        (0..own).map(|b| (sequence * all + within(b)) as u32).collect()
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A module's steps and what they yield in `f64`, computed once for all kernels that are tried.
struct Trial {
    weights: Weights,
    steps: Vec<(StepInputs, Carried)>,
}

impl Trial {
    /// With random weights, on blocks of so many tokens.
    fn new(module: &Module, seed: u64, batch: &Batch, block: usize) -> Result<Trial, String> {
        let weights = Weights::random(module, seed)?;
        let (mut states, mut steps) = (States::default(), Vec::new());
        let picks = picks();
        let groups = groups(module);
        for (n, sizes) in batch.steps.iter().enumerate() {
            let tokens: usize = sizes.iter().map(|(new, _)| new).sum();
            let tokens: Vec<u32> =
                (0..tokens).map(|i| ((i * 11 + 7 * n + 3) % 31) as u32).collect();
            let mut inputs = StepInputs::new(block).with_groups(&groups);
            let mut at = 0;
            for (i, &(new, context)) in sizes.iter().enumerate() {
                let blocks = batch.table(i, context, block);
                let new = &tokens[at..at + new];
                inputs.push(new, context, &blocks).map_err(|e| e.to_string())?;
                inputs.set_pick(&picks[(n + i) % picks.len()]);
                at += new.len();
            }
            let exact = weights.interpret(module, inputs.step(), &tokens, &mut states)?;
            steps.push((inputs, exact));
        }
        Ok(Trial { weights, steps })
    }

    /// What an executor's steps yield against what they should.
    fn compare(&self, executor: &mut dyn PlanExecutor, allowed: f64) -> Result<Comparison, String> {
        let mut all = Comparison::default();
        for (inputs, exact) in &self.steps {
            let mut outcome = Err("no result was shown".to_owned());
            let mut observe = |_: usize, found: Vec<Observed>| {
                outcome = add(&mut all, &found, exact, allowed);
            };
            let ticket = executor.submit_observed(inputs, &mut observe);
            ticket.and_then(|t| executor.wait(t).map(|_| ())).map_err(|e| e.to_string())?;
            outcome?;
        }
        Ok(all)
    }
}

/// How a call's planes, which are of one kind, are kept. Slots without rows beside them fill a block.
fn groups(module: &Module) -> Vec<GroupKind> {
    let is_slot = |ty: &Type| ty.state().is_ok_and(StateType::is_slot);
    let slots = module.graphs.iter().any(|g| g.params().any(|(.., ty)| is_slot(ty)));
    vec![if slots { GroupKind::Slot { blocks: 1 } } else { GroupKind::Paged }]
}

/// How tokens are picked where a module does so: in every way that leaves nothing to chance, since a
/// draw may turn on a rounding.
fn picks() -> [TokenPick<'static>; 5] {
    const SEEN: [SeenToken; 3] = [
        SeenToken { token: 0, generated: 3 },
        SeenToken { token: 3, generated: 0 },
        SeenToken { token: 5, generated: SeenToken::BANNED },
    ];
    // Few are allowed: not as many as are told of. A bit for each of the most columns that are tried.
    const ALLOWED: [u32; 1024] = {
        let mut words = [0; 1024];
        words[0] = 0x055f;
        words
    };
    let params = SamplingParams {
        repetition_penalty: 1.5,
        frequency_penalty: 0.25,
        presence_penalty: -0.5,
        ..SamplingParams::GREEDY
    };
    let of = |edits: Edits<'static>, tell: Option<Tell>| TokenPick {
        params,
        position: 1,
        edits,
        counts_own: tell.is_some(),
        tell,
    };
    let tell = |top, given| Some(Tell { top, given });
    let edits = Edits { bias: &[(2, 0.75), (3, -0.5)], seen: &SEEN, allowed: None };
    let allowed = Some(&ALLOWED[..]);
    [
        TokenPick::default(),
        of(edits, None),
        of(Edits::default(), tell(20, None)),
        of(Edits { allowed, ..edits }, tell(7, None)),
        TokenPick { tell: tell(0, Some(1)), ..TokenPick::default() },
    ]
}

/// Adds the results of one step.
fn add(
    all: &mut Comparison,
    found: &[Observed],
    exact: &[Tensor],
    allowed: f64,
) -> Result<(), String> {
    if found.len() != exact.len() {
        return Err(format!("{} result(s), expected {}", found.len(), exact.len()));
    }
    let mut pairs = found.iter().zip(exact);
    pairs.try_for_each(|(found, exact)| {
        let name = format!("%{}", found.name);
        all.add(&name, &found.shape, (&found.data, &exact.data), allowed)
    })
}

/// Random weights.
struct Weights {
    /// As they are stored, by stored tensor.
    stored: HashMap<String, TensorBytes>,
    /// As they are meant.
    values: HashMap<String, Vec<f64>>,
}

impl Weights {
    fn random(module: &Module, seed: u64) -> Result<Weights, String> {
        let mut all = Weights { stored: HashMap::new(), values: HashMap::new() };
        for (_, param, ty) in module.graphs.iter().flat_map(infernum_ir::Graph::params) {
            let (Param::Weight(w), Type::Tensor(ty)) = (param, ty) else { continue };
            if let Some(encoding) = &ty.encoding {
                all.encoded(w, encoding, ty, seed)?;
                continue;
            }
            let sizes = ty.sizes(&Dims::default());
            let mut values = random::uniform(&w.name, seed, sizes.iter().product());
            if w.name.starts_with(EIGHTHS) {
                for v in &mut values {
                    *v = (*v * 8.0).round() / 8.0;
                }
            }
            let mut bytes = vec![0; values.len() * elements::size(ty.dtype)];
            elements::encode(ty.dtype, &values, &mut bytes)?;
            values.clear();
            elements::decode(ty.dtype, &bytes, &mut values);
            let shape = sizes.iter().map(|&n| n as u64).collect();
            let stored = TensorBytes { element: ty.dtype.into(), shape, bytes: bytes.into() };
            all.stored.insert(w.name.clone(), stored);
            all.values.insert(w.name.clone(), values);
        }
        Ok(all)
    }

    /// Adds an encoded weight, which may be a stack of matrices.
    fn encoded(
        &mut self,
        w: &WeightRef,
        encoding: &Encoding,
        ty: &TensorType,
        seed: u64,
    ) -> Result<(), String> {
        let sizes = ty.sizes(&Dims::default());
        let [.., rows, columns] = sizes[..] else { return Err(format!("{ty} is no matrix")) };
        let size = (rows as u64, columns as u64);
        let mut values = Vec::new();
        for name in w.tensors(None) {
            let (all, of_one) = small(encoding, size, &name, seed)?;
            values.extend(of_one);
            for (named, (tensor, bytes)) in
                encoding.tensors(&name, size.0, size.1)?.iter().zip(&all)
            {
                let (element, shape) = (tensor.element, tensor.shape.clone());
                let stored = TensorBytes { element, shape, bytes: bytes.clone().into() };
                self.stored.insert(named.name.clone(), stored);
            }
        }
        self.values.insert(w.name.clone(), values);
        Ok(())
    }

    /// What a step carries at its end.
    fn interpret(
        &self,
        module: &Module,
        step: &StepShape,
        tokens: &[u32],
        states: &mut States,
    ) -> Result<Carried, String> {
        let weights = |w: &WeightRef, _: Option<u32>, ty: &Type| {
            let shape = ty.tensor()?.sizes(&Dims::default());
            let values = self.values.get(&w.name).ok_or("no such weight")?;
            Ok(Tensor { shape, data: values.clone() })
        };
        let interpreter = Interpreter::new(&weights, Rounding::ToType);
        interpreter.step(module, step, tokens, states, &mut |_, _| {})
    }
}

/// A weight's stored tensors.
type Stored = Vec<(StoredTensor, Vec<u8>)>;

/// A random encoded weight `[rows, columns]`, as it is stored and its values, which are no larger than those
/// of other weights: where codes, or scales of scales, are large numbers, floats are made smaller. Products of
/// products of larger ones are infinite in f16, and the little that is not says nothing.
fn small(
    encoding: &Encoding,
    (rows, columns): (u64, u64),
    name: &str,
    seed: u64,
) -> Result<(Stored, Vec<f64>), String> {
    let mut exponent = Encoding::TAME;
    loop {
        let rng = &mut random::named(name, seed);
        let stored = encoding.random((rows, columns), Some(exponent), rng)?;
        let parts = stored.iter().map(|(_, bytes)| &bytes[..]).collect();
        let decoder = encoding.decoder(rows, columns, parts)?;
        let (mut values, mut row) = (Vec::new(), vec![0.0; columns as usize]);
        for n in 0..rows {
            decoder.row(n, 0, &mut row);
            values.extend(row.iter().map(|v| f64::from(*v)));
        }
        let square: f64 = values.iter().map(|v| v * v).sum();
        let above = (square / values.len() as f64).sqrt().log2().ceil() as i32;
        if above <= 0 || exponent < Encoding::TAME {
            return Ok((stored, values));
        }
        exponent -= above;
    }
}

impl WeightSource for Weights {
    fn tensor(&self, name: &str) -> Option<TensorBytes> {
        self.stored.get(name).cloned()
    }
}

/// Weights whose names begin so are eighths: sums of a few hundred of their products are exact in f32,
/// so that what exact ops make of them can be compared bit by bit.
const EIGHTHS: &str = "eighths";
