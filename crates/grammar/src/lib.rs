//! What a text is held to, token by token: JSON, JSON schemas, regular expressions, choices, grammars.
//!
//! `llguidance` knows which tokens a grammar lets come next. [`Grammars`] compiles grammars for one tokenizer, within
//! limits, and keeps those that were asked for last; what it gives is a [`Constraint`] for the engine. Which tokens may
//! come is worked out by threads of its own, while the engine's goes on with other requests.

mod calls;
mod cursor;
mod gbnf;
mod schema;
mod tokens;

use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_runtime::Constraint;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use calls::Wanted;
use cursor::Compiled;
pub use schema::schema;

/// Bytes of a grammar as it is written.
const MOST_BYTES: usize = 256 << 10;
/// Texts to choose among.
const MOST_CHOICES: usize = 4096;
/// How deep a schema's JSON is nested.
const MOST_NESTED: usize = 64;
/// Compiling takes no longer for whoever waits for it.
const COMPILE_TIME: Duration = Duration::from_secs(10);
/// Grammars that are kept, and bytes of them as they are written.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 4 << 20;
/// Of threads that follow what a client wrote as deep as it goes.
const STACK: usize = 64 << 20;

/// What a text is held to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema admits.
    JsonSchema(Value),
    /// A regular expression, which all of the text matches. Syntax of Rust's `regex`, without look-around.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark, or in GBNF.
    Lark(String),
}

/// A grammar was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is wrong, not supported, or too complex.
    #[error("{0}")]
    Refused(String),
    /// It took too long.
    #[error("it takes longer than {} s to compile; make it simpler", COMPILE_TIME.as_secs())]
    TooSlow,
    /// The tokenizer cannot be used for this.
    #[error("this model's tokenizer cannot be held to a grammar: {0}")]
    Tokenizer(String),
}

/// Grammars for one tokenizer. Cloning shares it.
#[derive(Clone)]
pub struct Grammars(Arc<Shared>);

struct Shared {
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    /// Threads that compile, and threads that work out what may come next.
    pools: OnceLock<Result<[Arc<ThreadPool>; 2], GrammarError>>,
    /// Those asked for last come last.
    kept: Mutex<VecDeque<(String, Arc<Compiled>)>>,
}

impl Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("ends", &self.0.ends).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a tokenizer, and the tokens that end a text. Nothing is built yet.
    pub fn new(tokenizer: &Tokenizer, ends: &[u32]) -> Grammars {
        Grammars(Arc::new(Shared {
            tokenizer: tokenizer.clone(),
            ends: ends.to_vec(),
            factory: OnceLock::new(),
            pools: OnceLock::new(),
            kept: Mutex::default(),
        }))
    }

    /// Builds what all grammars need, so that no request waits for it: some 100 ms for a large vocabulary.
    pub fn warm(&self) -> Result<(), GrammarError> {
        self.factory().and(self.pools()).map(|_| ())
    }

    /// A grammar, ready to hold texts to. It may take seconds, and no longer than [`GrammarError::TooSlow`] says.
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<dyn Constraint>, GrammarError> {
        let lark = grammar.check()?;
        let key = serde_json::to_string(&lark).map_err(|e| refused(&e))?;
        if let Some(found) = self.kept(&key) {
            return Ok(found);
        }
        self.warm()?;
        let [compilers, workers] = self.pools()?;
        let (sender, receiver) = sync_channel(1);
        let (grammars, unwanted) = (self.clone(), Arc::new(AtomicBool::new(false)));
        let given_up = unwanted.clone();
        compilers.spawn(move || {
            if !given_up.load(Ordering::Acquire) {
                let _ = sender.send(grammars.matcher(lark)); // whoever waited may be gone
            }
        });
        let matcher = receiver.recv_timeout(COMPILE_TIME).map_err(|_| {
            unwanted.store(true, Ordering::Release);
            GrammarError::TooSlow
        })??;
        let compiled = Arc::new(Compiled::new(matcher, grammar.clone(), workers.clone()));
        self.keep(key, &compiled);
        Ok(compiled)
    }

    /// The grammar that a [constraint](Constraint::written) was written as, in this process or another, as by
    /// [`Grammars::compile`].
    pub fn compile_written(&self, written: &str) -> Result<Arc<dyn Constraint>, GrammarError> {
        let grammar: Grammar = serde_json::from_str(written).map_err(|e| refused(&e))?;
        self.compile(&grammar)
    }

    /// The part of a Lark grammar that stands for a text of the model's: tokens by themselves where the text is spelt
    /// as such and the tokenizer takes them for special ones, text elsewhere.
    pub fn literal(&self, text: &str) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let parts = self.0.tokenizer.special_parts(text);
        let part = |(text, token): (&str, Option<u32>)| match token {
            Some(id) => format!("<[{id}]>"),
            None => quoted(text),
        };
        let parts: Vec<String> = parts.into_iter().map(part).collect();
        if parts.is_empty() { quoted("") } else { parts.join(" ") }
    }

    fn kept(&self, key: &str) -> Option<Arc<Compiled>> {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(k, _)| k == key)?;
        let found = kept.remove(at)?;
        let compiled = found.1.clone();
        kept.push_back(found);
        Some(compiled)
    }

    fn keep(&self, key: String, compiled: &Arc<Compiled>) {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(k, _)| *k != key);
        kept.push_back((key, compiled.clone()));
        let bytes = |kept: &VecDeque<(String, _)>| kept.iter().map(|(k, _)| k.len()).sum::<usize>();
        while kept.len() > KEPT || bytes(&kept) > KEPT_BYTES {
            kept.pop_front();
        }
    }

    fn pools(&self) -> Result<&[Arc<ThreadPool>; 2], GrammarError> {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let pool = |name: &'static str, threads: usize| {
            let pool = ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |i| format!("{name} {i}"))
                .stack_size(STACK);
            pool.build().map(Arc::new).map_err(|e| refused(&e))
        };
        let pools = self.0.pools.get_or_init(|| {
            Ok([pool("grammar compiler", 2)?, pool("grammar", (cores / 2).clamp(1, 16))?])
        });
        pools.as_ref().map_err(Clone::clone)
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let build = || {
            let built = AssertUnwindSafe(|| tokens::factory(&self.0.tokenizer, &self.0.ends));
            catch_unwind(built).unwrap_or_else(|_| {
                let message = "a token could not be read".to_owned();
                Err(GrammarError::Tokenizer(message))
            })
        };
        self.0.factory.get_or_init(build).as_ref().map_err(Clone::clone)
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, GrammarError> {
        let factory = self.factory()?;
        let compile = AssertUnwindSafe(|| Matcher::new(factory.create_parser(grammar)));
        let matcher = catch_unwind(compile)
            .map_err(|_| GrammarError::Refused("it cannot be compiled".to_owned()))?;
        match matcher.get_error() {
            None => Ok(matcher),
            Some(error) => Err(GrammarError::Refused(in_short(&error))),
        }
    }
}

impl Grammar {
    /// What is compiled; refused where it is larger than it may be.
    fn check(&self) -> Result<TopLevelGrammar, GrammarError> {
        let bytes = match self {
            Grammar::JsonObject => 0,
            Grammar::JsonSchema(schema) => {
                check_nesting(schema, MOST_NESTED)?;
                schema.to_string().len()
            }
            Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        if bytes > MOST_BYTES {
            let message = format!("expected at most {MOST_BYTES} bytes, found {bytes}");
            return Err(GrammarError::Refused(message));
        }
        Ok(match self {
            Grammar::JsonObject => of_schema(&json!({"type": "object"}))?,
            Grammar::JsonSchema(schema) => of_schema(schema)?,
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Choice(texts) => of_choice(texts)?,
            Grammar::Lark(text) if gbnf::is_gbnf(text) => {
                TopLevelGrammar::from_lark(gbnf::lark(text)?)
            }
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        })
    }
}

fn of_schema(given: &Value) -> Result<TopLevelGrammar, GrammarError> {
    Ok(TopLevelGrammar::from_grammar(GrammarWithLexer::from_json_schema(schema(given)?)))
}

fn of_choice(texts: &[String]) -> Result<TopLevelGrammar, GrammarError> {
    if texts.is_empty() || texts.len() > MOST_CHOICES || texts.iter().any(String::is_empty) {
        let message = format!("expected 1 to {MOST_CHOICES} texts, none of them empty");
        return Err(GrammarError::Refused(message));
    }
    let all: Vec<String> =
        texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    Ok(TopLevelGrammar::from_lark(format!("start: {}", all.join("\n  | "))))
}

/// Refuses JSON that is nested deeper than that.
fn check_nesting(value: &Value, left: usize) -> Result<(), GrammarError> {
    let Some(left) = left.checked_sub(1) else {
        let message = format!("expected at most {MOST_NESTED} levels of nesting");
        return Err(GrammarError::Refused(message));
    };
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_nesting(item, left)),
        Value::Object(fields) => fields.values().try_for_each(|item| check_nesting(item, left)),
        _ => Ok(()),
    }
}

fn refusal(message: &str) -> GrammarError {
    GrammarError::Refused(message.to_owned())
}

fn refused(error: &dyn std::error::Error) -> GrammarError {
    GrammarError::Refused(error.to_string())
}

/// The first lines of an error: what comes after them are states and traces.
fn in_short(error: &str) -> String {
    let first = error.split("<state>").next().unwrap_or(error);
    let first = first.split("<backtrace>").next().unwrap_or(first);
    first.trim().chars().take(600).collect()
}

#[cfg(test)]
mod tests;
