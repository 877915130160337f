//! Definitions checked: what their texts name, the types of parts, tables.

use super::term::Names;
use super::{
    Element, EncodingDef, EncodingFault, FaultIn, MOST_PARTS, Part, Place, Stored, Table, Term,
};
use crate::expr::{Expr, ExprError, Value};

/// Parts of an expression once the names of others are replaced: more than any format has, and little enough
/// to be walked for each value.
const MOST_NODES: usize = 2048;

/// How deep they may stand within one another: each level is a frame of some kilobytes on the stack of whoever walks them for
/// many columns at once.
const MOST_DEPTH: usize = 64;

/// The constants and the named expressions of a definition.
pub(super) struct Texts {
    known: Vec<(String, Expr)>,
}

impl Texts {
    pub(super) fn new(def: &EncodingDef) -> Result<Texts, EncodingFault> {
        let mut texts = Texts { known: Vec::new() };
        if def.constants.len() > MOST_PARTS || def.lets.len() > MOST_PARTS {
            let message = format!("expected at most {MOST_PARTS} constants and named expressions");
            return Err(EncodingFault { of: FaultIn::Name, at: 0, message });
        }
        for (name, value) in &def.constants {
            let plain = match value {
                Value::Num(n) => n.is_finite(),
                Value::Str(_) => true,
                _ => false,
            };
            if !plain || !texts.is_free(name) {
                let message =
                    format!("`{name}`: expected a name of its own for a number or a text");
                return Err(EncodingFault { of: FaultIn::Name, at: 0, message });
            }
            texts.known.push((name.clone(), Expr::Lit(value.clone())));
        }
        for (i, (name, text)) in def.lets.iter().enumerate() {
            if !texts.is_free(name) || def.tables.iter().any(|(table, _)| table == name) {
                let message = format!("`{name}`: expected a name of its own");
                return Err(EncodingFault { of: FaultIn::Let(i), at: 0, message });
            }
            let e = texts.expr(FaultIn::Let(i), text)?;
            texts.known.push((name.clone(), e));
        }
        Ok(texts)
    }

    fn is_free(&self, name: &str) -> bool {
        is_own_name(name) && self.known.iter().all(|(known, _)| known != name)
    }

    /// An expression in which names stand for nothing but what is stored and where.
    pub(super) fn expr(&self, of: FaultIn, text: &str) -> Result<Expr, EncodingFault> {
        let fault = |at, message| EncodingFault { of, at, message };
        let e: Expr = text.parse().map_err(|e: ExprError| fault(e.at, e.message))?;
        // Counted before it is made: names within names would grow without bound.
        if self.nodes(&e) > MOST_NODES {
            let message = format!("expected at most {MOST_NODES} parts, once names are replaced");
            return Err(fault(0, message));
        }
        if self.depth(&e) > MOST_DEPTH {
            let message =
                format!("expected at most {MOST_DEPTH} levels of parts, once names are replaced");
            return Err(fault(0, message));
        }
        Ok(self.replaced(&e))
    }

    /// How deep parts stand within one another once names are replaced.
    fn depth(&self, e: &Expr) -> usize {
        if let Expr::Var(name) = e
            && let Some((_, e)) = self.known.iter().find(|(known, _)| known == name)
        {
            return depth(e);
        }
        1 + children(e).into_iter().map(|e| self.depth(e)).max().unwrap_or(0)
    }

    /// How many parts an expression has once names are replaced.
    fn nodes(&self, e: &Expr) -> usize {
        1 + match e {
            Expr::Var(name) => {
                let known = self.known.iter().find(|(known, _)| known == name);
                known.map_or(0, |(_, e)| nodes(e))
            }
            e => children(e).into_iter().map(|e| self.nodes(e)).sum(),
        }
    }

    fn replaced(&self, e: &Expr) -> Expr {
        e.substitute(&|name| Some(self.known.iter().find(|(known, _)| known == name)?.1.clone()))
    }

    /// What a name stands for, if it is a constant's and a text.
    fn text(&self, name: &str) -> Option<&str> {
        match &self.known.iter().find(|(known, _)| known == name)?.1 {
            Expr::Lit(Value::Str(text)) => Some(text),
            _ => None,
        }
    }
}

/// How many parts an expression has.
fn nodes(e: &Expr) -> usize {
    1 + children(e).into_iter().map(nodes).sum::<usize>()
}

/// How deep the parts of an expression stand within one another.
fn depth(e: &Expr) -> usize {
    1 + children(e).into_iter().map(depth).max().unwrap_or(0)
}

fn children(e: &Expr) -> Vec<&Expr> {
    match e {
        Expr::Lit(_) | Expr::Var(_) => Vec::new(),
        Expr::Unary(_, a) | Expr::Member(a, _) => vec![a],
        Expr::Binary(_, a, b) | Expr::Index(a, b) => vec![a, b],
        Expr::Cond(c, a, b) => vec![c, a, b],
        Expr::Call(_, args) => args.iter().collect(),
    }
}

/// The tables as decoding reads them: one of whole numbers is whole.
pub(super) fn tables(def: &EncodingDef) -> Vec<Table> {
    let whole =
        |x: &f64| x.fract() == 0.0 && x.abs() < 9e15 && !(*x == 0.0 && x.is_sign_negative());
    let table = |list: &Vec<f64>| {
        if list.iter().all(whole) {
            Table::Whole(list.iter().map(|x| *x as i64).collect())
        } else {
            Table::Floats(list.iter().map(|x| *x as f32).collect())
        }
    };
    def.tables.iter().map(|(_, list)| table(list)).collect()
}

/// Refuses tables that nothing could read, and numbers that f32 does not hold: NaN would make a definition
/// differ from itself.
pub(super) fn check_tables(tables: &[(String, Vec<f64>)]) -> Result<(), String> {
    if tables.len() > MOST_PARTS {
        return Err(format!("expected at most {MOST_PARTS} tables, found {}", tables.len()));
    }
    for (i, (name, list)) in tables.iter().enumerate() {
        if !is_own_name(name) || tables[..i].iter().any(|(other, _)| other == name) {
            return Err(format!("table `{name}`: expected a name of its own"));
        }
        if list.is_empty() {
            return Err(format!("table `{name}` is empty"));
        }
        if let Some(x) = list.iter().find(|x| !(**x as f32).is_finite()) {
            return Err(format!("table `{name}`: expected finite numbers of f32, found {x}"));
        }
    }
    Ok(())
}

/// Whether a part or a table may have this name.
fn is_own_name(name: &str) -> bool {
    let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    letters && !name.is_empty() && Place::ALL.iter().all(|(_, place)| *place != name)
}

/// The parts of a definition, and the bytes of a block.
pub(super) fn parts(def: &EncodingDef, texts: &Texts) -> Result<(Vec<Part>, u64), EncodingFault> {
    let (list, is_block, broadcast) = match &def.stored {
        Stored::Blocks { fields, .. } => (fields, true, &[][..]),
        Stored::Tensors { tensors, broadcast, .. } => (tensors, false, &broadcast[..]),
    };
    if let Some(name) = broadcast.iter().find(|name| list.iter().all(|(known, _)| known != *name)) {
        let message = format!("`broadcast`: there is no tensor `{name}`");
        return Err(EncodingFault { of: FaultIn::Name, at: 0, message });
    }
    let (mut parts, mut end) = (Vec::<Part>::new(), 0u64);
    if list.len() > MOST_PARTS {
        let message = format!("expected at most {MOST_PARTS} stored parts, found {}", list.len());
        return Err(EncodingFault { of: FaultIn::Name, at: 0, message });
    }
    for (i, (stored, ty)) in list.iter().enumerate() {
        let name = &spoken(stored).to_owned();
        let fault = |message: String| EncodingFault { of: FaultIn::Part(i), at: 0, message };
        let (element, dims) = part_type(ty, texts).map_err(fault)?;
        let constant = dims.iter().all(|d| matches!(d, Term::Int(n) if (1..1 << 20).contains(n)));
        if is_block && (dims.len() > 1 || !constant) {
            return Err(fault(format!(
                "expected a field such as `f16` or `u8 [32]`, found `{ty}`"
            )));
        }
        let taken = parts.iter().any(|p| p.name == *name)
            || texts.known.iter().any(|(known, _)| known == name)
            || def.tables.iter().any(|(table, _)| table == name);
        if taken || !is_own_name(name) {
            let message =
                format!("expected a name of its own, of letters, digits and `_`, found `{name}`");
            return Err(fault(message));
        }
        let count = if let [Term::Int(n)] = dims[..] { n as u64 } else { 1 };
        let broadcast = broadcast.contains(stored);
        let (name, stored) = (name.clone(), stored.clone());
        parts.push(Part { name, stored, element, dims, offset: end, broadcast });
        end += count * element.size();
    }
    let values = if let Stored::Blocks { values, .. } = def.stored { values } else { 1 };
    if parts.is_empty() || !(1..1 << 20).contains(&values) {
        let message = "expected at least one stored part, and blocks of at least one value";
        return Err(EncodingFault { of: FaultIn::Name, at: 0, message: message.to_owned() });
    }
    Ok((parts, if is_block { end } else { 0 }))
}

/// What expressions call a tensor: in `*_scales` the `*` stands for the weight's name.
fn spoken(stored: &str) -> &str {
    match stored {
        "*" => "weight",
        _ => stored.strip_prefix("*_").unwrap_or(stored),
    }
}

/// `f16`, or `f32 [ceil(N / 128), K]`.
fn part_type(text: &str, texts: &Texts) -> Result<(Element, Vec<Term>), String> {
    let (element, dims) = match text.split_once('[') {
        None => (text, None),
        Some((element, rest)) => match rest.trim_end().strip_suffix(']') {
            Some(dims) => (element, Some(dims)),
            None => return Err(format!("expected `]` at the end of `{text}`")),
        },
    };
    let element = element.trim();
    let element = texts.text(element).unwrap_or(element).parse()?;
    let names = Names { parts: &[], tables: &[] };
    let (mut list, mut depth, mut start) = (Vec::new(), 0, 0);
    let dims = dims.unwrap_or_default();
    for (i, c) in dims.char_indices().chain([(dims.len(), ',')]) {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 && !dims.is_empty() => {
                let text = dims[start..i].trim();
                let e: Expr = text.parse().map_err(|e: ExprError| format!("`{text}`: {e}"))?;
                let term = Term::compile(&texts.replaced(&e), &names)?;
                let over_sizes = !mentions(&term, Place::N) && !mentions(&term, Place::K);
                if !term.is_whole() || !over_sizes {
                    return Err(format!("expected a whole number over N and K, found `{text}`"));
                }
                list.push(term);
                start = i + 1;
            }
            _ => {}
        }
    }
    if list.len() > 4 {
        Err("expected at most 4 dimensions".to_owned())
    } else {
        Ok((element, list))
    }
}

pub(super) fn mentions(term: &Term, place: Place) -> bool {
    let all = |terms: &[Term]| terms.iter().any(|t| mentions(t, place));
    match term {
        Term::Place(found) => *found == place,
        Term::Int(_) | Term::Float(_) => false,
        Term::Widen(a) | Term::Neg(a) | Term::Not(a) | Term::Table { index: a, .. } => {
            mentions(a, place)
        }
        Term::Binary(_, a, b) | Term::Divide { a, b, .. } => {
            mentions(a, place) || mentions(b, place)
        }
        Term::Read { index, .. } => all(index),
        Term::Call(_, args) => all(args),
        Term::Select(parts) => all(&parts[..]),
    }
}
