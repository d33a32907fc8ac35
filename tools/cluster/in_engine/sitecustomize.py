"""Loaded by each Python process of an engine, which ENGINE_PROCESSES tells how to start and wait.

`forked`: vLLM forks its processes where it would spawn them, as it does on CPUs only. Each spawned
one imports all of vLLM anew, some 10 s on one core.

`patient`: who waits sleeps a moment. vLLM's processes wait for each other in a loop that yields.
Where they share a core, those that wait take most of it from the one that works.
"""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

_MOMENT_S = 50e-6
_WANTED = os.environ["ENGINE_PROCESSES"].split(",")

# Builds a grammar when it is imported, 3 s on one core. The tests' environment has it for the
# wheel's bill of materials; an engine's has it not, and jsonschema does without.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]


def _sleep() -> None:
    time.sleep(_MOMENT_S)


def _let_go_of_listeners() -> None:
    """Whoever connects after the server has closed its port is refused, as by a spawned engine."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        try:
            one = socket.socket(fileno=fd)
        except OSError:  # none
            continue
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # Not closed: the child has objects that will close the number.
            os.dup2(nothing, fd)
        one.detach()
    os.close(nothing)


if "patient" in _WANTED:
    os.sched_yield = _sleep

if "forked" in _WANTED:
    _get_context = multiprocessing.get_context

    # On CPUs vLLM overwrites VLLM_WORKER_MULTIPROC_METHOD in its own environment.
    def _forking(method: "str | None" = None) -> Any:
        return _get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = _forking
    os.register_at_fork(after_in_child=_let_go_of_listeners)
