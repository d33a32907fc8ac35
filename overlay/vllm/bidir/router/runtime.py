# SPDX-License-Identifier: Apache-2.0
"""What the process runs on: an event loop, how often Python looks for garbage, freed memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any

# Python's own 700 comes several times a turn, and finds next to nothing.
_GC_THRESHOLD = 10_000
# mallopt(3): from this size on what is freed goes back to the system.
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM = 1 << 20


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which takes about a third less CPU for a stream, where it is installed.

    It comes with vLLM, whose API server runs on it as well.
    """
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    return made


def return_memory() -> bool:
    """Let the tables that grow leave nothing behind; False where the C library is not glibc.

    By itself glibc raises this size to that of the largest block it has seen freed, and keeps all
    smaller ones: 20 MB with 100,000 conversations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM) == 1


def run(main: Coroutine[Any, Any, None]) -> None:
    """`main` on a loop of its own, as asyncio.run does, which cannot be told which one."""
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def calm_garbage_collector() -> None:
    """Leave what start-up has made alone for good, and look at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
