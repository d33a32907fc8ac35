"""How a router ends: what is under way goes on, what comes is sent elsewhere, the rest is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from vllm.bidir.router.clients import draining
from vllm.bidir.router.http.stream import ClientStream
from vllm.bidir.router.options import RouterOptions

from tests.router.conftest import BODY, JSON, MakeSetup, Setup, until
from tests.router.fake_engine import event

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# More than the sockets and buffers between a router and a client hold.
BIG = event("x" * 100_000) * 100


class Held:
    """A script for a fake engine, which streams, then waits until it may go on."""

    def __init__(self, first: bytes = event({"choices": []})) -> None:
        self.go_on = asyncio.Event()
        self._first = first

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.get("stream"):
            await response.prepare(request)
            await response.write(self._first)
        await self.go_on.wait()
        if not body.get("stream"):
            return web.json_response({"choices": []})
        await response.write(event("[DONE]"))
        return response


@pytest.fixture
async def held(setup: Setup) -> AsyncIterator[Held]:
    made = setup.decode[0].script = Held()
    yield made
    made.go_on.set()


async def open_stream(setup: Setup, path: str = "/v1/completions") -> aiohttp.ClientResponse:
    """A stream whose first bytes are there."""
    response = await setup.client.post(setup.url + path, json={**BODY, "stream": True})
    assert response.status == 200
    assert await response.content.readline()
    return response


def end(setup: Setup) -> asyncio.Task[None]:
    """As a signal would."""
    setup.router.draining.tell()
    return asyncio.create_task(setup.router.draining.run())


async def status(setup: Setup, path: str) -> int:
    async with setup.client.get(setup.url + path) as response:
        return response.status


async def test_it_waits_for_what_is_under_way_and_takes_no_more(setup: Setup, held: Held) -> None:
    stream = await open_stream(setup)
    ending = end(setup)
    await asyncio.sleep(0)
    assert [await status(setup, path) for path in ("/ready", "/health")] == [503, 200]
    for path in ("/v1/completions", "/tokenize"):
        async with setup.client.post(setup.url + path, json=BODY) as refused:
            assert refused.status == 503 and refused.headers["Retry-After"] == "1"
            assert refused.headers["Connection"] == "close"
            assert "shutting down" in (await refused.json())["error"]["message"]
    assert setup.metric("bidir_router_refused_total", role="router", reason="draining") == 2
    assert not ending.done()
    held.go_on.set()
    assert (await stream.read()).endswith(event("[DONE]"))
    await asyncio.wait_for(ending, 5)


async def test_with_nothing_under_way_it_ends_at_once(setup: Setup) -> None:
    await setup.ask()
    await asyncio.wait_for(end(setup), 5)


async def test_for_a_delay_it_takes_requests_though_it_is_not_ready(make_setup: MakeSetup) -> None:
    setup = await make_setup(drain_delay=3600)
    ending = end(setup)
    assert await status(setup, "/ready") == 503
    assert (await setup.ask())[0] == 200
    setup.router.draining.tell()
    await asyncio.wait_for(ending, 5)
    assert (await setup.ask())[0] == 503


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b'data: {"error":{'),
        ("/v1/responses", b'event: error\ndata: {"type":"error",'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
    ],
)
@pytest.mark.parametrize("again", [True, False])
async def test_what_goes_on_too_long_is_told_so_and_its_legs_are_ended(
    make_setup: MakeSetup, path: str, last: bytes, again: bool
) -> None:
    """After the time for it, or at a second signal."""
    setup = await make_setup(drain_timeout=3600 if again else 0.05)
    setup.decode[0].script = Held(b": half an event\n")
    stream = await open_stream(setup, path)
    ending = end(setup)
    if again:
        setup.router.draining.tell()
    rest = await stream.read()  # raises where a stream is just cut
    assert rest.startswith(b"\n" + last) and rest.endswith(b"\n\n")
    assert b"shutting down" in rest
    await asyncio.wait_for(setup.decode[0].gone.wait(), 5)
    await asyncio.wait_for(ending, 5)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_has_not_begun_to_answer_gets_503(make_setup: MakeSetup, leg: str) -> None:
    setup = await make_setup(drain_timeout=0.05)
    engine = getattr(setup, leg)[0]
    engine.script = Held()
    asked = asyncio.create_task(setup.ask())
    await until(lambda: bool(engine.asked))
    ending = end(setup)
    got, body = await asked
    assert got == 503 and "shutting down" in json.loads(body)["error"]["message"]
    await asyncio.wait_for(engine.gone.wait(), 5)
    await asyncio.wait_for(ending, 5)


async def test_what_waits_in_the_queue_is_served_or_gets_503(make_setup: MakeSetup) -> None:
    setup = await make_setup(drain_timeout=3600, decode_in_flight=1)
    held = setup.decode[0].script = Held()
    stream = await open_stream(setup)
    waiting = [asyncio.create_task(setup.ask()) for _ in range(2)]
    await until(lambda: setup.router.decode.waiting == 2)
    ending = end(setup)
    held.go_on.set()
    held.go_on = asyncio.Event()
    await stream.read()
    await until(lambda: setup.router.decode.waiting == 1)
    setup.router.draining.tell()
    assert [(await one)[0] for one in waiting] == [503, 503]
    await asyncio.wait_for(ending, 5)
    assert setup.router.decode.waiting == 0


async def test_a_body_that_does_not_come_does_not_hold_it_up(make_setup: MakeSetup) -> None:
    setup = await make_setup(drain_timeout=0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    asked = asyncio.create_task(
        setup.client.post(setup.url + "/v1/completions", data=never(), headers=JSON)
    )
    await asyncio.sleep(0.1)
    await asyncio.wait_for(end(setup), 5)
    assert (await asked).status == 503


async def test_a_client_that_does_not_read_does_not_hold_it_up(make_setup: MakeSetup) -> None:
    setup = await make_setup(drain_timeout=0.05)
    setup.decode[0].script = Held(BIG)
    stream = await setup.client.post(setup.url + "/v1/completions", json={**BODY, "stream": True})
    stream.content._protocol.pause_reading()
    await asyncio.wait_for(end(setup), 10)
    await asyncio.wait_for(setup.decode[0].gone.wait(), 5)
    stream.close()


async def test_behind_the_end_of_a_stream_nothing_is_said(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has yet to read it: a connection that is kept would be out of step."""
    setup = await make_setup(drain_timeout=0.05)
    written, never = asyncio.Event(), asyncio.Event()
    send_end = ClientStream.end

    async def slowly(client: ClientStream, last: bytes) -> None:
        await send_end(client, last)
        written.set()
        await never.wait()

    monkeypatch.setattr(ClientStream, "end", slowly)
    seen: list[bytes] = []
    asking = asyncio.create_task(setup.ask(stream=True))
    await asyncio.wait_for(written.wait(), 5)
    monkeypatch.setattr(draining, "error_event", lambda *args, **more: seen.append(b"") or b"")
    await asyncio.wait_for(end(setup), 10)
    status, body = await asking
    assert status == 200 and body.endswith(event("[DONE]")) and seen == []


def test_deploy_gives_it_the_time_it_takes() -> None:
    """Else it would be killed with its streams."""
    options = RouterOptions()
    pod = yaml.safe_load((DEPLOY / "kubernetes/router.yaml").read_text().split("\n---\n")[0])
    pod = pod["spec"]["template"]["spec"]
    args = dict(arg.split("=") for arg in pod["containers"][0]["args"])
    delay = float(args["--drain-delay"])
    probe = pod["containers"][0]["readinessProbe"]
    assert delay >= probe["periodSeconds"] * probe["failureThreshold"]
    taken = delay + options.drain_timeout + 5
    assert pod["terminationGracePeriodSeconds"] >= taken
    unit = (DEPLOY / "systemd/vllm-bidir-router.service").read_text()
    assert f"TimeoutStopSec={options.drain_timeout + 15:.0f}\n" in unit
