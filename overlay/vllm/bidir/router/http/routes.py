# SPDX-License-Identifier: Apache-2.0
"""Which paths there are, and what serves them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request

Handler = Callable[[Request], Awaitable[Answered]]

# What stands for the rest of a path, slashes too.
_REST = "{id}"
_LONGEST = 200


class Routes:
    """Paths by their pattern: a path, or one that ends in `{id}`, which is at least one character.

    A GET is a HEAD as well: the connection leaves the body out.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, dict[str, Handler]] = {}
        self._by_beginning: dict[str, dict[str, Handler]] = {}

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        """Have it serve these requests."""
        known, key = self._by_path, pattern
        if pattern.endswith(_REST):
            known, key = self._by_beginning, pattern[: -len(_REST)]
        handlers = known.setdefault(key, {})
        handlers[method] = handler
        if method == "GET":
            handlers["HEAD"] = handler

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Methods and patterns."""
        for rest, known in (("", self._by_path), (_REST, self._by_beginning)):
            for key, handlers in known.items():
                for method in handlers:
                    yield method, key + rest

    def find(self, request: Request) -> Handler:
        """What serves it, and its `route` and `rest`. Where nothing does, what refuses it:
        ClientError 404, 405."""
        pattern, rest, handlers = self._of(request)
        handler = handlers.get(request.method)
        if handler is not None:
            request.route, request.rest = pattern, rest
            return handler
        path = request.path[:_LONGEST]
        if not handlers:
            return _refusing(ClientError(404, f"Unknown path {path}."))
        allowed = ", ".join(sorted(handlers))
        return _refusing(ClientError(405, f"Use {allowed} for {path}.", headers={"Allow": allowed}))

    def _of(self, request: Request) -> tuple[str, str, dict[str, Handler]]:
        # As it was sent: who stands before us, and guards some of them, may compare it so.
        handlers = self._by_path.get(request.raw_path)
        if handlers is not None:
            return request.raw_path, "", handlers
        path = request.path
        for beginning, handlers in self._by_beginning.items():
            if request.raw_path.startswith(beginning) and len(path) > len(beginning):
                return beginning + _REST, path[len(beginning) :], handlers
        return "", "", {}


def _refusing(error: ClientError) -> Handler:
    async def refuse(request: Request) -> Answered:
        raise error

    return refuse
