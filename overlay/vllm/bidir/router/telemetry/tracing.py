# SPDX-License-Identifier: Apache-2.0
"""Sends the spans of turns to an OTLP collector, in a thread of its own.

OpenTelemetry is imported only where traces are asked for. The environment variables of its SDK
count: the sampler, the batches, the protocol (gRPC unless it says http/protobuf, as in vLLM), the
headers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry import propagate
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.routes import Handler
from vllm.bidir.router.telemetry.spans import CURRENT
from vllm.bidir.router.telemetry.trace_options import GRPC, protocol
from vllm.bidir.router.telemetry.turn_spans import TurnSpans

logger = logging.getLogger("vllm_bidir_router")

# At the end the collector has so long for the last spans.
_GOODBYE_S = 2.0
_LONGEST = 300


class Tracing:
    """The traces of one router; `trace_options.start` makes it."""

    def __init__(self, endpoint: str, version: str) -> None:
        named = {} if _service_is_named() else {"service.name": "vllm-bidir-router"}
        resource = Resource.create({**named, "service.version": version})
        # Not at the end of the process: a collector that hangs would keep it.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._log = ExporterLog()
        self._provider.add_span_processor(
            BatchSpanProcessor(QuietExporter(_exporter(endpoint), self._log))
        )
        self._tracer = self._provider.get_tracer("vllm.bidir.router", version)
        self._propagator = propagate.get_global_textmap()
        self._log.take_over()

    async def trace(self, request: Request, handler: Handler) -> Answered:
        """Around all else that serves a turn: every answer, refusals too, is one span."""
        spans = TurnSpans(request, self._tracer, self._propagator)
        token = CURRENT.set(spans)
        try:
            response = await handler(request)
        except BaseException as error:
            spans.broken(type(error).__name__)
            raise
        else:
            spans.answered(response.status)
            return response
        finally:
            CURRENT.reset(token)
            spans.close()

    async def close(self) -> None:
        """Send what is left, as well as it goes within two seconds."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        deadline = time.monotonic() + _GOODBYE_S
        while ending.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if ending.is_alive():
            logger.warning("the collector of traces did not answer in time; the last are lost")
        self._log.give_back()


class ExporterLog(logging.Handler):
    """Takes OpenTelemetry's own log lines, one for each batch that fails, and keeps the last.

    Those that are not the exporters' may quote a client's headers, and end here.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self._source = logging.getLogger("opentelemetry")

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter."):
            self.last = record.getMessage()[:_LONGEST]

    def take_over(self) -> None:
        self._source.addHandler(self)
        self._source.propagate = False

    def give_back(self) -> None:
        self._source.removeHandler(self)
        self._source.propagate = True


class QuietExporter(SpanExporter):
    """Another exporter, whose failures are logged once until it works again."""

    def __init__(self, exporter: SpanExporter, log: ExporterLog) -> None:
        self._exporter = exporter
        self._log = log
        self._works = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._log.last = type(error).__name__
            result = SpanExportResult.FAILURE
        works = result is SpanExportResult.SUCCESS
        if self._works and not works:
            logger.warning("traces are lost until their collector answers: %s", self._log.last)
        elif works and not self._works:
            logger.info("the collector of traces answers again")
        self._works = works
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    if protocol() == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter(endpoint)


def _service_is_named() -> bool:
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").replace(" ", "")
    return "OTEL_SERVICE_NAME" in os.environ or "service.name=" in given
