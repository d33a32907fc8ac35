"""Tasks that run for ever end with the router, also where a cancellation is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from vllm.bidir.router.process.end_tasks import end_tasks


async def test_a_cancellation_that_is_lost_is_repeated() -> None:
    lost = 0

    async def runs() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost += 1  # as wait_for does in Python 3.11

    task = asyncio.create_task(runs())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), 5)
    assert task.cancelled() and lost == 1


async def test_what_ended_before_and_what_fails_is_dropped() -> None:
    async def fails() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise OSError("at its end")

    async def ended() -> None:
        return

    tasks = [asyncio.create_task(fails()), asyncio.create_task(ended())]
    await asyncio.sleep(0)
    await end_tasks(tasks)
    assert all(task.done() for task in tasks)
    await end_tasks([])
