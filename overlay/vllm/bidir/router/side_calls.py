# SPDX-License-Identifier: Apache-2.0
"""Calls that are no turns and that any decode node can answer: models, tokenize, count_tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm.bidir.router.clients.access import Access
from vllm.bidir.router.clients.body import read_body
from vllm.bidir.router.clients.client_params import refuse_params
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.headers import REQUEST_ID, to_engine
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.nodes.calls import Calls, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.process.in_time import in_time

GET = ("/v1/models",)
POST = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
# A long text takes its time; which models there are is known.
_POST_S, _GET_S = 60.0, 10.0


class SideCalls:
    """Asks decode nodes in turn until one answers. `nodes`: in which order, anew for each call.

    One that takes too long, or goes down meanwhile, has not answered.
    """

    def __init__(self, calls: Calls, access: Access, nodes: Callable[[], Iterable[Node]]) -> None:
        self._calls = calls
        self._access = access
        self._nodes = nodes

    async def serve(self, request: Request) -> Response:
        """The first answer as it is; ClientError 503 if there is none."""
        body = await read_body(request) if request.method == "POST" else b""
        refuse_params(body)
        named = request.named
        headers = to_engine(request.headers, self._access.authorization(request.headers))
        headers |= {REQUEST_ID: named, "Content-Type": "application/json"}
        for node in self._nodes():
            try:
                # HEAD asks for the same as GET: the server leaves the body out.
                method, limit_s = ("POST", _POST_S) if request.method == "POST" else ("GET", _GET_S)
                asking = self._calls.ask(node, method, request.path, headers, body)
                answer = await in_time(asking, limit_s)
            except Unreachable:
                continue
            said = {**answer.headers, REQUEST_ID: named}
            return Response(answer.status, answer.body, answer.content_type, said)
        raise ClientError(503, "No decode node can be reached. Try again later.")
