#!/usr/bin/env python3
"""Times a cold process on a warm file: a GGUF of Llama 3.1 8B's shape with random Q4_K weights, from start to the first token.

    python3 bench/warm_load.py --infernum target/release/infernum --device cuda [--other OLDER_BINARY] [--layers 32]

Every binary runs --runs times in turn after one run that fills its cache of compiled kernels. Prints JSON: seconds of each run.
"""
import argparse
import json
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])
F32, Q4_K, ALIGNMENT = 0, 12, 32
HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(value):
    """A value with its type in front, as GGUF v3 stores it."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind, items = (8, b"".join(map(text, value))) if isinstance(value[0], str) else (5, np.array(value, "<i4").tobytes())
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def byte_tokens():
    """The 256 characters that stand for bytes in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


def tensors(layers):
    """Names, rows and columns."""
    yield "token_embd.weight", VOCABULARY, HIDDEN
    heads = HIDDEN // HEADS * KV_HEADS
    for n in range(layers):
        for name, rows, columns in [
            ("attn_norm", 1, HIDDEN), ("attn_q", HIDDEN, HIDDEN), ("attn_k", heads, HIDDEN), ("attn_v", heads, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_norm", 1, HIDDEN), ("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ]:
            yield f"blk.{n}.{name}.weight", rows, columns
    yield "output_norm.weight", 1, HIDDEN
    yield "output.weight", VOCABULARY, HIDDEN


def write(path, layers):
    tokens = byte_tokens() + [f"<|{n}|>" for n in range(VOCABULARY - 256)]
    values = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0, "llama.rope.dimension_count": HIDDEN // HEADS, "llama.context_length": 8192,
        "llama.vocab_size": VOCABULARY, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (VOCABULARY - 256), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257,
    }
    tokens.append("ab")
    tokens.pop(-2)
    table, offset, listed = b"", 0, list(tensors(layers))
    for name, rows, columns in listed:
        kind, shape = (F32, [columns]) if rows == 1 else (Q4_K, [columns, rows])
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        size = columns * 4 if rows == 1 else rows * columns // 256 * BLOCK.itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    rng = np.random.default_rng(7)
    blocks = np.empty(1 << 19, BLOCK)
    blocks["d"], blocks["dmin"] = 1e-3, 1e-3
    blocks["scales"] = rng.integers(0, 256, blocks["scales"].shape, "u1")
    blocks["codes"] = rng.integers(0, 256, blocks["codes"].shape, "u1")
    blocks = blocks.tobytes()
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(values)))
        for name, value in values.items():
            file.write(text(name) + metadata(value))
        file.write(table)
        file.write(bytes(-file.tell() % ALIGNMENT))
        for _, rows, columns in listed:
            left = columns * 4 if rows == 1 else rows * columns // 256 * BLOCK.itemsize
            padding = bytes(-left % ALIGNMENT)
            if rows == 1:
                file.write(np.ones(columns, "<f4").tobytes())
                left = 0
            while left:
                part = blocks[:left]
                file.write(part)
                left -= len(part)
            file.write(padding)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infernum", required=True)
    parser.add_argument("--other", help="a second binary to compare with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write(model, arguments.layers)
        found = {"bytes": model.stat().st_size, "layers": arguments.layers}
        binaries = [b for b in (arguments.infernum, arguments.other) if b]
        for run in range(arguments.runs + 1):
            for binary in binaries:
                model.read_bytes()  # all of it is in the page cache
                command = [binary, "generate", "--model", model, "Hello", "--max-tokens", "1", "--temperature", "0", "--device", arguments.device]
                start = time.monotonic()
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                if run:
                    found.setdefault(binary, []).append(round(time.monotonic() - start, 3))
        print(json.dumps(found))


if __name__ == "__main__":
    main()
