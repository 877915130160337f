//! However a header is made, parsing it allocates at most twice its length. The only test in this
//! file, because it measures the whole process.

use infernum_frontend_hf::safetensors::Header;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

fn file(items: impl Iterator<Item = String>) -> Vec<u8> {
    let header = format!("{{{}}}", items.collect::<Vec<_>>().join(","));
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out
}

#[test]
fn parsing_allocates_at_most_twice_the_header() {
    const N: usize = 50_000;
    let empty = |name: String, shape: &str| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#)
    };
    let hostile = [
        ("the smallest tensors", file((0..N).map(|i| empty(format!("{i:x}"), "0")))),
        ("the highest rank", file((0..N).map(|i| empty(format!("{i:x}"), "0,0,0,0,0,0,0,0")))),
        ("escapes in each name", file((0..N).map(|i| empty(format!("\\n{i:x}"), "0")))),
        ("one long escaped name", file((0..1).map(|_| empty("\\n".repeat(N * 20), "0")))),
        ("one long shape", file((0..1).map(|_| empty("a".into(), &"1,".repeat(N * 20))))),
        (
            "one long dtype",
            file((0..1).map(|_| format!(r#""a":{{"dtype":"{}"}}"#, "x".repeat(N * 20)))),
        ),
        ("one tensor many times", file((0..N).map(|_| empty("a".into(), "0")))),
        ("deep nesting", file((0..1).map(|_| format!("\"a\":{}", "[".repeat(N * 20))))),
    ];
    for (what, bytes) in hostile {
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let parsed = Header::parse(&bytes);
        let peak = ALLOCATOR.peak_usage() - before;
        let header = bytes.len() - 8;
        let ratio = peak as f64 / header as f64;
        eprintln!("{what}: {header} bytes of header, peak {ratio:.2}x, ok {}", parsed.is_ok());
        assert!(ratio <= 2.0, "{what}: parsing took {ratio:.2} times the header");
    }
}
