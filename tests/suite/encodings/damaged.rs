//! Checkpoints of codes with something wrong in them: each is refused with the file, the tensor, what was expected and what was
//! found.

use infernum_ir::DType;
use infernum_runtime::CheckpointWeights;
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use safetensors::Dtype;

use super::{Checkpoints, Fixture, Folder, Tensor, folder, kernels, open};

const GPTQ: &str = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false}"#;
const ORDERED: &str = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true}"#;
const AWQ: &str = r#"{"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}"#;
const TENSORS: &str = r#"{"quant_method": "compressed-tensors"}"#;
const MXFP4: &str = r#"{"quant_method": "mxfp4"}"#;
const MODELOPT: &str = r#"{"quant_method": "modelopt"}"#;

/// Encodings, the config of their checkpoints, and the tensors of a weight.
const SCHEMES: [(&str, &str, &[&str]); 9] = [
    ("gptq4_v1_g32_f16", GPTQ, &["qweight", "qzeros", "scales"]),
    ("gptq4_order_v1_g32_f16", ORDERED, &["qweight", "qzeros", "scales", "g_idx"]),
    ("awq_g32_f16", AWQ, &["qweight", "qzeros", "scales"]),
    ("fp8_block", super::FP8, &["weight", "weight_scale_inv"]),
    ("fp8_row", TENSORS, &["weight", "weight_scale"]),
    ("packed4_g32_f16", TENSORS, &["weight_packed", "weight_scale"]),
    ("nvfp4", TENSORS, &["weight_packed", "weight_scale", "weight_global_scale"]),
    ("mxfp4", MXFP4, &["weight_blocks", "weight_scales"]),
    ("nvfp4_modelopt", MODELOPT, &["weight", "weight_scale", "weight_scale_2"]),
];

/// Of a small Llama all of whose matrices are in an encoding.
fn checkpoints(encoding: &str) -> Checkpoints {
    let kernels = kernels(None);
    let encoding = kernels.ops.encoding(encoding).unwrap_or_else(|| panic!("no {encoding}"));
    let mut all = Checkpoints::llama(&|_, _| Some(encoding.clone()));
    // Random numbers pick no groups.
    for (_, index) in all.encoded.iter_mut().filter(|(name, _)| name.ends_with("g_idx")) {
        let groups = (0..index.shape[0] as i32).map(|k| k / 32);
        index.bytes = groups.flat_map(i32::to_le_bytes).collect();
    }
    all
}

/// Lowers, plans and loads a model: what is said against it.
fn load(fixture: &Fixture) -> Result<(), String> {
    let kernels = kernels(None);
    let options = fixture.options(DType::F32);
    fixture.model.lower(options, kernels.ops.encodings()).map_err(|e| e.to_string())?;
    // What is read from files is the same on a GPU.
    let module = super::lowered(fixture, &kernels);
    let limits = fixture.limits().within(&module);
    let plan = infernum_codegen::plan(&module, infernum_codegen::TargetKind::Cpu, limits);
    let plan = plan.map_err(|e| e.to_string())?;
    let checkpoint = fixture.model.checkpoint.as_ref().expect("it has weights");
    let weights = CheckpointWeights::new(checkpoint);
    let options = CpuOptions { kv_blocks: 4, ..CpuOptions::default() };
    CpuExecutor::new(plan, &weights, options).map(|_| ()).map_err(|e| e.to_string())
}

/// What is said of a checkpoint one tensor of which was changed.
fn refusal(encoding: &str, config: &str, part: &str, change: &dyn Fn(&mut Tensor)) -> String {
    let mut all = checkpoints(encoding);
    let name = format!("model.layers.1.mlp.up_proj.{part}");
    change(all.encoded.get_mut(&name).unwrap_or_else(|| panic!("no {name}")));
    let folder = folder("damaged-codes", &all.encoded, Some(config));
    let found = load(&open(&folder)).expect_err("a damaged tensor");
    let named = format!("`{name}` in model.safetensors");
    assert!(found.contains(&named), "{encoding}, {part}: {found}");
    found
}

fn assert_says(found: &str, expected: &[String]) {
    expected.iter().for_each(|text| assert!(found.contains(text), "expected {text:?} in: {found}"));
}

#[test]
fn whole_ones_load() {
    for (encoding, config, _) in SCHEMES {
        let folder = folder("whole-codes", &checkpoints(encoding).encoded, Some(config));
        load(&open(&folder)).unwrap_or_else(|e| panic!("{encoding}: {e}"));
    }
}

#[test]
fn tensors_of_another_shape_are_refused() {
    for (encoding, config, parts) in SCHEMES {
        for part in parts {
            let shapes = std::cell::RefCell::new(Vec::new());
            let found = refusal(encoding, config, part, &|t| {
                let row = t.bytes.len() / t.shape[0];
                let whole = t.shape.clone();
                t.shape[0] -= 1;
                t.bytes.truncate(t.shape[0] * row);
                shapes.borrow_mut().extend([whole, t.shape.clone()]);
            });
            let [whole, shorter] = &shapes.into_inner()[..] else { panic!("changed once") };
            assert_says(&found, &[format!("expected shape {whole:?}, found {shorter:?}")]);
        }
    }
}

#[test]
fn tensors_of_another_type_are_refused() {
    for (encoding, config, parts) in SCHEMES {
        for part in parts {
            let found = refusal(encoding, config, part, &|t| {
                t.dtype = match t.dtype {
                    Dtype::I32 | Dtype::F32 => Dtype::U32,
                    Dtype::F16 => Dtype::I16,
                    _ => Dtype::F8_E5M2,
                };
            });
            assert_says(&found, &["expected element type ".to_owned(), "found ".to_owned()]);
        }
    }
}

/// A model with such a scale gives no number for any text.
#[test]
fn scales_that_are_no_numbers_are_refused() {
    let (f16_nan, f16_inf) = (vec![0x00, 0x7e], vec![0x00, 0x7c]);
    for (encoding, config, part, bytes, found_number) in [
        ("gptq4_v1_g32_f16", GPTQ, "scales", f16_nan.clone(), "NaN"),
        ("awq_g32_f16", AWQ, "scales", f16_inf, "inf"),
        ("fp8_block", super::FP8, "weight_scale_inv", f32::NAN.to_le_bytes().to_vec(), "NaN"),
        ("fp8_row", TENSORS, "weight_scale", f32::NEG_INFINITY.to_le_bytes().to_vec(), "-inf"),
        ("packed4_g32_f16", TENSORS, "weight_scale", f16_nan, "NaN"),
        ("nvfp4", TENSORS, "weight_scale", vec![0x7f], "NaN"),
        ("mxfp4", MXFP4, "weight_scales", vec![0xff], "NaN"),
    ] {
        let place = std::cell::RefCell::new(String::new());
        let found = refusal(encoding, config, part, &|t| {
            // In the second row, or the second column of one row.
            let (rows, columns) = (t.shape[0], t.shape[1]);
            let (row, column) = if rows > 1 { (1, columns - 1) } else { (0, 1) };
            let at = (row * columns + column) * bytes.len();
            t.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            *place.borrow_mut() = format!("element [{row}, {column}]");
        });
        let expected = format!("{}: expected a finite number", place.into_inner());
        assert_says(&found, &[expected, format!("found {found_number}")]);
    }
    // One by which others are divided.
    let found = refusal("nvfp4", TENSORS, "weight_global_scale", &|t| t.bytes[..4].fill(0));
    assert_says(&found, &["[0, 0]: expected a finite number that is not zero, found 0".to_owned()]);
    // It multiplies in ModelOpt's: weights that are all zero have such a scale.
    let mut all = checkpoints("nvfp4_modelopt");
    let scale = all.encoded.get_mut("model.layers.1.mlp.up_proj.weight_scale_2");
    scale.expect("a scale").bytes.fill(0);
    load(&open(&folder("zero-scale", &all.encoded, Some(MODELOPT)))).expect("zeros are numbers");
}

#[test]
fn columns_of_groups_that_are_not_there_are_refused() {
    for group in [-1, 5, i32::MAX] {
        let found = refusal("gptq4_order_v1_g32_f16", ORDERED, "g_idx", &|t| {
            t.bytes[28..32].copy_from_slice(&group.to_le_bytes());
        });
        assert_says(&found, &[format!("element [7]: expected 0 to 4, found {group}")]);
    }
}

#[test]
fn a_file_that_was_cut_is_refused() {
    let folder = folder("cut-codes", &checkpoints("fp8_block").encoded, Some(super::FP8));
    let path = folder.0.join("model.safetensors");
    let whole = std::fs::read(&path).expect("the file");
    std::fs::write(&path, &whole[..whole.len() - 1]).expect("a file");
    let found = opened(&folder).expect_err("a file that was cut");
    assert!(found.starts_with("model.safetensors: tensor `"), "{found}");
    assert!(found.contains("bytes of data present; the download is incomplete"), "{found}");
}

fn opened(folder: &Folder) -> Result<infernum_frontend_hf::Model, String> {
    let files = infernum_frontend_hf::ModelFiles::folder(&folder.0).expect("a folder");
    let library = infernum_frontend_hf::spec::Library::default();
    infernum_frontend_hf::Model::open(files, None, &library).map_err(|e| e.to_string())
}
