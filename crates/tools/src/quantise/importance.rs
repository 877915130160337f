//! Which columns of matrices matter: what a text's activations say.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use infernum::{Capacity, CompileOptions, Loader, Machine, ModelOptions, RunOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_frontend_hf::{Checkpoint, Model};
use infernum_ir::Sym;
use infernum_runtime::SequenceSteps;
use infernum_runtime::cpu::{self, CpuOptions};
use infernum_runtime::{Executor, GroupKind};

/// Tokens of a window, as those of `infernum perplexity`.
const WINDOW: usize = 512;

/// A number for each column, by tensor; of experts by that of all of them.
#[derive(Default)]
pub(super) struct Importance(BTreeMap<String, Vec<f32>>);

impl Importance {
    /// Of the columns of a matrix; none where they are not known, or there are others.
    pub(super) fn of(&self, name: &str, columns: u64) -> &[f32] {
        let known = self.0.get(whole(name)).map(Vec::as_slice).unwrap_or_default();
        if known.len() as u64 == columns { known } else { &[] }
    }

    /// Means of squares while the model reads a text, on the CPU.
    pub(super) fn gather(
        path: &Path,
        model: &Model,
        options: &ModelOptions,
    ) -> Result<Importance, Box<dyn Error>> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("--importance: {}: {e}", path.display()))?;
        let mut tensors = model.checkpoint.iter().flat_map(Checkpoint::tensors);
        if let Some(coded) = tensors.find(|t| t.blocks.is_some()) {
            // Products read its values, not what is stored.
            let message = "expected a checkpoint of plain floats";
            return Err(format!("--importance: {message}; `{}` is encoded", coded.name).into());
        }
        let tokens = Tokenizer::open(&model.files)?.encode(&text, false)?;
        if tokens.is_empty() {
            return Err(format!("--importance: {}: no tokens", path.display()).into());
        }
        let longest = tokens.len().min(WINDOW);
        let capacity = Capacity::one(longest as u64);
        // Without passes each product is an op of its own.
        let compile = CompileOptions {
            passes: "none".to_owned(),
            max_length: Some(longest as u64),
            ..options.compile.clone()
        };
        let (machine, run) = (Machine::Cpu, RunOptions::default());
        let loader = Loader::new(model, &compile, &run, &machine);
        let plan = loader.plan(Sym::B, capacity)?;
        let weights = loader.weights(&plan);
        let sums = Arc::new(cpu::Importance::default());
        let kv_blocks = capacity.blocks(&GroupKind::of_plan(&plan), loader.chunk());
        let options = CpuOptions { kv_blocks, ..CpuOptions::default() };
        let mut executor = sums.gathering(plan, &*weights, options)?;
        for window in tokens.chunks(longest) {
            let groups = executor.groups();
            let sequence = SequenceSteps::for_tokens(&groups, window.len(), loader.chunk());
            infernum::prefill(&mut executor, sequence, window, loader.chunk(), |_| {})?;
        }
        let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, sums) in sums.sums() {
            let of = all.entry(whole(&name).to_owned()).or_insert_with(|| vec![0.0; sums.len()]);
            of.iter_mut().zip(sums).for_each(|(of, sum)| *of += sum);
        }
        let means = all.into_iter().map(|(name, sums)| (name, means(&sums, tokens.len())));
        Ok(Importance(means.collect()))
    }
}

/// Means, and a little of what columns have on average: a column that the text never used may still be used.
fn means(sums: &[f64], tokens: usize) -> Vec<f32> {
    const LEAST: f64 = 1e-3;
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    sums.iter().map(|sum| ((sum + LEAST * mean) / tokens as f64) as f32).collect()
}

/// The tensor that experts are parts of.
pub(super) fn whole(name: &str) -> &str {
    name.split_once('[').map_or(name, |(whole, _)| whole)
}
