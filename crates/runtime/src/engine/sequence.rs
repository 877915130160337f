//! A request under way.

use super::held::Held;
use super::kv::Prefix;
use super::{Cursor, EngineLimits, Request, RequestId, State};
use crate::sampling::{Sampler, Tell, TokenPick};
use infernum_ir::picking::Edits;

/// Who goes before whom: the smaller first. Urgent ones, then by priority, then by arrival.
pub(super) type Rank = (bool, i32, RequestId);

#[allow(clippy::struct_excessive_bools, reason = "each says one thing of it")]
pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) sampler: Sampler,
    /// Where it stands in its constraint, if it has one.
    pub(super) cursor: Option<Box<dyn Cursor>>,
    /// The tokens that may come next, once that is known.
    pub(super) allowed: Option<Vec<u32>>,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    /// What it has of the cache, by group of layers.
    pub(super) held: Vec<Held>,
    /// Rows in the cache, and with those of the step under way.
    pub(super) computed: usize,
    pub(super) submitted: usize,
    /// How often rows were given back: those of steps submitted before are not there, whatever comes of these.
    pub(super) truncations: u32,
    /// The step under way, and its row, that yields the next token.
    pub(super) coming: Option<(u64, usize)>,
    /// Full blocks of tokens whose rows are kept for others, and what the next one depends on.
    pub(super) kept: usize,
    pub(super) prefix: Prefix,
    /// Tokens of the prompt whose log-probabilities were told; there is none of the first.
    pub(super) told: usize,
    /// Whether it has memory, and ever had.
    pub(super) running: bool,
    pub(super) started: bool,
    pub(super) preemptions: u32,
    /// Passed over for too long, or too often.
    pub(super) urgent: bool,
    /// Whether a generated token is computed as one each time, also when memory that was given up is filled again:
    /// an executor that is [reproducible](crate::exec::Executor::is_reproducible) wants that.
    pub(super) replays: bool,
    /// The step that it last had a part in; when it came if there was none.
    pub(super) served: u64,
}

impl Sequence {
    pub(super) fn new(id: RequestId, request: Request, held: Vec<Held>, now: u64) -> Sequence {
        Sequence {
            id,
            sampler: Sampler::new(request.sampling, &request.tokens)
                .with_ends(&request.stop, request.tokens.len())
                .with_bias(&request.bias),
            cursor: request
                .constraint
                .as_ref()
                .filter(|_| request.max_tokens > 0)
                .map(|constraint| constraint.begin(request.logprobs.is_none())),
            allowed: None,
            tokens: request.tokens.clone(),
            held,
            computed: 0,
            submitted: 0,
            truncations: 0,
            coming: None,
            kept: 0,
            prefix: request.root(),
            told: 1,
            running: false,
            started: false,
            preemptions: 0,
            urgent: false,
            replays: false,
            served: now,
            request,
        }
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.tokens.len()
    }

    /// Its tokens, that of the step under way included.
    pub(super) fn length(&self) -> usize {
        self.tokens.len() + usize::from(self.coming.is_some())
    }

    /// Whether it has all tokens that it may have, once those under way have come.
    pub(super) fn is_full(&self, max_length: usize) -> bool {
        let coming = self.length() - self.tokens.len();
        self.generated() + coming >= self.request.max_tokens || self.length() >= max_length
    }

    /// Rows that can be computed next; `defers` says whether it may be open what may come after them.
    pub(super) fn wanted(&self, limits: &EngineLimits, defers: bool) -> usize {
        let mut known = self.tokens.len() - self.submitted.min(self.tokens.len());
        if self.replays {
            let prompt = self.request.tokens.len();
            known = known.min(prompt.saturating_sub(self.submitted).max(1));
        }
        let is_fed = self.coming.is_some() && known == 0 && (defers || self.cursor.is_none());
        if is_fed && !self.is_full(limits.max_length) { 1 } else { known }
    }

    /// Whether what may come after its next row depends on a token that is not there yet.
    pub(super) fn defers(&self) -> bool {
        self.cursor.is_some() && self.coming.is_some()
    }

    /// Whether its next row yields a token, or did before memory was given up and is to be computed as it was.
    pub(super) fn decodes(&self) -> bool {
        let last = self.submitted + 1 == self.length();
        self.submitted >= self.request.tokens.len() && (last || self.replays)
    }

    /// Whether it is not known yet what its constraint lets come next.
    pub(super) fn awaits(&self) -> bool {
        self.cursor.is_some() && self.allowed.is_none()
    }

    /// Takes a token that was picked.
    pub(super) fn take(&mut self, token: u32) {
        self.tokens.push(token);
        self.allowed = None;
        if let Some(cursor) = self.cursor.as_mut().filter(|_| !self.request.stop.contains(&token)) {
            cursor.advance(token);
        }
    }

    /// Tokens whose blocks may be shared with others: of those that [replay](Sequence::replays), prompts.
    pub(super) fn shareable(&self) -> usize {
        if self.replays { self.request.tokens.len() } else { self.tokens.len() }
    }

    /// Whether the prompt's log-probabilities are still to be told: every row yields one.
    pub(super) fn tells_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some() && self.told < self.request.tokens.len()
    }

    /// The token of the prompt that the row after which there are `context` rows is to tell of.
    pub(super) fn tells_of(&self, context: usize) -> Option<u32> {
        let next = self.request.tokens.get(context);
        next.copied().filter(|_| self.tells_prompt() && context >= self.told)
    }

    /// How the token is picked after the row after which there are `context` rows, and what is told of
    /// it; the row's own token is `fed` or known.
    pub(super) fn pick(&self, context: usize, fed: bool) -> TokenPick<'_> {
        if let Some((given, top)) = self.tells_of(context).zip(self.request.prompt_logprobs) {
            let tell = Some(Tell { top, given: Some(given) });
            return TokenPick { tell, ..TokenPick::default() };
        }
        if context < self.length() || self.request.max_tokens == 0 {
            return TokenPick::default();
        }
        let tell = self.request.logprobs.map(|top| Tell { top, given: None });
        let pick = self.sampler.pick_at(context as u64, fed);
        let edits = Edits { allowed: self.allowed.as_deref(), ..pick.edits };
        TokenPick { edits, tell, ..pick }
    }

    /// Forgets what is in the cache; its blocks are with others already.
    pub(super) fn restart(&mut self) {
        (self.computed, self.submitted, self.kept) = (0, 0, 0);
        self.prefix = self.request.root();
    }

    pub(super) fn state(&self) -> State {
        match (self.running, self.started) {
            (false, false) => State::Waiting,
            (false, true) => State::Preempted,
            _ if self.submitted < self.request.tokens.len() => State::Prefill,
            _ => State::Decode,
        }
    }
}
