//! Checkpoints of encoded weights against the same ones decoded.

mod cache_scales;
mod damaged;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use infernum_codegen::Plan;
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::{Model, ModelFiles};
use infernum_ir::encoding::{Decoder, Element};
use infernum_ir::{DType, Encoding, Module, NodeKind, Param, Type, random};
use infernum_passes::data::Kernels;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::support::{Fixture, machine, nmse, root};

const HIDDEN: u64 = 160;
const WIDTH: u64 = 384;
const QUERIES: u64 = 128;
const KV: u64 = 128;
const VOCAB: u64 = 59;
const LAYERS: u64 = 3;

/// A folder that goes when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        // Tests of one process run beside each other.
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("infernum-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, bytes).expect("a file");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A tensor of a checkpoint.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A checkpoint with encoded weights, and the same one decoded to f32.
#[derive(Default)]
struct Checkpoints {
    encoded: BTreeMap<String, Tensor>,
    decoded: BTreeMap<String, Tensor>,
}

fn stored_type(element: Element) -> Dtype {
    match element {
        // Powers of two are called bytes.
        Element::U8 | Element::F8e8m0 => Dtype::U8,
        Element::F32 => Dtype::F32,
        Element::I32 => Dtype::I32,
        Element::F8e4m3 => Dtype::F8_E4M3,
        Element::F16 => Dtype::F16,
        other => panic!("no test weights of {other}"),
    }
}

impl Checkpoints {
    /// A small Llama; `encoding` says how each matrix of a layer is stored.
    fn llama(encoding: &dyn Fn(u64, &str) -> Option<Encoding>) -> Checkpoints {
        let mut all = Checkpoints::default();
        all.plain("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
        all.plain("model.norm.weight", &[HIDDEN]);
        all.plain("lm_head.weight", &[VOCAB, HIDDEN]);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            all.plain(&name("input_layernorm"), &[HIDDEN]);
            all.plain(&name("post_attention_layernorm"), &[HIDDEN]);
            for (part, rows, columns) in [
                ("self_attn.q_proj", QUERIES, HIDDEN),
                ("self_attn.k_proj", KV, HIDDEN),
                ("self_attn.v_proj", KV, HIDDEN),
                ("self_attn.o_proj", HIDDEN, QUERIES),
                ("mlp.gate_proj", WIDTH, HIDDEN),
                ("mlp.up_proj", WIDTH, HIDDEN),
                ("mlp.down_proj", HIDDEN, WIDTH),
            ] {
                match encoding(layer, part) {
                    Some(encoding) => all.encoded(&name(part), &encoding, (rows, columns)),
                    None => all.plain(&name(part), &[rows, columns]),
                }
            }
        }
        all
    }

    fn plain(&mut self, name: &str, shape: &[u64]) {
        let count = shape.iter().product::<u64>() as usize;
        let values = random::uniform(name, 1, count);
        let tensor = || Tensor {
            dtype: Dtype::F32,
            shape: shape.iter().map(|d| *d as usize).collect(),
            bytes: values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        };
        self.encoded.insert(name.to_owned(), tensor());
        self.decoded.insert(name.to_owned(), tensor());
    }

    fn encoded(&mut self, name: &str, encoding: &Encoding, (rows, columns): (u64, u64)) {
        let all =
            encoding.random((rows, columns), Some(Encoding::TAME), &mut random::named(name, 1));
        let all = all.expect("sizes that the encoding can have");
        let parts = all.iter().map(|(_, bytes)| &bytes[..]).collect();
        let decoder = encoding.decoder(rows, columns, parts).expect("its own tensors");
        let mut values = vec![0.0; (rows * columns) as usize];
        values.chunks_mut(columns as usize).zip(0..).for_each(|(row, n)| decoder.row(n, 0, row));
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = vec![rows as usize, columns as usize];
        self.decoded.insert(name.to_owned(), Tensor { dtype: Dtype::F32, shape, bytes });
        let named = encoding.tensors(name, rows, columns).expect("its tensors");
        for (named, (stored, bytes)) in named.into_iter().zip(all) {
            let shape = stored.shape.iter().map(|d| *d as usize).collect();
            let tensor = Tensor { dtype: stored_type(stored.element), shape, bytes };
            self.encoded.insert(named.name, tensor);
        }
    }
}

/// A model folder; `quantisation` is the `quantization_config`, if it has one.
fn folder(name: &str, tensors: &BTreeMap<String, Tensor>, quantisation: Option<&str>) -> Folder {
    let folder = Folder::new(name);
    let quantisation =
        quantisation.map_or(String::new(), |q| format!(",\"quantization_config\": {q}"));
    folder.write(
        "config.json",
        format!(
            "{{\"architectures\": [\"LlamaForCausalLM\"], \"dtype\": \"float32\", \
             \"hidden_size\": {HIDDEN}, \"intermediate_size\": {WIDTH}, \"num_attention_heads\": 4, \
             \"num_key_value_heads\": 4, \"head_dim\": 32, \"num_hidden_layers\": {LAYERS}, \
             \"vocab_size\": {VOCAB}, \"max_position_embeddings\": 64{quantisation}}}"
        ),
    );
    let views = tensors.iter().map(|(name, t)| {
        (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("a tensor"))
    });
    folder.write("model.safetensors", safetensors::serialize(views, None).expect("a file"));
    folder
}

fn open(folder: &Folder) -> Fixture {
    let files = ModelFiles::folder(&folder.0).expect("a folder");
    let model = Model::open(files, None, &Library::default()).unwrap_or_else(|e| panic!("{e}"));
    Fixture {
        name: folder.0.display().to_string(),
        model,
        tokens: (0..21).map(|i| (i * 17 + 3) % VOCAB as u32).collect(),
        logits: Vec::new(),
        logits_bf16: Vec::new(),
        max_length: 64,
        kv_dtype: infernum_passes::KvDtype::Auto,
    }
}

/// What ships, and encodings of a folder.
fn kernels(data: Option<&Path>) -> Kernels {
    Kernels::load(data, &[]).unwrap_or_else(|e| panic!("{e}"))
}

const FP8: &str =
    r#"{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}"#;

/// Runs both; the values that linear layers read are the same, so that the logits must be.
fn logits_agree(
    name: &str,
    all: &Checkpoints,
    quantisation: &str,
    kernels: &Kernels,
) -> [Fixture; 2] {
    let encoded = open(&folder(&format!("{name}-encoded"), &all.encoded, Some(quantisation)));
    let decoded = open(&folder(&format!("{name}-decoded"), &all.decoded, None));
    for pipeline in ["none", "default"] {
        let [found, expected] = [&encoded, &decoded]
            .map(|f| f.run_plan(f.plan(DType::F32, pipeline, kernels), usize::MAX));
        assert!(expected.iter().all(|v| v.is_finite()) && expected.iter().any(|v| *v != 0.0));
        if pipeline == "none" && machine().device().is_none() {
            assert_eq!(found, expected, "{name}: the same products of the same values");
        }
        let error = nmse(&found, &expected);
        assert!(error <= 1e-10, "{name}, {pipeline}: NMSE {error:e}");
        // Token by token, the same; and in bf16 both round the same values.
        let bit = encoded.run_plan(encoded.plan(DType::F32, pipeline, kernels), 1);
        assert!(nmse(&bit, &expected) <= 1e-10, "{name}, {pipeline}: token by token");
    }
    [encoded, decoded]
}

fn lowered(fixture: &Fixture, kernels: &Kernels) -> Module {
    let options = fixture.options(DType::F32);
    let lowered = fixture.model.lower(options, kernels.ops.encodings());
    lowered.unwrap_or_else(|e| panic!("{e}")).module
}

/// Encodings of a graph's weights, by name.
fn encodings(module: &Module, graph: &str) -> Vec<String> {
    let graph = module.graph(graph).unwrap_or_else(|| panic!("no graph {graph}"));
    let weights = graph.params().filter_map(|(_, param, ty)| match (param, ty) {
        (Param::Weight(w), Type::Tensor(ty)) => Some((w.name.clone(), ty.encoding.clone()?)),
        _ => None,
    });
    let part = |name: String| name.rsplit('.').nth(1).unwrap_or_default().to_owned();
    weights.map(|(name, encoding)| format!("{}: {encoding}", part(name))).collect()
}

/// How many launches of an op the programs of a graph have.
fn launches(plan: &Plan, graph: &str, op: &str) -> Vec<usize> {
    let programs = plan.programs.iter().filter(|p| p.name == graph);
    programs.map(|p| p.launches.iter().filter(|l| l.op == op).count()).collect()
}

#[test]
fn fp8_with_block_scales_gives_the_logits_of_its_values() {
    let kernels = kernels(None);
    let fp8 = kernels.ops.encoding("fp8_block").expect("it ships").clone();
    let all = Checkpoints::llama(&|_, _| Some(fp8.clone()));
    let [encoded, decoded] = logits_agree("fp8", &all, FP8, &kernels);
    let stored = |f: &Fixture| f.plan(DType::F32, "default", &kernels).stored_bytes();
    let plan = encoded.plan(DType::F32, "default", &kernels);
    // Of so narrow a matrix a good part of the packed form is zeros: its units are of 128 columns.
    let (codes, values) = (stored(&encoded), stored(&decoded));
    assert!(2 * codes < values, "weights take a byte each: {codes} bytes in place of {values}");
    // Queries, keys and values are joined as they are stored, and so are gate and up.
    let kind = &lowered(&encoded, &kernels).graphs[1].name;
    // On a CPU kernels read their codes; on a GPU those of many tokens want more columns.
    let reads_codes = machine().device().is_none();
    assert!(!reads_codes || launches(&plan, kind, "dequantise").iter().all(|n| *n == 0));
    let apart = encoded.plan(DType::F32, "none", &kernels);
    assert_eq!(launches(&apart, kind, "dequantise"), [7]);
    // A plan survives being written, and holds all that is needed to run it.
    let written = serde_json::to_vec(&plan).expect("plain data");
    let read = Plan::read(&written, &kernels.ops).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(read, plan);
    // bf16 activations, with weights rounded to bf16: as far from f32 as bf16 is.
    let bf16 = |f: &Fixture| f.run_plan(f.plan(DType::Bf16, "default", &kernels), usize::MAX);
    let exact = decoded.run_plan(decoded.plan(DType::F32, "default", &kernels), usize::MAX);
    let error = nmse(&bf16(&encoded), &exact);
    assert!(error < 1e-3, "NMSE {error:e}");
}

/// Values of GGUF's blocks as its own package decodes them (`tests/fixtures/encodings.py`), bit for bit.
#[test]
fn blocks_of_gguf_have_the_values_of_its_own_decoder() {
    let path = root().join("encodings/gguf.safetensors");
    let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tensors = SafeTensors::deserialize(&file).expect("a file of tensors");
    let kernels = kernels(None);
    let mut found: Vec<u32> = Vec::new();
    for encoding in kernels.ops.encodings() {
        let Some(number) = encoding.def().gguf else { continue };
        let tensor = |part: &str| {
            let name = format!("{number}.{part}");
            tensors.tensor(&name).unwrap_or_else(|e| panic!("{encoding}: {name}: {e}"))
        };
        let (blocks, expected) = (tensor("blocks"), tensor("values"));
        let [rows, columns] = *expected.shape() else { panic!("{encoding}: expected rows") };
        let decoder = encoding.decoder_of(rows as u64, columns as u64, blocks.data());
        let decoder = decoder.unwrap_or_else(|e| panic!("{e}"));
        assert_values(encoding.name(), &decoder, columns, expected.data());
        found.push(number);
    }
    found.sort_unstable();
    let mut expected: Vec<u32> =
        tensors.names().iter().filter_map(|n| n.strip_suffix(".blocks")?.parse().ok()).collect();
    expected.sort_unstable();
    assert_eq!(found, expected, "one encoding for each type");
}

/// Values of what safetensors hold for each scheme as others decode it (`tests/fixtures/schemes.py`), bit for bit.
#[test]
fn schemes_have_the_values_of_other_decoders() {
    let path = root().join("encodings/schemes.safetensors");
    let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tensors = SafeTensors::deserialize(&file).expect("a file of tensors");
    let kernels = kernels(None);
    let mut docs = BTreeSet::new();
    for (scheme, expected) in tensors.iter() {
        let Some(scheme) = scheme.strip_suffix(":values") else { continue };
        let name = scheme.split('/').next().unwrap_or_default();
        let encoding = kernels.ops.encoding(name).unwrap_or_else(|| panic!("no encoding {name}"));
        let [rows, columns] = *expected.shape() else { panic!("{scheme}: expected a matrix") };
        let stored = encoding.tensors("weight", rows as u64, columns as u64);
        let parts: Vec<Vec<u8>> = stored
            .unwrap_or_else(|e| panic!("{e}"))
            .iter()
            .map(|stored| {
                let found = tensors.tensor(&format!("{scheme}:{}", stored.name));
                let found = found.unwrap_or_else(|e| panic!("{scheme}: {}: {e}", stored.name));
                let shape: Vec<u64> = found.shape().iter().map(|d| *d as u64).collect();
                let element = element(found.dtype());
                assert!(
                    stored.is_held_by(element, &shape),
                    "{scheme}: {stored:?}, {element}{shape:?}"
                );
                let adapted = stored.adapted(element, &shape, found.data());
                adapted.unwrap_or_else(|| found.data().to_vec())
            })
            .collect();
        let parts = parts.iter().map(|p| &p[..]).collect();
        let decoder = encoding.decoder(rows as u64, columns as u64, parts);
        let decoder = decoder.unwrap_or_else(|e| panic!("{e}"));
        assert_values(scheme, &decoder, columns, expected.data());
        docs.insert(&encoding.def().doc);
    }
    // Of each file of tensors one at least.
    for encoding in kernels.ops.encodings().filter(|e| e.def().gguf.is_none()) {
        assert!(docs.contains(&encoding.def().doc), "{encoding}: no other decoder was asked");
    }
}

/// Holds rows against f32 numbers, bit for bit.
fn assert_values(what: &str, decoder: &Decoder<'_>, columns: usize, expected: &[u8]) {
    let mut row = vec![0.0; columns];
    for (n, expected) in expected.chunks_exact(4 * columns).enumerate() {
        decoder.row(n as u64, 0, &mut row);
        for (k, (value, expected)) in row.iter().zip(expected.as_chunks::<4>().0).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert_eq!(
                value.to_bits(),
                expected.to_bits(),
                "{what}: [{n}, {k}] is {value}, not {expected}"
            );
        }
    }
}

fn element(dtype: Dtype) -> Element {
    match dtype {
        Dtype::U8 => Element::U8,
        Dtype::I8 => Element::I8,
        Dtype::I32 => Element::I32,
        Dtype::F16 => Element::F16,
        Dtype::BF16 => Element::Bf16,
        Dtype::F32 => Element::F32,
        Dtype::F8_E4M3 => Element::F8e4m3,
        other => panic!("no scheme has {other:?}"),
    }
}

/// An encoding is a file: this one ships, and a condition in a user's folder makes checkpoints have it.
#[test]
fn blocks_in_safetensors_need_no_more_than_a_file() {
    let data = Folder::new("blocks-data");
    let shipped = include_str!("../../kernels/encodings/q8_0.ron");
    let mine = shipped.replace("gguf: 8", "when: \"quant_method == 'blocks'\"");
    data.write("kernels/encodings/q8_0.ron", mine);
    let kernels = kernels(Some(&data.0));
    let q8 = kernels.ops.encoding("q8_0").expect("it ships").clone();
    let all = Checkpoints::llama(&|_, _| Some(q8.clone()));
    logits_agree("q8", &all, r#"{"quant_method": "blocks"}"#, &kernels);
}

/// Activations of 8 bits move the logits, and little.
#[test]
fn eight_bits_of_activations_are_near() {
    let kernels = kernels(None);
    let gptq = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false}"#;
    let encoding = kernels.ops.encoding("gptq4_v1_g32_f16").expect("it ships").clone();
    let all = Checkpoints::llama(&|_, _| Some(encoding.clone()));
    let fixture = open(&folder("rounded", &all.encoded, Some(gptq)));
    let run = |pipeline| fixture.run_plan(fixture.plan(DType::F32, pipeline, &kernels), usize::MAX);
    let error = nmse(&run("lossy"), &run("default"));
    let on_gpu = machine().device().is_some();
    assert!(error < 1e-2 && (on_gpu || error > 1e-7), "NMSE {error:e}");
}

/// What `examples/new-encoding` shows: three bits in groups of 64, of which the last of a row is not full here.
#[test]
fn a_format_of_ones_own_is_one_file() {
    let kernels = kernels(Some(&root().join("../../examples/new-encoding")));
    let int3 = kernels.ops.encoding("int3_g64").expect("the example's").clone();
    let all = Checkpoints::llama(&|_, _| Some(int3.clone()));
    logits_agree("int3", &all, r#"{"quant_method": "int3_g64"}"#, &kernels);
    infernum_runtime::check::encodings::check(&int3, 1).unwrap_or_else(|e| panic!("{e}"));
}

/// What of a scheme is missing, or more than it knows, is told by name.
#[test]
fn schemes_that_are_not_whole_are_refused() {
    let kernels = kernels(None);
    let message = |name: &str, quantisation: &str, change: &dyn Fn(&mut Checkpoints)| {
        let encoding = kernels.ops.encoding(name).expect("it ships").clone();
        let mut all = Checkpoints::llama(&|_, _| Some(encoding.clone()));
        change(&mut all);
        let fixture = open(&folder("partial", &all.encoded, Some(quantisation)));
        let lowered = fixture.model.lower(fixture.options(DType::F32), kernels.ops.encodings());
        lowered.map(|_| ()).map_err(|e| e.to_string())
    };
    let gptq = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false}"#;
    let up = |part: &str| format!("model.layers.1.mlp.up_proj.{part}");
    assert_eq!(message("gptq4_v1_g32_f16", gptq, &|_| {}), Ok(()));
    for part in ["qzeros", "scales"] {
        let found = message("gptq4_v1_g32_f16", gptq, &|all| drop(all.encoded.remove(&up(part))));
        let found = found.expect_err("a tensor is missing");
        assert!(found.contains(&format!("{}`: missing", up(part))), "{found}");
    }
    // What decides over columns' groups is not left out in silence: columns go by it only where the config says so.
    let ordered = gptq.replace("false", "true");
    let found = message("gptq4_v1_g32_f16", &ordered, &|_| {}).expect_err("no g_idx");
    assert!(found.contains("q_proj.g_idx`: missing"), "{found}");
    // Another version of the format, and another method: tensors that nothing uses, and the method's name.
    let marlin = gptq.replace("\"bits\"", "\"checkpoint_format\": \"marlin\", \"bits\"");
    for config in [marlin.as_str(), r#"{"quant_method": "exl2"}"#] {
        let found = message("gptq4_v1_g32_f16", config, &|_| {}).expect_err("an unknown scheme");
        assert!(
            found.contains("qweight`: unexpected") && found.contains("quant_method is"),
            "{found}"
        );
    }
    // A config that asks for what its tensors are not.
    let plain = |all: &mut Checkpoints| {
        *all = Checkpoints::llama(&|_, _| None);
    };
    let found = message("gptq4_v1_g32_f16", gptq, &plain).expect_err("nothing is encoded");
    assert!(found.contains("no encoding that is known") && found.contains("'gptq'"), "{found}");
    // A scale of another shape.
    let square = r#"{"quant_method": "compressed-tensors"}"#;
    let shorter = |all: &mut Checkpoints| {
        let scale = all.encoded.get_mut(&up("weight_scale")).expect("its scales");
        scale.shape[0] -= 1;
        scale.bytes.truncate(4 * scale.shape[0]);
    };
    let found = message("fp8_row", square, &shorter).expect_err("too few scales");
    assert!(
        found.contains("weight_scale` in model.safetensors: expected shape")
            && found.contains("found [383, 1]"),
        "{found}"
    );
}

#[test]
fn layers_that_are_stored_in_different_ways_have_a_graph_for_each() {
    let kernels = kernels(None);
    let fp8 = kernels.ops.encoding("fp8_block").expect("it ships").clone();
    // The middle layer has a matrix that was not converted.
    let all = Checkpoints::llama(&|layer, part| {
        (layer != 1 || part != "mlp.up_proj").then(|| fp8.clone())
    });
    let [encoded, decoded] = logits_agree("mixed", &all, FP8, &kernels);
    let module = lowered(&encoded, &kernels);
    let names: Vec<&str> = module.graphs.iter().map(|g| g.name.as_str()).collect();
    let plain = lowered(&decoded, &kernels);
    let kind = plain.graphs[1].name.as_str();
    assert_eq!(names, ["embed", kind, &format!("{kind}_2"), "head"]);
    let calls: Vec<_> = module.schedule.iter().map(|s| (s.graph, s.layer)).collect();
    assert_eq!(calls, [(0, None), (1, Some(0)), (2, Some(1)), (1, Some(2)), (3, None)]);
    assert_eq!(encodings(&module, kind).len(), 7);
    let second = encodings(&module, &format!("{kind}_2"));
    assert_eq!(second.len(), 6);
    assert!(second.contains(&"gate_proj: fp8_block".to_owned()), "{second:?}");
    // A gate that is encoded and an up that is not are two products: nothing is joined in each step.
    let plan = encoded.plan(DType::F32, "default", &kernels);
    let second = format!("{kind}_2");
    let absent = |op| launches(&plan, &second, op).iter().all(|n| *n == 0);
    assert!(absent("concat") && (machine().device().is_some() || absent("dequantise")));
    // What is stored as its elements is read as before.
    assert_eq!(plain.graphs.len(), 3);
    let ops = plain.graphs.iter().flat_map(|g| g.nodes().map(|(_, n)| &n.kind));
    let mut ops =
        ops.filter_map(|k| if let NodeKind::Op { op, .. } = k { Some(op.name) } else { None });
    assert!(ops.all(|op| op != "dequantise"));
}

#[test]
fn what_no_encoding_is_for_is_said() {
    let kernels = kernels(None);
    let fp8 = kernels.ops.encoding("fp8_block").expect("it ships").clone();
    let all = Checkpoints::llama(&|_, _| Some(fp8.clone()));
    let message = |quantisation: &str, all: &Checkpoints| {
        let fixture = open(&folder("refused", &all.encoded, Some(quantisation)));
        let lowered = fixture.model.lower(fixture.options(DType::F32), kernels.ops.encodings());
        lowered.expect_err("a refusal").to_string()
    };
    // Another scheme.
    let found = message(r#"{"quant_method": "other"}"#, &all);
    for expected in ["weight_scale_inv`: unexpected", "no encoding that is known", "'other'"] {
        assert!(found.contains(expected), "{found}");
    }
    // A tensor that is not there.
    let mut damaged = Checkpoints::llama(&|_, _| Some(fp8.clone()));
    damaged.encoded.remove("model.layers.1.mlp.up_proj.weight_scale_inv");
    let fixture = open(&folder("damaged", &damaged.encoded, Some(FP8)));
    let lowered = fixture.model.lower(fixture.options(DType::F32), kernels.ops.encodings());
    // Codes without scales are no weights of that encoding; nor should they be read as floats.
    let found = lowered.expect_err("a refusal").to_string();
    assert!(found.contains("model.layers.1.mlp.up_proj.weight_scale_inv`: missing"), "{found}");
}

/// Values are stored by an encoding's own formula, as near as its bits allow; where that cannot be, it is said.
#[test]
fn values_are_stored_by_trial() {
    let kernels = kernels(Some(&root().join("../../examples/new-encoding")));
    let (rows, columns) = (16, 256);
    let values = random::uniform("stored", 1, rows * columns);
    let values: Vec<f32> = values.iter().map(|v| (v * v * v) as f32).collect();
    let whole: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
    for (name, most) in [
        ("q8_0", 1e-4),
        ("q6_k", 1e-3),
        ("q5_1", 4e-3),
        ("q4_0", 2e-2),
        ("q4_k", 1e-2),
        ("q3_k", 6e-2),
        ("iq4_nl", 2e-2),
        ("fp8_row", 2e-3),
        ("fp8_block", 2e-3),
        ("int8_row_zero", 1e-3),
        ("gptq4_v1_g32_f16", 1e-2),
        ("awq_g32_f16", 1e-2),
        ("packed4_g32_bf16", 2e-2),
        ("mxfp4", 3e-2),
        ("nvfp4", 2e-2),
        ("int3_g64", 6e-2),
    ] {
        let encoding = kernels.ops.encoding(name).unwrap_or_else(|| panic!("no {name}"));
        let stored = encoding.encode(rows as u64, columns as u64, &values);
        let stored = stored.unwrap_or_else(|e| panic!("{e}"));
        let parts = stored.iter().map(|b| &b[..]).collect();
        let decoder = encoding.decoder(rows as u64, columns as u64, parts).expect("its tensors");
        let (mut row, mut error) = (vec![0.0; columns], 0.0);
        for (n, values) in values.chunks(columns).enumerate() {
            decoder.row(n as u64, 0, &mut row);
            error += row.iter().zip(values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        }
        assert!(error / whole < most, "{name}: relative squared error {:.2e}", error / whole);
    }
    for (name, why) in
        [("iq2_xxs", "bits"), ("tq1_0", "share bits"), ("gptq4_order_v1_g32_f16", "index")]
    {
        let encoding = kernels.ops.encoding(name).unwrap_or_else(|| panic!("no {name}"));
        let refused = encoding.encode(rows as u64, columns as u64, &values).expect_err(name);
        assert!(refused.contains(why), "{refused}");
    }
}
