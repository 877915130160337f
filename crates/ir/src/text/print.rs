//! IR to text.

use std::fmt::{self, Write};

use crate::graph::{Graph, Module, NodeKind, Param, ValueId};
use crate::verify::Finding;

/// The text of a module.
pub fn print(module: &Module) -> String {
    print_with_notes(module, &[])
}

/// The text of a module with each finding under the statement it is about. Findings are comment
/// lines, so the text still parses.
pub fn print_with_notes(module: &Module, findings: &[Finding]) -> String {
    let mut out = format!("module {}\n", module.name);
    for (i, graph) in module.graphs.iter().enumerate() {
        out.push('\n');
        let notes: Vec<&Finding> = findings.iter().filter(|f| f.graph == Some(i)).collect();
        // Writing to a `String` cannot fail.
        let _ = write_graph(&mut out, graph, &notes);
    }
    let _ = write_schedule(&mut out, module);
    for finding in findings.iter().filter(|f| f.graph.is_none()) {
        let _ = writeln!(out, "// error: {}", finding.message.replace('\n', " "));
    }
    out
}

/// The text of one graph.
pub fn print_graph(graph: &Graph) -> String {
    let mut out = String::new();
    let _ = write_graph(&mut out, graph, &[]);
    out
}

fn write_graph(out: &mut String, graph: &Graph, notes: &[&Finding]) -> fmt::Result {
    writeln!(out, "graph {} {{", graph.name)?;
    for index in 0..graph.len() {
        write_node(out, graph, index)?;
        for note in notes.iter().filter(|f| f.node == Some(index)) {
            writeln!(out, "  // ^ error: {}", note.message.replace('\n', " "))?;
        }
    }
    out.push_str("  return");
    for (i, &v) in graph.results().iter().enumerate() {
        write!(out, "{} %{}", if i > 0 { "," } else { "" }, value_name(graph, v))?;
    }
    out.push('\n');
    for note in notes.iter().filter(|f| f.node.is_none()) {
        writeln!(out, "  // ^ error: {}", note.message.replace('\n', " "))?;
    }
    out.push_str("}\n");
    Ok(())
}

fn comma(i: usize) -> &'static str {
    if i > 0 { ", " } else { "" }
}

/// The verifier also prints graphs in which a reference leads nowhere.
fn value_name(graph: &Graph, v: ValueId) -> &str {
    let node = (v.node < graph.len()).then(|| graph.node(v.node));
    node.and_then(|n| n.names.get(v.result)).map_or("?", String::as_str)
}

fn write_node(out: &mut String, graph: &Graph, index: usize) -> fmt::Result {
    let node = graph.node(index);
    out.push_str("  ");
    for (i, name) in node.names.iter().enumerate() {
        write!(out, "{}%{name}", comma(i))?;
    }
    out.push_str(" = ");
    match &node.kind {
        NodeKind::Param(Param::Step(input)) => write!(out, "step {}", input.name())?,
        NodeKind::Param(Param::Carry(i)) => write!(out, "carry {i}")?,
        NodeKind::Param(Param::Bank(name)) => write!(out, "bank {name:?}")?,
        NodeKind::Param(Param::State(plane)) => write!(out, "state {plane}")?,
        NodeKind::Param(Param::Shared { plane, layer }) => {
            write!(out, "state {plane} of layer {layer}")?;
        }
        NodeKind::Param(Param::Weight(w)) => {
            write!(out, "weight {:?}", w.name)?;
            if let Some(n) = w.stack {
                write!(out, " stack {n}")?;
            }
        }
        NodeKind::Op { op, attrs } => {
            write!(out, "{}(", op.name)?;
            for (i, operand) in graph.operands(index).into_iter().enumerate() {
                match operand {
                    Some(v) => write!(out, "{}%{}", comma(i), value_name(graph, v))?,
                    None => write!(out, "{}_", comma(i))?,
                }
            }
            out.push(')');
            if !attrs.is_empty() {
                out.push_str(" {");
                for (i, (def, attr)) in op.attrs.iter().zip(attrs).enumerate() {
                    write!(out, "{}{}: {attr}", comma(i), def.name)?;
                }
                out.push('}');
            }
        }
    }
    out.push_str(" : ");
    for (i, ty) in node.types.iter().enumerate() {
        write!(out, "{}{ty}", comma(i))?;
    }
    if let Some(loc) = &node.loc {
        let plain = !loc.file.is_empty()
            && !loc.file.starts_with(['"', ' '])
            && !loc.file.contains(|c: char| c.is_control() || (c.is_whitespace() && c != ' '));
        if plain {
            write!(out, " @ {loc}")?;
        } else {
            write!(out, " @ {:?}:{}:{}", loc.file, loc.line, loc.col)?;
        }
    }
    out.push('\n');
    Ok(())
}

/// Consecutive layers of one kind print as a range.
fn write_schedule(out: &mut String, module: &Module) -> fmt::Result {
    out.push_str("\nschedule");
    let mut i = 0;
    while i < module.schedule.len() {
        let site = module.schedule[i];
        // The verifier prints modules whose schedule is wrong.
        let name = module.graphs.get(site.graph).map_or("?", |g| &g.name);
        write!(out, "{} {name}", if i > 0 { "," } else { "" })?;
        let mut end = i + 1;
        if let Some(first) = site.layer {
            let follows = |k: usize| {
                module.schedule.get(k).is_some_and(|s| {
                    s.graph == site.graph
                        && s.layer
                            .is_some_and(|l| u64::from(l) == u64::from(first) + (k - i) as u64)
                })
            };
            while follows(end) {
                end += 1;
            }
            write!(out, " {first}..{}", u64::from(first) + (end - i) as u64)?;
        }
        i = end;
    }
    out.push('\n');
    Ok(())
}
