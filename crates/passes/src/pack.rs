//! `pack`: encoded weights in the form that kernels read codes of.

use std::collections::HashMap;

use infernum_ir::{Graph, Memory, Module, NodeKind, Op, Type, ValueId};

use crate::Pass;

pub(crate) const PASS: Pass = Pass {
    name: "pack",
    doc: "has encoded weights read in their packed form, where they have one: it is made once, at load, and the one that \
          is kept",
    run: |module, _| {
        let graphs = module.graphs.iter().map(pack).collect::<Result<_, _>>()?;
        Ok(Module { graphs, ..module.clone() })
    },
};

fn pack(graph: &Graph) -> Result<Graph, String> {
    let repack = Op::find("repack")?;
    let mut out = Graph::new(graph.name.clone());
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut packed: HashMap<ValueId, ValueId> = HashMap::new();
    for (index, node) in graph.nodes() {
        let operands = graph.operands(index).into_iter().map(|v| v.map(|v| map[&v]));
        let mut operands: Vec<Option<ValueId>> = operands.collect();
        if let NodeKind::Op { op, .. } = &node.kind
            && op.memory == Memory::Decoded
            && let Some(Some(w)) = operands.first_mut()
            && is_packable(out.ty(*w))
        {
            let form = if let Some(known) = packed.get(w) {
                *known
            } else {
                let name = format!("{}.packed", out.value_name(*w));
                let taken = out.find(&name).is_some();
                let name = if taken { format!("{name}.{index}") } else { name };
                out.call(vec![name], repack, &[Some(*w)], Vec::new(), node.loc.clone())?[0]
            };
            packed.insert(*w, form);
            *w = form;
        }
        let new = out.add_node(node.clone(), &operands);
        for result in 0..node.types.len() {
            let to = ValueId { node: new.node, result };
            map.insert(ValueId { node: index, result }, to);
        }
    }
    out.set_results(graph.results().iter().map(|v| map[v]).collect());
    Ok(out)
}

/// Whether a value is a weight as it is stored, of an encoding that has a packed form.
fn is_packable(ty: &Type) -> bool {
    let Type::Tensor(ty) = ty else { return false };
    let encoding = ty.encoding.as_ref().filter(|e| e.packing().is_none());
    ty.constant && encoding.is_some_and(|e| e.packed().is_ok())
}
