# shellcheck shell=bash
# Sourced by the scripts beside it.

# fail WHAT EXPECTED FOUND: end with one message (exit 2).
fail() {
    printf 'error: %s\n  expected  %s\n  found     %s\n  next      %s --help\n' "$1" "$2" "$3" "$0" >&2
    exit 2
}

# show WORD...: print a command on one line, in a form that can be pasted into a shell.
show() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            line+="$word "
        else
            line+="${word@Q} "
        fi
    done
    printf '%s\n' "${line% }"
}
