//! Layers written in IR text, run by the reference interpreter against `transformers` in float64
//! (`fixtures/ir`, made by `fixtures/make_ir.py`).

use std::path::PathBuf;

use infernum_ir::interp::{Carried, Interpreter, Rounding, States, StepShape, Tensor};
use infernum_ir::{Type, WeightRef};
use infernum_passes::data::Kernels;
use infernum_passes::fuse::{Bucket, CostTable, FuseOptions, fuse};
use safetensors::{Dtype, SafeTensors};

use crate::ir_files;

struct Fixture {
    module: infernum_ir::Module,
    bytes: Vec<u8>,
}

impl Fixture {
    fn load(name: &str) -> Fixture {
        let dir: PathBuf = [env!("CARGO_MANIFEST_DIR"), "fixtures", "ir"].iter().collect();
        let bytes = std::fs::read(dir.join(name).with_extension("safetensors")).unwrap();
        Fixture { module: ir_files::load(&dir.join(name).with_extension("ir")), bytes }
    }

    /// The same with every `from` in the IR text replaced.
    fn mutated(name: &str, from: &str, to: &str) -> Fixture {
        let fixture = Fixture::load(name);
        let text = infernum_ir::text::print(&fixture.module);
        assert!(text.contains(from), "{name}: no {from}");
        let module = infernum_ir::text::parse(&text.replace(from, to), name).unwrap();
        infernum_ir::verify(&module).unwrap_or_else(|e| panic!("{e}"));
        Fixture { module, ..fixture }
    }

    fn tensor(&self, name: &str) -> Result<Tensor, String> {
        let file = SafeTensors::deserialize(&self.bytes).map_err(|e| e.to_string())?;
        let view = file.tensor(name).map_err(|e| format!("{name}: {e}"))?;
        let (f64s, rest) = view.data().as_chunks::<8>();
        let (i32s, _) = view.data().as_chunks::<4>();
        let data = match view.dtype() {
            Dtype::F64 if rest.is_empty() => f64s.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::I32 => i32s.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            other => return Err(format!("{name}: {other:?}")),
        };
        Ok(Tensor { shape: view.shape().to_vec(), data })
    }

    /// A weight, its experts stacked. Float64 stands where the IR says f32: nothing is rounded.
    fn weight(&self, weight: &WeightRef, layer: Option<u32>, _: &Type) -> Result<Tensor, String> {
        let parts =
            weight.tensors(layer).iter().map(|n| self.tensor(n)).collect::<Result<Vec<_>, _>>()?;
        let mut shape = parts[0].shape.clone();
        shape.splice(0..0, weight.stack.map(|n| n as usize));
        Ok(Tensor { shape, data: parts.into_iter().flat_map(|p| p.data).collect() })
    }

    /// Runs the layer over the fixture's input, in steps of these sizes; each result's rows joined.
    fn run(&self, steps: &[usize]) -> Carried {
        let weights = |w: &WeightRef, layer: Option<u32>, ty: &Type| self.weight(w, layer, ty);
        let interpreter = Interpreter::new(&weights, Rounding::Exact);
        let inputs = [self.tensor("x").unwrap(), self.tensor("positions").unwrap()];
        let (mut states, mut results, mut done) = (States::default(), Carried::new(), 0);
        for &new in steps {
            let part = inputs.each_ref().map(|t| rows(t, done, new));
            done += new;
            let step = StepShape::one(new, done);
            let graph = &self.module.graphs[0];
            let out = interpreter.graph(graph, Some(0), &step, &[], &part, &mut states).unwrap();
            results.resize(out.len(), Tensor::default());
            for (all, part) in results.iter_mut().zip(out) {
                all.data.extend(part.data);
                all.shape = part.shape;
                all.shape[0] = done;
            }
        }
        assert_eq!(done, inputs[0].shape[0], "the steps cover the input");
        results
    }

    fn tokens(&self) -> usize {
        self.tensor("x").unwrap().shape[0]
    }
}

fn rows(t: &Tensor, start: usize, len: usize) -> Tensor {
    let width: usize = t.shape[1..].iter().product();
    let mut shape = t.shape.clone();
    shape[0] = len;
    Tensor { shape, data: t.data[start * width..(start + len) * width].to_vec() }
}

/// Normalised mean squared error.
fn nmse(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.shape, expected.shape);
    let square = |v: f64| v * v;
    let pairs = found.data.iter().zip(&expected.data);
    let error: f64 = pairs.map(|(a, b)| square(a - b)).sum();
    error / expected.data.iter().map(|&b| square(b)).sum::<f64>()
}

/// The layer matches within `bound`, whole and (where it has a cache) in parts.
fn check(name: &str, bound: f64) -> Fixture {
    let fixture = Fixture::load(name);
    let (n, expected) = (fixture.tokens(), fixture.tensor("y").unwrap());
    let whole = fixture.run(&[n]);
    let error = nmse(&whole[0], &expected);
    println!("{name}: NMSE {error:.1e}");
    assert!(error <= bound, "{name}: NMSE {error:.2e}, bound {bound:.0e}");
    assert_eq!(fixture.run(&[n / 3, n - n / 3]), whole, "{name}: in two steps");
    assert_eq!(fixture.run(&vec![1; n]), whole, "{name}: token by token");
    fixture
}

/// The experts chosen and their weights, which the fixture lists by ascending expert.
fn check_router(fixture: &Fixture) {
    let out = fixture.run(&[fixture.tokens()]);
    let (weights, ids) = (&out[1], &out[2]);
    let (want_weights, want_ids) =
        (fixture.tensor("router_weights").unwrap(), fixture.tensor("router_experts").unwrap());
    let k = ids.shape[1];
    for (row, (ids, weights)) in ids.data.chunks(k).zip(weights.data.chunks(k)).enumerate() {
        let mut chosen: Vec<_> = ids.iter().zip(weights).collect();
        chosen.sort_by(|a, b| a.0.total_cmp(b.0));
        for (i, (id, weight)) in chosen.into_iter().enumerate() {
            assert_eq!(*id, want_ids.data[row * k + i], "token {row}");
            assert!((weight - want_weights.data[row * k + i]).abs() < 1e-13, "token {row}");
        }
    }
}

/// `RoPE`'s sines and cosines are f32, and torch's differ from the correctly rounded ones by one step
/// in about one value of a hundred. We reach 6e-16.
const ROPE: f64 = 1e-15;

#[test]
fn mla() {
    check("mla", ROPE);
}

#[test]
fn mla_with_yarn() {
    check("mla_yarn", ROPE);
}

#[test]
fn gemma2() {
    check("gemma2", ROPE);
}

// Without `RoPE` only the order of sums differs: 1e-31 to 2e-31.

#[test]
fn sigmoid_routed_experts() {
    check_router(&check("moe_sigmoid", 1e-30));
}

#[test]
fn softmax_routed_experts() {
    for name in ["moe_qwen3", "moe_qwen3_unnormed", "moe_mixtral"] {
        check_router(&check(name, 1e-30));
    }
}

/// The bounds mean something: each of these mistakes is far outside them.
#[test]
fn mistakes_are_caught() {
    for (name, from, to) in [
        ("mla", "eps: 1e-6", "eps: 1e-5"),
        ("mla", "style: interleaved", "style: neox"),
        ("mla", "add(%s_nope, %s_rope)", "add(%s_nope, %s_nope)"),
        ("mla_yarn", "scale: 0.964326914892074", "scale: 1"),
        ("mla_yarn", "by: 0.3464980512014568", "by: 0.2672612419124244"),
        ("gemma2", "window: 9", "window: 10"),
        ("gemma2", "cap: 4", "cap: 5"),
        ("gemma2", "offset: 1", "offset: 0"),
        ("gemma2", "style: neox", "style: interleaved"),
        ("gemma2", "gelu_tanh", "gelu"),
        ("moe_sigmoid", "topk(%scores, %bias)", "topk(%scores, _)"),
        ("moe_sigmoid", "groups: 4, keep: 2", "groups: 4, keep: 4"),
        ("moe_sigmoid", "2.5 * a", "a"),
        ("moe_qwen3", "a / b", "a"),
        (
            "moe_mixtral",
            "expert_linear(%x, %w_gate, %ids, _, _, _)",
            "expert_linear(%x, %w_up, %ids, _, _, _)",
        ),
    ] {
        let fixture = Fixture::mutated(name, from, to);
        let found = fixture.run(&[fixture.tokens()]);
        let error = nmse(&found[0], &fixture.tensor("y").unwrap());
        assert!(error > 1e-12, "{name}: {from} -> {to}: NMSE {error:.1e}");
        println!("{name}: {from} -> {to}: NMSE {error:.1e}");
    }
}

/// What a GPU with kernels for every fused op would run, without those that are disabled.
pub(crate) fn fused(name: &str, bucket: Bucket, disabled: &[&str]) -> infernum_ir::Module {
    let kernels = Kernels::load(None, &[]).expect("the built-in fused ops and rules");
    let costs = CostTable::named("sm_80", None).expect("a built-in cost table");
    let mut options = FuseOptions::new("sm_80", costs, bucket);
    options.disabled = disabled.iter().map(|d| (*d).to_owned()).collect();
    let fused = fuse(&Fixture::load(name).module, &kernels, &options);
    fused.unwrap_or_else(|e| panic!("{name}: {e}")).module
}

pub(crate) const LAYERS: [&str; 7] =
    ["gemma2", "mla", "mla_yarn", "moe_mixtral", "moe_qwen3", "moe_qwen3_unnormed", "moe_sigmoid"];

/// These layers belong to no family that ships: what fusion makes of them is held against
/// `transformers` here.
#[test]
fn fused_layers_match_too() {
    let steps = |min, max, decode| Bucket { min, max, decode };
    for name in LAYERS {
        for bucket in [steps(1, 1, true), steps(1, 16, false), steps(17, 512, false)] {
            let fixture = Fixture { module: fused(name, bucket, &[]), ..Fixture::load(name) };
            let (n, expected) = (fixture.tokens(), fixture.tensor("y").unwrap());
            let error = nmse(&fixture.run(&[n])[0], &expected);
            assert!(error <= ROPE, "{name}, {bucket:?}: NMSE {error:.2e}");
            if name.starts_with("moe") {
                check_router(&fixture);
            }
        }
    }
}
