//! Answers as what follows one another in them, whole or as they come: what all APIs but OpenAI's first two tell.

use axum::response::Response;
use infernum::Part;
use infernum_frontend_hf::chat::Message;
use infernum_frontend_hf::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use super::calls::{self, Reader, Reading};
use super::turns;
use crate::app::App;
use crate::error::ApiError;
use crate::generation::{Finish, Generation, TokenLogprob, Used, Whole};
use crate::lanes::Client;
use crate::model::Served;

/// The key of arguments that are no JSON object, as Anthropic advises.
const INVALID: &str = "INVALID_JSON";

/// What follows one another in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON, as text.
    pub(crate) arguments: String,
}

impl Call {
    /// Its arguments for an API whose calls have objects. What the model wrote otherwise, or was cut, stands in one as
    /// text.
    pub(crate) fn input(&self) -> Map<String, Value> {
        if self.arguments.trim().is_empty() {
            return Map::new();
        }
        serde_json::from_str(&self.arguments).unwrap_or_else(|_| {
            Map::from_iter([(INVALID.to_owned(), self.arguments.clone().into())])
        })
    }
}

/// An answer as a message of the conversation that goes on from it.
pub(crate) fn message(blocks: &[Block]) -> Message {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        match block {
            Block::Reasoning(text) => reasoning.push_str(text),
            Block::Text(text) => content.push_str(text),
            Block::Call(call) => calls.push(calls::past(&call.id, &call.name, &call.input())),
        }
    }
    turns::assistant(content.into(), reasoning, calls)
}

/// What becomes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change<'a> {
    Begins,
    Grows(&'a str),
    /// Whether no other one follows.
    Ends {
        last: bool,
    },
}

/// An answer's blocks as they come. One ends before the next one begins.
pub(crate) struct Blocks {
    reading: Reading,
    all: Vec<Block>,
    /// Whether the last one has not ended.
    open: bool,
}

impl Blocks {
    pub(crate) fn new(reader: &Reader) -> Blocks {
        Blocks { reading: reader.begin(), all: Vec::new(), open: false }
    }

    /// Takes more text, and tells each change with the block as it then is, and its number.
    pub(crate) fn take(
        &mut self,
        text: &str,
        last: bool,
        mut tell: impl FnMut(usize, &Block, Change<'_>),
    ) {
        for part in self.reading.take(text, last) {
            match part {
                Part::Reasoning(text) => {
                    self.say(Block::Reasoning(String::new()), &text, &mut tell);
                }
                Part::Content(text) => self.say(Block::Text(String::new()), &text, &mut tell),
                Part::Call(_, name) => {
                    let call = Call { id: self.reading.id(), name, arguments: String::new() };
                    self.begin(Block::Call(call), &mut tell);
                }
                Part::Arguments(_, text) => {
                    if self.open && matches!(self.all.last(), Some(Block::Call(_))) {
                        self.grow(&text, &mut tell);
                    }
                }
            }
        }
        if last {
            self.end(true, &mut tell);
        }
    }

    /// Adds text to the last block, or to a new one where that is not of the `kind`.
    fn say(&mut self, kind: Block, text: &str, tell: &mut impl FnMut(usize, &Block, Change<'_>)) {
        let last = self.all.last().filter(|_| self.open).map(std::mem::discriminant);
        if last != Some(std::mem::discriminant(&kind)) && !text.is_empty() {
            self.begin(kind, tell);
        }
        self.grow(text, tell);
    }

    fn begin(&mut self, block: Block, tell: &mut impl FnMut(usize, &Block, Change<'_>)) {
        self.end(false, tell);
        tell(self.all.len(), &block, Change::Begins);
        self.all.push(block);
        self.open = true;
    }

    fn grow(&mut self, more: &str, tell: &mut impl FnMut(usize, &Block, Change<'_>)) {
        let number = self.all.len().saturating_sub(1);
        let Some(block) = self.all.last_mut().filter(|_| !more.is_empty()) else { return };
        match block {
            Block::Reasoning(text) | Block::Text(text) => text.push_str(more),
            Block::Call(call) => call.arguments.push_str(more),
        }
        tell(number, block, Change::Grows(more));
    }

    fn end(&mut self, last: bool, tell: &mut impl FnMut(usize, &Block, Change<'_>)) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        // A call without arguments has an empty object of them.
        if matches!(self.all.last(), Some(Block::Call(call)) if call.arguments.trim().is_empty()) {
            self.grow("{}", tell);
        }
        if let Some(block) = self.all.last() {
            tell(self.all.len() - 1, block, Change::Ends { last });
        }
    }

    /// All so far.
    pub(crate) fn all(&self) -> &[Block] {
        &self.all
    }

    /// How many tokens its reasoning has.
    pub(crate) fn thoughts(&self, tokenizer: &Tokenizer) -> usize {
        token_count(tokenizer, &self.reading.reasoning)
    }
}

/// A whole choice, read.
pub(crate) struct Answered {
    pub(crate) blocks: Vec<Block>,
    pub(crate) finish: Finish,
    /// The stop string that ended it, if one did.
    pub(crate) stop: Option<String>,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) prompt: Option<Vec<TokenLogprob>>,
}

/// Why an answer ended, for those who tell a call apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Stop,
    StopString,
    Calls,
    Length,
}

impl Ending {
    pub(crate) fn of(finish: Finish, stop: Option<&str>, blocks: &[Block]) -> Ending {
        let calls = blocks.iter().any(|block| matches!(block, Block::Call(_)));
        match (finish, stop) {
            (Finish::Length, _) => Ending::Length,
            (Finish::Stop, Some(_)) => Ending::StopString,
            (Finish::Stop, None) if calls => Ending::Calls,
            (Finish::Stop, None) => Ending::Stop,
        }
    }
}

impl Answered {
    fn read(reader: &Reader, whole: Whole) -> (Answered, String) {
        let mut blocks = Blocks::new(reader);
        blocks.take(&whole.text, true, |_, _, _| {});
        let Whole { prompt, logprobs, finish, stop, .. } = whole;
        let answered = Answered { blocks: blocks.all, finish, stop, logprobs, prompt };
        (answered, blocks.reading.reasoning)
    }

    /// Why it ended.
    pub(crate) fn ending(&self) -> Ending {
        Ending::of(self.finish, self.stop.as_deref(), &self.blocks)
    }
}

/// Waits for all of an answer, and has it told off the runtime.
pub(crate) async fn collect(
    app: &App,
    client: Client,
    served: &Served,
    reader: Reader,
    mut generation: Generation,
    tell: impl FnOnce(Vec<Answered>, Used) -> Response + Send + 'static,
) -> Result<Response, ApiError> {
    let wholes = generation.collect().await?;
    let used = generation.used();
    let size = wholes.iter().map(Whole::size).sum();
    let tokenizer = served.frontend.tokenizer().clone();
    let work = move || {
        let read = |whole| {
            let (answered, reasoning) = Answered::read(&reader, whole);
            (answered, token_count(&tokenizer, &reasoning))
        };
        let (answers, thoughts): (Vec<_>, Vec<_>) = wholes.into_iter().map(read).unzip();
        Ok(tell(answers, Used { reasoning: thoughts.iter().sum(), ..used }))
    };
    app.lanes.run(client, size, work).await
}

/// How many tokens a text has by itself.
pub(crate) fn token_count(tokenizer: &Tokenizer, text: &str) -> usize {
    if text.is_empty() { 0 } else { tokenizer.encode(text, false).map_or(0, |tokens| tokens.len()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::calls::tests::reader;
    use super::*;

    /// Thoughts, a text, and two calls, of which one has no arguments.
    pub(crate) const ANSWER: &str = "<think>Hm.</think>Yes.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1]}}\n\
        </tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

    #[test]
    fn changes_make_the_blocks_however_a_text_is_cut() {
        let reader = reader("");
        let cut_at = |cuts: &[usize]| {
            let (mut blocks, mut told) = (Blocks::new(&reader), Vec::new());
            let mut start = 0;
            for &end in cuts.iter().chain([&ANSWER.len()]) {
                let last = end == ANSWER.len();
                blocks.take(&ANSWER[start..end], last, |i, block, change| match change {
                    Change::Begins => {
                        assert_eq!(i, told.len(), "one after the other");
                        told.push((String::new(), None));
                    }
                    Change::Grows(text) => {
                        assert!(i + 1 == told.len() && told[i].1.is_none() && !text.is_empty());
                        told[i].0.push_str(text);
                    }
                    Change::Ends { last } => {
                        assert!(i + 1 == told.len() && told[i].1.is_none());
                        let whole = match block {
                            Block::Text(text) | Block::Reasoning(text) => text,
                            Block::Call(call) => &call.arguments,
                        };
                        assert_eq!(whole, &told[i].0);
                        told[i].1 = Some(last);
                    }
                });
                start = end;
            }
            (blocks.all, told)
        };
        for at in 1..ANSWER.len() {
            let (all, told) = cut_at(&[at]);
            let ends: Vec<_> = told.iter().map(|(_, end)| *end).collect();
            assert_eq!(ends, [Some(false), Some(false), Some(false), Some(true)]);
            let [Block::Reasoning(thought), Block::Text(text), Block::Call(one), Block::Call(two)] =
                &all[..]
            else {
                panic!("{all:?}")
            };
            assert_eq!((thought.as_str(), text.as_str()), ("Hm.", "Yes."));
            assert_eq!(serde_json::json!(one.input()), serde_json::json!({"a": [1]}));
            assert!(two.input().is_empty() && one.id != two.id && one.name == "f");
            let message = message(&all).0;
            assert_eq!(
                (&message["content"], &message["reasoning_content"]),
                (&"Yes.".into(), &"Hm.".into())
            );
            assert_eq!(message["tool_calls"][0]["function"]["arguments"]["a"][0], 1);
        }
    }

    #[test]
    fn what_is_no_call_is_still_told() {
        let call = |arguments: &str| Call {
            id: "1".to_owned(),
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
        };
        assert_eq!(call("{\"a\": 1").input()["INVALID_JSON"], "{\"a\": 1");
        assert_eq!(call("[1]").input()["INVALID_JSON"], "[1]");
        assert!(call(" ").input().is_empty());
        let ending = |finish, stop| Ending::of(finish, stop, &[Block::Call(call("{}"))]);
        assert_eq!(ending(Finish::Stop, None), Ending::Calls);
        assert_eq!(ending(Finish::Length, None), Ending::Length);
        assert_eq!(ending(Finish::Stop, Some("x")), Ending::StopString);
        assert_eq!(Ending::of(Finish::Stop, None, &[]), Ending::Stop);
    }
}
