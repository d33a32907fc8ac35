# SPDX-License-Identifier: Apache-2.0
"""What the router remembers of a conversation: where its last turn's KV lies."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.bidir.reasons import Reason

Key = bytes


@dataclass(frozen=True)
class KeptTurn:
    """D's kv_transfer_params of a finished turn, the node that keeps the blocks, and until when.

    The params are kept encoded: as objects a long turn's would take five times the memory.
    """

    encoded: bytes
    node: str
    expires: float

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
    """Kept turns by conversation, bounded in number and age; the least recently used go first."""

    def __init__(self, limit: int, ttl: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._ttl = ttl
        self._clock = clock
        self._kept: OrderedDict[Key, KeptTurn | Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> KeptTurn | Reason:
        """The kept turn, or why there is none. It stays: a prefill that fails loses nothing."""
        kept = self._kept.get(key)
        if kept is None:
            return Reason.FIRST_TURN
        if isinstance(kept, KeptTurn) and kept.expires <= self._clock():
            del self._kept[key]
            return Reason.EXPIRED
        self._kept.move_to_end(key)
        return kept

    def put(self, key: Key, params: dict[str, Any], node: str) -> None:
        """Keep a turn that has just ended; it supersedes the one before."""
        self._set(key, KeptTurn(msgspec.json.encode(params), node, self._clock() + self._ttl))

    def put_nothing(self, key: Key, reason: Reason) -> None:
        """A turn has ended and left no KV, and why; what an earlier one has left stays."""
        self._set(key, self._kept.get(key, reason))

    def _set(self, key: Key, what: KeptTurn | Reason) -> None:
        self._kept[key] = what
        self._kept.move_to_end(key)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)
