//! Tool calls as grammars: what a model of a dialect writes when it must call.

use std::fmt::Write;

use infernum_frontend_hf::dialect::{Calls, Channels, Dialect, Form, Kind, Tools};
use serde_json::{Map, Value, json};

use crate::{Grammar, GrammarError, Grammars, MOST_BYTES, refusal, schema};

/// Which calls are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Of these tools.
    pub tools: &'a Tools,
    /// One call or more, instead of one.
    pub several: bool,
    /// Whether the answer is reasoning at first: it is where the prompt has begun it, and is not where the prompt has
    /// ended it; `None` where nobody knows.
    pub reasoning: Option<bool>,
}

/// Text that may be anything, in Lark.
const ANY: &str = r"/(?s:.*)/";

impl Grammars {
    /// A grammar of answers that are calls, after reasoning where the dialect has any.
    pub fn calls(&self, dialect: &Dialect, wanted: Wanted<'_>) -> Result<Grammar, GrammarError> {
        let mut writer = Writer { grammars: self, rules: String::new(), count: 0 };
        let start = match (&dialect.channels, &dialect.calls) {
            (Some(channels), _) => writer.message(channels, wanted)?,
            (None, Some(calls)) => {
                let calls = writer.calls(calls, wanted)?;
                let thinks = dialect.reasoning.as_ref().filter(|_| wanted.reasoning != Some(false));
                let thought = thinks.map(|span| {
                    let thought = writer.until(&span.end);
                    let blank = r"/[ \n]{0,3}/";
                    let begin = self.literal(&span.begin);
                    if wanted.reasoning == Some(true) {
                        format!("{thought} {blank} ")
                    } else {
                        format!("({begin} {thought} {blank})? ")
                    }
                });
                thought.unwrap_or_default() + &calls
            }
            (None, None) => return Err(refusal("this model's chat template knows no calls")),
        };
        Ok(Grammar::Lark(format!("start: {start}\n{}", writer.rules)))
    }
}

struct Writer<'a> {
    grammars: &'a Grammars,
    rules: String,
    count: usize,
}

impl Writer<'_> {
    fn literal(&self, text: &str) -> String {
        self.grammars.literal(text)
    }

    /// The name of a new rule.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        let _ = writeln!(self.rules, "{name}{attributes}: {body}"); // a `String` takes all
        name
    }

    /// Any text up to a marker, and the marker.
    fn until(&mut self, marker: &str) -> String {
        let literal = self.literal(marker);
        if literal.contains("<[") {
            let text = self.rule("", ANY);
            return format!("{text} {literal}");
        }
        self.rule(&format!("[suffix={literal}]"), ANY)
    }

    /// JSON that a schema admits. Schemas stand once for each argument with all that they share, so that what is written is
    /// bounded here, and not when all of it is there.
    fn json(&mut self, of: &Value) -> Result<String, GrammarError> {
        let body = format!("%json {}", schema(of)?);
        if self.rules.len() + body.len() > MOST_BYTES {
            let message = format!("expected schemas of at most {MOST_BYTES} bytes in all");
            return Err(GrammarError::Refused(message));
        }
        Ok(self.rule("", &body))
    }

    /// One of several.
    fn either(&mut self, all: &[String]) -> String {
        self.rule("", &all.join(" | "))
    }

    fn message(&mut self, channels: &Channels, wanted: Wanted<'_>) -> Result<String, GrammarError> {
        let mut all = Vec::new();
        for (name, parameters) in &wanted.tools.0 {
            let header = self.literal(&(channels.call.replace("{name}", name) + &channels.body));
            all.push(format!("{header} {}", self.json(&object(parameters))?));
        }
        let end = channels.end.first().cloned().unwrap_or_default();
        let thought = self.until(&end);
        let open = self.literal(&(channels.thought.clone() + &channels.body));
        let next = self.literal(&format!("{}assistant", channels.start));
        Ok(format!("({open} {thought} {next})? {}", self.either(&all)))
    }

    fn calls(&mut self, calls: &Calls, wanted: Wanted<'_>) -> Result<String, GrammarError> {
        let first = |list: &[String]| list.first().cloned().unwrap_or_default();
        let (begin, end) = (first(&calls.begin), first(&calls.end));
        let list =
            matches!(calls.form, Form::Json { list: true, .. } | Form::Python { list: true });
        // A call without a marker is written without one.
        let begin = if calls.bare { String::new() } else { begin };
        let end = if calls.bare { String::new() } else { end };
        let (before, after) = if list { ("", "") } else { (begin.as_str(), end.as_str()) };
        let mut all = Vec::new();
        for (name, parameters) in &wanted.tools.0 {
            all.push(self.call(&calls.form, (before, after), name, parameters)?);
        }
        let one = self.either(&all);
        let between = self.literal(&calls.between);
        let several = if wanted.several { format!("{one} ({between} {one})*") } else { one };
        let whole = if list {
            let (open, close) = (self.literal(&(begin + "[")), self.literal(&format!("]{end}")));
            format!("{open} {several} {close}")
        } else {
            several
        };
        Ok(match &calls.section {
            None => whole,
            Some(span) => {
                format!("{} {whole} {}", self.literal(&span.begin), self.literal(&span.end))
            }
        })
    }

    fn call(
        &mut self,
        form: &Form,
        (before, after): (&str, &str),
        name: &str,
        parameters: &Value,
    ) -> Result<String, GrammarError> {
        Ok(match form {
            Form::Json { name: key, arguments, lead, .. } => {
                let arguments = arguments.first().map_or("arguments", String::as_str);
                let (name, args) = (Value::from(name), self.json(&object(parameters))?);
                let head = format!("{before}{{{lead}\"{key}\": {name}, \"{arguments}\": ");
                format!("{} {args} {}", self.literal(&head), self.literal(&format!("}}{after}")))
            }
            Form::Named { before: own, numbered, separator, .. } => {
                let separator = separator.first().map_or("", String::as_str);
                let args = self.json(&object(parameters))?;
                let (head, end) = (format!("{before}{own}{name}"), self.literal(after));
                if *numbered {
                    let head = self.literal(&format!("{head}:"));
                    format!("{head} /[0-9]{{1,2}}/ {} {args} {end}", self.literal(separator))
                } else {
                    format!("{} {args} {end}", self.literal(&(head + separator)))
                }
            }
            Form::Tagged { .. } => self.tagged(form, (before, after), name, parameters)?,
            Form::Python { .. } => {
                let args = self.python(parameters)?;
                let head = self.literal(&format!("{before}{name}("));
                format!("{head} {args} {}", self.literal(&format!("){after}")))
            }
        })
    }

    fn tagged(
        &mut self,
        form: &Form,
        (before, after): (&str, &str),
        name: &str,
        parameters: &Value,
    ) -> Result<String, GrammarError> {
        let Form::Tagged { after_name, key, value, value_end, close } = form else {
            return Err(refusal("not of tags"));
        };
        let first = |list: &[String]| list.first().cloned().unwrap_or_default();
        let mut body = self.literal(&format!("{before}{name}{}", first(after_name)));
        let end = first(value_end);
        for (argument, of, required) in properties(parameters) {
            let of = alone(parameters, of);
            let is_text = of.get("type").and_then(Value::as_str) == Some("string");
            let kind = if is_text { Kind::Text } else { Kind::Json };
            let marker = value.iter().find(|(_, k)| *k == kind || *k == Kind::Typed);
            let marker = marker.map_or("", |(text, _)| text.as_str());
            let head = self.literal(&format!("{}{argument}{marker}", first(key)));
            let choices = of.get("enum").and_then(Value::as_array).filter(|_| is_text);
            let written = match choices {
                Some(all) => {
                    let all: Vec<String> = all
                        .iter()
                        .filter_map(Value::as_str)
                        .map(|text| self.literal(text))
                        .collect();
                    format!("{} {}", self.either(&all), self.literal(&end))
                }
                None if is_text => self.until(&end),
                None => format!("{} {}", self.json(&of)?, self.literal(&end)),
            };
            let optional = if required { "" } else { "?" };
            let _ = write!(body, " ({head} {written}){optional}"); // a `String` takes all
        }
        Ok(format!("{body} {}", self.literal(&format!("{close}{after}"))))
    }

    /// Arguments by name, in order; the values are JSON, which is read as well as Python.
    fn python(&mut self, parameters: &Value) -> Result<String, GrammarError> {
        let empty = self.literal("");
        // What comes after an argument, and what comes where there was none.
        let (mut after, mut first) = (empty.clone(), empty);
        for (name, of, required) in properties(parameters).into_iter().rev() {
            let value = self.json(&alone(parameters, of))?;
            let (with, alone) =
                (self.literal(&format!(", {name}=")), self.literal(&format!("{name}=")));
            let (mut next, mut begin) =
                (vec![format!("{with} {value} {after}")], vec![format!("{alone} {value} {after}")]);
            if !required {
                next.push(after);
                begin.push(first);
            }
            (after, first) = (self.either(&next), self.either(&begin));
        }
        Ok(first)
    }
}

/// The schema of a tool's arguments: an object.
fn object(parameters: &Value) -> Value {
    match parameters {
        Value::Object(fields) if !fields.is_empty() => parameters.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// Names of arguments, their schemas, and whether they must be there.
fn properties(parameters: &Value) -> Vec<(&str, &Value, bool)> {
    let required = parameters.get("required").and_then(Value::as_array);
    let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|n| n == name));
    let all = parameters.get("properties").and_then(Value::as_object);
    all.into_iter().flatten().map(|(name, of)| (name.as_str(), of, is_required(name))).collect()
}

/// An argument's schema by itself: with the definitions that it may refer to.
fn alone(parameters: &Value, of: &Value) -> Value {
    let Value::Object(fields) = of else { return of.clone() };
    let mut all: Map<String, Value> = ["$defs", "definitions"]
        .into_iter()
        .filter_map(|key| Some((key.to_owned(), parameters.get(key)?.clone())))
        .collect();
    all.extend(fields.clone());
    Value::Object(all)
}
