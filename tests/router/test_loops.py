"""Loops that come and go, and of which none fails unnoticed."""

from __future__ import annotations

import asyncio

import pytest
from vllm.bidir.router.process.loops import Loops


async def test_what_one_loop_fails_with_is_raised_and_the_others_end() -> None:
    followed: dict[str, asyncio.Task[None]] = {}

    async def follow(key: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        followed[key] = task
        await asyncio.sleep(0)
        if key == "bad":
            raise UnicodeError("label empty")
        await asyncio.Event().wait()

    loops = Loops(follow)
    for key in ("good", "good", "stopped", "bad"):
        loops.start(key)
    await asyncio.sleep(0)
    loops.stop("stopped")
    with pytest.raises(UnicodeError, match="label empty"):
        await asyncio.wait_for(loops.run(), 5)
    assert len(followed) == 3 and all(task.done() for task in followed.values())


async def test_one_that_has_returned_or_been_stopped_can_be_started_again() -> None:
    begun: list[str] = []
    ends = asyncio.Event()

    async def follow(key: str) -> None:
        begun.append(key)
        await ends.wait()

    loops = Loops(follow)
    running = asyncio.create_task(loops.run())
    loops.start("a")
    await asyncio.sleep(0)
    loops.stop("a")
    loops.start("a")
    await asyncio.sleep(0.01)
    assert begun == ["a"] * 2
    ends.set()
    await asyncio.sleep(0)
    loops.start("a")  # at the very moment in which it has ended
    await asyncio.sleep(0.01)
    assert begun == ["a"] * 3 and not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
