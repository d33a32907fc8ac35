# SPDX-License-Identifier: Apache-2.0
"""The state that several routers share, in Redis: lines, and what Responses continue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.conversations.conversations import Key
from vllm.bidir.router.state.lines import SharedLines
from vllm.bidir.router.state.redis_link import RedisLink
from vllm.bidir.router.state.wire import (
    MOST_ANCESTORS,
    NotOursError,
    WireResponse,
    encode,
    read_response,
)
from vllm.bidir.router.turns.responses import Responses

if TYPE_CHECKING:
    from redis.asyncio.client import Pipeline

_EXPIRE = "for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end"


class Shared:
    """A `State` in Redis. `ttl_s`: how long a response is kept after it was last continued; 0:
    responses stay with the router that has answered them."""

    shared = True

    def __init__(
        self, link: RedisLink, lines: SharedLines, responses: Responses, ttl_s: float
    ) -> None:
        self._link = link
        self._lines = lines
        self._responses = responses
        self._ttl_s = int(ttl_s)
        self.bring = lines.bring
        self.bring_named = lines.bring_named
        self.look_again = lines.look_again
        self.tell = lines.tell
        self.forget = lines.forget
        self.give_up = lines.give_up

    async def bring_responses(self, tenant: str, request: TurnRequest) -> None:
        """The responses that a request continues, as far as they are not known here."""
        key = self._responses.named(tenant, request)
        if key is not None and self._ttl_s and self._responses.line(key)[1] is not None:
            await self._link.attempt(lambda: self._bring(key))

    async def tell_response(self, key: Key) -> None:
        """A response that has been kept, and that those before it are still needed."""
        items = self._responses.items(key)
        if items is None or not self._ttl_s:
            return
        before, missing = self._responses.line(key)
        ancestors = [*before[1:], *([] if missing is None else [missing])]
        response = encode(WireResponse(ancestors[:MOST_ANCESTORS], items))

        def write(pipeline: Pipeline) -> None:
            pipeline.set(self._lines.name("r", key), response, ex=self._ttl_s)
            if ancestors:
                names = [self._lines.name("r", one) for one in ancestors]
                pipeline.eval(_EXPIRE, len(names), *names, self._ttl_s)

        await self._link.attempt(lambda: self._link.exchange(write))

    async def _bring(self, key: Key) -> None:
        missing: Key | None = key
        while missing is not None:
            response = await self._ask([missing])
            wanted = [one for one in response if self._responses.items(one) is None]
            await self._ask(wanted)
            before, missing = missing, self._responses.line(key)[1]
            if missing == before:
                return

    async def _ask(self, keys: list[Key]) -> list[Key]:
        """Adopt these, the first last so that it is the last to go; the ancestors of the first."""
        if not keys:
            return []
        names = [self._lines.name("r", key) for key in keys]
        (answers,) = await self._link.exchange(lambda to: to.mget(names))
        found = [self._read(answer) for answer in answers or ()]
        for key, response in reversed(list(zip(keys, found, strict=False))):
            if response is not None:
                previous = response.ancestors[0] if response.ancestors else None
                self._responses.adopt(key, previous, response.items)
        return found[0].ancestors if found and found[0] is not None else []

    def _read(self, data: Any) -> WireResponse | None:
        try:
            return read_response(data)
        except NotOursError:
            self._link.complain("value", "a response")
            return None
