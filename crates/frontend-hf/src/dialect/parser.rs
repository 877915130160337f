//! One incremental parser for all dialects.

use std::sync::Arc;

use super::forms::{Call, Progress};
use super::scan::{Begins, Found, begins, find};
use super::{Dialect, Tools};

/// Bytes of a header at most.
const LONGEST_HEADER: usize = 1024;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// What the model thinks.
    Reasoning(String),
    /// What it says.
    Content(String),
    /// A call begins; calls are counted from 0.
    Call(usize, String),
    /// More of a call's arguments, which are JSON when all are joined.
    Arguments(usize, String),
}

/// Takes a text as it comes, and tells its parts. What may become a marker is held back, and nothing else; cut anywhere,
/// a text has the same parts.
#[derive(Debug)]
pub struct Parser {
    dialect: Arc<Dialect>,
    tools: Arc<Tools>,
    /// What is not decided yet.
    held: String,
    state: State,
    /// White space that is told once something follows it.
    blank: String,
    /// Whether any content was told.
    said: bool,
    /// Whether any reasoning was told in this span.
    thought: bool,
    calls: usize,
    parts: Vec<Part>,
}

#[derive(Debug)]
enum State {
    Content,
    Reasoning,
    /// In a section of calls, or after a bare one.
    Between {
        section: bool,
    },
    Call(Box<Call>),
    /// After a call, before the marker that ends it.
    After,
    /// Of a message with a header.
    Header,
    Body(Body),
    /// After a message.
    Outside,
    /// After a call that was begun and cannot be read: nothing that follows is told, however it comes.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Reasoning,
    Content,
    Call,
}

impl Parser {
    /// At the beginning of an answer to a prompt. Without tools no call is looked for.
    pub fn new(dialect: &Arc<Dialect>, tools: &Arc<Tools>, prompt: &str) -> Parser {
        let state = if dialect.channels.is_some() {
            State::Header
        } else if dialect.begins_in_reasoning(prompt) {
            State::Reasoning
        } else {
            State::Content
        };
        Parser {
            dialect: dialect.clone(),
            tools: tools.clone(),
            held: String::new(),
            state,
            blank: String::new(),
            said: false,
            thought: false,
            calls: 0,
            parts: Vec::new(),
        }
    }

    /// Whether reasoning is being told.
    pub fn reasons(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Body(Body::Reasoning))
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes more text: the parts that are now certain.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        while self.step(false) {}
        std::mem::take(&mut self.parts)
    }

    /// Ends the text.
    pub fn finish(&mut self) -> Vec<Part> {
        while self.step(true) {}
        match std::mem::replace(&mut self.state, State::Content) {
            State::Call(call) => self.give_up(*call),
            State::Body(Body::Call) => self.calls += 1,
            _ => {}
        }
        let rest = std::mem::take(&mut self.held);
        self.say(&rest);
        if self.calls == 0 && !self.blank.is_empty() && self.said {
            let blank = std::mem::take(&mut self.blank);
            self.parts.push(Part::Content(blank));
        }
        std::mem::take(&mut self.parts)
    }

    /// Does one thing with what is held; false if that takes more text.
    fn step(&mut self, last: bool) -> bool {
        if self.held.is_empty() {
            return false;
        }
        match &mut self.state {
            State::Content => self.content(last),
            State::Reasoning => self.reasoning(last),
            State::Between { section } => {
                let section = *section;
                self.between(section, last)
            }
            State::Call(_) => self.call(last),
            State::After => self.after(last),
            State::Header => self.header(last),
            State::Body(body) => {
                let body = *body;
                self.body(body, last)
            }
            State::Outside => self.outside(last),
            State::Lost => {
                self.held.clear();
                false
            }
        }
    }

    fn content(&mut self, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let calls = dialect.calls.as_ref().filter(|_| !self.tools.0.is_empty());
        if let Some(calls) = calls.filter(|calls| calls.bare && !self.said && self.calls == 0) {
            let text = self.held.trim_start();
            if text.is_empty() {
                return false;
            }
            if calls.form.opens(text) {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                self.state = State::Call(Box::new(Call::new(&calls.form, "", true)));
                return true;
            }
        }
        let mut markers: Vec<&str> = dialect.dropped.iter().map(String::as_str).collect();
        let dropped = markers.len();
        markers.extend(dialect.reasoning.as_ref().map(|span| span.begin.trim()));
        let reasons = markers.len();
        markers.extend(calls.and_then(|c| c.section.as_ref()).map(|span| span.begin.trim()));
        let sections = markers.len();
        markers.extend(calls.iter().flat_map(|c| &c.begin).map(String::as_str));
        match find(&self.held, &markers, last) {
            Found::Marker(start, end, which) => {
                self.say_until(start);
                let marker = self.take(end - start);
                match which {
                    n if n < dropped => {}
                    n if n < reasons => (self.state, self.thought) = (State::Reasoning, false),
                    n if n < sections => self.state = State::Between { section: true },
                    _ => self.begin(&marker),
                }
                true
            }
            Found::Maybe(safe) => {
                self.say_until(safe);
                false
            }
        }
    }

    fn begin(&mut self, marker: &str) {
        if let Some(calls) = &self.dialect.calls {
            self.state = State::Call(Box::new(Call::new(&calls.form, marker, false)));
        }
    }

    fn reasoning(&mut self, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(span) = &dialect.reasoning else { return false };
        // Where it has begun in the prompt, some write that it begins once more.
        let markers = [span.end.trim(), span.begin.trim()];
        match find(&self.held, &markers, last) {
            Found::Marker(start, end, which) => {
                self.think_until(start);
                self.take(end - start);
                if which == 0 {
                    self.blank.clear();
                    self.state = State::Content;
                }
                true
            }
            Found::Maybe(safe) => {
                self.think_until(safe);
                false
            }
        }
    }

    /// Between calls.
    fn between(&mut self, section: bool, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(calls) = &dialect.calls else { return false };
        let blank = |c: char| c.is_whitespace() || (!section && ";,".contains(c));
        self.held.drain(..self.held.len() - self.held.trim_start_matches(blank).len());
        if self.held.is_empty() {
            return false;
        }
        if calls.bare && calls.form.opens(&self.held) {
            self.state = State::Call(Box::new(Call::new(&calls.form, "", true)));
            return true;
        }
        let mut markers: Vec<&str> = calls.begin.iter().map(String::as_str).collect();
        let begin = markers.len();
        let end = calls.section.as_ref().filter(|_| section).map(|s| s.end.trim());
        markers.extend(end);
        match begins(&self.held, &markers, last) {
            Begins::Undecided => false,
            Begins::With(length, which) => {
                let marker = self.take(length);
                if which < begin {
                    self.begin(&marker);
                } else {
                    self.state = State::Content;
                }
                true
            }
            Begins::Otherwise if section && calls.begin.is_empty() => {
                self.begin("");
                true
            }
            Begins::Otherwise => {
                self.state = State::Content;
                true
            }
        }
    }

    fn call(&mut self, last: bool) -> bool {
        let State::Call(call) = &mut self.state else { return false };
        let before = self.held.len();
        let progress = call.step(&mut self.held, &self.tools, last);
        let index = self.calls;
        if let Some(name) = call.named() {
            self.blank.clear();
            self.parts.push(Part::Call(index, name));
        }
        let arguments = call.arguments();
        if !arguments.is_empty() {
            self.parts.push(Part::Arguments(index, arguments));
        }
        match progress {
            Progress::More => before != self.held.len(),
            Progress::Further => true,
            Progress::Next => {
                self.calls += 1;
                call.renew();
                true
            }
            Progress::Done => {
                self.calls += usize::from(call.is_named());
                self.state = State::After;
                true
            }
            Progress::Failed => {
                if let State::Call(call) = std::mem::replace(&mut self.state, State::Content) {
                    self.give_up(*call);
                }
                true
            }
        }
    }

    /// What was no call is content; of one that was begun the rest is missing.
    fn give_up(&mut self, call: Call) {
        if call.is_named() {
            self.calls += 1;
            self.held.clear();
            self.state = State::Lost;
            return;
        }
        self.say(&call.into_raw());
        // Not looked at again.
        self.said = true;
    }

    fn after(&mut self, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(calls) = &dialect.calls else { return false };
        let next = State::Between { section: calls.section.is_some() };
        // Models differ in what stands around markers.
        let blank = |c: char| c.is_whitespace() || c == '`';
        self.held.drain(..self.held.len() - self.held.trim_start_matches(blank).len());
        let ends: Vec<&str> = calls.end.iter().map(|end| end.trim_start_matches(blank)).collect();
        let ends: Vec<&str> = ends.into_iter().filter(|end| !end.is_empty()).collect();
        // More of these may come.
        if self.held.is_empty() {
            return false;
        }
        match begins(&self.held, &ends, last) {
            Begins::Undecided => false,
            found => {
                if let Begins::With(length, _) = found {
                    self.take(length);
                }
                self.state = next;
                true
            }
        }
    }

    fn header(&mut self, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(channels) = &dialect.channels else { return false };
        match find(&self.held, &[&channels.body], last) {
            // However the text is cut.
            Found::Marker(at, ..) | Found::Maybe(at) if at > LONGEST_HEADER => {
                self.state = State::Body(Body::Content);
                true
            }
            Found::Marker(start, end, _) => {
                let header = self.take(end);
                let header = &header[..start];
                let name = header.split_once(channels.recipient.as_str()).map(|(_, rest)| {
                    let end = rest.find(|c: char| c.is_whitespace() || c == '<');
                    rest[..end.unwrap_or(rest.len())].to_owned()
                });
                let name = name.filter(|name| self.tools.has(name) || !name.is_empty());
                self.state = State::Body(match name.filter(|_| !self.tools.0.is_empty()) {
                    Some(name) => {
                        self.blank.clear();
                        self.parts.push(Part::Call(self.calls, name));
                        Body::Call
                    }
                    None if header.contains(channels.reasoning.as_str()) => {
                        self.thought = false;
                        Body::Reasoning
                    }
                    None => Body::Content,
                });
                true
            }
            // Cut off in a header, which says nothing.
            Found::Maybe(_) if last && (self.said || self.thought || self.calls > 0) => {
                self.held.clear();
                false
            }
            Found::Maybe(_) if last => {
                self.state = State::Body(Body::Content);
                true
            }
            Found::Maybe(_) => false,
        }
    }

    fn body(&mut self, body: Body, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(channels) = &dialect.channels else { return false };
        let mut markers: Vec<&str> = channels.end.iter().map(String::as_str).collect();
        let start = markers.len();
        markers.push(&channels.start);
        let (safe, found) = match find(&self.held, &markers, last) {
            Found::Marker(from, to, which) => (from, Some((to, which))),
            Found::Maybe(safe) => (safe, None),
        };
        match body {
            Body::Reasoning => self.think_until(safe),
            Body::Content => self.say_until(safe),
            Body::Call => {
                let text = self.take(safe);
                if !text.is_empty() {
                    self.parts.push(Part::Arguments(self.calls, text));
                }
            }
        }
        let Some((to, which)) = found else { return false };
        self.take(to - safe);
        self.calls += usize::from(body == Body::Call);
        self.blank.clear();
        self.state = if which == start { State::Header } else { State::Outside };
        true
    }

    fn outside(&mut self, last: bool) -> bool {
        let dialect = self.dialect.clone();
        let Some(channels) = &dialect.channels else { return false };
        match find(&self.held, &[&channels.start], last) {
            Found::Marker(_, end, _) => {
                self.take(end);
                self.state = State::Header;
                true
            }
            Found::Maybe(safe) => {
                self.take(safe);
                false
            }
        }
    }

    /// Takes so many bytes.
    fn take(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        std::mem::replace(&mut self.held, rest)
    }

    fn say_until(&mut self, bytes: usize) {
        let text = self.take(bytes);
        self.say(&text);
    }

    /// Tells content, but for white space at its ends.
    fn say(&mut self, text: &str) {
        let (known, blank) = self.unblank(text, self.said);
        if !known.is_empty() {
            self.said = true;
            self.parts.push(Part::Content(known));
        }
        self.blank = blank;
    }

    fn think_until(&mut self, bytes: usize) {
        let text = self.take(bytes);
        let (known, blank) = self.unblank(&text, self.thought);
        if !known.is_empty() {
            self.thought = true;
            self.parts.push(Part::Reasoning(known));
        }
        self.blank = blank;
    }

    /// A text with the white space before it, where it is not the first, and the white space after it.
    fn unblank(&mut self, text: &str, follows: bool) -> (String, String) {
        let whole = std::mem::take(&mut self.blank) + text;
        let known = whole.trim_end();
        let blank = whole[known.len()..].to_owned();
        let known = if follows { known } else { known.trim_start() };
        (known.to_owned(), blank)
    }
}
