#!/usr/bin/env bash
# Start one node of a 1P1D set-up in the foreground; prints the whole command first.
set -euo pipefail
# shellcheck source=SCRIPTDIR/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
Start a prefill node, a decode node or the router between them, in the foreground.

variables:
  ROLE         prefill, decode or proxy (the router)
  P_IP, D_IP   addresses of the two nodes, as the router and the other node reach them
  BIDIR        true: P takes KV back from D between turns; false: as released (default true)
  MODEL        model for vllm serve: a folder or a repository's name
  SERVED_NAME  its name in requests (default: MODEL)
  TP           tensor-parallel size (default 1)
  BACKEND      LIBFABRIC (EFA) or UCX (default UCX)
  P_PORT, D_PORT, PROXY_PORT   HTTP ports (default 8100, 8200, 8000)
  SIDE_PORT    NIXL's side channel (default 5600)
  P_CACHE      true: prefix cache on P as well (default false, so that read-back alone is seen)
  KV_BUFFER_DEVICE   cpu for engines on a CPU (default: the engine's)
  EXTRA_ARGS   more arguments for vllm serve, split at spaces
  RUN_DIR      where the process id is noted for cleanup.sh (default /tmp/bidir-bench)
  DRY_RUN      1: only print the command

example, on P's host, on D's host, and anywhere:
  ROLE=prefill P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=Qwen/Qwen3-32B TP=8 BACKEND=LIBFABRIC serve_pd_multiturn.sh
  ROLE=decode  P_IP=10.0.0.1 D_IP=10.0.0.2 MODEL=Qwen/Qwen3-32B TP=8 BACKEND=LIBFABRIC serve_pd_multiturn.sh
  ROLE=proxy   P_IP=10.0.0.1 D_IP=10.0.0.2 serve_pd_multiturn.sh
TEXT
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
fi
[[ $# -eq 0 ]] || fail "unknown argument" "none: everything is a variable" "$*"

role=${ROLE:-}
case $role in
    prefill) role_ip=${P_IP:-} port=${P_PORT:-8100} kv_role=kv_producer ;;
    decode) role_ip=${D_IP:-} port=${D_PORT:-8200} kv_role=kv_consumer ;;
    proxy) role_ip=- ;;
    *) fail "ROLE is not set" "prefill, decode or proxy" "'$role'" ;;
esac
for name in P_IP D_IP; do
    [[ -n ${!name:-} ]] || fail "$name is not set" "an address of that node" "nothing"
done

if [[ $role == proxy ]]; then
    command=(vllm-bidir-router --port "${PROXY_PORT:-8000}"
        --prefiller-host "$P_IP" --prefiller-port "${P_PORT:-8100}"
        --decoder-host "$D_IP" --decoder-port "${D_PORT:-8200}")
    settings=()
else
    [[ -n ${MODEL:-} ]] || fail "MODEL is not set" "a folder or a repository's name" "nothing"
    bidir=${BIDIR:-true}
    [[ $bidir == true || $bidir == false ]] || fail "BIDIR cannot be used" "true or false" "'$bidir'"
    backend=${BACKEND:-UCX}
    settings=("VLLM_NIXL_SIDE_CHANNEL_HOST=$role_ip" "VLLM_NIXL_SIDE_CHANNEL_PORT=${SIDE_PORT:-5600}")
    case $backend in
        LIBFABRIC) settings+=("FI_PROVIDER=${FI_PROVIDER:-efa}") ;;
        UCX)
            # Without it two engines on one GPU talk over TCP; elsewhere it changes nothing.
            if command -v nvidia-smi >/dev/null; then
                settings+=("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=${UCX_CUDA_IPC_ENABLE_GET_ZCOPY:-on}")
            fi
            ;;
        *) fail "BACKEND cannot be used" "LIBFABRIC or UCX" "'$backend'" ;;
    esac
    cache=--enable-prefix-caching
    if [[ $role == prefill && ${P_CACHE:-false} != true ]]; then
        cache=--no-enable-prefix-caching
    fi
    extra=()
    if [[ -n ${EXTRA_ARGS:-} ]]; then
        read -r -a extra <<<"$EXTRA_ARGS"
    fi
    config="{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"$kv_role\","
    if [[ -n ${KV_BUFFER_DEVICE:-} ]]; then
        config+=" \"kv_buffer_device\": \"$KV_BUFFER_DEVICE\","
    fi
    config+=" \"kv_connector_extra_config\": {\"bidirectional_kv_xfer\": $bidir,"
    config+=" \"backends\": [\"$backend\"]}}"
    command=(vllm serve "$MODEL" --served-model-name "${SERVED_NAME:-$MODEL}" --port "$port"
        --tensor-parallel-size "${TP:-1}" "$cache" --kv-transfer-config "$config" "${extra[@]}")
fi

show "${settings[@]}" "${command[@]}"
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exit 0
fi

run_dir=${RUN_DIR:-/tmp/bidir-bench}
mkdir -p "$run_dir"
# exec keeps the process id.
echo "$$" >"$run_dir/$role.pid"
exec env "${settings[@]}" "${command[@]}"
