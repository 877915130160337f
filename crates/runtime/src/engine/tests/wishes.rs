//! What requests may wish of the tokens that are picked for them.

use super::*;

#[test]
fn an_executor_that_samples_picks_what_the_host_would() {
    let sampling = SamplingParams {
        temperature: 0.8,
        top_p: 0.9,
        repetition_penalty: 1.3,
        frequency_penalty: 0.2,
        ..SamplingParams::default()
    };
    let outputs = |gpu: bool| {
        let mut engine = engine_with(STEP, 4, 64, gpu, EngineOptions::default());
        for seed in 0..5 {
            let sampling = SamplingParams { seed, ..sampling };
            let sampling = if seed == 0 { SamplingParams::default() } else { sampling };
            let tokens = vec![seed as u32 + 1; 1 + 3 * seed as usize];
            engine.submit(Request { sampling, ..Request::new(tokens, 20) }).expect("a request");
        }
        let mut events = Vec::new();
        let driven = engine.drive(|engine, new| {
            events.extend(new);
            assert!(!gpu || engine.executor.brought == 0, "logits nobody needs");
            ControlFlow::Continue(())
        });
        driven.expect("steps");
        events.retain(|e| !matches!(e, Event::Started(..)));
        events.sort_by_key(Event::request);
        events
    };
    assert_eq!(outputs(true), outputs(false));
}

#[test]
fn no_wish_costs_a_request_its_turn() {
    let mut engine = engine_with(STEP, 8, 64, true, EngineOptions::default());
    let sampling = SamplingParams {
        frequency_penalty: 0.5,
        repetition_penalty: 1.2,
        min_tokens: 9,
        ..SamplingParams::default()
    };
    let wishes = Request { sampling, logprobs: Some(5), ..Request::new(vec![4], 20) };
    let wishes = Request { bias: vec![(3, 1.0)], stop: vec![7], ..wishes };
    let wishes = engine.submit(wishes).expect("a request");
    for first in 1..4 {
        engine.submit(Request::new(vec![first], 20)).expect("a request");
    }
    let mut events = Vec::new();
    engine.step(&mut events).expect("a step");
    events.clear();
    for _ in 0..12 {
        engine.step(&mut events).expect("a step");
        assert_eq!(engine.executor.submitted, engine.executor.waited + 1, "nobody waits");
    }
    let tokens = |own: bool| {
        let is = |e: &&Event| matches!(e, Event::Token(id, ..) if (*id == wishes) == own);
        events.iter().filter(is).count()
    };
    assert_eq!((tokens(true), tokens(false)), (12, 36), "every step");
}

#[test]
fn no_end_comes_before_the_least_tokens() {
    let stop = vec![hash([1, 2, 3].into_iter())];
    for gpu in [false, true] {
        let mut engine = engine_with(STEP, 8, 64, gpu, EngineOptions::default());
        for min_tokens in [0, 1, 4] {
            let sampling = SamplingParams { min_tokens, ..SamplingParams::default() };
            let request =
                Request { stop: stop.clone(), sampling, ..Request::new(vec![1, 2, 3], 9) };
            engine.submit(Request { tell_stop: true, ..request }).expect("a request");
            let events = finish(&mut engine);
            let tokens = events.iter().filter_map(|e| match e {
                Event::Token(_, token, _) => Some(*token),
                _ => None,
            });
            let tokens: Vec<u32> = tokens.collect();
            let least = tokens.iter().take(min_tokens as usize);
            assert!(tokens.len() > min_tokens as usize || tokens.len() == 9, "{tokens:?}");
            assert!(least.clone().all(|t| !stop.contains(t)), "{tokens:?}");
            assert_eq!(min_tokens == 0, tokens == stop, "{tokens:?}");
            // The host has to see no logits for it where the executor samples.
            assert!(!gpu || engine.executor.brought == 0);
        }
    }
}
