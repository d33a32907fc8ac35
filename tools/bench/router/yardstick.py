"""How fast the machine is right now, whatever is measured on it.

A virtual machine's cores have neighbours. What they take shows hardly in its own books, and all
that is measured meanwhile takes up to twice as long, most of all what sleeps in between: a busy
process keeps its caches. It changes within seconds, so that it is looked at all the time: a
process of its own takes a thousandth of a second of that core, several times a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

_STEPS = 30_000
_PAUSE_S = 0.125
_ROOT = Path(__file__).resolve().parents[3]


class Yardstick:
    """What a fixed piece of Python takes on a core, measured from now on until `close`.

    In CPU time, as what is measured beside it: to wait for that is no matter of the machine.
    """

    def __init__(self, core: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(core)], cwd=_ROOT, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._fd = self._process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._rest = b""

    def take(self) -> float | None:
        """Milliseconds, the median since the last call; None if nothing has been measured."""
        try:
            while data := os.read(self._fd, 1 << 16):
                self._rest += data
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        return median(map(float, lines)) if lines else None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _once() -> float:
    begun = time.thread_time_ns()
    total = 0
    for number in range(_STEPS):
        total += number
    return (time.thread_time_ns() - begun) / 1e6


def _measure_on(core: int) -> None:
    os.sched_setaffinity(0, [core])
    _once()  # the interpreter has not seen it yet
    while True:
        print(f"{_once():.4f}", flush=True)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    _measure_on(int(sys.argv[1]))
