//! Random trials of a rule.

use infernum_ir::encoding::{Code, CodeKind, EncodingDef, Group, Stored};
use infernum_ir::expr::Expr;
use infernum_ir::interp::{SeqShape, StepShape, Tensor, slot_shape};
use infernum_ir::{
    Attr, AttrDef, AttrDefault, AttrKind, DType, Dim, Encoding, StateType, Sym, TensorType, Type,
};

use super::side::Difference;
use super::{Counterexample, Operand};
use crate::data::{DimPattern, Rule, Samples, Sizes, VarType};

/// Sizes that dimension variables take: 1, odd, unequal.
const SIZES: [u64; 6] = [1, 2, 3, 4, 5, 6];

/// Magnitudes of operands. With small ones only is an eps seen, with large ones only a cap.
const MAGNITUDES: [f64; 5] = [1e-4, 1e-2, 1.0, 10.0, 1e2];

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub(super) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    pub(super) fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of the values that a file gives for an attribute.
    pub(super) fn sample(&mut self, given: &Samples) -> Attr {
        // Two closures over one generator: each gets its own numbers, made beforehand.
        let mut parts = [self.next(), self.next()].map(Rng::new);
        let [below, unit] = &mut parts;
        given.pick(&mut |n| below.below(n), &mut || unit.unit())
    }

    /// In [low, high), uniform in the logarithm.
    fn log(&mut self, low: f64, high: f64) -> f64 {
        (low.ln() + self.unit() * (high / low).ln()).exp()
    }
}

/// Elements of an operand that a counterexample shows.
const SHOWN: usize = 12;

/// One choice of sizes, attributes and types.
pub(super) struct Trial {
    pub(super) step: StepShape,
    pub(super) sizes: Sizes,
    /// One a value variable of the rule; `None` where it is left out.
    pub(super) types: Vec<Option<Type>>,
    /// One an attribute variable of the rule.
    pub(super) attrs: Vec<Attr>,
}

impl Trial {
    pub(super) fn sample(rule: &Rule, rng: &mut Rng) -> Result<Trial, String> {
        // Every third trial is small: a failure is then shown in a few elements.
        let small = rng.below(3) == 0;
        let step = step(small, rng);
        let sizes = sizes(rule, small, rng);
        let dtype = rng.pick(&[DType::F32, DType::Bf16, DType::F16]);
        let types = rule.values.iter().map(|(name, ty)| {
            if ty.optional && rng.coin() {
                return Ok(None);
            }
            let ty = type_of(ty, dtype, &sizes);
            ty.map(Some).ok_or_else(|| format!("`{name}` has no size"))
        });
        let types = types.collect::<Result<_, String>>()?;
        let attrs = rule.attrs.iter().map(|(name, def)| {
            let shape = rule.shapes.iter().find(|(n, _)| n == name).map(|(_, s)| s);
            match shape {
                Some(shape) => small_dims(shape, &sizes)
                    .map(Attr::Dims)
                    .ok_or_else(|| format!("`{name}` has no size")),
                None => match rule.samples.iter().find(|(n, _)| n == name) {
                    Some((_, given)) => Ok(rng.sample(given)),
                    None => attr(name, def, rng),
                },
            }
        });
        let attrs = attrs.collect::<Result<_, String>>()?;
        Ok(Trial { step, sizes, types, attrs })
    }

    /// A value for each variable.
    pub(super) fn operands(&self, rule: &Rule, rng: &mut Rng) -> Vec<Option<Tensor>> {
        let common = rng.coin().then(|| rng.pick(&MAGNITUDES));
        let operand = |((_, var), ty): (&(String, VarType), &Option<Type>)| {
            let ty = ty.as_ref()?;
            let magnitude = common.unwrap_or_else(|| rng.pick(&MAGNITUDES));
            let below = var.below.as_ref().and_then(|d| d.eval(&self.sizes));
            let below = below.map_or(20, |d| d.eval(&self.step.dims()) as usize);
            let mut values = tensor(ty, magnitude, below, &self.step, rng);
            if var.not_negative {
                values.data.iter_mut().for_each(|x| *x = x.abs());
            }
            Some(values)
        };
        rule.values.iter().zip(&self.types).map(operand).collect()
    }

    pub(super) fn counterexample(
        &self,
        rule: &Rule,
        message: String,
        difference: Option<Difference>,
    ) -> Counterexample {
        let shown = |ty: &Option<Type>| ty.as_ref().map_or("left out".to_owned(), Type::to_string);
        let names = rule.values.iter().map(|(n, _)| n.clone());
        let size = |ty: &Type| shape(ty, &self.step).iter().product::<usize>();
        let (error, operands, at) = match difference {
            Some(Difference { error, operands, at }) => (Some(error), operands, Some(at)),
            None => (None, Vec::new(), None),
        };
        let operand = |(name, t): (&(String, VarType), Option<Tensor>)| {
            let mut data = t?.data;
            let elements = data.len();
            data.truncate(SHOWN);
            Some(Operand { name: name.0.clone(), elements, first: data })
        };
        Counterexample {
            message,
            error,
            at,
            operands: rule.values.iter().zip(operands).filter_map(operand).collect(),
            values: names.zip(self.types.iter().map(shown)).collect(),
            attrs: rule
                .attrs
                .iter()
                .zip(&self.attrs)
                .map(|((n, _), a)| (n.clone(), a.to_string()))
                .collect(),
            step: self.step.seqs.iter().map(|s| (s.new, s.context)).collect(),
            elements: self.types.iter().flatten().map(size).sum(),
        }
    }
}

/// One to three sequences of a few tokens, with or without a past.
fn step(small: bool, rng: &mut Rng) -> StepShape {
    let (seqs, most, past) = if small { (1, 2, 2) } else { (1 + rng.below(3), 3, 4) };
    let seq = |_| {
        let new = 1 + rng.below(most);
        SeqShape { new, context: new + rng.below(past) }
    };
    StepShape::of((0..seqs).map(seq).collect())
}

fn sizes(rule: &Rule, small: bool, rng: &mut Rng) -> Sizes {
    let choices = if small { &SIZES[..2] } else { &SIZES[..] };
    let any = |rng: &mut Rng| match rng.below(4) {
        0 => Dim::sym(Sym::B),
        1 => Dim::Const(rng.pick(choices)),
        _ => Dim::sym(Sym::T),
    };
    let mut sizes = Sizes::default();
    let mut lead = vec![any(rng)];
    if rng.coin() {
        lead.push(Dim::Const(rng.pick(choices)));
    }
    sizes.rest = Some(lead);
    for (_, ty) in rule.values.iter().chain(&rule.shapes) {
        for dim in ty.dims.iter().chain(&ty.below) {
            dim.names(&mut |name| {
                if !sizes.vars.contains_key(name) {
                    let size = match dim {
                        DimPattern::Any(_) => any(rng),
                        _ => Dim::Const(rng.pick(choices)),
                    };
                    sizes.vars.insert(name.to_owned(), size);
                }
            });
        }
    }
    sizes
}

/// The dimensions of a type. Sizes must be known, and no larger than a trial's: a mistaken rule must not make us
/// allocate without bound.
pub(super) fn small_dims(ty: &VarType, sizes: &Sizes) -> Option<Vec<Dim>> {
    let dims = dims(ty, sizes)?;
    dims.iter().all(|d| d.as_const().is_none_or(|n| n <= 1 << 12)).then_some(dims)
}

/// The dimensions of a type, if all of their sizes are known.
pub(super) fn dims(ty: &VarType, sizes: &Sizes) -> Option<Vec<Dim>> {
    let mut dims = Vec::new();
    for dim in &ty.dims {
        match dim {
            DimPattern::Rest => dims.extend(sizes.rest.as_ref()?),
            dim => dims.push(dim.eval(sizes)?),
        }
    }
    Some(dims)
}

/// An encoding that trials have, one that kernels can read codes of: what holds of its values holds of any. It has
/// whole numbers, or floats whose scheme rounds activations, too.
fn trial_encoding(floats: bool) -> Option<Encoding> {
    let tensor = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
    Encoding::new(EncodingDef {
        name: "trial".to_owned(),
        doc: String::new(),
        stored: Stored::Tensors {
            of: "weight".to_owned(),
            tensors: vec![
                tensor("codes", if floats { "f8e4m3 [N, K]" } else { "i8 [N, K]" }),
                tensor("scales", "f32 [N]"),
            ],
            broadcast: Vec::new(),
            unused: Vec::new(),
        },
        tables: Vec::new(),
        constants: Vec::new(),
        lets: Vec::new(),
        zero: None,
        group: Group { n: Some(1), k: None },
        code: Code {
            kind: if floats { CodeKind::E4m3 } else { CodeKind::Signed },
            bits: 8,
            value: "codes[n][k]".to_owned(),
        },
        scale: "scales[n]".to_owned(),
        minimum: None,
        when: None,
        activations: floats.then(|| "true".to_owned()),
        gguf: None,
        packed: false,
    })
    .ok()
}

fn type_of(ty: &VarType, dtype: DType, sizes: &Sizes) -> Option<Type> {
    let shape = small_dims(ty, sizes)?;
    let dtype = ty.dtype.unwrap_or(dtype);
    if ty.slot {
        let shape = shape.iter().map(|d| d.as_const()).collect::<Option<Vec<u64>>>()?;
        return Some(StateType::slot(dtype, &shape).into());
    }
    if ty.state {
        let [heads, dim] = shape[..] else { return None };
        return Some(StateType::paged(dtype, heads.as_const()?, dim.as_const()?).into());
    }
    if ty.encoded {
        let shape = shape.iter().map(|d| d.as_const()).collect::<Option<Vec<u64>>>()?;
        // Which, the sizes say: rows come in ones, in sixteens or in groups of 256.
        let rows = shape.iter().rev().nth(1).copied().unwrap_or(0);
        let stored = trial_encoding(rows / 16 % 2 == 1 || rows > 0 && rows % 256 == 0)?;
        let encoding = if ty.packed { stored.packed().ok()? } else { stored };
        return Some(TensorType::encoded(encoding, &shape).into());
    }
    Some(TensorType { constant: ty.constant, ..TensorType::act(dtype, shape) }.into())
}

pub(super) fn attr(name: &str, def: &AttrDef, rng: &mut Rng) -> Result<Attr, String> {
    if matches!(def.default, AttrDefault::Absent) && rng.coin() {
        return Ok(Attr::None);
    }
    Ok(match def.kind {
        AttrKind::Bool => Attr::Bool(rng.coin()),
        AttrKind::Int => Attr::Int(rng.below(5) as i64),
        AttrKind::Float if def.name.contains("eps") => Attr::Float(rng.log(1e-6, 1e-1)),
        AttrKind::Float => Attr::Float(match rng.below(5) {
            0 => 1.0,
            1 => 0.0,
            2 => -rng.log(0.05, 20.0),
            _ => rng.log(0.05, 20.0),
        }),
        AttrKind::Enum(names) => Attr::Enum(rng.pick(names).to_owned()),
        AttrKind::DType => Attr::DType(rng.pick(&[DType::F32, DType::Bf16, DType::F16])),
        AttrKind::Dims => return Err(format!("shape `{name}` has no type in `vars`")),
        AttrKind::Recurrence => {
            return Err(format!("`{name}`: a rule has no recurrence of its own"));
        }
        AttrKind::Expr => {
            let text = rng.pick(&["a * 0.5", "max(a, 0)", "a / (1 + abs(a))"]);
            Attr::Expr(text.parse::<Expr>().map_err(|e| e.to_string())?)
        }
    })
}

fn shape(ty: &Type, step: &StepShape) -> Vec<usize> {
    match ty {
        Type::Tensor(t) => t.sizes(&step.dims()),
        Type::State(s) if s.is_slot() => slot_shape(s, step),
        Type::State(s) => vec![step.dims().s as usize, s.heads() as usize, s.dim() as usize],
    }
}

fn tensor(ty: &Type, magnitude: f64, below: usize, step: &StepShape, rng: &mut Rng) -> Tensor {
    let shape = shape(ty, step);
    let index = matches!(ty, Type::Tensor(t) if !t.dtype.is_float());
    let element = |_| {
        if index { rng.below(below) as f64 } else { (2.0 * rng.unit() - 1.0) * magnitude }
    };
    let data = (0..shape.iter().product::<usize>()).map(element).collect();
    Tensor { shape, data }
}
