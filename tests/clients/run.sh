#!/usr/bin/env bash
# Drives the server with the clients that people use: the Python packages of OpenAI, Anthropic and Ollama, curl, a
# browser, crowds, a fuzzer of its OpenAPI document, LangChain and LiteLLM.
#
#   tests/clients/run.sh [--heavy] [pytest's options]
#
# INFERNUM_BIN            the binary; target/debug/infernum, built first as for `cargo test`, when left out
# INFERNUM_NEEDS_BROWSER  fail where there is no Chromium, instead of leaving its tests out
# INFERNUM_NEEDS_TRACES   fail where the binary was built without traces, instead of leaving their tests out
# INFERNUM_SCREENSHOTS    a folder for pictures of the pages
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

if [[ -z ${INFERNUM_BIN:-} ]]; then
  (cd "$root" && cargo build --quiet --locked --profile test --bin infernum)
  INFERNUM_BIN=$root/target/debug/infernum
fi
export INFERNUM_BIN

# Runs pytest in target/NAME, where what FILE lists is installed.
tests() {
  local venv=$root/target/$1 packages=$here/$2
  shift 2
  if ! cmp --silent "$packages" "$venv/requirements.txt"; then
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$packages"
    cp "$packages" "$venv/requirements.txt"
  fi
  "$venv/bin/python" -B -m pytest -p no:cacheprovider "$@"
}

cd "$here"
tests clients requirements.txt --ignore test_frameworks.py "$@"
# Frameworks pin other versions of the clients. Whoever asks for one test means one of the others.
if [[ $# -eq 0 || $* == --heavy ]]; then
  tests frameworks frameworks.txt test_frameworks.py
fi
