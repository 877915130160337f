//! An executor whose next token is a hash of the rows it was given, and what a request yields on it when it
//! is alone.
//!
//! Each group of layers is a layer: a token's value is the hash of the values, in the layer before, of the tokens that
//! it sees there, as far as the group keeps them. The first layer's values are the tokens.

use infernum_ir::{Dims, NO_TOKEN, Task};

use super::MAX_LENGTH;
use crate::engine::{Allowed, FinishReason, Request};
use crate::exec::{ExecError, Executor, GroupKind, LogitRows, StepInputs, StepOutput, Ticket};

pub(super) const VOCAB: usize = 50;

/// What it is able to do, and how far its last steps are.
#[allow(clippy::struct_excessive_bools, reason = "each is an ability of its own")]
pub(super) struct Fake {
    /// Picks tokens itself, as a GPU does, and gives no logits unless they are asked for.
    pub(super) samples: bool,
    pub(super) task: Task,
    /// Refuses parts of sequences.
    pub(super) takes_whole: bool,
    pub(super) feeds: bool,
    /// Lets it be said later how tokens are picked.
    pub(super) defers: bool,
    /// Of a step of which that is to be said: its tokens, and what each is worth in the end.
    pub(super) unpicked: Option<(Vec<u32>, Vec<Value>)>,
    /// What a token is worth depends on whether it is computed as a generated one.
    pub(super) reproducible: bool,
    pub(super) groups: Vec<GroupKind>,
    /// Of the whole pool.
    pub(super) rows: Vec<Option<Value>>,
    pub(super) block_size: usize,
    pub(super) limits: Dims,
    /// Of the last two steps.
    pub(super) outputs: [StepOutput; 2],
    pub(super) submitted: u64,
    pub(super) waited: u64,
    /// Rows of logits so far.
    pub(super) brought: usize,
    /// This step fails.
    pub(super) fails_at: Option<u64>,
    /// Steps with generated rows and prompt rows, and steps in which a sequence yielded several rows.
    pub(super) mixed: u64,
    pub(super) several: u64,
    /// Steps of which it was said later how tokens are picked.
    pub(super) deferred: u64,
}

/// A value of a layer; none where it is no number.
pub(super) type Value = Option<u32>;

/// The hash of what a token sees: the state of a slot, too.
fn fold(state: Value, value: Value) -> Value {
    state.zip(value).map(|(h, v)| h.wrapping_mul(31).wrapping_add(v))
}

const START: Value = Some(17);

pub(super) fn hash(tokens: impl Iterator<Item = u32>) -> u32 {
    tokens.map(Some).fold(START, fold).unwrap_or(0) % VOCAB as u32
}

/// What a token is worth at its place; more as a generated one, where that matters.
fn worth(token: u32, position: usize, generated: bool) -> Value {
    let more = if generated { 1000 } else { 0 };
    (position > 0 || token != CURSED).then_some(token.wrapping_add(more))
}

/// The layers' values for a text, token by token.
pub(super) struct Text {
    groups: Vec<GroupKind>,
    layers: Vec<Vec<Value>>,
    /// The tokens that come next are generated ones, which matters.
    generated: bool,
}

impl Text {
    pub(super) fn new(groups: &[GroupKind]) -> Text {
        let layers = vec![Vec::new(); groups.len()];
        Text { groups: groups.to_vec(), layers, generated: false }
    }

    /// The logits after one more token.
    pub(super) fn push(&mut self, token: u32) -> Vec<f32> {
        let position = self.layers[0].len();
        let mut value = worth(token, position, self.generated);
        for (kind, layer) in self.groups.iter().zip(&mut self.layers) {
            layer.push(value);
            value = layer[kind.first_row(position)..].iter().copied().fold(START, fold);
        }
        logits(value)
    }
}

/// What begins with it has logits that are no numbers.
pub(super) const CURSED: u32 = VOCAB as u32 - 1;

/// The logits that a hash stands for: what it says is the likeliest, the token after it comes next.
fn logits(value: Value) -> Vec<f32> {
    let Some(next) = value else { return vec![f32::NAN; VOCAB] };
    let next = next as usize % VOCAB;
    let likelihood = |t: usize| match (t + VOCAB - next) % VOCAB {
        0 => 2.0,
        1 => 1.0,
        _ => 0.0,
    };
    (0..VOCAB).map(likelihood).collect()
}

impl Fake {
    /// A layer: writes the values of the step's tokens, and then puts in their place what the tokens see.
    fn layer(&mut self, inputs: &StepInputs, group: usize, values: &mut [Value]) {
        let kind = inputs.groups()[group];
        if let GroupKind::Slot { .. } = kind {
            return self.scan(inputs, group, values);
        }
        let size = self.block_size;
        let row = |i: usize, p: usize| inputs.blocks(i, group)[p / size] as usize * size + p % size;
        // All rows are written before any is read, as a layer does.
        let rows = || {
            let seqs = inputs.step().seqs.iter().enumerate();
            seqs.flat_map(|(i, seq)| (seq.context - seq.new..seq.context).map(move |p| (i, p)))
        };
        for ((i, p), value) in rows().zip(&*values) {
            self.rows[row(i, p)] = Some(*value);
        }
        for ((i, p), value) in rows().zip(values) {
            let seen = kind.first_row(p)..=p;
            let seen = seen.map(|p| self.rows[row(i, p)].expect("a row that was written"));
            *value = seen.fold(START, fold);
        }
    }

    /// A layer whose state is one value, which each of the slot's blocks has in its first row, and in the second one
    /// of how many tokens it is.
    fn scan(&mut self, inputs: &StepInputs, group: usize, values: &mut [Value]) {
        let size = self.block_size;
        let mut values = values.iter_mut();
        let mut written = Vec::new();
        for (i, seq) in inputs.step().seqs.iter().enumerate() {
            let read = inputs.slot_read(i, group);
            assert_eq!(read.is_empty(), seq.context == seq.new, "a state begins with a sequence");
            let part = |b: &u32| [0, 1].map(|i| self.rows[*b as usize * size + i]);
            assert!(read.windows(2).all(|b| part(&b[0]) == part(&b[1])), "parts of two states");
            let mut state = START;
            if let Some([found, of]) = read.first().map(part) {
                let past = (seq.context - seq.new) as u32;
                assert_eq!(of, Some(Some(past)), "a state of another number of tokens");
                state = found.expect("a state");
            }
            for value in values.by_ref().take(seq.new) {
                state = fold(state, *value);
                *value = state;
            }
            written.push((i, state, Some(seq.context as u32)));
        }
        for (i, state, of) in written {
            let others = (0..inputs.step().seqs.len()).filter(|other| *other != i);
            for &block in inputs.blocks(i, group) {
                let is_read = |other: usize| inputs.slot_read(other, group).contains(&block);
                assert!(!others.clone().any(is_read), "written while another reads it");
                self.rows[block as usize * size..][..size].fill(None);
                self.rows[block as usize * size] = Some(state);
                self.rows[block as usize * size + 1] = Some(of);
            }
        }
    }
}

impl Executor for Fake {
    fn submit(&mut self, inputs: &StepInputs) -> Result<Ticket, ExecError> {
        let dims = inputs.step().dims();
        assert!(dims.t <= self.limits.t && dims.b <= self.limits.b);
        assert!(dims.seqs <= self.limits.seqs);
        let generated = &inputs.step().seqs[..inputs.generated()];
        assert!(generated.iter().all(|s| s.new == 1 && s.context > 1), "no generated rows");
        assert!(dims.s <= self.limits.s && dims.pairs <= self.limits.pairs);
        let under_way = self.submitted - self.waited;
        assert!(under_way == 0 || (self.feeds && under_way == 1), "too many steps under way");
        assert!(!inputs.is_fed() || under_way == 1, "fed by a step that has ended");
        assert!(self.defers || !inputs.defers_picks(), "it cannot be said later");
        assert!(self.unpicked.is_none(), "the step before has not picked");
        if self.fails_at == Some(self.submitted) {
            self.fails_at = None;
            return Err(ExecError::Inputs("as planned".to_owned()));
        }
        let is_whole = inputs.step().seqs.iter().all(|s| s.new == s.context);
        assert!(is_whole || !self.takes_whole, "a sequence was cut");
        self.mixed += u64::from(!generated.is_empty() && !inputs.is_decode_only());
        self.several += u64::from(dims.b > dims.seqs);
        let before = self.outputs[(self.submitted % 2) as usize].tokens.clone();
        self.submitted += 1;
        let tokens = inputs.tokens().iter().map(|t| match StepInputs::fed_row(*t) {
            Some(row) => before[row],
            None => *t,
        });
        let tokens: Vec<u32> = tokens.collect();
        let positions = inputs.step().tokens().map(|place| place.row);
        // Generated rows come first, a token each.
        let matter = if self.reproducible { inputs.generated() } else { 0 };
        let value = |(i, (token, at)): (usize, (&u32, usize))| worth(*token, at, i < matter);
        let mut values: Vec<Value> = tokens.iter().zip(positions).enumerate().map(value).collect();
        for group in 0..inputs.groups().len() {
            self.layer(inputs, group, &mut values);
        }
        let ticket = Ticket(self.submitted);
        self.unpicked = Some((tokens, values));
        self.deferred += u64::from(inputs.defers_picks());
        if !inputs.defers_picks() {
            self.pick(ticket, inputs)?;
        }
        Ok(ticket)
    }

    fn defers_picks(&self) -> bool {
        self.defers
    }

    fn pick(&mut self, ticket: Ticket, inputs: &StepInputs) -> Result<(), ExecError> {
        assert_eq!(ticket.0, self.submitted, "another step than the last");
        let (tokens, values) = self.unpicked.take().expect("a step to pick of");
        let mut output = std::mem::take(&mut self.outputs[(self.submitted % 2) as usize]);
        output.logits.clear();
        output.tokens.clear();
        output.told.clear();
        let picks = &inputs.step().picks;
        for (row, token) in inputs.step().output_rows().enumerate() {
            let mut values = logits(values[token as usize]);
            if self.samples {
                let own = tokens[token as usize];
                let (token, told) = picks.pick(&picks.row(row), own, &mut values, &|v| v);
                output.tokens.push(token.unwrap_or(NO_TOKEN));
                output.told.extend(told.map(|told| (row as u32, told)));
            }
            let is_asked_for = match inputs.logit_rows() {
                LogitRows::All => true,
                LogitRows::Of(rows) => rows.contains(&(row as u32)),
            };
            if is_asked_for || !self.samples {
                output.logits.extend(values);
                self.brought += 1;
            }
        }
        let asked = if self.samples { inputs.logit_rows().clone() } else { LogitRows::All };
        output.logit_rows = asked;
        output.rows = inputs.step().dims().b as usize;
        output.columns = VOCAB;
        self.outputs[(self.submitted % 2) as usize] = output;
        Ok(())
    }

    fn task(&self) -> Task {
        self.task
    }

    fn takes_whole(&self) -> bool {
        self.takes_whole
    }

    fn samples(&self) -> bool {
        self.samples
    }

    fn groups(&self) -> Vec<GroupKind> {
        self.groups.clone()
    }

    fn is_reproducible(&self) -> bool {
        self.reproducible
    }

    fn feeds(&self) -> bool {
        self.feeds
    }

    fn wait(&mut self, ticket: Ticket) -> Result<&StepOutput, ExecError> {
        assert_eq!(ticket.0, self.waited + 1, "steps are waited for in order");
        self.waited += 1;
        Ok(&self.outputs[(ticket.0 % 2) as usize])
    }
}

/// What a request yields when it is alone, one step after another; `tell` gets what each token was
/// picked from.
pub(super) fn solo(
    groups: &[GroupKind],
    reproducible: bool,
    request: &Request,
    mut tell: impl FnMut(&[f32], u32),
) -> (Vec<u32>, FinishReason) {
    let mut sampler = crate::Sampler::new(request.sampling, &request.tokens)
        .with_ends(&request.stop, request.tokens.len())
        .with_bias(&request.bias);
    let mut tokens = request.tokens.clone();
    if request.prompt_logprobs.is_some() && tokens.len() > 1 && tokens[0] == CURSED {
        return (Vec::new(), FinishReason::Failed);
    }
    let (mut text, mut row) = (Text::new(groups), Vec::new());
    tokens.iter().for_each(|token| row = text.push(*token));
    text.generated = reproducible;
    let jumps = request.logprobs.is_none();
    let held = request.constraint.as_ref().filter(|_| request.max_tokens > 0);
    let mut cursor = held.map(|constraint| constraint.begin(jumps));
    loop {
        let output = tokens.len() - request.tokens.len();
        if output >= request.max_tokens || (output > 0 && tokens.len() >= MAX_LENGTH) {
            return (tokens.split_off(request.tokens.len()), FinishReason::Length);
        }
        let mut allowed = None;
        if let Some(next) = cursor.as_mut().and_then(|cursor| cursor.next(true)) {
            let end =
                |tokens: &mut Vec<u32>, reason| (tokens.split_off(request.tokens.len()), reason);
            for token in next.forced {
                sampler.note(token);
                if request.stop.contains(&token) {
                    tokens.extend(request.tell_stop.then_some(token));
                    return end(&mut tokens, FinishReason::Stop);
                }
                tokens.push(token);
                row = text.push(token);
                let output = tokens.len() - request.tokens.len();
                if output >= request.max_tokens || tokens.len() >= MAX_LENGTH {
                    return end(&mut tokens, FinishReason::Length);
                }
            }
            match next.then {
                Allowed::Nothing => return end(&mut tokens, FinishReason::Stop),
                Allowed::Unknown => return end(&mut tokens, FinishReason::Unfollowed),
                Allowed::Tokens(words) => allowed = Some(words),
            }
        }
        let position = tokens.len() as u64;
        let Some(token) = sampler.sample_among(&mut row, position, allowed.as_deref()) else {
            return (tokens.split_off(request.tokens.len()), FinishReason::Failed);
        };
        tell(&row, token);
        if request.stop.contains(&token) {
            tokens.extend(request.tell_stop.then_some(token));
            return (tokens.split_off(request.tokens.len()), FinishReason::Stop);
        }
        tokens.push(token);
        row = text.push(token);
        if let Some(cursor) = &mut cursor {
            cursor.advance(token);
        }
    }
}
