//! `infernum generate`.

mod tokens;

use std::error::Error;
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Instant;

use infernum::{
    FinishReason, Frontend, GenerationDefaults, Generator, Loader, Machine, Message, ModelOptions,
    Request, RunOptions, SamplingFlags, SamplingParams,
};
use infernum_tools::report::{self, Outcome};
use serde::Serialize;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to continue, or with --chat what to ask; read from standard input when left out.
    prompt: Option<String>,
    /// Talk through the model's chat template; without a prompt, turn by turn.
    #[arg(long)]
    chat: bool,
    /// Continue these token ids, separated by commas, in place of a text: no tokenizer is needed, and ids are printed.
    #[arg(long, value_name = "ID", value_delimiter = ',', conflicts_with_all = ["prompt", "chat"])]
    tokens: Vec<u32>,
    /// System message for --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Most tokens to generate; what generation_config.json says, else 1024, when left out.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Go on past the model's end token.
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object with text, token ids and speed instead of streaming.
    #[arg(long)]
    json: bool,
    // Each is what generation_config.json says when left out.
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    run: RunOptions,
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

/// A model, and how it was asked to answer.
struct Answerer<'a> {
    args: &'a Args,
    generator: Generator,
    sampling: SamplingParams,
}

impl Answer {
    /// Of nothing yet.
    fn new(prompt_tokens: usize) -> Answer {
        Answer {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: "length",
            prompt_tokens,
            prompt_tokens_per_second: 0.0,
            generated_tokens_per_second: 0.0,
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let progress = report::progress();
    let model = args.model.open_with_progress(&progress)?;
    let machine = Machine::open(args.run.device)?;
    let loader = Loader::new(&model, &args.model, &args.run, &machine).with_progress(&progress);
    if model.checkpoint.is_none() {
        report::notice("the weights are random: the text is nonsense");
    }
    if !args.tokens.is_empty() {
        return tokens::run(args, &loader);
    }
    let frontend = Frontend::open(&model)?;
    if args.chat {
        frontend.template()?;
    }
    tell_unsupported(frontend.defaults());
    let sampling = args.sampling.params(frontend.defaults().sampling);
    let generator = Generator::load(&loader, frontend)?;
    let mut answerer = Answerer { args, generator, sampling };
    if args.chat {
        return answerer.chat();
    }
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
    let request = answerer.generator.prompt(&prompt)?;
    let answer = answerer.answer(request)?;
    finish(args, &answer)
}

/// What the checkpoint asks for and is not done is said.
fn tell_unsupported(defaults: &GenerationDefaults) {
    for key in &defaults.unsupported {
        report::notice(&format!("generation_config.json: `{key}` is not supported, and left out"));
    }
}

impl Answerer<'_> {
    /// Answers a request as the command line has it, streaming unless JSON is wanted.
    fn answer(&mut self, request: Request) -> Result<Answer, Box<dyn Error>> {
        let (args, prompt_tokens) = (self.args, request.tokens.len());
        let given = self.generator.frontend().defaults().max_tokens(prompt_tokens);
        let request = Request {
            max_tokens: args.max_tokens.or(given).unwrap_or(MAX_TOKENS),
            stop: if args.ignore_eos { Vec::new() } else { request.stop },
            sampling: self.sampling,
            ..request
        };
        let mut answer = Answer::new(prompt_tokens);
        let (start, mut first) = (Instant::now(), None);
        let mut stream = self.generator.stream(request)?;
        for piece in &mut stream {
            let piece = piece?;
            first.get_or_insert_with(|| {
                answer.prompt_tokens_per_second =
                    rate(prompt_tokens, start.elapsed().as_secs_f64());
                Instant::now()
            });
            answer.tokens.extend(piece.token);
            answer.text.push_str(&piece.text);
            if !args.json {
                report::text(&piece.text)?;
            }
        }
        if stream.finish() == Some(FinishReason::Stop) {
            answer.finish_reason = "stop";
        }
        if let Some(first) = first {
            // The first token came with the prompt.
            let after = answer.tokens.len().saturating_sub(1);
            answer.generated_tokens_per_second = rate(after, first.elapsed().as_secs_f64());
        }
        Ok(answer)
    }

    /// One question, or turns until the input ends.
    fn chat(&mut self) -> Outcome {
        let args = self.args;
        let mut messages: Vec<Message> =
            args.system.iter().map(|s| Message::new("system", s.as_str())).collect();
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
            let request = self.generator.chat(&messages)?;
            let answer = self.answer(request)?;
            finish(args, &answer)?;
            if args.prompt.is_some() {
                return Ok(());
            }
            messages.push(Message::new("assistant", answer.text.trim()));
        }
    }
}

/// Tokens a second.
fn rate(tokens: usize, seconds: f64) -> f64 {
    tokens as f64 / seconds.max(1e-9)
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
