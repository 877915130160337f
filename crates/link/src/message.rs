//! What engines and front ends tell each other.

use std::time::{Duration, Instant};

use infernum_runtime::{EngineError, Event, Logprobs, Request, RequestId, SamplingError, Stats};
use serde::{Deserialize, Serialize};

/// What a front end asks of an engine.
#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// A request.
    Submit(Box<Submission>),
    /// A request is no longer wanted.
    Cancel(u64, End),
    /// Requests that follow share no prefix with those before, of any front end.
    ForgetPrefixes,
    /// The engine is to give back its memory; a report [tells](Report::done) when it has, by this name.
    Sleep(u64, Sleep),
    /// It is to be as it was before, and to tell so.
    Wake(u64),
    /// It is to load an adapter, and to tell so: requests of any front end may name it then.
    LoadAdapter(u64, AdapterPath),
    /// It is to take no more requests of the adapter of this name, and to tell so; those that it has run to their ends.
    UnloadAdapter(u64, String),
}

impl Command {
    /// The name that is waited for, where whoever sent it waits for one.
    pub fn key(&self) -> Option<u64> {
        match self {
            Command::Submit(submission) => Some(submission.key),
            Command::Sleep(key, _)
            | Command::Wake(key)
            | Command::LoadAdapter(key, _)
            | Command::UnloadAdapter(key, _) => Some(*key),
            Command::Cancel(..) | Command::ForgetPrefixes => None,
        }
    }
}

/// An adapter to load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AdapterPath {
    /// What it is called from then on.
    pub name: String,
    /// Its folder, as the engine's process finds it below the one that it may load from.
    pub path: String,
}

/// How an engine is to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sleep {
    /// What it keeps.
    pub depth: Depth,
    /// Whether requests that it has are ended, rather than waited for.
    pub abort: bool,
}

/// What an engine that sleeps keeps of what it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Depth {
    /// What makes waking fast and takes little memory.
    Light,
    /// Nothing: it is made as it was made first.
    Deep,
}

/// A request with the name that its front end has for it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Submission {
    /// The name, which the front end uses once.
    pub key: u64,
    /// What is asked.
    pub request: Request,
    /// What it is held to, as it is [written](infernum_runtime::Constraint::written), where it has come through a socket.
    pub grammar: Option<String>,
    /// The name of the adapter that it is computed with.
    pub adapter: Option<String>,
}

impl Submission {
    /// Refuses what a front end would not have let through, and an engine does not look at.
    pub(crate) fn check(&self, vocab: usize) -> Result<(), Refusal> {
        let refuse = |field: &str, message: String| {
            Err(Refusal::new(Cause::Value(field.to_owned()), message))
        };
        let request = &self.request;
        let wrong = |token: &&u32| **token as usize >= vocab;
        if let Some(token) = request.bias.iter().map(|(token, _)| token).find(wrong) {
            return refuse("logit_bias", format!("expected tokens below {vocab}, found {token}"));
        }
        let tokens = request.tokens.len();
        if let Some(second) = request.second.filter(|second| *second > tokens) {
            return refuse("prompt", format!("a second text at {second}, of {tokens} tokens"));
        }
        Ok(())
    }
}

/// Why a request is no longer wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// Its text reached a stop string.
    Stopped,
    /// Nobody listens.
    Aborted,
    /// Whoever listens does not read.
    Unread,
    /// The engine was put to sleep.
    Slept,
}

/// What goes to an engine over a socket.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToEngine {
    /// A command.
    Command(Command),
    /// Reports were taken that are worth so much [credit](Report::size); of none, a sign of life.
    Taken(u64),
}

/// What one step, and the commands before it, did for a front end. Over a socket an empty one is a sign of life.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Requests that were taken: the front end's names, and the engine's.
    pub accepted: Vec<(u64, RequestId)>,
    /// Requests that were refused.
    pub rejected: Vec<(u64, Refusal)>,
    /// What happened to requests.
    pub events: Vec<Event>,
    /// Requests that ended because they were not wanted any more.
    pub cancelled: Vec<(RequestId, End)>,
    /// What was done that was waited for, by its name; why it was not, where it was not.
    pub done: Vec<(u64, Result<(), Refusal>)>,
    /// Why the step failed, if it did.
    pub error: Option<String>,
    /// Steps that ended since the last report, this one not yet among them.
    pub steps: Vec<StepTime>,
    /// What the step took.
    pub took: Duration,
    /// When it ended; over a socket, when that was heard.
    #[serde(skip, default = "Instant::now")]
    pub ended: Instant,
    /// How the engine stands, with the requests of all its front ends.
    pub stats: Stats,
    /// Messages that the engine could not read, of all its front ends.
    pub malformed: u64,
    /// Whether it takes no more requests, as it is about to end.
    pub draining: bool,
    /// Whether it takes none before it is woken.
    pub asleep: bool,
    /// What it took to work out what may come next in texts that are held to something, since the last report.
    pub masks: Vec<Duration>,
    /// The names of all adapters that the engine has: to those who have just come, and whenever that changes.
    pub adapters: Option<Vec<String>>,
}

impl Default for Report {
    fn default() -> Report {
        Report {
            accepted: Vec::new(),
            rejected: Vec::new(),
            events: Vec::new(),
            cancelled: Vec::new(),
            done: Vec::new(),
            error: None,
            steps: Vec::new(),
            took: Duration::ZERO,
            ended: Instant::now(),
            stats: Stats::default(),
            malformed: 0,
            draining: false,
            asleep: false,
            masks: Vec::new(),
            adapters: None,
        }
    }
}

/// What a step took, and what of it was neither computing nor waiting for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// From its commands to its end.
    pub all: Duration,
    /// What the host did in it.
    pub host: Duration,
}

impl Report {
    /// Steps of which a front end is told at the latest, whether they had to do with it or not.
    const MOST_STEPS: usize = 64;

    /// Whether it is worth sending.
    pub(crate) fn says_something(&self) -> bool {
        !(self.accepted.is_empty()
            && self.rejected.is_empty()
            && self.events.is_empty()
            && self.cancelled.is_empty()
            && self.done.is_empty()
            && self.adapters.is_none())
            || self.steps.len() >= Report::MOST_STEPS
    }

    /// Bytes that it takes, roughly. Both sides find the same: it is what its credit is counted in.
    pub fn size(&self) -> usize {
        let told = |logprobs: &Logprobs| 32 + 16 * logprobs.top.len();
        let event = |event: &Event| match event {
            Event::Token(_, _, None) | Event::Started(..) | Event::Finished(..) => 32,
            Event::Token(_, _, Some(logprobs)) | Event::Prompt(_, logprobs) => 32 + told(logprobs),
            Event::Vector(_, row) => 32 + 4 * row.len(),
        };
        let refused: usize = self.rejected.iter().map(|(_, r)| 32 + r.message.len()).sum();
        let undone =
            |done: &Result<(), Refusal>| done.as_ref().err().map_or(0, |r| r.message.len());
        let done: usize = self.done.iter().map(|(_, done)| 32 + undone(done)).sum();
        let adapters: usize = self.adapters.iter().flatten().map(|name| 32 + name.len()).sum();
        let lists =
            self.accepted.len() + self.cancelled.len() + self.steps.len() + self.masks.len();
        let error = self.error.as_ref().map_or(0, String::len);
        let texts = refused + done + adapters + error;
        128 + 32 * lists + texts + self.events.iter().map(event).sum::<usize>()
    }
}

/// Why an engine did not take a request, or not do what was waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What is at fault.
    pub cause: Cause,
    /// What was expected and found.
    pub message: String,
}

/// What a refused request, or command, is at fault for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// The value of this field.
    Value(String),
    /// This field asks for what the engine does not do.
    Unsupported(String),
    /// The length of its prompt.
    TooLong,
    /// It is of another kind than the model.
    Model,
    /// Its grammar.
    Grammar,
    /// The adapter that it names, which is not there.
    NoAdapter,
    /// That it is asked at all: front ends have no say in which adapters there are.
    AdaptersNotAllowed,
    /// Nothing: there is no room for another adapter.
    NoAdapterSlot,
    /// Nothing: the engine has as many requests as it takes.
    Busy,
    /// Nothing: the engine is about to end.
    Draining,
    /// Nothing: the engine sleeps, or is about to.
    Asleep,
    /// Nothing that a client could mend.
    Internal,
}

impl Refusal {
    pub(crate) fn new(cause: Cause, message: impl Into<String>) -> Refusal {
        Refusal { cause, message: message.into() }
    }
}

impl From<&EngineError> for Refusal {
    fn from(error: &EngineError) -> Refusal {
        let cause = match error {
            EngineError::EmptyPrompt | EngineError::Token { .. } => Cause::Value("prompt".into()),
            EngineError::TooLong { .. } | EngineError::CacheTooSmall { .. } => Cause::TooLong,
            EngineError::Sampling(SamplingError { name, .. }) => Cause::Value((*name).to_owned()),
            EngineError::Logprobs { .. } => Cause::Value("logprobs".into()),
            EngineError::NoTokens { .. } => Cause::Model,
            EngineError::NoAdapter => Cause::NoAdapter,
            EngineError::NoAdapterSlot { .. } => Cause::NoAdapterSlot,
            EngineError::GreedyOnly => Cause::Unsupported("temperature".into()),
            EngineError::Exec(_) => Cause::Internal,
        };
        Refusal::new(cause, error.to_string())
    }
}

/// What an engine is, for a front end that has just come to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// One for each time that an engine is started: its counters begin anew.
    pub instance: u64,
    /// The name that its model goes by.
    pub name: String,
    /// Where the model's files are, as a folder, a GGUF file or a name on the hub; `None` of the built-in one.
    pub model: Option<String>,
    /// A digest of all that reading and writing texts depends on.
    pub digest: String,
    /// What a front end has to know.
    pub facts: Facts,
    /// Bytes of a message that it takes.
    pub most_bytes: u32,
}

/// What a front end has to know of an engine and its model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Tokens of the longest sequence.
    pub max_length: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Numbers of a row of output: of what does not generate, those of a vector, or scores.
    pub width: usize,
    /// Blocks of its cache.
    pub blocks: usize,
    /// Requests that run together.
    pub sequences: usize,
    /// Requests of one front end that may wait beside them.
    pub queue: usize,
    /// `model_type` of the model's config.
    pub family: String,
    /// What its weights are stored as.
    pub format: String,
    /// Bytes of its weights.
    pub bytes: u64,
    /// What it runs on.
    pub on: String,
}
