//! Templates of a user's own: what is wrong with one is told where it is written.

use std::path::Path;

use infernum_frontend_hf::spec::Source;
use infernum_ir::{Attr, DType, Dim, Sym, TensorType};
use infernum_passes::data::Kernels;

use super::*;
use crate::Arg;
use crate::cuda::abi::Part;
use crate::cuda::apart::apart;
use crate::cuda::tuned::{Chosen, Site};

/// `sum = x + by * (a + b)`.
const OP: &str = r#"Fused(
    name: "scaled_add3", doc: "d", operands: ["x", "a", "b"], attrs: ["by"],
    body: {
        "both": add(a: "a", b: "b"), "part": scale(x: "both", by: "by"), "sum": add(a: "x", b: "part"),
    },
    results: ["sum"], template: "scaled_add3",
)"#;

const TEMPLATE: &str = r#"{#
Kernel(
    doc: "d",
    variants: [
        Variant(name: "plain", params: { "per": 1024 }, grid: ["ceil(x.size / p.per)"], block: "256", shared: "0"),
    ],
)
#}
{%- from "common/shape.j2" import size -%}
{% include "common/prelude.cuh" %}
extern "C" __global__ void {{ kernel }}({{ params }}) {
    for (i64 i = blockIdx.x; i < {{ size(x) }}; i += gridDim.x)
        sum[i] = from_f32<{{ sum.type }}>({{ by | f32 }});
}
"#;

/// The text of the kernel that a launch of the op gets on `arch`, or why it gets none.
fn kernel(template: &str, arch: &str) -> Result<String, String> {
    attached((OP, "scaled_add3"), template, arch, &["x", "a", "b", "sum"])
}

fn attached(
    (op, name): (&str, &str),
    template: &str,
    arch: &str,
    values: &[&str],
) -> Result<String, String> {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("kernels/templates");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join(format!("{name}.cu.j2")), template).expect("a file");
    let mut kernels = Kernels::default();
    kernels.define_all(vec![Source::new("op.ron", op)]).unwrap_or_else(|e| panic!("{e}"));
    let (library, device) = (Library::new(Some(dir.path())), Device::named(arch).expect("known"));
    let ty = || TensorType::act(DType::Bf16, [Sym::T.into(), 4096.into()]);
    let value = |_| Value { arg: Arg::Buffer(0), ty: ty().into() };
    let attrs = kernels.ops.find(name).expect("defined").attrs.iter();
    let launch = Launch {
        attrs: attrs.map(|a| (a.name.to_owned(), Attr::Float(0.5))).collect(),
        names: values.iter().map(|n| (*n).to_owned()).collect(),
        operands: (1..values.len()).map(value).map(Some).collect(),
        results: vec![value(0)],
        ..apart(name, ty(), ty())
    };
    let limits = Dims { t: 128, b: 4, s: 4096, pairs: 1 << 20, seqs: 4 };
    let tuned = TunedVariants::default();
    let mut attach = Attach::new(&kernels.ops, &library, &device, limits, tuned);
    let run = attach.launch(&launch, Bucket::ALL, "check/%r0");
    let folder = format!("{}{}", folder.display(), std::path::MAIN_SEPARATOR);
    run.map_err(|e| e.to_string().replace(&folder, ""))?;
    Ok(attach.kernels.pop().expect("a kernel").text)
}

#[test]
fn the_template_is_right() {
    kernel(TEMPLATE, "sm_90a").unwrap_or_else(|e| panic!("{e}"));
}

/// What was accepted once, and then failed on a GPU or launched something else.
#[test]
fn sizes_of_launches_are_checked() {
    let values = "operands and results are x, a, b, sum, attributes by";
    let cases = [
        ("x.size / p.per", "y.size / p.per", format!("5:70: error: unknown name `y`; {values}")),
        ("x.size / p.per", "x.sizes / p.per", "5:72: error: `x` has no `sizes` (did you mean `size`?)".into()),
        ("x.size / p.per", "x.size / p.foo", "5:81: error: `p` has no `foo`; it has per".into()),
        ("ceil(x.size / p.per)", "x.size / 3", ": error: 174762.66".into()),
        ("ceil(x.size / p.per)", "floor(x.size / 1e9)", "0 blocks in a dimension of the grid: expected 1 to".into()),
        ("\"ceil(x.size / p.per)\"", "\"1\", \"x.size\"", "524288 blocks in a dimension of the grid: expected 1 to 65535".into()),
        ("\"ceil(x.size / p.per)\"", "\"1\", \"1\", \"1\", \"2\"", "expected at most three dimensions".into()),
        ("\"256\"", "\"2560\"", "5:97: error: 2560 threads in a block: expected 1 to 1024".into()),
        ("\"256\"", "\"0\"", "0 threads in a block".into()),
        ("\"256\"", "\"x.bytes\"", "`x` has no `bytes`; it has dtype, const, ragged".into()),
        ("\"256\"", "\"T\"", "`T` is the step's, and not known when a kernel is chosen".into()),
        ("shared: \"0\"", "shared: \"p.bytes * 400000\"", "5:114: error: `p` has no `bytes`; it has per".into()),
        ("shared: \"0\"", "shared: \"1 * 400000\"", "5:112: error: 400000 bytes of shared memory for a block of sm_90a: expected 0 to 232448".into()),
        ("shared: \"0\"", "scratch: \"0 - 1\"", "-1 bytes of scratch memory".into()),
        ("shared: \"0\"", "when: [\"x.sizes % 8 == 0\"]", "`x` has no `sizes`".into()),
    ];
    for (from, to, expected) in cases {
        let text = TEMPLATE.replacen(from, to, 1);
        assert_ne!(text, TEMPLATE, "nothing to replace: {from}");
        let error = kernel(&text, "sm_90a").expect_err(to);
        assert!(
            error.starts_with("scaled_add3.cu.j2:5:") && error.contains(&expected),
            "{to}: {error}"
        );
    }
}

#[test]
fn shared_memory_is_the_architectures() {
    let text = TEMPLATE.replacen("shared: \"0\"", "shared: \"100 * 1024\"", 1);
    for (arch, fits) in [("sm_75", false), ("sm_80", true), ("sm_86", false), ("sm_100a", true)] {
        let found = kernel(&text, arch);
        assert_eq!(found.is_ok(), fits, "{arch}: {found:?}");
    }
}

/// Names that are not defined, files that are not there, and text that cannot be read.
#[test]
fn mistakes_in_the_text_are_named_and_placed() {
    let cases = [
        (
            "{{ by | f32 }}",
            "{{ gain | f32 }}",
            "13:46: error: `gain` is not defined; the text sees",
        ),
        ("{{ sum.type }}", "{{ sum.typ }}", "13:30: error: `sum.typ` is not defined"),
        ("common/prelude.cuh", "common/prelud.cuh", "10:1: error: template not found"),
        ("{{ by | f32 }}", "{{ by | f33 }}", "13:"),
        ("{{ by | f32 }}", "{{ by | }}", "13:"),
    ];
    for (from, to, expected) in cases {
        let text = TEMPLATE.replacen(from, to, 1);
        let error = kernel(&text, "sm_90a").expect_err(to);
        let expected = format!("scaled_add3.cu.j2:{expected}");
        assert!(error.starts_with(&expected), "{to}: expected {expected}, found {error}");
    }
}

/// A compiler's errors are placed in the template.
#[test]
fn lines_of_kernels_are_those_of_the_template() {
    let text = kernel(TEMPLATE, "sm_90a").unwrap_or_else(|e| panic!("{e}"));
    let at =
        text.find("#line 11 \"scaled_add3.cu.j2\"\nextern").unwrap_or_else(|| panic!("{text}"));
    assert!(text[..at].contains("#line 1 \"common/prelude.cuh\"\n"), "{text}");
}

/// The kernel that the templates' reference shows.
#[test]
fn the_readme_shows_a_kernel_that_works() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/templates/README.md");
    let readme = std::fs::read_to_string(path).expect("the reference");
    let (_, rest) = readme.split_once("A whole kernel").expect("the example");
    let lines = rest.lines().skip(2).take_while(|line| line.is_empty() || line.starts_with("    "));
    let template: String =
        lines.map(|line| line.trim_start_matches("    ").to_owned() + "\n").collect();
    let op = r#"Fused(name: "twice", doc: "d", operands: ["x"], body: { "y": scale(x: "x", by: 2) },
        results: ["y"], template: "twice")"#;
    let text = attached((op, "twice"), &template, "sm_90a", &["x", "y"]);
    let text = text.unwrap_or_else(|e| panic!("{e}\n{template}"));
    assert!(text.contains("store(y + i * N, v);"), "{text}");
}

/// `twice` of a value, decode steps on one variant and all others on another.
const IN_PARTS: &str = r#"{#
Kernel(
    doc: "d",
    parts: true,
    variants: [
        Variant(name: "few", when: ["tokens.decode && tokens.max <= 8"], grid: ["T"], block: "32"),
        Variant(name: "many", grid: ["T", "2"]),
    ],
)
#}
{% include "common/prelude.cuh" %}
extern "C" __global__ void {{ kernel }}({{ params }}) {}
"#;

/// `twice`, and what is compiled for it.
fn with_twice<R>(template: &str, run: impl FnOnce(&OpSet, &Library, &Device) -> R) -> R {
    let op = r#"Fused(name: "twice", doc: "d", operands: ["x"], body: { "y": scale(x: "x", by: 2) },
        results: ["y"], template: "twice")"#;
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("kernels/templates");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("twice.cu.j2"), template).expect("a file");
    let mut kernels = Kernels::default();
    kernels.define_all(vec![Source::new("op.ron", op)]).unwrap_or_else(|e| panic!("{e}"));
    let device = Device::named("sm_90a").expect("known");
    run(&kernels.ops, &Library::new(Some(dir.path())), &device)
}

/// What runs a launch of `twice` on values of this shape: the variants, by the rows that they run.
fn parts(
    template: &str,
    shape: &[Dim],
    sequences: u64,
    bucket: Bucket,
) -> Result<Vec<(Part, String)>, CudaError> {
    let ty = || TensorType::act(DType::Bf16, shape);
    let limits = Dims { t: 128, b: sequences, s: 4096, pairs: 1 << 20, seqs: sequences };
    with_twice(template, |ops, library, device| {
        let mut attach = Attach::new(ops, library, device, limits, TunedVariants::default());
        let bucket = within(bucket, &limits);
        let run = attach.launch_in_parts(&apart("twice", ty(), ty()), bucket, "check/%y")?;
        let variant = |k: &KernelLaunch| attach.kernels[k.kernel as usize].variant.clone();
        Ok(run.kernels().map(|(part, kernel)| (part, variant(kernel))).collect())
    })
}

#[test]
fn rows_run_apart_where_steps_have_both_kinds_on_different_kernels() {
    let rows = [Sym::T.into(), 4096.into()];
    let mixed = Bucket { min: 17, ..Bucket::ALL };
    let decode = Bucket { decode: true, ..Bucket::ALL };
    let all = |variant: &str| vec![(Part::All, variant.to_owned())];
    let apart = vec![(Part::Generated, "few".to_owned()), (Part::Prompt, "many".to_owned())];
    let one_for_all = IN_PARTS.replace("parts: true,", "");
    for (template, shape, sequences, bucket, expected) in [
        (IN_PARTS, &rows[..], 4, mixed, &apart),
        // A step of one sequence is of one kind, and so are those of a decode bucket.
        (IN_PARTS, &rows, 1, mixed, &all("many")),
        (IN_PARTS, &rows, 4, decode, &all("few")),
        // More may have been generated than the other variant is for.
        (IN_PARTS, &rows, 9, mixed, &all("many")),
        (&one_for_all, &rows, 4, mixed, &all("many")),
        // Rows that lie side by side: those of tokens and of contexts.
        (IN_PARTS, &[Sym::S.into(), 2.into(), 64.into()], 4, mixed, &apart),
        (IN_PARTS, &[Sym::B.into(), 4096.into()], 4, mixed, &all("many")),
        (IN_PARTS, &[2.into(), Sym::T.into()], 4, mixed, &all("many")),
        (IN_PARTS, &[2.into(), Sym::T.into(), Sym::S.into()], 4, mixed, &all("many")),
    ] {
        let found = parts(template, shape, sequences, bucket).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found, *expected, "{shape:?}, {sequences} sequence(s), {bucket}");
    }
}

#[test]
fn what_the_copy_engine_reads_has_no_parts() {
    let text = IN_PARTS.replace("grid: [\"T\", \"2\"]", "tiles: { \"x\": \"64\" }");
    let error = parts(&text, &[Sym::T.into(), 4096.into()], 4, Bucket::ALL).expect_err("tiles");
    let error = error.to_string();
    assert!(error.contains("variant `many` can only be launched for all rows"), "{error}");
}

/// Parts that no executor could launch, in a plan that comes from a file.
#[test]
fn parts_of_plans_are_checked() {
    let text = "module m
graph g {
  %ids = step tokens : u32[T]
  %rows = step output_rows : u32[B]
  %w = weight \"w\" : const bf16[31, 64]
  %x = embedding(%ids, %w) : bf16[T, 64]
  %y = twice(%x) : bf16[T, 64]
  %z = gather_rows(%y, %rows) : bf16[B, 64]
  return %z
}

schedule g 0..1
";
    let plan = with_twice(IN_PARTS, |ops, library, device| {
        let module = infernum_ir::text::parse_with(text, "m.ir", ops).expect("a module");
        let limits = Dims { t: 32, b: 4, s: 64, pairs: 2048, seqs: 4 };
        let mut plan = crate::plan(&module, crate::TargetKind::Cuda, limits).expect("a plan");
        attach(&mut plan, ops, library, device, &TunedVariants::default()).expect("kernels");
        plan
    });
    plan.check().unwrap_or_else(|e| panic!("{e}"));
    let at = |op: &str| plan.programs[0].launches.iter().position(|l| l.op == op).expect("there");
    let run = plan.programs[0].launches[at("twice")].run.clone();
    assert!(matches!(run, Some(Run::Parts { .. })), "{run:?}");
    let refusal = |damage: &dyn Fn(&mut Plan)| {
        let mut damaged = plan.clone();
        damage(&mut damaged);
        damaged.check().expect_err("damage").to_string()
    };
    let told = refusal(&|plan| {
        let run = plan.programs[0].launches[at("twice")].run.as_mut();
        let Some(Run::Parts { generated, .. }) = run else { return };
        generated.tiles.push(TileMap { value: 0, rows: 8, dealt: false });
    });
    assert!(told.contains("cannot be launched for a part"), "{told}");
    let told = refusal(&|plan| plan.programs[0].launches[at("gather_rows")].run = run.clone());
    assert!(told.contains("which its values do not have"), "{told}");
    let told = refusal(&|plan| {
        let run = plan.programs[0].launches[at("twice")].run.as_mut();
        let Some(Run::Parts { prompt, .. }) = run else { return };
        prompt.kernel = 99;
    });
    assert!(told.contains("there is no kernel 99"), "{told}");
}

/// Files of choices: which goes before which, and what no longer fits.
#[test]
fn choices_go_before_the_order_and_stale_ones_are_told() {
    let rows = || TensorType::act(DType::Bf16, [Sym::T.into(), 4096.into()]);
    let limits = Dims { t: 128, b: 4, s: 4096, pairs: 1 << 20, seqs: 4 };
    let mixed = Bucket { min: 17, ..Bucket::ALL };
    let launch = apart("twice", rows(), rows());
    let site = |steps: &str| Site::of(&launch, steps.parse().expect(steps));
    let chosen = |source: &str, choices: &[(&str, &str)]| Chosen {
        source: source.to_owned(),
        sites: choices.iter().map(|(s, v)| (site(s), (*v).to_owned())).collect(),
    };
    let made = |files: &[Chosen]| {
        with_twice(IN_PARTS, |ops, library, device| {
            let tuned = TunedVariants::of(files.to_vec());
            let mut attach = Attach::new(ops, library, device, limits, tuned);
            let run = attach.launch_in_parts(&launch, within(mixed, &limits), "check/%y");
            run.unwrap_or_else(|e| panic!("{e}"));
            let made = attach.choices.made.iter();
            let made = made.map(|m| format!("{} {} {:?}", m.site.steps, m.variant, m.source));
            let dropped = attach.choices.dropped.iter().map(ToString::to_string);
            (made.collect::<Vec<_>>(), dropped.collect::<Vec<_>>())
        })
    };
    let by_order = ["T = 1..4 (decode) few None".to_owned(), "T = 1..128 many None".to_owned()];
    assert_eq!(made(&[]), (by_order.to_vec(), vec![]));
    // The user's own file goes before what ships, and that before the order.
    let own = chosen("own", &[("any T (decode)", "many")]);
    let ships = chosen("ships", &[("any T (decode)", "few"), ("any T", "many")]);
    let (found, dropped) = made(&[own.clone(), ships.clone()]);
    // Both parts on one variant are one launch, which nothing was chosen for.
    assert_eq!((found, dropped), (vec!["T = 17..128 many None".to_owned()], vec![]));
    let (found, _) = made(&[ships.clone(), own]);
    assert_eq!(found[0], "T = 1..4 (decode) few Some(\"ships\")");
    assert_eq!(found[1], "T = 1..128 many Some(\"ships\")");
    // A variant that is gone, and one that is not admitted: the next file has its turn.
    let stale = chosen("stale", &[("any T (decode)", "fewest"), ("any T", "few")]);
    let (found, dropped) = made(&[stale, ships]);
    assert_eq!(found[0], "T = 1..4 (decode) few Some(\"ships\")");
    assert!(dropped.len() == 2 && dropped[0].starts_with("stale: twice("), "{dropped:?}");
    assert!(dropped[0].contains("has no variant `fewest`"), "{dropped:?}");
    assert!(dropped[1].contains("`few` wants"), "{dropped:?}");
}
