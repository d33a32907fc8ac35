# SPDX-License-Identifier: Apache-2.0
"""A turn as OpenTelemetry spans: the request, waiting for room, the prefill leg, the decode leg.

Attributes have the names of the semantic conventions where there is one, else `bidir.…`. They hold
no prompt, no params, no key and no id.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.clients.reuse import Reuse
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.telemetry.spans import Spans

_LONGEST_MODEL = 256


class TurnSpans(Spans):
    """The span of one request and those below it. `close` ends them all."""

    def __init__(self, request: Request, tracer: Tracer, propagator: TextMapPropagator) -> None:
        self._tracer = tracer
        self._propagator = propagator
        self._reuse: Reuse | None = None
        self._leg: Span | None = None
        self._leg_begun = 0.0
        parent = propagator.extract(request.headers)
        self._turn = tracer.start_span(
            f"{request.method} {request.path}",
            parent,
            SpanKind.SERVER,
            {
                "http.request.method": request.method,
                "http.route": request.path,
                "url.path": request.path,
                "url.scheme": "https" if request.client.secure else "http",
            },
        )
        self._context = set_span_in_context(self._turn, parent)

    def about(self, request: TurnRequest, reuse: Reuse) -> None:
        self._reuse = reuse
        operation = "text_completion" if request.path == "/v1/completions" else "chat"
        self._turn.set_attribute("gen_ai.operation.name", operation)
        model = request.fields.get("model")
        if model is not None:
            name = msgspec.json.decode(model)
            self._turn.set_attribute("gen_ai.request.model", str(name)[:_LONGEST_MODEL])

    @contextmanager
    def waiting(self, role: str) -> Iterator[None]:
        span = self._tracer.start_span("queue", self._context, attributes={"bidir.role": role})
        try:
            yield
        except ClientError as refusal:
            _mark(span, str(refusal.status))
            raise
        except BaseException as error:
            _mark(span, type(error).__name__)
            raise
        finally:
            span.end()

    def leg_begins(
        self, leg: str, node: Node, path: str, headers: dict[str, str]
    ) -> dict[str, str]:
        self._end_leg()
        self._leg_begun = time.monotonic()
        self._leg = self._tracer.start_span(
            leg,
            self._context,
            SpanKind.CLIENT,
            {
                "http.request.method": "POST",
                "server.address": node.address.host,
                "server.port": node.address.port,
                "url.full": node.url(path),
            },
        )
        # What the client sent of a trace has been taken over, or was of no use.
        taken = self._propagator.fields
        sent = {name: value for name, value in headers.items() if name.lower() not in taken}
        self._propagator.inject(sent, set_span_in_context(self._leg, self._context))
        return sent

    def first_byte(self) -> None:
        if self._leg is not None:
            seconds = time.monotonic() - self._leg_begun
            self._leg.add_event("first_byte")
            self._leg.set_attribute("bidir.first_byte_seconds", seconds)
            self._leg.set_attribute("http.response.status_code", 200)

    def leg_ends(self, status: int) -> None:
        if self._leg is not None:
            self._leg.set_attribute("http.response.status_code", status)
            if status >= 400:
                _mark(self._leg, str(status))
        self._end_leg()

    def leg_failed(self, kind: str) -> None:
        if self._leg is not None:
            _mark(self._leg, kind)
        self._end_leg()

    def answered(self, status: int) -> None:
        """The request has been answered with this HTTP status, maybe not to the end."""
        self._turn.set_attribute("http.response.status_code", status)
        if status >= 500:
            _mark(self._turn, str(status))

    def broken(self, kind: str) -> None:
        """The request has not been answered, such as for a client that has gone."""
        _mark(self._turn, kind)

    def close(self) -> None:
        """The turn is over."""
        self._end_leg()
        reuse = self._reuse
        if reuse is not None:
            self._turn.set_attribute("bidir.kv_reuse", reuse.outcome)
            if reuse.reason is not None:
                self._turn.set_attribute("bidir.kv_reuse.reason", reuse.reason.value)
            if reuse.tokens is not None:
                self._turn.set_attribute("bidir.kv_reuse.tokens", reuse.tokens)
            if reuse.prompt_tokens is not None:
                self._turn.set_attribute("gen_ai.usage.input_tokens", reuse.prompt_tokens)
        self._turn.end()

    def _end_leg(self) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.end()


def _mark(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)
