//! What may be written in the files of kernels, for their reference. A test holds each list against what
//! is read.

use infernum_frontend_hf::spec::fields::Structure;

/// The structures of fused ops and rules.
pub const KERNELS: [Structure; 2] = [
    Structure {
        name: "Fused",
        doc: "A fused op: a file in `kernels/fused/`.",
        fields: &[
            ("name", true, "its name"),
            ("doc", true, "what it computes"),
            ("operands", true, "`\"x\"`, or `\"x?\"` for one that may be left out"),
            (
                "attrs",
                false,
                "`\"eps\"`, of the kind of the op attribute that it is passed to, or `\"scale: float\"`: int, float, bool, dtype, expr, with `?` where it may be absent",
            ),
            ("body", true, "calls of ops and other fused ops"),
            ("results", true, "the names of the body that it yields"),
            ("template", false, "stem of its CUDA template"),
            (
                "vars",
                false,
                "types of its operands: needed where no rule makes it of the rule's variables, as its kernels are checked on calls of these types",
            ),
            ("samples", false, "values of attributes that its kernels are checked with"),
            (
                "sizes",
                false,
                "sizes of the dimensions in `vars` that its kernels are checked at, besides small ones: `[{ \"K\": 4096 }]`",
            ),
        ],
    },
    Structure {
        name: "Rule",
        doc: "A rewrite rule; a file in `kernels/rules/` holds a list of them.",
        fields: &[
            ("name", true, "its name, for `--disable` and explanations"),
            ("doc", false, "why it holds"),
            (
                "numerics",
                true,
                "what it does to results, with its kernel: `exact`: the same operations in the same order; `reassoc`: in another order; `rounds`: rounds elsewhere, or less often; `lossy`: rounds to fewer bits than the element type has",
            ),
            (
                "vars",
                true,
                "types of the variables: the names that `left` uses and does not define",
            ),
            ("samples", false, "values of attributes that it is tried on"),
            (
                "left",
                true,
                "the calls to look for; a name in place of an attribute matches any value of it",
            ),
            ("right", true, "the calls to put in their place"),
            ("requires", false, "conditions for it to hold"),
            ("when", false, "conditions for it to pay"),
        ],
    },
];

/// The structures of encodings.
pub const ENCODINGS: [Structure; 5] = [
    Structure {
        name: "Encoding",
        doc: "How weights are stored: a file in `kernels/encodings/`. A value is `(code - zero) * scale - minimum`; \
              expressions range over its row `n` and column `k`, the weight's rows `N` and columns `K`, and \
              what is stored: `d` for a single element, `q[k % 32]`, `weight[n][k]`. Whole numbers stay whole \
              until they meet a float, `floor(a / b)` of two is whole, bits are taken out by `>>` and `&`. \
              Floats are f32, every operation rounds, and there are no functions but floor, ceil, round, abs, \
              min and max: so every target decodes to the same bits. An index outside is the nearest inside.",
        fields: &[
            ("name", true, "its name in types: `const q8_0[N, K]`"),
            ("doc", true, "what it is, and where it comes from"),
            (
                "each",
                false,
                "one encoding for each value of these, `{ \"g\": [32, 64] }`: in the name as `{g}`, in expressions as `g`; texts are element types",
            ),
            ("stored", true, "`Blocks(..)` or `Tensors(..)`"),
            (
                "tables",
                false,
                "constant lists for the expressions to look into, or names of those in `kernels/tables/`; one of whole numbers is whole",
            ),
            ("let", false, "names for expressions, which may use those before them"),
            (
                "group",
                true,
                "the values that share scale and minimum: `(n: 1, k: 32)`; an extent left out is that of the weight",
            ),
            ("code", true, "what is stored of each value"),
            (
                "zero",
                false,
                "what is subtracted from a code first, a whole number, the same throughout a group",
            ),
            ("scale", true, "what a code is multiplied by, the same throughout a group"),
            ("minimum", false, "what is then subtracted, the same throughout a group"),
            (
                "when",
                false,
                "which checkpoints may have it: a condition on the keys of config.json's `quantization_config`. A weight is stored so where its tensors are there in their types and shapes; where several encodings fit, in that of the most tensors",
            ),
            (
                "activations",
                false,
                "whether the checkpoint's scheme has activations in codes of the same kind, `e4m3`, which products may then round them to: a condition on the same keys",
            ),
            ("gguf", false, "number of the type in GGUF files"),
        ],
    },
    Structure {
        name: "Blocks",
        doc: "Blocks of one tensor, along K; in safetensors a tensor of bytes, `[N, bytes of a row]`.",
        fields: &[
            ("values", true, "values of a block"),
            (
                "fields",
                true,
                "names and types in order, without gaps: `{ \"d\": \"f16\", \"q\": \"u8 [16]\" }`",
            ),
        ],
    },
    Structure {
        name: "Tensors",
        doc: "Tensors beside one another.",
        fields: &[
            ("of", true, "last part of the name of the weight that they are; `*` for any"),
            (
                "tensors",
                true,
                "last parts of their names, and types: `{ \"weight\": \"f8e4m3 [N, K]\" }`. In `*_scales` the `*` is the weight's own; expressions call it `scales`. A tensor of f16 or bf16 is widened where f32 is said, and one of u8 may be any bytes",
            ),
            (
                "broadcast",
                false,
                "tensors of which a checkpoint may hold a single element, which stands for all",
            ),
            (
                "unused",
                false,
                "patterns of the names of tensors that may be there besides, and that no value depends on: `[\"*.input_scale\"]`",
            ),
        ],
    },
    Structure {
        name: "Table",
        doc: "A list that encodings name: a file in `kernels/tables/`.",
        fields: &[
            ("name", true, "its name"),
            ("doc", true, "where it comes from"),
            ("values", true, "the numbers"),
        ],
    },
    Structure {
        name: "code",
        doc: "What is stored of a value.",
        fields: &[
            ("kind", true, "`unsigned`, `signed`, `e4m3`, `e5m2`, `e2m1` or `table`"),
            ("bits", true, "how many it needs"),
            ("value", true, "the number"),
        ],
    },
];

/// The structures of cost tables.
pub const COSTS: [Structure; 2] = [
    Structure {
        name: "Costs",
        doc: "What calls cost on a target: `kernels/costs/TARGET.ron`. A call costs its launch, and the longer of moving its bytes and doing its operations.",
        fields: &[
            ("doc", true, "what the numbers are of"),
            ("kind", true, "`\"cpu\"` or `\"cuda\"`"),
            ("sm", false, "compute capability, as 90"),
            ("launch_us", true, "microseconds of a call that does nothing"),
            ("read_gb_s", true, "bytes read a second, in 10⁹"),
            ("write_gb_s", true, "bytes written a second, in 10⁹"),
            (
                "gflop_s",
                true,
                "operations a second, in 10⁹, by type: `(f32, half, eight, quantised)`",
            ),
            (
                "kernels",
                true,
                "fused ops that have kernels: `Templates`, or `Only([..])`; one without costs what its body costs",
            ),
            ("ops", false, "ops that differ, by name"),
        ],
    },
    Structure {
        name: "entry of `ops`",
        doc: "How an op differs.",
        fields: &[
            ("launch_us", false, "microseconds of an empty call"),
            (
                "factor",
                false,
                "factor on the time that bytes and operations take; an expression may use what `when` may",
            ),
            (
                "when",
                false,
                "conditions on calls that there is a kernel for, over operands, attributes, `tokens` and `decode`",
            ),
        ],
    },
];

#[cfg(test)]
mod tests {
    use infernum_frontend_hf::spec::Source;

    use super::*;
    use crate::data::Kernels;
    use crate::fuse::CostTable;

    #[test]
    fn the_lists_are_what_is_read() {
        let source = |text: &str| Source::new("t.ron", text);
        let mut kernels = Kernels::default();
        let messages = [
            kernels.define_all(vec![source("Fused(zzz: 1)")]).expect_err("unknown").to_string(),
            kernels.add_rules(&source("[Rule(zzz: 1)]")).expect_err("unknown").to_string(),
            CostTable::parse(&source("Costs(zzz: 1)")).expect_err("unknown").to_string(),
            CostTable::parse(&source("Costs(ops: { \"a\": (zzz: 1) })"))
                .expect_err("unknown")
                .to_string(),
        ];
        let encoding = |text: &str| {
            let mut kernels = Kernels::default();
            kernels.add_encodings(&[source(text)]).expect_err("unknown").to_string()
        };
        let encodings = [
            encoding("Encoding(zzz: 1)"),
            encoding("Encoding(stored: Blocks(zzz: 1))"),
            encoding("Encoding(stored: Tensors(zzz: 1))"),
            kernels.add_tables(&[source("Table(zzz: 1)")]).expect_err("unknown").to_string(),
            encoding("Encoding(code: (zzz: 1))"),
        ];
        let messages = messages.into_iter().chain(encodings);
        for (structure, message) in KERNELS.iter().chain(&COSTS).chain(&ENCODINGS).zip(messages) {
            let names: Vec<&str> = structure.fields.iter().map(|f| f.0).collect();
            let expected = format!("expected {}\n", names.join(", "));
            assert!(message.contains(&expected), "{}: {message}", structure.name);
        }
    }
}
