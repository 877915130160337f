#!/usr/bin/env bash
# What it costs that engine and front end are processes of their own: the demo model under the same loads, in one process and apart, in
# turns. REPEATS says how often each is measured; figures go to OUT (default bench/results/serve/apart.json).
set -euo pipefail
cd "$(dirname "$0")/.."
infernum=${INFERNUM:-target/release/infernum}
folder=$(mktemp -d)
"$infernum" engine --device cpu --listen "ipc://$folder/engine" 2>"$folder/log" &
engine=$!
trap 'kill $engine; wait $engine || true; rm -r "$folder"' EXIT
cat >"$folder/sweep.toml" <<TOML
[[configuration]]
name = "one process"
serve = ["--device", "cpu"]

[[configuration]]
name = "apart"
serve = ["--engine", "ipc://$folder/engine"]

[[load]]
workload = "fixed"
concurrency = [1]
requests = 6
input = "16"
output = "400"

[[load]]
workload = "fixed"
concurrency = [16]
requests = 48
input = "16"
output = "200"
TOML
"$infernum" bench serve --sweep "$folder/sweep.toml" --repeats "${REPEATS:-5}" --json "${OUT:-bench/results/serve/apart.json}"
