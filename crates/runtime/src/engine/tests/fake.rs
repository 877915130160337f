//! An executor whose next token is a hash of the rows it was given, and what a request yields on it when it
//! is alone.

use infernum_ir::{Dims, NO_TOKEN};

use super::MAX_LENGTH;
use crate::engine::{FinishReason, Request};
use crate::exec::{ExecError, Executor, LogitRows, StepInputs, StepOutput, Ticket};

pub(super) const VOCAB: usize = 50;

/// What it is able to do, and how far its last steps are.
pub(super) struct Fake {
    /// Picks tokens itself, as a GPU does, and gives no logits unless they are asked for.
    pub(super) samples: bool,
    pub(super) feeds: bool,
    pub(super) rows: Vec<Option<u32>>,
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
}

pub(super) fn hash(tokens: impl Iterator<Item = u32>) -> u32 {
    tokens.fold(17u32, |h, t| h.wrapping_mul(31).wrapping_add(t)) % VOCAB as u32
}

/// What begins with it has logits that are no numbers.
pub(super) const CURSED: u32 = VOCAB as u32 - 1;

/// The logits after these tokens: the hash is the likeliest, the one after it comes next.
pub(super) fn logits(tokens: impl Iterator<Item = u32>) -> Vec<f32> {
    let mut tokens = tokens.peekable();
    if tokens.peek() == Some(&CURSED) {
        return vec![f32::NAN; VOCAB];
    }
    let next = hash(tokens) as usize;
    let value = |t: usize| match (t + VOCAB - next) % VOCAB {
        0 => 2.0,
        1 => 1.0,
        _ => 0.0,
    };
    (0..VOCAB).map(value).collect()
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
        if self.fails_at == Some(self.submitted) {
            self.fails_at = None;
            return Err(ExecError::Inputs("as planned".to_owned()));
        }
        self.mixed += u64::from(!generated.is_empty() && !inputs.is_decode_only());
        self.several += u64::from(dims.b > dims.seqs);
        let before = self.outputs[(self.submitted % 2) as usize].tokens.clone();
        self.submitted += 1;
        let mut output = std::mem::take(&mut self.outputs[(self.submitted % 2) as usize]);
        output.logits.clear();
        output.tokens.clear();
        output.told.clear();
        let picks = &inputs.step().picks;
        let slot = |i: usize, p: usize| {
            inputs.blocks(i)[p / self.block_size] as usize * self.block_size + p % self.block_size
        };
        // All rows are written before any is read, as a layer does.
        let mut tokens = inputs.tokens().iter();
        for (i, seq) in inputs.step().seqs.iter().enumerate() {
            for p in seq.context - seq.new..seq.context {
                let token = tokens.next().map(|t| match StepInputs::fed_row(*t) {
                    Some(row) => before[row],
                    None => *t,
                });
                self.rows[slot(i, p)] = token;
            }
        }
        // Of each token, its sequence and its row in the context.
        let seqs = inputs.step().seqs.iter().enumerate();
        let places: Vec<(usize, usize)> =
            seqs.flat_map(|(i, s)| (s.context - s.new..s.context).map(move |p| (i, p))).collect();
        for (row, token) in inputs.step().output_rows().enumerate() {
            let (i, last) = places[token as usize];
            let context =
                (0..=last).map(|p| self.rows[slot(i, p)].expect("a row that was written"));
            let mut values = logits(context);
            if self.samples {
                let own = self.rows[slot(i, last)].expect("a row that was written");
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
        output.rows = dims.b as usize;
        output.columns = VOCAB;
        self.outputs[(self.submitted % 2) as usize] = output;
        Ok(Ticket(self.submitted))
    }

    fn samples(&self) -> bool {
        self.samples
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
    loop {
        let output = tokens.len() - request.tokens.len();
        if output >= request.max_tokens || (output > 0 && tokens.len() >= MAX_LENGTH) {
            return (tokens.split_off(request.tokens.len()), FinishReason::Length);
        }
        let mut row = logits(tokens.iter().copied());
        let Some(token) = sampler.sample(&mut row, tokens.len() as u64) else {
            return (tokens.split_off(request.tokens.len()), FinishReason::Failed);
        };
        tell(&row, token);
        if request.stop.contains(&token) {
            tokens.extend(request.tell_stop.then_some(token));
            return (tokens.split_off(request.tokens.len()), FinishReason::Stop);
        }
        tokens.push(token);
    }
}
