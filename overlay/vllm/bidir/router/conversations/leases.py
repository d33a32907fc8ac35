# SPDX-License-Identifier: Apache-2.0
"""The leases that decode nodes keep for this router's conversations.

A D in lease mode says for how long it keeps a turn. While the conversation goes on the lease is
renewed, and given back as soon as nobody needs it. What is here is the book of them; `heartbeat`
makes the calls, `conversations` knows their ids and decides when one has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from enum import Enum
from typing import Any

import msgspec
from vllm.bidir.router.conversations.recent import Recent
from vllm.bidir.router.conversations.record import is_lease_id
from vllm.bidir.router.telemetry.metrics import Metrics

# A node may name any time; more than this is never needed, and stays a number of ordinary size.
_LONGEST_S = 86_400.0


class Ended(str, Enum):
    """Why a lease is given back."""

    SUPERSEDED = "superseded"
    IDLE = "idle"
    DELETED = "deleted"
    DRAINED = "drained"
    ENDED = "ended"
    EVICTED = "evicted"


# What ends one router's interest in a conversation, and not the conversation.
_OURS_ONLY = frozenset((Ended.IDLE, Ended.EVICTED, Ended.DRAINED))


class Terms(msgspec.Struct, frozen=True):
    """How D keeps a turn: by which name, and how long without renewal (seconds).

    `renewed_s` is None where it keeps it for a fixed time; so may `lease_id` be then.
    """

    lease_id: str | None = None
    renewed_s: float | None = None


def terms_of(params: dict[str, Any]) -> Terms:
    """What D's params of a finished turn say. Terms that are of no use are none."""
    lease_id = params.get("lease_id")
    if not is_lease_id(lease_id):
        return Terms()
    return Terms(lease_id, _seconds(params.get("lease_duration")))


class NodeLeases:
    """One decode node's leases: the conversations whose leases are to be renewed, the least
    recently used first, and the ids of those to be given back. Where one may be another router's by
    now, the conversation is named, and has to be asked about before.

    `sooner` is set when a lease has come that runs shorter than all others, `any_ended` while there
    is something to give back, or when the node is `gone` and nothing more will come.
    """

    def __init__(self) -> None:
        self.living: Recent[bytes, None] = Recent()
        self.ended: dict[str, bytes | None] = {}
        self.shortest_s = math.inf
        self.sooner = asyncio.Event()
        self.any_ended = asyncio.Event()
        self.gone = False
        self._durations: Counter[float] = Counter()

    def begin(self, key: bytes, renewed_s: float) -> None:
        """From now on this conversation's lease is renewed."""
        self.living.set(key, None)
        self._durations[renewed_s] += 1
        if renewed_s < self.shortest_s:
            self.shortest_s = renewed_s
            self.sooner.set()

    def end(self, key: bytes, renewed_s: float) -> None:
        """It is renewed no longer."""
        self.living.pop(key)
        self._durations[renewed_s] -= 1
        if not self._durations[renewed_s]:
            del self._durations[renewed_s]

    def look_again(self) -> None:
        """Find the shortest lease anew, after some have gone."""
        self.shortest_s = min(self._durations, default=math.inf)

    def give_back(self, lease_id: str, key: bytes | None) -> None:
        """The node is told soon that nobody needs it any more."""
        self.ended[lease_id] = key
        self.any_ended.set()

    def take_ended(self) -> dict[str, bytes | None]:
        """The ids to give back; they are the caller's now."""
        taken, self.ended = self.ended, {}
        self.any_ended.clear()
        return taken


class Leases:
    """All leases, by node, which may come and go."""

    def __init__(self, metrics: Metrics) -> None:
        self._of: dict[str, NodeLeases] = {}
        self._metrics = metrics

    def __len__(self) -> int:
        return sum(len(one.living) for one in self._of.values())

    def of(self, node: str) -> NodeLeases:
        """A node's leases, none at first."""
        found = self._of.get(node)
        if found is None:
            found = self._of[node] = NodeLeases()
        return found

    def drop(self, node: str) -> None:
        """The node is gone for good; what it still kept runs out there."""
        self._of.pop(node, None)

    def give_back(self, node: str, lease_id: str, why: Ended, key: bytes | None) -> None:
        """This router needs it no more: the node is told soon.

        Unless another goes on with the conversation `key`, which it cannot if a turn, or somebody
        who may say so, has ended this lease.
        """
        self.of(node).give_back(lease_id, key if why in _OURS_ONLY else None)
        self._metrics.released(why.value)


def _seconds(value: Any) -> float | None:
    """A positive finite number of seconds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(min(value, _LONGEST_S))
