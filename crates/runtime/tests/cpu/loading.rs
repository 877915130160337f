//! What loading says about a checkpoint that does not fit.

use infernum_codegen::{TargetKind, plan};
use infernum_ir::{DType, Dims};
use infernum_runtime::cpu::{CpuExecutor, CpuOptions};
use infernum_runtime::{Bytes, LoadError, TensorProblem};

use crate::common::{Checkpoint, module};

#[test]
fn all_problems_are_reported_together() {
    let module = module(
        r#"module m
graph g {
  %ids = step tokens : u32[T]
  %e = weight "e" : const f32[7, 6]
  %w = weight "w.{layer}.{expert}" stack 3 : const f32[3, 4, 6]
  %a = weight "a" : const f32[5, 6]
  %ww = reshape(%w) {shape: [12, 6]} : const f32[12, 6]
  %aw = concat(%ww, %a) {axis: 0} : const f32[17, 6]
  %x = embedding(%ids, %e) : f32[T, 6]
  %y = linear(%x, %aw, _) {dtype: none} : f32[T, 17]
  return %y
}

schedule g 2..3
"#,
    );
    let limits = Dims { t: 4, b: 1, s: 4, pairs: 16, seqs: 1 };
    let plan = plan(&module, TargetKind::Cpu, limits).expect("a plan");
    let mut checkpoint = Checkpoint::random(&module);
    assert!(CpuExecutor::new(plan.clone(), &checkpoint, CpuOptions::default()).is_ok());
    checkpoint.tensors.remove("w.2.1");
    checkpoint.tensors.remove("e");
    let a = checkpoint.tensors.get_mut("a").expect("a");
    (a.element, a.shape) = (DType::Bf16.into(), vec![6, 5]);
    let last = checkpoint.tensors.get_mut("w.2.2").expect("w");
    last.bytes = last.bytes.slice(0..8).expect("a part");
    let error = CpuExecutor::new(plan, &checkpoint, CpuOptions::default()).err().expect("fails");
    let LoadError::Tensors(problems) = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 4);
    assert!(matches!(&problems[0], TensorProblem::Missing { name, .. } if name == "e"));
    let text = error.to_string();
    assert!(text.contains("tensor `a`: expected f32[5, 6], found bf16[6, 5]"), "{text}");
    assert!(text.contains("tensor `w.2.1` is missing: expected f32[4, 6]"), "{text}");
}

#[test]
fn bytes_are_parts_of_one_memory() {
    let all: Bytes = vec![1, 2, 3, 4, 5].into();
    let part = all.slice(1..4).expect("inside");
    assert_eq!(&*part, &[2, 3, 4]);
    assert_eq!(&*part.slice(1..2).expect("inside"), &[3]);
    assert!(part.slice(1..4).is_none());
    assert!(part.slice(2..usize::MAX).is_none());
}
