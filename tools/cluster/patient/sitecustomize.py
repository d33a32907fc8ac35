"""Loaded by each Python process of an engine that is to be patient: who waits sleeps a moment.

vLLM's processes wait for each other in a loop that yields. Where they share a core, those that wait
take most of it from the one that works.
"""

import os
import time

_MOMENT_S = 50e-6


def _sleep() -> None:
    time.sleep(_MOMENT_S)


os.sched_yield = _sleep
