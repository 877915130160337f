//! `infernum tokenize`: texts to token ids and back, with no need of weights.

use std::io::BufRead;

use infernum::{ModelOptions, Needs};
use infernum_frontend_hf::spec::Library;
use infernum_frontend_hf::tokenizer::{Tokenizer, TokenizerError};

use crate::report::{self, Outcome};

/// Which tokenizer, and which way.
#[derive(clap::Args)]
pub struct Args {
    /// Folder with a tokenizer.json, GGUF file, of which the vocabulary is enough, or model of the hub, as ORG/NAME; the built-in demo
    /// model when left out.
    #[arg(long, value_name = "DIR|FILE|ORG/NAME")]
    model: Option<std::path::PathBuf>,
    /// Folder whose models/ overrides and adds to the built-in data files.
    #[arg(long, value_name = "DIR")]
    data: Option<std::path::PathBuf>,
    /// Leave off what the tokenizer puts around a text, most often a begin token.
    #[arg(long, conflicts_with = "decode")]
    no_bos: bool,
    /// Read ids, with spaces or line ends between them, and write their text.
    #[arg(long)]
    decode: bool,
    /// Take each line of the input by itself, and write a line for it.
    #[arg(long)]
    lines: bool,
}

/// An input that is no list of ids.
#[derive(Debug, thiserror::Error)]
enum InputError {
    #[error(
        "line {line}: expected a token's id, a whole number below {vocabulary}, found `{found}`"
    )]
    Id { line: usize, vocabulary: usize, found: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Reads the standard input, and writes the tokens of its text or the text of its tokens.
pub fn run(args: &Args) -> Outcome {
    infernum::check_data(args.data.as_deref())?;
    let model = ModelOptions { model: args.model.clone(), ..ModelOptions::default() };
    let files = model.files(Needs::Text, &report::progress())?;
    let tokenizer = Tokenizer::open_with(&files, &Library::new(args.data.as_deref()))?;
    let stdin = std::io::stdin().lock();
    if args.lines {
        for (number, line) in stdin.lines().enumerate() {
            report::line(&convert(args, &tokenizer, &line?, number + 1)?)?;
        }
        return Ok(());
    }
    let text = std::io::read_to_string(stdin)?;
    report::line(&convert(args, &tokenizer, &text, 1)?)
}

/// The ids of a text, or the text of ids; `first` is the number of its first line.
fn convert(
    args: &Args,
    tokenizer: &Tokenizer,
    text: &str,
    first: usize,
) -> Result<String, InputError> {
    if !args.decode {
        let ids = tokenizer.encode(text, !args.no_bos)?;
        return Ok(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    }
    let mut ids = Vec::new();
    for (line, words) in (first..).zip(text.lines()) {
        for word in words.split_whitespace() {
            let id = word.parse().ok().filter(|id| tokenizer.token_of(*id).is_some());
            ids.push(id.ok_or_else(|| InputError::Id {
                line,
                vocabulary: tokenizer.vocab_size(),
                found: word.chars().take(40).collect(),
            })?);
        }
    }
    Ok(tokenizer.decode(&ids, false)?)
}
