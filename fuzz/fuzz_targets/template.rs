//! A kernel's template, its header first, is read or refused; what is read chooses a variant for a launch and is
//! rendered.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use infernum_codegen::cuda::{Device, Library, TunedVariants, attach};
use infernum_codegen::{Plan, TargetKind, plan};
use infernum_ir::{Dims, OpSet, text};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder =
        std::env::temp_dir().join(format!("infernum-fuzz-template-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("kernels/templates")).expect("a folder");
    folder
});

/// Looks rows up: two launches, and those that pick tokens.
static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let module = "module lookup

graph g {
  %ids = step tokens : u32[T]
  %rows = step output_rows : u32[B]
  %w = weight \"w\" : const f32[7, 5]
  %x = embedding(%ids, %w) : f32[T, 5]
  %y = gather_rows(%x, %rows) : f32[B, 5]
  return %y
}

schedule g
";
    let module = text::parse(module, "lookup").expect("it parses");
    let limits = Dims { t: 8, b: 2, s: 32, pairs: 256, seqs: 2 };
    plan(&module, TargetKind::Cuda, limits).expect("a plan")
});

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let folder = &*FOLDER;
    std::fs::write(folder.join("kernels/templates/gather_rows.cu.j2"), text).expect("a file");
    let (library, device) = (Library::new(Some(folder)), Device::named("sm_90a").expect("known"));
    let mut plan = PLAN.clone();
    match attach(&mut plan, &OpSet::default(), &library, &device, &TunedVariants::default()) {
        Ok(_) => {
            std::hint::black_box(plan.check().map_err(|e| e.to_string())).ok();
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
