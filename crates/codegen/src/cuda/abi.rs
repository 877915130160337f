//! What the host fills in and kernels read: defined here once. Rust lays the structs out, and the prelude of
//! every kernel gets their declarations and the constants as CUDA text, so that the two cannot differ.

use std::fmt::Write;
use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use infernum_ir::NO_TOKEN;
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

impl<T: Shared, const N: usize> Shared for [T; N] {
    const NAME: &str = T::NAME;

    fn field(name: &str) -> String {
        format!("{} {name}[{N}]", T::NAME)
    }
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
    /// A token that penalties change.
    SeenToken {
        /// Seen in the prompt or generated.
        token: u32,
        /// How often it was generated, or BANNED.
        generated: u32,
    }
}

impl SeenToken {
    /// In place of how often it was generated: it may not be picked. `BANNED` in kernels.
    pub const BANNED: u32 = u32::MAX;
}

shared! {
    /// How a sequence's next token is picked.
    TokenPick {
        /// log2(e) / temperature; 0 picks the largest logit.
        scale: f32,
        /// Only so many of the largest compete; 0 for all.
        top_k: u32,
        /// Only the likeliest tokens that together have this probability compete.
        top_p: f32,
        /// Only tokens at least this likely, relative to the likeliest, compete.
        min_p: f32,
        /// Divides (where positive) or multiplies the logits of tokens that were seen.
        repetition: f32,
        /// Taken off a token's logit for each time that it was generated.
        frequency: f32,
        /// Taken off a token's logit if it was generated.
        presence: f32,
        /// Of seed and position: see `common/noise.cuh`.
        key: [u32; 2],
        /// Elements of `seen`.
        seen_count: u32,
        /// Tokens with penalties, each once.
        seen: Address<SeenToken>,
    }
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
        /// [seqs, block_stride] the cache's blocks of each sequence.
        blocks: Address<i32>,
        /// [B] for kernels that sample; null in a part.
        picks: Address<TokenPick>,
    }
}

fn line(out: &mut String, text: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}

fn comment(out: &mut String, indent: &str, text: &str) {
    line(out, &format!("{indent}//{text}"));
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
    SeenToken::declare(&mut out);
    TokenPick::declare(&mut out);
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
            "// A token that penalties change.\nstruct SeenToken {\n    // Seen in the prompt or generated.\n    u32 token;\n",
            "    // Of seed and position: see `common/noise.cuh`.\n    u32 key[2];\n",
            "    // Tokens with penalties, each once.\n    const SeenToken* seen;\n};\nstatic_assert(sizeof(TokenPick) == 48, \"\");\n",
            "    // [B] for kernels that sample; null in a part.\n    const TokenPick* picks;\n};\nstatic_assert(sizeof(Step) == 128, \"\");\n",
        ] {
            assert!(text.contains(expected), "{expected:?} in\n{text}");
        }
    }
}
