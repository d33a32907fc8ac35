# SPDX-License-Identifier: Apache-2.0
"""The state that several routers share, in Redis.

Each router serves from its own memory. Before a turn it brings in what another router has kept
since, and tells what it has kept after it; in between nobody waits for Redis. By key (a prefix,
then):

    l:DIGEST  the key of the line whose messages have this digest
    c:KEY     the last turn of a line (`shared_wire`)         p:KEY  what P is offered of it
    o:KEY     the router that has served the line last, and renews its lease
    t:DIGEST  the router that was the first to go on from these messages
    f:KEY     a named conversation's lines beside its first
    r:KEY     a response's items (`shared`)

Who serves a turn takes the line over. The router before it goes on renewing until D says that the
lease is gone, or the conversation is idle there; it gives back what is still its own only.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.bidir.reasons import Reason
from vllm.bidir.router.conversations.conversations import Conversations, Key
from vllm.bidir.router.conversations.identity import Identities, Place, Trace
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.side_channels import SideChannels
from vllm.bidir.router.state.redis_link import RedisLink
from vllm.bidir.router.state.wire import (
    VERSION,
    NotOursError,
    WireTurn,
    encode,
    read_key,
    read_params,
    read_turn,
    wire_turn,
)
from vllm.bidir.router.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from redis.asyncio.client import Pipeline

# A parent's messages are these minus a few; an edit deeper than this begins a line of its own.
_LOOK_BACK = 64
_MOST_FORKS = 16
# Longer than any router waits before it gives an idle conversation back.
_GRACE_S = 60.0

_GIVE_UP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return 1
"""


class SharedLines:
    """Lines and their last turns. `ttl_s`: how long after its last turn one is kept at most."""

    def __init__(
        self,
        link: RedisLink,
        prefix: str,
        ttl_s: float,
        conversations: Conversations,
        identities: Identities,
        side_channels: SideChannels,
        node: Callable[[str], Node | None],
        metrics: Metrics,
    ) -> None:
        self._link = link
        self._prefix = f"{prefix}{VERSION}:"
        self._ttl_s = max(1, int(ttl_s + _GRACE_S))
        self._conversations = conversations
        self._identities = identities
        self._side_channels = side_channels
        self._node = node
        self._metrics = metrics
        self._me = secrets.token_bytes(8)
        self._claims: set[asyncio.Task[Any]] = set()

    async def bring(self, trace: Trace) -> None:
        """The last turn of the line that a request goes on with; it is this router's from now."""
        await self._link.attempt(lambda: self._bring(trace))

    async def bring_named(self, root: Key) -> None:
        """Those of all lines of a named conversation; they stay whose they are."""
        await self._link.attempt(lambda: self._bring_named(root))

    async def look_again(self, place: Place) -> None:
        """Whether another router has kept a turn of this line meanwhile."""
        await self._link.attempt(lambda: self._look_again(place))

    async def tell(self, place: Place, key: Key) -> None:
        """What has been kept of a turn."""
        kept = self._conversations.look(key)
        if kept is not None:
            await self._link.attempt(lambda: self._tell(place, key, kept))

    async def forget(self, keys: Iterable[Key]) -> None:
        """These are over, whosever they were."""
        names = [self.name(kind, key) for key in keys for kind in "cpof"]
        if names:
            await self._link.attempt(lambda: self._link.exchange(lambda to: to.delete(*names)))

    async def give_up(self, keys: Iterable[Key]) -> set[Key]:
        """Those that are still this router's: they are over. None while nobody can say."""
        wanted = list(keys)

        def ask(pipeline: Pipeline) -> None:
            for key in wanted:
                names = [self.name(kind, key) for kind in "ocp"]
                pipeline.eval(_GIVE_UP, 3, *names, self._me)

        answers = await self._link.attempt(lambda: self._link.exchange(ask))
        return {key for key, answer in zip(wanted, answers or (), strict=False) if answer == 1}

    async def _bring(self, trace: Trace) -> None:
        digests = list(reversed(trace.chain[-_LOOK_BACK:]))
        root = trace.root

        def ask(pipeline: Pipeline) -> None:
            if root is not None:
                pipeline.mget(self._line_names(root))
            if digests:
                pipeline.mget([self.name("l", digest) for digest in digests])

        answers = await self._link.exchange(ask)
        if root is not None and not isinstance(answers[0], list):
            answers[0] = [None, None]
        pointers = (answers[-1] or []) if digests else []
        matched, key = self._first(digests, pointers)
        if root is not None and (key is None or key == root):
            found = digests[matched : matched + 1] if key is not None else []
            await self._take(root, root, answers[0], found)
        elif key is not None:
            await self._bring_line(key, root, digests[matched : matched + 1], takes=True)

    def _first(self, digests: Sequence[bytes], pointers: Sequence[Any]) -> tuple[int, Key | None]:
        """The longest part of the messages that is known, and the line that it belongs to."""
        for number, pointer in enumerate(pointers[: len(digests)]):
            try:
                key = read_key(pointer)
            except NotOursError:
                self._link.complain("value", "the key of a line")
                continue
            if key is not None:
                return number, key
        return 0, None

    async def _bring_line(
        self, key: Key, root: Key | None, digests: Sequence[bytes] = (), takes: bool = False
    ) -> None:
        (answers,) = await self._link.exchange(lambda to: to.mget(self._line_names(key)))
        if isinstance(answers, list):
            await self._take(key, root, answers, digests, takes)

    async def _take(
        self,
        key: Key,
        root: Key | None,
        answers: Sequence[Any],
        digests: Sequence[bytes],
        takes: bool = True,
    ) -> None:
        """Adopt a line if it is newer than what is known here, and claim it."""
        data, owner = answers
        try:
            turn = read_turn(data)
        except NotOursError:
            self._link.complain("value", "a turn")
            return
        if turn is None or turn.root != root:
            return
        known = self._conversations.look(key)
        if not isinstance(known, KeptTurn) or known.stamp < turn.stamp:
            kept = await self._kept(key, turn)
            # While it was asked for, a turn of this router may have ended.
            if self._conversations.look(key) == known:
                self._identities.adopt(key, root, turn.tip, digests)
                self._conversations.adopt(key, kept)
                if owner != self._me and isinstance(kept, KeptTurn):
                    self._metrics.taken_over.inc()
        if takes and owner != self._me:
            self._claim(key, turn.tip)

    async def _kept(self, key: Key, turn: WireTurn) -> KeptTurn | Reason:
        """A turn with its params, if they are there and can be believed; else D is asked later."""
        if turn.reason is not None:
            return turn.reason
        node = self._node(turn.node)
        if node is None:
            return Reason.PEER_GONE
        (data,) = await self._link.exchange(lambda to: to.get(self.name("p", key)))
        try:
            params = read_params(data, turn.lease_id)
        except NotOursError:
            self._link.complain("value", "params")
            params = None
        if params is not None:
            params = self._side_channels.recognise(params, node.name, node.address.host)
        left = turn.until - time.time()
        kept = KeptTurn(
            turn.node,
            None,
            turn.lease_id,
            turn.renewed_s,
            self._conversations.until(left),
            turn.tokens,
            turn.stamp,
        )
        return kept if params is None else kept.with_params(params)

    async def _look_again(self, place: Place) -> None:
        parent = place.matched or place.root
        if parent is None or place.whole in (None, place.matched):
            # A beginning, no messages, or the last turn's once more: nobody is the first.
            await self._bring_line(place.key, place.root)
            return
        name = self.name("t", parent)

        def ask(pipeline: Pipeline) -> None:
            pipeline.set(name, self._me, nx=True, ex=self._ttl_s)
            pipeline.get(name)
            pipeline.mget(self._line_names(place.key))

        _, first, answers = await self._link.exchange(ask)
        if isinstance(answers, list):
            await self._take(place.key, place.root, answers, (), takes=False)
        if first not in (None, self._me):
            self._identities.part(place)

    async def _bring_named(self, root: Key) -> None:
        def ask(pipeline: Pipeline) -> None:
            pipeline.mget(self._line_names(root))
            pipeline.zrange(self.name("f", root), 0, _MOST_FORKS - 1)

        first, forks = await self._link.exchange(ask)
        if isinstance(first, list):
            await self._take(root, root, first, (), takes=False)
        for fork in forks or ():
            try:
                key = read_key(fork)
            except NotOursError:
                self._link.complain("value", "a line of a conversation")
                continue
            if key is not None:
                await self._bring_line(key, root)

    async def _tell(self, place: Place, key: Key, kept: KeptTurn | Reason) -> None:
        stamp = kept.stamp if isinstance(kept, KeptTurn) else int(time.time())
        expires = kept.expires if isinstance(kept, KeptTurn) else 0.0
        tip = place.whole or key
        until = time.time() + self._conversations.left(expires)
        turn = encode(wire_turn(kept, stamp, tip, place.root, until))
        params = kept.encoded if isinstance(kept, KeptTurn) else None

        def write(pipeline: Pipeline) -> None:
            if params is not None:
                pipeline.set(self.name("p", key), params, ex=self._ttl_s)
            pipeline.set(self.name("c", key), turn, ex=self._ttl_s)
            pipeline.set(self.name("o", key), self._me, ex=self._ttl_s)
            pipeline.set(self.name("l", tip), key, ex=self._ttl_s)
            if place.root is not None and key != place.root:
                pipeline.zadd(self.name("f", place.root), {key: stamp})
                pipeline.zremrangebyrank(self.name("f", place.root), 0, -1 - _MOST_FORKS)
                pipeline.expire(self.name("f", place.root), self._ttl_s)

        await self._link.exchange(write)

    def _claim(self, key: Key, tip: bytes) -> None:
        """Say that this router has the line now; nobody waits for it."""

        def write(pipeline: Pipeline) -> None:
            pipeline.set(self.name("o", key), self._me, ex=self._ttl_s)
            for kind, of in (("c", key), ("p", key), ("l", tip)):
                pipeline.expire(self.name(kind, of), self._ttl_s)

        claim = asyncio.ensure_future(self._link.attempt(lambda: self._link.exchange(write)))
        self._claims.add(claim)
        claim.add_done_callback(self._claims.discard)

    def _line_names(self, key: Key) -> list[str]:
        return [self.name("c", key), self.name("o", key)]

    def name(self, kind: str, key: Key) -> str:
        """How something is called in Redis."""
        return f"{self._prefix}{kind}:{key.hex()}"
