//! The verifier: re-infers every type and checks what the types cannot say.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::graph::{Graph, Module, Node, NodeKind, Param, StepInput, ValueId, WeightRef};
use crate::indices::{RowPick, row_picks};
use crate::names::is_name;
use crate::ops::Effect;
use crate::text::print_with_notes;
use crate::windows::{Window, windows};
use crate::{Dim, StateKind, Sym, TensorType, Type};

/// Findings reported; the rest would bury them, and what a file can make us print is bounded.
const MAX_FINDINGS: usize = 256;

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
        let (n, more) = (self.findings.len(), self.findings.len() >= MAX_FINDINGS);
        let more = if more { ", and maybe more" } else { "" };
        writeln!(f, "the module is not well formed ({n} finding(s){more}):")?;
        f.write_str(&self.dump)
    }
}

impl std::error::Error for VerifyError {}

/// Checks a module. All findings are reported together, each under its statement in the dump.
pub fn verify(module: &Module) -> Result<(), VerifyError> {
    let (mut findings, mut sound) = (Vec::new(), true);
    for (i, graph) in module.graphs.iter().enumerate() {
        let mut at = |node, message| {
            if findings.len() < MAX_FINDINGS {
                findings.push(Finding { graph: Some(i), node, message });
            }
        };
        check_names(graph, &mut at);
        // What follows looks values up, so every reference must be to a value that is there.
        if check_references(graph, &mut at) {
            check_types(graph, &mut at);
            check_states(graph, &mut at);
            check_banks(graph, &mut at);
            check_shared(graph, &mut at);
            check_rings(graph, &mut at);
        } else {
            sound = false;
        }
    }
    if !is_name(&module.name) {
        let message = format!("module {:?} is not named with {NAME}", module.name);
        findings.push(Finding { graph: None, node: None, message });
    }
    if sound {
        check_schedule(module, &mut findings);
    }
    if findings.is_empty() {
        check_picks(module, &mut findings);
    }
    if findings.is_empty() {
        return Ok(());
    }
    let dump = print_with_notes(module, &findings);
    Err(VerifyError { findings, dump })
}

const NAME: &str = "letters, digits, `_`, `.` and `-` (at most 256 bytes)";

type Report<'a> = &'a mut dyn FnMut(Option<usize>, String);

fn check_names(graph: &Graph, report: Report<'_>) {
    let mut seen = HashSet::new();
    if !is_name(&graph.name) {
        report(None, format!("graph {:?} is not named with {NAME}", graph.name));
    }
    for (i, node) in graph.nodes() {
        for name in &node.names {
            if !is_name(name) {
                report(Some(i), format!("value {name:?} is not named with {NAME}"));
            }
            if !seen.insert(name.as_str()) {
                report(Some(i), format!("`%{name}` is defined twice"));
            }
        }
    }
}

/// Whether each node has as many names as types, and every operand and result is a value defined
/// before it is used.
fn check_references(graph: &Graph, report: Report<'_>) -> bool {
    let mut sound = true;
    let mut refuse = |node, message| {
        report(node, message);
        sound = false;
    };
    let exists = |v: ValueId| v.node < graph.len() && v.result < graph.node(v.node).names.len();
    for (i, node) in graph.nodes() {
        let (names, types) = (node.names.len(), node.types.len());
        let one = matches!(node.kind, NodeKind::Op { .. }) || names == 1;
        if names != types || names == 0 || !one {
            refuse(Some(i), format!("expected one name and one type, found {names} and {types}"));
        }
        if graph.operands(i).iter().flatten().any(|&v| v.node >= i || !exists(v)) {
            refuse(Some(i), "an operand is not a value defined before this one".to_owned());
        }
    }
    if !graph.results().iter().all(|&v| exists(v)) {
        refuse(None, "a result is not a value of this graph".to_owned());
    }
    sound
}

/// Whatever picks rows must pick them from what has them.
fn check_picks(module: &Module, findings: &mut Vec<Finding>) {
    for found in row_picks(module) {
        let RowPick { graph, node, .. } = found;
        let message = match found.fault() {
            Some(message) if findings.len() < MAX_FINDINGS => message,
            _ => continue,
        };
        let finding = Finding { graph: Some(graph), node: Some(node), message };
        if !findings.contains(&finding) {
            findings.push(finding);
        }
    }
}

fn check_types(graph: &Graph, report: Report<'_>) {
    for (i, node) in graph.nodes() {
        for ty in node.types.iter().filter(|ty| is_empty(ty)) {
            report(Some(i), format!("expected dimensions of at least 1, found {ty}"));
        }
        for ty in &node.types {
            let fault = match ty {
                Type::Tensor(tensor) => tensor.encoding_fault(),
                Type::State(state) => state.encoding_fault(),
            };
            if let Some(fault) = fault {
                report(Some(i), format!("{fault}; found {ty}"));
            }
        }
        let NodeKind::Op { op, attrs } = &node.kind else {
            check_param(i, node, report);
            continue;
        };
        let operands = graph.operands(i);
        let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
        match op.infer(&types, attrs) {
            Err(message) => report(Some(i), message),
            Ok(inferred) if inferred != node.types => {
                let join =
                    |t: &[Type]| t.iter().map(Type::to_string).collect::<Vec<_>>().join(", ");
                let (want, found) = (join(&inferred), join(&node.types));
                report(Some(i), format!("expected type {want}, found {found}"));
            }
            Ok(_) => {}
        }
    }
}

/// Whether no value of the type has an element, whatever the step.
fn is_empty(ty: &Type) -> bool {
    match ty {
        Type::Tensor(t) => t.shape.contains(&Dim::Const(0)),
        Type::State(s) => s.elements() == 0 || s.kind == StateKind::Ring(0),
    }
}

fn check_param(i: usize, node: &Node, report: Report<'_>) {
    let (NodeKind::Param(param), ty) = (&node.kind, &node.types[0]) else { return };
    let expected = match (param, ty) {
        (Param::Step(input), ty) => step_type(*input, ty),
        (Param::Carry(_), Type::Tensor(t)) if !t.constant => None,
        (Param::Carry(_), _) => Some("a tensor that is not const".to_owned()),
        (Param::Weight(w), Type::Tensor(t)) => weight_type(w, t),
        (Param::Bank(_), Type::Tensor(t)) => bank_type(t),
        (Param::Weight(_) | Param::Bank(_), Type::State(_)) => Some("a const tensor".to_owned()),
        (Param::State(plane) | Param::Shared { plane, .. }, Type::State(_)) => {
            (!is_name(plane)).then(|| format!("a plane named with {NAME}"))
        }
        (Param::State(_) | Param::Shared { .. }, Type::Tensor(_)) => Some("a state".to_owned()),
    };
    if let Some(expected) = expected {
        report(Some(i), format!("expected {expected}, found {ty}"));
    }
}

/// What a step input should have been, if it is not that.
fn step_type(input: StepInput, found: &Type) -> Option<String> {
    let mut allowed: Vec<Type> = [Sym::B, Sym::T].map(|rows| input.ty(rows).into()).to_vec();
    allowed.dedup();
    let names: Vec<String> = allowed.iter().map(Type::to_string).collect();
    (!allowed.contains(found)).then(|| names.join(" or "))
}

/// What a weight should have been, if it is not that.
fn weight_type(weight: &WeightRef, found: &TensorType) -> Option<String> {
    if !found.constant || found.shape.iter().any(|d| d.as_const().is_none()) {
        return Some("a const tensor of constant dimensions".to_owned());
    }
    if weight.stack.is_some() != weight.name.contains("{expert}") {
        return Some("`stack` with a name that holds {expert}, and only then".to_owned());
    }
    weight
        .stack
        .filter(|&n| found.shape.first() != Some(&Dim::Const(n)))
        .map(|n| format!("a first axis of {n}"))
}

/// What a bank should have been, if it is not that.
fn bank_type(found: &TensorType) -> Option<String> {
    let sized = found.shape.iter().all(|d| d.as_const().is_some());
    let fits = found.constant && found.encoding.is_none() && found.rank() == 3 && sized;
    (!fits).then(|| "a const tensor of three constant dimensions, not encoded".to_owned())
}

/// What is computed from constants alone is computed once, but banks change.
fn check_banks(graph: &Graph, report: Report<'_>) {
    let banks = graph.params().filter(|(_, param, _)| matches!(param, Param::Bank(_)));
    for (value, ..) in banks {
        let fixed =
            |n: &usize| matches!(graph.node(*n).types.first(), Some(Type::Tensor(t)) if t.constant);
        if let Some(user) = graph.users(value).map(|(n, _)| n).find(fixed) {
            let name = graph.value_name(value);
            report(
                Some(user),
                format!("computes a constant of the bank `%{name}`, which changes between steps"),
            );
        }
    }
}

/// A state is threaded: each version has at most one writer, reads come from versions in the
/// chain, and the last version of every plane is a result.
fn check_states(graph: &Graph, report: Report<'_>) {
    let mut roots: BTreeMap<ValueId, usize> = BTreeMap::new();
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
            _ => {
                for result in 0..node.types.len() {
                    let version = ValueId { node: i, result };
                    let from = graph.state_source(version);
                    if let Some(root) = from.and_then(|v| roots.get(&v)).copied() {
                        roots.insert(version, root);
                    }
                }
            }
        }
    }
    let results: HashSet<ValueId> = graph.results().iter().copied().collect();
    let writers = |v: ValueId| {
        let is_writer = |n: &usize| matches!(&graph.node(*n).kind, NodeKind::Op { op, .. } if op.effect == Effect::Writes);
        graph.users(v).map(|(n, _)| n).filter(is_writer).count()
    };
    for (&v, &root) in &roots {
        let (count, returned) = (writers(v), results.contains(&v));
        let name = graph.value_name(v);
        if count > 1 {
            report(Some(v.node), format!("state version `%{name}` has {count} writers"));
        }
        // What a slot was before is its own writer's business alone.
        if v.node == root {
            for reader in readers(graph, v) {
                report(
                    Some(reader),
                    format!(
                        "reads `%{name}` before this step's rows are in it: expected a version that \
                         was written"
                    ),
                );
            }
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

/// A plane of another layer is read and nothing else, and no op works on planes of two layers: these may have block
/// tables of their own.
fn check_shared(graph: &Graph, report: Report<'_>) {
    let mut layers: HashMap<ValueId, Option<u32>> = HashMap::new();
    let mut seen = HashSet::new();
    for (i, node) in graph.nodes() {
        if let NodeKind::Param(param) = &node.kind {
            let Some((layer, plane)) = param.plane() else { continue };
            let value = ValueId { node: i, result: 0 };
            layers.insert(value, layer);
            if layer.is_some() && !seen.insert((layer, plane)) {
                report(Some(i), format!("plane `{plane}` of that layer is a parameter twice"));
            }
            if layer.is_some() && graph.results().contains(&value) {
                report(
                    Some(i),
                    "is another layer's, and returned: only its own layer does".to_owned(),
                );
            }
            continue;
        }
        for result in 0..node.types.len() {
            let version = ValueId { node: i, result };
            let Some(from) = graph.state_source(version) else { continue };
            let layer = layers.get(&from).copied().flatten();
            layers.insert(version, layer);
            if layer.is_some() {
                let name = graph.value_name(from);
                report(
                    Some(i),
                    format!("writes `%{name}`, which is another layer's: it is only read here"),
                );
            }
        }
        let of = |v: ValueId| layers.get(&v).copied();
        let mut owners = graph.operands(i).into_iter().flatten().filter_map(of);
        if let Some(first) = owners.next()
            && owners.any(|other| other != first)
        {
            report(Some(i), "works on planes of two layers: expected those of one".to_owned());
        }
    }
}

/// Nothing looks further back than the rows that a ring keeps.
fn check_rings(graph: &Graph, report: Report<'_>) {
    let kept = |v: ValueId| match graph.ty(v) {
        Type::State(state) => state.kind,
        Type::Tensor(_) => StateKind::Paged,
    };
    if graph.params().all(|(v, ..)| kept(v) == StateKind::Paged) {
        return;
    }
    // States of a fixed size have blocks of their own.
    let has_rows = |ty: &Type| ty.state().is_ok_and(|s| !s.is_slot());
    let mut planes = graph.params().filter(|(.., ty)| has_rows(ty));
    if let Some((first, ..)) = planes.next()
        && let Some((other, ..)) = planes.find(|(v, ..)| kept(*v) != kept(first))
    {
        // They are written and read together, through one table of blocks.
        let message = "keeps its rows longer or shorter than the graph's other planes";
        report(Some(other.node), message.to_owned());
    }
    for (plane, window) in windows(graph) {
        let StateKind::Ring(rows) = kept(plane) else { continue };
        let found = match window {
            Window::Rows(seen) if seen <= rows => continue,
            Window::Rows(seen) => format!("{seen} rows back"),
            Window::All => "every row".to_owned(),
        };
        let name = graph.value_name(plane);
        report(Some(plane.node), format!("`%{name}` keeps {rows} rows, and tokens see {found}"));
    }
}

/// The ops that read a version of a state; not those that make the next version of it.
fn readers(graph: &Graph, version: ValueId) -> Vec<usize> {
    let writes = |node: usize| {
        let results = 0..graph.node(node).types.len();
        results
            .map(|result| ValueId { node, result })
            .any(|v| graph.state_source(v) == Some(version))
    };
    let is_op = |node: usize| matches!(graph.node(node).kind, NodeKind::Op { .. });
    graph.users(version).map(|(node, _)| node).filter(|&n| is_op(n) && !writes(n)).collect()
}

/// The type of a plane that a call before the `at`th writes.
fn written_before<'m>(module: &'m Module, at: usize, of: (u32, &str)) -> Option<&'m Type> {
    let (layer, plane) = of;
    let mut before = module.schedule[..at].iter().filter(|site| site.layer == Some(layer));
    before.find_map(|site| {
        let graph = module.graphs.get(site.graph)?;
        let is_it = |param: &Param| matches!(param, Param::State(name) if name == plane);
        let (value, _, ty) = graph.params().find(|(_, param, _)| is_it(param))?;
        // A plane that is only passed on has no rows of this step.
        (!graph.results().contains(&value)).then_some(ty)
    })
}

/// Every call must find in the carried values what its graph declares, and a layer's weights and
/// cache only where there is a layer.
fn check_schedule(module: &Module, findings: &mut Vec<Finding>) {
    let mut carried: Vec<&TensorType> = Vec::new();
    let mut from = "the start";
    for (at, site) in module.schedule.iter().enumerate() {
        let Some(graph) = module.graphs.get(site.graph) else {
            let message = format!("the schedule calls graph {}, which does not exist", site.graph);
            findings.push(Finding { graph: None, node: None, message });
            return;
        };
        for (value, param, ty) in graph.params() {
            let message = match param {
                Param::Carry(i) => {
                    let given = carried.get(*i as usize);
                    if ty.tensor().ok() == given.copied() {
                        continue;
                    }
                    let given = given.map_or_else(|| "nothing".to_owned(), ToString::to_string);
                    format!("expected {ty} from `{from}`, which carries {given}")
                }
                Param::State(_) if site.layer.is_none() => {
                    "a KV-cache plane belongs to a layer, found a call without one".to_owned()
                }
                Param::Shared { plane, layer } => {
                    match written_before(module, at, (*layer, plane)) {
                        Some(found) if found == ty => continue,
                        Some(found) => {
                            format!("expected {found} of `{plane}` of layer {layer}, found {ty}")
                        }
                        None => format!(
                            "no call before one of it writes a plane `{plane}` of layer {layer}"
                        ),
                    }
                }
                Param::Weight(WeightRef { name, .. }) | Param::Bank(name)
                    if site.layer.is_none() && name.contains("{layer}") =>
                {
                    "the name has {layer}, found a call without one".to_owned()
                }
                _ => continue,
            };
            let finding = Finding { graph: Some(site.graph), node: Some(value.node), message };
            if findings.len() >= MAX_FINDINGS {
                return;
            }
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
        carried = graph.results().iter().filter_map(|&v| graph.ty(v).tensor().ok()).collect();
        from = &graph.name;
    }
}
