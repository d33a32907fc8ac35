"""When requests are sent: gaps within a conversation, and how many conversations at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tools.bench import drive
from tools.bench.client import Reply, Target
from tools.bench.drive import Driver, Where
from tools.bench.plan import Talk, Turn, Unit
from tools.bench.prompts import Words

ANSWER_S = 0.05


class Server:
    """Takes its time; notes when each conversation was asked, and how many at once."""

    def __init__(self) -> None:
        self.begun: dict[str, list[float]] = {}
        self.most = 0
        self._now = 0

    async def complete(
        self,
        session: Any,
        target: Target,
        prompt: Sequence[int],
        output: int,
        request: str,
        conversation: str,
    ) -> Reply:
        self.begun.setdefault(conversation.partition("-")[2], []).append(time.monotonic())
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(ANSWER_S)
        self._now -= 1
        return Reply((1,) * output, 0.0, 2.0, ((1.0, output),))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(drive, "complete", made.complete)
    return made


async def replay(talks: Sequence[Talk], clients: int) -> list[str]:
    """The units in the order in which they were whole."""
    order: list[str] = []
    driver = Driver(Target("http://x", "m"), Words(tuple(range(9))), Where("on", 0, 1), clients)
    units = [Unit(f"trace-{n}", (talk,)) for n, talk in enumerate(talks)]
    await driver.run(units, lambda records: order.append(records[0].unit), lambda: None)
    return order


def talk(start_s: float = 0.0, gap_s: float = 0.0) -> Talk:
    turns = (Turn("trace", 5, 1, text=(3,) * 5), Turn("trace", 9, 1, gap_s=gap_s, text=(3,) * 3))
    return Talk(turns, start_s)


@pytest.mark.parametrize("clients", [1, 3])
async def test_no_more_conversations_run_at_a_time_than_there_are_clients(
    server: Server, clients: int
) -> None:
    await replay([talk() for _ in range(6)], clients)
    assert server.most == clients


async def test_a_gap_is_waited_for_after_the_reply(server: Server) -> None:
    await replay([talk(gap_s=0.3)], 1)
    first, second = server.begun["trace-0-0"]
    assert 0.3 + ANSWER_S <= second - first < 0.6


async def test_conversations_begin_when_the_trace_says(server: Server) -> None:
    """In the trace's order, whichever stands first; the earliest that is left starts at once."""
    begun = time.monotonic()
    assert await replay([talk(5.4), talk(5.0)], 2) == ["trace-1", "trace-0"]
    assert server.begun["trace-1-0"][0] - begun < 0.2
    assert 0.35 < server.begun["trace-0-0"][0] - server.begun["trace-1-0"][0] < 0.6
