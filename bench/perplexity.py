"""Perplexity of the demo model in every format that `infernum quantise` writes, without and with an importance text.

    python3 bench/perplexity.py --infernum target/release/infernum --out bench/results/perplexity.json

The text is made by the grammar that the demo model was trained on, from seeds that training does not use: one for
what is read, another for the importance of columns. Formats that differ in the size of their groups or in the type
of their scales alone are tried once, unless `--only` names them. Prints a table in Markdown.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "models/demo/train"))

import corpus  # noqa: E402

# Of a format's variants: groups of 128, scales of bf16, and GPTQ's usual version.
VARIANT = re.compile(r"_(v1|g-1|g32|g64|f16|f32)(_|$)")


def run(args, *words):
    done = subprocess.run([args.infernum, *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def write_stories(path, seed, count):
    """Stories alone: of conversations the model learnt the answers, not what is asked."""
    stories = (text for text in corpus.documents(seed, 8 * count) if corpus.USER not in text)
    path.write_text("".join(itertools.islice(stories, count)))


def perplexity(args, text, *model):
    code, out, error = run(args, "perplexity", "--text", text, "--json", "--device", "cpu", *model)
    if code:
        sys.exit(error)
    return json.loads(out)


def of_format(args, folder, text, encoding, importance):
    name = encoding["name"]
    out = folder / (f"{name}.gguf" if encoding["gguf"] is not None else name)
    words = ["quantise", "--model", ROOT / "models/demo", "--to", name, "--out", out]
    code, said, error = run(args, *words, *(["--importance", importance] if importance else []))
    if code:
        return {"refused": error.strip().splitlines()[-1]}
    lost = re.search(r"relative squared error (\S+?);?( |$)", said)
    return dict(perplexity(args, text, "--model", out), relative_squared_error=lost and lost.group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--infernum", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="names of encodings, separated by commas")
    parser.add_argument("--documents", metavar="STORIES", type=int, default=30)
    args = parser.parse_args()
    encodings = json.loads(run(args, "encodings", "--json")[1])
    only = args.only.split(",") if args.only else None
    wanted = [e for e in encodings if (e["name"] in only if only else not VARIANT.search(e["name"]))]
    # What is not tried again stays.
    kept = json.loads(args.out.read_text())["formats"] if args.out and args.out.exists() else {}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text, importance = folder / "text", folder / "importance"
        write_stories(text, "perplexity", args.documents)
        write_stories(importance, "importance", args.documents)
        own = perplexity(args, text)
        print("| format | bits | perplexity | with an importance text |\n|---|---|---|---|", flush=True)
        print(f"| bf16 | 16 | {own['perplexity']:.4f} ± {own['standard_error']:.4f} | |", flush=True)
        for encoding in sorted(wanted, key=lambda e: -e["bits"]):
            name = encoding["name"]
            pair = [of_format(args, folder, text, encoding, i) for i in (None, importance)]
            results[name] = {"bits": encoding["bits"], "plain": pair[0], "importance": pair[1]}
            if "refused" in pair[0]:
                print(f"{name}: {pair[0]['refused']}", file=sys.stderr, flush=True)
                continue
            cells = [f"{p['perplexity']:.4f}" if "perplexity" in p else "refused" for p in pair]
            print(f"| `{name}` | {encoding['bits']:.2f} | {' | '.join(cells)} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"own": own, "formats": kept | results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
