//! One call, as it is written.

use serde_json::Value;

use super::python::{self, ParenScan};
use super::scan::{Begins, Found, JsonScan, begins, find};
use super::{Form, Kind, Tools};

/// Bytes of a name at most. What is longer is none whether or not its end is there, so that it is none however the text is cut.
const LONGEST_NAME: usize = 256;

/// How far a call is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Not at its end, or not yet known to be there: where nothing was taken, it takes more text.
    More,
    /// Not at its end, and further than before, though nothing may have been taken.
    Further,
    /// At its end, and another one of the same list begins.
    Next,
    /// At its end.
    Done,
    /// It is none.
    Failed,
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Call {
    form: Form,
    /// Without a marker: it is one only of a known tool.
    bare: bool,
    /// All that was taken before it had a name.
    raw: String,
    name: Option<String>,
    /// Whether the name was told.
    told: bool,
    /// Arguments that are to be told.
    arguments: String,
    /// Whether there were any.
    argued: bool,
    at: At,
}

#[derive(Debug)]
enum At {
    /// Of a list.
    Open,
    Name,
    /// In an object: before a key, after it, in its value.
    Key,
    Colon(String),
    Value(String, JsonScan, String),
    /// After an item of a list.
    Item,
    /// The arguments as JSON.
    Json(JsonScan),
    /// Before an argument, in its name, in its value; how many there were.
    Tag(usize),
    TagKey(usize),
    TagValue(usize, Tag),
    Paren(ParenScan, String),
}

/// An argument between markers.
#[derive(Debug)]
struct Tag {
    key: String,
    kind: Kind,
    value: String,
}

impl Form {
    /// Whether a call without a marker may begin so.
    pub(super) fn opens(&self, text: &str) -> bool {
        match self {
            Form::Json { list: true, .. } | Form::Python { list: true } => text.starts_with('['),
            Form::Json { .. } => text.starts_with('{'),
            _ => false,
        }
    }

    fn first(&self) -> At {
        match self {
            Form::Json { .. } | Form::Python { list: true } => At::Open,
            _ => At::Name,
        }
    }
}

impl Call {
    pub(super) fn new(form: &Form, marker: &str, bare: bool) -> Call {
        Call {
            form: form.clone(),
            bare,
            raw: marker.to_owned(),
            name: None,
            told: false,
            arguments: String::new(),
            argued: false,
            at: form.first(),
        }
    }

    /// The next one of a list.
    pub(super) fn renew(&mut self) {
        (self.name, self.told, self.argued) = (None, false, false);
        self.raw.clear();
    }

    /// The name, once.
    pub(super) fn named(&mut self) -> Option<String> {
        let name = self.name.clone().filter(|_| !self.told)?;
        self.told = true;
        self.raw.clear();
        Some(name)
    }

    pub(super) fn is_named(&self) -> bool {
        self.name.is_some()
    }

    /// Arguments that are certain, once it has a name.
    pub(super) fn arguments(&mut self) -> String {
        if self.told { std::mem::take(&mut self.arguments) } else { String::new() }
    }

    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    fn take(&mut self, held: &mut String, bytes: usize) -> String {
        let rest = held.split_off(bytes);
        let taken = std::mem::replace(held, rest);
        if self.name.is_none() {
            self.raw.push_str(&taken);
        }
        taken
    }

    /// Does one thing with what is held.
    pub(super) fn step(&mut self, held: &mut String, tools: &Tools, last: bool) -> Progress {
        let blank = held.len() - held.trim_start().len();
        let skips = !matches!(
            self.at,
            At::Value(..) | At::Json(_) | At::TagKey(_) | At::TagValue(..) | At::Paren(..)
        );
        if skips && blank > 0 {
            self.take(held, blank);
        }
        if held.is_empty() {
            return Progress::More;
        }
        match std::mem::replace(&mut self.at, At::Name) {
            At::Open => self.open(held),
            At::Item => self.item(held),
            At::Name => self.name(held, tools, last),
            At::Key => self.key(held),
            At::Colon(key) => self.colon(held, key),
            At::Value(key, scan, text) => self.value(held, tools, key, scan, text),
            At::Json(scan) => self.json(held, scan),
            At::Tag(count) => self.tag(held, count, last),
            At::TagKey(count) => self.tag_key(held, count, last),
            At::TagValue(count, tag) => self.tag_value(held, tools, (count, tag), last),
            At::Paren(scan, text) => self.paren(held, scan, text),
        }
    }

    /// Stays where it is.
    fn stay(&mut self, at: At) -> Progress {
        self.at = at;
        Progress::More
    }

    fn open(&mut self, held: &mut String) -> Progress {
        let (bracket, next) = match &self.form {
            Form::Json { list: true, .. } if self.raw.trim_end().ends_with('[') => {
                ('{', At::Key) // of a list that is open
            }
            Form::Json { list: true, .. } => ('[', At::Open),
            Form::Python { list: true } => ('[', At::Name),
            _ => ('{', At::Key),
        };
        // Some models write one call of a list as it is.
        let one = matches!(self.form, Form::Json { list: true, .. }) && held.starts_with('{');
        if one {
            self.take(held, 1);
            return self.stay(At::Key);
        }
        if !held.starts_with(bracket) {
            return Progress::Failed;
        }
        self.take(held, 1);
        self.stay(next)
    }

    /// After an item of a list.
    fn item(&mut self, held: &mut String) -> Progress {
        if held.starts_with(',') {
            self.take(held, 1);
            self.at = match self.form {
                Form::Python { .. } => At::Name,
                _ => At::Open,
            };
            self.raw = "[".into();
            return Progress::Next;
        }
        if held.starts_with(']') {
            self.take(held, 1);
        }
        Progress::Done
    }

    fn name(&mut self, held: &mut String, tools: &Tools, last: bool) -> Progress {
        let form = self.form.clone();
        let markers: Vec<&str> = match &form {
            Form::Named { separator, .. } => separator.iter().map(String::as_str).collect(),
            Form::Tagged { after_name, .. } => after_name.iter().map(String::as_str).collect(),
            _ => vec!["("],
        };
        match find(held, &markers, last) {
            Found::Marker(at, ..) | Found::Maybe(at) if at > LONGEST_NAME => Progress::Failed,
            Found::Marker(start, end, _) => {
                let text = self.take(held, end)[..start].to_owned();
                let Some(name) = self.read_name(&text, tools) else { return Progress::Failed };
                self.name = Some(name);
                self.at = match form {
                    Form::Named { .. } => At::Json(JsonScan::default()),
                    Form::Tagged { .. } => At::Tag(0),
                    _ => At::Paren(ParenScan::default(), String::new()),
                };
                Progress::More
            }
            Found::Maybe(_) => self.stay(At::Name),
        }
    }

    fn read_name(&self, text: &str, tools: &Tools) -> Option<String> {
        let mut name = text.trim();
        if let Form::Named { before, cut, .. } = &self.form {
            name = name.strip_prefix(before.as_str()).unwrap_or(name);
            let cut = cut.as_ref().and_then(|cut| name.rsplit_once(cut.as_str()));
            name = cut.map_or(name, |(name, _)| name).trim();
        }
        let name = name.trim_matches(|c| c == '"' || c == '\'');
        let fits = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
        let sound = !name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(fits);
        (sound && (!self.bare || tools.has(name))).then(|| name.to_owned())
    }

    fn key(&mut self, held: &mut String) -> Progress {
        if held.starts_with(',') {
            self.take(held, 1);
            return self.stay(At::Key);
        }
        if held.starts_with('}') {
            self.take(held, 1);
            if self.name.is_none() {
                return Progress::Failed;
            }
            if !self.argued {
                self.arguments.push_str("{}");
            }
            self.at = At::Item;
            let list = matches!(self.form, Form::Json { list: true, .. });
            return if list { Progress::More } else { Progress::Done };
        }
        if !held.starts_with('"') {
            return Progress::Failed;
        }
        let (bytes, ends) = JsonScan::default().take(held);
        if bytes > LONGEST_NAME {
            return Progress::Failed;
        }
        if !ends {
            return self.stay(At::Key);
        }
        let text = self.take(held, bytes);
        match serde_json::from_str(&text) {
            Ok(key) => self.stay(At::Colon(key)),
            Err(_) => Progress::Failed,
        }
    }

    fn colon(&mut self, held: &mut String, key: String) -> Progress {
        let Form::Json { name, arguments, .. } = &self.form else { return Progress::Failed };
        // An answer that is JSON is no call.
        let known = [name.as_str(), "type", "id"].contains(&key.as_str());
        let known = known || arguments.contains(&key);
        if !held.starts_with(':') || (self.bare && !known) {
            return Progress::Failed;
        }
        self.argued |= arguments.contains(&key);
        self.take(held, 1);
        self.stay(At::Value(key, JsonScan::default(), String::new()))
    }

    /// A key's value: a name is read as a whole, arguments are told as they come.
    fn value(
        &mut self,
        held: &mut String,
        tools: &Tools,
        key: String,
        mut scan: JsonScan,
        mut text: String,
    ) -> Progress {
        let Form::Json { name, arguments, .. } = self.form.clone() else { return Progress::Failed };
        let (bytes, ends) = scan.take(held);
        let taken = self.take(held, bytes);
        // White space before it is no part of it, whether or not it comes with it.
        let taken = if text.is_empty() { taken.trim_start() } else { taken.as_str() };
        let argues = arguments.contains(&key);
        let is_text = argues && if text.is_empty() { taken } else { &text }.starts_with('"');
        if argues && !is_text {
            self.arguments.push_str(taken);
            if text.is_empty() && !taken.is_empty() {
                text.push('{'); // only that it has begun
            }
        } else {
            text.push_str(taken);
        }
        if !ends {
            return self.stay(At::Value(key, scan, text));
        }
        if key == name {
            let read: Option<String> = serde_json::from_str(text.trim()).ok();
            match read.and_then(|name| self.read_name(&name, tools)) {
                Some(name) => self.name = Some(name),
                None => return Progress::Failed,
            }
        } else if is_text {
            // JSON within JSON.
            let inner: Option<String> = serde_json::from_str(text.trim()).ok();
            self.arguments.push_str(&inner.unwrap_or(text));
        }
        // A value may be missing.
        self.at = At::Key;
        Progress::Further
    }

    fn json(&mut self, held: &mut String, mut scan: JsonScan) -> Progress {
        let (bytes, ends) = scan.take(held);
        let taken = self.take(held, bytes);
        self.arguments.push_str(if self.arguments.is_empty() && !self.told {
            taken.trim_start()
        } else {
            &taken
        });
        if ends {
            return Progress::Done;
        }
        self.stay(At::Json(scan))
    }

    /// Before an argument, or at the end.
    fn tag(&mut self, held: &mut String, count: usize, last: bool) -> Progress {
        let form = self.form.clone();
        let Form::Tagged { key, close, .. } = &form else { return Progress::Failed };
        let keys: Vec<&str> = key.iter().map(|k| k.trim_start()).collect();
        match begins(held, &keys, last) {
            Begins::Undecided => self.stay(At::Tag(count)),
            Begins::With(length, _) => {
                self.take(held, length);
                self.stay(At::TagKey(count))
            }
            Begins::Otherwise => {
                let close = close.trim();
                if !last && close.len() > held.len() && close.starts_with(held.as_str()) {
                    return self.stay(At::Tag(count));
                }
                if held.starts_with(close) {
                    self.take(held, close.len());
                }
                self.arguments.push_str(if count == 0 { "{}" } else { "}" });
                Progress::Done
            }
        }
    }

    fn tag_key(&mut self, held: &mut String, count: usize, last: bool) -> Progress {
        let form = self.form.clone();
        let Form::Tagged { value, .. } = &form else { return Progress::Failed };
        let markers: Vec<&str> = value.iter().map(|(text, _)| text.as_str()).collect();
        match find(held, &markers, last) {
            Found::Marker(at, ..) | Found::Maybe(at) if at > LONGEST_NAME => Progress::Failed,
            Found::Marker(start, end, which) => {
                let key = self.take(held, end)[..start].trim().to_owned();
                self.arguments.push_str(if count == 0 { "{" } else { ", " });
                self.arguments.push_str(&Value::from(key.as_str()).to_string());
                self.arguments.push_str(": ");
                let tag = Tag { key, kind: value[which].1, value: String::new() };
                self.stay(At::TagValue(count, tag))
            }
            Found::Maybe(_) => self.stay(At::TagKey(count)),
        }
    }

    /// An argument's value, which is told once it is there: what it is may show at its end.
    fn tag_value(
        &mut self,
        held: &mut String,
        tools: &Tools,
        (count, mut tag): (usize, Tag),
        last: bool,
    ) -> Progress {
        let form = self.form.clone();
        let Form::Tagged { value_end, .. } = &form else { return Progress::Failed };
        let markers: Vec<&str> = value_end.iter().map(String::as_str).collect();
        let (safe, end) = match find(held, &markers, last) {
            Found::Marker(start, end, _) => (start, Some(end)),
            Found::Maybe(safe) => (safe, None),
        };
        tag.value.push_str(&self.take(held, safe));
        let Some(end) = end else { return self.stay(At::TagValue(count, tag)) };
        self.take(held, end - safe);
        let name = self.name.as_deref().unwrap_or_default();
        let is_text = match tag.kind {
            Kind::Text => true,
            Kind::Json => false,
            Kind::Typed => tools.is_text(name, &tag.key) == Some(true),
        };
        let json = Some(tag.value.trim()).filter(|_| !is_text);
        let json = json.filter(|text| serde_json::from_str::<Value>(text).is_ok());
        let written =
            json.map_or_else(|| Value::from(tag.value.as_str()).to_string(), str::to_owned);
        self.arguments.push_str(&written);
        self.stay(At::Tag(count + 1))
    }

    fn paren(&mut self, held: &mut String, mut scan: ParenScan, mut text: String) -> Progress {
        let Some(end) = scan.take(held) else {
            let all = held.len();
            text.push_str(&self.take(held, all));
            return self.stay(At::Paren(scan, text));
        };
        text.push_str(&self.take(held, end));
        self.take(held, 1);
        let read = python::arguments(&text);
        // What cannot be read is told as it is.
        self.arguments.push_str(&read.map_or(text, |value| value.to_string()));
        self.at = At::Item;
        let list = matches!(self.form, Form::Python { list: true });
        if list { Progress::More } else { Progress::Done }
    }
}
