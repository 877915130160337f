"""How far fast paths depart from what a GGUF file says, beside llama.cpp on the same file: mean KL over a text's positions.

    python3 bench/kl_vs_llamacpp.py --infernum target/release/infernum --llamacpp PATH --out bench/results/kl-llamacpp.json \\
        --ways cpu,cpu32,cuda

The demo model is stored in each format by `infernum quantise`. What the file says is `--passes exact --dtype f32`, which rounds no
activation and is held to float64 by the tests. PATH is bench/llamacpp_logits.cpp, built.
"""

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "models/demo/train"))

import corpus  # noqa: E402

FORMATS = "q8_0,q6_k,q5_k,q4_k,q4_0,q3_k,q2_k,iq4_nl"
WAYS = {
    "cpu": ["--device", "cpu"],
    "cpu32": ["--device", "cpu", "--dtype", "f32"],
    "cuda": ["--device", "cuda"],
}


def run(*words, text=None):
    done = subprocess.run(list(map(str, words)), input=text, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def stored(path):
    """The tensor `logits` of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])["logits"]
    begin, end = (8 + length + offset for offset in header["data_offsets"])
    return np.frombuffer(data[begin:end], np.float32).reshape(header["shape"])


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--infernum", required=True)
    parser.add_argument("--llamacpp", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=FORMATS, help="formats, separated by commas")
    parser.add_argument("--ways", default="cpu,cpu32", help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    demo = ROOT / "models/demo"
    stories = [text for text in corpus.documents("perplexity", 80) if corpus.USER not in text]
    said = run(args.infernum, "tokenize", "--model", demo, text="".join(stories[:8]))
    ids = ",".join(re.findall(r"\d+", said)[: args.tokens])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model.gguf", Path(folder) / "logits"

        def logits(*how):
            run(args.infernum, "logits", "--model", model, "--tokens", ids, "--out", out, *how)
            return log_softmax(stored(out))

        for name in args.only.split(","):
            run(args.infernum, "quantise", "--model", demo, "--to", name, "--out", model)
            exact = logits("--device", "cpu", "--passes", "exact", "--dtype", "f32")
            ways = {way: logits(*WAYS[way]) for way in args.ways.split(",")}
            run(args.llamacpp, model, ids, out)
            ways["llama.cpp"] = log_softmax(np.fromfile(out, np.float32).reshape(exact.shape))
            results[name] = {way: float((np.exp(exact) * (exact - x)).sum(-1).mean()) for way, x in ways.items()}
            print(name, *(f"{way} {kl:.2e}" for way, kl in results[name].items()), flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
