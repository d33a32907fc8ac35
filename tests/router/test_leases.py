"""Leases on the wire: what D is asked to renew and to take back, and when."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.router.conftest import BODY, MakeSetup, Setup, until
from tests.router.fake_engine import d_params, event
from tests.router.fake_leases import FakeLeases, lease_id

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
# A third of it is a heartbeat.
SHORT_S = 0.45
LONG_S = 60.0
END = {"X-Conversation-End": "true"}


def leases_of(setup: Setup, duration_s: Any = SHORT_S) -> FakeLeases:
    """The first decode node's, which grants such leases from now on."""
    leases = setup.decode[0].leases
    leases.duration_s = duration_s
    return leases


async def until_renewed_again(leases: FakeLeases, times: int = 1) -> None:
    """So many further heartbeats."""
    calls = len(leases.renewed()) + times
    await until(lambda: len(leases.renewed()) >= calls)


def offered(setup: Setup) -> list[Any]:
    """The ids of the turns that P was offered, None where nothing was."""
    asked = setup.prefill[0].asked
    return [one["kv_transfer_params"].get("remote_request_id") for one in asked]


def misses(setup: Setup, reason: str) -> float:
    return setup.metric("bidir_router_turns_total", outcome="miss", reason=reason)


def releases(setup: Setup, reason: str) -> float:
    return setup.metric("bidir_router_lease_releases_total", reason=reason)


async def delete(setup: Setup, path: str, token: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with setup.client.delete(f"{setup.url}/conversations/{path}", headers=headers) as answer:
        if answer.status == 404:
            assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
        return answer.status


@pytest.mark.parametrize("stream", [True, False])
async def test_all_leases_of_a_node_are_renewed_in_one_call(setup: Setup, stream: bool) -> None:
    leases = leases_of(setup)
    for name in ("a", "b", "c"):
        assert (await setup.ask(conversation_id=name, stream=stream))[0] == 200
    begun = time.monotonic()
    await until_renewed_again(leases, 4)
    took = time.monotonic() - begun
    assert set(leases.renewed()[-1]) == {lease_id(1), lease_id(2), lease_id(3)}
    # Three times within a lease, and no more often than that.
    assert SHORT_S * 0.9 < took < SHORT_S * 4 / 3 * 1.1 + 1.0
    assert setup.metric("bidir_router_leases") == 3
    assert setup.metric("bidir_router_lease_renewals_total") >= 9
    # The node has had the fourth call a moment before its answer is here.
    await until(lambda: setup.metric("bidir_router_heartbeat_seconds_count") >= 4)
    assert leases.released() == []


async def test_each_node_is_asked_for_its_own_leases(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2)
    for engine in setup.decode:
        engine.leases.duration_s = SHORT_S
    setup.decode[1].asked.append({})
    for name in ("a", "b"):
        await setup.ask(conversation_id=name)
    one, two = (engine.leases for engine in setup.decode)
    await until(lambda: bool(one.renewed() and two.renewed()))
    assert (one.renewed()[0], two.renewed()[0]) == ([lease_id(1)], [lease_id(2)])


async def test_a_shorter_lease_brings_the_heartbeat_forward(setup: Setup) -> None:
    leases = leases_of(setup, LONG_S)
    await setup.ask(conversation_id="a")
    leases.duration_s = SHORT_S
    await setup.ask(conversation_id="b")
    await until_renewed_again(leases)
    assert set(leases.renewed()[0]) == {lease_id(1), lease_id(2)}


async def test_the_shortest_lease_that_still_lives_sets_the_pace(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="a")
    leases.duration_s = LONG_S
    await setup.ask(conversation_id="b")
    assert await delete(setup, "a") == 204
    await asyncio.sleep(SHORT_S)
    calls = len(leases.renewed())
    await asyncio.sleep(SHORT_S)
    assert len(leases.renewed()) == calls


async def test_a_renewed_turn_outlives_the_fixed_time(make_setup: MakeSetup) -> None:
    setup = await make_setup(conversation_ttl=0.0)
    leases_of(setup)
    for _ in range(2):
        await setup.ask(conversation_id="c")
    assert offered(setup) == [None, "turn-1"]


async def test_a_lost_lease_ends_the_kept_turn(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    await setup.ask(conversation_id="other")
    leases.gone.add(lease_id(1))
    await until(lambda: setup.metric("bidir_router_leases_lost_total") == 1)
    assert setup.metric("bidir_router_leases") == 1
    await setup.ask(conversation_id="c")
    assert offered(setup) == [None] * 3 and misses(setup, "expired") == 1
    assert leases.released() == []


async def test_the_next_turn_supersedes_and_only_the_old_lease_is_released(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    setup.decode[0].script = slow
    asking = asyncio.create_task(setup.ask(conversation_id="c", stream=True))
    await until(lambda: len(setup.decode[0].asked) == 2)
    await until_renewed_again(leases, 2)
    assert leases.released() == [] and leases.renewed()[-1] == [lease_id(1)]
    may_end.set()
    assert (await asking)[0] == 200
    await until(lambda: leases.released() == [lease_id(1)])
    await until_renewed_again(leases, 2)
    assert leases.released() == [lease_id(1)] and leases.renewed()[-1] == [lease_id(2)]
    assert releases(setup, "superseded") == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_a_turn_that_fails_leaves_the_old_lease(setup: Setup, status: int) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {}}, status=status)

    setup.decode[0].script = refuse
    assert (await setup.ask(conversation_id="c", headers=END))[0] == status
    await until_renewed_again(leases, 3)
    assert leases.renewed()[-1] == [lease_id(1)] and leases.released() == []
    setup.decode[0].script = None
    await setup.ask(conversation_id="c")
    assert offered(setup)[-1] == "turn-1"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_refused_for_the_budget_is_a_miss_with_that_reason(
    setup: Setup, stream: bool
) -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
        whole = {**chunk, "kv_transfer_params": {"reason": "budget"}}
        if not stream:
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event(whole) + event("[DONE]"))
        return response

    setup.decode[0].script = refuse
    for _ in range(2):
        assert b"budget" not in (await setup.ask(conversation_id="c", stream=stream))[1]
    assert misses(setup, "first_turn") == 1 and misses(setup, "budget") == 1
    setup.decode[0].script = None
    leases_of(setup)
    await setup.ask(conversation_id="c", stream=stream)
    setup.decode[0].script = refuse
    for _ in range(2):
        await setup.ask(conversation_id="c", stream=stream)
    # What the last granted lease keeps is still there.
    assert offered(setup)[-2:] == ["turn-3"] * 2


async def test_an_idle_conversation_is_released(make_setup: MakeSetup) -> None:
    setup = await make_setup(conversation_idle_timeout=1.0)
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    await until(lambda: leases.released() == [lease_id(1)])
    assert len(leases.renewed()) >= 4
    assert releases(setup, "idle") == 1 and setup.metric("bidir_router_leases") == 0
    calls = len(leases.calls)
    await asyncio.sleep(SHORT_S)
    assert len(leases.calls) == calls
    await setup.ask(conversation_id="c")
    assert offered(setup) == [None] * 2 and misses(setup, "expired") == 1


async def test_the_least_recently_used_conversation_is_released(make_setup: MakeSetup) -> None:
    setup = await make_setup(max_conversations=1)
    leases = leases_of(setup)
    for name in ("a", "b"):
        await setup.ask(conversation_id=name)
    await until(lambda: leases.released() == [lease_id(1)])
    assert releases(setup, "evicted") == 1


async def test_delete_ends_a_conversation_of_its_own_tenant_only(setup: Setup) -> None:
    leases = leases_of(setup)
    for token in ("a", "b"):
        await setup.ask(conversation_id="c", headers={"Authorization": f"Bearer {token}"})
    assert await delete(setup, "c") == 404
    assert await delete(setup, "c", "other") == 404
    assert await delete(setup, "d", "a") == 404
    assert await delete(setup, "c", "a") == 204
    assert await delete(setup, "c", "a") == 404
    await until(lambda: leases.released() == [lease_id(1)])
    await until_renewed_again(leases, 2)
    assert leases.renewed()[-1] == [lease_id(2)]
    assert releases(setup, "deleted") == 1
    await setup.ask(conversation_id="c", headers={"Authorization": "Bearer a"})
    assert misses(setup, "first_turn") == 3


@pytest.mark.parametrize(
    ("name", "path"),
    [("a/b", "a/b"), ("a/b", "a%2Fb"), ("ü 1", "%C3%BC%201"), ("50%", "50%25"), ("a?b", "a%3Fb")],
)
async def test_delete_takes_the_id_as_the_client_names_it(
    setup: Setup, name: str, path: str
) -> None:
    await setup.ask(conversation_id=name)
    url = URL(f"{setup.url}/conversations/{path}", encoded=True)
    async with setup.client.delete(url) as answer:
        assert answer.status == 204 and await answer.read() == b""
    assert len(setup.router.conversations) == 0


async def test_a_turn_under_way_leaves_nothing_of_a_deleted_conversation(setup: Setup) -> None:
    leases = leases_of(setup)
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    setup.decode[0].script = slow
    asking = asyncio.create_task(setup.ask(conversation_id="c"))
    await until(lambda: len(setup.decode[0].asked) == 1)
    assert await delete(setup, "c") == 204
    may_end.set()
    assert (await asking)[0] == 200
    await until(lambda: leases.released() == [lease_id(1)])
    await setup.ask(conversation_id="c")
    assert misses(setup, "first_turn") == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_after_a_last_turn_neither_old_nor_new_is_kept(setup: Setup, stream: bool) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c", stream=stream)
    await setup.ask(conversation_id="c", stream=stream, headers=END)
    await until(lambda: sorted(leases.released()) == [lease_id(1), lease_id(2)])
    # The last turn still reads what the one before has left.
    assert offered(setup) == [None, "turn-1"]
    assert len([call for call in leases.calls if call.word == "release"]) == 1
    assert releases(setup, "ended") == 2 and len(setup.router.conversations) == 0
    await setup.ask(conversation_id="c", stream=stream, headers={"X-Conversation-End": "False"})
    assert misses(setup, "first_turn") == 2 and setup.metric("bidir_router_leases") == 1


async def test_another_word_for_the_end_is_refused(setup: Setup) -> None:
    status, body = await setup.ask(headers={"X-Conversation-End": "1"})
    assert status == 400 and "X-Conversation-End" in json.loads(body)["error"]["message"]
    assert setup.prefill[0].asked == []


async def test_the_lease_of_a_turn_without_conversation_is_given_back(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask()
    await until(lambda: leases.released() == [lease_id(1)])


async def test_of_two_turns_at_once_the_last_wins(setup: Setup) -> None:
    leases = leases_of(setup)
    both = asyncio.Event()

    async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
        number = len(setup.decode[0].asked)
        if number == 2:
            both.set()
        await both.wait()
        params = d_params(number) | leases.terms(number)
        return web.json_response({"choices": [], "kv_transfer_params": params})

    setup.decode[0].script = script
    await asyncio.gather(*(setup.ask(conversation_id="c") for _ in range(2)))
    await until(lambda: len(leases.released()) == 1)
    await until_renewed_again(leases, 2)
    (loser,), winner = leases.released(), leases.renewed()[-1]
    assert sorted([loser, *winner]) == [lease_id(1), lease_id(2)]
    assert releases(setup, "superseded") == 1


async def test_many_ends_cost_one_call(setup: Setup) -> None:
    leases = leases_of(setup, LONG_S)
    names = [f"c{number}" for number in range(6)]
    for name in names:
        await setup.ask(conversation_id=name)
    for name in names:
        assert await delete(setup, name) == 204
        await asyncio.sleep(0.02)
    await until(lambda: len(leases.released()) == 6)
    assert len(leases.calls) <= 2


async def test_twenty_thousand_leases_are_two_calls(setup: Setup) -> None:
    node = setup.router.decode.nodes[0].name
    for number in range(20_000):
        params = d_params(1) | {"lease_id": lease_id(number), "lease_duration": 3.0}
        setup.router.conversations.put(number.to_bytes(4, "little"), params, node)
    leases = setup.decode[0].leases
    seconds = "bidir_router_heartbeat_seconds_count"
    await until(lambda: setup.metric(seconds) == 1)
    first, second = leases.renewed()
    assert len(first) == len(second) == 10_000 and len({*first, *second}) == 20_000


async def test_a_node_that_goes_away_and_comes_back(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    leases.status = 500
    failures = "bidir_router_lease_call_failures_total"
    await until(lambda: setup.metric(failures, call="renew") >= 3)
    node = setup.router.decode.nodes[0].name
    assert caplog.text.count(f"decode node {node} does not renew leases: 500") == 1
    leases.status = 200
    await until(lambda: f"decode node {node} answers lease calls again" in caplog.text)
    assert setup.metric("bidir_router_leases") == 1
    await setup.ask(conversation_id="c")
    assert offered(setup)[-1] == "turn-1"


async def test_a_node_that_is_down_is_tried_again(make_setup: MakeSetup) -> None:
    """Its leases stay the router's until it says that they are gone or the conversation is idle."""
    setup = await make_setup(decode=2, conversation_idle_timeout=2.0)
    leases_of(setup)
    setup.decode[1].leases.duration_s = SHORT_S
    for name in ("a", "b"):
        await setup.ask(conversation_id=name)
    await setup.decode[0].stop()
    failures = "bidir_router_lease_call_failures_total"
    await until(lambda: setup.metric(failures, call="renew") >= 2)
    assert setup.metric("bidir_router_leases") == 2
    await until_renewed_again(setup.decode[1].leases, 2)
    await until(lambda: setup.metric("bidir_router_leases") == 0)
    await until(lambda: setup.metric(failures, call="release") == 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"lost": null}',
        b'{"lost": [1]}',
        b'{"lost": [], "renewed": {"a": "x"}}',
        b'{"lost": [], "renewed": []}',
        b'{"lost": ["\xff"]}',
        b'{"lost": [], "x": ' + b"[" * 100_000 + b"}",
    ],
)
async def test_an_answer_that_is_none_changes_nothing(setup: Setup, answer: bytes) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    leases.answer = answer
    failures = "bidir_router_lease_call_failures_total"
    await until(lambda: setup.metric(failures, call="renew") >= 2)
    assert setup.metric("bidir_router_leases") == 1


async def test_ids_that_were_never_asked_for_are_nobodys_loss(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c")
    foreign = {"lost": ["", "x", lease_id(7)], "renewed": {lease_id(8): 1.0}}
    leases.answer = json.dumps(foreign).encode()
    await until_renewed_again(leases, 2)
    assert setup.metric("bidir_router_leases") == 1
    assert setup.metric("bidir_router_leases_lost_total") == 0
    assert setup.metric("bidir_router_lease_renewals_total") == 0


async def test_the_nodes_key_is_sent_and_no_clients(
    make_setup: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    setup = await make_setup(engine_api_key="node-key")
    leases = leases_of(setup)
    headers = {"Authorization": "Bearer client-key"}
    for _ in range(2):
        await setup.ask(conversation_id="secret-name", headers=headers)
    leases.status = 401
    await until(lambda: "does --engine-api-key-file name its key?" in caplog.text)
    await until(lambda: bool(leases.renewed() and leases.released()))
    assert {call.headers["Authorization"] for call in leases.calls} == {"Bearer node-key"}
    assert setup.decode[0].headers[-1]["Authorization"] == "Bearer client-key"
    for secret in ("node-key", "client-key", "secret-name", lease_id(1)[3:], lease_id(2)[3:]):
        assert secret not in caplog.text


async def test_without_a_key_none_is_sent(setup: Setup) -> None:
    leases = leases_of(setup)
    await setup.ask(conversation_id="c", headers={"Authorization": "Bearer client-key"})
    await until_renewed_again(leases)
    assert "Authorization" not in leases.calls[0].headers


USELESS: list[dict[str, Any]] = [
    {},
    {"lease_id": lease_id(1)},
    {"lease_id": lease_id(1), "lease_duration": None},
    {"lease_id": lease_id(1), "lease_duration": 0},
    {"lease_id": lease_id(1), "lease_duration": -1.0},
    {"lease_id": lease_id(1), "lease_duration": True},
    {"lease_id": lease_id(1), "lease_duration": "0.3"},
    {"lease_id": lease_id(1), "lease_duration": [0.3]},
    {"lease_duration": SHORT_S},
    {"lease_id": None, "lease_duration": SHORT_S},
    {"lease_id": 7, "lease_duration": SHORT_S},
    {"lease_id": "", "lease_duration": SHORT_S},
    {"lease_id": lease_id(1) + "\n", "lease_duration": SHORT_S},
    {"lease_id": "d0-" + "A" * 32, "lease_duration": SHORT_S},
    {"lease_id": "d0-" + "0" * 100_000, "lease_duration": SHORT_S},
    {"lease_id": "d-" + "0" * 32, "lease_duration": SHORT_S},
]


async def test_without_usable_terms_a_turn_is_kept_for_the_fixed_time(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(conversation_ttl=2.0)
    turn: dict[str, Any] = {}

    async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": d_params(1) | turn})

    setup.decode[0].script = script
    for number, terms in enumerate(USELESS):
        turn = terms
        for _ in range(2):
            assert (await setup.ask(conversation_id=f"c{number}"))[0] == 200
    assert offered(setup) == [None, "turn-1"] * len(USELESS)
    assert setup.metric("bidir_router_leases") == 0
    await asyncio.sleep(2.0)
    await setup.ask(conversation_id="c0")
    assert misses(setup, "expired") == 1 and setup.decode[0].leases.calls == []


async def test_no_duration_upsets_the_router(setup: Setup) -> None:
    """Numbers that no float holds, or that would make it call without pause."""
    durations = ["1e999", "-1e999", "1" + "0" * 400, "1e308", "1e-300"]
    leases = leases_of(setup, LONG_S)

    async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
        number = len(setup.decode[0].asked)
        params = d_params(number) | {"lease_id": lease_id(number), "lease_duration": 0.5}
        whole = json.dumps({"choices": [], "kv_transfer_params": params})
        text = whole.replace('"lease_duration": 0.5', f'"lease_duration": {durations[number - 1]}')
        return web.Response(text=text, content_type="application/json")

    setup.decode[0].script = script
    for name in durations:
        assert (await setup.ask(conversation_id=name))[0] == 200
    await asyncio.sleep(0.5)
    assert 1 <= len(leases.calls) <= 7
    assert leases.renewed()[-1] == [lease_id(3), lease_id(4), lease_id(5)]


async def test_a_router_that_ends_gives_everything_back(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2)
    for number, engine in enumerate(setup.decode):
        engine.leases.duration_s = LONG_S
        engine.asked.extend([{}] * (10 * number))
    for name in ("a", "b"):
        await setup.ask(conversation_id=name)
    assert await delete(setup, "a") == 204
    await setup.server.close()
    released = [engine.leases.released() for engine in setup.decode]
    assert released == [[lease_id(1)], [lease_id(11)]]


async def test_a_node_that_hangs_delays_the_end_by_a_second_at_most(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2)
    for engine in setup.decode:
        engine.leases.duration_s = LONG_S
    for name in ("a", "b"):
        await setup.ask(conversation_id=name)
    setup.decode[0].leases.hangs = True
    begun = time.monotonic()
    await setup.server.close()
    assert 0.9 < time.monotonic() - begun < 2.0
    assert setup.decode[1].leases.released() == [lease_id(1)]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_the_process_gives_back_when_asked_to_end_and_only_then(
    how: signal.Signals, setup: Setup, unused_tcp_port: int
) -> None:
    leases = leases_of(setup, LONG_S)
    nodes = {"prefiller": setup.prefill[0], "decoder": setup.decode[0]}
    argv = ["--host", "127.0.0.1", "--port", str(unused_tcp_port)]
    for role, engine in nodes.items():
        argv += [f"--{role}-host", engine.address.host, f"--{role}-port", str(engine.address.port)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm_bidir_router", *argv),
        cwd=OVERLAY,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        await _one_turn(setup, f"http://127.0.0.1:{unused_tcp_port}/v1/completions")
        process.send_signal(how)
        await asyncio.wait_for(process.wait(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert leases.released() == ([lease_id(1)] if how is signal.SIGTERM else [])


async def _one_turn(setup: Setup, url: str) -> None:
    for _ in range(200):
        try:
            async with setup.client.post(url, json={**BODY, "conversation_id": "c"}) as answer:
                assert answer.status == 200
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)
    pytest.fail("the router does not serve")
