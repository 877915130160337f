//! `infernum generate`.

use std::error::Error;
use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::Instant;

use infernum::{Capacity, Loader, Machine, ModelOptions, RunOptions, tune};
use infernum_frontend_hf::chat::{ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use infernum_frontend_hf::{Config, Model};
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
    /// Most tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: usize,
    /// Go on past the model's end token.
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Print one JSON object with text, token ids and speed instead of streaming.
    #[arg(long)]
    json: bool,
}

/// Each is what generation_config.json says when left out.
#[derive(clap::Args)]
struct SamplingArgs {
    /// 0 is greedy.
    #[arg(long)]
    temperature: Option<f32>,
    /// Only the K likeliest tokens.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Only the likeliest tokens that together have this probability.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Only tokens at least this likely, relative to the likeliest.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Makes tokens seen in prompt or output less likely.
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time it was generated.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Subtracted from a token's logit if it was generated.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Fixes the random choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    fn params(&self, config: &Config) -> SamplingParams {
        let given = |key: &str| config.generation(key).and_then(serde_json::Value::as_f64);
        let samples = config.generation("do_sample").and_then(serde_json::Value::as_bool);
        let samples = samples.unwrap_or(false) || self.temperature.is_some_and(|t| t > 0.0);
        let or = |arg: Option<f32>, key, default: f32| {
            arg.or_else(|| given(key).map(|x| x as f32)).unwrap_or(default)
        };
        let none = SamplingParams::default();
        SamplingParams {
            temperature: if samples { or(self.temperature, "temperature", 1.0) } else { 0.0 },
            top_k: self.top_k.or_else(|| given("top_k").map(|k| k as u32)).unwrap_or(none.top_k),
            top_p: or(self.top_p, "top_p", none.top_p),
            min_p: or(self.min_p, "min_p", none.min_p),
            repetition_penalty: or(
                self.repetition_penalty,
                "repetition_penalty",
                none.repetition_penalty,
            ),
            frequency_penalty: self.frequency_penalty.unwrap_or(none.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(none.presence_penalty),
            seed: self.seed,
        }
    }
}

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
    stop: Vec<u32>,
    sampling: SamplingParams,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let model = args.model.open()?;
    let sampling = args.sampling.params(&model.config);
    sampling.check()?;
    let tokenizer = Tokenizer::open(&model.files)?;
    let stop =
        if args.ignore_eos { Vec::new() } else { model.config.eos_ids(tokenizer.eos_id())? };
    let engine = load(args, &model)?;
    let mut generator = Generator { args, engine, tokenizer, stop, sampling };
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
        let start = Instant::now();
        let mut first: Option<Instant> = None;
        self.engine.submit(Request {
            tokens,
            max_tokens: self.args.max_tokens,
            stop: self.stop.clone(),
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
