#!/usr/bin/env bash
# End what serve_pd_multiturn.sh has started on this host, by the process ids that it noted.
set -euo pipefail

usage() {
    cat <<'TEXT'
End what serve_pd_multiturn.sh has started on this host.

usage: cleanup.sh proxy|server
  proxy    the router
  server   prefill and decode nodes

variables:
  RUN_DIR  where the process ids are (default /tmp/bidir-bench)
  GRACE    seconds between SIGTERM and SIGKILL (default 30)

example:
  cleanup.sh server
TEXT
}

case ${1:-} in
    --help | -h)
        usage
        exit 0
        ;;
    proxy) roles=(proxy) ;;
    server) roles=(prefill decode) ;;
    *)
        printf 'error: nothing to clean up is named\n  expected  proxy or server\n  found     %s\n' \
            "'${1:-}'" >&2
        exit 2
        ;;
esac

# The process and all that descends from it, children last.
tree() {
    local child
    echo "$1"
    for child in $(pgrep -P "$1" || true); do
        tree "$child"
    done
}

running() {
    local pid
    for pid in "$@"; do
        # A zombie has ended.
        if [[ -r /proc/$pid/stat && $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) != Z* ]]; then
            return 0
        fi
    done
    return 1
}

run_dir=${RUN_DIR:-/tmp/bidir-bench}
for role in "${roles[@]}"; do
    noted=$run_dir/$role.pid
    if [[ ! -f $noted ]]; then
        echo "$role: not started here"
        continue
    fi
    pid=$(<"$noted")
    # Ids are used again: only what looks like ours is ended.
    if ! [[ $pid =~ ^[0-9]+$ ]] || ! tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q vllm; then
        echo "$role: has ended already"
        rm -f "$noted"
        continue
    fi
    mapfile -t pids < <(tree "$pid")
    kill -TERM "$pid" 2>/dev/null || true
    for ((tenths = 0; tenths < ${GRACE:-30} * 10; tenths++)); do
        running "${pids[@]}" || break
        sleep 0.1
    done
    if running "${pids[@]}"; then
        kill -KILL "${pids[@]}" 2>/dev/null || true
        echo "$role: killed after ${GRACE:-30} s (${#pids[@]} processes)"
    else
        echo "$role: ended"
    fi
    rm -f "$noted"
done
