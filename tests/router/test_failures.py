"""What a client sees when a node fails, before the first byte and after it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.conftest import MakeSetup
from tests.router.fake_engine import (
    P_PARAMS,
    as_client_sees,
    begin_stream,
    cut,
    d_params,
    event,
)


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
            response = await begin_stream(request)
            cut(request)
            return response
        if how == "empty stream":
            return await begin_stream(request)
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
        response = await begin_stream(request)
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
