//! A model that answers: the shortest way from a folder to text.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use infernum_frontend_hf::chat::Message;
use infernum_frontend_hf::tokenizer::TextStream;
use infernum_runtime::{
    Engine, EngineOptions, Event, FinishReason, Logprobs, PlanExecutor, Request, RequestId,
};

use crate::capacity::Capacity;
use crate::error::Error;
use crate::frontend::Frontend;
use crate::load::Loader;
use crate::machine::Machine;
use crate::options::{ModelOptions, RunOptions};
use crate::tune;

/// A model that is loaded, and answers one request at a time.
///
/// It runs on the thread that made it. To run many requests together, take the [`Frontend`] and the
/// [`Engine`] apart ([`Generator::into_parts`]) and drive the engine yourself.
pub struct Generator {
    frontend: Frontend,
    engine: Engine<Box<dyn PlanExecutor>>,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// The text that is now certain: often empty, as a token may end inside a character.
    pub text: String,
    /// The token that brought it; none where text that was held back comes last.
    pub token: Option<u32>,
    /// Its log-probability, if the request asked for it.
    pub logprobs: Option<Box<Logprobs>>,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
}

impl Generator {
    /// Opens a model, compiles it and loads it, for one request at a time: on the first GPU if there is one,
    /// else on the CPU, unless `run` says otherwise.
    pub fn open(model: &ModelOptions, run: &RunOptions) -> Result<Generator, Error> {
        let (opened, machine) = (model.open()?, Machine::open(run.device)?);
        Generator::load(&Loader::new(&opened, model, run, &machine), Frontend::open(&opened)?)
    }

    /// The same with a loader of your own, which may tell how far it is.
    pub fn load(loader: &Loader<'_>, frontend: Frontend) -> Result<Generator, Error> {
        let capacity = Capacity::one(loader.compile.length(loader.model)?);
        tune::autotune(loader)?;
        let engine = loader.start(capacity, EngineOptions::default())?;
        Ok(Generator::new(frontend, engine))
    }

    /// Of parts that were made before.
    pub fn new(frontend: Frontend, engine: Engine<Box<dyn PlanExecutor>>) -> Generator {
        Generator { frontend, engine }
    }

    /// A request that continues `text`, as [`Frontend::prompt`] makes it.
    pub fn prompt(&self, text: &str) -> Result<Request, Error> {
        self.frontend.prompt(text)
    }

    /// A request for the assistant's next message, as [`Frontend::chat`] makes it.
    pub fn chat(&self, messages: &[Message]) -> Result<Request, Error> {
        self.frontend.chat(messages)
    }

    /// Answers a request piece by piece. Dropping the stream ends the request.
    pub fn stream(&mut self, request: Request) -> Result<Stream<'_>, Error> {
        let id = self.engine.submit(request)?;
        let text = self.frontend.text();
        Ok(Stream { engine: &mut self.engine, id, text, events: VecDeque::new(), finish: None })
    }

    /// Answers a request.
    pub fn complete(&mut self, request: Request) -> Result<Completion, Error> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        let mut stream = self.stream(request)?;
        for piece in &mut stream {
            let piece = piece?;
            text.push_str(&piece.text);
            tokens.extend(piece.token);
        }
        // It has ended: what fails is an error, and all else ends with a reason.
        let finish = stream.finish().unwrap_or(FinishReason::Failed);
        Ok(Completion { text, tokens, finish })
    }

    /// The text side.
    pub fn frontend(&self) -> &Frontend {
        &self.frontend
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<Box<dyn PlanExecutor>> {
        &self.engine
    }

    /// Both sides, to be driven in another way.
    pub fn into_parts(self) -> (Frontend, Engine<Box<dyn PlanExecutor>>) {
        (self.frontend, self.engine)
    }
}

/// An answer on its way: an iterator over its pieces.
pub struct Stream<'a> {
    engine: &'a mut Engine<Box<dyn PlanExecutor>>,
    id: RequestId,
    text: TextStream,
    events: VecDeque<Event>,
    finish: Option<FinishReason>,
}

impl Stream<'_> {
    /// Why it ended; `None` while it has not.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The next piece; `None` at the end.
    fn advance(&mut self) -> Result<Option<Piece>, Error> {
        while self.finish.is_none() {
            if let Some(event) = self.events.pop_front() {
                match event {
                    Event::Token(_, token, logprobs) => {
                        let text = self.text.push(token)?;
                        return Ok(Some(Piece { text, token: Some(token), logprobs }));
                    }
                    Event::Finished(_, FinishReason::Failed) => return Err(Error::NoDistribution),
                    Event::Finished(_, FinishReason::Unfollowed) => return Err(Error::Unfollowed),
                    Event::Finished(_, reason) => self.finish = Some(reason),
                    Event::Started(..) | Event::Prompt(..) | Event::Vector(..) => {}
                }
                continue;
            }
            self.step()?;
            if self.events.is_empty() {
                // The engine is idle and told nothing: that cannot be, and must not hang.
                self.finish = Some(FinishReason::Failed);
            }
        }
        let text = self.text.flush()?;
        Ok((!text.is_empty()).then_some(Piece { text, token: None, logprobs: None }))
    }

    /// Steps until something came of it.
    fn step(&mut self) -> Result<(), Error> {
        let (events, id) = (&mut self.events, self.id);
        self.engine.drive(|_, new| {
            // Of a request before, which was dropped, a last step may still be under way.
            events.extend(new.filter(|event| event.request() == id));
            if events.is_empty() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        Ok(())
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Result<Piece, Error>> {
        let piece = self.advance().transpose();
        if matches!(piece, Some(Err(_))) {
            self.finish.get_or_insert(FinishReason::Failed);
        }
        piece
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if self.finish.is_none() {
            self.engine.cancel(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use infernum_runtime::SamplingParams;

    use super::*;
    use crate::options::DeviceId;

    fn ember() -> Generator {
        let run = RunOptions { device: Some(DeviceId::Cpu), ..RunOptions::default() };
        Generator::open(&ModelOptions::default(), &run).expect("the demo model")
    }

    fn story(generator: &Generator, max_tokens: usize) -> Request {
        let request = generator.prompt("Once upon a time").expect("tokens");
        Request { max_tokens, sampling: SamplingParams::default(), ..request }
    }

    #[test]
    fn pieces_are_the_parts_of_a_completion() {
        let mut generator = ember();
        let request = Request { logprobs: Some(0), ..story(&generator, 24) };
        let whole = generator.complete(request.clone()).expect("an answer");
        assert_eq!((whole.tokens.len(), whole.finish), (24, FinishReason::Length));
        let decoded = generator.frontend().tokenizer().decode(&whole.tokens, true);
        assert_eq!(whole.text, decoded.expect("text"));
        let mut stream = generator.stream(request).expect("a stream");
        let pieces: Vec<Piece> = stream.by_ref().map(|p| p.expect("a piece")).collect();
        assert_eq!(stream.finish(), Some(FinishReason::Length));
        assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), whole.text);
        assert_eq!(pieces.iter().filter_map(|p| p.token).collect::<Vec<_>>(), whole.tokens);
        assert!(pieces.iter().all(|p| p.token.is_some() == p.logprobs.is_some()));
    }

    #[test]
    fn a_stream_that_is_dropped_leaves_nothing_behind() {
        let mut generator = ember();
        let request = story(&generator, 12);
        let expected = generator.complete(request.clone()).expect("an answer");
        let mut stream = generator.stream(request.clone()).expect("a stream");
        assert!(stream.next().is_some() && stream.next().is_some());
        drop(stream);
        let (free, total) = generator.engine().blocks();
        assert_eq!((free, generator.engine().stats().running), (total, 0));
        assert_eq!(generator.complete(request).expect("an answer"), expected);
    }

    #[test]
    fn a_request_is_as_the_checkpoint_says() {
        let generator = ember();
        let messages = [Message::new("user", "Hello!")];
        let (chat, text) = (generator.chat(&messages), generator.prompt("Hello!"));
        let (chat, text) = (chat.expect("a prompt"), text.expect("a prompt"));
        assert!(chat.tokens.len() > text.tokens.len(), "roles stand around the message");
        for request in [chat, text] {
            let p = request.sampling;
            assert_eq!((request.stop, p.temperature, p.top_p), (vec![1, 5], 0.7, 0.95));
        }
    }

    #[test]
    fn a_front_end_can_be_shared_among_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Frontend>();
    }

    #[test]
    fn what_cannot_be_opened_is_named() {
        let opened = Generator::open(&ModelOptions::folder("/no/such"), &RunOptions::default());
        let error = opened.err().expect("an error");
        assert!(matches!(error, Error::Source(_)), "{error:?}");
        assert!(error.to_string().starts_with("/no/such: no such folder"), "{error}");
        let mut generator = ember();
        let empty = Request { tokens: Vec::new(), ..story(&generator, 1) };
        assert!(matches!(generator.stream(empty).err(), Some(Error::Engine(_))));
    }
}
