"""The router as the process that its command starts: streams, clients that leave, its end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm.bidir.router.process.runtime import new_event_loop

from tests.router.conftest import BODY
from tests.router.fake_engine import FakeEngine, as_client_sees, d_params, event
from tests.router.fake_leases import lease_id
from tools.cluster.ports import PortReservations

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
# Hides uvloop from the process.
WITHOUT = "import sys; sys.modules['uvloop'] = None\n"
# A fault of the router, as soon as a turn is under way.
FAILS = """
from vllm.bidir.router.nodes import discovery
from vllm.bidir.router.turns import legs
discovery.LOOK_S = 0.02
prefill = legs.Legs.prefill
async def and_then_fails(*given):
    discovery.Discovery._names = lambda self: 1 / 0
    return await prefill(*given)
legs.Legs.prefill = and_then_fails
"""
RUN = "import sys; from vllm_bidir_router import main; sys.exit(main())"


@dataclass
class Running:
    process: asyncio.subprocess.Process
    url: str
    prefill: FakeEngine
    decode: FakeEngine


@pytest.fixture(params=["uvloop", "asyncio"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    if request.param == "uvloop" and importlib.util.find_spec("uvloop") is None:
        pytest.skip("needs uvloop")
    code = {"uvloop": "", "asyncio": WITHOUT, "fails": FAILS}[request.param] + RUN
    engines = [await FakeEngine(role).start() for role in ("prefill", "decode")]
    with PortReservations() as ports:
        port = ports.reserve()
        command = [sys.executable, "-c", code, "--host", "127.0.0.1", "--port", str(port)]
        for role, engine in zip(("prefiller", "decoder"), engines, strict=True):
            command += [f"--{role}-host", engine.address.host]
            command += [f"--{role}-port", str(engine.address.port)]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "PYTHONPATH": str(OVERLAY)},
            stderr=asyncio.subprocess.PIPE,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await until_healthy(url)
            yield Running(process, url, *engines)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
            for engine in engines:
                await engine.stop()


async def until_healthy(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for _ in range(400):
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise TimeoutError("the router does not come up")


async def test_a_stream_passes_unchanged(running: Running) -> None:
    async with (
        aiohttp.ClientSession() as client,
        client.post(running.url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert await response.read() == as_client_sees(d_params(1))


async def test_a_client_that_leaves_ends_the_request_on_d(running: Running) -> None:
    async def for_ever(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(event({"choices": [{"index": 0, "text": "x"}]}))
            await asyncio.sleep(0.01)

    running.decode.script = for_ever
    async with aiohttp.ClientSession() as client:
        body = {**BODY, "stream": True}
        async with client.post(running.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await asyncio.wait_for(running.decode.gone.wait(), 5)


@pytest.mark.parametrize("again", [None, signal.SIGINT])
async def test_a_stream_goes_on_to_its_end_or_to_a_second_signal(
    running: Running, again: signal.Signals | None
) -> None:
    """Exit code 0 both times; the leases are given back, that of the last turn too."""
    go_on = asyncio.Event()
    running.decode.leases.duration_s = 60

    async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if body["prompt"] != "wait":
            return None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": []}))
        await go_on.wait()
        params = d_params(2) | running.decode.leases.terms(2)
        await response.write(event({"choices": [], "kv_transfer_params": params}))
        return response

    running.decode.script = waits
    async with aiohttp.ClientSession() as client:
        url, body = running.url + "/v1/completions", {**BODY, "stream": True}
        async with client.post(url, json={**body, "conversation_id": "a"}) as response:
            await response.read()
        asked = {**body, "prompt": "wait", "conversation_id": "b"}
        async with client.post(url, json=asked) as response:
            await response.content.readline()
            running.process.send_signal(signal.SIGTERM)
            while (await client.get(running.url + "/ready")).status != 503:
                await asyncio.sleep(0.01)
            if again is None:
                go_on.set()
            else:
                running.process.send_signal(again)
            rest = await response.read()
    _, said = await asyncio.wait_for(running.process.communicate(), 15)
    assert running.process.returncode == 0 and b"Traceback" not in said
    kept = [lease_id(1), lease_id(2)] if again is None else [lease_id(1)]
    assert sorted(running.decode.leases.released()) == kept
    assert (b"shutting down" in rest) == (again is not None)


@pytest.mark.parametrize("running", ["fails"], indirect=True)
async def test_a_loop_that_fails_ends_the_router_after_what_is_under_way(running: Running) -> None:
    """Exit code 1: whatever has started it starts it anew."""
    running.decode.leases.duration_s = 60

    async def waits(request: web.Request, body: dict[str, Any]) -> None:
        async with aiohttp.ClientSession() as client:
            while (await client.get(running.url + "/ready")).status != 503:
                await asyncio.sleep(0.01)

    running.decode.script = waits
    async with (
        aiohttp.ClientSession() as client,
        client.post(running.url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert (await response.read()).endswith(event("[DONE]"))
    _, said = await asyncio.wait_for(running.process.communicate(), 15)
    assert running.process.returncode == 1
    assert b"Discovery.run has failed" in said and b"ZeroDivisionError" in said
    assert running.decode.leases.released() == [lease_id(1)]


def test_uvloop_is_what_it_runs_on_where_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    expected = "asyncio" if importlib.util.find_spec("uvloop") is None else "uvloop"
    assert type(loop).__module__.partition(".")[0] == expected


FREE = """
import sys
if sys.argv[1] == "returns":
    from vllm.bidir.router.process.runtime import return_memory
    assert return_memory()
largest = b"x" * (16 << 20)
del largest
tables, others = [], []
for _ in range(8):
    tables.append(b"x" * (4 << 20))
    others.append(b"x" * 200_000)
del tables
for line in open("/proc/self/status"):
    if line.startswith("RssAnon"):
        print(line.split()[1])
"""


async def test_large_blocks_that_are_freed_go_back_to_the_system() -> None:
    taken = {}
    for how in ("keeps", "returns"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FREE, how), cwd=OVERLAY, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        taken[how] = int(said)
    assert taken["returns"] < taken["keeps"] - 20_000
