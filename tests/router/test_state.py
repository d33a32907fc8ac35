"""Several routers share conversations in a real Redis: any of them finds a last turn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.state.options import StateOptions

from tests.router.conftest import MakeSetup, Setup, another_router, until
from tests.router.fake_apis import speak_all
from tests.router.fake_engine import long_params
from tests.router.fake_leases import FakeLeases, lease_id
from tests.router.redis_server import RedisServer
from tests.router.tls import make_certificate

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
CHAT = "/v1/chat/completions"
SHORT_S, LONG_S = 0.45, 60.0
PATIENT_S = 5.0


@pytest.fixture
async def redis(unused_tcp_port: int) -> AsyncIterator[RedisServer]:
    server = await RedisServer(unused_tcp_port).start()
    yield server
    await server.kill()


def state(redis: RedisServer, **more: Any) -> StateOptions:
    """What is shared is not what is quick: a busy machine may take its time."""
    return StateOptions(redis.url, **{"timeout": PATIENT_S, **more})


@asynccontextmanager
async def routers(
    make_setup: MakeSetup, redis: RedisServer, duration_s: float | None = LONG_S, **options: Any
) -> AsyncIterator[tuple[Setup, Setup, FakeLeases]]:
    """Two of them before one P and one D, which grants leases, or names turns only."""
    one = await make_setup(**{"state": state(redis), **options})
    leases = one.decode[0].leases
    leases.duration_s, leases.names = duration_s, True
    async with another_router(one) as two:
        knows_p(two)
        yield one, two, leases


def knows_p(setup: Setup) -> None:
    """Until P has answered a router once it is offered nothing: it may be the base release."""
    for node in setup.router.prefill.nodes:
        node.verifies = True


def offered(setup: Setup) -> list[Any]:
    """The ids of the turns that P was offered, None where nothing was."""
    asked = setup.prefill[0].asked
    return [one["kv_transfer_params"].get("remote_request_id") for one in asked]


def say(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def taken_over(setup: Setup) -> float:
    return setup.metric("bidir_router_taken_over_total")


@pytest.mark.parametrize("duration_s", [LONG_S, None])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_named_conversation_goes_on_at_any_router(
    make_setup: MakeSetup, redis: RedisServer, stream: bool, duration_s: float | None
) -> None:
    async with routers(make_setup, redis, duration_s) as (one, two, _):
        for router in (one, two, two, one):
            status, _ = await router.ask(conversation_id="c", stream=stream)
            assert status == 200
        assert offered(one) == [None, "turn-1", "turn-2", "turn-3"]
        assert (taken_over(one), taken_over(two)) == (1, 1)


async def test_what_a_long_history_leaves_is_found_at_any_router(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis, None) as (one, two, leases):
        one.decode[0].keeps = long_params
        await one.ask(conversation_id="c")
        # Else it asks D: what it finds names a side channel that it has not heard of.
        await two.ask(conversation_id="another")
        await two.ask(conversation_id="c")
        found = one.prefill[0].asked[2]["kv_transfer_params"]
        assert {**found, **long_params(1)} == {**found, "remote_host": "elsewhere"}
        assert [call for call in leases.calls if call.word == "read"] == []


async def test_a_session_header_and_its_lines_are_found_at_any_router(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    headers = {"X-Session-ID": "s"}
    async with routers(make_setup, redis) as (one, two, _):
        await one.ask(CHAT, headers, messages=say("main"))
        await one.ask(CHAT, headers, messages=say("side"))
        await two.ask(CHAT, headers, messages=say("side", "a", "b"))
        await two.ask(CHAT, headers, messages=say("main", "a", "b"))
        await one.ask(CHAT, headers, messages=say("side", "a", "b", "c", "d"))
        # Compacted: the first line's.
        await one.ask(CHAT, headers, messages=say("summary"))
    assert offered(one) == [None, "turn-1", "turn-2", "turn-1", "turn-3", "turn-4"]


async def test_an_unmodified_client_is_linked_at_any_router(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis) as (one, two, _):
        await one.ask(CHAT, messages=say("a"))
        await two.ask(CHAT, messages=say("a", "A", "b"))
        await one.ask(CHAT, messages=say("a", "A", "b", "B", "c"))
        # A fork of an earlier turn goes on from the line's last one, as with one router.
        await two.ask(CHAT, messages=say("a", "A", "other"))
        await two.ask(CHAT, messages=say("a", "A", "b", "B", "c", "C", "d"))
    assert offered(one) == [None, "turn-1", "turn-2", "turn-3", "turn-3"]


async def test_tenants_and_prefixes_never_meet(make_setup: MakeSetup, redis: RedisServer) -> None:
    async with routers(make_setup, redis) as (one, two, _):
        await one.ask(conversation_id="c", headers={"Authorization": "Bearer a"})
        await two.ask(conversation_id="c", headers={"Authorization": "Bearer b"})
        async with another_router(one, state=state(redis, prefix="other:")) as three:
            await three.ask(conversation_id="c", headers={"Authorization": "Bearer a"})
        await two.ask(conversation_id="c", headers={"Authorization": "Bearer a"})
    assert offered(one) == [None, None, None, "turn-1"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_previous_response_is_expanded_at_any_router(
    make_setup: MakeSetup, redis: RedisServer, stream: bool
) -> None:
    async with routers(make_setup, redis) as (one, two, _):
        for engine in (one.prefill[0], one.decode[0]):
            speak_all(engine)
        async with another_router(one) as three:
            knows_p(three)
            previous = None
            for number, router in enumerate((one, two, one, three)):
                more = {} if previous is None else {"previous_response_id": previous}
                status, _ = await router.ask(
                    "/v1/responses", input=f"question {number}", stream=stream, **more
                )
                assert status == 200
                previous = f"resp_{number + 1}"
        asked = [json.dumps(body["input"]) for body in one.prefill[0].asked]
        for number in range(4):
            assert asked[3].count(f"question {number}") == 1
        assert offered(one) == [None, "turn-1", "turn-2", "turn-3"]
        for router in (one, two, three):
            alone = router.metric("bidir_router_decode_alone_total", reason="bypass_stored")
            assert alone == 0


async def test_every_key_ends_by_itself(make_setup: MakeSetup, redis: RedisServer) -> None:
    async with routers(make_setup, redis) as (one, two, _):
        for engine in (one.prefill[0], one.decode[0]):
            speak_all(engine)
        for router in (one, two):
            await router.ask("/v1/responses", input="a", headers={"X-Session-ID": "s"})
            more = {"previous_response_id": "resp_1"}
            await router.ask("/v1/responses", input="b", headers={"X-Session-ID": "s"}, **more)
        names = await redis.keys()
        assert {name.split(":")[2] for name in names} == set("lcpotfr")
        for name in names:
            assert int((await redis.tell("TTL", name))[1:]) > 0


async def test_what_is_told_holds_no_text_of_the_turn_and_no_key(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """Items of Responses are another matter: they are what is asked for later."""
    async with routers(make_setup, redis) as (one, _, _):
        headers = {"Authorization": "Bearer secret-key", "X-Session-ID": "secret-session"}
        await one.ask(CHAT, headers, messages=say("secret-prompt"))
        dump = "\n".join(await redis.keys()).encode()
        for name in await redis.keys():
            dump += await redis.tell("GET", name)
    assert b"secret" not in dump and b"remote_block_ids" in dump


async def test_the_last_turns_params_come_from_redis_where_their_port_is_known(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis) as (one, two, leases):
        await two.ask(conversation_id="other")
        await one.ask(conversation_id="c")
        await two.ask(conversation_id="c")
        assert offered(one) == [None, None, "turn-2"]
        assert not [call for call in leases.calls if call.word == "read"]


async def test_a_forged_port_in_redis_is_not_believed(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """Nor does it teach a router that has not heard from that engine yet: D is asked instead."""
    async with routers(make_setup, redis) as (one, two, leases):
        for knows in (False, True):
            await one.ask(conversation_id=f"c{knows}")
            (name,) = set(await redis.keys("*:p:*")) - {""}
            forged = (await redis.tell("GET", name)).replace(b"5700", b"6666")
            await redis.tell("SET", name, forged, "EX", "60")
            await two.ask(conversation_id=f"c{knows}")
            sent = one.prefill[0].asked[-1]["kv_transfer_params"]
            assert sent["remote_port"] == 5700 and sent["remote_host"] == "127.0.0.1"
            await redis.tell("FLUSHALL")
        assert len([call for call in leases.calls if call.word == "read"]) == 2


async def test_a_turn_on_a_node_that_is_not_on_the_list_is_computed(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis) as (one, _, _):
        await one.ask(conversation_id="c")
        other = await make_setup(state=state(redis))
        await other.ask(conversation_id="c")
        assert offered(other) == [None]
        assert other.metric("bidir_router_turns_total", outcome="miss", reason="peer_gone") == 1


async def test_who_serves_the_next_turn_gives_the_last_lease_back(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis, SHORT_S) as (one, two, leases):
        await one.ask(conversation_id="c")
        await two.ask(conversation_id="c")
        await until(lambda: leases.released() == [lease_id(1)])
        await until(lambda: one.metric("bidir_router_leases") == 0)
        assert two.metric("bidir_router_leases") == 1
        calls = len(leases.renewed())
        await until(lambda: len(leases.renewed()) >= calls + 3)
        assert leases.renewed()[-1] == [lease_id(2)] and leases.released() == [lease_id(1)]
        # It has not been lost: another router has the conversation.
        for router in (one, two):
            assert router.metric("bidir_router_leases_lost_total") == 0
        await one.ask(conversation_id="c")
        assert offered(one)[-1] == "turn-2"


async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"error": {}}, status=400)


async def test_an_idle_router_does_not_end_what_another_goes_on_with(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """The other's turn has failed: it has the same lease, and will try again."""
    async with (
        routers(make_setup, redis, SHORT_S, conversation_idle_timeout=0.6) as (
            one,
            _,
            leases,
        ),
        another_router(one, conversation_idle_timeout=60.0) as two,
    ):
        knows_p(two)
        await one.ask(conversation_id="c")
        one.decode[0].script = refuse
        assert (await two.ask(conversation_id="c"))[0] == 400
        one.decode[0].script = None
        await until(lambda: one.metric("bidir_router_leases") == 0)
        calls = len(leases.renewed())
        await until(lambda: len(leases.renewed()) >= calls + 2)
        assert leases.released() == [] and leases.renewed()[-1] == [lease_id(1)]
        await two.ask(conversation_id="c")
        assert offered(one) == [None, "turn-1", "turn-1"]


@pytest.mark.parametrize("how", ["idle", "evicted"])
async def test_a_router_that_has_it_alone_gives_it_back(
    make_setup: MakeSetup, redis: RedisServer, how: str
) -> None:
    bounds = {"idle": {"conversation_idle_timeout": 0.6}, "evicted": {"max_conversations": 1}}
    async with routers(make_setup, redis, SHORT_S, **bounds[how]) as (one, two, leases):
        await one.ask(conversation_id="c")
        if how == "evicted":
            await one.ask(conversation_id="d")
        await until(lambda: lease_id(1) in leases.released())
        assert one.metric("bidir_router_lease_releases_total", reason=how) >= 1
        await two.ask(conversation_id="c")
        assert offered(one)[-1] is None


async def test_a_conversation_is_deleted_at_any_router(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis) as (one, two, leases):
        for text in ("main", "side"):
            await one.ask(CHAT, messages=say(text), headers={"X-Session-ID": "s"})
        async with two.client.get(two.url + "/conversations/s") as answer:
            assert len((await answer.json())["lines"]) == 2
        for status in (204, 404):
            async with two.client.delete(two.url + "/conversations/s") as answer:
                assert answer.status == status
        await until(lambda: sorted(leases.released()) == [lease_id(1), lease_id(2)])
        assert not await redis.keys("*:[cpof]:*")
        await two.ask(CHAT, messages=say("main", "a", "b"), headers={"X-Session-ID": "s"})
        assert offered(one)[-1] is None


async def test_a_last_turn_ends_the_lines_of_all_routers(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    end = {"X-Session-ID": "s", "X-Conversation-End": "true"}
    async with routers(make_setup, redis) as (one, two, leases):
        for text in ("main", "side"):
            await one.ask(CHAT, messages=say(text), headers={"X-Session-ID": "s"})
        await two.ask(CHAT, messages=say("main", "a", "b"), headers=end)
        await until(lambda: sorted(leases.released()) == [lease_id(n) for n in (1, 2, 3)])


async def test_of_turns_that_end_at_two_routers_each_finds_its_own_line(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """Two continuations of one history at once: the first to end goes on, the other is a fork."""
    async with routers(make_setup, redis) as (one, two, _):
        await one.ask(CHAT, messages=say("a"))
        both = asyncio.Event()

        async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
            number = len(one.decode[0].asked)
            if number == 3:
                both.set()
            await both.wait()
            whole = {"choices": [], "kv_transfer_params": one.decode[0].params(number)}
            return web.json_response(whole)

        one.decode[0].script = script
        asking = asyncio.create_task(one.ask(CHAT, messages=say("a", "A", "b")))
        await until(lambda: len(one.decode[0].asked) == 2)
        await two.ask(CHAT, messages=say("a", "A", "c"))
        await asking
        one.decode[0].script = None
        # Each at the other's router.
        await two.ask(CHAT, messages=say("a", "A", "b", "B", "d"))
        await one.ask(CHAT, messages=say("a", "A", "c", "C", "d"))
    assert offered(one) == [None, "turn-1", "turn-1", "turn-2", "turn-3"]


async def test_a_router_that_ends_leaves_the_conversations_to_the_others(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    async with routers(make_setup, redis) as (one, two, leases):
        await one.ask(conversation_id="c")
        await one.server.close()
        assert leases.released() == [] and leases.renewed() == [[lease_id(1)]]
        await two.ask(conversation_id="c")
        assert offered(one) == [None, "turn-1"]
        await until(lambda: leases.released() == [lease_id(1)])


@asynccontextmanager
async def process(setup: Setup, port: int, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router of its own, as an operator starts it; its log is a pipe."""
    argv = ["--host", "127.0.0.1", "--port", str(port), "--state-timeout", str(PATIENT_S)]
    for role, engine in (("prefiller", setup.prefill[0]), ("decoder", setup.decode[0])):
        argv += [f"--{role}-host", engine.address.host, f"--{role}-port", str(engine.address.port)]
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm_bidir_router", *argv),
        cwd=OVERLAY,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_BIDIR_ROUTER_STATE": url},
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.communicate()


async def ask_process(setup: Setup, port: int, **fields: Any) -> int:
    for _ in range(400):
        with suppress(OSError):
            return (await replace(setup, url=f"http://127.0.0.1:{port}").ask(**fields))[0]
        await asyncio.sleep(0.05)
    raise AssertionError("the router does not serve")


async def test_another_router_takes_over_from_one_that_was_killed(
    make_setup: MakeSetup, unused_tcp_port_factory: Any
) -> None:
    """Of two processes; the URL, with its password, stands in the environment."""
    async with AsyncExitStack() as stack:
        redis = RedisServer(unused_tcp_port_factory(), password="s3cret")
        stack.push_async_callback(redis.kill)
        await redis.start()
        setup = await make_setup()
        leases = setup.decode[0].leases
        leases.duration_s = SHORT_S
        ports = [unused_tcp_port_factory() for _ in range(2)]
        first, second = [
            await stack.enter_async_context(process(setup, port, redis.url)) for port in ports
        ]
        assert await ask_process(setup, ports[1], conversation_id="other") == 200
        assert await ask_process(setup, ports[0], conversation_id="c") == 200
        first.kill()
        await first.wait()
        one = lease_id(2)
        setup.decode[0].script = refuse
        # Even a turn that fails: the conversation is this router's now.
        assert await ask_process(setup, ports[1], conversation_id="c") == 400
        setup.decode[0].script = None
        calls = len(leases.renewed())
        await until(lambda: any(one in ids for ids in leases.renewed()[calls + 1 :]))
        assert await ask_process(setup, ports[1], conversation_id="c") == 200
        assert offered(setup) == [None, None, "turn-2", "turn-2"]
        await until(lambda: leases.released() == [one])
        second.terminate()
        _, log = await second.communicate()
    assert b"s3cret" not in log and b"listening" in log


async def test_redis_over_tls(
    make_setup: MakeSetup, redis: RedisServer, tmp_path: Path, unused_tcp_port_factory: Any
) -> None:
    cert, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", redis.port)

        async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(65536):
                    to.write(data)
            to.close()

        await asyncio.gather(pump(reader, forth), pump(back, writer))

    port = unused_tcp_port_factory()
    server = await asyncio.start_server(relay, "127.0.0.1", port, ssl=context)
    try:
        trusted = StateOptions(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}", timeout=5.0)
        async with routers(make_setup, redis, state=trusted) as (one, two, _):
            await one.ask(conversation_id="c")
            await two.ask(conversation_id="c")
            assert offered(one) == [None, "turn-1"] and taken_over(two) == 1
        unknown = await make_setup(state=StateOptions(f"rediss://127.0.0.1:{port}", timeout=5.0))
        assert unknown.metric("bidir_router_state_up") == 0
    finally:
        server.close()
        await server.wait_closed()


async def test_event_of_a_stream_is_sent_after_its_turn_is_told(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """A client that has seen the end of its turn may ask any router for the next."""
    async with routers(make_setup, redis) as (one, two, _):
        for number in range(20):
            router = (one, two)[number % 2]
            async with router.client.post(
                router.url + "/v1/completions",
                json={"model": "m", "prompt": "p", "stream": True, "conversation_id": "c"},
            ) as answer:
                whole = b""
                while b'"finish_reason":"stop"' not in whole:
                    whole += await answer.content.readany()
    assert offered(one) == [None, *(f"turn-{number}" for number in range(1, 20))]


async def test_a_client_that_goes_at_the_end_leaves_no_lease_behind(
    make_setup: MakeSetup, redis: RedisServer
) -> None:
    """While the others are told, which takes its time here: it is kept, or given back."""
    setup = await make_setup(state=state(redis))
    leases, may_end = setup.decode[0].leases, asyncio.Event()
    leases.duration_s = LONG_S

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    setup.decode[0].script = slow
    asking = asyncio.create_task(setup.ask(conversation_id="c"))
    await until(lambda: len(setup.decode[0].asked) == 1)
    redis.signal(signal.SIGSTOP)
    try:
        may_end.set()
        await until(lambda: bool(leases.told))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.sleep(0.1)
    finally:
        redis.signal(signal.SIGCONT)
    await until(lambda: leases.released() == [lease_id(1)])
