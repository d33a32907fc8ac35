"""The API is as /openapi.json describes it, whatever is sent: bodies, headers and ids by schema,
and against it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from vllm.bidir.router.app import App
from vllm.bidir.router.openapi import describe
from vllm.bidir.router.options import RouterOptions
from vllm.bidir.router.router import Router

from tests.router.conftest import RouterServer, Setup
from tests.router.fake_apis import speak_all
from tests.router.fake_engine import FakeEngine

DESCRIBED = describe("0")


def in_so_many_words(ctx: Any, response: Any, case: Any) -> None:
    """The router's own statuses are described one by one; 4XX and 5XX are for engines."""
    assert str(response.status_code) in case.operation.definition.raw["responses"]


CHECKS = [
    in_so_many_words,
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    positive_data_acceptance,
    negative_data_rejection,
]
# The same ones each time; asked for more, others each time.
FEW = 20
EXAMPLES = int(os.environ.get("BIDIR_API_EXAMPLES", FEW))
OPERATIONS = [
    (path, method.upper())
    for path, item in DESCRIBED["paths"].items()
    for method in item
    if method != "parameters"
]
CASES = [
    (path, method, mode)
    for path, method in OPERATIONS
    for mode in GenerationMode
    # Of the others nothing can be wrong.
    if mode.is_positive or "{" in path or "requestBody" in DESCRIBED["paths"][path][method.lower()]
]


def test_every_route_is_described_and_no_other() -> None:
    routes = {
        (pattern, method)
        for method, pattern in App(Router(RouterOptions())).routes
        if method != "HEAD"
    }
    assert routes == set(OPERATIONS)


async def test_the_description_is_served_and_is_one(setup: Setup) -> None:
    async with setup.client.get(setup.url + "/openapi.json") as response:
        assert response.status == 200 and response.content_type == "application/json"
        served = await response.json()
    assert served == describe(served["info"]["version"])


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A router before fake engines, on a loop of its own: what asks it here is not asynchronous."""
    found: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        engines = [await FakeEngine(role).start() for role in ("prefill", "decode")]
        for engine in engines:
            speak_all(engine)
        p, d = (engine.address for engine in engines)
        server = RouterServer(Router(RouterOptions(prefill=(p,), decode=(d,))))
        await server.start_server()
        found.append(server.url)
        ready.set()
        await over.wait()
        await server.close()
        for engine in engines:
            await engine.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


# The router draws random numbers meanwhile, in the thread that it has.
@pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_what_is_answered_is_described(
    served: str, path: str, method: str, mode: GenerationMode
) -> None:
    """What fits the schema is taken, what does not is refused, and the router never fails."""
    operation = schemathesis.openapi.from_dict(DESCRIBED)[path][method]

    @settings(
        max_examples=EXAMPLES,
        derandomize=EXAMPLES == FEW,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=served, session=session)
        case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        session.trust_env = False
        ask()
