#!/bin/bash
# Packs the GPU tests into one folder that runs anywhere: tests/gpu/pack.sh [FOLDER], which is
# device-gpusuite when left out. There, `FOLDER/run.sh` runs all of it.
set -euo pipefail
cd "$(dirname "$0")/../.."
to=${1:-device-gpusuite}
cargo build --release -p infernum-cli
suite=$(cargo test --release -p infernum-tests --no-run --message-format=json |
    python3 -c 'import json, sys
for line in sys.stdin:
    found = json.loads(line)
    if found.get("target", {}).get("name") == "suite" and found.get("executable"):
        print(found["executable"])')
mkdir -p "$to/tests" "$to/examples"
strip -o "$to/infernum" "${CARGO_TARGET_DIR:-target}/release/infernum"
strip -o "$to/suite" "$suite"
rm -rf "$to/tests/fixtures"
cp -r tests/fixtures "$to/tests/"
cp -r examples/new-architecture "$to/examples/"
cp tests/gpu/run.sh "$to/run.sh"
du -sh "$to"
