//! What a spec says without effect: parameters, values and weights that nothing reads, layers that change
//! nothing, and values that do not arrive where their names suggest.
//!
//! This looks at the text of the spec, not at what one config makes of it: a parameter that only some
//! configs need is no mistake.

use std::collections::BTreeSet;

use infernum_ir::Recurrence;
use infernum_ir::expr::Expr;
use infernum_ir::{Effect, Op, SourceWarning};

use super::body::Blocks;
use super::scope::Context;
use crate::spec::{Arg, Argument, Block, Entries, Family, Part, Source, SpecCall, WeightDecl};

/// Names that every expression may use, beside parameters.
pub(super) const ENGINE: [&str; 2] = ["dtype", "max_length"];

/// Names, as pieces of the sources.
type Names<'a> = BTreeSet<&'a str>;

/// The warnings on a family, whose own file is `own`. What a base says and this family does not use is
/// no mistake of either.
pub(super) fn lint<'a>(
    cx: &Context<'a>,
    family: &Family<'a>,
    own: &Source,
    blocks: &Blocks<'a>,
) -> Vec<SourceWarning> {
    let mut lint = Lint { cx, family, blocks, found: Vec::new() };
    let mut called: Vec<_> = blocks.iter().map(|(name, block)| (*name, *block)).collect();
    called.sort_unstable_by_key(|(name, _)| *name);
    let mut read = lint.family_reads();
    for (_, block) in &called {
        read.extend(lint.block(block));
    }
    for name in family_params(family) {
        let written_here = cx.place(name).is_some_and(|(source, _)| source.file == own.file);
        if written_here && !read.contains(name) {
            lint.warn(name, format!("nothing reads the parameter `{name}`"));
        }
    }
    lint.found.sort_by_key(SourceWarning::place);
    lint.found.dedup();
    lint.found
}

struct Lint<'a, 'c> {
    cx: &'c Context<'a>,
    family: &'c Family<'a>,
    blocks: &'c Blocks<'a>,
    found: Vec<SourceWarning>,
}

impl<'a> Lint<'a, '_> {
    fn warn(&mut self, place: &str, message: String) {
        self.found.push(SourceWarning(self.cx.at(place, message)));
    }

    /// The parameters that the family's own expressions read.
    fn family_reads(&mut self) -> Names<'a> {
        let family = self.family;
        let mut read = Names::new();
        let mut before = Names::new();
        for (name, definition) in family.params.iter().chain(family.layer_params.iter()) {
            // One that mentions itself reads the config's key.
            let mentioned = names(*definition);
            read.extend(mentioned.iter().filter_map(|n| before.get(n.as_str()).copied()));
            before.insert(name);
            self.hides_engine(name);
        }
        let known: Vec<&'a str> = family_params(family).collect();
        let mut mentioned = Vec::new();
        family.checks.iter().for_each(|(_, check)| mentioned.extend(names(*check)));
        let parts = [&family.embed, &family.head, &family.pool, &family.score];
        let parts = parts.into_iter().flatten();
        let kinds = family.layers.iter().flat_map(|l| l.kinds.iter().map(|(_, part)| part));
        for Part { prefix, weights, body, gives } in parts.chain(kinds) {
            mentioned.extend(placeholders(prefix));
            mentioned.extend(weight_names(weights));
            mentioned.extend(body_names(body));
            self.calls(body, &Names::new());
            let read = self.values(body, gives);
            self.unread("weight", weights, &read);
        }
        if let Some(layers) = &family.layers {
            layers.kinds.iter().for_each(|(kind, part)| self.unchanged(kind, part));
            mentioned.extend(names(layers.count));
            mentioned.extend(layers.kind.map(names).unwrap_or_default());
        }
        read.extend(known.iter().filter(|k| mentioned.iter().any(|m| m == *k)));
        read
    }

    /// Looks at a block; the names outside of it that it reads.
    fn block(&mut self, block: &Block<'a>) -> Names<'a> {
        let (mut own, mut read, mut outer) = (Names::new(), Names::new(), Vec::new());
        for (name, default) in block.params.iter() {
            for mentioned in names(*default) {
                match own.get(mentioned.as_str()) {
                    Some(param) => drop(read.insert(param)),
                    None => outer.push(mentioned),
                }
            }
            own.insert(name);
            self.hides_engine(name);
        }
        let mut mentioned = weight_names(&block.weights);
        block.checks.iter().for_each(|(_, check)| mentioned.extend(names(*check)));
        for (_, state) in block.state.iter() {
            let sizes = [state.heads, state.dim].into_iter().flatten();
            let sizes = sizes.chain(state.slot.iter().flatten().copied());
            mentioned.extend(sizes.flat_map(names));
            mentioned.extend(state.of.into_iter().flat_map(names));
        }
        mentioned.extend(body_names(&block.body));
        for name in mentioned {
            match own.get(name.as_str()) {
                Some(param) => drop(read.insert(param)),
                None => outer.push(name),
            }
        }
        for name in own.difference(&read) {
            self.warn(name, format!("nothing reads the parameter `{name}` of this block"));
        }
        self.calls(&block.body, &own);
        let ends: Vec<&'a str> = block.result.split(',').map(str::trim).collect();
        let values = self.values(&block.body, &ends);
        self.unread("weight", &block.weights, &values);
        self.unread("plane", &block.state, &values);
        for input in block.inputs.iter().filter(|i| !values.contains(*i)) {
            self.warn(input, format!("nothing reads the operand `{input}` of this block"));
        }
        family_params(self.family).filter(|n| outer.iter().any(|o| o == n)).collect()
    }

    /// Looks at the values of a body, of which `ends` are what leaves it; the names from outside of it that
    /// it reads. Of calls that only one another read, the last is reported.
    fn values(&mut self, body: &Entries<'a, SpecCall<'a>>, ends: &[&'a str]) -> Names<'a> {
        let mut read: Names<'a> = ends.iter().copied().collect();
        for (written, call) in body.0.iter().rev() {
            let results: Vec<&str> = written.split(',').map(str::trim).collect();
            let writes = !self.blocks.contains_key(call.name)
                && Op::find(call.name).is_ok_and(|op| op.effect == Effect::Writes);
            if !writes && !results.iter().any(|name| read.contains(name)) {
                self.warn(written, format!("nothing reads `{written}`"));
            }
            read.retain(|name| !results.contains(name));
            read.extend(self.operands(call));
        }
        read
    }

    /// The names of values that a call is given.
    fn operands(&self, call: &SpecCall<'a>) -> Vec<&'a str> {
        let names: Vec<&str> = match (self.blocks.get(call.name), Op::find(call.name)) {
            (Some(block), _) => block.inputs.clone(),
            (None, Ok(op)) => op.operands.iter().map(|o| o.name).collect(),
            (None, Err(_)) => Vec::new(),
        };
        let given = names.into_iter().filter_map(|name| match call.arg(name) {
            Some((_, Argument::One(Arg::Text(value)))) => Some(*value),
            _ => None,
        });
        given.collect()
    }

    /// What is declared, and not among the names `read`.
    fn unread<T>(&mut self, what: &str, declared: &Entries<'a, T>, read: &Names<'a>) {
        for (name, _) in declared.iter().filter(|(name, _)| !read.contains(name)) {
            self.warn(name, format!("nothing reads the {what} `{name}`"));
        }
    }

    /// A layer that has a body, and gives what it took.
    fn unchanged(&mut self, kind: &str, part: &Part<'a>) {
        let results = part.body.iter().flat_map(|(written, _)| written.split(',').map(str::trim));
        let results: Names<'_> = results.collect();
        if let (Some(first), false) = (part.gives.first(), results.is_empty())
            && !part.gives.iter().any(|name| results.contains(name))
        {
            let message = format!(
                "layers of kind `{kind}` give `{}` as they took it: expected their body to define it",
                part.gives.join("`, `")
            );
            self.warn(first, message);
        }
    }

    fn hides_engine(&mut self, name: &str) {
        if ENGINE.contains(&name) {
            let message =
                format!("the parameter `{name}` hides the engine's own: give it another name");
            self.warn(name, message);
        }
    }

    /// Calls of blocks that leave out a parameter which has a value under the same name where the call
    /// stands: names are lexical, so the block's default is what counts.
    fn calls(&mut self, body: &Entries<'a, SpecCall<'a>>, own: &Names<'a>) {
        for (_, call) in body.iter() {
            let Some(block) = self.blocks.get(call.name) else { continue };
            for (param, default) in block.params.iter() {
                let family = family_params(self.family).any(|name| name == param);
                let whose = match (own.contains(param), family) {
                    (true, _) => "this block's",
                    (false, true) => "the family's",
                    (false, false) => continue,
                };
                // `"x": "x ?? false"` is the family's value where the call says nothing.
                let falls_back = family && names(*default).iter().any(|n| n == param);
                if call.arg(param).is_none() && !(falls_back && whose == "the family's") {
                    let name = call.name;
                    self.warn(name, format!(
                        "`{name}` has a parameter `{param}` that hides {whose}, and this call leaves it \
                         out: the block's default counts; pass `{param}: \"{param}\"`, or `{param}: \
                         None` if none is meant"
                    ));
                }
            }
        }
    }
}

/// The family's parameters, those that differ by layer among them.
fn family_params<'a>(family: &Family<'a>) -> impl Iterator<Item = &'a str> {
    family.params.iter().chain(family.layer_params.iter()).map(|(name, _)| name)
}

/// The names that an argument mentions; those of values and weights look the same, and do no harm.
fn names(arg: Arg<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let Arg::Text(text) = arg else { return found };
    // Of a prefix of names, or of another tensor's name.
    found.extend(placeholders(text));
    if let Ok(e) = text.parse::<Expr>() {
        e.names(&mut |n| found.push(n.to_owned()));
    } else if let Ok(recurrence) = text.parse::<Recurrence>() {
        found.extend(recurrence.free().into_iter().map(str::to_owned));
    }
    found
}

/// The names that stand in braces in the name of a tensor.
fn placeholders(text: &str) -> Vec<String> {
    let braced = text.split('{').skip(1).filter_map(|rest| rest.split_once('}'));
    braced.map(|(name, _)| name.to_owned()).collect()
}

fn body_names(body: &Entries<'_, SpecCall<'_>>) -> Vec<String> {
    let arguments = body.iter().flat_map(|(_, call)| &call.args);
    let mentioned = |(_, argument): &(&str, Argument<'_>)| match argument {
        Argument::One(arg) => names(*arg),
        Argument::List(list) => list.iter().copied().flat_map(names).collect(),
        Argument::Names(renamed) => renamed.iter().flat_map(|(_, to)| placeholders(to)).collect(),
    };
    arguments.flat_map(mentioned).collect()
}

fn weight_names(weights: &Entries<'_, WeightDecl<'_>>) -> Vec<String> {
    let all = weights.iter().flat_map(|(name, w)| {
        let given =
            w.shape.iter().copied().chain([w.when, w.same_as, w.stack].into_iter().flatten());
        given.flat_map(names).chain(placeholders(name))
    });
    all.collect()
}
