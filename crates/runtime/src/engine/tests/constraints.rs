//! A constraint that depends on all tokens before, is ready when it likes, forces tokens, ends texts and breaks down.

use super::fake::VOCAB;
use super::*;
use crate::engine::{Allowed, Constraint, Cursor, Next};

#[derive(Clone, Copy, Debug)]
pub(super) struct Moody {
    /// What it begins with.
    pub(super) seed: u32,
    /// How often it is not ready.
    pub(super) late: u32,
}

struct MoodyCursor {
    moody: Moody,
    jumps: bool,
    /// Of all tokens.
    hash: u32,
    /// Tokens that are forced, and picked all the same.
    picked: Vec<u32>,
    told: bool,
    asked: u32,
}

impl Constraint for Moody {
    fn begin(&self, jumps: bool) -> Box<dyn Cursor> {
        let (hash, picked) = (self.seed, Vec::new());
        Box::new(MoodyCursor { moody: *self, jumps, hash, picked, told: false, asked: 0 })
    }
}

/// A set of tokens.
fn set(holds: impl Fn(u32) -> bool) -> Allowed {
    let mut words = vec![0; VOCAB.div_ceil(32)];
    let tokens = (0..VOCAB as u32).filter(|t| holds(*t));
    tokens.for_each(|t| words[t as usize / 32] |= 1 << (t % 32));
    Allowed::Tokens(words)
}

impl MoodyCursor {
    fn take(&mut self, token: u32) {
        self.hash = self.hash.wrapping_mul(31).wrapping_add(token + 7);
    }
}

impl Cursor for MoodyCursor {
    fn next(&mut self, wait: bool) -> Option<Next> {
        self.asked += 1;
        if !wait && !self.asked.is_multiple_of(self.moody.late + 1) {
            return None;
        }
        assert!(!std::mem::replace(&mut self.told, true), "asked for what was told");
        let mut forced = Vec::new();
        let kind = self.hash / 8 % 16;
        if kind < 4 && self.picked.is_empty() {
            let tokens = (0..=kind).map(|i| (self.hash / 3 + i) % VOCAB as u32);
            if self.jumps {
                forced = tokens.collect();
                forced.iter().for_each(|token| self.take(*token));
            } else {
                self.picked = tokens.rev().collect();
            }
        }
        let kind = self.hash / 8 % 16;
        let then = match (self.picked.last(), kind) {
            (Some(token), _) => set(|t| t == *token),
            (None, 15) => Allowed::Nothing,
            (None, 14) if self.hash.is_multiple_of(4) => Allowed::Unknown,
            _ => set(|t| t % 3 != self.hash % 3),
        };
        Some(Next { forced, then, took: Duration::ZERO })
    }

    fn advance(&mut self, token: u32) {
        assert!(std::mem::replace(&mut self.told, false), "a token that nobody was told of");
        assert!(self.picked.pop().is_none_or(|expected| expected == token), "not the only one");
        self.take(token);
    }
}

#[test]
fn forced_tokens_are_one_chunk_and_a_row_that_waits_waits_alone() {
    let mut engine = engine_with(STEP, 8, 64, true, EngineOptions::default());
    let seed = 8 * 3; // forces four tokens
    let held = |late| Request {
        constraint: Some(std::sync::Arc::new(Moody { seed, late })),
        ..Request::new(vec![1, 2, 3], 5)
    };
    engine.submit(held(0)).expect("a request");
    let events = finish(&mut engine);
    assert!(engine.stats().forced >= 4 && engine.stats().awaited == 0, "{events:?}");
    assert!(engine.stats().steps <= 2, "{:?}", engine.stats());
    // One that is never ready unless it is waited for does not keep the other from its tokens.
    let late = engine.submit(held(u32::MAX - 1)).expect("a request");
    let free = engine.submit(Request::new(vec![4, 5], 6)).expect("a request");
    let events = finish(&mut engine);
    let ends: Vec<RequestId> =
        events.iter().filter(|e| matches!(e, Event::Finished(..))).map(Event::request).collect();
    assert_eq!(ends, [free, late]);
    assert!(engine.stats().awaited > 0);
}

/// Always the same set of tokens.
#[derive(Clone, Debug)]
struct Fixed(Vec<u32>);

impl Constraint for Fixed {
    fn begin(&self, _: bool) -> Box<dyn Cursor> {
        Box::new(self.clone())
    }
}

impl Cursor for Fixed {
    fn next(&mut self, _: bool) -> Option<Next> {
        let then = Allowed::Tokens(self.0.clone());
        Some(Next { forced: Vec::new(), then, took: Duration::ZERO })
    }

    fn advance(&mut self, _: u32) {}
}

#[test]
fn a_row_is_computed_while_it_is_worked_out_what_may_come() {
    let held = || Request {
        constraint: Some(std::sync::Arc::new(Fixed(vec![1 << 7]))),
        ..Request::new(vec![1, 2, 3], 5)
    };
    for (defers, deferred) in [(true, 4), (false, 0)] {
        let mut executor = fake(&[GroupKind::Paged], STEP, 64, true);
        executor.defers = defers;
        let mut engine = engine_on(executor, 8, EngineOptions::default());
        let id = engine.submit(held()).expect("a request");
        let events = finish(&mut engine);
        let tokens = events.iter().filter(|e| **e == Event::Token(id, 7, None)).count();
        assert_eq!((tokens, engine.executor.deferred, engine.stats().steps), (5, deferred, 5));
    }
}

#[test]
fn a_mask_has_the_size_of_the_vocabulary() {
    // Shorter, longer, and with bits of tokens that are not there.
    let cases = [
        (vec![1 << 7], FinishReason::Length),
        (vec![1 << 7, u32::MAX << (VOCAB - 32), u32::MAX], FinishReason::Length),
        (vec![0, u32::MAX << (VOCAB - 32)], FinishReason::Unfollowed),
        (Vec::new(), FinishReason::Unfollowed),
    ];
    for (words, reason) in cases {
        for gpu in [false, true] {
            let mut engine = engine_with(STEP, 8, 64, gpu, EngineOptions::default());
            let constraint: std::sync::Arc<dyn Constraint> =
                std::sync::Arc::new(Fixed(words.clone()));
            let request = Request { constraint: Some(constraint), ..Request::new(vec![1], 3) };
            let id = engine.submit(request).expect("a request");
            let events = finish(&mut engine);
            let tokens = events.iter().filter(|e| **e == Event::Token(id, 7, None)).count();
            assert_eq!(events.last(), Some(&Event::Finished(id, reason)));
            assert_eq!(tokens, if reason == FinishReason::Length { 3 } else { 0 });
        }
    }
}
