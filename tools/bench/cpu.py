"""How much of a core processes take, as the system counts it."""

from __future__ import annotations

import ctypes
import time

from tools.cluster import Engine
from tools.cluster.guard import members

_C = ctypes.CDLL(None)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken, user and system; 0 once it is gone.

    Of its own clock (clock_getcpuclockid(3)): /proc counts in hundredths of a second, a thirtieth
    of what a router takes in three seconds.
    """
    clock = ctypes.c_int()
    if _C.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:  # it has ended in between
        return 0.0


def shares(engine: Engine, seconds: float) -> tuple[float, float]:
    """Share of a core that the engine's processes and its API server take over `seconds`."""

    def taken() -> tuple[float, float]:
        others = [pid for pid in members(engine.pid) if pid != engine.pid]
        return sum(map(cpu_seconds, others)), cpu_seconds(engine.pid)

    before, begun = taken(), time.monotonic()
    time.sleep(seconds)
    after, passed = taken(), time.monotonic() - begun
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed
