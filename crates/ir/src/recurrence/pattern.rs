//! Recurrences with names for numbers, as patterns of those that have numbers there.

use super::{Named, Recurrence};
use crate::expr::{Expr, Value};

impl Recurrence {
    /// What the names of no value ([`free`](Recurrence::free)) stand for in `found`, where that is this recurrence: the same
    /// statements in the same order, whatever its axes and values are called, with a number wherever such a name stands.
    pub fn matches(&self, found: &Recurrence) -> Option<Vec<(String, f64)>> {
        let mut matching = Matching { values: Vec::new(), numbers: Vec::new() };
        let pairs = self.inputs.iter().zip(&found.inputs);
        let same = self.axes.len() == found.axes.len()
            && self.inputs.len() == found.inputs.len()
            && self.body.len() == found.body.len()
            && matching.name(&self.state, &found.state)
            && pairs.into_iter().all(|(a, b)| matching.named(a, b))
            && self.body.iter().zip(&found.body).all(|(a, b)| {
                a.sum == b.sum
                    && self.is_same(&mut matching, &a.value, &b.value)
                    && matching.named(&a.to, &b.to)
            })
            && matching.named(&self.result, &found.result);
        same.then_some(matching.numbers)
    }

    fn is_same(&self, matching: &mut Matching, want: &Expr, found: &Expr) -> bool {
        let mut both = |a: &Expr, b: &Expr| self.is_same(matching, a, b);
        match (want, found) {
            (Expr::Var(name), Expr::Lit(Value::Num(n))) => {
                self.named(name).is_none() && matching.number(name, *n)
            }
            (Expr::Var(a), Expr::Var(b)) => self.named(a).is_some() && matching.name(a, b),
            (Expr::Lit(a), Expr::Lit(b)) => a == b,
            (Expr::Unary(f, a), Expr::Unary(g, b)) => f == g && both(a, b),
            (Expr::Binary(f, a, c), Expr::Binary(g, b, d)) => f == g && both(a, b) && both(c, d),
            (Expr::Cond(c, a, b), Expr::Cond(d, e, f)) => both(c, d) && both(a, e) && both(b, f),
            (Expr::Call(f, a), Expr::Call(g, b)) => {
                f == g && a.len() == b.len() && a.iter().zip(b).all(|(a, b)| both(a, b))
            }
            _ => false,
        }
    }
}

/// What names of a pattern stand for.
struct Matching {
    values: Vec<(String, String)>,
    numbers: Vec<(String, f64)>,
}

impl Matching {
    /// Whether a value's name may stand for another's: each for one, and none for two.
    fn name(&mut self, want: &str, found: &str) -> bool {
        if let Some((a, b)) = self.values.iter().find(|(a, b)| a == want || b == found) {
            return a == want && b == found;
        }
        self.values.push((want.to_owned(), found.to_owned()));
        true
    }

    fn named(&mut self, want: &Named, found: &Named) -> bool {
        want.axes == found.axes && self.name(&want.name, &found.name)
    }

    fn number(&mut self, name: &str, found: f64) -> bool {
        if let Some((_, known)) = self.numbers.iter().find(|(n, _)| n == name) {
            return *known == found;
        }
        self.numbers.push((name.to_owned(), found));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: &str = "s[h, k], x[h, k], rate[h] -> y[h]: kept[h, k] = s * rate * by; s[h, k] = kept + x; read[h] = sum(s * x); \
                           y[h] = read * by";

    fn matches(found: &str) -> Option<Vec<(String, f64)>> {
        let read = |text: &str| text.parse::<Recurrence>().expect("a recurrence");
        read(PATTERN).matches(&read(found))
    }

    #[test]
    fn names_of_axes_and_values_do_not_matter() {
        let other = "m[a, b], in[a, b], f[a] -> out[a]: t[a, b] = m * f * 0.5; m[a, b] = t + in; sums[a] = sum(m * in); out[a] = sums * 0.5";
        assert_eq!(matches(other), Some(vec![("by".to_owned(), 0.5)]));
    }

    #[test]
    fn what_differs_is_refused() {
        let of = |from: &str, to: &str| {
            let given = PATTERN.replace("by", "2");
            assert!(given.contains(from), "{from}");
            matches(&given.replace(from, to))
        };
        assert!(of("s[h", "s[h").is_some());
        // Another number where the name is the same, and none at all.
        assert_eq!(of("read * 2", "read * 3"), None);
        assert_eq!(of("read * 2", "read * rate"), None);
        // Other operands, another order, another operation, other axes, no sum.
        assert_eq!(of("kept + x", "kept + rate"), None);
        assert_eq!(of("kept + x", "x + kept"), None);
        assert_eq!(of("kept + x", "kept - x"), None);
        assert_eq!(of("rate[h]", "rate[h, k]"), None);
        assert_eq!(matches(&PATTERN.replace("by", "2").replace("sum(s * x)", "rate * 2")), None);
        // One name for two of the pattern's.
        assert_eq!(of("sum(s * x)", "sum(s * s)"), None);
    }
}
