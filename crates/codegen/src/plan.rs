//! The plan: plain data.

use std::collections::BTreeMap;

use infernum_ir::expr::Expr;
use infernum_ir::{
    Attr, DType, Dim, Dims, Memory, Op, StateType, StepInput, Sym, Task, TensorType, Type,
};
use infernum_passes::Bucket;
use serde::{Deserialize, Serialize};

use crate::TileMap;
use crate::cuda::abi::Part;
use crate::cuda::{Device, Geometry, within};

/// Version of the serialised form. A plan of another version must be compiled again.
pub const VERSION: u32 = 17;

/// The machine that a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "named as usual")]
pub enum TargetKind {
    Cpu,
    Cuda,
}

/// A compiled module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`VERSION`] of the compiler that made it.
    pub version: u32,
    /// The module's name.
    pub module: String,
    /// What it runs on.
    pub target: TargetKind,
    /// What its rows of output are.
    #[serde(default)]
    pub task: Task,
    /// The largest step that its buffers hold.
    pub limits: Dims,
    /// Size of the one arena that all programs share.
    pub arena_bytes: u64,
    /// One for each graph; graphs that come out the same share one.
    pub programs: Vec<Program>,
    /// One for each bucket: which is run depends on the step.
    pub schedules: Vec<Schedule>,
    /// What to load; shared by all calls that use the same.
    pub weights: Vec<Weight>,
    /// Whether a row's numbers do not depend on the step that it is computed in, but for whether it is a generated
    /// row or one of a prompt.
    pub reproducible: bool,
    /// Whether a step computes its sequences whole, each from its first token to its last, without a cache of rows.
    #[serde(default)]
    pub takes_whole: bool,
    /// The planes of the KV cache.
    pub states: Vec<StateSpec>,
    /// Which rows the output has: `B`, those of tokens that yield one, or `T`, every token;
    /// `None` when the plan does not ask.
    pub output_rows: Option<Sym>,
    /// Rows of the smallest table that ids of tokens pick from; `None` where they pick from none.
    pub token_rows: Option<u64>,
    /// The GPU that it is for, if it is for one.
    pub device: Option<Device>,
    /// Kernels that launches name; none on the CPU, which has its own.
    pub kernels: Vec<Kernel>,
    /// On a GPU that yields a token for each sequence: puts the tokens of the step before where a step
    /// waits for them.
    pub feed: Option<Launch>,
    /// On a GPU: what makes the packed form of weights while these are loaded, a launch for each pair of types that
    /// recipes name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repacks: Vec<Launch>,
    /// How many adapters steps may use. A bank has as many rows for each: one or, for experts, one for each expert.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub adapters: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What a step leaves, by the results of its last call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yields {
    /// Logits, one row for each of the output's.
    Logits,
    /// For each of these the likeliest token, and no logits.
    Tokens,
    /// Logits, the tokens that were picked of them, and log-probabilities: the results of the op `pick`.
    Picks,
}

impl Yields {
    /// Of these results; `None` if they are none of it.
    pub fn of(results: &[Carried]) -> Option<Yields> {
        let is_logits = |Carried { ty, .. }: &Carried| {
            let float = matches!(ty.dtype, DType::F32 | DType::F16 | DType::Bf16);
            let plain = float && ty.encoding.is_none();
            plain && ty.rank() == 2 && !ty.is_ragged() && ty.last_const().is_some()
        };
        let is = |c: &Carried, dtype, rank| c.ty.dtype == dtype && c.ty.rank() == rank;
        match results {
            [x, ids, logprobs, told, ..]
                if is_logits(x)
                    && is(ids, DType::U32, 1)
                    && is(logprobs, DType::F32, 2)
                    && is(told, DType::U32, 2)
                    && logprobs.ty.shape == told.ty.shape
                    && [ids, told].iter().all(|c| c.ty.shape[0] == x.ty.shape[0]) =>
            {
                Some(Yields::Picks)
            }
            [ids, ..] if is(ids, DType::U32, 1) => Some(Yields::Tokens),
            [x, ..] if is_logits(x) => Some(Yields::Logits),
            _ => None,
        }
    }
}

/// What a step asks of its schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// Only the likeliest token of each row is wanted.
    pub greedy: bool,
    /// Some of its tokens have adapters.
    pub adapted: bool,
}

/// How the steps of one bucket run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The steps it is for.
    pub bucket: Bucket,
    /// Whether it computes what adapters do: steps whose tokens have none may run another one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adapts: bool,
    /// The calls that make up a step, in order.
    pub calls: Vec<ProgramCall>,
}

/// The launches of one graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The graph's name.
    pub name: String,
    /// Where in the arena each buffer lies. Buffers that are never live together may overlap.
    pub buffers: Vec<Region>,
    /// In the order to run them.
    pub launches: Vec<Launch>,
    /// What the next call finds as its carried values, in order. Carried value `i` lies at the
    /// same place in every program that another follows; what the last call leaves may lie anywhere.
    pub results: Vec<Carried>,
}

/// A part of the arena, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// A multiple of 64.
    pub offset: u64,
    /// Enough for every value that the buffer holds, at the plan's limits.
    pub bytes: u64,
}

/// A tensor that a program leaves for the next call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Carried {
    /// Its name in the IR.
    pub name: String,
    /// Index into [`Program::buffers`].
    pub buffer: u32,
    /// Its type.
    pub ty: TensorType,
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The op, or [`Launch::COPY`].
    pub op: String,
    /// Its attributes and their names, in declared order.
    pub attrs: Vec<(String, Attr)>,
    /// What the op's operands and then its results are called.
    pub names: Vec<String>,
    /// One entry an operand declared; `None` where an optional one is left out.
    pub operands: Vec<Option<Value>>,
    /// Where the results go. A result that names an operand's buffer is computed in place.
    pub results: Vec<Value>,
    /// Name of the first result in the IR.
    pub name: String,
    /// Where it was written.
    pub loc: Option<String>,
    /// Buffers that nothing reads after this launch.
    pub frees: Vec<u32>,
    /// What runs it on a GPU; `None` on the CPU.
    pub run: Option<Run>,
}

/// What runs a launch on a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Run {
    /// One of the plan's kernels.
    Kernel(KernelLaunch),
    /// Two of them, one for the step's generated rows and one for its prompt rows; a part without rows is not
    /// launched. See [`Value::part_offset`].
    Parts {
        /// Runs generated rows.
        generated: Box<KernelLaunch>,
        /// Runs prompt rows.
        prompt: Box<KernelLaunch>,
    },
    /// A library's matrix product.
    Matmul(Matmul),
}

/// A kernel and how much of it is launched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelLaunch {
    /// Index into [`Plan::kernels`].
    pub kernel: u32,
    /// Blocks, threads and shared memory.
    pub geometry: Geometry,
    /// What a kernel that is not of a template's text is given; such a kernel starts when the one
    /// before it has ended.
    pub arguments: Option<Vec<Argument>>,
    /// Maps for the GPU's copy engine, which the kernel takes after its other parameters.
    pub tiles: Vec<TileMap>,
    /// Bytes at most of weights that the next launches read, of which the kernel is told where they lie, before `step`:
    /// it may have them brought to the L2 cache. `None` if it is not told.
    pub ahead: Option<u64>,
}

/// What a foreign kernel is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Argument {
    /// The address of [`Launch::named_values`]' value of that index.
    Value(u32),
    /// The address of the kernel's own memory.
    Scratch,
    /// No address.
    Null,
    /// A whole number of 32 bits.
    I32(Expr),
    /// A whole number of 64 bits.
    I64(Expr),
    /// A float of 32 bits.
    F32(Expr),
}

/// Result 0 is `x · wᵀ + bias + add`, accumulated in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matmul {
    /// `[.., K]`.
    pub x: Value,
    /// `[N, K]`.
    pub w: Value,
    /// As the result; it may be its memory.
    pub add: Option<Value>,
    /// `[N]`.
    pub bias: Option<Value>,
}

/// A kernel in CUDA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its function.
    pub name: String,
    /// The template that it was made from.
    pub template: String,
    /// Which of its variants.
    pub variant: String,
    /// CUDA C++ that includes nothing, or PTX.
    pub text: String,
    /// Whether the text is PTX, which the driver takes as it is.
    pub is_ptx: bool,
    /// Bytes of device memory of its own, zero at load; launches of it follow one another.
    pub scratch: u64,
}

/// An operand or a result: a place and the type that it is read as.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Where it lies.
    pub arg: Arg,
    /// Its type.
    pub ty: Type,
}

/// A place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Arg {
    /// Index into [`Program::buffers`].
    Buffer(u32),
    /// Index into [`ProgramCall::weights`].
    Weight(u32),
    /// Index into [`ProgramCall::states`].
    State(u32),
    /// An input of the step.
    Step(StepInput),
}

/// One call of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramCall {
    /// Index into [`Plan::programs`].
    pub program: u32,
    /// The layer, for messages.
    pub layer: Option<u32>,
    /// Indices into [`Plan::weights`].
    pub weights: Vec<u32>,
    /// Indices into [`Plan::states`].
    pub states: Vec<u32>,
}

/// A constant and how it is made from the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Weight {
    /// Its type.
    pub ty: TensorType,
    /// How to make it.
    pub recipe: Recipe,
}

/// How a constant is made from tensors of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Recipe {
    /// A tensor as it is stored.
    Tensor(String),
    /// No tensor of the checkpoint, but memory that is zero at first, and of which a row along the first axis is
    /// filled when an adapter is loaded: by its name.
    Bank(String),
    /// Tensors of one shape, along a new first axis.
    Stack(Vec<Recipe>),
    /// Tensors joined along their first axis.
    Concat(Vec<Weight>),
    /// Rows of another weight, which is stored: no bytes of its own. Only at the top of a
    /// [`Weight`] of the plan, and never of one that is a view itself.
    Rows {
        /// Index into [`Plan::weights`].
        weight: u32,
        /// The first row; the weight's type says how many. On a target that stores the other
        /// weight in one piece it begins at `start` times the bytes of a row, which for vectors
        /// may be at any multiple of an element's size.
        start: u64,
    },
    /// Any other op over constants, evaluated once at load.
    Op {
        /// The op's name.
        op: String,
        /// Its attributes, in declared order.
        attrs: Vec<Attr>,
        /// One entry an operand declared.
        operands: Vec<Option<Weight>>,
        /// Types of all its results.
        types: Vec<TensorType>,
        /// Which of them this is.
        result: u32,
    },
}

/// One plane of one layer's KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StateSpec {
    /// The layer it belongs to.
    pub layer: Option<u32>,
    /// Its name.
    pub plane: String,
    /// Its rows, one for each cached token, or a sequence's one state.
    pub ty: StateType,
}

impl Recipe {
    /// Calls `visit` with every weight that is packed, as it is stored and then.
    pub fn repacked<'r>(
        &'r self,
        ty: &'r TensorType,
        visit: &mut dyn FnMut(&'r TensorType, &'r TensorType),
    ) {
        match self {
            Recipe::Tensor(_) | Recipe::Bank(_) | Recipe::Stack(_) | Recipe::Rows { .. } => {}
            Recipe::Concat(parts) => parts.iter().for_each(|w| w.recipe.repacked(&w.ty, visit)),
            Recipe::Op { op, operands, .. } => {
                for w in operands.iter().flatten() {
                    if Op::find(op).is_ok_and(|op| op.memory == Memory::Repacked) {
                        visit(&w.ty, ty);
                    }
                    w.recipe.repacked(&w.ty, visit);
                }
            }
        }
    }

    fn tensors<'r>(&'r self, ty: &TensorType, found: &mut BTreeMap<&'r str, TensorType>) {
        match self {
            Recipe::Tensor(name) => _ = found.insert(name, ty.clone()),
            Recipe::Stack(parts) => {
                let shape = ty.shape.get(1..).unwrap_or_default().to_vec();
                let part = TensorType { shape, ..ty.clone() };
                for p in parts {
                    p.tensors(&part, found);
                }
            }
            Recipe::Concat(parts) => parts.iter().for_each(|w| w.recipe.tensors(&w.ty, found)),
            Recipe::Bank(_) | Recipe::Rows { .. } => {} // the other weight's
            Recipe::Op { operands, .. } => {
                operands.iter().flatten().for_each(|w| w.recipe.tensors(&w.ty, found));
            }
        }
    }
}

impl Launch {
    /// Moves operand 0 to result 0 unchanged.
    pub const COPY: &str = "copy";
}

impl Plan {
    /// The most specific schedule for a step of `tokens`, in which every sequence has one or not and no token has an
    /// adapter; its index. It leaves all that the plan's steps can leave.
    pub fn schedule(&self, tokens: u64, decode: bool) -> Option<usize> {
        self.schedule_for(tokens, decode, Asks::default())
    }

    /// As [`Plan::schedule`], for a step of which only the likeliest token of each row is wanted.
    pub fn greedy_schedule(&self, tokens: u64, decode: bool) -> Option<usize> {
        self.schedule_for(tokens, decode, Asks { greedy: true, ..Asks::default() })
    }

    /// As [`Plan::schedule`], for a step that asks for this.
    pub fn schedule_for(&self, tokens: u64, decode: bool, asks: Asks) -> Option<usize> {
        let leaves = |yields: Option<Yields>| {
            // Where all schedules compute what adapters do, steps without any run those, too.
            let found = self.most_specific(tokens, decode, (yields, asks.adapted));
            found.or_else(|| self.most_specific(tokens, decode, (yields, !asks.adapted)))
        };
        let tokens = asks.greedy.then(|| leaves(Some(Yields::Tokens))).flatten();
        tokens.or_else(|| leaves(self.yields(0)))
    }

    /// The most specific one that leaves this, and adapts or not.
    pub(crate) fn most_specific(
        &self,
        tokens: u64,
        decode: bool,
        wanted: (Option<Yields>, bool),
    ) -> Option<usize> {
        let all = self.schedules.iter().enumerate();
        let found = all.filter(|(i, s)| {
            s.bucket.holds(tokens, decode) && (self.yields(*i), s.adapts) == wanted
        });
        found.min_by_key(|(_, s)| s.bucket.width()).map(|(i, _)| i)
    }

    /// The steps of a schedule that are within the plan's limits: none where the fewest tokens are more than the
    /// most.
    pub fn steps(&self, schedule: usize) -> Option<Bucket> {
        self.schedules.get(schedule).map(|s| within(s.bucket, &self.limits))
    }

    /// What the last call leaves: the model's outputs, which are those of every schedule but the greedy
    /// ones beside others.
    pub fn outputs(&self) -> &[Carried] {
        self.outputs_of(0)
    }

    /// What the last call of a schedule leaves.
    pub fn outputs_of(&self, schedule: usize) -> &[Carried] {
        let last = self.schedules.get(schedule).and_then(|s| s.calls.last());
        last.and_then(|c| self.programs.get(c.program as usize)).map_or(&[], |p| &p.results)
    }

    /// What the steps of a schedule leave, if it is what models yield.
    pub fn yields(&self, schedule: usize) -> Option<Yields> {
        Yields::of(self.outputs_of(schedule))
    }

    /// Whether steps pick tokens as each row asks.
    pub fn picks(&self) -> bool {
        self.yields(0) == Some(Yields::Picks)
    }

    /// Whether steps yield tokens, u32, instead of logits.
    pub fn yields_tokens(&self) -> bool {
        self.outputs().first().is_some_and(|o| o.ty.dtype == DType::U32)
    }

    /// How many tokens there are that may come in and out: the columns of the logits, where the plan
    /// yields such, but no more than the rows of what they pick from. 0 if it has neither.
    pub fn vocabulary(&self) -> u64 {
        let has_logits = self.task.generates() && !self.yields_tokens();
        let logits = self.outputs().first().filter(|_| has_logits);
        let columns = logits.and_then(|o| o.ty.last_const());
        columns.into_iter().chain(self.token_rows).min().unwrap_or(0)
    }

    /// Numbers of a row of output; 0 where it yields tokens.
    pub fn width(&self) -> u64 {
        let rows = self.outputs().first().filter(|_| !self.yields_tokens());
        rows.and_then(|o| o.ty.last_const()).unwrap_or(0)
    }

    /// The stored tensors that the weights are made of, with their types. Weights may share them:
    /// what one bucket reads packed, another may read apart.
    pub fn tensors(&self) -> BTreeMap<&str, TensorType> {
        let mut tensors = BTreeMap::new();
        self.weights.iter().for_each(|w| w.recipe.tensors(&w.ty, &mut tensors));
        tensors
    }

    /// Bytes of the weights that are stored: what a device must hold. Views of rows add none.
    pub fn stored_bytes(&self) -> u64 {
        let stored = self.weights.iter().filter(|w| !matches!(w.recipe, Recipe::Rows { .. }));
        stored.map(|w| w.ty.bytes(&Dims::default())).fold(0, u64::saturating_add)
    }

    /// The memory for adapters: indices of weights, with the names of what adapters have for them, and types.
    pub fn banks(&self) -> impl Iterator<Item = (usize, &str, &TensorType)> {
        self.weights.iter().enumerate().filter_map(|(i, w)| match &w.recipe {
            Recipe::Bank(name) => Some((i, name.as_str(), &w.ty)),
            _ => None,
        })
    }

    /// Rows of a bank of this type that an adapter has.
    pub fn bank_rows(&self, bank: &TensorType) -> Option<u64> {
        let rows = bank.shape.first()?.as_const()?;
        rows.checked_div(self.adapters).filter(|each| each * self.adapters == rows)
    }

    /// Bytes of KV cache for one token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let rows = self.states.iter().filter(|s| !s.ty.is_slot());
        rows.map(|s| s.ty.bytes()).fold(0, u64::saturating_add)
    }

    /// Bytes of KV cache for one sequence, whatever its length: its states of fixed size.
    pub fn slot_bytes_per_sequence(&self) -> u64 {
        let slots = self.states.iter().filter(|s| s.ty.is_slot());
        slots.map(|s| s.ty.bytes()).fold(0, u64::saturating_add)
    }
}

impl Run {
    /// The kernels that are launched, each with the rows that it is launched for; a library's product has none.
    pub fn kernels(&self) -> impl Iterator<Item = (Part, &KernelLaunch)> {
        let all = match self {
            Run::Kernel(kernel) => [Some((Part::All, kernel)), None],
            Run::Parts { generated, prompt } => {
                [Some((Part::Generated, &**generated)), Some((Part::Prompt, &**prompt))]
            }
            Run::Matmul(_) => [None, None],
        };
        all.into_iter().flatten()
    }
}

impl Value {
    /// Bytes of it that lie before a part of the step's rows, where `before` are the sizes of the rows before
    /// the part: none of what is encoded, whose codes and scales lie apart. `None` where a part's rows do not lie side by side.
    pub fn part_offset(&self, before: &Dims) -> Option<u64> {
        let Type::Tensor(ty) = &self.ty else { return Some(0) };
        if ty.constant {
            return Some(0);
        }
        let (rows, row) = ty.shape.split_first()?;
        let by_row = matches!(rows, Dim::Sym { sym: Sym::T | Sym::S, .. });
        let is_output_row = self.arg == Arg::Step(StepInput::OutputRows);
        (by_row && !is_output_row && row.iter().all(|d| d.as_const().is_some()))
            .then(|| if ty.encoding.is_some() { 0 } else { ty.bytes(before) })
    }
}

impl Launch {
    /// Whether a kernel of it can be launched for a part of the step's rows: these lie side by side in all of
    /// its operands and results.
    pub fn has_parts(&self) -> bool {
        let mut values = self.operands.iter().flatten().chain(&self.results);
        values.all(|v| v.part_offset(&Dims::default()).is_some())
    }

    /// Whether result 0 takes an operand's place.
    pub fn is_in_place(&self) -> bool {
        let place = self.results.first().map(|y| y.arg);
        let taken = |a: Arg| matches!(a, Arg::Buffer(_)) && Some(a) == place;
        self.operands.iter().flatten().any(|x| taken(x.arg))
    }

    /// Operands and then results under their names; `None` where an optional one is left out.
    pub fn named_values(&self) -> impl Iterator<Item = (&str, Option<&Value>)> {
        let values = self.operands.iter().map(Option::as_ref);
        let values = values.chain(self.results.iter().map(Some));
        self.names.iter().map(String::as_str).zip(values)
    }

    /// An attribute by its name.
    pub fn attr(&self, name: &str) -> Option<&Attr> {
        self.attrs.iter().find(|(n, _)| n == name).map(|(_, a)| a)
    }
}
