# SPDX-License-Identifier: Apache-2.0
"""What the router remembers of a conversation: where its last turn's KV lies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from vllm.bidir.reasons import Reason
from vllm.bidir.router.conversations.kept_params import KeptParams
from vllm.bidir.router.conversations.leases import Ended, Leases, terms_of
from vllm.bidir.router.conversations.recent import Recent
from vllm.bidir.router.conversations.record import KeptTurn, Records
from vllm.bidir.router.nodes.params import as_offered

Key = bytes

# One byte more, and Python takes 16 more for each.
DIGEST_BYTES = 15


def conversation_key(tenant: str, conversation: str) -> Key:
    """A conversation's key; ids of different tenants never meet.

    `tenant` is the Authorization header, of which only the digest is kept.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(len(tenant).to_bytes(8, "little") + tenant.encode("utf-8", "surrogateescape"))
    digest.update(conversation.encode("utf-8", "surrogateescape"))
    return digest.digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class Bounds:
    """What conversations may take: so many, and so many bytes of D's params.

    A kept turn without a lease lives `ttl` seconds, one with a lease until the conversation has
    been idle for `idle_timeout` seconds or D has lost it.
    """

    conversations: int = 100_000
    params: int = 8 << 20
    ttl: float = 450.0
    idle_timeout: float = 600.0


class Conversations:
    """Kept turns by conversation; the least recently used go first.

    Whatever ends one gives its lease back.
    """

    def __init__(self, bounds: Bounds, leases: Leases, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._leases = leases
        self._clock = clock
        self._records = Records()
        self._kept: Recent[Key, bytes | Reason] = Recent(bounds.conversations)
        self._params = KeptParams(bounds.params)
        self._under_way: dict[Key, set[object]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def params_bytes(self) -> int:
        """Memory that D's params take."""
        return self._params.bytes

    def begins(self, key: Key | None, turn: object) -> None:
        """Until this turn `ends`, its conversation is not idle, and can be told to end with it."""
        if key is not None:
            self._under_way.setdefault(key, set()).add(turn)

    def ends(self, key: Key | None, turn: object) -> None:
        """The turn has ended, in whatever way."""
        if key is None:
            return
        turns = self._under_way.get(key, set())
        turns.discard(turn)
        if not turns:
            self._under_way.pop(key, None)
        self._touch(key)

    def goes_on(self, key: Key, turn: object) -> bool:
        """Whether a turn under way still has its conversation, which may have been forgotten."""
        return turn in self._under_way.get(key, ())

    def get(self, key: Key) -> KeptTurn | Reason:
        """The kept turn, or why there is none. It stays: a prefill that fails loses nothing.

        Its params may have to be asked for.
        """
        kept = self._kept.get(key)
        if kept is None:
            return Reason.FIRST_TURN
        if isinstance(kept, Reason):
            self._kept.set(key, kept)
            return kept
        turn = self._records.unpack(kept)
        if turn.renewed_s is None and turn.expires <= self._clock():
            self._drop(key)
            return Reason.EXPIRED
        encoded = self._params.get(key)
        if encoded is None and turn.lease_id is None:
            self._drop(key)
            return Reason.EVICTED
        self._touch(key)
        return replace(turn, encoded=encoded)

    def tell(self, key: Key) -> dict[str, Any] | None:
        """What is kept of a conversation, for somebody who asks; None if nothing is known."""
        kept = self._kept.get(key)
        if isinstance(kept, Reason):
            return {"kept": False, "reason": kept.value}
        if kept is None:
            return {"kept": False, "reason": "first_turn"} if key in self._under_way else None
        turn = self._records.unpack(kept)
        leased = turn.renewed_s is not None
        left = turn.expires - self._clock()
        if not leased and left <= 0:
            return {"kept": False, "reason": Reason.EXPIRED.value}
        return {
            "kept": True,
            "node": turn.node,
            "leased": leased,
            "seconds_left": None if leased else round(left, 1),
        }

    def left(self, expires: float) -> float:
        """Seconds until a turn without a lease ends."""
        return min(max(expires - self._clock(), 0.0), self._bounds.ttl)

    def until(self, left: float) -> float:
        """When a turn ends that has so many seconds left, as somebody else says."""
        return self._clock() + min(max(left, 0.0), self._bounds.ttl)

    def lease_ids(self, keys: Iterable[Key]) -> dict[str, Key]:
        """Of these conversations the leases that are to be renewed, and whose each is."""
        turns = ((key, self._turn(key)) for key in keys)
        return {
            turn.lease_id: key
            for key, turn in turns
            if turn is not None and turn.renewed_s is not None and turn.lease_id is not None
        }

    def put(self, key: Key, params: dict[str, Any], node: str) -> None:
        """Keep a turn that has just ended; it supersedes the one before."""
        terms = terms_of(params)
        turn = KeptTurn(
            node,
            as_offered(params),
            terms.lease_id,
            terms.renewed_s,
            self._clock() + self._bounds.ttl,
            _tokens(params),
            self._next_stamp(key),
        )
        self._set(key, turn)

    def put_nothing(self, key: Key, reason: Reason) -> None:
        """A turn has ended and left no KV, and why; what an earlier one has left stays."""
        before = self.look(key)
        if isinstance(before, KeptTurn):
            self._set(key, replace(before, stamp=self._next_stamp(key)))
        else:
            self._kept.set(key, reason)
            self._evict()

    def put_left(self, key: Key, params: dict[str, Any], node: str) -> None:
        """A turn has ended on a node that is off the list: what it keeps is not needed."""
        self._give_back(params, node, Ended.DRAINED)
        self.put_nothing(key, Reason.PEER_GONE)

    def put_last(self, key: Key | None, params: dict[str, Any], node: str) -> None:
        """A turn has ended that no other follows: neither it nor one before is kept."""
        self._give_back(params, node, Ended.ENDED)
        if key is not None:
            self.forget(key, Ended.ENDED)

    def put_params(self, key: Key, turn: KeptTurn) -> None:
        """D has told what it keeps of this turn: have it at hand, if it is still the last."""
        now = self._turn(key)
        if now is not None and now.lease_id == turn.lease_id and turn.encoded is not None:
            self._params.set(key, turn.encoded)

    def look(self, key: Key) -> KeptTurn | Reason | None:
        """What is kept, with its params if they are at hand. Looking is no use of it."""
        kept = self._kept.get(key)
        if not isinstance(kept, bytes):
            return kept
        return replace(self._records.unpack(kept), encoded=self._params.look(key))

    def adopt(self, key: Key, turn: KeptTurn | Reason) -> None:
        """Another router has kept this. What was kept here before is that router's to give back."""
        before = self._drop(key)
        if isinstance(turn, Reason):
            self._kept.set(key, turn)
            self._evict()
            return
        if turn.renewed_s is None and before is None and turn.expires <= self._clock():
            return
        self._set(key, turn)

    def forget(self, key: Key, why: Ended) -> bool:
        """The conversation is over, turns under way leave nothing; False if it is not known."""
        turns = self._under_way.pop(key, None)
        known = key in self._kept
        self._end(key, why)
        return known or turns is not None

    def lost(self, key: Key, lease_id: str) -> bool:
        """D keeps this turn no longer; False if it is not the conversation's last any more."""
        turn = self._turn(key)
        if turn is None or turn.lease_id != lease_id:
            return False
        self._expire(key)
        return True

    def end_idle(self, node: str) -> None:
        """End the turns on this node whose conversations have been silent for too long."""
        before = self._clock() - self._bounds.idle_timeout
        idle = []
        for key in self._leases.of(node).living:
            if key in self._under_way:
                continue
            record = self._kept.get(key)
            assert isinstance(record, bytes)  # what is renewed is kept
            if self._records.used(record) > before:
                break
            idle.append(key)
        for key in idle:
            self._expire(key, Ended.IDLE)

    def leave_node(self, node: str) -> None:
        """Nothing that this node keeps is needed any more: it is taken off the list."""
        for key, record in self._kept.items():
            if isinstance(record, bytes) and self._records.unpack(record).node == node:
                self._expire(key, Ended.DRAINED, Reason.PEER_GONE)

    def _turn(self, key: Key) -> KeptTurn | None:
        record = self._kept.get(key)
        return self._records.unpack(record) if isinstance(record, bytes) else None

    def _next_stamp(self, key: Key) -> int:
        before = self._kept.get(key)
        after = self._records.stamp(before) + 1 if isinstance(before, bytes) else 0
        return max(int(time.time()), after)

    def _touch(self, key: Key) -> None:
        record = self._kept.get(key)
        if not isinstance(record, bytes):
            return
        self._kept.set(key, self._records.touched(record, self._clock()))
        node = self._records.renewed_on(record)
        if node is not None:
            self._leases.of(node).living.set(key, None)

    def _set(self, key: Key, turn: KeptTurn) -> None:
        before = self._drop(key)
        self._kept.set(key, self._records.pack(turn, self._clock()))
        if turn.encoded is not None:
            self._params.set(key, turn.encoded)
        if turn.renewed_s is not None:
            self._leases.of(turn.node).begin(key, turn.renewed_s)
        if before is not None and before.lease_id != turn.lease_id:
            self._return(key, before, Ended.SUPERSEDED)
        self._evict()

    def _evict(self) -> None:
        for key in self._kept.excess():
            self._end(key, Ended.EVICTED)

    def _end(self, key: Key, why: Ended) -> None:
        turn = self._drop(key)
        if turn is not None:
            self._return(key, turn, why)

    def _expire(self, key: Key, why: Ended | None = None, reason: Reason = Reason.EXPIRED) -> None:
        """The conversation stays, its turn goes; with `why` its lease is given back."""
        turn = self._void(key)
        assert turn is not None  # the caller has seen it
        self._kept.replace(key, reason)
        if why is not None:
            self._return(key, turn, why)

    def _drop(self, key: Key) -> KeptTurn | None:
        """Take an entry out; its turn, whose lease is nobody's now."""
        turn = self._void(key)
        self._kept.pop(key)
        return turn

    def _void(self, key: Key) -> KeptTurn | None:
        """Let go of what belongs to a conversation's turn; the entry is the caller's to change."""
        record = self._kept.get(key)
        if not isinstance(record, bytes):
            return None
        turn = self._records.unpack(record)
        self._records.drop(record)
        self._params.drop(key)
        if turn.renewed_s is not None:
            self._leases.of(turn.node).end(key, turn.renewed_s)
        return turn

    def _return(self, key: Key | None, turn: KeptTurn, why: Ended) -> None:
        if turn.renewed_s is not None and turn.lease_id is not None:
            self._leases.give_back(turn.node, turn.lease_id, why, key)

    def _give_back(self, params: dict[str, Any], node: str, why: Ended) -> None:
        terms = terms_of(params)
        self._return(None, KeptTurn(node, None, terms.lease_id, terms.renewed_s), why)


def _tokens(params: dict[str, Any]) -> int:
    """How many tokens D says that it keeps; 0 if it says nothing of use."""
    said = params.get("remote_num_tokens")
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else 0
