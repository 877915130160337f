#!/usr/bin/env bash
# Drives the server with the clients that people use: openai's Python package, curl, a browser, crowds,
# and a fuzzer of its OpenAPI document.
#
#   tests/clients/run.sh [--heavy] [pytest's options]
#
# INFERNUM_BIN            the binary; target/debug/infernum, built first as for `cargo test`, when left out
# INFERNUM_NEEDS_BROWSER  fail where there is no Chromium, instead of leaving its tests out
# INFERNUM_SCREENSHOTS    a folder for pictures of the chat page
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/target/clients

if [[ -z ${INFERNUM_BIN:-} ]]; then
  (cd "$root" && cargo build --quiet --locked --profile test --bin infernum)
  INFERNUM_BIN=$root/target/debug/infernum
fi
export INFERNUM_BIN
if ! cmp --silent "$here/requirements.txt" "$venv/requirements.txt"; then
  python3 -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/"
fi
cd "$here"
exec "$venv/bin/python" -B -m pytest -p no:cacheprovider "$@"
