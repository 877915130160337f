#!/usr/bin/env bash
# Decode and prefill of random weights on the first GPU, raw figures to OUT (default bench/results/h100).
# PEERS: a folder with peers to run right after, ceilings.py and peer_torch.py, if there are any.
set -euo pipefail
cd "$(dirname "$0")/.."
infernum=${INFERNUM:-target/release/infernum}
out=${OUT:-bench/results/h100}
mkdir -p "$out"
for shape in llama-3.2-1b llama-3.1-8b; do
    config=bench/shapes/$shape.json
    "$infernum" bench --device cuda --config "$config" --prompt 512 --batch 1,8,16,64,256 --generate 64 --json >"$out/$shape.json"
    "$infernum" bench --device cuda --config "$config" --prompt 2048 --generate 16 --runs 9 --json >"$out/$shape-2048.json"
done
if [ -n "${PEERS:-}" ]; then
    {
        python3 "$PEERS/ceilings.py"
        for shape in llama-3.2-1b llama-3.1-8b; do python3 "$PEERS/peer_torch.py" --model "$shape" --bs 1 64; done
    } | grep '^{' >"$out/peers.jsonl"
fi
