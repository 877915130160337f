//! Talks with a model, turn by turn: `cargo run --release -p infernum --example chat [-- FOLDER]`.

use std::io::{self, BufRead, Write};

use infernum::{Frontend, Generator, Loader, Machine, Message, ModelOptions, Progress, RunOptions};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let model = std::env::args().nth(1).map_or_else(ModelOptions::default, ModelOptions::folder);
    talk(&model, io::stdin().lock(), &mut io::stdout())
}

/// Answers each line of `input`; all that was said before is remembered.
fn talk(model: &ModelOptions, input: impl BufRead, out: &mut impl Write) -> Result<()> {
    let run = RunOptions::default();
    let (opened, machine) = (model.open()?, Machine::open(run.device)?);
    let tell = |progress: Progress<'_>| {
        if let Progress::Begin { stage, .. } = progress {
            eprintln!("{stage} …");
        }
    };
    let loader = Loader::new(&opened, model, &run, &machine).with_progress(&tell);
    let mut generator = Generator::load(&loader, Frontend::open(&opened)?)?;
    let mut messages = vec![Message::new("system", "Answer in one sentence.")];
    for line in input.lines() {
        messages.push(Message::new("user", line?));
        let mut request = generator.chat(&messages)?;
        request.max_tokens = 200.min(request.max_tokens);
        let mut answer = String::new();
        for piece in generator.stream(request)? {
            let text = piece?.text;
            write!(out, "{text}")?;
            out.flush()?;
            answer.push_str(&text);
        }
        writeln!(out)?;
        messages.push(Message::new("assistant", answer));
    }
    Ok(())
}

#[test]
fn it_answers_each_line() {
    let mut out = Vec::new();
    talk(&ModelOptions::default(), &b"Hello!\nWho are you?\n"[..], &mut out).expect("answers");
    let answers = String::from_utf8(out).expect("text");
    assert!(answers.lines().filter(|line| !line.is_empty()).count() >= 2, "one each: {answers}");
}
