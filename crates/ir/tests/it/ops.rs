//! What must hold for every op in the table.

use std::collections::HashSet;

use infernum_ir::{Attr, AttrDefault, AttrKind, DType, OPS, Op, Pointwise, Sym, TensorType, Type};

#[test]
fn names_are_unique_and_in_order() {
    for pair in OPS.windows(2) {
        assert!(pair[0].name < pair[1].name, "{} {}", pair[0].name, pair[1].name);
    }
}

#[test]
fn every_op_and_attribute_is_documented() {
    for op in OPS {
        assert!(op.doc.ends_with('.') && op.doc.len() > 10, "{}", op.name);
        assert!(!op.doc.contains("  "), "{}: a line continuation went wrong", op.name);
        for attr in op.attrs {
            assert!(!attr.doc.is_empty(), "{}.{}", op.name, attr.name);
        }
    }
}

#[test]
fn operand_and_attribute_names_are_unique_and_defaults_are_allowed() {
    for op in OPS {
        let names = op.operands.iter().map(|o| o.name).chain(op.attrs.iter().map(|a| a.name));
        let names: Vec<&str> = names.collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{}", op.name);
        let optional = op.operands.iter().map(|o| o.optional);
        assert!(optional.is_sorted(), "{}: a required operand after an optional one", op.name);
        for attr in op.attrs {
            if let Some(default) = attr.default_value() {
                assert_eq!(attr.check(&default), Ok(()), "{}.{}", op.name, attr.name);
            } else {
                assert!(matches!(attr.default, AttrDefault::Required));
            }
        }
    }
}

fn some_attr(kind: AttrKind) -> Attr {
    match kind {
        AttrKind::Bool => Attr::Bool(true),
        AttrKind::Int => Attr::Int(2),
        AttrKind::Float => Attr::Float(2.0),
        AttrKind::Enum(names) => Attr::Enum(names[0].to_owned()),
        AttrKind::DType => Attr::DType(DType::F32),
        AttrKind::Dims => Attr::Dims(vec![Sym::T.into()]),
        AttrKind::Expr => Attr::Expr("a + 1".parse().unwrap()),
        AttrKind::Recurrence => {
            Attr::Recurrence("s[c], a[c] -> y[c]: s[c] = s + a; y[c] = s".parse().unwrap())
        }
    }
}

#[test]
fn pointwise_expressions_compile() {
    for op in Op::all() {
        let attrs: Vec<Attr> = op.attrs.iter().map(|a| some_attr(a.kind)).collect();
        match (op.pointwise, op.pointwise_fn(&attrs)) {
            (Pointwise::No, f) => assert!(f.is_none(), "{op:?}"),
            (_, Some(f)) => assert!(f.unwrap().eval(&[0.5, 0.25, 0.125]).is_finite(), "{op:?}"),
            (_, None) => panic!("{op:?} is pointwise without an expression"),
        }
    }
}

#[test]
fn activations_have_their_published_values() {
    // From the published formulas, computed with the C library.
    for (name, at, value) in [
        ("silu", 1.5, 1.226_361_714_290_465_5),
        ("silu", -1.5, -0.273_638_285_709_534_5),
        ("gelu", 1.5, 1.399_789_198_096_713),
        ("gelu", -1.5, -0.100_210_801_903_287_13),
        ("gelu_tanh", 1.5, 1.399_571_576_980_232_8),
        ("gelu_tanh", -1.5, -0.100_428_423_019_767_07),
    ] {
        let f = Op::find(name).unwrap().pointwise_fn(&[]).unwrap().unwrap();
        assert!((f.eval(&[at]) - value).abs() < 1e-14, "{name}({at}) = {}", f.eval(&[at]));
    }
}

#[test]
fn infer_refuses_other_arities_and_absent_operands() {
    for op in Op::all() {
        assert!(op.infer(&[None, None, None, None], &[]).is_err(), "{op:?}");
        let attrs: Vec<Attr> = op.attrs.iter().map(|a| some_attr(a.kind)).collect();
        if !op.operands.is_empty() {
            let absent = vec![None; op.operands.len()];
            let message = op.infer(&absent, &attrs).unwrap_err();
            assert!(message.contains("needs operand"), "{op:?}: {message}");
        }
    }
}

/// `[T, S]` means ragged: an op that computes all T·S elements may not claim that type.
#[test]
fn dense_products_are_not_taken_for_ragged_ones() {
    let act = |shape: &[infernum_ir::Dim]| Type::from(TensorType::act(DType::F32, shape));
    let (t, s, k) = (Sym::T.into(), Sym::S.into(), 4.into());
    let (tk, ks, sk, ts) = (act(&[t, k]), act(&[k, s]), act(&[s, k]), act(&[t, s]));
    let infer = |op: &str, operands: &[&Type], attrs: &[Attr]| {
        let op = Op::find(op).unwrap();
        let mut list: Vec<_> = operands.iter().map(|t| Some(*t)).collect();
        list.resize(op.operands.len(), None);
        op.infer(&list, attrs)
    };
    for result in [
        infer("matmul", &[&tk, &ks], &[]),
        infer("linear", &[&tk, &sk], &[Attr::None]),
        infer("linear", &[&ts, &ks], &[Attr::None]),
        infer("rmsnorm", &[&ts], &[Attr::Float(1e-6), Attr::Float(0.0)]),
        infer("layernorm", &[&ts], &[Attr::Float(1e-6)]),
        infer("gather_rows", &[&ts, &TensorType::act(DType::U32, [Sym::B.into()]).into()], &[]),
        infer("gather_rows", &[&ks, &TensorType::act(DType::U32, [t]).into()], &[]),
    ] {
        let message = result.unwrap_err();
        assert!(message.contains("ragged"), "{message}");
    }
    assert!(infer("softmax", &[&ts], &[]).is_ok());
}

#[test]
fn unknown_ops_get_a_hint() {
    assert_eq!(Op::find("rmsnrm").unwrap_err(), "unknown op `rmsnrm` (did you mean `rmsnorm`?)");
    assert_eq!(Op::find("zzz").unwrap_err(), "unknown op `zzz`");
}
