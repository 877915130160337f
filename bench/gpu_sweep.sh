#!/bin/bash
# Ways to batch and to schedule against each other on a GPU: W2 and W3, Llama 3.1 8B's shape, bf16, random
# weights. Reports go to $OUT (bench/results/h100 when unset).
#
#   INFERNUM=target/release/infernum bench/gpu_sweep.sh
set -uo pipefail
cd "$(dirname "$0")/.."
infernum=${INFERNUM:-target/release/infernum} out=${OUT:-bench/results/h100} shape=bench/shapes/llama-3.1-8b.json
mkdir -p "$out"
model=$(mktemp -d)
trap 'rm -r "$model"' EXIT
cp $shape "$model/config.json"
python3 bench/tokenizer.py "$model" 128256

# report NAME TITLE FLAGS…
report() {
    local name=$1 title=$2
    shift 2
    "$infernum" bench serve --matrix --title "$title" --repeats "${REPEATS:-2}" --vocab 128000 "$@" \
        --json "$out/$name.json" --html "$out/$name.html" -- \
        --model "8b=$model" --random-weights --max-length 2048 | tee "$out/$name.txt"
}

report sweep-w2 "W2 on an H100: 16 to 64 clients, mixed lengths" --workload w2 \
    --only "static,continuous,prefix,prefill,round robin,not ahead"
report sweep-w3 "W3 on an H100: 16 to 64 clients that share a system prompt" --workload w3 \
    --only "static paged,continuous paged,prefix"
