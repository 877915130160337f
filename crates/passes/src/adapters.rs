//! Low-rank adapters (Hu et al. 2021) beside the products of a model.

use std::collections::{BTreeMap, HashMap};

use infernum_ir::{
    Attr, Dim, Graph, Memory, Module, NodeKind, Op, Param, StepInput, Sym, TensorType, ValueId,
};

use crate::names::free;

/// What adapters a plan has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapters {
    /// How many at once.
    pub slots: u64,
    /// The highest rank.
    pub rank: u64,
    /// Which products they may change: names of modules, or their last parts, such as `q_proj` or `experts`. When `None`,
    /// all that can be adapted, but for those of experts: these are most of a model, and so would their banks be.
    pub targets: Option<Vec<String>>,
}

/// Stands for an expert's number in the name of a module.
pub const EXPERT: &str = "{expert}";

/// The module that holds all experts of which this is one, or a parameter of all.
pub fn experts_of(module: &str) -> Option<&str> {
    let whole = module.split_once(EXPERT).map(|(before, _)| before.trim_end_matches('.'));
    whole.or_else(|| Some(module.rsplit_once('.')?.0))
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
    fn touch(&self, product: &Product) -> bool {
        let Some(targets) = &self.targets else { return product.experts.is_none() };
        let experts = product.experts.and_then(|_| experts_of(&product.module));
        let names = || std::iter::once(&product.module[..]).chain(experts);
        targets.iter().any(|target| names().any(|name| is_target(name, target)))
    }
}

/// The module with a low-rank part beside each product that adapters may change, read from banks that are zero until
/// an adapter is loaded. Whatever uses a product uses the sum.
///
/// `published` are the names that adapters have for weights, where the module has others.
pub fn adapters(
    module: &Module,
    adapters: &Adapters,
    published: &BTreeMap<String, String>,
) -> Result<Module, String> {
    let graphs = module.graphs.iter().map(|graph| {
        adapted(graph, adapters, published).map_err(|e| format!("graph `{}`: {e}", graph.name))
    });
    Ok(Module { graphs: graphs.collect::<Result<_, _>>()?, ..module.clone() })
}

/// A product over rows of a weight of the checkpoint.
struct Product {
    x: ValueId,
    /// The name that adapters have for its weight, less its last part; that of an expert's with [`EXPERT`].
    module: String,
    /// The whole weight's rows and columns.
    shape: [u64; 2],
    /// The first row that this product is over.
    start: u64,
    /// Which experts' product it is, where it is one of experts, and how many there are.
    experts: Option<(ValueId, u64)>,
}

impl Product {
    /// What a node computes, if it is a product that can be adapted: one of a layer, over each token of the step, with
    /// rows of a weight that is stored by itself, or one of experts with all of theirs.
    fn of(graph: &Graph, node: usize, published: &BTreeMap<String, String>) -> Option<Product> {
        let NodeKind::Op { op, .. } = &graph.node(node).kind else { return None };
        let of_experts = op.name == "expert_linear";
        if op.name != "linear" && !of_experts {
            return None;
        }
        let operands = graph.operands(node);
        let (x, mut w) = (operands[0]?, operands[1]?);
        let rows = &graph.ty(x).tensor().ok()?.shape;
        if rows[0] != Dim::sym(Sym::T) || !(rows.len() == 2 || of_experts) {
            return None;
        }
        let mut start = 0;
        let mut ty = graph.ty(w).tensor().ok()?;
        loop {
            match &graph.node(w.node).kind {
                NodeKind::Param(Param::Weight(weight)) => {
                    let name = published.get(&weight.name).unwrap_or(&weight.name);
                    let sizes: Option<Vec<u64>> = ty.shape.iter().map(|d| d.as_const()).collect();
                    let (shape, experts) = match sizes?[..] {
                        [n, k] => ([n, k], None),
                        [e, n, k] if of_experts => ([n, k], Some((operands[2]?, e))),
                        _ => return None,
                    };
                    // Parameters of all experts have names of their own.
                    let whole = experts.filter(|_| weight.stack.is_none()).map(|_| &name[..]);
                    let module = name.strip_suffix(".weight").or(whole)?.to_owned();
                    let in_layer = module.contains("{layer}");
                    return in_layer.then_some(Product { x, module, shape, start, experts });
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
                        (Memory::Slice, [Attr::Int(0), Attr::Int(first), Attr::Int(_)])
                            if !of_experts =>
                        {
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

fn adapted(
    graph: &Graph,
    adapters: &Adapters,
    published: &BTreeMap<String, String>,
) -> Result<Graph, String> {
    let products: BTreeMap<usize, Product> = (0..graph.len())
        .filter_map(|node| Some((node, Product::of(graph, node, published)?)))
        .filter(|(_, product)| adapters.touch(product))
        .collect();
    if products.is_empty() {
        return Ok(graph.clone());
    }
    let mut to = Rebuilt {
        out: Graph::new(graph.name.clone()),
        map: HashMap::new(),
        banks: HashMap::new(),
        choices: HashMap::new(),
    };
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
    /// By the choices of experts: where adapters have their parts, and the tokens that chose.
    choices: HashMap<ValueId, [ValueId; 2]>,
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
        let each = product.experts.map_or(1, |(_, experts)| experts);
        let rows = l.checked_mul(each).ok_or("more experts than can be counted")?;
        let a = self.bank(bank_a(&product.module), TensorType::weight(dtype, &[rows, *r, k]));
        let b = self.bank(bank_b(&product.module), TensorType::weight(dtype, &[rows, n, *r]));
        // What the product was called is now the sum.
        let name = self.out.node(y.node).names[0].clone();
        self.out.node_mut(y.node).names[0] = free(&self.out, &format!("{name}.base"));
        let Some((ids, experts)) = product.experts else {
            let slots = self.slots();
            return self.adapt(&name, [y, x, a, b, slots], product.start);
        };
        // Each choice of an expert is a row of its own.
        let shape = self.out.ty(y).tensor()?.shape.clone();
        let [slots, tokens] = self.choices(self.map[&ids], experts)?;
        let base = self.flat(&format!("{name}.rows"), y)?;
        let x = match self.out.ty(x).tensor()?.rank() {
            2 => self.op([&format!("{name}.x")], "gather_rows", &[x, tokens], vec![])?[0],
            _ => self.flat(&format!("{name}.x"), x)?,
        };
        let flat = self.adapt(&format!("{name}.flat"), [base, x, a, b, slots], 0)?;
        Ok(self.op([&name], "reshape", &[flat], vec![Attr::Dims(shape)])?[0])
    }

    fn adapt(&mut self, name: &str, operands: [ValueId; 5], start: u64) -> Result<ValueId, String> {
        let start = Attr::Int(i64::try_from(start).map_err(|e| e.to_string())?);
        Ok(self.op([name], "adapt", &operands, vec![start])?[0])
    }

    /// A value of choices `[T, k, N]` as `[T k, N]`.
    fn flat(&mut self, name: &str, value: ValueId) -> Result<ValueId, String> {
        let shape = &self.out.ty(value).tensor()?.shape;
        let rows = Dim::product_of(&shape[..2]).ok_or("choices that cannot be counted")?;
        let shape = vec![rows, shape[2]];
        Ok(self.op([name], "reshape", &[value], vec![Attr::Dims(shape)])?[0])
    }

    /// Where adapters have their parts of the experts that are chosen, and the tokens that chose them.
    fn choices(&mut self, ids: ValueId, experts: u64) -> Result<[ValueId; 2], String> {
        if let Some(known) = self.choices.get(&ids) {
            return Ok(*known);
        }
        let slots = self.slots();
        let experts = Attr::Int(i64::try_from(experts).map_err(|e| e.to_string())?);
        let [parts, tokens] =
            ["slots", "tokens"].map(|of| format!("{}.{of}", self.out.value_name(ids)));
        let made = self.op([&parts, &tokens], "expert_slots", &[slots, ids], vec![experts])?;
        self.choices.insert(ids, made);
        Ok(made)
    }

    /// Adds a call, at the place of its first operand's; its results are called so, as far as these names are free.
    fn op<const N: usize>(
        &mut self,
        names: [&str; N],
        op: &str,
        operands: &[ValueId],
        attrs: Vec<Attr>,
    ) -> Result<[ValueId; N], String> {
        let loc = self.out.node(operands[0].node).loc.clone();
        let names = names.iter().map(|name| free(&self.out, name)).collect();
        let operands: Vec<Option<ValueId>> = operands.iter().copied().map(Some).collect();
        let results = self.out.call(names, Op::find(op)?, &operands, attrs, loc)?;
        results.try_into().map_err(|_| format!("`{op}`: expected {N} result(s)"))
    }

    fn bank(&mut self, bank: String, ty: TensorType) -> ValueId {
        if let Some(known) = self.banks.get(&bank) {
            return *known;
        }
        let name = free(&self.out, &bank.replace("{layer}.", "").replace(EXPERT, "expert"));
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
