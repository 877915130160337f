#!/bin/bash
# The server on a GPU: 512 requests of 1000 tokens in and 256 out through HTTP, Llama 3.1 8B's shape, bf16,
# random weights, and the same without a server. Figures go to $OUT (bench/results/h100 when unset).
#
#   INFERNUM=target/release/infernum bench/gpu_serve.sh [FLAGS OF serve]
set -uo pipefail
cd "$(dirname "$0")/.."
infernum=${INFERNUM:-target/release/infernum} out=${OUT:-bench/results/h100} shape=bench/shapes/llama-3.1-8b.json
mkdir -p "$out"
model=$(mktemp -d)
cp $shape "$model/config.json"
python3 bench/tokenizer.py "$model" 128256

"$infernum" serve --model "8b=$model" --random-weights --max-length 1280 --port 0 --port-file "$model/port" \
    --policy prefill_first --chunk 8192 --queue 4096 "$@" >"$out/serve-8b.log" 2>&1 &
server=$!
trap 'kill $server; wait $server; rm -r "$model"' EXIT
for _ in $(seq 600); do
    [ -s "$model/port" ] && "$infernum" health --port "$(cat "$model/port")" >/dev/null 2>&1 && break
    sleep 0.2
done
url=http://127.0.0.1:$(cat "$model/port")
for run in 1 2; do
    "$infernum" bench serve --url "$url" --workload fixed --requests 512 --vocab 128000 --seed $run \
        --json "$out/serve-8b-$run.json"
done
# What the host takes of a step, and the steps themselves.
python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())' "$url/metrics" |
    grep -E "^infernum:step|^infernum:num_|^infernum:generation" | tee "$out/serve-8b-metrics.txt" | grep -E "sum|count|host.*bucket"
