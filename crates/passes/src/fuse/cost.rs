//! What a call costs on a target, in microseconds.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::body::{attr_value, type_value};
use infernum_ir::expr::{Expr, Value};
use infernum_ir::{OpCall, is_there, nearest};
use serde::Deserialize;

use super::measured::Measurements;
use crate::Bucket;
use crate::data::DataError;

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/kernels/costs");

/// A target's speeds (`kernels/costs/*.ron`). A call costs its launch, and the longer of moving its
/// bytes and doing its operations.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename = "Costs", deny_unknown_fields)]
pub struct CostTable {
    /// What the numbers are of, and where they are from.
    pub doc: String,
    /// The kind of device, as conditions see it: `device.kind`.
    pub kind: String,
    /// Its compute capability, major times ten plus minor, as conditions see it: `device.sm`.
    #[serde(default)]
    pub sm: Option<u32>,
    /// Microseconds that a call takes when it does nothing.
    pub launch_us: f64,
    /// Bytes read a second, in units of 10⁹.
    pub read_gb_s: f64,
    /// Bytes written a second, in units of 10⁹.
    pub write_gb_s: f64,
    /// Operations a second.
    pub gflop_s: Rates,
    /// The fused ops that have kernels; one without costs what its parts cost.
    pub kernels: Kernels,
    /// Ops that differ from the rest.
    #[serde(default)]
    pub ops: BTreeMap<String, OpCost>,
    /// What was measured, which goes before what is modelled. Read from a file of its own.
    #[serde(skip)]
    pub measured: Measurements,
}

/// Operations a second by the type of the operands, in units of 10⁹.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// `f32`.
    pub f32: f64,
    /// The 16-bit types.
    pub half: f64,
    /// `f8e4m3` and `f8e5m2`.
    pub eight: f64,
    /// An encoded operand.
    pub quantised: f64,
}

/// Which fused ops have kernels.
#[derive(Clone, Debug, Deserialize)]
pub enum Kernels {
    /// Those that name a template.
    Templates,
    /// These.
    Only(Vec<String>),
}

/// How an op differs from the rest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OpCost {
    /// Microseconds of an empty call.
    pub launch_us: Option<f64>,
    /// Factor on the time that bytes and operations take.
    pub factor: Factor,
    /// The calls that the target has the op's kernel for: conditions over its operands, attributes, `tokens` and `decode`.
    pub when: Vec<Condition>,
}

impl Default for OpCost {
    fn default() -> OpCost {
        OpCost { launch_us: None, factor: Factor::Number(1.0), when: Vec::new() }
    }
}

/// A number, or an expression over what conditions are over.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Factor {
    /// The same for all calls.
    Number(f64),
    /// Computed for each call.
    Of(Condition),
}

/// An expression that is true or false; a number, in a [`Factor`].
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Condition {
    /// As it was written.
    pub text: String,
    expr: Expr,
}

impl TryFrom<String> for Condition {
    type Error = String;

    fn try_from(text: String) -> Result<Condition, String> {
        let expr = text.parse().map_err(|e| format!("`{text}`: {e}"))?;
        Ok(Condition { text, expr })
    }
}

impl CostTable {
    /// Whether the target's kernels are made of templates, as those of GPUs are.
    pub fn runs_templates(&self) -> bool {
        matches!(self.kernels, Kernels::Templates)
    }

    /// The table of `target`: one of `DIR/kernels/costs`, or a built-in one.
    pub fn named(target: &str, data: Option<&Path>) -> Result<CostTable, DataError> {
        let file = format!("{target}.ron");
        if let Some(path) = data.map(|d| d.join("kernels/costs").join(&file))
            && is_there(&path)
        {
            let shown = path.display().to_string();
            let text = std::fs::read_to_string(&path)
                .map_err(|source| DataError::Io { path: shown.clone(), source })?;
            return CostTable::parse(&Source::new(&shown, &text));
        }
        let shown = format!("kernels/costs/{file}");
        if let Some(text) = EMBEDDED.get_file(&file).and_then(|f| f.contents_utf8()) {
            return CostTable::parse(&Source::new(&shown, text));
        }
        let known = EMBEDDED.files().filter_map(|f| f.path().file_stem()?.to_str());
        let hint = nearest(target, known);
        let message = format!("there is no cost table for `{target}`{hint}");
        let source = std::io::Error::new(std::io::ErrorKind::NotFound, message);
        Err(DataError::Io { path: shown, source })
    }

    /// Reads a table.
    pub fn parse(source: &Source) -> Result<CostTable, DataError> {
        Ok(read_ron(source)?)
    }

    /// Whether the target has a kernel of the op's own for a call in the steps of a bucket.
    pub fn has_kernel(&self, call: &OpCall<'_>, bucket: Bucket) -> bool {
        self.refusal(call, bucket).is_none()
    }

    /// The factor on a call's time; of an expression without an answer, that and why.
    pub(super) fn factor(
        &self,
        call: &OpCall<'_>,
        bucket: Bucket,
    ) -> Result<f64, (&Condition, String)> {
        match self.ops.get(call.op.name).map(|cost| &cost.factor) {
            None => Ok(1.0),
            Some(Factor::Number(n)) => Ok(*n),
            Some(Factor::Of(of)) => match of.expr.eval(&|name: &str| lookup(call, bucket, name)) {
                Ok(Value::Num(n)) if n.is_finite() && n >= 0.0 => Ok(n),
                Ok(found) => Err((of, format!("it is {found}, not a factor"))),
                Err(error) => Err((of, error.to_string())),
            },
        }
    }

    /// Why the target has no kernel of the op's own for a call, where it has none.
    pub(super) fn refusal(&self, call: &OpCall<'_>, bucket: Bucket) -> Option<Refusal<'_>> {
        let op = call.op;
        op.fused.as_ref()?;
        let known = match &self.kernels {
            Kernels::Templates => op.cuda.is_some(),
            Kernels::Only(names) => names.iter().any(|n| n == op.name),
        };
        if !known {
            return Some(Refusal::NoKernel);
        }
        if let Err((condition, why)) = self.factor(call, bucket) {
            return Some(Refusal::Unclear(condition, why));
        }
        let lookup = |name: &str| lookup(call, bucket, name);
        let when = self.ops.get(op.name).map_or(&[][..], |cost| &cost.when);
        when.iter().find_map(|condition| match condition.expr.eval(&lookup) {
            Ok(Value::Bool(true)) => None,
            Ok(Value::Bool(false)) => Some(Refusal::Unless(condition)),
            Ok(found) => {
                Some(Refusal::Unclear(condition, format!("it is {found}, neither true nor false")))
            }
            Err(error) => Some(Refusal::Unclear(condition, error.to_string())),
        })
    }
}

/// Why a target has no kernel for a call.
pub(super) enum Refusal<'t> {
    /// It has none for any.
    NoKernel,
    /// A condition is false.
    Unless(&'t Condition),
    /// A condition has no answer, which is a mistake in the table.
    Unclear(&'t Condition, String),
}

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NoKernel => Ok(()),
            Refusal::Unless(c) => write!(f, " where not `{}`", c.text),
            Refusal::Unclear(c, why) => write!(f, ", as `{}` has no answer ({why})", c.text),
        }
    }
}

/// What a condition's names mean.
fn lookup(call: &OpCall<'_>, bucket: Bucket, name: &str) -> Option<Value> {
    match name {
        "tokens" => return Some(bucket.tokens()),
        "decode" => return Some(Value::Bool(bucket.decode)),
        _ => {}
    }
    if let Some(i) = call.op.operands.iter().position(|o| o.name == name) {
        return Some(call.operands.get(i)?.map_or(Value::Null, type_value));
    }
    let attr = call.op.attrs.iter().position(|a| a.name == name)?;
    attr_value(call.attrs.get(attr)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_table_reads() {
        let names: Vec<_> = EMBEDDED.files().map(|f| f.path().display().to_string()).collect();
        assert!(names.len() >= 5, "{names:?}");
        for name in names {
            let table = CostTable::named(name.trim_end_matches(".ron"), None);
            let table = table.unwrap_or_else(|e| panic!("{e}"));
            assert!(table.read_gb_s > 0.0 && table.write_gb_s > 0.0 && table.gflop_s.f32 > 0.0);
        }
    }
}
