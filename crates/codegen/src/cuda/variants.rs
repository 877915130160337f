//! Variants as files say them: one by one, in groups that share what they have in common, and in lists
//! that several templates share.
//!
//! `kernels/templates/README.md` is the reference of the notation.

use std::collections::BTreeMap;

use infernum_frontend_hf::spec::{Entries, Source, read_ron};
use infernum_ir::expr::{Expr, Value};
use infernum_ir::{SourceError, nearest};
use serde::Deserialize;

use super::geometry::{EVERYWHERE, STEP};
use super::template::{Foreign, Kind, Library, MatmulRoles, TemplateError, Tiles, Variant};

/// What stands in `variants: [..]`. A group's fields are those of a variant once more: RON cannot
/// flatten a struct that both would share.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Entry<'a> {
    /// One variant.
    Variant {
        name: &'a str,
        #[serde(default, borrow)]
        when: Vec<&'a str>,
        #[serde(default)]
        params: Entries<'a, f64>,
        #[serde(default)]
        grid: Option<Vec<&'a str>>,
        #[serde(default)]
        block: Option<&'a str>,
        #[serde(default)]
        shared: Option<&'a str>,
        #[serde(default)]
        scratch: Option<&'a str>,
        #[serde(default)]
        ahead: Option<&'a str>,
        #[serde(default)]
        tiles: Entries<'a, &'a str>,
        #[serde(default)]
        dealt: Vec<&'a str>,
        #[serde(default)]
        order: Option<&'a str>,
        #[serde(default)]
        library: Option<MatmulRoles>,
        #[serde(default)]
        ptx: Option<Foreign>,
    },
    /// Variants, and what they have in common.
    Group {
        #[serde(default, borrow)]
        when: Vec<&'a str>,
        #[serde(default)]
        params: Entries<'a, f64>,
        #[serde(default)]
        grid: Option<Vec<&'a str>>,
        #[serde(default)]
        block: Option<&'a str>,
        #[serde(default)]
        shared: Option<&'a str>,
        #[serde(default)]
        scratch: Option<&'a str>,
        #[serde(default)]
        ahead: Option<&'a str>,
        #[serde(default)]
        tiles: Entries<'a, &'a str>,
        #[serde(default)]
        dealt: Vec<&'a str>,
        #[serde(default)]
        order: Option<&'a str>,
        variants: Vec<Entry<'a>>,
    },
    /// Those of `variants/NAME.ron`.
    List {
        name: &'a str,
        /// What the list takes.
        #[serde(default, borrow)]
        given: Entries<'a, &'a str>,
    },
}

/// A file of `variants/`.
#[derive(Deserialize)]
#[serde(rename = "List", deny_unknown_fields)]
struct ListFile<'a> {
    /// What its variants have in common.
    #[serde(rename = "doc")]
    _doc: &'a str,
    /// Names that its expressions use and a template gives a meaning, and what they stand for.
    #[serde(default, borrow)]
    takes: Entries<'a, &'a str>,
    /// What they mean where nothing is given.
    #[serde(default)]
    defaults: Entries<'a, &'a str>,
    variants: Vec<Entry<'a>>,
}

/// Lists that one template may read, counted each time they are named: far more than any has, and few
/// enough that lists which name one another cannot keep us busy.
const MOST_LISTS: usize = 64;

/// Characters of an expression once it has what its list takes.
const MOST_CHARACTERS: usize = 4096;

/// Every variant of a template, in order: its header's `entries`, where `source` is its text. Their order of
/// summation is `order` where they do not say another.
pub(super) fn expand(
    library: &Library,
    source: &Source,
    entries: &[Entry<'_>],
    order: Option<&str>,
) -> Result<Vec<Variant>, TemplateError> {
    let mut all = Expansion { library, template: &source.file, found: Vec::new(), lists: 0 };
    let scope = Scope { source, given: BTreeMap::new(), within: None };
    let order = order.map(str::to_owned);
    all.entries(&scope, entries, &Common { order, ..Common::default() })?;
    Ok(all.found)
}

/// A file, and what the names that it takes mean.
struct Scope<'s> {
    source: &'s Source,
    given: BTreeMap<&'s str, Expr>,
    /// The file that names this one.
    within: Option<&'s Scope<'s>>,
}

/// What the groups around a variant say.
#[derive(Clone, Default)]
struct Common {
    when: Vec<Expr>,
    params: BTreeMap<String, f64>,
    grid: Option<Vec<Expr>>,
    block: Option<Expr>,
    shared: Option<Expr>,
    scratch: Option<Expr>,
    ahead: Option<Expr>,
    tiles: BTreeMap<String, Expr>,
    dealt: Vec<String>,
    order: Option<String>,
}

struct Expansion<'l> {
    library: &'l Library,
    template: &'l str,
    found: Vec<Variant>,
    lists: usize,
}

impl Expansion<'_> {
    fn entries(
        &mut self,
        scope: &Scope<'_>,
        entries: &[Entry<'_>],
        outer: &Common,
    ) -> Result<(), TemplateError> {
        for entry in entries {
            let common = outer.with(scope, entry)?;
            match entry {
                Entry::Variant { name, library, ptx, .. } => {
                    let Some(variant) = common.variant(name, library.clone(), ptx.clone()) else {
                        continue;
                    };
                    if self.found.iter().any(|v| v.name == *name) {
                        let message = format!("{} has a variant `{name}` already", self.template);
                        return Err(scope.source.at(name, message).into());
                    }
                    self.found.push(variant);
                }
                Entry::Group { variants, .. } => self.entries(scope, variants, &common)?,
                Entry::List { name, given } => self.list(scope, name, given, &common)?,
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        scope: &Scope<'_>,
        name: &str,
        given: &Entries<'_, &str>,
        outer: &Common,
    ) -> Result<(), TemplateError> {
        let at = |message: String| scope.source.at(name, message);
        self.lists += 1;
        if self.lists > MOST_LISTS {
            return Err(at(format!("more than {MOST_LISTS} lists of variants are read")).into());
        }
        let Some((path, text)) = self.library.variants(name, &scope.source.file)? else {
            let hint = nearest(name, self.library.lists().iter().map(String::as_str));
            let message = format!(
                "there is no list of variants `{name}`{hint}: expected kernels/templates/variants/{name}.ron"
            );
            return Err(at(message).into());
        };
        if scope.files().any(|file| file == path) {
            let way: Vec<&str> = scope.files().collect();
            let way = way.into_iter().rev().chain([path.as_str()]).collect::<Vec<_>>().join(", ");
            return Err(at(format!("the list `{name}` names itself: {way}")).into());
        }
        let source = Source::new(&path, &text);
        let list: ListFile<'_> = read_ron(&source)?;
        let given = list.arguments(&source, scope, name, given)?;
        let scope = Scope { source: &source, given, within: Some(scope) };
        self.entries(&scope, &list.variants, outer)
    }
}

impl<'a> ListFile<'a> {
    /// What each name that the list takes stands for, where `scope` calls it `name` and gives it `given`.
    fn arguments(
        &self,
        source: &Source,
        scope: &Scope<'_>,
        name: &str,
        given: &Entries<'_, &str>,
    ) -> Result<BTreeMap<&'a str, Expr>, SourceError> {
        let file = &source.file;
        let unknown = |other: &str| {
            let hint = nearest(other, self.takes.iter().map(|(n, _)| n));
            format!("{file} takes no `{other}`{hint}")
        };
        if let Some((other, _)) = given.iter().find(|(n, _)| self.takes.get(n).is_none()) {
            return Err(scope.source.at(other, unknown(other)));
        }
        if let Some((other, _)) = self.defaults.iter().find(|(n, _)| self.takes.get(n).is_none()) {
            return Err(source.at(other, unknown(other)));
        }
        let mut all = BTreeMap::new();
        for (own, doc) in self.takes.iter() {
            if STEP.contains(&own) || EVERYWHERE.contains(&own) {
                let message = format!(
                    "`{own}` means something in every expression already: expected another name"
                );
                return Err(source.at(own, message));
            }
            let value = match (given.get(own), self.defaults.get(own)) {
                (Some(text), _) => scope.expression(text)?,
                (None, Some(text)) => source.expression(text)?,
                (None, None) => {
                    let message = format!("{file} takes `{own}`, which `given` lacks: {doc}");
                    return Err(scope.source.at(name, message));
                }
            };
            all.insert(own, value);
        }
        Ok(all)
    }
}

impl<'s> Scope<'s> {
    /// This file, the one that names it, and so on to the template.
    fn files(&'s self) -> impl Iterator<Item = &'s str> {
        std::iter::successors(Some(self), |scope| scope.within).map(|scope| &*scope.source.file)
    }

    /// Reads an expression, with what the file was given in the place of what it takes.
    fn expression(&self, text: &str) -> Result<Expr, SourceError> {
        let expr = self.source.expression(text)?;
        if self.given.is_empty() {
            return Ok(expr);
        }
        let expr = expr.substitute(&|name| self.given.get(name).cloned());
        if expr.to_string().len() > MOST_CHARACTERS {
            let message = format!(
                "with what the list takes, this has more than {MOST_CHARACTERS} characters"
            );
            return Err(self.source.at(text, message));
        }
        Ok(expr)
    }

    /// A condition, as far as it is known: `true || ..` is true.
    fn condition(&self, text: &str) -> Result<Expr, SourceError> {
        let folded = self.expression(text)?.fold(&|_| None);
        folded.map_err(|e| self.source.at(text, e.message))
    }
}

impl Common {
    /// This and what an entry says, which goes before; conditions and constants are added.
    fn with(&self, scope: &Scope<'_>, entry: &Entry<'_>) -> Result<Common, SourceError> {
        let (Entry::Variant {
            when,
            params,
            grid,
            block,
            shared,
            scratch,
            ahead,
            tiles,
            dealt,
            order,
            ..
        }
        | Entry::Group {
            when,
            params,
            grid,
            block,
            shared,
            scratch,
            ahead,
            tiles,
            dealt,
            order,
            ..
        }) = entry
        else {
            return Ok(self.clone());
        };
        let mut all = self.clone();
        all.order = order.map(str::to_owned).or(all.order);
        for text in when {
            all.when.push(scope.condition(text)?);
        }
        all.params.extend(params.iter().map(|(name, n)| (name.to_owned(), *n)));
        if let Some(grid) = grid {
            all.grid = Some(grid.iter().map(|e| scope.expression(e)).collect::<Result<_, _>>()?);
        }
        for (slot, text) in [
            (&mut all.block, block),
            (&mut all.shared, shared),
            (&mut all.scratch, scratch),
            (&mut all.ahead, ahead),
        ] {
            if let Some(text) = text {
                *slot = Some(scope.expression(text)?);
            }
        }
        all.dealt.extend(dealt.iter().map(|&name| name.to_owned()));
        for (name, rows) in tiles.iter() {
            all.tiles.insert(name.to_owned(), scope.expression(rows)?);
        }
        Ok(all)
    }

    /// The variant; `None` where a condition is false whatever the launch.
    fn variant(
        self,
        name: &str,
        library: Option<MatmulRoles>,
        ptx: Option<Foreign>,
    ) -> Option<Variant> {
        let known = |e: &Expr, is: bool| *e == Expr::Lit(Value::Bool(is));
        if self.when.iter().any(|e| known(e, false)) {
            return None;
        }
        let number = |n: f64| Expr::Lit(Value::Num(n));
        let (tiles, dealt) = (self.tiles.into_iter(), self.dealt);
        let tiles = tiles.map(|(operand, rows)| {
            let dealt = dealt.contains(&operand);
            Tiles { operand, rows, dealt }
        });
        let kind = match library {
            Some(roles) => Kind::Matmul(roles),
            None => Kind::Kernel {
                grid: self.grid.unwrap_or_default(),
                block: self.block.unwrap_or(number(256.0)),
                shared: self.shared.unwrap_or(number(0.0)),
                scratch: self.scratch.unwrap_or(number(0.0)),
                ahead: self.ahead,
                ptx,
                tiles: tiles.collect(),
            },
        };
        let when = self.when.into_iter().filter(|e| !known(e, true)).collect();
        Some(Variant { name: name.to_owned(), when, params: self.params, kind, order: self.order })
    }
}

#[cfg(test)]
mod tests;
