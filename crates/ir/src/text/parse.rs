//! Text to IR. Statements are lines, so every error has a line and a column.

use std::collections::HashMap;
use std::sync::Arc;

use super::escape::escape;
use crate::attr::{Attr, AttrDef, AttrKind};
use crate::diag::SourceError;
use crate::encoding::quantised_rows::{quantised_heads, quantised_rows};
use crate::graph::{
    CallSite, Graph, Loc, Module, Node, NodeKind, Param, StepInput, ValueId, WeightRef,
};
use crate::names::{MAX_NAME, is_name_char, nearest};
use crate::{DType, Dim, Encoding, Op, OpSet, StateKind, StateType, Sym, TensorType, Type};

/// Layers a schedule may name: more is a mistake, not a model.
const MAX_LAYERS: u64 = 10_000;

/// Dimensions a shape may have. Error messages repeat types, so this bounds them.
const MAX_RANK: usize = 8;

/// Reads a module of primitives. The text need not be well typed: the verifier is what checks that.
pub fn parse(text: &str, file: &str) -> Result<Module, SourceError> {
    parse_with(text, file, &OpSet::default())
}

/// Reads a module that may use the ops of `ops`.
pub fn parse_with(text: &str, file: &str, ops: &OpSet) -> Result<Module, SourceError> {
    let mut p = Parser { text, at: 0, end: 0, ops };
    let error = |e: Error| SourceError::new(file, text, e.at..e.at + 1, e.message);
    let mut module = Module { name: String::new(), graphs: Vec::new(), schedule: Vec::new() };
    p.module(&mut module).map_err(error)?;
    Ok(module)
}

struct Error {
    at: usize,
    message: String,
}

type Res<T> = Result<T, Error>;

/// A cursor over the current line, `at..end`.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    end: usize,
    ops: &'a OpSet,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..self.end]
    }

    fn fail<T>(&self, message: impl Into<String>) -> Res<T> {
        Err(Error { at: self.at, message: message.into() })
    }

    fn expected<T>(&self, what: &str) -> Res<T> {
        match self.rest().chars().next() {
            Some(c) => self.fail(format!("expected {what}, found `{c}`")),
            None => self.fail(format!("expected {what}, found the end of the line")),
        }
    }

    /// Moves to the next line that says something; false at the end of the text.
    fn next_line(&mut self) -> bool {
        let mut start = self.end;
        while start < self.text.len() {
            if self.text.as_bytes()[start] == b'\n' {
                start += 1;
                continue;
            }
            let end = self.text[start..].find('\n').map_or(self.text.len(), |n| start + n);
            (self.at, self.end) = (start, end);
            self.space();
            if !self.rest().is_empty() && !self.rest().starts_with("//") {
                return true;
            }
            start = end;
        }
        (self.at, self.end) = (self.text.len(), self.text.len());
        false
    }

    fn space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.space();
        let hit = self.rest().starts_with(token);
        if hit {
            self.at += token.len();
        }
        hit
    }

    fn want(&mut self, token: &str) -> Res<()> {
        if self.eat(token) { Ok(()) } else { self.expected(&format!("`{token}`")) }
    }

    fn line_end(&mut self) -> Res<()> {
        self.space();
        if self.rest().is_empty() { Ok(()) } else { self.expected("the end of the line") }
    }

    /// [`Parser::eat`] for a whole word: `return` is not the start of `returned`.
    fn eat_word(&mut self, word: &str) -> bool {
        self.space();
        let after = self.rest().strip_prefix(word);
        let hit = after.is_some_and(|rest| !rest.starts_with(is_name_char));
        if hit {
            self.at += word.len();
        }
        hit
    }

    fn word(&mut self, what: &str) -> Res<&'a str> {
        self.space();
        let rest = self.rest();
        let len = rest.find(|c| !is_name_char(c)).unwrap_or(rest.len());
        if len == 0 {
            return self.expected(what);
        }
        if len > MAX_NAME {
            return self.fail(format!("expected {what}, of at most {MAX_NAME} bytes, found {len}"));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Res<T> {
        self.space();
        let rest = self.rest();
        let is_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | 'e' | 'E');
        let len = rest.find(|c| !is_number(c)).unwrap_or(rest.len());
        match rest[..len].parse() {
            Ok(n) => {
                self.at += len;
                Ok(n)
            }
            Err(_) => self.expected(what),
        }
    }

    /// A Rust-style quoted string.
    fn quoted(&mut self) -> Res<String> {
        self.want("\"")?;
        let mut out = String::new();
        let mut chars = self.rest().char_indices();
        while let Some((i, c)) = chars.next() {
            match c {
                '"' => {
                    self.at += i + 1;
                    return Ok(out);
                }
                '\\' => {
                    let Some(c) = escape(&mut chars) else {
                        self.at += i;
                        return self.fail("not an escape that Rust text has");
                    };
                    out.push(c);
                }
                c => out.push(c),
            }
        }
        self.fail("text is not closed: expected `\"`")
    }

    fn module(&mut self, module: &mut Module) -> Res<()> {
        self.next_line();
        if !self.eat_word("module") {
            return self.expected("`module` and its name");
        }
        self.word("the module's name")?.clone_into(&mut module.name);
        self.line_end()?;
        let mut scheduled = false;
        while self.next_line() {
            let start = self.at;
            if self.eat_word("graph") {
                self.space();
                let at = self.at;
                let name = self.word("the graph's name")?;
                if module.graph(name).is_some() {
                    let message = format!("there are two graphs `{name}`");
                    return Err(Error { at, message });
                }
                module.graphs.push(self.graph(name)?);
            } else if self.eat_word("schedule") {
                if scheduled {
                    let message = "there are two schedules".to_owned();
                    return Err(Error { at: start, message });
                }
                scheduled = true;
                self.schedule(module)?;
            } else {
                return self.expected("`graph` or `schedule`");
            }
        }
        Ok(())
    }

    fn schedule(&mut self, module: &mut Module) -> Res<()> {
        self.space();
        while !self.rest().is_empty() {
            if !module.schedule.is_empty() {
                self.want(",")?;
            }
            self.space();
            let at = self.at;
            let name = self.word("a graph's name")?;
            let Some(graph) = module.graphs.iter().position(|g| g.name == name) else {
                let hint = nearest(name, module.graphs.iter().map(|g| g.name.as_str()));
                let message = format!("there is no graph `{name}` above{hint}");
                return Err(Error { at, message });
            };
            self.space();
            if self.rest().starts_with(|c: char| c.is_ascii_digit()) {
                let (first, end) = self.range()?;
                if end > MAX_LAYERS || first >= end {
                    return self.fail(format!("{first}..{end} is not a range of layers"));
                }
                let layers = (first..end).map(|l| CallSite { graph, layer: Some(l as u32) });
                module.schedule.extend(layers);
                if module.schedule.len() as u64 > MAX_LAYERS {
                    return self.fail("the schedule has too many layers");
                }
            } else {
                module.schedule.push(CallSite { graph, layer: None });
            }
            self.space();
        }
        Ok(())
    }

    fn range(&mut self) -> Res<(u64, u64)> {
        let digits = |p: &mut Self| {
            let rest = p.rest();
            let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            p.at += len;
            rest[..len].parse::<u64>().ok()
        };
        let first = digits(self);
        self.want("..")?;
        match (first, digits(self)) {
            (Some(a), Some(b)) => Ok((a, b)),
            _ => self.expected("a range of layers such as 0..4"),
        }
    }

    fn graph(&mut self, name: &str) -> Res<Graph> {
        let mut graph = Graph::new(name);
        self.want("{")?;
        self.line_end()?;
        let mut names: HashMap<&'a str, ValueId> = HashMap::new();
        let mut returned = false;
        loop {
            if !self.next_line() {
                return self.fail("the graph is not closed: expected `}`");
            }
            if self.eat("}") {
                self.line_end()?;
                return Ok(graph);
            }
            let start = self.at;
            if self.eat_word("return") {
                if returned {
                    let message = "the graph returns twice".to_owned();
                    return Err(Error { at: start, message });
                }
                returned = true;
                let results = self.return_values(&names)?;
                graph.set_results(results);
            } else {
                self.statement(&mut graph, &mut names)?;
            }
        }
    }

    fn return_values(&mut self, names: &HashMap<&'a str, ValueId>) -> Res<Vec<ValueId>> {
        let mut results = Vec::new();
        self.space();
        while !self.rest().is_empty() {
            if !results.is_empty() {
                self.want(",")?;
            }
            results.push(self.value(names)?);
            self.space();
        }
        Ok(results)
    }

    fn value(&mut self, names: &HashMap<&'a str, ValueId>) -> Res<ValueId> {
        self.want("%")?;
        let start = self.at;
        let name = self.word("a value's name")?;
        names.get(name).copied().ok_or_else(|| Error {
            at: start,
            message: format!("unknown value `%{name}`{}", nearest(name, names.keys().copied())),
        })
    }

    fn statement(&mut self, graph: &mut Graph, names: &mut HashMap<&'a str, ValueId>) -> Res<()> {
        let mut defined = Vec::new();
        loop {
            self.want("%")?;
            defined.push((self.at, self.word("a value's name")?));
            if !self.eat(",") {
                break;
            }
        }
        self.want("=")?;
        let (kind, operands) = self.node_kind(names)?;
        self.want(":")?;
        let mut types = vec![self.ty()?];
        while self.eat(",") {
            types.push(self.ty()?);
        }
        if types.len() != defined.len() {
            let (types, defined) = (types.len(), defined.len());
            return self.fail(format!("expected {defined} type(s), one a name, found {types}"));
        }
        let loc = if self.eat("@") { Some(self.loc()?) } else { None };
        self.line_end()?;
        let node = Node {
            kind,
            names: defined.iter().map(|(_, n)| (*n).to_owned()).collect(),
            types,
            loc,
        };
        let first = graph.add_node(node, &operands);
        for (result, (at, name)) in defined.into_iter().enumerate() {
            if names.insert(name, ValueId { node: first.node, result }).is_some() {
                return Err(Error { at, message: format!("`%{name}` is defined twice") });
            }
        }
        Ok(())
    }

    fn node_kind(
        &mut self,
        names: &HashMap<&'a str, ValueId>,
    ) -> Res<(NodeKind, Vec<Option<ValueId>>)> {
        self.space();
        let start = self.at;
        let word = self.word("an op, or weight, bank, carry, state, step")?;
        self.space();
        if self.rest().starts_with('(') {
            let op = self.ops.find(word).map_err(|message| Error { at: start, message })?;
            let operands = self.operands(names)?;
            if operands.len() != op.operands.len() {
                let (want, found) = (op.operands.len(), operands.len());
                let message = format!(
                    "`{}` takes {want} operand(s), found {found} (`_` stands for one left out)",
                    op.name
                );
                return Err(Error { at: start, message });
            }
            let attrs = self.attrs(op)?;
            return Ok((NodeKind::Op { op, attrs }, operands));
        }
        let param = match word {
            "carry" => Param::Carry(self.number("the carried value's index")?),
            "state" => {
                let plane = self.word("the plane's name")?.to_owned();
                match self.eat_word("of") {
                    false => Param::State(plane),
                    true if self.eat_word("layer") => {
                        Param::Shared { plane, layer: self.number("the layer's number")? }
                    }
                    true => return self.fail("expected `of layer` and the layer's number"),
                }
            }
            "step" => {
                self.space();
                let at = self.at;
                let name = self.word("a step input")?;
                let found = StepInput::ALL.iter().find(|(_, n)| *n == name);
                let Some((input, _)) = found else {
                    let hint = nearest(name, StepInput::ALL.iter().map(|(_, n)| *n));
                    let message = format!("unknown step input `{name}`{hint}");
                    return Err(Error { at, message });
                };
                Param::Step(*input)
            }
            "weight" => {
                let name = self.quoted()?;
                let stack =
                    if self.eat_word("stack") { Some(self.number("a count")?) } else { None };
                Param::Weight(WeightRef { name, stack })
            }
            "bank" => Param::Bank(self.quoted()?),
            _ => return self.expected(&format!("`(` after the op `{word}`")),
        };
        Ok((NodeKind::Param(param), Vec::new()))
    }

    fn operands(&mut self, names: &HashMap<&'a str, ValueId>) -> Res<Vec<Option<ValueId>>> {
        self.want("(")?;
        let mut operands = Vec::new();
        while !self.eat(")") {
            if !operands.is_empty() {
                self.want(",")?;
            }
            operands.push(if self.eat("_") { None } else { Some(self.value(names)?) });
        }
        Ok(operands)
    }

    fn attrs(&mut self, op: Op) -> Res<Vec<Attr>> {
        let mut attrs = Vec::new();
        if op.attrs.is_empty() {
            return Ok(attrs);
        }
        self.want("{")?;
        for (i, def) in op.attrs.iter().enumerate() {
            if i > 0 {
                self.want(",")?;
            }
            if !self.eat_word(def.name) {
                return self.expected(&format!("attribute `{}` of `{}`", def.name, op.name));
            }
            self.want(":")?;
            attrs.push(self.attr(def)?);
        }
        self.want("}")?;
        Ok(attrs)
    }

    fn attr(&mut self, def: &AttrDef) -> Res<Attr> {
        self.space();
        if def.default_value() == Some(Attr::None) && self.eat_word("none") {
            return Ok(Attr::None);
        }
        Ok(match def.kind {
            AttrKind::Int => Attr::Int(self.number("an integer")?),
            AttrKind::Float => {
                let at = self.at;
                let x: f64 = self.number("a number")?;
                if !x.is_finite() {
                    return Err(Error { at, message: "expected a finite number".to_owned() });
                }
                Attr::Float(x)
            }
            AttrKind::Bool if self.eat_word("true") => Attr::Bool(true),
            AttrKind::Bool if self.eat_word("false") => Attr::Bool(false),
            AttrKind::Bool => return self.expected("true or false"),
            AttrKind::Enum(_) => Attr::Enum(self.word("a name")?.to_owned()),
            AttrKind::DType => Attr::DType(self.dtype()?),
            AttrKind::Dims => Attr::Dims(self.shape()?),
            AttrKind::Recurrence => Attr::Recurrence(self.quoted_as()?),
            AttrKind::Expr => Attr::Expr(self.quoted_as()?),
        })
    }

    /// What the text in quotes says.
    fn quoted_as<T: std::str::FromStr<Err = crate::expr::ExprError>>(&mut self) -> Res<T> {
        let start = self.at;
        let parsed: Result<T, _> = self.quoted()?.parse();
        // Escapes shift the offset: an error may point a little early.
        let at = |e: usize| (start + 1 + e).min(self.at - 1);
        parsed.map_err(|e| Error { at: at(e.at), message: e.message })
    }

    fn dtype(&mut self) -> Res<DType> {
        self.space();
        let at = self.at;
        self.word("an element type")?.parse().map_err(|message| Error { at, message })
    }

    fn shape(&mut self) -> Res<Vec<Dim>> {
        self.want("[")?;
        let mut dims = Vec::new();
        while !self.eat("]") {
            if !dims.is_empty() {
                self.want(",")?;
            }
            if dims.len() == MAX_RANK {
                return self.fail(format!("expected at most {MAX_RANK} dimensions"));
            }
            dims.push(self.dim()?);
        }
        Ok(dims)
    }

    fn dim(&mut self) -> Res<Dim> {
        self.space();
        if let Some(sym) = Sym::ALL.into_iter().find(|s| self.eat_word(s.name())) {
            let times = if self.eat("*") { self.number("a multiple")? } else { 1 };
            if times == 0 {
                return self.fail("a symbol's multiple is at least 1");
            }
            return Ok(Dim::Sym { sym, times });
        }
        Ok(Dim::Const(self.number("a dimension: a number, T, B or S")?))
    }

    /// What a state keeps: `ring(window)`, `slot`, or nothing where it keeps all rows.
    fn state_kind(&mut self) -> Res<StateKind> {
        if self.eat_word("slot") {
            return Ok(StateKind::Slot);
        }
        if !self.eat_word("ring") {
            return Ok(StateKind::Paged);
        }
        let open = self.eat("(");
        let window = self.number("the rows that a ring keeps, as `ring(4096)`")?;
        if !open || !self.eat(")") {
            return self
                .fail("expected the rows that a ring keeps in parentheses, as `ring(4096)`");
        }
        Ok(StateKind::Ring(window))
    }

    fn ty(&mut self) -> Res<Type> {
        if self.eat_word("state") {
            let kind = self.state_kind()?;
            self.space();
            let heads = quantised_heads();
            let encoding = self.eat_word(heads.name()).then(|| heads.clone());
            self.space();
            let dtype = self.dtype()?;
            let shape: Option<Vec<u64>> = self.shape()?.into_iter().map(Dim::as_const).collect();
            return match shape {
                Some(shape) if shape.len() == 2 || kind == StateKind::Slot => {
                    Ok(StateType { kind, dtype, shape, encoding }.into())
                }
                _ if kind == StateKind::Slot => self.fail("a slot's dimensions are numbers"),
                _ => self.fail("a state's rows are [heads, dim]"),
            };
        }
        let constant = self.eat_word("const");
        self.space();
        let packed = self.eat_word("packed");
        self.space();
        let at = self.at;
        let word = self.word("an element type or an encoding")?;
        if !constant && word == quantised_rows().name() {
            self.space();
            let (dtype, encoding) = (self.dtype()?, Some(quantised_rows().clone()));
            return Ok(TensorType { dtype, shape: self.shape()?, constant, encoding }.into());
        }
        let (dtype, encoding) = match (word.parse(), self.ops.encoding(word)) {
            (Ok(dtype), _) => (dtype, None),
            // Its values are computed in f32.
            (Err(_), Some(encoding)) if packed => {
                let encoding = encoding.packed().map_err(|message| Error { at, message })?;
                (DType::F32, Some(encoding))
            }
            (Err(_), Some(encoding)) => (DType::F32, Some(encoding.clone())),
            (Err(message), None) => {
                let hint = nearest(word, self.ops.encodings().map(Encoding::name));
                let message = format!("{message}; and no encoding has that name{hint}");
                return Err(Error { at, message });
            }
        };
        Ok(TensorType { dtype, shape: self.shape()?, constant, encoding }.into())
    }

    /// `file:line:col`, to the end of the line; a file's name that is not plain text is quoted.
    fn loc(&mut self) -> Res<Loc> {
        self.space();
        if self.rest().starts_with('"') {
            let file = Arc::from(self.quoted()?);
            self.want(":")?;
            let line = self.number("a line")?;
            self.want(":")?;
            return Ok(Loc { file, line, col: self.number("a column")? });
        }
        let rest = self.rest().trim_end();
        let mut parts = rest.rsplitn(3, ':');
        let col = parts.next().and_then(|s| s.parse().ok());
        let line = parts.next().and_then(|s| s.parse().ok());
        match (parts.next(), line, col) {
            (Some(file), Some(line), Some(col)) if !file.is_empty() => {
                self.at = self.end;
                Ok(Loc { file: Arc::from(file), line, col })
            }
            _ => self.expected("file:line:column"),
        }
    }
}
