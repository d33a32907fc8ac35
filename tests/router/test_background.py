"""What runs beside the requests does not end unnoticed."""

from __future__ import annotations

import asyncio

import pytest
from vllm.bidir.router.process.background import Background


async def for_ever() -> None:
    await asyncio.Event().wait()


async def breaks() -> None:
    await asyncio.sleep(0)
    raise UnicodeError("label empty")


async def is_cancelled_by_mistake() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("run", [breaks, is_cancelled_by_mistake])
async def test_a_loop_that_ends_with_an_error_is_told_and_logged(
    run: object, caplog: pytest.LogCaptureFixture
) -> None:
    failed = asyncio.Event()
    background = Background(failed.set)
    background.start([for_ever, run])  # type: ignore[list-item]
    await asyncio.wait_for(failed.wait(), 5)
    assert f"{run.__name__} has failed" in caplog.text  # type: ignore[attr-defined]
    assert ("label empty" in caplog.text) == (run is breaks)
    await background.end()


async def test_one_that_has_no_work_and_the_end_itself_are_no_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def has_no_work() -> None:
        return

    failed = asyncio.Event()
    background = Background(failed.set)
    background.start([for_ever, has_no_work])
    await asyncio.sleep(0.01)
    await background.end()
    await asyncio.sleep(0)
    assert not failed.is_set() and caplog.text == ""
