//! Chat templates: messages to a prompt, as `transformers` renders them.

use std::io;

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, escape_formatter};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::pyjson::{self, Style};
use crate::pyrepr;
use crate::source::{ModelFiles, SourceError};
use crate::tokenizer::{SpecialTokens, TokenizerError, gguf};

const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Where GGUF files have it.
const TEMPLATE_KEY: &str = "tokenizer.chat_template";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// The template that `transformers` uses, and the one it prefers when tools are given.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Templates come with models, so they get bounds: template instructions, nesting, output bytes.
const FUEL: u64 = 20_000_000;
const RECURSION: usize = 200;
const MAX_OUTPUT: usize = 64 << 20;
/// Context key that carries the time to `strftime_now`; no template can spell it.
const NOW: &str = " now";

/// A chat template could not be read, or could not render these messages.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum ChatError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(
        "{place}: has no chat template (no {TEMPLATE_FILE}, no `chat_template` in {CONFIG_FILE}); use \
         plain text, or add a {TEMPLATE_FILE}"
    )]
    Absent { place: String },
    #[error("{place}: has no chat template (no `{TEMPLATE_KEY}`); use plain text")]
    AbsentKey { place: String },
    #[error("{file}: {message}")]
    Invalid { file: String, message: String },
    #[error("{file}: line {line}: {message}")]
    Syntax { file: String, line: usize, message: String },
    /// The template refused the messages by its own rules.
    #[error("the model's chat template refuses these messages: {message}")]
    Refused { message: String },
    #[error("{file}: line {line}: the chat template failed: {message}")]
    Render { file: String, line: usize, message: String },
}

/// Where a message's text ends, in what a template makes of it: a word between characters for private use, and a space.
const MARK: &str = "\u{f8f0}continues\u{f8f1} ";

fn not_continued() -> ChatError {
    let message = "its last message is not written as a text that can be gone on with";
    ChatError::Refused { message: message.to_owned() }
}

/// A chat message: a JSON object with `role`, most often `content`, and whatever else its template
/// reads (`tool_calls`, `name`, …), in the order given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message(pub Map<String, Json>);

impl Message {
    /// A message of plain text.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        let fields = [("role", role.into()), ("content", content.into())];
        Message(fields.into_iter().map(|(k, v): (&str, String)| (k.into(), v.into())).collect())
    }

    /// The `role`, where it is a string.
    pub fn role(&self) -> Option<&str> {
        self.0.get("role")?.as_str()
    }

    /// The message with [`MARK`] behind its text, or behind the last of the texts that it is made of;
    /// `None` where it does not end in one.
    fn marked(&self) -> Option<Message> {
        let mut marked = self.clone();
        let calls = self.0.get("tool_calls").and_then(Json::as_array);
        let text = match marked.0.get_mut("content")? {
            Json::Array(parts) => parts.last_mut()?.get_mut("text")?,
            text => text,
        };
        *text = (text.as_str()?.to_owned() + MARK).into();
        calls.is_none_or(Vec::is_empty).then_some(marked)
    }

    /// The reasoning under every name that templates read it by, as `transformers` passes it.
    fn with_reasoning_aliases(&self) -> Map<String, Json> {
        const NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
        let given = NAMES.iter().find_map(|n| self.0.get(*n).filter(|v| !v.is_null()));
        let Some(reasoning) = given else { return self.0.clone() };
        // This order and these overrides are those of `{"thinking": r, **message, "reasoning_content": r}`.
        let mut fields = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
        fields.extend(self.0.clone());
        fields.insert("reasoning_content".into(), reasoning.clone());
        fields
    }
}

/// What a template is told besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Ends the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Ends the prompt with the last message's text, which the answer goes on with.
    pub continue_final_message: bool,
    /// JSON schemas of the tools that the model may call.
    pub tools: Option<Vec<Json>>,
    /// Further variables, such as `enable_thinking`; they win over everything but the messages.
    pub extra: Map<String, Json>,
    /// Local time for `strftime_now`; the clock's where it is `None`.
    pub now: Option<DateTime>,
}

/// A model's compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    special: SpecialTokens,
    file: &'static str,
    /// Of all that are there.
    text: String,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`: one template,
    /// or a list of named ones of which `default` is used (`tool_use` when there are tools).
    pub fn open(files: &ModelFiles) -> Result<ChatTemplate, ChatError> {
        if let Some(name) = files.gguf() {
            let (templates, special) = gguf::templates(files, name)?;
            let templates: Vec<_> =
                templates.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect();
            if templates.iter().all(|(name, _)| *name != DEFAULT) {
                return Err(ChatError::AbsentKey { place: files.name().into() });
            }
            return compile(TEMPLATE_KEY, &templates, special);
        }
        let special = SpecialTokens::open(files)?;
        let (file, templates) = written(files)?;
        let templates: Vec<_> = templates.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect();
        compile(file, &templates, special)
    }

    /// Compiles one template.
    pub fn parse(template: &str, special: SpecialTokens) -> Result<ChatTemplate, ChatError> {
        compile(TEMPLATE_FILE, &[(DEFAULT, template)], special)
    }

    /// What is written in it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it goes through the parts of a message's content, so that it takes lists; text is what all take.
    pub fn takes_parts(&self) -> bool {
        let tags = self.text.split("{%").skip(1).filter_map(|tag| tag.split_once("%}"));
        let mut loops = tags.filter_map(|(tag, _)| {
            let inner = tag.trim_matches(|c: char| c.is_whitespace() || "+-".contains(c));
            Some(inner.strip_prefix("for ")?.split_once(" in ")?.1.trim())
        });
        loops.any(|over| {
            ["content", "content']", "content\"]"].iter().any(|end| over.ends_with(end))
        })
    }

    /// The prompt for `messages`.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, ChatError> {
        if !options.continue_final_message {
            return self.whole(messages, options);
        }
        let (last, before) = messages.split_last().ok_or_else(not_continued)?;
        let marked = last.marked().ok_or_else(not_continued)?;
        let text = self.whole(&[before, &[marked]].concat(), options)?;
        let at = text.rfind(MARK.trim_end()).ok_or_else(not_continued)?;
        // A template that trims what is said has taken the mark's space away.
        let is_trimmed = !text[at..].starts_with(MARK);
        Ok(if is_trimmed { text[..at].trim_end() } else { &text[..at] }.to_owned())
    }

    /// The text of all messages.
    fn whole(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        let context = self.context(messages, options);
        let mut out = Bounded(Vec::new());
        let tool_use = options.tools.is_some().then(|| self.env.get_template(TOOL_USE).ok());
        let template = match tool_use.flatten() {
            Some(template) => Ok(template),
            None => self.env.get_template(DEFAULT),
        };
        template
            .and_then(|t| t.render_captured_to(context, &mut out).map(|_| ()))
            .map_err(|error| self.render_error(&error))?;
        String::from_utf8(out.0).map_err(|error| ChatError::Invalid {
            file: self.file.into(),
            message: error.to_string(),
        })
    }

    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let mut context: Map<String, Json> =
            self.special.iter().map(|(role, token)| (role.into(), token.into())).collect();
        let tools = options.tools.clone().map_or(Json::Null, Json::Array);
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        context.extend(options.extra.clone());
        let messages = messages.iter().map(|m| Json::Object(m.with_reasoning_aliases())).collect();
        context.insert("messages".into(), messages);
        let now = options.now.unwrap_or_else(|| jiff::Zoned::now().datetime());
        context.insert(NOW.into(), now.to_string().into());
        pyrepr::value(&Json::Object(context))
    }

    fn render_error(&self, error: &Error) -> ChatError {
        let mut source: Option<&dyn std::error::Error> = Some(error);
        while let Some(e) = source {
            if let Some(Raised(message)) = e.downcast_ref() {
                return ChatError::Refused { message: message.clone() };
            }
            source = e.source();
        }
        let line = error.line().unwrap_or(0);
        ChatError::Render { file: self.file.into(), line, message: message(error) }
    }
}

/// An error's kind and detail, without the place that [`ChatError`] gives.
fn message(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn compile(
    file: &'static str,
    templates: &[(&str, &str)],
    special: SpecialTokens,
) -> Result<ChatTemplate, ChatError> {
    let mut env = environment();
    for (name, text) in templates {
        env.add_template_owned((*name).to_owned(), without_generation_tags(text)).map_err(
            |error| ChatError::Syntax {
                file: file.into(),
                line: error.line().unwrap_or(0),
                message: message(&error),
            },
        )?;
    }
    let text = templates.iter().map(|(_, text)| *text).collect::<Vec<_>>().join("\n");
    Ok(ChatTemplate { env, special, file, text })
}

/// Templates by their names.
type Named = Vec<(String, String)>;

/// The templates of a folder, and the file that has them.
fn written(files: &ModelFiles) -> Result<(&'static str, Named), ChatError> {
    let one = |text: &str| vec![(DEFAULT.to_owned(), text.to_owned())];
    if let Some(text) = files.read(TEMPLATE_FILE)? {
        let text = std::str::from_utf8(&text).map_err(|error| ChatError::Invalid {
            file: TEMPLATE_FILE.into(),
            message: error.to_string(),
        })?;
        return Ok((TEMPLATE_FILE, one(text)));
    }
    let absent = || ChatError::Absent { place: files.name().into() };
    let json = files.read(CONFIG_FILE)?.ok_or_else(absent)?;
    let invalid = |message| ChatError::Invalid { file: CONFIG_FILE.into(), message };
    let config: Json = serde_json::from_slice(&json).map_err(|e| invalid(e.to_string()))?;
    match config.get("chat_template") {
        None | Some(Json::Null) => Err(absent()),
        Some(Json::String(text)) => Ok((CONFIG_FILE, one(text))),
        Some(Json::Array(list)) => {
            let templates: Option<Vec<_>> = list.iter().map(named).collect();
            let Some(templates) = templates else {
                return Err(invalid(
                    "`chat_template`: each item of the list needs `name` and `template`".into(),
                ));
            };
            if templates.iter().all(|(name, _)| *name != DEFAULT) {
                return Err(invalid("`chat_template`: no template is named `default`".into()));
            }
            let owned = templates.into_iter().map(|(n, t)| (n.to_owned(), t.to_owned()));
            Ok((CONFIG_FILE, owned.collect()))
        }
        Some(_) => Err(invalid("`chat_template`: expected a string or a list".into())),
    }
}

/// The chat templates of a folder as metadata of a GGUF file; nothing where it has none.
pub fn gguf_metadata(files: &ModelFiles) -> Result<crate::gguf::Metadata, ChatError> {
    let templates = match written(files) {
        Err(ChatError::Absent { .. }) => Vec::new(),
        written => written?.1,
    };
    let key = |name: &str| match name {
        DEFAULT => TEMPLATE_KEY.to_owned(),
        name => format!("{TEMPLATE_KEY}.{name}"),
    };
    let text = |(name, text): (String, String)| (key(&name), crate::gguf::Datum::Text(text));
    Ok(templates.into_iter().map(text).collect())
}

/// An item of a list of templates: its name and its text.
fn named(item: &Json) -> Option<(&str, &str)> {
    Some((item.get("name")?.as_str()?, item.get("template")?.as_str()?))
}

/// Jinja as `transformers` sets it up.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.unwrap_or_default()); // only delimiters can fail to build
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_debug(false);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_formatter(print);
    env.set_unknown_method_callback(python_method);
    env.add_test("iterable", iterable);
    env.add_test("sequence", iterable);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env
}

/// `{% generation %}` marks assistant text for training and prints its body unchanged. Jinja does
/// not know it; `with` is the block that does the same, and keeps white space and scope as they are.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some((inner, _)) = tag.split_once("%}") else { break };
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        let replacement = match word.trim() {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inner.replace(word.trim(), replacement));
        rest = &tag[inner.len()..];
    }
    out.push_str(rest);
    out
}

/// What `raise_exception` carries out of a template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let fail = |detail: String| Error::new(ErrorKind::InvalidOperation, detail);
    let now = state.lookup(NOW).and_then(|now| now.as_str()?.parse::<DateTime>().ok());
    let now = now.ok_or_else(|| fail("strftime_now: no time given".into()))?;
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| fail(format!("strftime_now({format:?}): {error}")))
}

/// Jinja's `iterable` and `sequence`, which for JSON data are the same: `None` is neither, strings
/// and objects are both. minijinja sees it differently, and templates tell content apart by them.
fn iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Map | Iterable | String | Undefined)
}

/// Prints floats as Python does (`1e-05`) and everything else as minijinja does.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match f64::try_from(value.clone()) {
        Ok(x) if value.is_number() && !value.is_integer() && x.is_finite() => {
            out.write_str(&pyjson::float_repr(x)).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// Python's methods: those that minijinja's own collection leaves out, then the collection.
fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let affix = args.first().and_then(Value::as_str).filter(|_| args.len() == 1);
    match (method, value.as_str(), affix) {
        ("removeprefix", Some(s), Some(prefix)) => Ok(s.strip_prefix(prefix).unwrap_or(s).into()),
        ("removesuffix", Some(s), Some(suffix)) => Ok(s.strip_suffix(suffix).unwrap_or(s).into()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
#[allow(clippy::needless_pass_by_value, reason = "minijinja calls filters with owned arguments")]
fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let arg = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = args.get(at).cloned().map_or_else(|| kwargs.get(name), |v| Ok(Some(v)))?;
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = arg(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match arg(1, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => Some(text.to_string()),
        // Python takes True for 1 and a negative number for 0; 64 columns is deeper than any use.
        Some(n) => Some(" ".repeat(i64::try_from(n)?.clamp(0, 64) as usize)),
    };
    let (mut item_separator, mut key_separator) = (", ".to_string(), ": ".to_string());
    if let Some(pair) = arg(2, "separators")? {
        item_separator = pair.get_item_by_index(0)?.to_string();
        key_separator = pair.get_item_by_index(1)?.to_string();
    } else if indent.is_some() {
        item_separator = ",".into();
    }
    let sort_keys = arg(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    pyjson::dumps(value, &Style { ensure_ascii, indent, item_separator, key_separator, sort_keys })
}

/// A buffer that refuses to grow without end.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.0.len() + data.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("the prompt exceeds {MAX_OUTPUT} bytes")));
        }
        self.0.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
