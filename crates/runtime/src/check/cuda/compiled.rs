//! Compiles the kernels of templates, and reads what the assembler says of them. Needs no GPU.

use std::collections::HashSet;

use infernum_codegen::Kernel;
use infernum_codegen::cuda::{CheckSizes, Compiler, Device, Library};
use infernum_passes::data::Kernels;
use rayon::prelude::*;
use serde::Serialize;

use super::kernels;

/// What became of one kernel.
#[derive(Clone, Debug, Serialize)]
pub struct CompiledKernel {
    /// The op's template.
    pub template: String,
    /// The variant of it.
    pub variant: String,
    /// Whether it is a fast variant of a product or of attention: what decoding spends its time in.
    pub is_hot: bool,
    /// The architecture.
    pub arch: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of registers that did not fit, written to memory.
    pub spills: u32,
    /// Bytes of shared memory that the kernel declares.
    pub shared: u32,
    /// Why it does not compile.
    pub problem: Option<String>,
}

impl CompiledKernel {
    /// Whether it compiles, and does not spill where every microsecond counts.
    pub fn passed(&self) -> bool {
        self.problem.is_none() && !(self.is_hot && self.spills > 0)
    }
}

/// Which of the kernels that are tried are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In every element type and size.
    All,
    /// Each variant of a template once, for each kind of codes that it reads.
    Once,
    /// Each variant once in each template, and in some template with each kind and width of codes, and each size of groups and
    /// type of scales.
    Pairs,
}

/// Compiles every variant that is admitted for `device` at some size that [`check`](super::check) tries, as far as `extent` says.
/// Only ops whose names contain `only` are compiled.
pub fn compile(
    data: &Kernels,
    library: &Library,
    device: &Device,
    compiler: &Compiler,
    (extent, only): (Extent, &str),
) -> Vec<CompiledKernel> {
    let mut problems: Vec<CompiledKernel> = Vec::new();
    let mut kernels = kernels(data, library, device, only, &mut |op, problem| {
        // A mistake in a template is one, however many calls meet it.
        if problems.iter().any(|p| p.problem.as_ref() == Some(&problem)) {
            return;
        }
        problems.push(CompiledKernel {
            template: op.to_owned(),
            variant: String::new(),
            is_hot: false,
            arch: device.arch.clone(),
            registers: 0,
            spills: 0,
            shared: 0,
            problem: Some(problem),
        });
    });
    let is_hot = |template: &str| {
        let sizes = library.template(template).map(|t| t.check_sizes);
        matches!(sizes, Ok(CheckSizes::Products | CheckSizes::Heads))
    };
    // Plans have kernels of other ops, too: those that feed a call, and pick tokens.
    let named = data.ops.all().filter(|op| op.name.contains(only)).filter_map(|op| op.cuda);
    let mut named: HashSet<&str> = named.collect();
    // What packs weights is launched beside those that read them.
    named.extend(named.contains("dequantise").then_some("repack"));
    kernels.retain(|k| only.is_empty() || named.contains(k.template.as_str()));
    let (mut seen, mut pairs) = (HashSet::new(), HashSet::new());
    // What is read of codes is another kernel for each kind of them.
    let codes = |k: &Kernel| {
        let mut lines = k.text.lines().skip_while(|line| !line.starts_with("struct Packed_"));
        lines.nth(1).unwrap_or_default().to_owned()
    };
    kernels.retain(|k| {
        let (template, variant) = (k.template.clone(), k.variant.clone());
        match extent {
            Extent::All => true,
            Extent::Once => seen.insert((template, variant, codes(k))),
            Extent::Pairs => {
                let mut fresh = seen.insert((template, variant.clone(), String::new()));
                for constant in constants(&codes(k)) {
                    fresh |= pairs.insert((variant.clone(), constant.to_owned()));
                }
                fresh
            }
        }
    });
    let one = |kernel: &Kernel| {
        let compiled = compiler.compile(&kernel.name, &kernel.text, &device.arch, true);
        let (log, problem) = match compiled {
            Ok((_, log)) => (log, None),
            Err(e) => (String::new(), Some(e.to_string())),
        };
        CompiledKernel {
            template: kernel.template.clone(),
            variant: kernel.variant.clone(),
            is_hot: is_hot(&kernel.template) && kernel.variant != "plain",
            arch: device.arch.clone(),
            registers: number(&log, " registers"),
            spills: number(&log, " bytes spill stores"),
            shared: number(&log, " bytes smem"),
            problem,
        }
    };
    problems.extend(kernels.par_iter().map(one).collect::<Vec<_>>());
    problems
}

/// Of the line of constants that says what codes a kernel reads, each by itself: `GROUP = 32`. Where things lie and how many bytes they
/// have follows from the others.
fn constants(codes: &str) -> impl Iterator<Item = &str> {
    let list = codes.trim().trim_start_matches("static constexpr int ").trim_end_matches(';');
    list.split(", ").filter(|c| {
        let name = c.split(' ').next().unwrap_or_default();
        !name.is_empty() && name != "BYTES" && !name.contains("AT")
    })
}

/// The number before `unit` in the assembler's log; 0 where it says nothing.
fn number(log: &str, unit: &str) -> u32 {
    let before = log.split_once(unit).map_or("", |(before, _)| before);
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_sizes_are_no_kinds_of_codes() {
        let line = "    static constexpr int KIND = 0, BITS = 4, AT0 = 0, SCALE = 1, SCALE_AT = 512, BYTES = 576;";
        assert_eq!(constants(line).collect::<Vec<_>>(), ["KIND = 0", "BITS = 4", "SCALE = 1"]);
        assert_eq!(constants("").count(), 0, "a kernel that reads no codes");
    }

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : 16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]";
        assert_eq!(number(log, " registers"), 40);
        assert_eq!(number(log, " bytes spill stores"), 12);
        assert_eq!(number(log, " bytes smem"), 1024);
        assert_eq!(number("", " registers"), 0);
    }
}
