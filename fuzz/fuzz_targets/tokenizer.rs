//! A tokenizer.json, a tokenizer_config.json and a chat template, parted by lines of `---`, are read or refused.
//! What is read encodes, decodes and renders.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use infernum_frontend_hf::ModelFiles;
use infernum_frontend_hf::chat::{ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder =
        std::env::temp_dir().join(format!("infernum-fuzz-tokenizer-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
});

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let folder = &*FOLDER;
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let mut parts = text.splitn(3, "\n---\n");
    for name in names {
        let path = folder.join(name);
        let _ = std::fs::remove_file(&path);
        if let Some(part) = parts.next().filter(|p| !p.is_empty()) {
            std::fs::write(path, part).expect("a file");
        }
    }
    let files = ModelFiles::folder(folder).expect("a folder");
    match Tokenizer::open(&files) {
        Ok(tokenizer) => {
            if let Ok(ids) = tokenizer.encode("Once upon a time, <|x|> 3 é", true) {
                let _ = std::hint::black_box(tokenizer.decode(&ids, false));
            }
            let mut stream = tokenizer.stream(true);
            for id in [0, 1, 255, u32::MAX] {
                let _ = std::hint::black_box(stream.push(id));
            }
            let _ = std::hint::black_box((stream.flush(), tokenizer.eos_id(), tokenizer.bos_id()));
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
    match ChatTemplate::open(&files) {
        Ok(template) => {
            let messages = [Message::new("system", "be brief"), Message::new("user", "hello")];
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let _ = std::hint::black_box(
                template.render(&messages, &options).map_err(|e| e.to_string()),
            );
        }
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
});
