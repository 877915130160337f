//! Specs: a model family as data.
//!
//! A family file (`models/*.ron`) says how config keys become parameters, which blocks the layers
//! are made of, and in what order they run. A block (`models/blocks/*.ron`) is a piece of graph
//! with its weights and cache planes. In both, a *number stands for itself and a text is an
//! [expression](infernum_ir::expr)*.
//!
//! A body is a map from names to calls, `"q": linear(x: "h", w: "q_proj.weight")`. What is called
//! is an op of the table or a block of the family. Some arguments are understood by every call:
//!
//! - `when: "condition"`: where it is false the call is left out and yields its first operand;
//! - `at: "prefix."` (blocks only): put before the names of the block's weights;
//! - `rename: { "o_proj": "dense" }` (blocks only): what begins with one name, after `at`, is called by the
//!   other in the checkpoint.
//!
//! Names are lexical: a block sees its own parameters and the family's, never its caller's, so what
//! it means does not depend on who calls it. A body sees its own values, weights and cache planes
//! and the inputs of the step. Expressions of `params` fall back to config keys, and a key that the
//! config lacks is null; everywhere else an unknown name is an error.

pub mod fields;
mod library;
mod read;

use infernum_ir::SourceError;
use serde::Deserialize;

pub use library::{Library, LibraryError, Source, demo};

/// `{ "name": value, .. }` in the order written.
#[derive(Debug)]
pub struct Entries<'a, T>(pub Vec<(&'a str, T)>);

impl<T> Default for Entries<'_, T> {
    fn default() -> Self {
        Entries(Vec::new())
    }
}

impl<'a, T> Entries<'a, T> {
    /// The names and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &T)> {
        self.0.iter().map(|(k, v)| (*k, v))
    }

    /// The value of that name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(k, _)| *k == name).map(|(_, v)| v)
    }

    /// These entries over those of `base`: the same name replaces, a new one comes after.
    #[must_use]
    pub fn over(self, base: Self) -> Self {
        let mut all = base.0;
        for (name, value) in self.0 {
            match all.iter_mut().find(|(k, _)| *k == name) {
                Some(entry) => *entry = (name, value),
                None => all.push((name, value)),
            }
        }
        Entries(all)
    }
}

/// An argument or default: a number or flag stands for itself, a text is an expression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg<'a> {
    /// An expression, or the name of a value.
    Text(&'a str),
    /// A number.
    Num(f64),
    /// A flag.
    Bool(bool),
    /// `None`.
    Null,
}

/// An argument of a call: most are one [`Arg`], shapes are lists of them.
#[derive(Debug)]
pub enum Argument<'a> {
    /// One value.
    One(Arg<'a>),
    /// A list, for attributes that are shapes.
    List(Vec<Arg<'a>>),
    /// Names for names, for what a block's tensors are called.
    Names(Entries<'a, &'a str>),
}

/// `op(name: value, ..)`.
#[derive(Debug)]
pub struct SpecCall<'a> {
    /// The op or block called.
    pub name: &'a str,
    /// Its arguments in order.
    pub args: Vec<(&'a str, Argument<'a>)>,
}

impl<'a> SpecCall<'a> {
    /// The argument of that name, with the name as it is written.
    pub fn arg(&self, name: &str) -> Option<(&'a str, &Argument<'a>)> {
        self.args.iter().find(|(k, _)| *k == name).map(|(k, a)| (*k, a))
    }
}

/// A model family.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Family<'a> {
    /// The family's name.
    pub name: &'a str,
    /// One paragraph on what it covers.
    pub doc: &'a str,
    /// A family file to start from. What is written here replaces what is written there: entry by
    /// entry in `defaults`, `params`, `checks` and `blocks`, as a whole in `embed`, `layers`, `head`,
    /// `pool` and `score`; `ignore` adds to it.
    #[serde(default, borrow)]
    pub base: Option<&'a str>,
    /// Values of `architectures` in config.json that it serves.
    #[serde(borrow)]
    pub architectures: Vec<&'a str>,
    /// The same of checkpoints that end in vectors.
    #[serde(default)]
    pub embedders: Vec<&'a str>,
    /// The same of checkpoints that end in scores.
    #[serde(default)]
    pub classifiers: Vec<&'a str>,
    /// What transformers assumes for keys that config.json leaves out.
    #[serde(default)]
    pub defaults: Entries<'a, Arg<'a>>,
    /// Parameters, each over config keys and the parameters before it.
    #[serde(default)]
    pub params: Entries<'a, Arg<'a>>,
    /// Parameters that differ from layer to layer: over `layer`, config keys and the parameters before.
    #[serde(default)]
    pub layer_params: Entries<'a, Arg<'a>>,
    /// What must hold of the config: message and condition.
    #[serde(default)]
    pub checks: Entries<'a, Arg<'a>>,
    /// The blocks that bodies may call, by the name they call them by.
    #[serde(default)]
    pub blocks: Entries<'a, BlockSource<'a>>,
    /// From tokens to the first hidden state.
    #[serde(default)]
    pub embed: Option<Part<'a>>,
    /// The layers.
    #[serde(default)]
    pub layers: Option<Layers<'a>>,
    /// From the last hidden state to logits.
    #[serde(default)]
    pub head: Option<Part<'a>>,
    /// From the last hidden state to a vector for a sequence.
    #[serde(default)]
    pub pool: Option<Part<'a>>,
    /// From the last hidden state to a sequence's scores.
    #[serde(default)]
    pub score: Option<Part<'a>>,
    /// Checkpoint tensors that the model does not use; `*` stands for any text.
    #[serde(default)]
    pub ignore: Vec<&'a str>,
    /// What the blocks call tensors, or runs of the parts between dots, and what checkpoints of this family
    /// call them: replaced in order.
    #[serde(default)]
    pub names: Vec<(&'a str, &'a str)>,
    /// The same for checkpoints that were written otherwise: a tensor that is not there is looked for under
    /// the first of these names that is.
    #[serde(default)]
    pub also_named: Vec<(&'a str, &'a str)>,
    /// Tensors that checkpoints hold with their last two dimensions swapped; `*` stands for any text.
    #[serde(default)]
    pub transposed: Vec<&'a str>,
}

impl<'a> Family<'a> {
    /// All values of `architectures` in config.json that it serves.
    pub fn served(&self) -> impl Iterator<Item = &'a str> {
        [&self.architectures, &self.embedders, &self.classifiers].into_iter().flatten().copied()
    }

    /// This family over its `base`.
    #[must_use]
    pub fn over(self, base: Family<'a>) -> Family<'a> {
        Family {
            defaults: self.defaults.over(base.defaults),
            params: self.params.over(base.params),
            layer_params: self.layer_params.over(base.layer_params),
            checks: self.checks.over(base.checks),
            blocks: self.blocks.over(base.blocks),
            embed: self.embed.or(base.embed),
            layers: self.layers.or(base.layers),
            head: self.head.or(base.head),
            pool: self.pool.or(base.pool),
            score: self.score.or(base.score),
            ignore: [base.ignore, self.ignore].concat(),
            names: [self.names, base.names].concat(),
            also_named: [self.also_named, base.also_named].concat(),
            transposed: [base.transposed, self.transposed].concat(),
            ..self
        }
    }
}

/// Where a block comes from.
#[derive(Debug, Deserialize)]
pub enum BlockSource<'a> {
    /// A file, looked for beside the spec and then in the library.
    File(&'a str),
    /// Written in place.
    #[serde(borrow)]
    Inline(Block<'a>),
}

/// A block's file holds `Block(..)`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block<'a> {
    /// One paragraph on what it computes.
    pub doc: &'a str,
    /// Its operands.
    #[serde(borrow)]
    pub inputs: Vec<&'a str>,
    /// Its other arguments with their defaults, each over config keys, the family's parameters and
    /// the ones before it. `"x": "x ?? false"` is: as called, else as the family says, else false.
    #[serde(default)]
    pub params: Entries<'a, Arg<'a>>,
    /// What must hold: message and condition.
    #[serde(default)]
    pub checks: Entries<'a, Arg<'a>>,
    /// Checkpoint tensors it uses.
    #[serde(default)]
    pub weights: Entries<'a, WeightDecl<'a>>,
    /// KV-cache planes it keeps.
    #[serde(default)]
    pub state: Entries<'a, StateDecl<'a>>,
    /// What it computes.
    pub body: Entries<'a, SpecCall<'a>>,
    /// Which of the body's names it yields: one, or several with commas between them.
    pub result: &'a str,
}

/// One graph of the module.
#[derive(Debug, Deserialize)]
#[serde(rename = "part", deny_unknown_fields)]
pub struct Part<'a> {
    /// Put before the names of its weights.
    #[serde(default)]
    pub prefix: &'a str,
    /// Checkpoint tensors it uses.
    #[serde(borrow, default)]
    pub weights: Entries<'a, WeightDecl<'a>>,
    /// What it computes, from the names that the part before gives.
    pub body: Entries<'a, SpecCall<'a>>,
    /// The names it gives to the next part.
    pub gives: Vec<&'a str>,
}

/// The layers: how many, of which kinds, in which order.
#[derive(Debug, Deserialize)]
#[serde(rename = "layers", deny_unknown_fields)]
pub struct Layers<'a> {
    /// How many.
    #[serde(borrow)]
    pub count: Arg<'a>,
    /// The kind of layer number `layer`; may be left out where there is one kind.
    #[serde(default)]
    pub kind: Option<Arg<'a>>,
    /// The kinds.
    pub kinds: Entries<'a, Part<'a>>,
}

/// A checkpoint tensor.
#[derive(Debug, Deserialize)]
#[serde(rename = "weight", deny_unknown_fields)]
pub struct WeightDecl<'a> {
    /// Its dimensions.
    #[serde(borrow)]
    pub shape: Vec<Arg<'a>>,
    /// Present only where this holds.
    #[serde(default)]
    pub when: Option<Arg<'a>>,
    /// The name of another tensor that it is (tied weights), or null.
    #[serde(default)]
    pub same_as: Option<Arg<'a>>,
    /// With `n`, the tensors for `{expert}` = 0..n, stacked.
    #[serde(default)]
    pub stack: Option<Arg<'a>>,
}

/// A KV-cache plane: a row `[heads, dim]` a token, or a `slot`, one state of a fixed shape for a sequence.
#[derive(Debug, Deserialize)]
#[serde(rename = "state", deny_unknown_fields)]
pub struct StateDecl<'a> {
    /// Heads per row.
    #[serde(borrow, default)]
    pub heads: Option<Arg<'a>>,
    /// Values per head.
    #[serde(default)]
    pub dim: Option<Arg<'a>>,
    /// The shape of a sequence's state, in place of rows.
    #[serde(default)]
    pub slot: Option<Vec<Arg<'a>>>,
    /// Its element type; that of activations where it is left out.
    #[serde(default)]
    pub dtype: Option<Arg<'a>>,
    /// The layer whose plane of this name it is, to be read; this layer's own where it is left out or null.
    #[serde(default)]
    pub of: Option<Arg<'a>>,
}

/// Reads a family file.
pub fn parse_family(source: &Source) -> Result<Family<'_>, SourceError> {
    read::from_str(source)
}

/// Reads a block file.
pub fn parse_block(source: &Source) -> Result<Block<'_>, SourceError> {
    read::from_str(source)
}

/// Reads any data file in the notation of specs, with errors that point into it.
pub fn read_ron<'a, T: Deserialize<'a>>(source: &'a Source) -> Result<T, SourceError> {
    read::from_str(source)
}
