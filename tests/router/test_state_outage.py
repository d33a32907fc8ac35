"""Redis is away, hangs, is full or holds nonsense: turns go on by the router's own memory."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.reasons import Reason
from vllm.bidir.router.state.options import StateOptions
from vllm.bidir.router.state.redis_link import RedisLink
from vllm.bidir.router.state.wire import (
    NotOursError,
    WireResponse,
    WireTurn,
    encode,
    read_key,
    read_params,
    read_response,
    read_turn,
)
from vllm.bidir.router.telemetry.metrics import Metrics

from tests.router.conftest import MakeSetup, Setup, another_router, until
from tests.router.fake_apis import speak_all
from tests.router.fake_leases import lease_id
from tests.router.redis_server import RedisServer
from tests.router.test_state import offered

CHAT = "/v1/chat/completions"
AWAY = "cannot be used"
# Ample for an answer of a busy machine; what hangs takes all of it, once.
BOUND_S = 1.0


@pytest.fixture
async def redis(unused_tcp_port: int) -> AsyncIterator[RedisServer]:
    server = await RedisServer(unused_tcp_port).start()
    yield server
    await server.kill()


@pytest.fixture(autouse=True)
def soon_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.bidir.router.state.redis_link._FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr("vllm.bidir.router.state.redis_link._LONGEST_PAUSE_S", 0.1)


async def before(make_setup: MakeSetup, url: str, **options: Any) -> Setup:
    setup = await make_setup(state=StateOptions(url, timeout=BOUND_S), **options)
    leases = setup.decode[0].leases
    leases.duration_s, leases.names = 60.0, True
    return setup


def failures(setup: Setup, kind: str) -> float:
    return setup.metric("bidir_router_state_failures_total", kind=kind)


async def three_turns(setup: Setup, name: str = "c", stream: bool = False) -> None:
    """They are served, and this router's own memory links them."""
    begun = len(setup.prefill[0].asked)
    turns = len(setup.decode[0].asked)
    for _ in range(3):
        assert (await setup.ask(conversation_id=name, stream=stream))[0] == 200
    first, second = f"turn-{turns + 1}", f"turn-{turns + 2}"
    assert offered(setup)[begun:][1:] == [first, second]


async def test_one_that_is_down_at_the_start(
    make_setup: MakeSetup, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await redis.kill()
    setup = await before(make_setup, redis.url)
    await setup.ask()  # P is known from now on
    await three_turns(setup)
    assert setup.metric("bidir_router_state_up") == 0 and failures(setup, "skipped") >= 6
    assert caplog.text.count(AWAY) == 1
    await redis.start()
    await until(lambda: setup.metric("bidir_router_state_up") == 1)
    assert caplog.text.count("can be used again") == 1
    await three_turns(setup)
    assert await redis.keys("*:c:*")


async def test_one_that_dies_and_comes_back(
    make_setup: MakeSetup, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    setup = await before(make_setup, redis.url)
    await setup.ask()
    for _ in range(2):
        await three_turns(setup)
        assert setup.metric("bidir_router_state_up") == 1
        await redis.kill()
        await three_turns(setup, stream=True)
        assert setup.metric("bidir_router_state_up") == 0
        await redis.start()
        await until(lambda: setup.metric("bidir_router_state_up") == 1)
    assert caplog.text.count(AWAY) == 2 and failures(setup, "connection") == 2
    # What this router remembers is told again with the next turn.
    await three_turns(setup)
    async with another_router(setup) as other:
        other.router.prefill.nodes[0].verifies = True
        await other.ask(conversation_id="c")
    assert offered(setup)[-1] == f"turn-{len(setup.decode[0].asked) - 1}"


async def test_one_that_hangs_is_waited_for_once(
    make_setup: MakeSetup, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await before(make_setup, redis.url)
    await setup.ask()
    redis.signal(signal.SIGSTOP)
    try:
        await asyncio.gather(*(setup.ask(conversation_id=f"c{n}") for n in range(20)))
        assert setup.metric("bidir_router_state_up") == 0
        assert 1 <= failures(setup, "timeout") <= 20 and caplog.text.count(AWAY) == 1
        skipped = failures(setup, "skipped")
        await three_turns(setup)
        assert failures(setup, "skipped") >= skipped + 6
    finally:
        redis.signal(signal.SIGCONT)
    await until(lambda: setup.metric("bidir_router_state_up") == 1)
    await three_turns(setup)


async def test_a_client_that_goes_as_redis_answers_is_not_missed(redis: RedisServer) -> None:
    """Nor is the end of the process. Python's wait_for would take it for its own, up to 3.11."""
    link = RedisLink(redis.url, BOUND_S, Metrics())
    await link.start()
    answer = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await answer

    attempt = asyncio.create_task(link.attempt(work))
    await asyncio.sleep(0.01)
    answer.set_result(None)
    await asyncio.sleep(0)  # that is when the work is done, and nobody has heard of it yet
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await link.close()


async def test_one_that_is_full(
    make_setup: MakeSetup, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It still answers: it is asked on, and what it does not take is a miss elsewhere."""
    await redis.tell("CONFIG", "SET", "maxmemory", "1")
    setup = await before(make_setup, redis.url)
    await setup.ask()
    await three_turns(setup)
    assert setup.metric("bidir_router_state_up") == 1 and failures(setup, "refused") >= 6
    assert caplog.text.count("refuses what it is asked") == 1 and AWAY not in caplog.text
    async with another_router(setup) as other:
        other.router.prefill.nodes[0].verifies = True
        assert (await other.ask(conversation_id="c"))[0] == 200
    assert offered(setup)[-1] is None
    await redis.tell("CONFIG", "SET", "maxmemory", "0")
    await three_turns(setup)
    assert await redis.keys("*:c:*")


@pytest.mark.parametrize("password", [None, "wr0ng-secret"])
async def test_one_that_wants_another_password(
    make_setup: MakeSetup,
    unused_tcp_port: int,
    caplog: pytest.LogCaptureFixture,
    password: str | None,
) -> None:
    caplog.set_level(logging.DEBUG)
    redis = await RedisServer(unused_tcp_port, password="r1ght-secret").start()
    try:
        secret = "" if password is None else f":{password}@"
        setup = await before(make_setup, f"redis://{secret}127.0.0.1:{redis.port}")
        await setup.ask()
        await three_turns(setup)
        assert setup.metric("bidir_router_state_up") == 0
    finally:
        await redis.kill()
    assert caplog.text.count(AWAY) == 1 and "does its URL name its password?" in caplog.text
    assert "secret" not in caplog.text and "secret" not in repr(setup.router.options)


NONSENSE: list[tuple[str, ...]] = [
    ("SET", ""),
    ("SET", "x"),
    ("SET", "\x00" * 15),
    ("SET", "[]"),
    ("SET", "x" * 100_000),
    ("RPUSH", "x"),
    ("SADD", "x"),
    ("HSET", "x", "y"),
]


@pytest.mark.parametrize("wrong", NONSENSE, ids=lambda one: f"{one[0]}-{len(one[-1])}")
async def test_one_that_holds_nonsense(
    make_setup: MakeSetup, redis: RedisServer, wrong: tuple[str, ...]
) -> None:
    setup = await before(make_setup, redis.url)
    for engine in (setup.prefill[0], setup.decode[0]):
        speak_all(engine)
    headers = {"X-Session-ID": "s"}
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    await setup.ask(CHAT, headers, **fields)
    await setup.ask(CHAT, headers, messages=[{"role": "user", "content": "b"}])
    await setup.ask("/v1/responses", input="a", headers=headers)
    for name in await redis.keys():
        await redis.tell("DEL", name)
        await redis.tell(wrong[0], name, *wrong[1:])
    async with another_router(setup) as other:
        other.router.prefill.nodes[0].verifies = True
        for router in (other, setup, other):
            status, _ = await router.ask(CHAT, headers, **fields)
            assert status == 200
            more = {"previous_response_id": "resp_3"}
            status, _ = await router.ask("/v1/responses", input="b", headers=headers, **more)
            assert status == 200
            async with router.client.get(router.url + "/conversations/s") as answer:
                assert answer.status in (200, 404)
        assert other.metric("bidir_router_state_up") == 1
        if wrong[0] == "SET":
            assert failures(other, "value") > 0


def turn(reason: Reason | None = None) -> WireTurn:
    return WireTurn(7, b"t" * 15, None, reason, "127.0.0.1:1", lease_id(1), 15.0, 0.0, 3)


def _fields(struct: WireTurn) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


@pytest.mark.parametrize(
    "changed",
    [
        {"stamp": -1},
        {"stamp": 1 << 32},
        {"tip": b"t"},
        {"root": b""},
        {"node": "n" * 301},
        {"lease_id": "d0-x"},
        {"lease_id": None},
        {"renewed_s": 0.0},
        {"renewed_s": -1.0},
        {"renewed_s": float("nan")},
        {"renewed_s": float("inf")},
        {"tokens": -1},
        {"until": "soon"},
        {"reason": "because"},
    ],
)
def test_a_turn_that_no_router_writes_is_refused(changed: dict[str, Any]) -> None:
    assert read_turn(encode(turn())) == turn()
    assert read_turn(encode(turn(reason=Reason.BUDGET))) == turn(reason=Reason.BUDGET)
    with pytest.raises(NotOursError):
        read_turn(msgspec.msgpack.encode(list({**_fields(turn()), **changed}.values())))


@pytest.mark.parametrize(
    "wrong",
    [
        WireResponse([b"x"], b""),
        WireResponse([b"x" * 15] * 257, b""),
        WireResponse([], b"{"),
        WireResponse([], b"\xff"),
        WireResponse([], b"[" * 100_000),
    ],
    ids=range(5),
)
def test_a_response_that_no_router_writes_is_refused(wrong: WireResponse) -> None:
    right = WireResponse([b"x" * 15], b'{"a":1},{}')
    assert read_response(encode(right)) == right
    with pytest.raises(NotOursError):
        read_response(encode(wrong))


def test_params_of_another_turn_or_of_none_are_not_taken() -> None:
    params = {"lease_id": lease_id(1), "remote_block_ids": [[1]]}
    data = json.dumps(params).encode()
    assert read_params(data, lease_id(1)) == params
    for lease in (lease_id(2), None):
        assert read_params(data, lease) is None
    assert read_params(None, None) is None
    for wrong in (b"", b"[]", b"\xff", b"[" * 100_000, data + b" " * (1 << 20)):
        with pytest.raises(NotOursError):
            read_params(wrong, None)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (read_turn, read_response, read_key):
        with suppress(NotOursError):
            read(data)
