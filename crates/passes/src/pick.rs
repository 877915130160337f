//! How a model's steps pick tokens: `pick` appends the op, `greedy` is what becomes of it where every row's
//! token is the likeliest.

use infernum_ir::{AttrDef, Graph, Module, Op, Param, StepInput, Sym, Type, ValueId};

use crate::Pass;
use crate::names::free;

pub(crate) const GREEDY: Pass = Pass {
    name: "greedy",
    doc: "makes the model yield, for each row, the index of its largest logit instead of logits",
    run: |module, _| greedy(module),
};

/// Ends the name of the graph that steps call in place of the head where all they want is the likeliest
/// token of each row.
const BESIDE: &str = ".greedy";

/// Has steps pick tokens: the head yields, before what else it yields, the results of the op `pick` on its
/// logits. Beside it there is a head that yields the likeliest tokens alone, which the schedule does not
/// call: see [`greedy_steps`].
pub fn pick(module: &Module) -> Result<Module, String> {
    let (mut module, head) = (module.clone(), head(module)?);
    let mut beside = likeliest(&module.graphs[head])?;
    beside.name += BESIDE;
    append(&mut module.graphs[head])?;
    module.graphs.push(beside);
    Ok(module)
}

/// The module as those steps run it in which every row's token is the likeliest and nothing else is wanted;
/// `None` if it has nothing of its own for them.
pub fn greedy_steps(module: &Module) -> Option<Module> {
    let head = head(module).ok()?;
    let beside = module.graphs.iter().position(|g| is_beside(g, &module.graphs[head]))?;
    let mut module = module.clone();
    module.schedule.last_mut()?.graph = beside;
    Some(module)
}

fn is_beside(graph: &Graph, head: &Graph) -> bool {
    graph.name.strip_suffix(BESIDE) == Some(&head.name)
}

/// The last graph of the schedule yields the logits, as its first result.
fn head(module: &Module) -> Result<usize, String> {
    let head = module.schedule.last().ok_or("the schedule is empty: there are no logits")?.graph;
    let calls = module.schedule.iter().filter(|s| s.graph == head).count();
    if calls > 1 {
        let name = &module.graphs[head].name;
        return Err(format!("graph `{name}` is called {calls} times: it is not a head"));
    }
    Ok(head)
}

/// With `pick` and without.
fn greedy(module: &Module) -> Result<Module, String> {
    let (mut module, head) = (module.clone(), head(module)?);
    let beside = module.graphs.iter().position(|g| is_beside(g, &module.graphs[head]));
    let mut likeliest = match beside {
        Some(beside) => module.graphs.swap_remove(beside), // the last
        None => likeliest(&module.graphs[head])?,
    };
    likeliest.name.clone_from(&module.graphs[head].name);
    module.graphs[head] = likeliest;
    Ok(module)
}

/// The graph, with the index of the largest logit of each row in place of its logits.
fn likeliest(graph: &Graph) -> Result<Graph, String> {
    let mut graph = graph.clone();
    let logits = logits(&graph)?;
    let names = vec![free(&graph, "ids")];
    let ids = graph.call(names, Op::find("argmax")?, &[Some(logits)], vec![], None);
    let ids = ids.map_err(|e| format!("graph `{}`: {e}", graph.name))?;
    replace_logits(&mut graph, &ids);
    Ok(graph)
}

fn append(graph: &mut Graph) -> Result<(), String> {
    let logits = logits(graph)?;
    let op = Op::find("pick")?;
    let mut input = |input: StepInput| {
        let known = graph.params().find(|(_, param, _)| **param == Param::Step(input));
        let known = known.map(|(value, ..)| value);
        known.unwrap_or_else(|| {
            let name = free(graph, input.name());
            graph.param(name, Param::Step(input), input.ty(Sym::B))
        })
    };
    let inputs = [StepInput::Tokens, StepInput::OutputRows, StepInput::Picks].map(&mut input);
    let operands = [logits, inputs[0], inputs[1], inputs[2]].map(Some);
    let names = ["picked_from", "ids", "logprobs", "likeliest"].map(|name| free(graph, name));
    let attrs = op.attrs.iter().filter_map(AttrDef::default_value).collect();
    let results = graph.call(names.to_vec(), op, &operands, attrs, None);
    let results = results.map_err(|e| format!("graph `{}`: {e}", graph.name))?;
    replace_logits(graph, &results);
    Ok(())
}

fn logits(graph: &Graph) -> Result<ValueId, String> {
    let fail = |message: &str| format!("graph `{}`: {message}", graph.name);
    let logits = *graph.results().first().ok_or_else(|| fail("it yields nothing"))?;
    if let Type::State(_) = graph.ty(logits) {
        return Err(fail("expected logits as its first result, found a state"));
    }
    Ok(logits)
}

fn replace_logits(graph: &mut Graph, with: &[ValueId]) {
    let rest = graph.results().iter().skip(1);
    let results = with.iter().chain(rest).copied().collect();
    graph.set_results(results);
}
