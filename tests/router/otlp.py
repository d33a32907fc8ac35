"""OTLP collectors on loopback, of both protocols, that keep the spans which they are sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER, CLIENT, INTERNAL = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL


@dataclass
class Collector:
    """`url` is what --otlp-traces-endpoint is given. `raw`: every request as it came."""

    url: str = ""
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        self.raw.append(body)
        self.headers.append(headers)

    def requests(self) -> list[messages.ExportTraceServiceRequest]:
        return [messages.ExportTraceServiceRequest.FromString(body) for body in self.raw]

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, Any]:
        return attributes(self.requests()[0].resource_spans[0].resource)


def attributes(one: Any) -> dict[str, Any]:
    """Of a span, an event or a resource, as Python's values."""
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in one.attributes
    }


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take(request.SerializeToString(), dict(context.invocation_metadata()))
            return messages.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    service.add_TraceServiceServicer_to_server(Service(), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
