//! Low-rank adapters (Hu et al. 2021) beside the products of a model.

use std::collections::{BTreeMap, HashMap};

use infernum_ir::{
    Attr, Dim, Graph, Memory, Module, NodeKind, Op, Param, StepInput, Sym, TensorType, ValueId,
    in_layer,
};

use crate::names::free;

/// What adapters a plan has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapters {
    /// How many at once.
    pub slots: u64,
    /// The highest rank.
    pub rank: u64,
    /// Which products they may change: names of modules, or their last parts, such as `q_proj`. All that can be
    /// adapted when `None`.
    pub targets: Option<Vec<String>>,
}

/// Whether a module's name is `target`, or ends with its parts.
pub fn is_target(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The name of the bank that holds the first matrix of the adapters of a module's product.
pub fn bank_a(module: &str) -> String {
    format!("{module}.lora_A.weight")
}

/// As [`bank_a`], of the second matrix.
pub fn bank_b(module: &str) -> String {
    format!("{module}.lora_B.weight")
}

impl Adapters {
    fn touch(&self, name: &str) -> bool {
        self.targets.as_ref().is_none_or(|all| all.iter().any(|target| is_target(name, target)))
    }
}

/// The module with a low-rank part beside each product that adapters may change, read from banks that are zero until
/// an adapter is loaded. Whatever uses a product uses the sum.
pub fn adapters(module: &Module, adapters: &Adapters) -> Result<Module, String> {
    let graphs = module
        .graphs
        .iter()
        .map(|graph| adapted(graph, adapters).map_err(|e| format!("graph `{}`: {e}", graph.name)));
    Ok(Module { graphs: graphs.collect::<Result<_, _>>()?, ..module.clone() })
}

/// The modules whose products can be adapted, by name, with the shape of their weights as products read them.
pub fn adaptable(module: &Module) -> BTreeMap<String, [u64; 2]> {
    let mut found = BTreeMap::new();
    for site in &module.schedule {
        let graph = &module.graphs[site.graph];
        for product in (0..graph.len()).filter_map(|node| Product::of(graph, node)) {
            found.insert(in_layer(&product.module, site.layer), product.shape);
        }
    }
    found
}

/// A product over rows of a weight of the checkpoint.
struct Product {
    x: ValueId,
    /// Its weight's name, less its last part.
    module: String,
    /// The whole weight's rows and columns.
    shape: [u64; 2],
    /// The first row that this product is over.
    start: u64,
}

impl Product {
    /// What a node computes, if it is a product that can be adapted: one of a layer, over each token of the step, with
    /// rows of a weight that is stored by itself.
    fn of(graph: &Graph, node: usize) -> Option<Product> {
        let NodeKind::Op { op, .. } = &graph.node(node).kind else { return None };
        if op.name != "linear" {
            return None;
        }
        let operands = graph.operands(node);
        let (x, mut w) = (operands[0]?, operands[1]?);
        let rows = &graph.ty(x).tensor().ok()?.shape;
        if rows.len() != 2 || rows[0] != Dim::sym(Sym::T) {
            return None;
        }
        let mut start = 0;
        let mut ty = graph.ty(w).tensor().ok()?;
        loop {
            match &graph.node(w.node).kind {
                NodeKind::Param(Param::Weight(weight)) if weight.stack.is_none() => {
                    let module = weight.name.strip_suffix(".weight")?.to_owned();
                    let [n, k] = ty.shape[..] else { return None };
                    let shape = [n.as_const()?, k.as_const()?];
                    let in_layer = module.contains("{layer}");
                    return in_layer.then_some(Product { x, module, shape, start });
                }
                NodeKind::Op { op, attrs } => {
                    let from = graph.operands(w.node).first().copied().flatten()?;
                    match (op.memory, &attrs[..]) {
                        (Memory::Decoded | Memory::Converted, _) => w = from,
                        // As some checkpoints store it; that is how it lies, not what it means.
                        (Memory::Transposed, _) => {
                            let stored = graph.node(from.node);
                            if !matches!(stored.kind, NodeKind::Param(_)) {
                                return None;
                            }
                            w = from;
                        }
                        (Memory::Slice, [Attr::Int(0), Attr::Int(first), Attr::Int(_)]) => {
                            start += u64::try_from(*first).ok()?;
                            w = from;
                            ty = graph.ty(w).tensor().ok()?;
                        }
                        _ => return None,
                    }
                }
                NodeKind::Param(_) => return None,
            }
        }
    }
}

fn adapted(graph: &Graph, adapters: &Adapters) -> Result<Graph, String> {
    let products: BTreeMap<usize, Product> = (0..graph.len())
        .filter_map(|node| Some((node, Product::of(graph, node)?)))
        .filter(|(_, product)| adapters.touch(&product.module))
        .collect();
    if products.is_empty() {
        return Ok(graph.clone());
    }
    let mut to =
        Rebuilt { out: Graph::new(graph.name.clone()), map: HashMap::new(), banks: HashMap::new() };
    for (index, node) in graph.nodes() {
        let operands = graph.operands(index).into_iter().map(|v| v.map(|v| to.map[&v]));
        let operands: Vec<Option<ValueId>> = operands.collect();
        let new = to.out.add_node(node.clone(), &operands);
        for result in 0..node.types.len() {
            let value = ValueId { node: new.node, result };
            to.map.insert(ValueId { node: index, result }, value);
        }
        if let Some(product) = products.get(&index) {
            let y = to.low_rank(new, product, adapters)?;
            to.map.insert(ValueId { node: index, result: 0 }, y);
        }
    }
    let results = graph.results().iter().map(|v| to.map[v]).collect();
    to.out.set_results(results);
    Ok(to.out)
}

/// A graph on its way.
struct Rebuilt {
    out: Graph,
    map: HashMap<ValueId, ValueId>,
    /// By name.
    banks: HashMap<String, ValueId>,
}

impl Rebuilt {
    /// The sum of a product and its low-rank part.
    fn low_rank(
        &mut self,
        y: ValueId,
        product: &Product,
        adapters: &Adapters,
    ) -> Result<ValueId, String> {
        let x = self.map[&product.x];
        let dtype = self.out.ty(x).tensor()?.dtype;
        let ([n, k], Adapters { slots: l, rank: r, .. }) = (product.shape, adapters);
        let a = self.bank(bank_a(&product.module), TensorType::weight(dtype, &[*l, *r, k]));
        let b = self.bank(bank_b(&product.module), TensorType::weight(dtype, &[*l, n, *r]));
        let slots = self.slots();
        // What the product was called is now the sum.
        let loc = self.out.node(y.node).loc.clone();
        let name = self.out.node(y.node).names[0].clone();
        self.out.node_mut(y.node).names[0] = free(&self.out, &format!("{name}.base"));
        let start = Attr::Int(i64::try_from(product.start).map_err(|e| e.to_string())?);
        let operands = [y, x, a, b, slots].map(Some);
        Ok(self.out.call(vec![name], Op::find("adapt")?, &operands, vec![start], loc)?[0])
    }

    fn bank(&mut self, bank: String, ty: TensorType) -> ValueId {
        if let Some(known) = self.banks.get(&bank) {
            return *known;
        }
        let name = free(&self.out, &bank.replace("{layer}.", ""));
        let value = self.out.param(name, Param::Bank(bank.clone()), ty);
        self.banks.insert(bank, value);
        value
    }

    fn slots(&mut self) -> ValueId {
        let input = StepInput::Adapters;
        let known = self.out.params().find(|(_, param, _)| **param == Param::Step(input));
        let known = known.map(|(value, ..)| value);
        known.unwrap_or_else(|| {
            let name = free(&self.out, input.name());
            self.out.param(name, Param::Step(input), input.ty(Sym::T))
        })
    }
}
