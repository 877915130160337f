//! Variants of a template that are never chosen, as far as their conditions say.

use std::collections::{BTreeMap, BTreeSet};

use infernum_ir::DType;
use infernum_ir::expr::{BinaryOp, Expr, UnaryOp, Value};
use serde::Serialize;

use super::{Device, Template};

/// Why a variant is never run, or not before something is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unreached {
    /// The variant.
    pub variant: String,
    /// Why.
    pub reason: String,
    /// Whether no choice can run it. Otherwise it only comes after another one that is admitted
    /// wherever it is, so that nothing but a measurement puts it first.
    pub never: bool,
}

/// The variants of a template whose conditions contradict one another, or that come after one that is
/// admitted wherever they are. Conditions that compare nothing with a constant are only told to be
/// the same or each other's opposite.
pub fn unreached(template: &Template) -> Vec<Unreached> {
    let variants: Vec<Conditions> =
        template.variants.iter().map(|v| Conditions::new(&v.when)).collect();
    let mut found = Vec::new();
    for (i, conditions) in variants.iter().enumerate() {
        let variant = template.variants[i].name.clone();
        if let Some(reason) = conditions.contradiction() {
            found.push(Unreached { variant, reason, never: true });
            continue;
        }
        let before =
            |j: &usize| variants[*j].contradiction().is_none() && conditions.imply(&variants[*j]);
        if let Some(j) = (0..i).find(before) {
            let first = &template.variants[j].name;
            let reason = format!("`{first}` comes before it and is admitted wherever it is");
            found.push(Unreached { variant, reason, never: false });
        }
    }
    found
}

/// What a quantity may be.
#[derive(Clone, Debug, Default)]
struct Domain {
    /// Bounds, and whether the bound itself is left out.
    low: Option<(f64, bool)>,
    high: Option<(f64, bool)>,
    /// Values that it is one of.
    is: Option<BTreeSet<String>>,
    /// Values that it is not.
    is_not: BTreeSet<String>,
}

/// All that must hold, by the quantity that it is about.
#[derive(Default)]
struct Conditions {
    domains: BTreeMap<String, Domain>,
    atoms: Vec<Atom>,
}

/// `x.cols <= 1024`, or a condition that is only known by its text.
#[derive(Clone, Debug)]
struct Atom {
    quantity: String,
    op: BinaryOp,
    value: Value,
}

impl Conditions {
    fn new(when: &[Expr]) -> Conditions {
        let mut all = Conditions::default();
        when.iter().for_each(|e| all.add(e));
        for Atom { quantity, op, value } in &all.atoms {
            let domain = all.domains.entry(quantity.clone()).or_default();
            domain.add(*op, value);
            // A remainder of sizes is known without any condition.
            if let Ok(Expr::Binary(BinaryOp::Rem, _, by)) = quantity.parse()
                && let Expr::Lit(by @ Value::Num(n)) = &*by
                && *n > 0.0
            {
                domain.add(BinaryOp::Ge, &Value::Num(0.0));
                domain.add(BinaryOp::Lt, by);
            }
        }
        all
    }

    fn add(&mut self, e: &Expr) {
        // `!(a == b)` is `a != b`.
        if let Expr::Unary(UnaryOp::Not, inner) = e
            && let Expr::Binary(op, a, b) = &**inner
            && let Some(op) = opposite(*op)
        {
            return self.add(&Expr::Binary(op, a.clone(), b.clone()));
        }
        let atom = match e {
            Expr::Binary(BinaryOp::And, a, b) => {
                self.add(a);
                return self.add(b);
            }
            Expr::Binary(op, a, b) => match (&**a, &**b) {
                (a, Expr::Lit(value)) => Some((a, *op, value)),
                (Expr::Lit(value), b) => Some((b, mirrored(*op), value)),
                _ => None,
            },
            _ => None,
        };
        let comparison = |op| {
            use BinaryOp::{Eq, Ge, Gt, Le, Lt, Ne};
            matches!(op, Eq | Ne | Lt | Le | Gt | Ge)
        };
        let truth = |e: &Expr, is: bool| Atom {
            quantity: e.to_string(),
            op: BinaryOp::Eq,
            value: Value::Bool(is),
        };
        self.atoms.push(match (atom, e) {
            (Some((a, op, value)), _) if comparison(op) => {
                Atom { quantity: a.to_string(), op, value: value.clone() }
            }
            (_, Expr::Unary(UnaryOp::Not, inner)) => truth(inner, false),
            _ => truth(e, true),
        });
    }

    /// Why nothing meets all conditions.
    fn contradiction(&self) -> Option<String> {
        self.domains.iter().find_map(|(quantity, domain)| {
            let why = domain.empty(quantity)?;
            Some(format!("its conditions on `{quantity}` cannot hold: {why}"))
        })
    }

    /// Whether what meets these conditions meets the others.
    fn imply(&self, others: &Conditions) -> bool {
        others.atoms.iter().all(|atom| {
            let domain = self.domains.get(&atom.quantity);
            domain.is_some_and(|d| d.implies(atom.op, &atom.value))
        })
    }
}

fn mirrored(op: BinaryOp) -> BinaryOp {
    match op {
        BinaryOp::Lt => BinaryOp::Gt,
        BinaryOp::Le => BinaryOp::Ge,
        BinaryOp::Gt => BinaryOp::Lt,
        BinaryOp::Ge => BinaryOp::Le,
        op => op,
    }
}

fn opposite(op: BinaryOp) -> Option<BinaryOp> {
    Some(match op {
        BinaryOp::Eq => BinaryOp::Ne,
        BinaryOp::Ne => BinaryOp::Eq,
        BinaryOp::Lt => BinaryOp::Ge,
        BinaryOp::Le => BinaryOp::Gt,
        BinaryOp::Gt => BinaryOp::Le,
        BinaryOp::Ge => BinaryOp::Lt,
        _ => return None,
    })
}

impl Domain {
    fn add(&mut self, op: BinaryOp, value: &Value) {
        if let Value::Num(n) = *value {
            let at_least = |open| (n, open);
            let (low, high) = match op {
                BinaryOp::Gt | BinaryOp::Ge => (Some(at_least(op == BinaryOp::Gt)), None),
                BinaryOp::Lt | BinaryOp::Le => (None, Some(at_least(op == BinaryOp::Lt))),
                BinaryOp::Eq => (Some(at_least(false)), Some(at_least(false))),
                _ => (None, None),
            };
            if let Some((n, open)) = low
                && self.low.is_none_or(|(m, o)| (n, open) > (m, o))
            {
                self.low = Some((n, open));
            }
            if let Some((n, open)) = high
                && self.high.is_none_or(|(m, o)| n < m || (n == m && open && !o))
            {
                self.high = Some((n, open));
            }
        }
        match op {
            BinaryOp::Eq => {
                let one = BTreeSet::from([value.to_string()]);
                self.is = Some(match &self.is {
                    Some(before) => before.intersection(&one).cloned().collect(),
                    None => one,
                });
            }
            BinaryOp::Ne => drop(self.is_not.insert(value.to_string())),
            _ => {}
        }
    }

    /// Why it holds nothing.
    fn empty(&self, quantity: &str) -> Option<String> {
        if let (Some((low, low_open)), Some((high, high_open))) = (self.low, self.high)
            && (low > high || (low == high && (low_open || high_open)))
        {
            let low = format!("{} {low}", if low_open { "above" } else { "at least" });
            let high = format!("{} {high}", if high_open { "below" } else { "at most" });
            return Some(format!("it would be {low} and {high}"));
        }
        if let Some(is) = &self.is {
            if is.iter().all(|v| self.is_not.contains(v)) {
                return Some("it would be two things, or the opposite of itself".to_owned());
            }
            let known = |v: &String| v.trim_matches('\'').parse::<DType>().is_ok();
            let texts = is.iter().all(|v| v.starts_with('\''));
            let is_type = quantity.rsplit_once('.').is_some_and(|(_, field)| field == "dtype");
            if is_type && texts && !is.iter().any(known) {
                let is: Vec<&str> = is.iter().map(String::as_str).collect();
                return Some(format!("there is no element type {}", is.join(", ")));
            }
        }
        let sm = |(_, sm, _): &(&str, u32, u32)| self.holds(f64::from(*sm));
        if quantity == "device.sm" && !Device::KNOWN.iter().any(sm) {
            let known = Device::KNOWN.map(|(_, sm, _)| sm.to_string()).join(", ");
            return Some(format!("the architectures are {known}"));
        }
        None
    }

    fn holds(&self, n: f64) -> bool {
        let text = Value::Num(n).to_string();
        self.low.is_none_or(|(low, open)| n > low || (n == low && !open))
            && self.high.is_none_or(|(high, open)| n < high || (n == high && !open))
            && self.is.as_ref().is_none_or(|is| is.contains(&text))
            && !self.is_not.contains(&text)
    }

    /// Whether everything in it compares so.
    fn implies(&self, op: BinaryOp, value: &Value) -> bool {
        let text = value.to_string();
        let all_differ = |is: &BTreeSet<String>| !is.contains(&text);
        match (op, value) {
            (BinaryOp::Eq, _) => self.is.as_ref().is_some_and(|is| is.iter().all(|v| *v == text)),
            (BinaryOp::Ne, Value::Num(n)) if !self.holds(*n) => true,
            (BinaryOp::Ne, _) => {
                self.is_not.contains(&text) || self.is.as_ref().is_some_and(all_differ)
            }
            (BinaryOp::Lt, Value::Num(n)) => {
                self.high.is_some_and(|(h, open)| h < *n || (h == *n && open))
            }
            (BinaryOp::Le, Value::Num(n)) => self.high.is_some_and(|(h, _)| h <= *n),
            (BinaryOp::Gt, Value::Num(n)) => {
                self.low.is_some_and(|(l, open)| l > *n || (l == *n && open))
            }
            (BinaryOp::Ge, Value::Num(n)) => self.low.is_some_and(|(l, _)| l >= *n),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Library;

    fn found(variants: &str) -> Vec<(String, bool, String)> {
        let text = format!("{{#\nKernel(doc: \"d\", variants: [{variants}])\n#}}\n");
        let template = Template::parse(&Library::default(), "t", "t.cu.j2", &text);
        let template = template.unwrap_or_else(|e| panic!("{e}"));
        unreached(&template).into_iter().map(|u| (u.variant, u.never, u.reason)).collect()
    }

    fn variant(name: &str, when: &str) -> String {
        format!("Variant(name: \"{name}\", when: [{when}], grid: [\"1\"]),")
    }

    #[test]
    fn conditions_that_contradict_one_another() {
        for when in [
            "\"x.cols <= 64\", \"x.cols > 64\"",
            "\"x.cols == 8 && x.cols == 9\"",
            "\"x.dtype == 'float'\"",
            "\"x.dtype == 'f32'\", \"x.dtype != 'f32'\"",
            "\"device.sm >= 120\"",
            "\"device.sm > 80 && device.sm < 86\"",
            "\"bias == null\", \"!(bias == null)\"",
            "\"16 >= tokens.max\", \"tokens.max == 17\"",
            "\"x.cols % 2 == 3\"",
            "\"x.cols % 8 < 0\"",
        ] {
            let found = found(&variant("a", when));
            assert!(matches!(&found[..], [(_, true, _)]), "{when}: {found:?}");
        }
        assert_eq!(
            found(&variant("a", "\"x.cols <= 64\", \"x.cols >= 64\", \"device.sm >= 90\"")),
            []
        );
    }

    #[test]
    fn variants_behind_others() {
        let two = |a: &str, b: &str| found(&(variant("a", a) + &variant("b", b)));
        for (a, b) in [
            ("", "\"x.cols <= 64\""),
            ("\"x.cols <= 64\"", "\"x.cols < 64\", \"x.dtype == 'f32'\""),
            ("\"x.dtype != 'f32'\"", "\"x.dtype == 'bf16'\""),
            ("\"x.cols % 8 == 0\"", "\"tokens.max <= 4\", \"x.cols % 8 == 0\""),
        ] {
            let found = two(a, b);
            assert!(matches!(&found[..], [(name, false, _)] if name == "b"), "{a}; {b}: {found:?}");
        }
        for (a, b) in [
            ("\"x.cols <= 64\"", "\"x.cols <= 65\""),
            ("\"x.dtype == 'f32'\"", ""),
            ("\"x.cols % 8 == 0\"", "\"x.cols % 4 == 0\""),
            // What is never admitted stands before nothing.
            ("\"x.cols < 0\", \"x.cols > 0\"", ""),
        ] {
            assert!(two(a, b).iter().all(|(name, never, _)| name == "a" && *never), "{a}; {b}");
        }
    }

    /// None of ours is there for nothing.
    #[test]
    fn every_shipped_variant_may_be_chosen() {
        let library = Library::default();
        for name in Library::built_in() {
            let template = library.template(name).unwrap_or_else(|e| panic!("{e}"));
            let never: Vec<_> = unreached(&template).into_iter().filter(|u| u.never).collect();
            assert!(never.is_empty(), "{name}: {never:?}");
        }
    }
}
