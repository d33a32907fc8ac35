# SPDX-License-Identifier: Apache-2.0
"""What the process runs on: an event loop, open files, how often Python looks for garbage, freed
memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import logging
import resource
from collections.abc import Coroutine
from typing import Any

from vllm.bidir.router.process.end_tasks import end_tasks

logger = logging.getLogger("vllm_bidir_router")

# As many as are asked for where there is no limit, and what 2,000 streams need with some to spare:
# each has a client's connection, a D's, and for a while a P's.
_MOST_FILES = 1 << 20
_ENOUGH_FILES = 8192
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
        loop.run_until_complete(end_tasks(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def open_many_files() -> None:
    """Allow as many connections as the system lets us, and say so where they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _ENOUGH_FILES:
        logger.warning(
            "only %d files may be open, enough for some %d streams at a time; raise the hard limit "
            "(ulimit -Hn, LimitNOFILE of systemd)",
            wanted,
            wanted // 3,
        )


def calm_garbage_collector() -> None:
    """Leave what start-up has made alone for good, and look at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
