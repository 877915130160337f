//! The text form of the IR: [`print()`] and [`parse`] are inverses.
//!
//! ```text
//! module tiny
//!
//! graph decoder {
//!   %x = carry 0 : bf16[T, 64]
//!   %w = weight "model.layers.{layer}.mlp.up_proj.weight" : const bf16[96, 64]
//!   %experts = weight "model.layers.{layer}.experts.{expert}.w1.weight" stack 8 : const bf16[8, 96, 64]
//!   %coded = weight "model.layers.{layer}.mlp.down_proj.weight" : const q8_0[64, 96]
//!   %k0 = state k : state bf16[2, 16]
//!   %tokens = step tokens : u32[T]
//!   %y = linear(%x, %w, _) {dtype: none} : bf16[T, 96] @ models/tiny.ron:12:9
//!   %a, %b = topk(%y, _) {k: 2, groups: 1, keep: 1} : bf16[T, 2], u32[T, 2]
//!   return %a, %k0
//! }
//!
//! schedule decoder 0..4
//! ```
//!
//! A state whose rows are kept only as long as tokens see them is `state ring(4096) bf16[2, 16]`.
//! One statement a line; `_` stands for an operand left out; `//` starts a comment line. A weight that is
//! encoded has its encoding's name in place of an element type.

mod escape;
mod parse;
mod print;

pub use parse::{parse, parse_with};
pub use print::{print, print_graph, print_with_notes};
