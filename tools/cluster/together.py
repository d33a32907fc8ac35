"""Several clusters started at the same time, each with ranks and devices of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

from tools.cluster.lifecycle import Cluster


def start_together(
    stack: ExitStack, starts: Sequence[AbstractContextManager[Cluster]]
) -> list[Cluster]:
    """Enter all at the same time; ``stack`` leaves those that came up, also if others did not.

    Raises what the first that failed has raised.
    """
    futures: list[Future[Cluster]] = []
    try:
        with ThreadPoolExecutor(len(starts)) as pool:
            futures += [pool.submit(start.__enter__) for start in starts]
    finally:
        for start, future in zip(starts, futures, strict=False):
            if future.done() and not future.cancelled() and future.exception() is None:
                stack.push(start)
    started = [future.result() for future in futures]
    # All at once: by itself each stops only when the one before it has.
    for engine in (engine for one in started for engine in one.engines):
        stack.callback(engine.ask_to_stop)
    return started
