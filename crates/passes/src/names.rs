//! Names of values.

use infernum_ir::Graph;

/// A name that no value has.
pub(crate) fn free(graph: &Graph, name: &str) -> String {
    let taken = |name: &String| graph.nodes().any(|(_, node)| node.names.contains(name));
    let mut candidates =
        (1..).map(|i| if i == 1 { name.to_owned() } else { format!("{name}.{i}") });
    candidates.find(|name| !taken(name)).unwrap_or_default()
}
