#!/usr/bin/env bash
# Drives the demo model's server with W1, W2 and W3 and every way to batch, to keep the KV cache and to
# schedule; figures and plots go to OUT (default bench/results/serve). MODEL, ARGS (more flags of
# `infernum serve`), LOAD (more flags of `bench serve`) and REPEATS change what is run.
set -euo pipefail
cd "$(dirname "$0")/.."
infernum=${INFERNUM:-target/release/infernum}
out=${OUT:-bench/results/serve}
repeats=${REPEATS:-3}
read -ra load <<<"${LOAD:-}"
read -ra serve <<<"${ARGS:-}"
[ -z "${MODEL:-}" ] || serve+=(--model "$MODEL")
mkdir -p "$out"

# report NAME TITLE FLAGS…: one report; its requests are kept beside it.
report() {
    local name=$1 title=$2
    shift 2
    "$infernum" bench serve --matrix --title "$title" --repeats "$repeats" "$@" "${load[@]}" \
        --json "$out/$name.json" --html "$out/$name.html" -- "${serve[@]}" | tee "$out/$name.txt"
}

report w1 "W1: one request at a time" --workload w1 --requests 4 --only "no KV,one at,continuous paged,prefix,not ahead"
report w2 "W2: 16 to 64 clients, mixed lengths" --workload w2 --only "one at,static,continuous,prefix,prefill,round robin,priority,ahead" --priorities 3
report w3 "W3: 16 to 64 clients that share a system prompt" --workload w3 --only "static paged,continuous paged,prefix"
