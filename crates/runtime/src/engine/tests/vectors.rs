//! Models that do not generate: each prompt has one row of output, that of its last token.

use super::*;

/// What becomes of random prompts that come between steps: each has its vector, once, or fails.
fn run(mut engine: Engine<Fake>, seed: u64, longest: usize) -> Stats {
    let groups = engine.executor.groups.clone();
    let (mut random, mut live) = (Random::new(seed), BTreeMap::new());
    let (mut events, mut told) = (Vec::new(), BTreeMap::new());
    for _ in 0..2000 {
        if random.below(3) > 0 {
            let Request { mut tokens, salt, .. } = random.request();
            tokens.truncate(longest);
            let request = Request { salt, ..Request::new(tokens, 0) };
            live.insert(engine.submit(request.clone()).expect("a request"), request.tokens);
        }
        if random.below(20) == 0
            && let Some((&id, _)) = live.iter().next_back()
        {
            engine.cancel(id);
            live.remove(&id);
            told.remove(&id);
        }
        engine.step(&mut events).expect("a step");
        for event in events.drain(..) {
            match event {
                Event::Started(..) => {}
                Event::Vector(id, row) => assert!(told.insert(id, row).is_none(), "told twice"),
                Event::Finished(id, reason) => {
                    let (mut text, mut row) = (Text::new(&groups), Vec::new());
                    let tokens = live.remove(&id).expect("one that had not ended");
                    tokens.iter().for_each(|token| row = text.push(*token));
                    let found = told.remove(&id);
                    if reason == FinishReason::Failed {
                        assert!(row[0].is_nan() && found.is_none(), "{tokens:?}");
                    } else {
                        assert_eq!(reason, FinishReason::Length);
                        assert_eq!(found.as_deref(), Some(&row[..]), "{tokens:?}");
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }
    finish(&mut engine);
    assert_eq!(engine.blocks().0, engine.blocks().1, "all memory is free again");
    engine.stats()
}

#[test]
fn each_prompt_has_the_row_of_its_last_token_however_it_is_cut() {
    let kinds: [&[GroupKind]; 3] = [
        &[GroupKind::Paged],
        &[GroupKind::Slot { blocks: 2 }],
        &[GroupKind::Paged, GroupKind::Ring { window: 5 }, GroupKind::Slot { blocks: 1 }],
    ];
    for (seed, groups) in (0..).zip(kinds) {
        for (chunk, prefix_cache) in [(8, true), (8, false), (3, true)] {
            let options = EngineOptions { prefix_cache, ..EngineOptions::default() };
            let executor = Fake { task: Task::Embed, ..fake(groups, STEP, 96, false) };
            let stats = run(engine_on(executor, chunk, options), seed, MAX_LENGTH);
            assert!(prefix_cache == (stats.prefix_hits > 0), "{stats:?}");
        }
    }
}

/// Chunks and prefixes are for others: a sequence is in one step, however small its limits are.
#[test]
fn what_takes_sequences_whole_never_gets_a_part() {
    let step = Dims { t: 26, b: 4, s: 26, pairs: 300, seqs: 4 };
    let longest = 17; // 17 * 17 pairs fit
    let whole = || {
        let slot = [GroupKind::Slot { blocks: 1 }];
        let executor = fake(&slot, step, 96, false);
        let executor = Fake { task: Task::Score, takes_whole: true, ..executor };
        engine_on(executor, 3, EngineOptions::default())
    };
    assert_eq!(run(whole(), 7, longest).prefix_hits, 0);
    let error = whole().submit(Request::new(vec![1; longest + 1], 0)).expect_err("it is too long");
    assert!(matches!(error, EngineError::TooLong { limit: 17, .. }), "{error}");
}

#[test]
fn what_does_not_generate_says_so() {
    let executor = Fake { task: Task::Embed, ..fake(&[GroupKind::Paged], STEP, 16, false) };
    let mut engine = engine_on(executor, 8, EngineOptions::default());
    let told = Request { prompt_logprobs: Some(1), ..Request::new(vec![1, 2], 0) };
    for request in [Request::new(vec![1, 2], 1), told] {
        let error = engine.submit(request).expect_err("there are no tokens");
        assert!(error.to_string().contains("a vector for each prompt"), "{error}");
    }
}
