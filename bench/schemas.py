"""What rows that must fit a schema cost those that need not: sequences together, none and then half of them with a schema.

    python3 bench/schemas.py --infernum target/release/infernum --config bench/shapes/llama-3.1-8b.json --json FILE

Weights are random, and so is what is generated: an endless array of objects. All requests begin at once and take the same
number of tokens, so that a class' tokens a second are those of its requests while all run.
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
import urllib.request

import tokenizer

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b", "c"]}},
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 10000}


def request(url, tokens, seed, constrained):
    """Seconds of one request, and how many tokens it took."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"request {seed} " * 40}], "max_tokens": tokens,
            "temperature": 1.0, "seed": seed, "ignore_eos": True}
    if constrained:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}
    call = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.monotonic()
    with urllib.request.urlopen(call, timeout=300) as reply:
        answer = json.load(reply)
    return time.monotonic() - start, answer["usage"]["completion_tokens"]


def together(url, count, tokens, constrained, pool):
    """A round: `constrained` of the requests have the schema."""
    start = time.monotonic()
    made = [pool.submit(request, url, tokens, i, i % count < constrained) for i in range(count)]
    done = [future.result() for future in made]
    wall = time.monotonic() - start
    rate = [took / seconds for seconds, took in done]
    return {"constrained": constrained, "seconds": wall, "tokens": sum(took for _, took in done),
            "tokens_per_second": sum(took for _, took in done) / wall,
            "of_each_constrained": statistics.mean(rate[:constrained]) if constrained else None,
            "of_each_free": statistics.mean(rate[constrained:]) if constrained < count else None}


def main():
    parser = argparse.ArgumentParser()
    for name in ("infernum", "config", "json"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="more flags of `infernum serve`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder)
        (model / "config.json").write_text(pathlib.Path(args.config).read_text())
        tokenizer.main(folder, args.vocab)
        port = model / "port"
        server = subprocess.Popen([args.infernum, "serve", "--model", f"m={folder}", "--random-weights", "--max-length", "2048",
                                   "--max-sequences", str(args.sequences), "--port", "0", "--port-file", str(port), *args.flags])
        try:
            while not port.exists() or not port.read_text():
                if server.poll() is not None:
                    raise SystemExit("the server ended")
                time.sleep(0.2)
            url = f"http://127.0.0.1:{port.read_text().strip()}"
            while subprocess.run([args.infernum, "health", "--port", port.read_text().strip()], capture_output=True).returncode:
                time.sleep(0.2)
            rounds = []
            with concurrent.futures.ThreadPoolExecutor(args.sequences) as pool:
                together(url, args.sequences, args.tokens, args.sequences // 2, pool)  # compiles the grammar, and records graphs
                for _ in range(args.rounds):
                    rounds += [together(url, args.sequences, args.tokens, n, pool) for n in (0, args.sequences // 2)]
            metrics = urllib.request.urlopen(url + "/metrics").read().decode()
        finally:
            server.terminate()
            server.wait()
    median = {key: [statistics.median(r[key] for r in rounds if r["constrained"] == n and r[key] is not None)
                    for n in (0, args.sequences // 2) if any(r["constrained"] == n and r[key] is not None for r in rounds)]
              for key in ("seconds", "tokens_per_second", "of_each_constrained", "of_each_free")}
    free, half = median["seconds"]
    print(f"{args.sequences} sequences of {args.tokens} tokens: {free:.2f} s without schemas, {half:.2f} s with half of them: {half / free:.3f} times")
    constrained, others = median["of_each_constrained"][0], median["of_each_free"][1]
    print(f"tokens a second of each: {constrained:.1f} with a schema, {others:.1f} without beside them: {constrained / others:.3f} times")
    kept = [line for line in metrics.splitlines() if "mask" in line and not line.startswith("#")]
    pathlib.Path(args.json).write_text(json.dumps({"rounds": rounds, "median": median, "metrics": kept}, indent=1))


if __name__ == "__main__":
    main()
