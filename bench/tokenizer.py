"""A tokenizer of any size for servers that are measured with random weights: byte-level BPE over made-up
words, so that encoding and decoding cost what they cost with a real one.

    python3 bench/tokenizer.py FOLDER 128256
"""

import itertools
import json
import pathlib
import sys


def byte_alphabet():
    """The 256 characters that byte-level BPE spells bytes with (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = (b for b in range(256) if b not in plain)
    return [chr(b) for b in plain] + [chr(256 + i) for i, _ in enumerate(shifted)]


def main(folder, size):
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    vocab = {c: i for i, c in enumerate(byte_alphabet())}
    merges = []
    longest = ["\u0120", *letters]  # a space, and letters
    specials = ["<|begin|>", "<|end|>"]
    while len(vocab) < size - len(specials):
        longer = []
        for word, letter in itertools.product(longest, letters):
            if len(vocab) == size - len(specials):
                break
            merges.append([word, letter])
            vocab[word + letter] = len(vocab)
            longer.append(word + letter)
        longest = longer
    added = [
        {"id": len(vocab) + i, "content": text, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate(specials)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": False, "vocab": vocab, "merges": merges},
    }
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": specials[0], "eos_token": specials[1],
              "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
