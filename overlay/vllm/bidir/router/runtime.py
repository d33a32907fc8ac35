# SPDX-License-Identifier: Apache-2.0
"""What the process runs on: an event loop, and how often Python looks for garbage."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any

# Python's own 700 comes several times a turn, and finds next to nothing.
_GC_THRESHOLD = 10_000


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which takes about a third less CPU for a stream, where it is installed.

    It comes with vLLM, whose API server runs on it as well.
    """
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    return made


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
