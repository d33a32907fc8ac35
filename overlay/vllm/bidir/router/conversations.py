# SPDX-License-Identifier: Apache-2.0
"""What the router remembers of a conversation: where its last turn's KV lies."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.leases import Ended, Lease, Leases

Key = bytes


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """D's kv_transfer_params of a finished turn, the node that keeps the blocks, and until when.

    With a lease that is renewed there is no such time: `expires` is infinite. The params are kept
    encoded: as objects a long turn's would take five times the memory. `tokens` lie there, 0 if
    that is not known.
    """

    encoded: bytes
    node: str
    expires: float
    lease: Lease | None = None
    tokens: int = 0

    @property
    def params(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.encoded)
        return decoded


def conversation_key(tenant: str, conversation: str) -> Key:
    """A conversation's key; ids of different tenants never meet.

    `tenant` is the Authorization header, of which only the digest is kept.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(len(tenant).to_bytes(8, "little") + tenant.encode("utf-8", "surrogateescape"))
    digest.update(conversation.encode("utf-8", "surrogateescape"))
    return digest.digest()


class Conversations:
    """Kept turns by conversation, bounded in number; the least recently used go first.

    A kept turn without a lease lives `ttl` seconds, one with a lease until the conversation has
    been idle for `idle_timeout` seconds or D has lost it. Whatever ends one gives its lease back.
    """

    def __init__(
        self,
        limit: int,
        ttl: float,
        idle_timeout: float,
        leases: Leases,
        clock: Callable[[], float],
    ) -> None:
        self._limit = limit
        self._ttl = ttl
        self._idle_timeout = idle_timeout
        self._leases = leases
        self._clock = clock
        self._kept: OrderedDict[Key, KeptTurn | Reason] = OrderedDict()
        self._under_way: dict[Key, set[object]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def under_way(self, key: Key | None, turn: object) -> Iterator[None]:
        """While a turn runs, its conversation is not idle, and can be told to end with it."""
        if key is None:
            yield
            return
        self._under_way.setdefault(key, set()).add(turn)
        try:
            yield
        finally:
            turns = self._under_way.get(key, set())
            turns.discard(turn)
            if not turns:
                self._under_way.pop(key, None)
            self._touch(self._kept.get(key))

    def goes_on(self, key: Key, turn: object) -> bool:
        """Whether a turn under way still has its conversation, which may have been forgotten."""
        return turn in self._under_way.get(key, ())

    def get(self, key: Key) -> KeptTurn | Reason:
        """The kept turn, or why there is none. It stays: a prefill that fails loses nothing."""
        kept = self._kept.get(key)
        if kept is None:
            return Reason.FIRST_TURN
        if isinstance(kept, KeptTurn) and kept.expires <= self._clock():
            del self._kept[key]
            return Reason.EXPIRED
        self._kept.move_to_end(key)
        self._touch(kept)
        return kept

    def tell(self, key: Key) -> dict[str, Any] | None:
        """What is kept of a conversation, for somebody who asks; None if nothing is known."""
        kept = self._kept.get(key)
        if isinstance(kept, Reason):
            return {"kept": False, "reason": kept.value}
        if kept is None:
            return {"kept": False, "reason": "first_turn"} if key in self._under_way else None
        left = kept.expires - self._clock()
        if left <= 0:
            return {"kept": False, "reason": Reason.EXPIRED.value}
        return {
            "kept": True,
            "node": kept.node,
            "leased": kept.lease is not None,
            "seconds_left": None if math.isinf(left) else round(left, 1),
        }

    def put(self, key: Key, params: dict[str, Any], node: str) -> None:
        """Keep a turn that has just ended; it supersedes the one before."""
        now = self._clock()
        lease = self._leases.begin(node, params, key, now)
        expires = now + self._ttl if lease is None else math.inf
        encoded, tokens = msgspec.json.encode(params), _tokens(params)
        self._set(key, KeptTurn(encoded, node, expires, lease, tokens))

    def put_nothing(self, key: Key, reason: Reason) -> None:
        """A turn has ended and left no KV, and why; what an earlier one has left stays."""
        before = self._kept.get(key)
        self._set(key, before if isinstance(before, KeptTurn) else reason)

    def put_left(self, key: Key, params: dict[str, Any], node: str) -> None:
        """A turn has ended on a node that is off the list: what it keeps is not needed."""
        lease = self._leases.begin(node, params, key, self._clock())
        if lease is not None:
            self._leases.give_back(lease, Ended.DRAINED)
        self.put_nothing(key, Reason.PEER_GONE)

    def put_last(self, key: Key | None, params: dict[str, Any], node: str) -> None:
        """A turn has ended that no other follows: neither it nor one before is kept."""
        lease = self._leases.begin(node, params, key or b"", self._clock())
        if lease is not None:
            self._leases.give_back(lease, Ended.ENDED)
        if key is not None:
            self.forget(key, Ended.ENDED)

    def forget(self, key: Key, why: Ended) -> bool:
        """The conversation is over, turns under way leave nothing; False if it is not known."""
        kept, turns = self._kept.pop(key, None), self._under_way.pop(key, None)
        self._end(kept, why)
        return kept is not None or turns is not None

    def lost(self, lease: Lease) -> None:
        """D keeps this turn no longer."""
        if self._leases.lost(lease):
            self._expire(lease)

    def end_idle(self, node: str) -> None:
        """End the turns on this node whose conversations have been silent for too long."""
        before = self._clock() - self._idle_timeout
        for lease in list(self._leases.of(node).living.values()):
            if lease.used <= before and lease.key not in self._under_way:
                self._leases.give_back(lease, Ended.IDLE)
                self._expire(lease)

    def leave_node(self, node: str) -> None:
        """Nothing that this node keeps is needed any more: it is taken off the list."""
        for key, kept in self._kept.items():
            if isinstance(kept, KeptTurn) and kept.node == node:
                self._kept[key] = Reason.PEER_GONE
                self._end(kept, Ended.DRAINED)
        # Also what no conversation remembers any more.
        for lease in list(self._leases.of(node).living.values()):
            self._leases.give_back(lease, Ended.DRAINED)

    def _expire(self, lease: Lease) -> None:
        if _lease_of(self._kept.get(lease.key)) is lease:
            self._kept[lease.key] = Reason.EXPIRED

    def _touch(self, kept: KeptTurn | Reason | None) -> None:
        lease = _lease_of(kept)
        if lease is not None:
            lease.used = self._clock()

    def _set(self, key: Key, what: KeptTurn | Reason) -> None:
        before = self._kept.get(key)
        self._kept[key] = what
        self._kept.move_to_end(key)
        if _lease_of(before) is not _lease_of(what):
            self._end(before, Ended.SUPERSEDED)
        while len(self._kept) > self._limit:
            _, evicted = self._kept.popitem(last=False)
            self._end(evicted, Ended.EVICTED)

    def _end(self, kept: KeptTurn | Reason | None, why: Ended) -> None:
        lease = _lease_of(kept)
        if lease is not None:
            self._leases.give_back(lease, why)


def _tokens(params: dict[str, Any]) -> int:
    """How many tokens D says that it keeps; 0 if it says nothing of use."""
    said = params.get("remote_num_tokens")
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else 0


def _lease_of(kept: KeptTurn | Reason | None) -> Lease | None:
    return kept.lease if isinstance(kept, KeptTurn) else None
