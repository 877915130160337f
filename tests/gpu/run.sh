#!/bin/bash
# Runs the GPU tests of the folder that it lies in (tests/gpu/pack.sh) and writes what was found to
# $OUT (the working folder when unset): summary.json, check.json, and each part's output in logs.tgz.
# run.sh [PART..] runs some of: kernels parity graphs vectors kv_dtype batch engine sampling reproducible fused_numbers sanitizer, and
# fast, which is slow and is left out without arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-$PWD}
logs=$(mktemp -d)
export INFERNUM_FIXTURES=$here/tests/fixtures INFERNUM_TEST_DEVICE=cuda INSTA_UPDATE=no
export PATH=$PATH:/usr/local/cuda/bin
parts=${*:-kernels parity graphs vectors kv_dtype batch engine sampling reproducible fused_numbers sanitizer}
results=()

# NAME COMMAND..: its output goes to a log; its last lines, time and verdict are shown.
part() {
    local name=$1 start=$SECONDS status
    shift
    "$@" >"$logs/$name.log" 2>&1
    status=$?
    grep -E "^test |FAIL|failed|ERROR SUMMARY|RACECHECK SUMMARY|NMSE|kernel\(s\) of" "$logs/$name.log" |
        tail -n 24 | cut -c1-240
    echo "== $name: exit status $status, $((SECONDS - start)) s"
    results+=("{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - start))}")
}

# TOOL FIXTURE: a prompt and then single tokens, launched one by one under a tool of
# compute-sanitizer.
sanitize() {
    local tool=$1 fixture=$2 tokens=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20 chunk
    for chunk in 18 1; do
        part "$tool-${fixture//\//-}-$chunk" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$here/infernum" logits --model "$INFERNUM_FIXTURES/$fixture" --device cuda --no-graphs \
            --chunk $chunk --tokens $tokens --out "$logs/logits.safetensors"
    done
}

for wanted in $parts; do
    case $wanted in
    kernels) part kernels "$here/infernum" check-kernels --device cuda --json "$OUT/check.json" ;;
    parity) part parity "$here/suite" parity --test-threads 8 ;;
    graphs) INFERNUM_TEST_GRAPHS=1 part graphs "$here/suite" parity --test-threads 8 ;;
    vectors) part vectors "$here/suite" vectors:: --test-threads 8 ;;
    kv_dtype) part kv_dtype "$here/suite" kv_dtype:: --nocapture --test-threads 4 ;;
    batch) part batch "$here/suite" batch --nocapture --test-threads 4 ;;
    # Decode steps as recordings, as they are served.
    engine | sampling) INFERNUM_TEST_GRAPHS=1 part "$wanted" "$here/suite" "$wanted::" --test-threads 4 ;;
    reproducible) part reproducible "$here/infernum" check-reproducible --device cuda --dtype bf16 --requests 1000 ;;
    fused_numbers) part fused_numbers "$here/suite" fused_numbers:: --test-threads 4 ;;
    fast) # kernels for the sizes of real models, which the fixtures do not reach
        for op in paged_attention norm_qkv linear_qkv rms_linear; do
            part "memcheck-$op" compute-sanitizer --tool memcheck --error-exitcode 9 \
                "$here/infernum" check-kernels --device cuda --only $op
        done
        ;;
    sanitizer)
        for tool in memcheck racecheck; do
            sanitize $tool llama/gqa3
            sanitize $tool qwen3/gqa3_tied
        done
        ;;
    *) echo "run.sh: expected one of kernels parity graphs vectors kv_dtype batch engine sampling reproducible fused_numbers sanitizer fast, found $wanted" && exit 2 ;;
    esac
done
(
    IFS=,
    echo "[${results[*]}]" >"$OUT/summary.json"
)
tar czf "$OUT/logs.tgz" -C "$logs" .
case "${results[*]}" in *'"status": '[1-9]*) echo "FAILED" && exit 1 ;; *) echo "all passed" ;; esac
