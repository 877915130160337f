//! Which columns of matrices matter: what a text's activations say.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use infernum::{Capacity, CompileOptions, Loader, Machine, ModelOptions, RunOptions};
use infernum_codegen::Plan;
use infernum_frontend_hf::Model;
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_ir::Sym;
use infernum_runtime::SequenceSteps;
use infernum_runtime::cpu::{self, CpuOptions};
use infernum_runtime::{Executor, GroupKind};

/// Tokens of a window, as those of `infernum perplexity`.
const WINDOW: usize = 512;

/// A number for each column, by tensor; of experts by that of all of them.
#[derive(Default)]
pub(super) struct Importance {
    known: BTreeMap<String, Vec<f32>>,
    /// Matrices that were asked for and are not known.
    missed: Mutex<BTreeSet<String>>,
}

impl Importance {
    /// Of the columns of a matrix; none where they are not known, or there are others.
    pub(super) fn of(&self, name: &str, columns: u64) -> &[f32] {
        let known = self.known.get(whole(name)).map(Vec::as_slice).unwrap_or_default();
        if known.len() as u64 == columns {
            return known;
        }
        let mut missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
        missed.insert(name.to_owned());
        &[]
    }

    /// What is to be said of matrices that were asked for and that the text multiplied with nothing.
    pub(super) fn notice(&self) -> Option<String> {
        /// As many names are listed.
        const LISTED: usize = 8;
        let missed = self.missed.lock().unwrap_or_else(PoisonError::into_inner);
        if self.known.is_empty() || missed.is_empty() {
            return None;
        }
        let names: Vec<&str> = missed.iter().take(LISTED).map(String::as_str).collect();
        let more = match missed.len() - names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!(
            "--importance says nothing of {} of the matrices, whose columns count alike: {}{more}",
            missed.len(),
            names.join(", ")
        ))
    }

    /// Roots of means of squares while the model reads a text, on the CPU. With squares themselves the demo model in Q2_K is worse
    /// than with none (`bench/perplexity.py`).
    pub(super) fn gather(
        path: &Path,
        model: &Model,
        options: &ModelOptions,
    ) -> Result<Importance, Box<dyn Error>> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("--importance: {}: {e}", path.display()))?;
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
        if let Some(name) = encoded(&plan) {
            // Products read its values, not what is stored.
            let message = "expected a checkpoint of plain floats";
            return Err(format!("--importance: {message}; `{name}` is encoded").into());
        }
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
        let mut known = BTreeMap::new();
        for (name, sums) in all {
            let roots = roots(&sums, tokens.len()).map_err(|sum| {
                let message = "expected finite squares of what the text has it multiplied with";
                format!("--importance: `{name}`: {message}, found {sum}: --dtype f32 may hold them")
            })?;
            known.extend(roots.map(|roots| (name, roots)));
        }
        Ok(Importance { known, ..Importance::default() })
    }
}

/// A weight of a plan that is stored as codes.
fn encoded(plan: &Plan) -> Option<&str> {
    let mut tensors = plan.tensors().into_iter();
    tensors.find(|(_, ty)| ty.encoding.is_some()).map(|(name, _)| name)
}

/// Roots of means, and a little of what columns have on average: a column that the text never used may still be used. None
/// where no column was; the sum that is no number, if there is one.
fn roots(sums: &[f64], tokens: usize) -> Result<Option<Vec<f32>>, f64> {
    const LEAST: f64 = 1e-3;
    if let Some(sum) = sums.iter().find(|sum| !sum.is_finite()) {
        return Err(*sum);
    }
    let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
    let root = |sum: &f64| ((sum + LEAST * mean) / tokens as f64).sqrt() as f32;
    Ok((mean > 0.0).then(|| sums.iter().map(root).collect()))
}

/// The tensor that experts are parts of.
pub(super) fn whole(name: &str) -> &str {
    name.split_once('[').map_or(name, |(whole, _)| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_by_roots_of_means_of_squares() {
        let found = roots(&[0.0, 16.0, 64.0, 0.0], 4).expect("finite").expect("used columns");
        // A thousandth of their mean, 20, is added to each sum.
        let expected = [0.02f32, 16.02, 64.02, 0.02].map(|sum| (sum / 4.0).sqrt());
        found.iter().zip(expected).for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{a}, not {b}"));
        assert_eq!(roots(&[0.0, 0.0], 4), Ok(None));
        assert!(roots(&[1.0, f64::NAN], 4).is_err_and(f64::is_nan));
        assert_eq!(roots(&[1.0, f64::INFINITY], 4), Err(f64::INFINITY));
    }

    #[test]
    fn what_the_text_says_nothing_of_is_told() {
        let known = BTreeMap::from([("a".to_owned(), vec![1.0, 2.0])]);
        let importance = Importance { known, ..Importance::default() };
        assert_eq!(importance.of("a", 2), [1.0, 2.0]);
        assert_eq!(importance.notice(), None);
        assert!(importance.of("a", 3).is_empty() && importance.of("b", 2).is_empty());
        let notice = importance.notice().expect("two are not known");
        assert!(notice.contains("nothing of 2 of the matrices") && notice.ends_with(": a, b"));
        // Where nothing was asked for, nothing is missed.
        let none = Importance::default();
        assert!(none.of("a", 2).is_empty() && none.notice().is_none());
    }
}
