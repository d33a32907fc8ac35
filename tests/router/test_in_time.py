"""A time limit that misses no cancellation."""

from __future__ import annotations

import asyncio

import pytest
from vllm.bidir.router.process.in_time import in_time


async def test_what_comes_in_time_is_given_on_and_so_are_errors() -> None:
    async def refused() -> None:
        raise ConnectionRefusedError

    assert await in_time(asyncio.sleep(0, "answer"), 5) == "answer"
    with pytest.raises(ConnectionRefusedError):
        await in_time(refused(), 5)


async def test_what_comes_too_late_is_cancelled() -> None:
    ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await in_time(hangs(), 0.01)
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_client_that_goes_in_the_moment_of_the_answer_is_not_missed() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    turn = asyncio.create_task(in_time(answer, 5))
    await asyncio.sleep(0)
    answer.set_result("answer")
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


async def test_who_goes_before_the_answer_ends_the_work() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    turn = asyncio.create_task(in_time(answer, 5))
    await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert answer.cancelled()
