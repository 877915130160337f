//! Text to [`Expr`], by precedence climbing.

use std::str::FromStr;

use super::{BinaryOp, Expr, ExprError, Func, UnaryOp, Value};
use crate::names::nearest;

/// Expressions are a line of text: larger ones are refused, which also bounds recursion.
const MAX_NODES: usize = 256;
const MAX_DEPTH: usize = 64;

struct Parser<'a> {
    text: &'a str,
    at: usize,
    nodes: usize,
    depth: usize,
}

impl FromStr for Expr {
    type Err = ExprError;

    fn from_str(text: &str) -> Result<Expr, ExprError> {
        let mut p = Parser { text, at: 0, nodes: 0, depth: 0 };
        let e = p.expr()?;
        p.space();
        if p.at < text.len() {
            return Err(p.expected("an operator or the end"));
        }
        Ok(e)
    }
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn expected(&self, what: &str) -> ExprError {
        let found = match self.rest().chars().next() {
            Some(c) => format!("`{c}`"),
            None => "the end".to_owned(),
        };
        ExprError::new(self.at, format!("expected {what}, found {found}"))
    }

    fn eat(&mut self, token: &str) -> bool {
        self.space();
        let hit = self.rest().starts_with(token);
        if hit {
            self.at += token.len();
        }
        hit
    }

    fn want(&mut self, token: &str) -> Result<(), ExprError> {
        if self.eat(token) { Ok(()) } else { Err(self.expected(&format!("`{token}`"))) }
    }

    fn node(&mut self, e: Expr) -> Result<Expr, ExprError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(ExprError::new(
                self.at,
                format!("expression has more than {MAX_NODES} parts"),
            ));
        }
        Ok(e)
    }

    fn expr(&mut self) -> Result<Expr, ExprError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ExprError::new(self.at, format!("nested deeper than {MAX_DEPTH}")));
        }
        let c = self.binary(1)?;
        self.space();
        let e = if !self.rest().starts_with("??") && self.eat("?") {
            let a = self.expr()?;
            self.want(":")?;
            let b = self.expr()?;
            self.node(Expr::Cond(Box::new(c), Box::new(a), Box::new(b)))?
        } else {
            c
        };
        self.depth -= 1;
        Ok(e)
    }

    fn operator(&mut self, min: u8) -> Option<BinaryOp> {
        self.space();
        let row = BinaryOp::TABLE.iter().find(|row| self.rest().starts_with(row.2))?;
        if row.1 < min || row.0 == BinaryOp::Pow {
            return None;
        }
        self.at += row.2.len();
        Some(row.0)
    }

    fn binary(&mut self, min: u8) -> Result<Expr, ExprError> {
        let mut left = self.unary()?;
        while let Some(op) = self.operator(min) {
            let right = self.binary(op.strength() + 1)?;
            left = self.node(Expr::Binary(op, Box::new(left), Box::new(right)))?;
            if op.strength() == BinaryOp::COMPARISON {
                // `a < b < c` is not a comparison of numbers: let the caller report the rest.
                return self.binary_rest(left, min);
            }
        }
        Ok(left)
    }

    fn binary_rest(&mut self, mut left: Expr, min: u8) -> Result<Expr, ExprError> {
        let before = self.at;
        while let Some(op) = self.operator(min) {
            if op.strength() >= BinaryOp::COMPARISON {
                self.at = before;
                return Err(self.expected("`&&`, `||` or the end (comparisons do not chain)"));
            }
            let right = self.binary(op.strength() + 1)?;
            left = self.node(Expr::Binary(op, Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Expr, ExprError> {
        self.space();
        let op = match self.rest().as_bytes() {
            [b'-', ..] => UnaryOp::Neg,
            [b'!', next, ..] if *next != b'=' => UnaryOp::Not,
            _ => return self.power(),
        };
        self.at += 1;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ExprError::new(self.at, format!("nested deeper than {MAX_DEPTH}")));
        }
        let a = self.unary()?;
        self.depth -= 1;
        match (op, a) {
            // So that a printed negative literal reads back as itself.
            (UnaryOp::Neg, Expr::Lit(Value::Num(n))) if !n.is_sign_negative() => {
                Ok(Expr::Lit(Value::Num(-n)))
            }
            (op, a) => self.node(Expr::Unary(op, Box::new(a))),
        }
    }

    fn power(&mut self) -> Result<Expr, ExprError> {
        let base = self.postfix()?;
        if self.eat("**") {
            let exponent = self.unary()?;
            return self.node(Expr::Binary(BinaryOp::Pow, Box::new(base), Box::new(exponent)));
        }
        Ok(base)
    }

    fn postfix(&mut self) -> Result<Expr, ExprError> {
        let mut e = self.atom()?;
        loop {
            if self.eat("[") {
                let i = self.expr()?;
                self.want("]")?;
                e = self.node(Expr::Index(Box::new(e), Box::new(i)))?;
            } else if self.rest().starts_with('.') {
                self.at += 1;
                let key = self.name().ok_or_else(|| self.expected("a key"))?;
                e = self.node(Expr::Member(Box::new(e), key.to_owned()))?;
            } else {
                return Ok(e);
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let end =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if end == 0 || rest.as_bytes()[0].is_ascii_digit() {
            return None;
        }
        self.at += end;
        Some(&rest[..end])
    }

    fn atom(&mut self) -> Result<Expr, ExprError> {
        self.space();
        let start = self.at;
        if let Some(name) = self.name() {
            let lit = match name {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                "null" => Value::Null,
                _ if self.eat("(") => return self.call(name, start),
                _ => return self.node(Expr::Var(name.to_owned())),
            };
            return self.node(Expr::Lit(lit));
        }
        match self.rest().as_bytes().first() {
            Some(b'(') => {
                self.at += 1;
                let e = self.expr()?;
                self.want(")")?;
                Ok(e)
            }
            Some(b'[') => {
                self.at += 1;
                let values = self.literals(start)?;
                self.node(Expr::Lit(Value::List(values)))
            }
            Some(b'\'') => self.text_literal(),
            Some(b'0'..=b'9' | b'.') => self.number(),
            _ => Err(self.expected("a number, a name, 'text' or `(`")),
        }
    }

    /// The rest of a list. Its items count as one part of the expression: a config's list may be
    /// substituted for a name, and what is printed must read back.
    fn literals(&mut self, start: usize) -> Result<Vec<Value>, ExprError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ExprError::new(self.at, format!("nested deeper than {MAX_DEPTH}")));
        }
        let nodes = self.nodes;
        let mut values = Vec::new();
        while !self.eat("]") {
            if !values.is_empty() {
                self.want(",")?;
            }
            match self.unary()? {
                Expr::Lit(v) => values.push(v),
                _ => return Err(ExprError::new(start, "a list may hold literals only")),
            }
            self.nodes = nodes;
        }
        self.depth -= 1;
        Ok(values)
    }

    fn list(&mut self, close: &str) -> Result<Vec<Expr>, ExprError> {
        let mut items = Vec::new();
        while !self.eat(close) {
            if !items.is_empty() {
                self.want(",")?;
            }
            items.push(self.expr()?);
        }
        Ok(items)
    }

    fn call(&mut self, name: &str, start: usize) -> Result<Expr, ExprError> {
        let Some(&(_, func, arity)) = Func::TABLE.iter().find(|row| row.0 == name) else {
            let hint = nearest(name, Func::TABLE.iter().map(|row| row.0));
            return Err(ExprError::new(start, format!("unknown function `{name}`{hint}")));
        };
        let args = self.list(")")?;
        if args.len() != arity {
            let message = format!("`{name}` takes {arity} argument(s), found {}", args.len());
            return Err(ExprError::new(start, message));
        }
        self.node(Expr::Call(func, args))
    }

    fn text_literal(&mut self) -> Result<Expr, ExprError> {
        let start = self.at;
        let mut out = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((i, c)) = chars.next() {
            match c {
                '\'' => {
                    self.at += i + 1;
                    return self.node(Expr::Lit(Value::Str(out)));
                }
                '\\' => out.extend(chars.next().map(|(_, c)| c)),
                c => out.push(c),
            }
        }
        Err(ExprError::new(start, "text is not closed: expected `'`"))
    }

    fn number(&mut self) -> Result<Expr, ExprError> {
        let rest = self.rest().as_bytes();
        let mut end = 0;
        while end < rest.len() {
            let exponent_sign =
                matches!(rest[end], b'+' | b'-') && end > 0 && matches!(rest[end - 1], b'e' | b'E');
            if !(rest[end].is_ascii_digit()
                || matches!(rest[end], b'.' | b'e' | b'E')
                || exponent_sign)
            {
                break;
            }
            end += 1;
        }
        let text = &self.rest()[..end];
        let n: f64 = text
            .parse()
            .ok()
            .filter(|n: &f64| n.is_finite())
            .ok_or_else(|| ExprError::new(self.at, format!("`{text}` is not a number")))?;
        self.at += end;
        self.node(Expr::Lit(Value::Num(n)))
    }
}
