"""How fast the machine is right now, whatever is measured on it.

A virtual machine's cores have neighbours. What they take shows hardly in its own books, and all
that is measured meanwhile takes up to twice as long, most of all what sleeps in between: a busy
process keeps its caches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tools.bench.router.figures import Rows
from tools.cluster.readiness import Report

KEY = "yardstick_ms"
# Above this, figures of the same run are not of the same machine.
_MOST_SPREAD = 1.25
_STEPS = 300_000
_TRIES = 5
_MEASURED_AGAIN = 2
_LOOK_S, _PATIENCE_S = 2.0, 300.0

Measured = TypeVar("Measured")


def measure(core: int) -> float:
    """Milliseconds that a fixed piece of Python takes on a core that is free, the best of a few."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    try:
        return min(_once() for _ in range(_TRIES))
    finally:
        os.sched_setaffinity(0, before)


def calmly(
    once: Callable[[], Measured], core: int, most_ms: float, report: Report
) -> tuple[Measured, float]:
    """What `once` gives while the yardstick takes `most_ms` at most, before and after; and how long
    it took.

    That is waited for, and what has been disturbed meanwhile is measured again, twice. Where it
    does not come in time, or is disturbed each time, it is taken as it is.
    """
    for tries_left in reversed(range(_MEASURED_AGAIN + 1)):
        before = _wait(core, most_ms, report)
        measured = once()
        took = max(before, measure(core))
        if took <= most_ms or before > most_ms or not tries_left:
            break
        report(f"the machine has become slower (yardstick {took:.1f} ms): measured again")
    return measured, took


def _wait(core: int, most_ms: float, report: Report) -> float:
    deadline = time.monotonic() + _PATIENCE_S
    took = measure(core)
    if took > most_ms:
        report(f"waiting for a calm machine: yardstick {took:.1f} ms")
    while took > most_ms and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        took = measure(core)
    return took


def summary(samples: Mapping[str, Mapping[str, Rows]]) -> str | None:
    """What a report says of it; None where a run has no such figures."""
    found = _all(samples)
    if not found:
        return None
    low, high = min(found), max(found)
    said = f"Yardstick: a fixed piece of Python took {low:.1f}-{high:.1f} ms on the router's core."
    if high > _MOST_SPREAD * low:
        said += " The machine was not the same all the time: run it again when it is calm."
    return said


def _all(samples: Mapping[str, Mapping[str, Rows]]) -> list[float]:
    rows = [row for arms in samples.values() for found in arms.values() for row in found]
    return [row[KEY] for row in rows if KEY in row]


def _once() -> float:
    begun = time.perf_counter()
    total = 0
    for number in range(_STEPS):
        total += number
    return (time.perf_counter() - begun) * 1000
