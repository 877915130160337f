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
                "what it does to results, with its kernel: `exact`: the same operations in the same order; `reassoc`: in another order; `rounds`: rounds elsewhere, or less often",
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
            ("factor", false, "factor on the time that bytes and operations take"),
            ("most_tokens", false, "the largest step that there is a kernel for"),
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
        for (structure, message) in KERNELS.iter().chain(&COSTS).zip(messages) {
            let names: Vec<&str> = structure.fields.iter().map(|f| f.0).collect();
            let expected = format!("expected {}\n", names.join(", "));
            assert!(message.contains(&expected), "{}: {message}", structure.name);
        }
    }
}
