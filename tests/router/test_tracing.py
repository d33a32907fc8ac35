"""Traces, as a collector receives them: what a turn's spans say, and that no turn needs them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from vllm.bidir.router.clients.security import Security, key_digest
from vllm.bidir.router.options import parse
from vllm.bidir.router.telemetry import trace_options

from tests.router.conftest import MakeSetup, Setup, until
from tests.router.fake_engine import P_PARAMS, event
from tests.router.otlp import (
    CLIENT,
    INTERNAL,
    SERVER,
    Collector,
    attributes,
    grpc_collector,
    http_collector,
)

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
Ended = Callable[[Setup], Awaitable[list[Span]]]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(PROTOCOL, "http/protobuf")
    with http_collector() as made:
        yield made


@pytest.fixture
def ended(collector: Collector) -> Ended:
    """A router's spans, in the order of their ends, when it has ended."""

    async def end(setup: Setup) -> list[Span]:
        await setup.server.close()
        return sorted(collector.spans(), key=lambda span: span.end_time_unix_nano)

    return end


def named(spans: list[Span]) -> dict[str, Span]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def follows(header: str, span: Span) -> bool:
    """Whether a traceparent header says: below this span, and sampled."""
    _, trace, parent, flags = header.split("-")
    return (trace, parent) == (span.trace_id.hex(), span.span_id.hex()) and int(flags, 16) & 1 == 1


@pytest.mark.parametrize(
    ("protocol", "serve"), [("grpc", grpc_collector), ("http/protobuf", http_collector)]
)
async def test_a_turn_is_one_trace_that_the_engines_join(
    protocol: str, serve: Any, make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-collector-key=k1")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with serve() as collector:
        setup = await make_setup(otlp_traces_endpoint=collector.url)
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "baggage": "a=b"}
        assert (await setup.ask(headers=headers, stream=True))[0] == 200
        await setup.server.close()
        spans = named(collector.spans())
    assert spans.keys() == {"POST /v1/completions", "prefill", "decode"}
    turn = spans["POST /v1/completions"]
    assert turn.trace_id.hex() == TRACE and turn.parent_span_id.hex() == PARENT
    assert turn.kind == SERVER
    for leg in (spans["prefill"], spans["decode"]):
        assert leg.trace_id == turn.trace_id and leg.parent_span_id == turn.span_id
        assert leg.kind == CLIENT
        assert turn.start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano
        assert leg.end_time_unix_nano <= turn.end_time_unix_nano
    for engine, leg in ((setup.prefill[0], "prefill"), (setup.decode[0], "decode")):
        (sent,) = engine.headers
        (traceparent,) = sent.getall("traceparent")
        assert follows(traceparent, spans[leg])
        assert sent["tracestate"] == "vendor=1" and sent["baggage"] == "a=b"
    assert collector.headers[0]["x-collector-key"] == "k1"
    resource = collector.resource()
    assert resource["service.name"] == "vllm-bidir-router"
    assert resource["deployment.environment.name"] == "test"


async def test_what_a_turn_reused_is_on_its_span(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)

    async def prefill(request: web.Request, body: dict[str, Any]) -> web.Response:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 70}}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": P_PARAMS})

    setup.prefill[0].script = prefill
    await setup.ask(conversation_id="c", stream=True)
    await setup.ask(conversation_id="c")
    await setup.ask(n=2)
    miss, hit, alone = [attributes(span) for span in await ended(setup) if span.kind == SERVER]
    assert miss == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 100,
        "bidir.kv_reuse": "miss",
        "bidir.kv_reuse.reason": "first_turn",
        "bidir.kv_reuse.tokens": 70,
    }
    assert hit["bidir.kv_reuse"] == "hit" and "bidir.kv_reuse.reason" not in hit
    assert alone["bidir.kv_reuse.reason"] == "bypass_n"
    assert "gen_ai.usage.input_tokens" not in alone


async def test_a_leg_says_where_it_went_and_when_its_first_byte_came(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    await setup.ask(stream=True)
    await setup.ask()
    prefill, streamed, _, _, whole, _ = await ended(setup)
    for span, engine in ((prefill, setup.prefill[0]), (streamed, setup.decode[0])):
        said = attributes(span)
        assert said["server.address"] == "127.0.0.1"
        assert said["server.port"] == engine.address.port
        assert said["url.full"] == f"http://{engine.address}/v1/completions"
        assert said["http.request.method"] == "POST" and said["http.response.status_code"] == 200
    (first,) = streamed.events
    assert first.name == "first_byte"
    assert streamed.start_time_unix_nano <= first.time_unix_nano <= streamed.end_time_unix_nano
    assert attributes(streamed)["bidir.first_byte_seconds"] > 0
    assert not prefill.events and not whole.events and whole.name == "decode"


async def test_waiting_for_room_is_a_span(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url, decode_in_flight=1, queue_limit=1)
    gate = asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> None:
        await gate.wait()

    setup.decode[0].script = hold
    first = asyncio.create_task(setup.ask())
    await until(lambda: bool(setup.decode[0].asked))
    second = asyncio.create_task(setup.ask())
    await until(lambda: setup.metric("bidir_router_queue_length", role="decode") == 1)
    assert (await setup.ask())[0] == 429
    gate.set()
    await asyncio.gather(first, second)
    spans = await ended(setup)
    (queue,) = [span for span in spans if span.name == "queue"]
    assert queue.kind == INTERNAL and attributes(queue) == {"bidir.role": "decode"}
    turns = {span.span_id: span for span in spans if span.kind == SERVER}
    assert queue.parent_span_id in turns
    refused = [attributes(span) for span in turns.values() if not span.status.code]
    assert sorted(said["http.response.status_code"] for said in refused) == [200, 200, 429]


async def test_waiting_too_long_is_an_error_with_its_status(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(
        otlp_traces_endpoint=collector.url, decode_in_flight=1, queue_timeout=0.01
    )
    setup.router.decode.nodes[0].in_flight += 1
    assert (await setup.ask())[0] == 503
    queue, turn = await ended(setup)
    assert attributes(queue)["error.type"] == attributes(turn)["error.type"] == "503"
    assert not queue.status.message and not queue.events


async def test_each_try_is_a_span_and_a_failed_one_says_so(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url, prefill=2, decode=2)

    async def fail(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="an engine's text")

    setup.prefill[0].script = setup.decode[0].script = fail
    for _ in range(2):
        assert (await setup.ask(stream=True))[0] == 200
    spans = await ended(setup)
    for name, engine in (("prefill", setup.prefill[0]), ("decode", setup.decode[0])):
        tries = [span for span in spans if span.name == name]
        failed, *more = [one for one in tries if one.status.code == Status.STATUS_CODE_ERROR]
        # A D is tried with what P handed over, and without; for the next D a P hands it over anew.
        assert len(more) == 1 and len(tries) == {"prefill": 5, "decode": 4}[name]
        assert not failed.status.message and not failed.events
        said = attributes(failed)
        assert said["error.type"] == "500" and said["http.response.status_code"] == 500
        assert said["server.port"] == engine.address.port
    turns = [span for span in spans if span.kind == SERVER]
    assert [span.status.code for span in turns] == [Status.STATUS_CODE_UNSET] * 2


async def test_a_node_that_is_not_there_is_named_by_the_error(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url, health_interval=0)
    await setup.prefill[0].stop()
    await setup.ask()
    prefill, _, turn = await ended(setup)
    kind = attributes(prefill)["error.type"]
    assert setup.metric("bidir_router_leg_failures_total", leg="prefill", kind=kind) == 1
    assert attributes(turn)["bidir.kv_reuse.reason"] == "peer_gone"


async def test_a_stream_that_breaks_off_has_a_failed_leg(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)

    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(event({"choices": [{"index": 0, "text": "x"}]}))
        assert request.transport is not None
        request.transport.close()
        return answer

    setup.decode[0].script = half
    await setup.ask(stream=True)
    spans = named(await ended(setup))
    kind = attributes(spans["decode"])["error.type"]
    assert setup.metric("bidir_router_leg_failures_total", leg="decode", kind=kind) == 1
    assert spans["decode"].events[0].name == "first_byte"


async def test_a_client_that_goes_ends_all_spans(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)

    async def never(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    setup.decode[0].script = never
    task = asyncio.create_task(setup.ask(stream=True))
    await until(lambda: bool(setup.decode[0].asked))
    task.cancel()
    await setup.decode[0].gone.wait()
    spans = named(await ended(setup))
    assert spans.keys() == {"POST /v1/completions", "prefill", "decode"}
    assert attributes(spans["POST /v1/completions"])["error.type"] == "CancelledError"


async def test_refusals_are_spans_without_legs(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    keys = Security(client_keys=frozenset([key_digest("k")]))
    setup = await make_setup(otlp_traces_endpoint=collector.url, security=keys)
    assert (await setup.ask())[0] == 401
    assert (await setup.ask(headers={"X-API-Key": "k"}, kv_transfer_params={}))[0] == 400
    await setup.client.get(setup.url + "/health")
    statuses = [attributes(span)["http.response.status_code"] for span in await ended(setup)]
    assert statuses == [401, 400]


async def test_nothing_that_a_client_or_an_engine_has_said_is_in_a_trace(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    headers = {
        "Authorization": "Bearer secret-key",
        "X-Request-Id": "secret-request",
        "X-Session-ID": "secret-session",
        "X-Tenant-ID": "secret-tenant",
        "baggage": "secret=baggage",
    }
    body = {"prompt": "secret prompt", "conversation_id": "secret-id", "user": "secret-user"}
    for _ in range(2):
        await setup.ask(path="/v1/completions?secret=query", headers=headers, stream=True, **body)
    assert len(await ended(setup)) == 6
    everything = b"".join(collector.raw)
    assert b"secret" not in everything
    for told in ("turn-1", "elsewhere", "remote_"):
        assert told.encode() not in everything


async def test_a_trace_that_is_not_sampled_goes_on_unsampled(
    make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    await setup.ask(headers={"traceparent": TRACEPARENT[:-2] + "00"})
    for engine in (setup.prefill[0], setup.decode[0]):
        _, trace, _, flags = engine.headers[0]["traceparent"].split("-")
        assert (trace, flags) == (TRACE, "00")
    assert await ended(setup) == []


@pytest.mark.parametrize("sent", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", TRACEPARENT + "-x"])
async def test_a_parent_that_is_none_begins_a_trace(
    sent: str, make_setup: MakeSetup, collector: Collector, ended: Ended
) -> None:
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    await setup.ask(headers={"traceparent": sent, "tracestate": "of=another"})
    spans = named(await ended(setup))
    assert spans["POST /v1/completions"].parent_span_id == b""
    (got,) = setup.decode[0].headers
    assert follows(got["traceparent"], spans["decode"]) and "tracestate" not in got


async def test_the_environment_is_honoured(
    make_setup: MakeSetup, collector: Collector, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    await setup.ask()
    await ended(setup)
    assert collector.resource()["service.name"] == "mine"
    assert collector.headers[0]["content-encoding"] == "gzip"


async def test_a_sampler_of_the_environment_is_honoured(
    make_setup: MakeSetup, collector: Collector, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    setup = await make_setup(otlp_traces_endpoint=collector.url)
    await setup.ask(headers={"traceparent": TRACEPARENT})
    assert await ended(setup) == []


@pytest.fixture(params=["gone", "silent"])
async def bad_collector(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A collector that is not there, or one that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_fails_harms_no_turn_and_is_named_once(
    protocol: str,
    bad_collector: str,
    make_setup: MakeSetup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    # So that several batches fail while the test looks on.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    setup = await make_setup(otlp_traces_endpoint=bad_collector)
    with caplog.at_level(logging.INFO):

        def complaints() -> list[str]:
            return [one.message for one in caplog.records if "traces" in one.message]

        for _ in range(20):
            assert (await setup.ask(stream=True))[0] == 200
        await until(lambda: bool(complaints()), within_s=20)
        for _ in range(20):
            assert (await setup.ask(stream=True))[0] == 200
        await asyncio.wait_for(setup.server.close(), 20)
    lost, *goodbye = complaints()
    assert lost.startswith("traces are lost until their collector answers: ")
    assert [one for one in goodbye if "did not answer in time" not in one] == []
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


async def test_a_collector_that_comes_back_is_named_as_well(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from vllm.bidir.router.telemetry.tracing import ExporterLog, QuietExporter

    results = iter([False, False, True, True, False])

    class Fickle(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            if next(results):
                return SpanExportResult.SUCCESS
            raise ConnectionError

    exporter = QuietExporter(Fickle(), ExporterLog())
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            exporter.export([])
    assert [record.message.split()[1] for record in caplog.records] == ["are", "collector", "are"]


def test_without_the_option_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys; from vllm_bidir_router import *\n"
        "from vllm.bidir.router.app import App\n"
        "from vllm.bidir.router.router import Router\n"
        "from vllm.bidir.router.options import parse\n"
        "App(Router(parse([])))\n"
        "print([name for name in sys.modules if 'opentelemetry' in name or name == 'grpc'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=OVERLAY, check=False
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("endpoint", "protocol", "complaint"),
    [
        ("localhost:4317", "", "must be http or https or grpc://HOST:PORT, not 'localhost:4317'"),
        ("http://", "", "must be http"),
        ("http://h:x", "", "must be http"),
        (
            "grpc://h:4317",
            "http/protobuf",
            "must be http or https://HOST:PORT, not 'grpc://h:4317'",
        ),
        ("http://key@h:4317", "", "must hold no key"),
        ("http://h:4317", "http/json", f"cannot be used: {PROTOCOL} must be grpc or http/protobuf"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(
    endpoint: str,
    protocol: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    with pytest.raises(SystemExit) as caught:
        parse(["--otlp-traces-endpoint", endpoint])
    assert caught.value.code == 2
    assert f"--otlp-traces-endpoint {complaint}" in capsys.readouterr().err


def test_the_endpoint_may_be_named_as_engines_name_theirs() -> None:
    for endpoint in ("grpc://h:4317", "http://h:4317", "https://[::1]:4317"):
        assert parse(["--otlp-traces-endpoint", endpoint]).otlp_traces_endpoint == endpoint
    assert parse([]).otlp_traces_endpoint is None


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_options, "_NEEDED", ("no_such_package.sdk",))
    with pytest.raises(ValueError, match="pip install opentelemetry-sdk opentelemetry-exporter"):
        trace_options.check("http://h:4317")


def test_a_variable_that_opentelemetry_refuses_is_an_error_of_the_command() -> None:
    code = (
        "import os, sys; os.environ['OTEL_PROPAGATORS'] = 'bogus'\n"
        "sys.argv = ['r', '--port', '0', '--otlp-traces-endpoint', 'http://127.0.0.1:4317']\n"
        "from vllm_bidir_router import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=OVERLAY,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "OpenTelemetry cannot be set up: Propagator bogus not found" in done.stderr
    assert "look at the OTEL_ environment variables" in done.stderr
