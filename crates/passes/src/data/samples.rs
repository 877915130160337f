//! The values that an attribute is tried on, as written in `samples`.

use infernum_frontend_hf::spec::Source;
use infernum_ir::{Attr, AttrDef, AttrKind, DType, SourceError};

use super::notation::at;

/// Values of one attribute, of which trials take any.
///
/// ```text
/// 1..4              whole numbers, both ends included; or numbers between the two
/// 0.5..2 | 10       alternatives
/// null | 3..9       absent, or given
/// neox              a name of an enumeration, an element type, true or false
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(Vec<Sample>);

#[derive(Clone, Debug, PartialEq)]
enum Sample {
    Given(Attr),
    Whole(i64, i64),
    Between(f64, f64),
}

impl Samples {
    /// This value always.
    pub(super) fn one(attr: Attr) -> Samples {
        Samples(vec![Sample::Given(attr)])
    }

    /// One of the values. `below` gives a number in `0..n`, `unit` one in [0, 1).
    pub fn pick(
        &self,
        below: &mut dyn FnMut(usize) -> usize,
        unit: &mut dyn FnMut() -> f64,
    ) -> Attr {
        match &self.0[below(self.0.len())] {
            Sample::Given(attr) => attr.clone(),
            Sample::Whole(low, high) => Attr::Int(low + below((high - low + 1) as usize) as i64),
            // Uniform in the logarithm, where there is one: a range such as 1e-6..0.1 spans magnitudes.
            Sample::Between(low, high) if *low > 0.0 => {
                Attr::Float((low.ln() + unit() * (high / low).ln()).exp())
            }
            Sample::Between(low, high) => Attr::Float(low + unit() * (high - low)),
        }
    }
}

/// Reads the values of an attribute that `def` declares.
pub(super) fn parse(source: &Source, text: &str, def: &AttrDef) -> Result<Samples, SourceError> {
    let choices = text.split('|').map(|part| {
        let part = part.trim();
        choice(part, def).ok_or_else(|| {
            let message = format!(
                "expected {} for `{}`, a range of such (`1..4`), or several with `|` between, found \
                 `{part}`",
                def.kind, def.name
            );
            let place = text.find(part).map_or(text, |at| &text[at..at + part.len()]);
            at(source, place, message)
        })
    });
    Ok(Samples(choices.collect::<Result<_, _>>()?))
}

fn choice(text: &str, def: &AttrDef) -> Option<Sample> {
    if let Some((low, high)) = text.split_once("..") {
        let (low, high) = (low.trim(), high.trim());
        return match def.kind {
            AttrKind::Int => {
                let (low, high) = (low.parse::<i64>().ok()?, high.parse::<i64>().ok()?);
                (0 <= low && low <= high && high < 1 << 32).then_some(Sample::Whole(low, high))
            }
            AttrKind::Float => {
                let (low, high) = (low.parse::<f64>().ok()?, high.parse::<f64>().ok()?);
                let ok = low.is_finite() && high.is_finite() && low <= high;
                ok.then_some(Sample::Between(low, high))
            }
            _ => None,
        };
    }
    let attr = match (def.kind, text) {
        (_, "null") => Attr::None,
        (AttrKind::Bool, text) => Attr::Bool(text.parse().ok()?),
        (AttrKind::Int, text) => Attr::Int(text.parse().ok()?),
        (AttrKind::Float, text) => Attr::Float(text.parse().ok()?),
        (AttrKind::Enum(_), text) => Attr::Enum(text.to_owned()),
        (AttrKind::DType, text) => Attr::DType(text.parse::<DType>().ok()?),
        (AttrKind::Expr, text) => Attr::Expr(text.parse().ok()?),
        (AttrKind::Recurrence, text) => Attr::Recurrence(text.parse().ok()?),
        (AttrKind::Dims, _) => return None,
    };
    def.check(&attr).ok().map(|()| Sample::Given(attr))
}
