//! `infernum generate --tokens`: ids in, ids out. What is asked of a model without a tokenizer, such as one whose spec is
//! being written.

use std::time::Instant;

use infernum::{Capacity, GenerationDefaults, Loader, Request, tune};
use infernum_runtime::{EngineOptions, Event, FinishReason};
use infernum_tools::report::{self, Outcome};

use super::{Answer, Args, MAX_TOKENS, finish, rate, tell_unsupported};

/// Continues tokens, printing each as it comes unless JSON is wanted.
pub(super) fn run(args: &Args, loader: &Loader<'_>) -> Outcome {
    let defaults = GenerationDefaults::read(&loader.model.config, None)?;
    tell_unsupported(&defaults);
    let given = defaults.max_tokens(args.tokens.len());
    let request = Request {
        max_tokens: args.max_tokens.or(given).unwrap_or(MAX_TOKENS),
        stop: if args.ignore_eos { Vec::new() } else { defaults.end },
        sampling: args.sampling.params(defaults.sampling),
        ..Request::new(args.tokens.clone(), 0)
    };
    let capacity = Capacity::one(loader.compile.length(loader.model)?);
    tune::autotune(loader)?;
    let mut engine = loader.start(capacity, EngineOptions::default())?;
    let mut answer = Answer::new(args.tokens.len());
    let (start, mut first) = (Instant::now(), None);
    engine.submit(request)?;
    let mut events = Vec::new();
    while !engine.is_idle() {
        engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token(_, token, _) => {
                    first.get_or_insert_with(Instant::now);
                    answer.tokens.push(token);
                    if !args.json {
                        report::text(&format!("{token} "))?;
                    }
                }
                Event::Finished(_, FinishReason::Failed) => {
                    return Err(infernum::Error::NoDistribution.into());
                }
                Event::Finished(_, FinishReason::Stop) => answer.finish_reason = "stop",
                _ => {}
            }
        }
    }
    if let Some(first) = first {
        answer.prompt_tokens_per_second =
            rate(args.tokens.len(), first.duration_since(start).as_secs_f64());
        let after = answer.tokens.len().saturating_sub(1);
        answer.generated_tokens_per_second = rate(after, first.elapsed().as_secs_f64());
    }
    finish(args, &answer)
}
