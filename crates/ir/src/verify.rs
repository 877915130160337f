//! The verifier: re-infers every type and checks what the types cannot say.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::graph::{Graph, Module, NodeKind, Param, ValueId};
use crate::ops::Effect;
use crate::text::print_with_notes;
use crate::{TensorType, Type};

/// One thing wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The graph it is in; `None` for the schedule.
    pub graph: Option<usize>,
    /// The node it is about; `None` for the graph's results.
    pub node: Option<usize>,
    /// What was expected and found.
    pub message: String,
}

/// Everything the verifier found, with the dump to show it in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyError {
    /// Never empty.
    pub findings: Vec<Finding>,
    dump: String,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the graph is not well formed ({} finding(s)):", self.findings.len())?;
        f.write_str(&self.dump)
    }
}

impl std::error::Error for VerifyError {}

/// Checks a module. All findings are reported together, each under its statement in the dump.
pub fn verify(module: &Module) -> Result<(), VerifyError> {
    let mut findings = Vec::new();
    for (i, graph) in module.graphs.iter().enumerate() {
        let mut at = |node, message| findings.push(Finding { graph: Some(i), node, message });
        check_names(graph, &mut at);
        check_types(graph, &mut at);
        check_states(graph, &mut at);
    }
    check_schedule(module, &mut findings);
    if findings.is_empty() {
        return Ok(());
    }
    let dump = print_with_notes(module, &findings);
    Err(VerifyError { findings, dump })
}

type Report<'a> = &'a mut dyn FnMut(Option<usize>, String);

fn check_names(graph: &Graph, report: Report<'_>) {
    let mut seen = HashSet::new();
    for (i, node) in graph.nodes() {
        for name in &node.names {
            if !seen.insert(name.as_str()) {
                report(Some(i), format!("`%{name}` is defined twice"));
            }
        }
    }
}

fn check_types(graph: &Graph, report: Report<'_>) {
    for (i, node) in graph.nodes() {
        match &node.kind {
            NodeKind::Param(param) => check_param(i, param, &node.types[0], report),
            NodeKind::Op { op, attrs } => {
                let operands = graph.operands(i);
                if operands.iter().flatten().any(|v| v.node >= i) {
                    report(Some(i), "an operand is defined after it is used".to_owned());
                    continue;
                }
                let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
                match op.infer(&types, attrs) {
                    Err(message) => report(Some(i), message),
                    Ok(inferred) if inferred != node.types => {
                        let join = |t: &[Type]| {
                            t.iter().map(Type::to_string).collect::<Vec<_>>().join(", ")
                        };
                        let (want, found) = (join(&inferred), join(&node.types));
                        report(Some(i), format!("expected type {want}, found {found}"));
                    }
                    Ok(_) => {}
                }
            }
        }
    }
}

fn check_param(i: usize, param: &Param, ty: &Type, report: Report<'_>) {
    let tensor = |constant: bool| matches!(ty, Type::Tensor(t) if t.constant == constant);
    let ok = match param {
        Param::Weight(_) => tensor(true),
        Param::Step(_) | Param::Carry(_) => tensor(false),
        Param::State(_) => matches!(ty, Type::State(_)),
    };
    if !ok {
        report(Some(i), format!("{ty} is not a type for this parameter"));
    }
}

/// A state is threaded: each version has at most one writer, reads come from versions in the
/// chain, and the last version of every plane is a result.
fn check_states(graph: &Graph, report: Report<'_>) {
    let mut roots: HashMap<ValueId, usize> = HashMap::new();
    let mut planes: HashMap<&str, usize> = HashMap::new();
    for (i, node) in graph.nodes() {
        let id = ValueId { node: i, result: 0 };
        match &node.kind {
            NodeKind::Param(Param::State(plane)) => {
                roots.insert(id, i);
                if planes.insert(plane, i).is_some() {
                    report(Some(i), format!("plane `{plane}` is a parameter twice"));
                }
            }
            NodeKind::Op { op, .. } if op.effect == Effect::Writes => {
                let from = graph.operands(i).first().copied().flatten();
                if let Some(root) = from.and_then(|v| roots.get(&v)).copied() {
                    roots.insert(id, root);
                }
            }
            _ => {}
        }
    }
    let writers = |v: ValueId| {
        let is_writer = |n: &usize| matches!(&graph.node(*n).kind, NodeKind::Op { op, .. } if op.effect == Effect::Writes);
        graph.users(v).map(|(n, _)| n).filter(is_writer).count()
    };
    for (&v, &root) in &roots {
        let (count, returned) = (writers(v), graph.results().contains(&v));
        let name = graph.value_name(v);
        if count > 1 {
            report(Some(v.node), format!("state version `%{name}` has {count} writers"));
        }
        if count == 0 && !returned {
            let plane = graph.value_name(ValueId { node: root, result: 0 });
            report(Some(v.node), format!("the last version of `%{plane}` is not returned"));
        }
        if count > 0 && returned {
            report(Some(v.node), format!("`%{name}` is returned but is not the last version"));
        }
    }
}

/// Every call must find in the carried values what its graph declares.
fn check_schedule(module: &Module, findings: &mut Vec<Finding>) {
    let mut carried: Vec<&TensorType> = Vec::new();
    let mut from = "the start";
    for site in &module.schedule {
        let Some(graph) = module.graphs.get(site.graph) else {
            let message = format!("the schedule calls graph {}, which does not exist", site.graph);
            findings.push(Finding { graph: None, node: None, message });
            return;
        };
        for (value, param, ty) in graph.params() {
            let Param::Carry(i) = param else { continue };
            let given = carried.get(*i as usize);
            if ty.tensor().ok() != given.copied() {
                let given = given.map_or_else(|| "nothing".to_owned(), ToString::to_string);
                let message = format!("expected {ty} from `{from}`, which carries {given}");
                let finding = Finding { graph: Some(site.graph), node: Some(value.node), message };
                if !findings.contains(&finding) {
                    findings.push(finding);
                }
            }
        }
        carried = graph.results().iter().filter_map(|&v| graph.ty(v).tensor().ok()).collect();
        from = &graph.name;
    }
}
