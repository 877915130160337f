//! `greedy`: ids of tokens instead of logits.

use infernum_ir::{Graph, Module, Op, Type};

use crate::Pass;

pub(crate) const PASS: Pass = Pass {
    name: "greedy",
    doc: "makes the model yield, for each row, the index of its largest logit instead of logits",
    run: |module, _| greedy(module),
};

/// The last graph of the schedule yields the logits, as its first result.
fn greedy(module: &Module) -> Result<Module, String> {
    let head = module.schedule.last().ok_or("the schedule is empty: there are no logits")?.graph;
    let mut module = module.clone();
    let calls = module.schedule.iter().filter(|s| s.graph == head).count();
    let graph = &mut module.graphs[head];
    if calls > 1 {
        return Err(format!("graph `{}` is called {calls} times: it is not a head", graph.name));
    }
    append(graph).map_err(|e| format!("graph `{}`: {e}", graph.name))?;
    Ok(module)
}

fn append(graph: &mut Graph) -> Result<(), String> {
    let mut results = graph.results().to_vec();
    let logits = results.first_mut().ok_or("it yields nothing")?;
    if let Type::State(_) = graph.ty(*logits) {
        return Err("expected logits as its first result, found a state".to_owned());
    }
    let names: Vec<&String> = graph.nodes().flat_map(|(_, n)| &n.names).collect();
    let free = |name: &String| !names.contains(&name);
    let mut candidates = (1..).map(|i| if i == 1 { "ids".to_owned() } else { format!("ids.{i}") });
    let name = candidates.find(free).unwrap_or_default();
    let ids = graph.call(vec![name], Op::find("argmax")?, &[Some(*logits)], vec![], None)?;
    *logits = *ids.first().ok_or("argmax yields nothing")?;
    graph.set_results(results);
    Ok(())
}
