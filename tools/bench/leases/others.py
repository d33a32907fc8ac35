"""How much of this machine everybody else takes meanwhile: what no arm is to be blamed for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.bench.cpu import cpu_seconds
from tools.cluster.guard import members

_TICKS = os.sysconf("SC_CLK_TCK")


class Others:
    """Counts from one call to the next. `groups`: leaders of the process groups that are measured;
    they and this process are none of the others."""

    def __init__(self, groups: Sequence[int], busy: Callable[[], float] | None = None) -> None:
        self._groups = groups
        self._busy = busy or busy_seconds
        self._last = time.monotonic(), self._taken()

    def __call__(self) -> float:
        """What they took since the last call, of all cores' time; 0 to 1."""
        (before, taken), self._last = self._last, (time.monotonic(), self._taken())
        now, more = self._last
        passed = max(1e-3, now - before) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (more - taken) / passed))

    def _taken(self) -> float:
        # In this order what comes between counts as theirs, never as less than nothing.
        pids = {os.getpid(), *(pid for leader in self._groups for pid in members(leader))}
        own = sum(map(cpu_seconds, pids))
        return self._busy() - own


def busy_seconds() -> float:
    """Time that all cores together have not been idle, what a hypervisor took included."""
    line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    user, nice, system, _, _, *rest = map(int, line.split()[1:9])
    return (user + nice + system + sum(rest)) / _TICKS
