//! The text side of a model: from words to requests, and from tokens to words.

use std::sync::Arc;

use infernum_frontend_hf::Model;
use infernum_frontend_hf::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use infernum_frontend_hf::dialect::Dialect;
use infernum_frontend_hf::tokenizer::{TextStream, Tokenizer};
use infernum_grammar::Grammars;
use infernum_ir::Task;
use infernum_runtime::Request;

use crate::defaults::GenerationDefaults;
use crate::error::Error;

/// What stands between words and an engine: tokenizer, chat template and the checkpoint's defaults. It holds
/// no weights and no engine, so that it may live in another thread or process than they do.
#[derive(Debug)]
pub struct Frontend {
    tokenizer: Tokenizer,
    template: Result<ChatTemplate, ChatError>,
    defaults: GenerationDefaults,
    grammars: Grammars,
    dialect: Option<Arc<Dialect>>,
    marker_tokens: Vec<u32>,
    task: Task,
    dimensions: Option<Vec<usize>>,
}

impl Frontend {
    /// Reads what lies beside the weights. A model without a chat template, or with a broken one, can be used
    /// but for [`Frontend::chat`].
    pub fn open(model: &Model) -> Result<Frontend, Error> {
        let tokenizer = Tokenizer::open_with(&model.files, model.library())?;
        let defaults = GenerationDefaults::read(&model.config, tokenizer.eos_id())?;
        let (template, grammars) =
            (ChatTemplate::open(&model.files), Grammars::new(&tokenizer, &defaults.end));
        let dialects = Dialect::all(model.library())?;
        let dialect = template.as_ref().ok();
        let dialect = dialect.and_then(|t| Dialect::of_template(&dialects, t.text()));
        let markers = dialect.iter().flat_map(|dialect| dialect.markers());
        let parts = markers.flat_map(|marker| tokenizer.special_parts(marker));
        let mut marker_tokens: Vec<u32> = parts.filter_map(|(_, token)| token).collect();
        marker_tokens.sort_unstable();
        marker_tokens.dedup();
        Ok(Frontend {
            tokenizer,
            template,
            defaults,
            grammars,
            dialect,
            marker_tokens,
            task: model.task,
            dimensions: dimensions(model)?,
        })
    }

    /// What the model is for.
    pub fn task(&self) -> Task {
        self.task
    }

    /// Sizes that its vectors may be cut to, where the checkpoint says which; any where it says nothing.
    pub fn dimensions(&self) -> Option<&[usize]> {
        self.dimensions.as_deref()
    }

    /// Special tokens that tell parts of an answer apart, in ascending order.
    pub fn marker_tokens(&self) -> &[u32] {
        &self.marker_tokens
    }

    /// A request that continues `text`. All else is as the checkpoint says, and without a bound on the length
    /// but the engine's where it says none; change what you like.
    pub fn prompt(&self, text: &str) -> Result<Request, Error> {
        Ok(self.request(self.tokenizer.encode(text, true)?))
    }

    /// A request for the assistant's next message. All else as for [`Frontend::prompt`].
    pub fn chat(&self, messages: &[Message]) -> Result<Request, Error> {
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let text = self.template()?.render(messages, &options)?;
        // The template writes special tokens itself.
        Ok(self.request(self.tokenizer.encode(&text, false)?))
    }

    /// A request that continues these tokens, as the checkpoint says.
    pub fn request(&self, tokens: Vec<u32>) -> Request {
        Request {
            max_tokens: self.defaults.max_tokens(tokens.len()).unwrap_or(usize::MAX),
            stop: self.defaults.end.clone(),
            sampling: self.defaults.sampling,
            ..Request::new(tokens, 0)
        }
    }

    /// Turns generated tokens into text, one by one. Special tokens are left out.
    pub fn text(&self) -> TextStream {
        self.tokenizer.stream(true)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; an error where there is none, or none that can be read.
    pub fn template(&self) -> Result<&ChatTemplate, Error> {
        self.template.as_ref().map_err(|e| Error::NoTemplate { message: e.to_string() })
    }

    /// What texts can be held to: a grammar that was compiled is a request's
    /// [`constraint`](Request::constraint).
    pub fn grammars(&self) -> &Grammars {
        &self.grammars
    }

    /// How the model writes calls and reasoning, if its chat template says.
    pub fn dialect(&self) -> Option<&Arc<Dialect>> {
        self.dialect.as_ref()
    }

    /// What the checkpoint says of how its texts are made.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }
}

/// Sizes that vectors may be cut to (Kusupati et al. 2022), as config.json says: a list, or whether there are any.
fn dimensions(model: &Model) -> Result<Option<Vec<usize>>, Error> {
    const LIST: &str = "matryoshka_dimensions";
    let config = &model.config;
    let Some(list) = config.get(LIST) else {
        return Ok((config.bool("is_matryoshka")? == Some(false)).then(Vec::new));
    };
    let size = |value: &serde_json::Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let sizes = list.as_array().and_then(|list| list.iter().map(size).collect());
    let wrong = || config.wrong_type(LIST, "a list of whole numbers", list);
    sizes.map(Some).ok_or_else(|| wrong().into())
}
