//! A model of random blocks, written as a GGUF file and, decoded, as a folder of Hugging Face's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use infernum_ir::{Encoding, random};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const HIDDEN: u64 = 256;
const VOCAB: u64 = 59;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const HEAD: u64 = 64;
const EXPERTS: u64 = 3;

/// A tensor of the GGUF file: outermost dimension first.
pub(super) struct Tensor {
    name: String,
    pub(super) shape: Vec<u64>,
    pub(super) kind: u32,
    pub(super) bytes: Vec<u8>,
}

/// Both forms of a model.
pub(super) struct Written {
    folder: PathBuf,
    layers: u64,
    blocks: Vec<Tensor>,
    values: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Written {
    /// A layer for each encoding.
    pub(super) fn mixture(encodings: &[Encoding]) -> Written {
        // Tests of one process run beside each other.
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("infernum-gguf-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let layers = encodings.len() as u64;
        let (blocks, values) = (Vec::new(), BTreeMap::new());
        let mut all = Written { folder, layers, blocks, values };
        all.matrix("token_embd.weight", "model.embed_tokens.weight", VOCAB, &encodings[0], None);
        all.matrix("output.weight", "lm_head.weight", VOCAB, &encodings[0], None);
        all.plain("output_norm.weight", "model.norm.weight", &[HIDDEN]);
        for (encoding, layer) in encodings.iter().zip(0..) {
            let to = |part: &str| format!("blk.{layer}.{part}.weight");
            let from = |part: &str| format!("model.layers.{layer}.{part}.weight");
            all.plain(&to("attn_norm"), &from("input_layernorm"), &[HIDDEN]);
            all.plain(&to("ffn_norm"), &from("post_attention_layernorm"), &[HIDDEN]);
            for (gguf, own, rows, heads) in [
                ("attn_q", "self_attn.q_proj", HEADS * HEAD, Some(HEADS)),
                ("attn_k", "self_attn.k_proj", KV_HEADS * HEAD, Some(KV_HEADS)),
                ("attn_v", "self_attn.v_proj", KV_HEADS * HEAD, None),
                ("attn_output", "self_attn.o_proj", HIDDEN, None),
            ] {
                all.matrix(&to(gguf), &from(own), rows, encoding, heads);
            }
            let router = from("block_sparse_moe.gate");
            all.plain(&to("ffn_gate_inp"), &router, &[EXPERTS, HIDDEN]);
            for (gguf, own) in [("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2")] {
                all.experts(&to(&format!("{gguf}_exps")), layer, own, encoding);
            }
        }
        all
    }

    fn plain(&mut self, to: &str, from: &str, shape: &[u64]) {
        let values = random::uniform(from, 1, shape.iter().product::<u64>() as usize);
        let bytes = floats(&values.iter().map(|v| *v as f32).collect::<Vec<_>>());
        let tensor = Tensor { name: to.into(), shape: shape.into(), kind: 0, bytes: bytes.clone() };
        self.blocks.push(tensor);
        let shape = shape.iter().map(|d| *d as usize).collect();
        self.values.insert(from.into(), (shape, bytes));
    }

    /// The bytes of a random matrix and its values.
    fn random(name: &str, rows: u64, encoding: &Encoding) -> (Vec<u8>, Vec<f32>) {
        let all =
            encoding.random((rows, HIDDEN), Some(Encoding::TAME), &mut random::named(name, 1));
        let (_, bytes) = all.expect("sizes that it can have").remove(0);
        let decoder = encoding.decoder(rows, HIDDEN, vec![&bytes]).expect("its own blocks");
        let mut values = vec![0.0; (rows * HIDDEN) as usize];
        values.chunks_mut(HIDDEN as usize).zip(0..).for_each(|(row, n)| decoder.row(n, 0, row));
        (bytes, values)
    }

    /// A matrix; of one whose heads are permuted, the values are put back.
    fn matrix(&mut self, to: &str, from: &str, rows: u64, encoding: &Encoding, heads: Option<u64>) {
        let (bytes, stored) = Written::random(from, rows, encoding);
        let kind = encoding.def().gguf.expect("a number");
        self.blocks.push(Tensor { name: to.into(), shape: vec![rows, HIDDEN], kind, bytes });
        let mut values = stored.clone();
        if heads.is_some() {
            let (half, width) = (HEAD / 2, HIDDEN as usize);
            for row in 0..rows {
                // Row `i` of the half `part` of a head is stored as its row `2 * i + part`.
                let (head, part, i) = (row / HEAD, row % HEAD / half, row % half);
                let at = (head * HEAD + 2 * i + part) as usize * width;
                values[row as usize * width..][..width].copy_from_slice(&stored[at..][..width]);
            }
        }
        self.values.insert(from.into(), (vec![rows as usize, HIDDEN as usize], floats(&values)));
    }

    fn experts(&mut self, to: &str, layer: u64, own: &str, encoding: &Encoding) {
        let mut all = Vec::new();
        for expert in 0..EXPERTS {
            let name =
                format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{own}.weight");
            let (bytes, values) = Written::random(&name, HIDDEN, encoding);
            all.extend(bytes);
            self.values.insert(name, (vec![HIDDEN as usize; 2], floats(&values)));
        }
        let (kind, shape) = (encoding.def().gguf.expect("a number"), vec![EXPERTS, HIDDEN, HIDDEN]);
        self.blocks.push(Tensor { name: to.into(), shape, kind, bytes: all });
    }

    /// The tensor of the GGUF file that has this name.
    pub(super) fn tensor(&mut self, name: &str) -> &mut Tensor {
        let tensor = self.blocks.iter_mut().find(|t| t.name == name);
        tensor.unwrap_or_else(|| panic!("no {name}"))
    }

    /// Writes the GGUF file.
    pub(super) fn gguf(&self) -> PathBuf {
        let text = |t: &str| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
        let whole = |key: &str, n: u64| {
            [&text(&format!("llama.{key}"))[..], &4u32.to_le_bytes(), &(n as u32).to_le_bytes()]
                .concat()
        };
        let eps =
            [&text("llama.attention.layer_norm_rms_epsilon")[..], &6u32.to_le_bytes()].concat();
        let keys = [
            [&text("general.architecture")[..], &8u32.to_le_bytes(), &text("llama")].concat(),
            [&eps[..], &1e-5f32.to_le_bytes()].concat(),
            whole("block_count", self.layers),
            whole("context_length", 64),
            whole("embedding_length", HIDDEN),
            whole("feed_forward_length", HIDDEN),
            whole("attention.head_count", HEADS),
            whole("attention.head_count_kv", KV_HEADS),
            whole("expert_count", EXPERTS),
            whole("expert_used_count", 2),
        ];
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.blocks.len() as u64).to_le_bytes());
        file.extend((keys.len() as u64).to_le_bytes());
        keys.iter().for_each(|key| file.extend(key));
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.blocks {
            file.extend(text(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|d| file.extend(d.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        let path = self.folder.join("model.gguf");
        std::fs::write(&path, file).expect("a file");
        path
    }

    /// Writes the folder.
    pub(super) fn safetensors(&self) -> PathBuf {
        let config = format!(
            "{{\"architectures\": [\"MixtralForCausalLM\"], \"dtype\": \"float32\", \"hidden_size\": {HIDDEN}, \
             \"intermediate_size\": {HIDDEN}, \"num_attention_heads\": {HEADS}, \"num_key_value_heads\": {KV_HEADS}, \
             \"num_hidden_layers\": {}, \"vocab_size\": {VOCAB}, \"max_position_embeddings\": 64, \"rope_theta\": 10000, \
             \"num_local_experts\": {EXPERTS}, \"num_experts_per_tok\": 2}}",
            self.layers
        );
        std::fs::write(self.folder.join("config.json"), config).expect("a file");
        let views = self.values.iter().map(|(name, (shape, bytes))| {
            (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor"))
        });
        let file = safetensors::serialize(views, None).expect("a file");
        std::fs::write(self.folder.join("model.safetensors"), file).expect("a file");
        self.folder.clone()
    }
}
