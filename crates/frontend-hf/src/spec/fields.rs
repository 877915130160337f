//! What may be written in a spec, for its reference. A test holds each list against what is read.

/// One of the structures of a data file.
pub struct Structure {
    /// As it is called in files.
    pub name: &'static str,
    /// What it is.
    pub doc: &'static str,
    /// Its fields: name, whether it must be there, and what it means.
    pub fields: &'static [(&'static str, bool, &'static str)],
}

/// The structures of specs and blocks.
pub const SPEC: [Structure; 6] = [
    Structure {
        name: "Family",
        doc: "A model family: a file in `models/`, or any with `--spec`.",
        fields: &[
            ("name", true, "the family's name"),
            ("doc", true, "what it covers"),
            (
                "base",
                false,
                "a family file to start from: what is written here replaces what is there, entry by entry, each where it stands there, in `defaults`, `params`, `layer_params`, `checks` and `blocks`, as a whole in `embed`, `layers`, `head`, `pool` and `score`; `ignore` and `transposed` add to it, `names` and `also_named` go before it",
            ),
            ("architectures", true, "values of `architectures` in config.json that it serves"),
            (
                "embedders",
                false,
                "the same of checkpoints that end in vectors, by `pool`; where a checkpoint has a pooling of sentence-transformers (`modules.json`), those in `architectures` do so too",
            ),
            ("classifiers", false, "the same of checkpoints that end in scores, by `score`"),
            ("defaults", false, "values for keys that config.json leaves out: literals"),
            (
                "params",
                false,
                "parameters by name: expressions over config keys and the parameters before them; a key that config.json lacks is null",
            ),
            (
                "layer_params",
                false,
                "parameters that differ from layer to layer: as `params`, over `layer` too, the layer's number; layers for which they are equal share a graph",
            ),
            ("checks", false, "what must hold: `\"message\": \"condition\"`"),
            (
                "blocks",
                false,
                "what bodies may call beside ops: `\"name\": File(\"blocks/attention.ron\")` or `Inline(Block(..))`",
            ),
            (
                "embed",
                false,
                "from tokens to the first hidden state: a part (from the base, if it has one)",
            ),
            ("layers", false, "the layers (from the base, if it has them)"),
            (
                "head",
                false,
                "from the last hidden state to logits: a part (from the base, if it has one)",
            ),
            (
                "pool",
                false,
                "from the last hidden state to a vector for a sequence: a part in place of the head",
            ),
            ("score", false, "from the last hidden state to a sequence's scores: likewise"),
            (
                "ignore",
                false,
                "checkpoint tensors that the model does not use; `*` stands for any text",
            ),
            (
                "names",
                false,
                "what blocks call tensors, or parts of their names between dots, and what the checkpoint does, replaced in order: `[(\"self_attn.o_proj\", \"attn.dense\")]`",
            ),
            (
                "also_named",
                false,
                "the same for checkpoints that were written otherwise: a tensor that is not there is looked for under the first of these names that is",
            ),
            (
                "transposed",
                false,
                "tensors that checkpoints hold with their last two dimensions swapped, by their names there; `*` stands for any text",
            ),
        ],
    },
    Structure {
        name: "Block",
        doc: "A piece of graph with its weights and cache planes. It sees its own parameters and the family's, never its caller's.",
        fields: &[
            ("doc", true, "what it computes"),
            ("inputs", true, "its operands"),
            (
                "params",
                false,
                "its other arguments with their defaults: expressions over config keys, the family's parameters and those before; `\"x\": \"x ?? false\"` is as called, else as the family says, else false",
            ),
            ("checks", false, "what must hold: `\"message\": \"condition\"`"),
            ("weights", false, "checkpoint tensors, by name after the prefix of its call"),
            ("state", false, "planes of the KV cache, by name"),
            (
                "body",
                true,
                "calls by the names of their results: `\"y\": op(x: \"x\")`, `\"a, b\": op(..)` for several",
            ),
            ("result", true, "the name that it yields, or several: `\"q, k, v\"`"),
        ],
    },
    Structure {
        name: "part",
        doc: "One graph: `embed`, `head`, `pool`, `score`, or a kind of layer.",
        fields: &[
            (
                "prefix",
                false,
                "put before the names of its weights; `{layer}` is the layer's number, other names in braces those of parameters",
            ),
            ("weights", false, "checkpoint tensors that its body names itself"),
            ("body", true, "calls, from the names that the part before gives"),
            (
                "gives",
                true,
                "the names that it gives to the next part, each kind of layer the same ones as `embed`; of the last one, the logits, the vector or the scores",
            ),
        ],
    },
    Structure {
        name: "layers",
        doc: "How many layers there are, of which kinds, in which order.",
        fields: &[
            ("count", true, "how many"),
            (
                "kind",
                false,
                "the kind of layer number `layer`: text; may be left out where there is one kind",
            ),
            ("kinds", true, "a part for each kind"),
        ],
    },
    Structure {
        name: "weight",
        doc: "A tensor of the checkpoint: `\"q_proj.weight\": (shape: [\"heads * head_dim\", \"hidden\"])`.",
        fields: &[
            ("shape", true, "its dimensions, as the checkpoint has them; one that is null is none"),
            (
                "when",
                false,
                "there only where this holds; an operand that names one that is not there is left out",
            ),
            (
                "same_as",
                false,
                "the full name of another tensor that it is (tied weights), or null",
            ),
            (
                "stack",
                false,
                "with `n`, the tensors for `{expert}` = 0 to n - 1 in its name as one: [n, ..shape]",
            ),
        ],
    },
    Structure {
        name: "state",
        doc: "A plane of the KV cache: a row [heads, dim] a token; or a `slot`, one state of a fixed shape for a sequence, zeros before \
              its first token: `\"memory\": (slot: [\"heads\", \"dim\"], dtype: \"f32\")`.",
        fields: &[
            ("heads", false, "heads of a row"),
            ("dim", false, "elements of a head"),
            ("slot", false, "in place of these: the shape of a sequence's state"),
            ("dtype", false, "its element type; that of activations if left out"),
            (
                "of",
                false,
                "number of a layer before, whose plane of this name is read in place of one of its own; null for its own",
            ),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Source, parse_block, parse_family};

    /// The fields that reading a text expects in place of one it does not know.
    fn expected(text: &str) -> String {
        let source = Source::new("t.ron", text);
        let error = if text.starts_with("Block") {
            parse_block(&source).map(|_| ()).expect_err("an unknown field")
        } else {
            parse_family(&source).map(|_| ()).expect_err("an unknown field")
        };
        let message = error.message;
        let (_, list) = message.split_once("; expected ").unwrap_or_else(|| panic!("{message}"));
        list.to_owned()
    }

    #[test]
    fn the_lists_are_what_is_read() {
        let family = "Family(name: \"n\", doc: \"d\", architectures: [], ";
        let texts = [
            "Family(zzz: 1)".to_owned(),
            "Block(zzz: 1)".to_owned(),
            format!("{family} head: (zzz: 1))"),
            format!("{family} layers: (zzz: 1))"),
            format!("{family} head: (weights: {{ \"w\": (zzz: 1) }}))"),
            "Block(state: { \"s\": (zzz: 1) })".to_owned(),
        ];
        for (structure, text) in SPEC.iter().zip(texts) {
            let names: Vec<&str> = structure.fields.iter().map(|f| f.0).collect();
            assert_eq!(expected(&text), names.join(", "), "{}", structure.name);
        }
    }
}
