//! Kernel templates: CUDA text that begins with what the compiler must know of it.
//!
//! `kernels/templates/README.md` is the reference of the format.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};
use infernum_frontend_hf::spec::{Source, read_ron};
use infernum_ir::expr::Expr;
use infernum_ir::{SourceError, is_there};
use serde::Deserialize;

use super::variants::{self, Entry};

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/templates");

/// A template is missing or says something wrong of itself.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum TemplateError {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("there is no kernel template `{name}`: expected kernels/templates/{name}.cu.j2")]
    Missing { name: String },
    #[error("{path}: expected `{{#`, a `Kernel(..)` and `#}}` at the beginning")]
    Header { path: String },
    #[error(transparent)]
    Source(Box<SourceError>),
}

impl From<SourceError> for TemplateError {
    fn from(error: SourceError) -> TemplateError {
        TemplateError::Source(Box::new(error))
    }
}

/// Where templates come from.
#[derive(Clone, Debug, Default)]
pub struct Library {
    /// `DIR/kernels/templates`, whose files hide ours.
    folder: Option<PathBuf>,
}

impl Library {
    /// The built-in templates, with those of `DIR/kernels/templates` on top.
    pub fn new(data: Option<&Path>) -> Library {
        let folder = data.map(|d| d.join("kernels/templates")).filter(|d| is_there(d));
        Library { folder }
    }

    /// The text of a file and its name for messages; `None` if there is none. A file of the user's
    /// that cannot be read is an error.
    pub(super) fn file(
        &self,
        name: &str,
    ) -> Result<Option<(String, Cow<'static, str>)>, TemplateError> {
        if let Some(path) = self.users(name) {
            let shown = path.display().to_string();
            return match std::fs::read_to_string(&path) {
                Ok(text) => Ok(Some((shown, text.into()))),
                Err(source) => Err(TemplateError::Io { path: shown, source }),
            };
        }
        Ok(Library::ours(name))
    }

    /// The user's file of that name, if there is one.
    fn users(&self, name: &str) -> Option<PathBuf> {
        // Names come from the user's files as well: they stay inside the folder.
        let inside =
            Path::new(name).components().all(|c| matches!(c, std::path::Component::Normal(_)));
        self.folder.as_ref().filter(|_| inside).map(|f| f.join(name)).filter(|path| is_there(path))
    }

    fn ours(name: &str) -> Option<(String, Cow<'static, str>)> {
        let text = EMBEDDED.get_file(name)?.contents_utf8()?;
        Some((format!("kernels/templates/{name}"), text.into()))
    }

    /// The list of variants that the file `from` calls `name`, and the file that it is in. As with
    /// specs, a file of the user's that names itself means the one it hides.
    pub(super) fn variants(
        &self,
        name: &str,
        from: &str,
    ) -> Result<Option<(String, Cow<'static, str>)>, TemplateError> {
        let file = format!("variants/{name}.ron");
        match self.users(&file) {
            Some(path) if path.display().to_string() == from => Ok(Library::ours(&file)),
            _ => self.file(&file),
        }
    }

    /// Names of the lists of variants that there are.
    pub(super) fn lists(&self) -> Vec<String> {
        let users = self.folder.as_ref().and_then(|f| std::fs::read_dir(f.join("variants")).ok());
        let users = users.into_iter().flatten().flatten().map(|entry| entry.path());
        let ours = EMBEDDED.get_dir("variants").into_iter().flat_map(Dir::files);
        let paths = ours.map(|f| f.path().to_owned()).chain(users);
        let ron = paths.filter(|p| p.extension().is_some_and(|e| e == "ron"));
        ron.filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned())).collect()
    }

    /// A kernel's template.
    pub fn template(&self, name: &str) -> Result<Template, TemplateError> {
        let file = self.file(&format!("{name}.cu.j2"))?;
        let (path, text) = file.ok_or_else(|| TemplateError::Missing { name: name.to_owned() })?;
        Template::parse(self, name, &path, &text)
    }

    /// Names of the built-in templates.
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        EMBEDDED.files().filter_map(|f| f.path().file_name()?.to_str()?.strip_suffix(".cu.j2"))
    }
}

/// A template.
#[derive(Clone, Debug)]
pub struct Template {
    /// The file's stem.
    pub name: String,
    /// The file, for messages.
    pub path: String,
    /// What it computes, and how.
    pub doc: String,
    /// Where its checks go beyond small and odd sizes.
    pub check_sizes: CheckSizes,
    /// Whether generated rows and prompt rows may be launched apart, each with the variant that is best for them.
    pub parts: bool,
    /// Ways to compute it, in order of preference.
    pub variants: Vec<Variant>,
    /// The whole file.
    pub text: String,
}

/// Sizes that a kernel is checked at besides small and odd ones: those of models, which admit its
/// variants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum CheckSizes {
    /// None.
    #[default]
    Small,
    /// Long rows, and many of them.
    Rows,
    /// Hundreds of tokens.
    Many,
    /// Matrices that products read, for few and for many tokens.
    Products,
    /// Heads of attention, short and long contexts.
    Heads,
    /// Several sequences of one token.
    Decode,
    /// Few and many tokens that go to experts.
    Experts,
}

/// One way to compute an op.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Its name, within the template.
    pub name: String,
    /// Where it may be used: all must hold.
    pub when: Vec<Expr>,
    /// Constants that the text sees as `p`.
    pub params: BTreeMap<String, f64>,
    /// What is launched.
    pub kind: Kind,
    /// The name of its order of summation: variants of one order give a row the same bits, whatever other rows a
    /// step has. `None` where a row's bits may depend on others.
    pub order: Option<String>,
}

impl Variant {
    /// Whether its kernel is the template's text.
    pub fn is_text(&self) -> bool {
        matches!(&self.kind, Kind::Kernel { ptx: None, .. })
    }

    /// Whether its kernel is told of weights that the next launches read.
    pub fn looks_ahead(&self) -> bool {
        matches!(&self.kind, Kind::Kernel { ahead: Some(_), .. })
    }

    /// Whether it can be launched for a part of a step's rows: it is told by `step` which they are, and reads
    /// nothing in tiles, which the copy engine would have to be told of.
    pub fn has_parts(&self) -> bool {
        matches!(&self.kind, Kind::Kernel { ptx: None, tiles, .. } if tiles.is_empty())
    }
}

/// What a variant launches.
#[derive(Clone, Debug)]
pub enum Kind {
    /// The template's kernel.
    Kernel {
        /// Blocks, for up to three dimensions.
        grid: Vec<Expr>,
        /// Threads of a block.
        block: Expr,
        /// Dynamic shared memory, in bytes.
        shared: Expr,
        /// Device memory of the kernel's own, in bytes.
        scratch: Expr,
        /// Bytes of the weights that the next launches read which the kernel may have brought to the L2 cache; `None` if
        /// it takes none.
        ahead: Option<Expr>,
        /// Where the kernel is not the template's text but somebody else's PTX.
        ptx: Option<Foreign>,
        /// What the GPU's copy engine reads in tiles, in the order in which the kernel takes the maps.
        tiles: Vec<Tiles>,
    },
    /// A library's matrix product.
    Matmul(MatmulRoles),
}

/// An operand that the GPU's copy engine reads in tiles.
#[derive(Clone, Debug)]
pub struct Tiles {
    /// Its name.
    pub operand: String,
    /// Rows of a tile.
    pub rows: Expr,
    /// See [`TileMap::dealt`](crate::TileMap::dealt).
    pub dealt: bool,
}

/// A kernel that was compiled by something else: Triton, say.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename = "Ptx", deny_unknown_fields)]
pub struct Foreign {
    /// Its PTX, beside the template.
    pub file: String,
    /// The entry point.
    pub function: String,
    /// What it is given, in order: the address of an operand or result by its name, of `scratch`,
    /// `null`, or a number: `i32: EXPRESSION`, `i64: ..` or `f32: ..`.
    pub args: Vec<String>,
}

/// Which operands of an op are which of `y = x · wᵀ + bias + add`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename = "Matmul", deny_unknown_fields)]
#[allow(missing_docs, reason = "as in the formula")]
pub struct MatmulRoles {
    pub x: String,
    pub w: String,
    #[serde(default)]
    pub add: Option<String>,
    #[serde(default)]
    pub bias: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename = "Kernel", deny_unknown_fields)]
struct HeaderFile<'a> {
    doc: String,
    #[serde(default)]
    check_sizes: CheckSizes,
    #[serde(default)]
    parts: bool,
    #[serde(default)]
    order: Option<&'a str>,
    #[serde(borrow)]
    variants: Vec<Entry<'a>>,
}

impl Template {
    /// An error about an expression of a variant, or about `word` in it. Expressions do not keep their places:
    /// this looks for one in the header.
    pub(super) fn fault(
        &self,
        variant: &str,
        (expr, word): (&Expr, &str),
        message: impl Into<String>,
    ) -> SourceError {
        let header = &self.text[..self.text.find("#}").unwrap_or(self.text.len())];
        let start = header.find(&format!("\"{variant}\"")).unwrap_or(0);
        let mut at = start;
        let mut span = None;
        // Texts in quotes are every other piece.
        for (i, piece) in header[start..].split('"').enumerate() {
            if i % 2 == 1 && piece.parse::<Expr>().is_ok_and(|e| e == *expr) {
                let (from, len) = word_in(piece, word).unwrap_or((0, piece.len()));
                span = Some(at + from..at + from + len);
                break;
            }
            at += piece.len() + 1;
        }
        // One of a shared list, or one that was given something, is not in the header as it is.
        let mut message = message.into();
        if span.is_none() {
            message = format!("{message}, in `{expr}`");
        }
        let span = span.unwrap_or(start..start + variant.len());
        SourceError::new(&self.path, &self.text, span, message)
    }

    pub(super) fn parse(
        library: &Library,
        name: &str,
        path: &str,
        text: &str,
    ) -> Result<Template, TemplateError> {
        let missing = || TemplateError::Header { path: path.to_owned() };
        let start = text.find("{#").filter(|at| text[..*at].trim().is_empty());
        let start = start.ok_or_else(missing)? + 2;
        let end = text[start..].find("#}").ok_or_else(missing)? + start;
        // Blanks in place of what is before keep the positions of errors.
        let header: String =
            text[..start].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
        let source = Source::new(path, &(header + &text[start..end]));
        let file: HeaderFile<'_> = read_ron(&source)?;
        let variants = variants::expand(library, &source, &file.variants, file.order)?;
        if let Some(whole) = variants.iter().find(|v| file.parts && !v.has_parts()) {
            let message = format!(
                "`parts: true`, but variant `{}` can only be launched for all rows: expected no `tiles`, `ptx` or `library`",
                whole.name
            );
            return Err(SourceError::new(path, text, start..end, message).into());
        }
        Ok(Template {
            name: name.to_owned(),
            path: path.to_owned(),
            variants,
            doc: file.doc,
            check_sizes: file.check_sizes,
            parts: file.parts,
            text: text.to_owned(),
        })
    }
}

/// Where `word` stands in a text, as a whole name, and its length.
fn word_in(text: &str, word: &str) -> Option<(usize, usize)> {
    let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = text.match_indices(word).filter(|(i, _)| {
        !text[..*i].ends_with(letter) && !text[i + word.len()..].starts_with(letter)
    });
    found.next().filter(|_| !word.is_empty()).map(|(i, _)| (i, word.len()))
}
