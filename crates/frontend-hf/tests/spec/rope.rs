//! `RoPE`'s frequency tables, evaluated by the reference interpreter.

use infernum_frontend_hf::spec::Source;
use infernum_ir::interp::{Interpreter, Rounding, States, StepShape};
use infernum_ir::{Attr, Graph, Module, NodeKind, ValueId};
use safetensors::SafeTensors;

use crate::{check, fixtures, lower_text};

/// The tables of one graph.
fn tables(graph: &Graph) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    let is_rope = |node: usize| matches!(&graph.node(node).kind, NodeKind::Op { op, .. } if op.name == "rope");
    for (i, node) in graph.nodes() {
        let NodeKind::Op { op, attrs } = &node.kind else { continue };
        let value = ValueId { node: i, result: 0 };
        // Those that rotations read; they may be turned around by a `scale`.
        let next = |node: usize| graph.users(ValueId { node, result: 0 }).any(|(n, _)| is_rope(n));
        let turns = graph.users(value).any(|(n, _)| is_rope(n) || next(n));
        if op.name != "table" || !turns {
            continue;
        }
        let mut alone = Graph::new("alone");
        let results = alone.call(vec!["t".into()], *op, &[], attrs.clone(), None).unwrap();
        alone.set_results(results);
        let weights = |_: &_, _, _: &_| Err("a table has no weights".into());
        let interpreter = Interpreter::new(&weights, Rounding::ToType);
        let mut states = States::default();
        let values = interpreter.graph(&alone, None, &StepShape::one(1, 1), &[0], &[], &mut states);
        found.push(values.unwrap()[0].data.iter().map(|&x| x as f32).collect());
    }
    found
}

/// What cosine and sine are multiplied by, in every rotation of a graph.
fn attention_factors(graph: &Graph) -> Vec<f64> {
    let rotations = graph.nodes().filter_map(|(_, node)| match &node.kind {
        NodeKind::Op { op, attrs } if op.name == "rope" => Some(&attrs[op.attr("scale")?]),
        _ => None,
    });
    let number = |attr: &Attr| if let Attr::Float(x) = attr { *x } else { panic!("{attr}") };
    rotations.map(number).collect()
}

/// The frequencies of a fixture that has one rotation.
fn expected(fixture: &crate::Fixture) -> Option<Vec<f32>> {
    let bytes = std::fs::read(fixture.dir.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("rope_inv_freq").ok()?.data();
    Some(data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

/// Distance in units in the last place; both are positive.
fn ulps(a: f32, b: f32) -> u32 {
    assert!(a.is_finite() && b.is_finite() && a >= 0.0 && b >= 0.0, "{a} {b}");
    a.to_bits().abs_diff(b.to_bits())
}

#[test]
fn tables_are_those_of_transformers() {
    let (mut worst, mut compared) = (0, 0);
    for fixture in fixtures() {
        let (module, Some(expected)) = (fixture.lower(), expected(&fixture)) else { continue };
        compared += 1;
        let factor = fixture.fact("rope_attention_factor");
        let name = fixture.dir.display();
        for graph in module.graphs.iter().filter(|g| !["embed", "head"].contains(&&*g.name)) {
            let tables = tables(graph);
            let one_each = tables.len().is_multiple_of(2);
            assert!(one_each, "{name}: one for queries, one for keys, of an indexer too");
            for table in tables {
                assert_eq!(table.len(), expected.len(), "{name}");
                for (i, (&found, &expected)) in table.iter().zip(&expected).enumerate() {
                    let ulps = ulps(found, expected);
                    assert!(ulps <= 4, "{name}: pair {i}: {found:e}, expected {expected:e}");
                    worst = worst.max(ulps);
                }
            }
            for found in attention_factors(graph) {
                assert!((found - factor).abs() <= 1e-12 * factor, "{name}: {found} {factor}");
            }
        }
    }
    println!("worst distance: {worst} ulp in {compared} fixtures");
    assert!(compared >= 50, "{compared} fixtures have one rotation");
}

/// Gemma 3's form: each type of layer has its own `rope_parameters`.
const PER_TYPE: &str = r#"Family(
    name: "per_type",
    doc: "Layers of two types, rotated differently.",
    base: "llama.ron",
    architectures: ["PerType"],
    params: { "layer_types": "layer_types" },
    layer_params: {
        "layer_kind": "layer_types[layer]",
        "layer_type": "layer_kind",
        "window": "layer_kind == 'sliding_attention' ? 5 : null",
    },
)"#;

const PER_TYPE_CONFIG: &str = r#"{
    "hidden_size": 8, "vocab_size": 11, "intermediate_size": 12, "num_attention_heads": 2,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
    }
}"#;

#[test]
fn each_type_of_layer_may_have_its_own_parameters() {
    let module = lower_text(PER_TYPE, PER_TYPE_CONFIG).unwrap_or_else(|e| panic!("{e}"));
    check(&module);
    let tables_of = |module: &Module, name: &str| tables(module.graph(name).unwrap());
    // head_dim 4: two pairs.
    let full = vec![1.0 / 8.0, 1e-3 / 8.0];
    assert_eq!(tables_of(&module, "full_attention"), [full.clone(), full]);
    assert_eq!(tables_of(&module, "sliding_attention"), [[1.0, 1e-2], [1.0, 1e-2]]);

    // Parameters that do not differ by type serve all of them.
    let config = PER_TYPE_CONFIG
        .replace("\"full_attention\": {\"rope_type\"", "\"rope_type\": \"default\", \"x\": {\"y\"");
    let module = lower_text(PER_TYPE, &config).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(tables_of(&module, "full_attention"), [[1.0, 1e-2], [1.0, 1e-2]]);
}

/// A family that does not tell the types apart must not rotate with a default instead.
#[test]
fn parameters_by_type_are_refused_where_the_family_has_none() {
    let library = infernum_frontend_hf::spec::Library::default();
    let llama: Source = library.file("llama.ron").unwrap();
    let error = crate::lowered(&llama, &library, PER_TYPE_CONFIG, 64).unwrap_err().to_string();
    assert!(error.contains("by type of layer"), "{error}");
}
