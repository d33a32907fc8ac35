"""What a client sees when a node fails, and what a node sees when a client goes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm.bidir.router.nodes import while_up
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.nodes.sockets import node_socket

from tests.router.conftest import BODY, MakeSetup, Setup, until
from tests.router.fake_apis import named
from tests.router.fake_engine import P_PARAMS, FakeEngine, as_client_sees, d_params, event

GONE_WITHIN_S = 0.1


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def hangs(request: web.Request, body: dict[str, Any]) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("status", [500, 503])
async def test_a_p_that_answers_5xx_is_replaced_by_another(
    status: int, make_setup: MakeSetup
) -> None:
    setup = await make_setup(prefill=2)

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text="no")

    setup.prefill[0].script = broken
    for _ in range(2):
        assert (await setup.ask())[0] == 200
    assert len(setup.prefill[1].asked) == 2
    assert all("kv_transfer_params" in asked for asked in setup.decode[0].asked)
    assert setup.metric("bidir_router_retries_total", role="prefill") == 1


async def test_where_all_p_answer_5xx_the_d_serves_alone(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=2)

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="no")

    for engine in setup.prefill:
        engine.script = broken
    status, body = await setup.ask(stream=True)
    assert (status, body) == (200, as_client_sees(d_params(1)))
    assert "kv_transfer_params" not in setup.decode[0].asked[0]


def fails_how(how: str) -> Any:
    """A script of a D that fails before its first byte, or before the end of a whole answer."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if how == "500":
            return web.Response(status=500, text="no")
        if how == "no answer":
            cut(request)
            return web.Response()
        if how == "headers only":
            response = await begin(request)
            cut(request)
            return response
        if how == "empty stream":
            return await begin(request)
        assert how == "half a whole answer"
        response = web.StreamResponse(headers={"Content-Length": "100"})
        response.content_type = "application/json"
        await response.prepare(request)
        await response.write(b'{"choices": [')
        cut(request)
        return response

    return script


@pytest.mark.parametrize(
    "how", ["500", "no answer", "headers only", "empty stream", "half a whole answer"]
)
async def test_a_d_that_fails_before_its_first_byte_is_replaced_by_another(
    how: str, make_setup: MakeSetup
) -> None:
    setup = await make_setup(decode=2)
    stream = how != "half a whole answer"
    setup.decode[0].script = fails_how(how)
    for _ in range(2):
        status, body = await setup.ask(stream=stream)
        assert status == 200
        assert body.endswith(event("[DONE]")) if stream else json.loads(body)["choices"]
    # An answer of 500 may have to do with what P hands over: then it is asked once more, without.
    asked = 2 if how == "500" else 1
    assert (len(setup.decode[0].asked), len(setup.decode[1].asked)) == (asked, 2)
    # The first D may have had P free what it had read: P, who has it in its cache, is asked again.
    assert len(setup.prefill[0].asked) == 3
    assert all(asked["kv_transfer_params"]["readback"] for asked in setup.decode[1].asked)
    assert setup.metric("bidir_router_retries_total", role="decode") == 1


async def test_each_d_that_may_read_is_handed_the_prompt_anew(make_setup: MakeSetup) -> None:
    """What the first may have read, P may have freed, and a third might find anything there."""
    setup = await make_setup(decode=3)
    handed: list[str] = []

    async def hands_over(request: web.Request, body: dict[str, Any]) -> web.Response:
        handed.append(f"r{len(handed)}")
        params = {**P_PARAMS, "remote_request_id": handed[-1]}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    setup.prefill[0].script = hands_over
    for engine in setup.decode[:2]:
        engine.script = fails_how("headers only")
    status, body = await setup.ask(stream=True)
    assert status == 200 and body.endswith(event("[DONE]"))
    asked = [engine.asked[0]["kv_transfer_params"] for engine in setup.decode]
    read = [params["remote_request_id"] for params in asked]
    assert read == handed and len(handed) == 3


async def test_a_d_that_was_sent_nothing_leaves_the_handover_to_another(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(decode=2, health_interval=0)
    await setup.decode[0].stop()
    status, body = await setup.ask(stream=True)
    assert status == 200 and body.endswith(event("[DONE]"))
    assert len(setup.prefill[0].asked) == 1
    assert setup.decode[1].asked[0]["kv_transfer_params"]["readback"] == 1


ERROR = {"error": {"message": "no", "type": "InternalServerError", "code": 500}}


OPENING = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USED = event({"choices": [], "usage": {"completion_tokens": 0}})
RESPONSES_BEGIN = [
    named(f"response.{kind}", {"response": {"output": [], "usage": None, "status": "in_progress"}})
    for kind in ("created", "in_progress")
]
# What each API's engine streams when it cannot read what P hands over, in pieces as they come.
CANNOT_READ = {
    "/v1/completions": [event(ERROR), event("[DONE]")],
    "/v1/chat/completions": [event(OPENING), event(ERROR), event("[DONE]")],
    "/v1/messages": [
        b"event: message_start\n" + event({"type": "message_start", "message": {"id": "1"}}),
        b"event: error\n" + event({"type": "error", "error": {"type": "internal_error"}}),
    ],
    "/v1/responses": [*RESPONSES_BEGIN, b"event: unknown\n" + event(ERROR)],
}
# As the base release does where it tells nobody: but for Responses a stream of no tokens.
WITHOUT_A_WORD = {
    "/v1/completions": [USED, event("[DONE]")],
    "/v1/chat/completions": [event(OPENING), event(OPENING), USED, event("[DONE]")],
    "/v1/messages": [
        CANNOT_READ["/v1/messages"][0],
        named("message_delta", {"delta": {}, "usage": {"output_tokens": 0}}),
        named("message_stop", {}),
    ],
    "/v1/responses": RESPONSES_BEGIN,
}


@pytest.mark.parametrize(
    ("path", "how"),
    [
        *((path, how) for path in CANNOT_READ for how in ("500", "in pieces", "at once")),
        *((path, "without a word") for path in WITHOUT_A_WORD),
        ("/v1/responses", "breaks off"),
    ],
)
async def test_a_d_that_fails_with_what_p_hands_over_computes_it_all(
    path: str, how: str, make_setup: MakeSetup
) -> None:
    """P is gone before D has read from it: no other D could, either, and none is to blame."""
    setup = await make_setup(decode=2, eject_after=1)

    async def cannot_read(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if "kv_transfer_params" not in body:
            return None
        if how == "500":
            return web.json_response(ERROR, status=500)
        response = await begin(request)
        pieces = CANNOT_READ[path]
        if how in ("without a word", "breaks off"):
            pieces = WITHOUT_A_WORD[path]
        for piece in [b"".join(pieces)] if how == "at once" else pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if how == "breaks off":
            cut(request)
        return response

    for engine in setup.decode:
        engine.script = cannot_read
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt": None}
    more = {} if path == "/v1/completions" else chat
    status, body = await setup.ask(path, stream=True, **more)
    assert (status, body) == (200, as_client_sees(d_params(2)))
    assert [len(engine.asked) for engine in setup.decode] == [2, 0]
    alone = setup.metric("bidir_router_decode_alone_total", reason="transfer_failed")
    assert alone == 1
    assert setup.metric("bidir_router_ejections_total", role="decode") == 0


def aborted(path: str, stream: bool) -> bytes:
    """What an engine that is shut down answers, with 200; whole answers of it may have begun."""
    choice = {"index": 0, "finish_reason": "abort"}
    none = {"output": [], "content": [], "usage": {"output_tokens": 0}}
    if not stream:
        text = {"text": "hel"} if path == "/v1/completions" else {"message": {"content": ""}}
        whole = {"choices": [choice | text]} if "completions" in path else none
        return json.dumps(whole).encode()
    if path == "/v1/responses":
        completed = named("response.completed", {"response": none | {"status": "completed"}})
        return b"".join([*RESPONSES_BEGIN, completed])
    if path == "/v1/messages":
        return b"".join(WITHOUT_A_WORD[path])
    opening = event(OPENING) if path == "/v1/chat/completions" else b""
    said = event({"choices": [choice | {"delta": {}, "text": ""}]})
    return opening + said + event("[DONE]")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(CANNOT_READ))
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_turn_that_a_node_aborts_is_served_by_another(
    role: str, path: str, stream: bool, make_setup: MakeSetup
) -> None:
    setup = await make_setup(2, 2)
    engines: list[FakeEngine] = getattr(setup, role)

    async def shuts_down(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.Response(body=aborted(path, False), content_type="application/json")
        response = await begin(request)
        await response.write(aborted(path, True))
        return response

    engines[0].script = shuts_down
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt": None}
    more = {} if path == "/v1/completions" else chat
    for _ in range(2):
        status, body = await setup.ask(path, stream=stream, **more)
        assert status == 200 and (b'now"' if stream else b'"hello"') in body
    assert len(engines[1].asked) == 2
    assert all("kv_transfer_params" in asked for asked in engines[1].asked)
    kind = {"leg": role, "kind": "AbortedError"}
    # D may have failed with what P handed over: it is asked once more, without.
    tries = 2 if role == "decode" else 1
    assert setup.metric("bidir_router_leg_failures_total", **kind) == tries


async def test_text_that_speaks_of_an_abort_is_an_answer(setup: Setup) -> None:
    text = '"finish_reason": "abort", "output_tokens": 0'

    async def answers(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [{"text": text, "finish_reason": "stop"}]})

    setup.decode[0].script = answers
    status, body = await setup.ask()
    assert status == 200 and json.loads(body)["choices"][0]["text"] == text


async def test_an_opening_is_passed_on_with_what_follows(setup: Setup) -> None:
    async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for piece in (event(OPENING), event({"choices": [{"delta": {"content": "x"}}]})):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    setup.decode[0].script = answers
    status, body = await setup.ask("/v1/chat/completions", stream=True, messages=[])
    assert status == 200 and body.count(b"data: ") == 2 and body.startswith(event(OPENING))


async def test_a_stream_that_begins_with_an_error_is_no_stream_where_nothing_else_is_left(
    setup: Setup,
) -> None:
    async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event(ERROR) + event("[DONE]"))
        return response

    setup.decode[0].script = broken
    status, body = await setup.ask(stream=True)
    assert (status, json.loads(body)) == (500, ERROR)


async def test_what_a_d_keeps_that_is_down_is_not_asked_for_until_it_is_back(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(2, 2, health_interval=0.05)
    one, two = setup.decode
    reuse = []

    async def turn(conversation: str) -> None:
        body = {**BODY, "conversation_id": conversation}
        async with setup.client.post(setup.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            reuse.append(response.headers["x-kv-reuse"])

    for conversation in "abcd":
        await turn(conversation)
    assert (len(one.asked), len(two.asked)) == (2, 2)
    node = setup.router.decode.nodes[0]
    one.health = 503
    await until(lambda: node.health.up is False)
    for conversation in "ab":
        await turn(conversation)
    assert reuse[4:] == ["miss; reason=peer_gone", "hit"]
    offered = [asked["kv_transfer_params"] for engine in setup.prefill for asked in engine.asked]
    assert sum(params["remote_host"] is None for params in offered) == 5
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="peer_gone") == 1
    one.health = 200
    await until(lambda: node.health.up is True)
    await turn("c")
    assert reuse[6:] == ["hit"] and len(one.asked) == 3


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_node_that_hangs_is_replaced_once_it_is_down(
    leg: str, make_setup: MakeSetup
) -> None:
    setup = await make_setup(2, 2, health_interval=0.05)
    await until(lambda: all(node.health.up for node in setup.router.decode.nodes))
    one, two = getattr(setup, leg)
    one.script = hangs
    # One of the two is given the one that hangs.
    asking = [asyncio.create_task(setup.ask(stream=True)) for _ in range(2)]
    await until(lambda: len(one.asked) == 1 and len(two.asked) == 1)
    one.health = 503
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert len(two.asked) == 2
    await asyncio.wait_for(one.gone.wait(), 1)


async def test_a_node_that_goes_down_keeps_the_streams_that_it_still_serves(
    make_setup: MakeSetup,
) -> None:
    """An engine that is about to end, or too busy for its /health, may well finish them."""
    setup = await make_setup(health_interval=0.05)
    engine, node = setup.decode[0], setup.router.decode.nodes[0]
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event("1"))
        await may_end.wait()
        await response.write(event("2"))
        return response

    engine.script = slow
    await until(lambda: node.health.up is True)
    asking = asyncio.create_task(setup.ask(stream=True))
    await until(lambda: len(engine.asked) == 1)
    engine.health = 503
    await until(lambda: node.health.up is False)
    may_end.set()
    assert await asking == (200, event("1") + event("2"))


async def test_a_stream_of_a_node_that_has_stopped_ends_with_an_error(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel answers for it: nothing else would ever tell."""
    monkeypatch.setattr(while_up, "SILENT_S", 0.05)
    setup = await make_setup(health_interval=0.05)
    engine, node = setup.decode[0], setup.router.decode.nodes[0]

    async def stops(request: web.Request, body: dict[str, Any]) -> None:
        response = await begin(request)
        await response.write(event("1"))
        engine.health = 503
        await asyncio.sleep(60)

    engine.script = stops
    await until(lambda: node.health.up is True)
    status, body = await setup.ask(stream=True)
    assert status == 200 and body.startswith(event("1"))
    error = json.loads(body.removeprefix(event("1")).removeprefix(b"data: "))
    assert error["error"]["code"] == 502
    await asyncio.wait_for(engine.gone.wait(), 1)
    labels = {"leg": "decode", "kind": "NodeDownError"}
    assert setup.metric("bidir_router_leg_failures_total", **labels) == 1


async def test_a_refusal_of_d_reaches_the_client_as_it_is_and_is_not_tried_again(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(decode=2, eject_after=1)

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    for engine in setup.decode:
        engine.script = refuse
    status, body = await setup.ask(stream=True)
    assert (status, json.loads(body)) == (400, {"error": {"message": "too long"}})
    assert sum(len(engine.asked) for engine in setup.decode) == 1
    assert setup.metric("bidir_router_ejections_total", role="decode") == 0


@pytest.mark.parametrize("last", [event("x"), b"data: x\n", b"data: x", b"data: x\r\n\r\n", b": c"])
async def test_after_the_first_byte_there_is_an_error_event_and_no_second_try(
    last: bytes, make_setup: MakeSetup
) -> None:
    setup = await make_setup(decode=2)

    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event("first"))
        await response.write(last)
        await asyncio.sleep(0.02)
        cut(request)
        return response

    for engine in setup.decode:
        engine.script = breaks
    status, body = await setup.ask(stream=True)
    assert status == 200 and body.startswith(event("first"))
    # An event of its own, whatever D had begun.
    error = body.replace(b"\r\n", b"\n").strip().split(b"\n\n")[-1].strip()
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
    assert sum(len(engine.asked) for engine in setup.decode) == 1


@pytest.mark.parametrize(
    "when", ["prefill", "before the first byte", "between two tokens", "in a whole answer"]
)
async def test_the_engine_sees_within_100_ms_that_the_client_has_gone(
    when: str, setup: Setup
) -> None:
    engine = setup.prefill[0] if when == "prefill" else setup.decode[0]
    started = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        response = None
        if when == "between two tokens":
            response = await begin(request)
            await response.write(event("1"))
        started.set()
        await asyncio.sleep(60)
        return response

    engine.script = slow
    stream = when != "in a whole answer"
    asking = asyncio.create_task(setup.ask(stream=stream, conversation_id="c"))
    await asyncio.wait_for(started.wait(), 5)
    if when == "between two tokens":
        await asyncio.sleep(0.05)
    asking.cancel()
    begun = time.monotonic()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert time.monotonic() - begun < GONE_WITHIN_S
    nodes = (*setup.router.prefill.nodes, *setup.router.decode.nodes)
    await until(lambda: all(node.in_flight == node.tokens == 0 for node in nodes))
    await until(lambda: all(not node.awaited for node in nodes))


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_client_that_goes_in_the_moment_of_the_answer_ends_it(
    nth: int, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its head, or of its first bytes."""
    engine = setup.decode[0]

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        woken.clear()
        response = await begin(request)
        await asyncio.sleep(0.01)
        await response.write(event("1"))
        await asyncio.sleep(60)

    woken, wake = [], Reply.wake

    def goes(self: Reply) -> None:
        wake(self)
        woken.append(self)
        if engine.asked and len(woken) == nth:
            (turn,) = setup.router.draining._under_way
            turn.cancel()

    monkeypatch.setattr(Reply, "wake", goes)
    engine.script = slow
    with pytest.raises(aiohttp.ClientError):
        await setup.ask(stream=True)
    await asyncio.wait_for(engine.gone.wait(), 1)


async def test_a_client_that_goes_while_it_does_not_read_ends_the_work_too(setup: Setup) -> None:
    """The router waits to write then, not to read."""
    engine = setup.decode[0]
    written = Written(engine, pieces=2000)
    response = await setup.client.post(setup.url + "/v1/completions", json={**BODY, "stream": True})
    await written.until_it_stands_still()
    response.close()
    begun = time.monotonic()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert time.monotonic() - begun < GONE_WITHIN_S


async def test_a_client_that_goes_as_its_answer_ends_is_no_fault(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many close after [DONE], without waiting for the end of the body."""
    ends = web.StreamResponse.write_eof

    async def gone(response: web.StreamResponse, data: bytes = b"") -> None:
        if "x-kv-reuse" in response.headers:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await ends(response, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", gone)
    with pytest.raises(aiohttp.ClientPayloadError):
        await setup.ask(stream=True)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Written:
    """A D that writes as fast as it is let, and how much that was."""

    PIECE = event("x" * 65_000)

    def __init__(self, engine: FakeEngine, pieces: int) -> None:
        self.count = 0
        self._pieces = pieces
        engine.script = self._write

    async def _write(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for _ in range(self._pieces):
            await response.write(self.PIECE)
            self.count += 1
        return response

    async def until_it_stands_still(self) -> None:
        before = -1
        while before != self.count or not self.count:
            before = self.count
            await asyncio.sleep(0.1)


async def test_a_client_that_reads_slowly_slows_its_d_down_and_loses_nothing(
    setup: Setup,
) -> None:
    """What it has not read stays where it is made: in between are sockets' buffers only."""
    pieces = 1000
    written = Written(setup.decode[0], pieces)
    url = setup.url + "/v1/completions"
    async with setup.client.post(url, json={**BODY, "stream": True}) as response:
        await written.until_it_stands_still()
        assert written.count < pieces / 2
        whole = await response.read()
    assert whole == Written.PIECE * pieces


def test_a_host_that_has_vanished_is_noticed() -> None:
    with node_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        seconds = [
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert seconds[0] + seconds[1] * seconds[2] <= 30
        assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


async def test_nodes_are_reached_over_such_sockets(setup: Setup) -> None:
    seen: list[int] = []

    async def look(request: web.Request, body: dict[str, Any]) -> None:
        for one in setup.router._calls._client._open:  # type: ignore[union-attr]
            raw = one._transport.get_extra_info("socket")
            seen.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    setup.decode[0].script = look
    await setup.ask()
    assert seen and all(seen)
