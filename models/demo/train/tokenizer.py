"""Trains Ember's byte-level BPE tokenizer on the grammar's text and writes the tokenizer files.

    python tokenizer.py OUT_DIR [--vocab 1536] [--documents 40000]
"""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import corpus

# Words with their leading space, single digits, runs of other marks: the split that Qwen's tokenizers use.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(vocab, count):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(corpus.SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(without_special, corpus.documents("tokenizer", count)), trainer)
    bos = tokenizer.token_to_id(corpus.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", pair=f"{corpus.BOS} $A $B", special_tokens=[(corpus.BOS, bos)]
    )
    return tokenizer


def without_special(text):
    for token in corpus.SPECIAL:
        text = text.replace(token, "\n")
    return text


if __name__ == "__main__":
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("out", type=Path)
    args.add_argument("--vocab", type=int, default=1536)
    args.add_argument("--documents", type=int, default=40000)
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(args.vocab, args.documents)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BOS,
        "eos_token": corpus.EOS,
        "pad_token": corpus.EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": corpus.MAX_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    sample = corpus.documents("measure", 2000)
    lengths = sorted(len(e.ids) for e in tokenizer.encode_batch(sample, add_special_tokens=False))
    print(f"vocab {tokenizer.get_vocab_size()}, {sum(map(len, sample)) / sum(lengths):.2f} bytes a token")
    print(f"tokens a document: mean {sum(lengths) / 2000:.0f}, median {lengths[1000]}, 99% {lengths[1980]}, most {lengths[-1]}")
