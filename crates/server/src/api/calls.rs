//! Tools, and answers that are calls of them.

use std::sync::Arc;

use infernum::{Dialect, Parser, Part, Tools, Wanted};
use infernum_frontend_hf::chat::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::{ApiError, quoted};
use crate::model::Served;

/// Tools of one request at most.
const MOST_TOOLS: usize = 128;
/// Bytes of a tool's name at most.
const LONGEST_NAME: usize = 128;
/// Bytes at the end of a prompt that say how an answer begins.
const TAIL: usize = 64;

/// Something that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Tool {
    #[allow(dead_code, reason = "there is one kind")]
    r#type: ToolType,
    function: Function,
}

/// The one kind that there is.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolType {
    Function,
}

/// What is called.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Function {
    #[schema(max_length = 128)]
    name: String,
    #[allow(dead_code, reason = "templates read it")]
    description: Option<String>,
    /// A JSON schema of the arguments.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Map<String, Value>>,
    /// Without effect: calls that are required are held to their schema in either case.
    #[allow(dead_code, reason = "schemas hold in either case")]
    strict: Option<bool>,
}

/// `none`, `auto` (where there are tools, unless something else is said), `required`, or a tool.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "`none`, `auto`, `required` or a tool by its name")]
pub(crate) enum ToolChoice {
    Mode(ChoiceMode),
    Named(NamedTool),
}

impl ToolChoice {
    pub(crate) const NONE: ToolChoice = ToolChoice::Mode(ChoiceMode::None);
    pub(crate) const AUTO: ToolChoice = ToolChoice::Mode(ChoiceMode::Auto);
    pub(crate) const REQUIRED: ToolChoice = ToolChoice::Mode(ChoiceMode::Required);

    /// The tool of this name.
    pub(crate) fn named(name: String) -> ToolChoice {
        ToolChoice::Named(NamedTool { r#type: ToolType::Function, function: ToolName { name } })
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChoiceMode {
    None,
    Auto,
    Required,
}

/// A tool that is to be called.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NamedTool {
    #[allow(dead_code, reason = "there is one kind")]
    r#type: ToolType,
    function: ToolName,
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ToolName {
    name: String,
}

/// What a request says of tools, checked.
#[derive(Default)]
pub(crate) struct Asked {
    /// As templates get them.
    pub(crate) given: Option<Vec<Value>>,
    tools: Arc<Tools>,
    /// The tools of which one must be called.
    forced: Option<Tools>,
    several: bool,
}

impl Asked {
    pub(crate) fn check(
        given: Option<Vec<Value>>,
        choice: Option<&ToolChoice>,
        several: Option<bool>,
    ) -> Result<Asked, ApiError> {
        let given = given.unwrap_or_default();
        if given.len() > MOST_TOOLS {
            let message = format!("tools: expected at most {MOST_TOOLS}, found {}", given.len());
            return Err(ApiError::value("tools", message));
        }
        let raw = given;
        let read = |(i, tool): (usize, &Value)| {
            serde_json::from_value::<Tool>(tool.clone()).map_err(|e| {
                let param = format!("tools.{i}");
                ApiError::malformed(format!("{param}: {}", quoted(&e.to_string()))).param(param)
            })
        };
        let given: Vec<Tool> = raw.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
        let sound = |n: &str| !n.is_empty() && n.len() <= LONGEST_NAME && n.chars().all(fits);
        if let Some(tool) = given.iter().find(|tool| !sound(&tool.function.name)) {
            let message = format!(
                "tools: expected names of 1 to {LONGEST_NAME} letters, digits, `_`, `-`, `.`, `:` or `/`, found `{}`",
                quoted(&tool.function.name)
            );
            return Err(ApiError::value("tools", message));
        }
        let schema = |f: &Function| f.parameters.clone().map_or(Value::Null, Value::Object);
        let all: Vec<(String, Value)> =
            given.iter().map(|t| (t.function.name.clone(), schema(&t.function))).collect();
        let wrong =
            |message: String| ApiError::value("tool_choice", format!("tool_choice: {message}"));
        let off = matches!(choice, Some(ToolChoice::Mode(ChoiceMode::None)));
        let forced = match choice {
            None | Some(ToolChoice::Mode(ChoiceMode::None | ChoiceMode::Auto)) => None,
            Some(_) if all.is_empty() => {
                return Err(wrong("expected `tools` beside it".to_owned()));
            }
            Some(ToolChoice::Mode(ChoiceMode::Required)) => Some(Tools(all.clone())),
            Some(ToolChoice::Named(named)) => {
                let name = &named.function.name;
                let found = all.iter().find(|(known, _)| known == name).cloned();
                let missing = || wrong(format!("there is no tool `{}`", quoted(name)));
                Some(Tools(vec![found.ok_or_else(missing)?]))
            }
        };
        let named = matches!(choice, Some(ToolChoice::Named(_)));
        Ok(Asked {
            given: (!off && !all.is_empty()).then_some(raw),
            tools: Arc::new(if off { Tools::default() } else { Tools(all) }),
            forced,
            several: several.unwrap_or(true) && !named,
        })
    }

    /// How answers to a prompt are read.
    pub(crate) fn reader(&self, served: &Served, prompt: &str) -> Result<Reader, ApiError> {
        let dialect = served.frontend.dialect();
        let writes = dialect.is_some_and(|d| d.calls.is_some() || d.channels.is_some());
        if !self.tools.0.is_empty() && !writes {
            let message = "tools: this model's chat template knows no calls";
            return Err(ApiError::unsupported("tools", message));
        }
        let start = prompt.len().saturating_sub(TAIL);
        let start = (start..=prompt.len()).find(|at| prompt.is_char_boundary(*at));
        let tail = prompt[start.unwrap_or(0)..].to_owned();
        Ok(Reader {
            dialect: dialect.cloned(),
            tools: self.tools.clone(),
            tail,
            several: self.several,
        })
    }

    /// The grammar of what must be called, if anything must.
    pub(crate) fn grammar(
        &self,
        served: &Served,
        reader: &Reader,
    ) -> Result<Option<super::structure::Asked>, ApiError> {
        let Some((tools, dialect)) = self.forced.as_ref().zip(reader.dialect.as_ref()) else {
            return Ok(None);
        };
        let ended = dialect
            .reasoning
            .as_ref()
            .is_some_and(|span| reader.tail.trim_end().ends_with(span.end.trim()));
        let begun = dialect.begins_in_reasoning(&reader.tail);
        let reasoning = if begun { Some(true) } else { ended.then_some(false) };
        let wanted = Wanted { tools, several: self.several, reasoning };
        let grammar = served.frontend.grammars().calls(dialect, wanted);
        let grammar =
            grammar.map_err(|e| ApiError::malformed(format!("tools: {e}")).param("tools"))?;
        Ok(Some(("tools", grammar)))
    }
}

/// How an answer is read.
#[derive(Clone)]
pub(crate) struct Reader {
    /// `None` where there is nothing in it but text.
    dialect: Option<Arc<Dialect>>,
    tools: Arc<Tools>,
    /// The end of the prompt.
    tail: String,
    several: bool,
}

impl Reader {
    /// Of what is nothing but text.
    pub(crate) fn plain() -> Reader {
        let tools = Arc::new(Tools::default());
        Reader { dialect: None, tools, tail: String::new(), several: false }
    }

    /// Of an answer that comes in pieces.
    pub(crate) fn begin(&self) -> Reading {
        let parser = |dialect| Parser::new(dialect, &self.tools, &self.tail);
        Reading {
            parser: self.dialect.as_ref().map(parser),
            several: self.several,
            id_length: self.dialect.as_ref().and_then(|dialect| dialect.id_length),
            reasoning: String::new(),
        }
    }
}

/// An answer as it is read.
pub(crate) struct Reading {
    parser: Option<Parser>,
    several: bool,
    id_length: Option<usize>,
    /// All of it.
    pub(crate) reasoning: String,
}

impl Reading {
    /// What is certain after more text, and at its end.
    pub(crate) fn take(&mut self, text: &str, last: bool) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            return if text.is_empty() { Vec::new() } else { vec![Part::Content(text.to_owned())] };
        };
        let mut parts = parser.push(text);
        if last {
            parts.extend(parser.finish());
        }
        let one = !self.several;
        parts.retain(|part| {
            !one || !matches!(part, Part::Call(i, _) | Part::Arguments(i, _) if *i > 0)
        });
        for part in &parts {
            if let Part::Reasoning(text) = part {
                self.reasoning.push_str(text);
            }
        }
        parts
    }

    /// Whether anything was called.
    pub(crate) fn calls(&self) -> bool {
        self.parser.as_ref().is_some_and(|parser| parser.calls() > 0)
    }

    /// An id for a call.
    pub(crate) fn id(&self) -> String {
        call_id(self.id_length)
    }
}

/// An id for a call, of so many characters where templates want that.
pub(crate) fn call_id(length: Option<usize>) -> String {
    match length {
        Some(length) => (0..length).map(|_| fastrand::alphanumeric()).collect(),
        None => format!("call_{}", crate::app::random_id()),
    }
}

/// A call.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ToolCall {
    id: String,
    r#type: ToolType,
    function: Called,
}

impl ToolCall {
    pub(crate) fn new(id: String, name: String, arguments: String) -> ToolCall {
        ToolCall { id, r#type: ToolType::Function, function: Called { name, arguments } }
    }
}

/// What is called, and with what.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Called {
    name: String,
    /// JSON, as text.
    arguments: String,
}

/// A part of a call in a stream.
#[derive(Serialize)]
pub(crate) struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<ToolType>,
    function: CalledDelta,
}

#[derive(Serialize)]
struct CalledDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl CallDelta {
    pub(crate) fn begin(index: usize, name: String, id: String) -> CallDelta {
        let function = CalledDelta { name: Some(name), arguments: String::new() };
        CallDelta { index, id: Some(id), r#type: Some(ToolType::Function), function }
    }

    pub(crate) fn more(index: usize, arguments: String) -> CallDelta {
        CallDelta { index, id: None, r#type: None, function: CalledDelta { name: None, arguments } }
    }
}

/// A call of an earlier turn, as templates read it.
pub(crate) fn past(id: &str, name: &str, arguments: &Map<String, Value>) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// A tool as templates get it.
pub(crate) fn described(
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), name.into())]);
    function.extend(description.map(|text| ("description".to_owned(), text.into())));
    function.extend(parameters.map(|schema| ("parameters".to_owned(), schema.into())));
    json!({"type": "function", "function": function})
}

/// Calls of earlier turns as templates read them: arguments are objects.
pub(crate) fn with_arguments(
    message: &mut Map<String, Value>,
    param: &dyn Fn(&str) -> String,
) -> Result<(), ApiError> {
    let Some(calls) = message.get_mut("tool_calls").filter(|v| !v.is_null()) else { return Ok(()) };
    let wrong = |expected: &str| {
        let param = param("tool_calls");
        ApiError::malformed(format!("{param}: expected {expected}")).param(param)
    };
    let calls = calls.as_array_mut().ok_or_else(|| wrong("a list of calls"))?;
    for call in calls {
        let function = call.get_mut("function").and_then(Value::as_object_mut);
        let function = function.ok_or_else(|| wrong("calls with a `function`"))?;
        if function.get("name").and_then(Value::as_str).is_none() {
            return Err(wrong("functions with a `name`"));
        }
        let arguments = function.entry("arguments").or_insert_with(|| Value::Object(Map::new()));
        if let Value::String(text) = arguments {
            let read = if text.trim().is_empty() {
                Ok(Value::Object(Map::new()))
            } else {
                serde_json::from_str(text)
            };
            *arguments = read.map_err(|_| wrong("`arguments` that are JSON"))?;
        }
    }
    Ok(())
}

/// The same with an empty text for content that is missing, with arguments as text, or both.
pub(crate) fn adapted(messages: &[Message], empty: bool, text: bool) -> Vec<Message> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let missing = message.0.get("content").is_none_or(Value::is_null);
        if empty && missing {
            message.0.insert("content".to_owned(), String::new().into());
        }
        let calls = message.0.get_mut("tool_calls").filter(|_| text);
        for call in calls.and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(arguments) = call.get_mut("function").and_then(|f| f.get_mut("arguments")) {
                *arguments = Value::String(arguments.to_string());
            }
        }
    }
    messages
}

#[cfg(test)]
pub(crate) mod tests {
    use infernum_frontend_hf::spec::Library;

    use super::*;

    /// Of answers in Hermes' way, whose prompt ends with `tail`.
    pub(crate) fn reader(tail: &str) -> Reader {
        let dialects = Dialect::all(&Library::default()).expect("they ship");
        let dialect =
            dialects.into_iter().find(|dialect| dialect.name == "hermes").expect("it ships");
        let tools = Tools(vec![("f".to_owned(), json!({"type": "object"}))]);
        let (dialect, tools, tail) = (Some(Arc::new(dialect)), Arc::new(tools), tail.to_owned());
        Reader { dialect, tools, tail, several: true }
    }
}
