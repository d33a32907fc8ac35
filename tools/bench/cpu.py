"""How much of a core processes take, as /proc tells."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tools.cluster import Engine
from tools.cluster.guard import members

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken, user and system; 0 once it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # utime and stime are fields 14 and 15 (proc(5)); the name may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def shares(engine: Engine, seconds: float) -> tuple[float, float]:
    """Share of a core that the engine's processes and its API server take over `seconds`."""

    def taken() -> tuple[float, float]:
        others = [pid for pid in members(engine.pid) if pid != engine.pid]
        return sum(map(cpu_seconds, others)), cpu_seconds(engine.pid)

    before, begun = taken(), time.monotonic()
    time.sleep(seconds)
    after, passed = taken(), time.monotonic() - begun
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed
