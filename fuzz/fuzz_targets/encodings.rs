//! Files of encodings and of tables, parted by lines of `---`, are read or refused, in bounded memory. What is read is held
//! against itself on random bytes. Seeds: `seeds/encodings` and `../kernels/encodings`. Run it with
//! `-rss_limit_mb=2048`.

#![no_main]

mod common;

use common::{Bound, bounded};
use infernum_frontend_hf::spec::Source;
use infernum_passes::data::{DataError, Kernels};
use infernum_runtime::check::encodings::check;
use libfuzzer_sys::fuzz_target;

/// One file makes up to 256 encodings of all its texts, and as much of its tables as 2^18 numbers.
const BOUND: Bound = Bound { factor: 1 << 16, slack: 32 << 20 };

fn read(input: &str) -> Result<Kernels, DataError> {
    let source = |text: &str| Source::new("fuzz.ron", text);
    let is_table = |text: &&str| text.trim_start().starts_with("Table");
    let (tables, encodings): (Vec<&str>, Vec<&str>) = input.split("\n---\n").partition(is_table);
    let mut kernels = Kernels::default();
    kernels.add_tables(&tables.into_iter().map(source).collect::<Vec<_>>())?;
    kernels.add_encodings(&encodings.into_iter().map(source).collect::<Vec<_>>())?;
    Ok(kernels)
}

fuzz_target!(|data: &[u8]| {
    let Ok(input) = std::str::from_utf8(data) else { return };
    match bounded("read", input.len(), BOUND, || read(input)) {
        Ok(kernels) => {
            for encoding in kernels.ops.encodings().take(4) {
                let _ = std::hint::black_box(check(encoding, 1));
            }
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
