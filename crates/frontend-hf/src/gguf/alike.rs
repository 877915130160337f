//! Whether two modules mean the same, however they came about.

use infernum_ir::expr::ScalarFn;
use infernum_ir::{Attr, Graph, Module, Node, NodeKind};

use super::solve::{close, same};

/// Tables that differ: what is wanted, and what is there.
pub(super) type Tables = Vec<(Vec<f64>, Vec<f64>)>;

/// Compares two modules whose weights are called alike; the first difference, but for tables, is an error.
pub(super) fn compare(wanted: &Module, found: &Module) -> Result<Tables, String> {
    let (a, b) = (&wanted.schedule, &found.schedule);
    if a.len() != b.len() {
        return Err(format!("there are {} parts in place of {}", b.len(), a.len()));
    }
    let (mut tables, mut seen) = (Vec::new(), std::collections::HashSet::new());
    for (a, b) in a.iter().zip(b) {
        if a.layer != b.layer {
            return Err("layers are numbered otherwise".to_owned());
        }
        if seen.insert((a.graph, b.graph)) {
            graphs(&wanted.graphs[a.graph], &found.graphs[b.graph], &mut tables)?;
        }
    }
    Ok(tables)
}

fn graphs(wanted: &Graph, found: &Graph, tables: &mut Tables) -> Result<(), String> {
    for ((i, a), (_, b)) in wanted.nodes().zip(found.nodes()) {
        if let (Some(a), Some(b)) = (table(a), table(b)) {
            if a.len() != b.len() || a.iter().zip(&b).any(|(a, b)| !close(*a, *b)) {
                tables.push((a, b));
            }
            continue;
        }
        if !kinds(&a.kind, &b.kind) || a.types != b.types || wanted.operands(i) != found.operands(i)
        {
            let place = a.loc.as_ref().map_or(String::new(), |loc| format!(" at {loc}"));
            return Err(format!(
                "`{}` of `{}`{place} would be read as `{}`, or with other values",
                a.names.join(", "),
                wanted.name,
                b.names.join(", ")
            ));
        }
    }
    if wanted.len() != found.len() {
        let (a, b) = (wanted.len(), found.len());
        return Err(format!("`{}` would be read with {b} operations in place of {a}", wanted.name));
    }
    Ok(())
}

fn kinds(a: &NodeKind, b: &NodeKind) -> bool {
    match (a, b) {
        (NodeKind::Op { op: a, attrs: x }, NodeKind::Op { op: b, attrs: y }) => {
            a == b && x.len() == y.len() && x.iter().zip(y).all(|(a, b)| attributes(a, b))
        }
        (a, b) => a == b,
    }
}

fn attributes(a: &Attr, b: &Attr) -> bool {
    match (a, b) {
        (Attr::Float(a), Attr::Float(b)) => close(*a, *b),
        (Attr::Expr(a), Attr::Expr(b)) => same(a, b),
        (a, b) => a == b,
    }
}

/// The elements of a table, of a node that is one.
fn table(node: &Node) -> Option<Vec<f64>> {
    let NodeKind::Op { op, attrs } = &node.kind else { return None };
    let [Attr::Expr(expr), Attr::Int(len)] = &attrs[..] else { return None };
    let f = ScalarFn::compile(expr, &["i"]).ok().filter(|_| op.name == "table")?;
    Some((0..*len).map(|i| f.eval(&[i as f64])).collect())
}
