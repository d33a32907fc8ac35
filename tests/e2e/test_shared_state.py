"""Routers that share their state in Redis, over real engines: any of them finds a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import KvCounters, ask, outcomes, tokens
from tests.router.redis_server import RedisServer
from tools.cluster import Cluster

# Long enough for a proof, and then some.
QUESTIONS = [tokens(count, seed) for seed, count in enumerate((300, 90, 128, 37), 900)]
SESSION = "goes from one router to the other"
# A busy machine may take its time: what is shared here is not what is quick.
PATIENT = ("--state-timeout", "5")


@pytest.fixture
async def redis(unused_tcp_port: int) -> AsyncIterator[RedisServer]:
    server = await RedisServer(unused_tcp_port).start()
    yield server
    await server.kill()


async def test_a_conversation_goes_on_at_another_router(
    pair: Cluster, route: Route, redis: RedisServer
) -> None:
    """Each turn after the first is read back, and Redis' end costs no answer."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    shared = ("--state", redis.url, *PATIENT)
    with route(pair, *shared) as one, route(pair, *shared) as other:
        for number, router in enumerate((one, other)):
            # From P's answer a router hears that this P verifies what it reads back.
            ask(router, tokens(200, 910 + number), session=f"first at {router.url}")
        history: list[int] = []
        kept = 0
        for number, question in enumerate(QUESTIONS):
            before = KvCounters.of(prefill)
            turn = ask((one, other)[number % 2], [*history, *question], session=SESSION)
            assert KvCounters.of(prefill).since(before).read == kept, f"turn {number}"
            assert turn.generated == ask(decode, turn.prompt).generated
            history, kept = turn.history, turn.kept
        counted = outcomes(one), outcomes(other)
        assert [each.get("hit", 0) for each in counted] == [1, 2], counted

        await redis.kill()
        for number, router in enumerate((one, other)):
            turn = ask(router, [*history, *tokens(50, 920 + number)], session=SESSION)
            assert turn.generated == ask(decode, turn.prompt).generated
            history = turn.history
