//! Grammars in GBNF, llama.cpp's form of EBNF (<https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>), which
//! clients of vLLM send, too: written anew in llguidance's Lark.
//!
//! Characters of a class are lexemes by themselves and literals are whole, so that what comes next never turns on how long a
//! lexeme might have become. All texts are the grammar's. Where a literal and a class begin alike, llguidance's lexer goes on with
//! the literal as long as it can, so that a text such as `abd`, of `([a-z] | "abc")*`, may never be written.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{GrammarError, refusal};

/// The rule that a text is.
const ROOT: &str = "root";

/// Whether a grammar is in GBNF: whether a rule is defined as there. In Lark `::=` can stand in texts only.
pub(crate) fn is_gbnf(text: &str) -> bool {
    let mut names = text.lines().filter_map(|line| Some(line.split_once("::=")?.0.trim()));
    names.any(|name| !name.is_empty() && name.chars().all(is_of_name))
}

/// The same grammar in Lark.
pub(crate) fn lark(text: &str) -> Result<String, GrammarError> {
    let tokens = Scanner { rest: text, line: 1 }.tokens()?;
    let begins_rule = |i: usize| {
        matches!(tokens.get(i), Some((Token::Name(_), _)))
            && matches!(tokens.get(i + 1), Some((Token::Defines, _)))
    };
    let mut rules = HashMap::new();
    for i in (0..tokens.len()).filter(|i| begins_rule(*i)) {
        let (Token::Name(name), line) = tokens[i] else { continue };
        let number = rules.len();
        if rules.insert(name, number).is_some() {
            return Err(wrong(line, &format!("rule `{name}` is defined a second time")));
        }
    }
    let Some(root) = rules.get(ROOT) else {
        return Err(refusal("expected a rule `root`, which is what a text is"));
    };
    if !begins_rule(0) {
        return Err(wrong(1, "expected a rule: a name and `::=`"));
    }
    let mut lark = format!("start: r{root}");
    for (i, (token, line)) in tokens.iter().enumerate() {
        let name = |name: &str| {
            let found = rules.get(name);
            found.ok_or_else(|| wrong(*line, &format!("rule `{name}` is defined nowhere")))
        };
        // Writing to a string does not fail.
        _ = match token {
            Token::Name(rule) if begins_rule(i) => write!(lark, "\nr{}:", name(rule)?),
            Token::Defines if i > 0 && begins_rule(i - 1) => Ok(()),
            Token::Defines => return Err(wrong(*line, "expected a name before `::=`")),
            Token::Name(rule) => write!(lark, " r{}", name(rule)?),
            // Lark's texts are JSON's.
            Token::Literal(text) => write!(lark, " {}", serde_json::Value::from(text.as_str())),
            Token::Class(regex) => write!(lark, " /{regex}/"),
            Token::Mark(mark) => write!(lark, " {mark}"),
            Token::Repeat(repeat) => write!(lark, "{repeat}"),
        };
    }
    Ok(lark + "\n")
}

enum Token<'a> {
    Name(&'a str),
    /// `::=`
    Defines,
    Literal(String),
    /// A regular expression of one character.
    Class(String),
    /// `|`, `(` or `)`.
    Mark(char),
    /// How often what stands before may come, as it is written.
    Repeat(&'a str),
}

struct Scanner<'a> {
    rest: &'a str,
    line: usize,
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

fn wrong(line: usize, message: &str) -> GrammarError {
    GrammarError::Refused(format!("line {line}: {message}"))
}

impl<'a> Scanner<'a> {
    /// All tokens, and the lines that they begin in. Where lines end says nothing.
    fn tokens(mut self) -> Result<Vec<(Token<'a>, usize)>, GrammarError> {
        let mut all = Vec::new();
        while let Some(c) = self.rest.chars().next() {
            let (line, whole) = (self.line, self.rest);
            let token = match c {
                '#' => {
                    self.take(whole.find('\n').unwrap_or(whole.len()));
                    continue;
                }
                c if c.is_whitespace() => {
                    self.take(c.len_utf8());
                    continue;
                }
                ':' if whole.starts_with("::=") => {
                    self.take(3);
                    Token::Defines
                }
                '"' => Token::Literal(self.literal()?),
                '[' => Token::Class(self.class()?),
                '.' => {
                    self.take(1);
                    Token::Class("(?s:.)".to_owned())
                }
                '|' | '(' | ')' => {
                    self.take(1);
                    Token::Mark(c)
                }
                '*' | '+' | '?' => Token::Repeat(self.take(1)),
                '{' => {
                    let end = whole.find('}').ok_or_else(|| wrong(line, "`{` has no `}`"))?;
                    let repeat = self.take(end + 1);
                    let is_count = |c: char| c.is_ascii_digit() || c == ',' || c == ' ';
                    if !repeat[1..end].chars().all(is_count) {
                        return Err(wrong(line, "expected numbers between `{` and `}`"));
                    }
                    Token::Repeat(repeat)
                }
                c if is_of_name(c) => {
                    let end = whole.find(|c| !is_of_name(c)).unwrap_or(whole.len());
                    Token::Name(self.take(end))
                }
                c => return Err(wrong(line, &format!("`{c}` is not part of a grammar"))),
            };
            all.push((token, line));
        }
        Ok(all)
    }

    /// Goes on behind so many bytes, and gives them.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        let line = self.line;
        self.take(1);
        let mut text = String::new();
        loop {
            match self.character(line, "a text has no end")? {
                ('"', false) => return Ok(text),
                (c, _) => text.push(c),
            }
        }
    }

    /// `[a-z]`, `[^"\\]`, ...: every character by its number, so that none means anything else.
    fn class(&mut self) -> Result<String, GrammarError> {
        let (line, ends) = (self.line, "a class of characters has no end");
        self.take(1);
        let mut regex = "[".to_owned();
        if self.rest.starts_with('^') {
            regex.push_str(self.take(1));
        }
        let start = regex.len();
        loop {
            let (from, is_escaped) = self.character(line, ends)?;
            if from == ']' && !is_escaped {
                let is_empty = regex.len() == start;
                regex.push(']');
                return if is_empty {
                    Err(wrong(line, "a class has no characters"))
                } else {
                    Ok(regex)
                };
            }
            _ = write!(regex, r"\x{{{:x}}}", u32::from(from));
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.take(1);
                let (to, _) = self.character(line, ends)?;
                if to < from {
                    return Err(wrong(line, &format!("`{from}-{to}` has no characters")));
                }
                _ = write!(regex, r"-\x{{{:x}}}", u32::from(to));
            }
        }
    }

    /// A character of a text or a class, and whether `\` stood before it.
    fn character(&mut self, line: usize, ends: &str) -> Result<(char, bool), GrammarError> {
        let next = |s: &mut Self| {
            let c = s.rest.chars().next().ok_or_else(|| wrong(line, ends))?;
            s.take(c.len_utf8());
            Ok(c)
        };
        match next(self)? {
            '\\' => {}
            c => return Ok((c, false)),
        }
        let digits = match next(self)? {
            'n' => return Ok(('\n', true)),
            'r' => return Ok(('\r', true)),
            't' => return Ok(('\t', true)),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/' | '.') => return Ok((c, true)),
            c => return Err(wrong(line, &format!("`\\{c}` is not known"))),
        };
        let number = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let c = number.and_then(char::from_u32);
        let c = c.ok_or_else(|| {
            wrong(line, &format!("expected a character's number of {digits} hexadecimal digits"))
        })?;
        self.take(digits);
        Ok((c, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gbnf_is_told_from_lark() {
        for gbnf in ["root ::= \"a\"", "\n  root::=x\nx ::= \"b\"", "# c\nroot ::=\n  x"] {
            assert!(is_gbnf(gbnf), "{gbnf}");
        }
        for lark in ["start: \"a ::= b\"", "start: /::=/", "", "::= x"] {
            assert!(!is_gbnf(lark), "{lark}");
        }
    }

    #[test]
    fn rules_are_written_anew() {
        let text = r#"# sums
root ::= (Term "=" num
  | "\"\x41\u00e9") ws{2,3}
Term ::= num ([-+*/] num)*
num ::= [^0-9\]-] | .?
ws ::= [ \t\n]"#;
        let expected = r#"start: r0
r0: ( r1 "=" r2 | "\"Aé" ) r3{2,3}
r1: r2 ( /[\x{2d}\x{2b}\x{2a}\x{2f}]/ r2 )*
r2: /[^\x{30}-\x{39}\x{5d}\x{2d}]/ | /(?s:.)/?
r3: /[\x{20}\x{9}\x{a}]/
"#;
        assert_eq!(lark(text).expect("a grammar"), expected);
    }

    #[test]
    fn mistakes_are_named_with_their_lines() {
        let cases = [
            ("root ::= x", "line 1: rule `x` is defined nowhere"),
            ("a ::= \"x\"", "expected a rule `root`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: rule `root` is defined a second time"),
            ("root ::=\n \"a", "line 2: a text has no end"),
            ("root ::= [a", "line 1: a class of characters has no end"),
            ("root ::= []", "line 1: a class has no characters"),
            ("root ::= [z-a]", "line 1: `z-a` has no characters"),
            ("root ::= \"\\q\"", "line 1: `\\q` is not known"),
            ("root ::= \"\\ud800\"", "line 1: expected a character's number"),
            ("root ::= \"a\"{x}", "line 1: expected numbers"),
            ("root ::= \"a\"{2", "line 1: `{` has no `}`"),
            ("root ::= \"a\" ::= \"b\"", "line 1: expected a name before `::=`"),
            ("\"a\" root ::= \"b\"", "line 1: expected a rule"),
            ("root ::= \"a\" ; \"b\"", "line 1: `;` is not part of a grammar"),
        ];
        for (text, expected) in cases {
            let error = lark(text).expect_err(text).to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
}
