//! From requests to text: what happens between the JSON that comes and the JSON that goes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use infernum_frontend_hf::tokenizer::TokenizerError;
use infernum_link::End;
use infernum_runtime::{FinishReason, Logprobs, Request};

use super::app::App;
use super::error::ApiError;
use super::lanes::aside;
use super::model::Served;
use super::outbox::Output;
use super::text::{TextOut, TextRules};
use super::traces::{self, Ended, Span};
use super::worker::Running;

/// Choices of one HTTP request at most.
pub(crate) const MOST_CHOICES: usize = 128;

/// What is to be generated.
pub(crate) struct Job {
    /// One for each choice; the choices of a prompt stand together.
    pub(crate) requests: Vec<Request>,
    /// Choices of each prompt.
    pub(crate) per_prompt: usize,
    /// How tokens become text.
    pub(crate) text: TextRules,
    /// The prompts' texts, where they are to stand before the choices.
    pub(crate) echo: Option<Vec<String>>,
    /// Whether the prompts' log-probabilities are told apart from the tokens'.
    pub(crate) tell_prompts: bool,
    /// The request's name, for the log.
    pub(crate) request_id: String,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
}

impl Finish {
    /// As OpenAI spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// One token's log-probability.
#[derive(Clone, Debug)]
pub(crate) struct TokenLogprob {
    pub(crate) token: u32,
    /// `None` for the first of a prompt.
    pub(crate) logprob: Option<f32>,
    /// How many tokens are likelier, and 1.
    pub(crate) rank: u32,
    /// The likeliest tokens.
    pub(crate) top: Vec<(u32, f32)>,
    /// Characters of the text before it.
    pub(crate) offset: usize,
}

/// The next part of a choice.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) choice: usize,
    /// With the first piece of a choice, where they are wanted: those of its prompt.
    pub(crate) prompt: Option<Vec<TokenLogprob>>,
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) finish: Option<Finish>,
    /// The stop string that ended it, if one did.
    pub(crate) stop: Option<String>,
}

impl Piece {
    /// Tokens that it tells of, the likeliest included.
    pub(crate) fn logprob_count(&self) -> usize {
        let all = self.logprobs.iter().chain(self.prompt.iter().flatten());
        all.map(|l| 1 + l.top.len()).sum()
    }
}

/// A whole choice.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) prompt: Option<Vec<TokenLogprob>>,
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) finish: Finish,
    /// The stop string that ended it, if one did.
    pub(crate) stop: Option<String>,
    /// Mean log-probability of its tokens.
    pub(crate) mean: f64,
}

impl Whole {
    /// Bytes of its JSON, roughly.
    pub(crate) fn size(&self) -> usize {
        let all = self.logprobs.iter().chain(self.prompt.iter().flatten());
        self.text.len() + 64 * all.map(|l| 1 + l.top.len()).sum::<usize>()
    }
}

/// Tokens that were used, and time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) completion: usize,
    /// Of these, tokens of reasoning.
    pub(crate) reasoning: usize,
    /// From hand-over to the engine until the first token.
    pub(crate) to_first: Duration,
    /// From hand-over to the engine until now.
    pub(crate) in_all: Duration,
}

struct Prompt {
    tokens: Vec<u32>,
    echo: Option<String>,
    own_logprobs: bool,
}

struct Choice {
    text: TextOut,
    /// Characters of the prompt, where it is echoed.
    base: usize,
    /// Characters that were shown, those of the prompt included.
    shown: usize,
    /// Waits for the text it belongs to.
    pending: Vec<TokenLogprob>,
    /// What the first piece still needs of the prompt: its tokens, where anything is told of them,
    /// its text, where it is echoed, and whether its log-probabilities have a field of their own.
    prompt: Option<Prompt>,
    prompt_logprobs: Vec<Logprobs>,
    tokens: usize,
    sum: f64,
    cached: usize,
    finish: Option<Finish>,
}

/// Choices under way. Dropping it cancels them.
pub(crate) struct Generation {
    served: Arc<Served>,
    running: Running,
    choices: Vec<Choice>,
    per_prompt: usize,
    prompt_tokens: usize,
    backlog: VecDeque<(u32, Output)>,
    left: usize,
    arrival: Instant,
    first: Option<Instant>,
    /// From hand-over to the engine until the first step of the choice that came first.
    queued: Option<Duration>,
    deadline: Option<Instant>,
    request_id: String,
    error: Option<String>,
    span: Option<Span>,
}

impl Generation {
    /// Hands a job to the engine and waits until it is taken.
    pub(crate) async fn start(
        app: &App,
        served: &Arc<Served>,
        job: Job,
    ) -> Result<Generation, ApiError> {
        let worker = &served.worker;
        let n = job.requests.len();
        let most = worker.room().min(MOST_CHOICES);
        if n > most {
            let message = format!("expected at most {most} choices in all, found {n}");
            return Err(ApiError::value("n", message));
        }
        let rooms = served.admit(&job.requests).map_err(|why| served.untaken(&why))?;
        let choice = |(i, request): (usize, &Request)| {
            let echo = job.echo.as_ref().and_then(|echo| echo.get(i / job.per_prompt)).cloned();
            let prompt =
                Prompt { tokens: request.tokens.clone(), echo, own_logprobs: job.tell_prompts };
            let shown = prompt.echo.is_some() || prompt.own_logprobs;
            Choice::new(served, &job.text, shown.then_some(prompt))
        };
        let choices = job.requests.iter().enumerate().map(choice).collect();
        let prompts = job.requests.iter().step_by(job.per_prompt);
        let prompt_tokens = prompts.map(|r| r.tokens.len()).sum();
        let running = served.submit(job.requests, rooms).map_err(|_| ApiError::engine_gone())?;
        let arrival = Instant::now();
        let mut generation = Generation {
            served: served.clone(),
            running,
            choices,
            per_prompt: job.per_prompt,
            prompt_tokens,
            backlog: VecDeque::new(),
            left: n,
            arrival,
            first: None,
            queued: None,
            deadline: app.request_timeout.map(|t| arrival + t),
            request_id: job.request_id,
            error: None,
            span: traces::current(),
        };
        generation.accepted(n).await?;
        Ok(generation)
    }

    /// Waits until the engine has taken all, or refused one.
    async fn accepted(&mut self, n: usize) -> Result<(), ApiError> {
        let mut accepted = 0;
        while accepted < n {
            match self.receive().await? {
                (_, Output::Accepted) => accepted += 1,
                (choice, Output::Rejected(error)) => {
                    self.running.ended(choice);
                    return Err(self.fail(ApiError::from(&error)));
                }
                other => self.backlog.push_back(other),
            }
        }
        Ok(())
    }

    /// The next output. Nothing is lost when this is dropped before it is ready.
    async fn receive(&mut self) -> Result<(u32, Output), ApiError> {
        let received = self.running.next();
        let output = match self.deadline {
            None => Ok(received.await),
            Some(deadline) => tokio::time::timeout_at(deadline.into(), received).await,
        };
        let Ok(output) = output else {
            let message = "the request took longer than this server allows";
            return Err(self.fail(ApiError::timeout(message)));
        };
        output.ok_or_else(|| self.fail(ApiError::engine_gone()))
    }

    /// The next piece; `None` when all choices have ended. Nothing is lost when this is dropped
    /// before it is ready.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        while self.left > 0 {
            let (choice, output) = match self.backlog.pop_front() {
                Some(output) => output,
                None => self.receive().await?,
            };
            if let Some(piece) = self.take(choice, output)? {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// The next piece, if there is one already.
    pub(crate) fn ready(&mut self) -> Result<Option<Piece>, ApiError> {
        while self.left > 0 {
            let next = self.backlog.pop_front().or_else(|| self.running.ready());
            let Some((choice, output)) = next else { return Ok(None) };
            if let Some(piece) = self.take(choice, output)? {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Whether all choices have ended.
    pub(crate) fn ended(&self) -> bool {
        self.left == 0
    }

    /// All that comes, by choice.
    pub(crate) async fn collect(&mut self) -> Result<Vec<Whole>, ApiError> {
        let mut wholes: Vec<Piece> = (0..self.left).map(Piece::empty).collect();
        while let Some(mut piece) = self.next().await? {
            let whole = &mut wholes[piece.choice];
            whole.text.push_str(&piece.text);
            whole.logprobs.append(&mut piece.logprobs);
            whole.prompt = whole.prompt.take().or(piece.prompt);
            whole.stop = piece.stop;
        }
        let choices = wholes.into_iter().zip(&self.choices);
        let whole = choices.map(|(piece, choice)| Whole {
            prompt: piece.prompt,
            text: piece.text,
            logprobs: piece.logprobs,
            finish: choice.finish.unwrap_or(Finish::Length),
            stop: piece.stop,
            mean: choice.sum / choice.tokens.max(1) as f64,
        });
        Ok(whole.collect())
    }

    /// Tokens used so far.
    pub(crate) fn used(&self) -> Used {
        Used {
            prompt: self.prompt_tokens,
            // Later choices of a prompt find what the first one computed.
            cached: self.choices.iter().step_by(self.per_prompt).map(|c| c.cached).sum(),
            completion: self.choices.iter().map(|c| c.tokens).sum(),
            reasoning: 0,
            to_first: self.first.unwrap_or_else(Instant::now) - self.arrival,
            in_all: self.arrival.elapsed(),
        }
    }

    /// What an output adds to its choice.
    fn take(&mut self, index: u32, output: Output) -> Result<Option<Piece>, ApiError> {
        let Some(choice) = self.choices.get_mut(index as usize).filter(|c| c.finish.is_none())
        else {
            return Ok(None); // on its way when a stop string ended the choice
        };
        let piece = match output {
            Output::Accepted | Output::Vector(_) => None,
            Output::Rejected(error) => return Err(self.fail(ApiError::from(&error))),
            Output::Failed(message) => {
                self.running.ended(index);
                return Err(self.fail(ApiError::internal(format!("the engine failed: {message}"))));
            }
            Output::Unread => {
                self.running.ended(index);
                let message = "so much of the answer was not read that it was ended";
                return Err(self.fail(ApiError::timeout(message)));
            }
            Output::Started(cached, waited) => {
                choice.cached = cached;
                self.queued = Some(self.queued.map_or(waited, |least| least.min(waited)));
                None
            }
            Output::Prompt(logprobs) => {
                choice.prompt_logprobs.push(*logprobs);
                None
            }
            Output::Token(token, logprobs) => {
                self.first.get_or_insert_with(Instant::now);
                let served = &self.served;
                let piece = aside(choice.backlog(), || choice.token(served, token, logprobs));
                piece.map_err(|e| decode_error(&e))?
            }
            Output::Finished(reason) => {
                self.running.ended(index);
                let served = &self.served;
                let piece = aside(choice.backlog(), || choice.end(served, reason));
                Some(piece.map_err(|e| decode_error(&e))?)
            }
        };
        let Some(mut piece) = piece else { return Ok(None) };
        piece.choice = index as usize;
        if piece.finish.is_some() {
            self.left -= 1;
            // Does nothing where the engine ended it.
            self.running.cancel(index, End::Stopped);
        }
        Ok(Some(piece))
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.error = Some(format!("error {}", error.status.as_u16()));
        error
    }
}

impl Piece {
    /// A text of the first choice.
    #[cfg(test)]
    pub(crate) fn said(text: &str, finish: Option<Finish>) -> Piece {
        Piece { text: text.to_owned(), finish, ..Piece::empty(0) }
    }

    /// Nothing yet of a choice.
    fn empty(choice: usize) -> Piece {
        Piece {
            choice,
            prompt: None,
            text: String::new(),
            logprobs: Vec::new(),
            finish: None,
            stop: None,
        }
    }
}

impl Choice {
    fn new(served: &Served, rules: &TextRules, prompt: Option<Prompt>) -> Choice {
        let echo = prompt.as_ref().and_then(|p| p.echo.as_ref());
        let base = echo.map_or(0, |text| text.chars().count());
        Choice {
            text: TextOut::new(served.frontend.tokenizer(), rules),
            base,
            shown: base,
            pending: Vec::new(),
            prompt,
            prompt_logprobs: Vec::new(),
            tokens: 0,
            sum: 0.0,
            cached: 0,
            finish: None,
        }
    }

    /// Tokens of an echo that is told with the next piece.
    fn backlog(&self) -> usize {
        if self.prompt.is_some() { self.prompt_logprobs.len() } else { 0 }
    }

    fn token(
        &mut self,
        served: &Served,
        token: u32,
        logprobs: Option<Box<Logprobs>>,
    ) -> Result<Option<Piece>, TokenizerError> {
        let mut piece = self.begin(served)?;
        self.tokens += 1;
        if let Some(logprobs) = logprobs {
            self.sum += f64::from(logprobs.logprob);
            let Logprobs { logprob, rank, top, .. } = *logprobs;
            let offset = self.base + self.text.offset();
            self.pending.push(TokenLogprob { token, logprob: Some(logprob), rank, top, offset });
        }
        let (text, stopped) = self.text.push(token)?;
        if stopped {
            self.finish = Some(Finish::Stop);
        }
        self.show(&mut piece, &text, stopped);
        let shows = !piece.text.is_empty() || piece.finish.is_some();
        if !shows {
            // What has no text waits for what has.
            self.pending = std::mem::take(&mut piece.logprobs);
        }
        Ok((shows || piece.prompt.is_some()).then_some(piece))
    }

    fn end(&mut self, served: &Served, reason: FinishReason) -> Result<Piece, TokenizerError> {
        let mut piece = self.begin(served)?;
        let (text, stopped) = self.text.finish()?;
        let natural = if reason == FinishReason::Stop { Finish::Stop } else { Finish::Length };
        self.finish = Some(if stopped { Finish::Stop } else { natural });
        self.show(&mut piece, &text, stopped);
        Ok(piece)
    }

    /// A piece that holds what is told of the prompt, if it is and was not yet.
    fn begin(&mut self, served: &Served) -> Result<Piece, TokenizerError> {
        let mut piece = Piece::empty(0);
        let Some(prompt) = self.prompt.take() else { return Ok(piece) };
        let found = std::mem::take(&mut self.prompt_logprobs);
        let mut all = Vec::new();
        // A prompt of one token has none.
        if !found.is_empty() || prompt.own_logprobs {
            let mut decoded = TextOut::new(served.frontend.tokenizer(), &TextRules::PLAIN);
            let known = std::iter::once(None).chain(found.into_iter().map(Some));
            for (&token, logprobs) in prompt.tokens.iter().zip(known) {
                let offset = decoded.offset().min(self.base);
                decoded.push(token)?;
                let (logprob, rank, top) =
                    logprobs.map_or((None, 0, Vec::new()), |l| (Some(l.logprob), l.rank, l.top));
                all.push(TokenLogprob { token, logprob, rank, top, offset });
            }
        }
        piece.prompt = prompt.own_logprobs.then(|| all.clone());
        if let Some(text) = prompt.echo {
            (piece.text, piece.logprobs) = (text, all);
        }
        Ok(piece)
    }

    /// Adds certain text to a piece, with the tokens it came from; of those that a stop string cut
    /// off nothing is shown.
    fn show(&mut self, piece: &mut Piece, text: &str, stopped: bool) {
        self.shown += text.chars().count();
        piece.text.push_str(text);
        piece.finish = self.finish;
        piece.stop = self.text.stop().filter(|_| stopped).map(str::to_owned);
        let shown = self.shown;
        piece.logprobs.extend(self.pending.drain(..).filter(|l| !stopped || l.offset < shown));
    }
}

impl Drop for Generation {
    /// One line for each request, and a span where they are traced.
    fn drop(&mut self) {
        let used = self.used();
        let finish: Vec<&'static str> =
            self.choices.iter().map(|c| c.finish.map_or("abort", Finish::name)).collect();
        let ms = |time: Duration| time.as_micros() as f64 / 1e3;
        if let Some(span) = self.span.take() {
            span.end(Ended {
                request_id: self.request_id.clone(),
                model: self.served.name.clone(),
                prompt: used.prompt,
                cached: used.cached,
                completion: used.completion,
                queued: self.queued,
                to_first: self.first.map(|first| first - self.arrival),
                in_all: self.arrival.elapsed(),
                finish: finish.clone(),
                error: self.error.clone(),
            });
        }
        tracing::info!(
            request_id = self.request_id,
            model = self.served.name,
            prompt_tokens = used.prompt,
            cached_tokens = used.cached,
            completion_tokens = used.completion,
            queue_ms = self.queued.map(ms),
            ttft_ms = self.first.map(|f| ms(f - self.arrival)),
            total_ms = ms(self.arrival.elapsed()),
            finish_reason = self.error.take().unwrap_or_else(|| finish.join(",")),
            "request"
        );
    }
}

fn decode_error(error: &TokenizerError) -> ApiError {
    ApiError::internal(error.to_string())
}
