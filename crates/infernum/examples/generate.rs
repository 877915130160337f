//! Continues a text: `cargo run --release -p infernum --example generate [-- FOLDER [PROMPT]]`.

use std::io::{self, Write};

use infernum::{Generator, ModelOptions, RunOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let model = words.next().map_or_else(ModelOptions::default, ModelOptions::folder);
    let prompt = words.next().unwrap_or_else(|| "Once upon a time".to_owned());
    let mut generator = Generator::open(&model, &RunOptions::default())?;
    print!("{prompt}");
    generate(&mut generator, &prompt, 64, &mut io::stdout())?;
    println!();
    Ok(())
}

/// Writes the continuation as it comes; the number of its tokens.
fn generate(
    generator: &mut Generator,
    prompt: &str,
    max_tokens: usize,
    out: &mut impl Write,
) -> Result<usize, Box<dyn std::error::Error>> {
    let mut request = generator.prompt(prompt)?;
    request.max_tokens = max_tokens.min(request.max_tokens);
    let mut tokens = 0;
    for piece in generator.stream(request)? {
        let piece = piece?;
        tokens += usize::from(piece.token.is_some());
        write!(out, "{}", piece.text)?;
        out.flush()?;
    }
    Ok(tokens)
}

#[test]
fn it_generates() {
    let mut generator =
        Generator::open(&ModelOptions::default(), &RunOptions::default()).expect("the demo model");
    let mut text = Vec::new();
    let tokens = generate(&mut generator, "Once upon a time", 8, &mut text).expect("tokens");
    assert!((1..=8).contains(&tokens) && !text.is_empty());
}
