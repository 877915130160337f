//! What the host fills in and kernels read: defined here once. Rust lays the structs out, and the prelude of
//! every kernel gets their declarations and the constants as CUDA text, so that the two cannot differ.

use std::fmt::Write;
use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use infernum_ir::picking::{PickRow, SeenToken};
use infernum_ir::{DType, NO_TOKEN};
use serde::{Deserialize, Serialize};

/// Tokens in a block of the KV cache: `PAGE` in kernels.
pub const PAGE: usize = 16;

/// Marks a token of a step that is still to come: the other bits are the row of the step before whose token
/// it will be.
pub const FED: u32 = 1 << 31;

/// Rows of a step that a kernel may be launched for. Each part is a view of the step: a [`Step`] of its own,
/// which says what it would say if there were no other rows. Sequences of generated rows come first in a step,
/// so that a part's rows lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Every row.
    All,
    /// Those of sequences with one new token, which follows tokens that were computed before.
    Generated,
    /// The others.
    Prompt,
}

impl Part {
    /// All parts, in the order of their views.
    pub const ALL: [Part; 3] = [Part::All, Part::Generated, Part::Prompt];

    /// The index of its view.
    pub const fn view(self) -> usize {
        self as usize
    }
}

/// The address of an array on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Address<T>(u64, PhantomData<T>);

impl<T> Address<T> {
    /// An array that begins there.
    pub fn new(address: u64) -> Address<T> {
        Address(address, PhantomData)
    }
}

/// A type that both sides know.
trait Shared {
    /// What kernels call it.
    const NAME: &str;

    /// How a field of it is declared.
    fn field(name: &str) -> String {
        format!("{} {name}", Self::NAME)
    }
}

impl Shared for u32 {
    const NAME: &str = "u32";
}

impl Shared for i32 {
    const NAME: &str = "int";
}

impl Shared for i64 {
    const NAME: &str = "i64";
}

impl Shared for f32 {
    const NAME: &str = "float";
}

impl<T: Shared> Shared for Address<T> {
    const NAME: &str = T::NAME;

    fn field(name: &str) -> String {
        format!("const {}* {name}", T::NAME)
    }
}

/// A struct of both sides: the first line of each field's comment goes to kernels, too. No padding is
/// allowed, which `Pod` checks.
macro_rules! shared {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $about:literal])+ $field:ident: $ty:ty,)+ }) => {
        $(#[doc = $doc])+
        #[allow(non_snake_case, reason = "the names are those of kernels")]
        #[allow(rustdoc::broken_intra_doc_links, reason = "`[T]` is a shape")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            $($(#[doc = $about])+ pub $field: $ty,)+
        }

        impl Shared for $name {
            const NAME: &str = stringify!($name);
        }

        impl $name {
            fn declare(out: &mut String) {
                $(comment(out, "", $doc);)+
                line(out, &format!("struct {} {{", stringify!($name)));
                $(
                    $(comment(out, "    ", $about);)+
                    line(out, &format!("    {};", <$ty as Shared>::field(stringify!($field))));
                )+
                line(out, "};");
                let (name, size) = (stringify!($name), size_of::<$name>());
                line(out, &format!("static_assert(sizeof({name}) == {size}, \"\");"));
            }
        }
    };
}

shared! {
    /// Inputs of the step, or of a part of its rows. Written before the step's first kernel and constant throughout it, so that
    /// it may be read before pdl_wait(). Sequences are in order, and so are their tokens.
    Step {
        /// Tokens.
        T: i32,
        /// Rows of output; of those of a part nothing is known.
        B: i32,
        /// Context rows of all sequences.
        S: i32,
        /// Sequences.
        seqs: i32,
        /// Numbers in a row of `blocks`.
        block_stride: i64,
        /// Elements of a ragged [T, S].
        pairs: i64,
        /// [T] ids.
        tokens: Address<u32>,
        /// [T] row in the context of its sequence.
        positions: Address<i32>,
        /// [B] or [T]: tokens that yield a row of output; null in a part.
        output_rows: Address<u32>,
        /// [S] row in the context of its sequence.
        context_positions: Address<i32>,
        /// [T] the token's sequence.
        seq: Address<i32>,
        /// [T] the token's row in the planes of the cache.
        slots: Address<i32>,
        /// [seqs + 1] first token of each sequence.
        first: Address<i32>,
        /// [seqs] context rows, those of the new tokens included.
        context: Address<i32>,
        /// [seqs + 1] first context row in [S].
        context_start: Address<i32>,
        /// [T] first of the token's elements in a ragged [T, S].
        pair_start: Address<i64>,
        /// [seqs, block_stride] the cache's blocks of each sequence; of slots pairs: written, and read or -1 (zero).
        blocks: Address<i32>,
        /// The lists that rows of `picks` name.
        words: Address<u32>,
        /// Tokens of the whole step.
        all: i32,
        /// Those of them that come before a part's.
        before: i32,
    }
}

fn line(out: &mut String, text: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}

fn comment(out: &mut String, indent: &str, text: &str) {
    line(out, &format!("{indent}//{text}"));
}

/// A struct of words, as the IR has it.
fn declare_words(out: &mut String, name: &str, doc: &str, fields: &[(&str, DType, &str)]) {
    comment(out, "", doc);
    line(out, &format!("struct {name} {{"));
    for (field, dtype, about) in fields {
        let ty = if *dtype == DType::F32 { f32::NAME } else { u32::NAME };
        comment(out, "    ", about);
        line(out, &format!("    {ty} {field};"));
    }
    line(out, "};");
}

/// All of it, as CUDA text.
pub(super) fn declarations() -> String {
    let mut out = String::new();
    comment(&mut out, "", " Tokens in a block of the KV cache.");
    line(&mut out, &format!("#define PAGE {PAGE}"));
    comment(
        &mut out,
        "",
        " Marks a token that is still to come: the other bits are the row that has it.",
    );
    line(&mut out, &format!("#define FED {FED:#x}u"));
    comment(&mut out, "", " In place of a token where a row of logits has none.");
    line(&mut out, &format!("#define NO_TOKEN {NO_TOKEN:#x}u"));
    comment(&mut out, "", " In place of how often a token was generated: it may not be picked.");
    line(&mut out, &format!("#define BANNED {:#x}u", SeenToken::BANNED));
    declare_words(&mut out, "PickRow", PickRow::DOC, PickRow::FIELDS);
    Step::declare(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_get_the_declarations() {
        let text = declarations();
        for expected in [
            "#define PAGE 16\n",
            "#define FED 0x80000000u\n",
            "// How the token after a row of logits is picked; zeros take the largest.\nstruct PickRow {\n    // log2(e) / temperature; 0 picks the largest logit.\n    float scale;\n",
            "    u32 given;\n};\n",
            "    // The lists that rows of `picks` name.\n    const u32* words;\n    // Tokens of the whole step.\n    int all;\n    // Those of them that come before a part's.\n    int before;\n};\nstatic_assert(sizeof(Step) == 136, \"\");\n",
        ] {
            assert!(text.contains(expected), "{expected:?} in\n{text}");
        }
    }
}
