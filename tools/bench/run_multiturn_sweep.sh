#!/usr/bin/env bash
# Drive the base release's multi-turn benchmark over prompt lengths, against servers that run.
set -euo pipefail
# shellcheck source=SCRIPTDIR/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
Drive the base release's multi-turn benchmark over prompt lengths, and keep what it measures.

variables:
  LEG          off or on: what the servers were started with (BIDIR)
  MODEL        model, for its tokenizer: a folder or a repository's name
  SERVED_NAME  its name in requests (default: MODEL)
  URL          of the router (default http://localhost:8000)
  P_URL        of P, to ask for its block size (default: BLOCK_SIZE must be given)
  BLOCK_SIZE   tokens per KV block, where P cannot be asked
  TP           tensor-parallel size of P (default 1)
  LENGTHS      prompt lengths (default "2048 4096 8192 16384 24576")
  TURNS, CONVERSATIONS, OUTPUT_TOKENS   per length (default 4, 4, 64)
  REPEAT       number of the repeat, from 0 (default 0)
  OUT          results folder (default build/sweep/LEG)
  VLLM_SRC     source tree of the base release (default: its pinned source distribution)
  PYTHON       has pandas, transformers and aiohttp (default python3)
  DRY_RUN      1: only print the commands

example:
  LEG=off MODEL=Qwen/Qwen3-32B SERVED_NAME=qwen P_URL=http://10.0.0.1:8100 TP=8 run_multiturn_sweep.sh
  LEG=on  MODEL=Qwen/Qwen3-32B SERVED_NAME=qwen P_URL=http://10.0.0.1:8100 TP=8 run_multiturn_sweep.sh

then copy the logs of router and P to OUT/logs/router.log and OUT/logs/prefill.log, and
  python -m tools.bench report build/sweep/off build/sweep/on --to build/sweep/report
TEXT
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
fi
[[ $# -eq 0 ]] || fail "unknown argument" "none: everything is a variable" "$*"
leg=${LEG:-}
[[ $leg == off || $leg == on ]] || fail "LEG is not set" "off or on" "'$leg'"
[[ -n ${MODEL:-} ]] || fail "MODEL is not set" "a folder or a repository's name" "nothing"
served=${SERVED_NAME:-$MODEL}
url=${URL:-http://localhost:8000}
repeat=${REPEAT:-0}
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$(mkdir -p "${OUT:-build/sweep/$leg}" && cd "${OUT:-build/sweep/$leg}" && pwd)
where=(--url "$url" --served-name "$served" --tensor-parallel "${TP:-1}")
[[ -z ${P_URL:-} ]] || where+=(--prefill-url "$P_URL")
[[ -z ${BLOCK_SIZE:-} ]] || where+=(--block-size "$BLOCK_SIZE")

show_and_run() {
    show "$@"
    [[ ${DRY_RUN:-0} == 1 ]] || "$@"
}

cd "$root"
for length in ${LENGTHS:-2048 4096 8192 16384 24576}; do
    mapfile -t made < <("$python" -m tools.bench base-prepare --length "$length" --out "$out" \
        --turns "${TURNS:-4}" --conversations "${CONVERSATIONS:-4}" \
        --output-tokens "${OUTPUT_TOKENS:-64}")
    [[ ${#made[@]} -eq 2 ]] || fail "the benchmark cannot be prepared" "its script and input" "neither"
    stats=$out/stats-$length-$repeat.json
    # The key keeps this run's conversations apart from those of other runs: their ids are the same.
    show_and_run "$python" "${made[0]}" --url "$url" --model "$MODEL" --served-model-name "$served" \
        --input-file "${made[1]}" --num-clients 1 --no-early-stop --send-conversation-id \
        --api-key "$leg-$repeat-$length" --stats-json-output "$stats"
    show_and_run "$python" -m tools.bench base-records "$stats" --arm "$leg" --repeat "$repeat" \
        --length "$length" --model "$MODEL" --out "$out" "${where[@]}"
done
