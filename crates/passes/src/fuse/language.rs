//! The e-graph's language: a node is a head and its children.
//!
//! An op's children are its operands, then its attributes: an attribute is a leaf like any other, so
//! that a pattern binds it. An operand that is left out is the [`Head::Absent`] leaf. An op of
//! several results makes a tuple; a [`Head::Proj`] takes one of them.

use egg::{Analysis, DidMerge, Id, Language};
use indexmap::IndexSet;
use infernum_ir::body::Emit;
use infernum_ir::{Attr, Op, Type};

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Head {
    /// A parameter of the graph, by its position among them.
    Param(u32),
    /// An attribute, by its position in [`Types::attrs`].
    Attr(u32),
    /// An operand that is left out.
    Absent,
    /// One result of a tuple.
    Proj(u32),
    /// A call.
    Op(Op),
}

/// A head and its children.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Node {
    pub(super) head: Head,
    pub(super) children: Vec<Id>,
}

impl Language for Node {
    type Discriminant = Head;

    fn discriminant(&self) -> Head {
        self.head
    }

    fn matches(&self, other: &Node) -> bool {
        self.head == other.head && self.children.len() == other.children.len()
    }

    fn children(&self) -> &[Id] {
        &self.children
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

impl Node {
    fn leaf(head: Head) -> Node {
        Node { head, children: Vec::new() }
    }

    /// For a call: the op, its operands and its attributes.
    pub(super) fn call(&self) -> Option<(Op, &[Id], &[Id])> {
        let Head::Op(op) = self.head else { return None };
        let (operands, attrs) = self.children.split_at(op.operands.len());
        Some((op, operands, attrs))
    }
}

/// What is known of a class.
#[derive(Clone, Debug)]
pub(super) enum Data {
    /// An attribute's value.
    Attr(Attr),
    /// An operand that is left out.
    Absent,
    /// A value's type.
    Value(Type),
    /// The types of several results.
    Tuple(Vec<Type>),
    /// A call that does not type, and why.
    Invalid(String),
}

/// Types every node as it is added.
#[derive(Default)]
pub(super) struct Types {
    attrs: IndexSet<Attr>,
    params: Vec<Type>,
}

impl Analysis<Node> for Types {
    type Data = Data;

    fn make(graph: &mut egg::EGraph<Node, Types>, node: &Node, _: Id) -> Data {
        let this = &graph.analysis;
        match node.head {
            Head::Param(i) => Data::Value(this.params[i as usize].clone()),
            Head::Attr(i) => Data::Attr(this.attrs[i as usize].clone()),
            Head::Absent => Data::Absent,
            Head::Proj(i) => match &graph[node.children[0]].data {
                Data::Tuple(types) => Data::Value(types[i as usize].clone()),
                other => Data::Invalid(format!("no tuple: {other:?}")),
            },
            Head::Op(_) => match infer(graph, node) {
                Ok(mut types) if types.len() == 1 => Data::Value(types.remove(0)),
                Ok(types) => Data::Tuple(types),
                Err(e) => Data::Invalid(e),
            },
        }
    }

    // Only classes of equal types are united, and what follows from that has equal types too.
    fn merge(&mut self, _: &mut Data, _: Data) -> DidMerge {
        DidMerge(false, false)
    }
}

fn infer(graph: &egg::EGraph<Node, Types>, node: &Node) -> Result<Vec<Type>, String> {
    let (op, operands, attrs) = node.call().ok_or("not a call")?;
    let operands: Vec<Option<&Type>> = operands
        .iter()
        .map(|&id| match &graph[id].data {
            Data::Value(ty) => Ok(Some(ty)),
            Data::Absent => Ok(None),
            other => Err(format!("no value: {other:?}")),
        })
        .collect::<Result<_, String>>()?;
    let attrs: Vec<Attr> = attrs
        .iter()
        .map(|&id| match &graph[id].data {
            Data::Attr(attr) => Ok(attr.clone()),
            other => Err(format!("no attribute: {other:?}")),
        })
        .collect::<Result<_, String>>()?;
    op.infer(&operands, &attrs)
}

/// A call's op, the types of its operands, and its attributes.
pub(super) type Signature<'a> = (Op, Vec<Option<&'a Type>>, Vec<Attr>);

/// A set of equal values, as the rest of the crate sees it.
#[derive(Default)]
pub(super) struct EGraph {
    pub(super) egg: egg::EGraph<Node, Types>,
    /// What was emitted since this was last taken: calls and projections, with the names given to
    /// them.
    pub(super) added: Vec<(Id, Node, String)>,
}

impl EGraph {
    /// Adds a parameter of the graph.
    pub(super) fn param(&mut self, ty: Type) -> Id {
        self.egg.analysis.params.push(ty);
        let node = Node::leaf(Head::Param(self.egg.analysis.params.len() as u32 - 1));
        let id = self.egg.add(node.clone());
        self.added.push((id, node, String::new()));
        id
    }

    /// A node under its children's present names.
    pub(super) fn canonical(&self, node: &Node) -> Node {
        let children = node.children.iter().map(|c| self.egg.find(*c)).collect();
        Node { head: node.head, children }
    }

    /// The class that holds a node, under its present name.
    pub(super) fn find(&self, id: Id) -> Id {
        self.egg.find(id)
    }

    /// The nodes of a class; in order, once the graph is rebuilt.
    pub(super) fn nodes(&self, class: Id) -> &[Node] {
        &self.egg[class].nodes
    }

    /// What is known of a class.
    pub(super) fn data(&self, class: Id) -> &Data {
        &self.egg[class].data
    }

    /// The type of a value.
    pub(super) fn value_type(&self, class: Id) -> Option<&Type> {
        match self.data(class) {
            Data::Value(ty) => Some(ty),
            _ => None,
        }
    }

    /// The classes that hold a call of `op`, in order.
    pub(super) fn calls(&self, op: Op) -> Vec<Id> {
        let found = self.egg.classes_for_op(&Head::Op(op)).into_iter().flatten();
        let mut classes: Vec<Id> = found.map(|id| self.egg.find(id)).collect();
        classes.sort_unstable();
        classes.dedup();
        classes
    }

    /// The class of one result of a tuple; each is added with the tuple.
    pub(super) fn projection(&self, tuple: Id, result: usize) -> Option<Id> {
        self.egg.lookup(Node { head: Head::Proj(result as u32), children: vec![tuple] })
    }

    /// The tuple that a class is a result of.
    pub(super) fn tuple(&self, class: Id) -> Option<Id> {
        let mut of = self.nodes(class).iter().filter(|n| matches!(n.head, Head::Proj(_)));
        of.next().map(|n| self.find(n.children[0]))
    }

    /// Operand types and attributes of a call.
    pub(super) fn signature(&self, node: &Node) -> Option<Signature<'_>> {
        let (op, operands, attrs) = node.call()?;
        let operands = operands.iter().map(|&id| self.value_type(id)).collect();
        let attr = |id: &Id| match self.data(*id) {
            Data::Attr(attr) => attr.clone(),
            _ => Attr::None,
        };
        Some((op, operands, attrs.iter().map(attr).collect()))
    }

    /// The types of a call's results.
    pub(super) fn result_types(&self, class: Id) -> &[Type] {
        match self.data(class) {
            Data::Value(ty) => std::slice::from_ref(ty),
            Data::Tuple(types) => types,
            _ => &[],
        }
    }
}

impl Emit for EGraph {
    type Value = Id;

    fn ty(&self, value: Id) -> Type {
        // Only `emit` and `param` make values, and they only give out those that have a type.
        match self.data(value) {
            Data::Value(ty) => ty.clone(),
            other => unreachable!("a value without a type: {other:?}"),
        }
    }

    fn emit(
        &mut self,
        names: &[String],
        op: Op,
        operands: &[Option<Id>],
        attrs: Vec<Attr>,
    ) -> Result<Vec<Id>, String> {
        let mut children = Vec::with_capacity(operands.len() + attrs.len());
        for operand in operands {
            children.push(operand.unwrap_or_else(|| self.egg.add(Node::leaf(Head::Absent))));
        }
        for attr in attrs {
            let (index, _) = self.egg.analysis.attrs.insert_full(attr);
            children.push(self.egg.add(Node::leaf(Head::Attr(index as u32))));
        }
        let node = Node { head: Head::Op(op), children };
        let class = self.egg.add(node.clone());
        let results = match self.data(class) {
            Data::Invalid(e) => return Err(format!("`{}`: {e}", op.name)),
            Data::Tuple(types) => types.len(),
            _ => 1,
        };
        let name = |i: usize| names.get(i).cloned().unwrap_or_default();
        self.added.push((class, node, name(0)));
        if results == 1 {
            return Ok(vec![class]);
        }
        let projections = (0..results).map(|i| {
            let node = Node { head: Head::Proj(i as u32), children: vec![class] };
            let id = self.egg.add(node.clone());
            self.added.push((id, node, name(i)));
            id
        });
        Ok(projections.collect())
    }
}
