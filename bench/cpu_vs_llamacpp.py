"""Alternates `infernum bench` with llama.cpp's `llama-bench` on one machine; prints ratios, writes raw JSON.

    python3 bench/cpu_vs_llamacpp.py --infernum target/release/infernum --model DIR \\
        --llama-bench PATH --gguf FILE --pairs 6 --out bench/results/cpu.json

Both run the same shape with the same prompt and answer lengths on the same number of threads. On a shared
machine the memory's speed drifts: only the ratio within a pair means something, so the median of those counts.
"""

import argparse
import json
import statistics
import subprocess


def infernum(args):
    command = [args.infernum, "bench", "--model", args.model, "--threads", str(args.threads),
               "--prompt", str(args.prompt), "--generate", str(args.generate), "--runs", "2", "--json"]
    if args.encoding:
        command += ["--random-weights", "--encoding", args.encoding, "--device", "cpu"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def llama(args):
    command = [args.llama_bench, "-m", args.gguf, "-t", str(args.threads), "-p", str(args.prompt),
               "-n", str(args.generate), "-r", "2", "-o", "json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speed = {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}
    return dict(speed, build=rows[0].get("build_number"), type=rows[0].get("model_type"), cpu=rows[0].get("cpu_info"))


def main():
    parser = argparse.ArgumentParser()
    for name in ("infernum", "model", "llama-bench", "gguf", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--encoding", help="random weights of this encoding, of the shape in --model")
    for name, default in (("pairs", 6), ("threads", 2), ("prompt", 128), ("generate", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    pairs = []
    for _ in range(args.pairs):
        ours, peer = infernum(args), llama(args)
        ours["model"] = f"tinyllama-1.1b, random, {args.encoding or 'bf16'}"
        ratios = {what: ours["cases"][0][f"{what}_tokens_per_second"] / peer[what] for what in ("prefill", "decode")}
        pairs.append({"infernum": ours, "llama.cpp": peer, "ratios": ratios})
        print({what: round(value, 3) for what, value in ratios.items()}, flush=True)
    medians = {what: statistics.median(pair["ratios"][what] for pair in pairs) for what in ("prefill", "decode")}
    print("median", {what: round(value, 3) for what, value in medians.items()})
    with open(args.out, "w") as file:
        json.dump({"median_ratios": medians, "pairs": pairs}, file, indent=1)


if __name__ == "__main__":
    main()
