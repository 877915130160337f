//! Pipelines: lists of passes, as data.

use std::path::Path;

use include_dir::{Dir, include_dir};
use infernum_ir::{SourceError, is_there, nearest};
use serde::Deserialize;

use crate::data::Numerics;
use crate::{Bucket, PASSES, Pass};

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/kernels/pipelines");

/// The passes to run, in order, and what they are told.
#[derive(Clone)]
pub struct Pipeline {
    /// In the order they run.
    pub passes: Vec<&'static Pass>,
    /// What rewrites may do to the numbers.
    pub numerics: Numerics,
    /// The kinds of steps that are compiled by themselves; they cover every step.
    pub buckets: Vec<Bucket>,
    /// Whether a row's numbers must not depend on the step that it is computed in: steps of all kinds run the same
    /// graph then, on kernels that sum in one order.
    pub reproducible: bool,
    /// Rules and fused ops that are not used.
    pub disabled: Vec<String>,
    /// Context rows that costs are computed for.
    pub context: u64,
}

/// A pipeline could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum PipelineError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error(transparent)]
    Source(Box<SourceError>),
}

/// A pipeline's file.
#[derive(Deserialize)]
#[serde(rename = "Pipeline", deny_unknown_fields)]
struct File<'a> {
    #[allow(dead_code, reason = "for those who read the file")]
    doc: &'a str,
    #[serde(borrow)]
    passes: Vec<&'a str>,
    #[serde(default = "any_numerics")]
    numerics: Numerics,
    #[serde(default)]
    buckets: Vec<Tokens>,
    #[serde(default)]
    reproducible: bool,
    #[serde(default)]
    disable: Vec<&'a str>,
    #[serde(default = "usual_context")]
    context: u64,
}

/// A bucket, as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokens {
    min: u64,
    #[serde(default = "no_limit")]
    max: u64,
    #[serde(default)]
    decode: bool,
}

fn any_numerics() -> Numerics {
    Numerics::Rounds
}

fn usual_context() -> u64 {
    1024
}

fn no_limit() -> u64 {
    u64::MAX
}

impl Pipeline {
    /// No passes: the graph runs as the spec wrote it.
    pub fn none() -> Pipeline {
        Pipeline {
            passes: Vec::new(),
            numerics: Numerics::Exact,
            buckets: vec![Bucket::ALL],
            reproducible: false,
            disabled: Vec::new(),
            context: usual_context(),
        }
    }

    /// The pipeline called `name`: `none`, one of `DIR/kernels/pipelines`, or a built-in one.
    pub fn named(name: &str, data: Option<&Path>) -> Result<Pipeline, PipelineError> {
        if name == "none" {
            return Ok(Pipeline::none());
        }
        let file = format!("{name}.ron");
        if let Some(path) = data.map(|d| d.join("kernels/pipelines").join(&file))
            && is_there(&path)
        {
            return Pipeline::open(&path);
        }
        match EMBEDDED.get_file(&file).and_then(|f| f.contents_utf8()) {
            Some(text) => Pipeline::parse(&format!("kernels/pipelines/{file}"), text),
            // Neither a name nor, as it turns out, a file: reading it says why.
            None => Pipeline::open(Path::new(name)),
        }
    }

    /// A pipeline of the user's own.
    pub fn open(path: &Path) -> Result<Pipeline, PipelineError> {
        let shown = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Pipeline::parse(&shown, &text),
            Err(source) => Err(PipelineError::Io { path: shown, source }),
        }
    }

    /// Reads a pipeline; `name` is the file's, for errors.
    pub fn parse(name: &str, text: &str) -> Result<Pipeline, PipelineError> {
        let error = |start: usize, end: usize, message: String| {
            PipelineError::Source(Box::new(SourceError::new(name, text, start..end, message)))
        };
        let options = ron::Options::default().with_recursion_limit(32);
        let file: File<'_> = options.from_str(text).map_err(|e| {
            let start = SourceError::offset(text, e.span.start.line, e.span.start.col);
            error(start, start + 1, e.code.to_string())
        })?;
        let find = |pass: &&str| {
            PASSES.iter().find(|p| p.name == *pass).ok_or_else(|| {
                let start = (pass.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
                let hint = nearest(pass, PASSES.iter().map(|p| p.name));
                error(start, start + pass.len(), format!("there is no pass `{pass}`{hint}"))
            })
        };
        let bucket = |t: &Tokens| Bucket { min: t.min, max: t.max, decode: t.decode };
        let mut buckets: Vec<Bucket> = file.buckets.iter().map(bucket).collect();
        if buckets.is_empty() {
            buckets.push(Bucket::ALL);
        }
        Ok(Pipeline {
            passes: file.passes.iter().map(find).collect::<Result<_, _>>()?,
            numerics: file.numerics,
            buckets,
            reproducible: file.reproducible,
            disabled: file.disable.iter().map(|n| (*n).to_owned()).collect(),
            context: file.context,
        })
    }
}
