//! `infernum generate`.

use std::error::Error;
use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::Instant;

use infernum::{
    Capacity, GenerationDefaults, Loader, Machine, ModelOptions, RunOptions, SamplingFlags, tune,
};
use infernum_frontend_hf::Model;
use infernum_frontend_hf::chat::{ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_runtime::{
    Engine, EngineOptions, Event, FinishReason, PlanExecutor, Request, SamplingParams,
};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to continue, or with --chat what to ask; read from standard input when left out.
    prompt: Option<String>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    run: RunOptions,
    /// Talk through the model's chat template; without a prompt, turn by turn.
    #[arg(long)]
    chat: bool,
    /// System message for --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Most tokens to generate; what generation_config.json says, else 1024, when left out.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Go on past the model's end token.
    #[arg(long)]
    ignore_eos: bool,
    // Each is what generation_config.json says when left out.
    #[command(flatten)]
    sampling: SamplingFlags,
    /// Print one JSON object with text, token ids and speed instead of streaming.
    #[arg(long)]
    json: bool,
}

/// Tokens to generate where neither the command line nor the checkpoint says how many.
const MAX_TOKENS: usize = 1024;

/// What one answer was and cost.
#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<u32>,
    finish_reason: &'static str,
    prompt_tokens: usize,
    prompt_tokens_per_second: f64,
    generated_tokens_per_second: f64,
}

/// A model ready to answer.
struct Generator<'a> {
    args: &'a Args,
    engine: Engine<Box<dyn PlanExecutor>>,
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    sampling: SamplingParams,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let model = args.model.open()?;
    let tokenizer = Tokenizer::open(&model.files)?;
    let defaults = GenerationDefaults::read(&model.config, tokenizer.eos_id())?;
    for key in &defaults.unsupported {
        report::notice(&format!("generation_config.json: `{key}` is not supported, and left out"));
    }
    let sampling = args.sampling.params(defaults.sampling);
    let engine = load(args, &model)?;
    let mut generator = Generator { args, engine, tokenizer, defaults, sampling };
    if args.chat {
        let template = ChatTemplate::open(&model.files)?;
        chat(&mut generator, &template)
    } else {
        let prompt = match &args.prompt {
            Some(prompt) => prompt.clone(),
            None if args.model.model.is_none() && io::stdin().is_terminal() => {
                "Once upon a time".to_owned()
            }
            None => io::read_to_string(io::stdin())?,
        };
        if !args.json {
            report::text(&prompt)?;
        }
        let answer = generator.answer(&prompt, true)?;
        finish(args, &answer)
    }
}

fn load(args: &Args, model: &Model) -> Result<Engine<Box<dyn PlanExecutor>>, Box<dyn Error>> {
    let (capacity, machine) =
        (Capacity::one(args.model.length(model)?), Machine::open(args.run.device)?);
    let progress = report::progress();
    let loader = Loader::new(model, &args.model, &args.run, &machine).with_progress(&progress);
    tune::autotune(&loader)?;
    Ok(loader.start(capacity, EngineOptions::default())?)
}

impl Generator<'_> {
    /// Continues `prompt`, streaming unless JSON is wanted.
    fn answer(&mut self, prompt: &str, add_special: bool) -> Result<Answer, Box<dyn Error>> {
        let tokens = self.tokenizer.encode(prompt, add_special)?;
        let mut answer = Answer {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: "length",
            prompt_tokens: tokens.len(),
            prompt_tokens_per_second: 0.0,
            generated_tokens_per_second: 0.0,
        };
        let mut stream = self.tokenizer.stream(true);
        let show = |answer: &mut Answer, piece: &str| {
            answer.text.push_str(piece);
            if self.args.json { Ok(()) } else { report::text(piece) }
        };
        let max_tokens = self.args.max_tokens.or_else(|| self.defaults.max_tokens(tokens.len()));
        let start = Instant::now();
        let mut first: Option<Instant> = None;
        self.engine.submit(Request {
            tokens,
            max_tokens: max_tokens.unwrap_or(MAX_TOKENS),
            stop: if self.args.ignore_eos { Vec::new() } else { self.defaults.end.clone() },
            sampling: self.sampling,
            ..Request::default()
        })?;
        let mut told = Ok(());
        self.engine.drive(|_, mut events| {
            told = events.try_for_each(|event| -> Result<(), Box<dyn Error>> {
                first.get_or_insert_with(|| {
                    answer.prompt_tokens_per_second = rate(answer.prompt_tokens, start);
                    Instant::now()
                });
                match event {
                    Event::Token(_, token, _) => {
                        answer.tokens.push(token);
                        show(&mut answer, &stream.push(token)?)?;
                    }
                    Event::Finished(_, FinishReason::Stop) => answer.finish_reason = "stop",
                    Event::Finished(_, FinishReason::Failed) => {
                        return Err(infernum::Error::NoDistribution.into());
                    }
                    Event::Started(..) | Event::Prompt(..) | Event::Finished(..) => {}
                }
                Ok(())
            });
            if told.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        told?;
        show(&mut answer, &stream.flush()?)?;
        if let Some(first) = first {
            // The first token came with the prompt.
            let after = answer.tokens.len().saturating_sub(1);
            answer.generated_tokens_per_second = rate(after, first);
        }
        Ok(answer)
    }
}

/// Tokens a second since `start`.
fn rate(tokens: usize, start: Instant) -> f64 {
    tokens as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

fn finish(args: &Args, answer: &Answer) -> Outcome {
    if args.json {
        return report::json(answer);
    }
    report::text("\n")?;
    anstream::eprintln!(
        "\x1b[2m[{} prompt tokens at {:.1} tok/s, {} generated at {:.1} tok/s, {}]\x1b[0m",
        answer.prompt_tokens,
        answer.prompt_tokens_per_second,
        answer.tokens.len(),
        answer.generated_tokens_per_second,
        answer.finish_reason,
    );
    Ok(())
}

/// One question, or turns until the input ends.
fn chat(generator: &mut Generator<'_>, template: &ChatTemplate) -> Outcome {
    let args = generator.args;
    let mut messages: Vec<Message> =
        args.system.iter().map(|s| Message::new("system", s.as_str())).collect();
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let interactive = args.prompt.is_none() && io::stdin().is_terminal();
    let mut lines = io::stdin().lock().lines();
    loop {
        let question = if let Some(prompt) = &args.prompt {
            prompt.clone()
        } else {
            if interactive {
                anstream::eprint!("\x1b[1m> \x1b[0m");
                io::stderr().flush()?;
            }
            match lines.next() {
                Some(line) => line?,
                None => return Ok(()),
            }
        };
        if question.trim().is_empty() {
            continue;
        }
        messages.push(Message::new("user", question));
        let prompt = template.render(&messages, &options)?;
        let answer = generator.answer(&prompt, false)?;
        finish(args, &answer)?;
        if args.prompt.is_some() {
            return Ok(());
        }
        messages.push(Message::new("assistant", answer.text.trim()));
    }
}
