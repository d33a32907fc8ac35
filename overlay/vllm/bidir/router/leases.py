# SPDX-License-Identifier: Apache-2.0
"""The leases that decode nodes keep for this router's conversations.

A D in lease mode says for how long it keeps a turn. While the conversation goes on the lease is
renewed, and given back as soon as nobody needs it. What is here is the book of them; `heartbeat`
makes the calls, `conversations` decides when one has ended.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.bidir.router.metrics import Metrics

_WELL_FORMED = re.compile(r"d[0-9]{1,9}-[0-9a-f]{32}")
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


@dataclass(eq=False, slots=True)
class Lease:
    """One kept turn of the conversation `key` on the decode node `node`.

    It runs `duration_s` without renewal. `used`: when the conversation was last heard of.
    """

    node: str
    lease_id: str
    key: bytes
    duration_s: float
    used: float


class NodeLeases:
    """One decode node's leases: those to be renewed, and the ids of those to be given back.

    `sooner` is set when a lease has come that runs shorter than all others, `any_ended` while there
    is something to give back, or when the node is `gone` and nothing more will come.
    """

    def __init__(self) -> None:
        self.living: dict[str, Lease] = {}
        self.ended: list[str] = []
        self.shortest_s = math.inf
        self.sooner = asyncio.Event()
        self.any_ended = asyncio.Event()
        self.gone = False

    def look_again(self) -> None:
        """Find the shortest lease anew, after some have gone."""
        self.shortest_s = min((one.duration_s for one in self.living.values()), default=math.inf)

    def take_ended(self) -> list[str]:
        """The ids to give back; they are the caller's now."""
        taken, self.ended = self.ended, []
        self.any_ended.clear()
        return taken


class Leases:
    """All leases, by node, which may come and go. Each belongs to one conversation."""

    def __init__(self, metrics: Metrics) -> None:
        self._of: dict[str, NodeLeases] = {}
        self._metrics = metrics

    def __len__(self) -> int:
        return sum(len(one.living) for one in self._of.values())

    def of(self, node: str) -> NodeLeases:
        """A node's leases, none at first."""
        return self._of.setdefault(node, NodeLeases())

    def drop(self, node: str) -> None:
        """The node is gone for good; what it still kept runs out there."""
        self._of.pop(node, None)

    def begin(self, node: str, params: dict[str, Any], key: bytes, now: float) -> Lease | None:
        """The lease that D's params of a finished turn name, from now on to be renewed.

        None if they name none, nothing usable, or one that another conversation has.
        """
        lease_id, duration_s = params.get("lease_id"), _seconds(params.get("lease_duration"))
        if duration_s is None or not isinstance(lease_id, str):
            return None
        if not _WELL_FORMED.fullmatch(lease_id):
            return None
        here = self.of(node)
        lease = here.living.setdefault(lease_id, Lease(node, lease_id, key, duration_s, now))
        if lease.key != key:
            return None
        lease.duration_s, lease.used = duration_s, now
        if duration_s < here.shortest_s:
            here.shortest_s = duration_s
            here.sooner.set()
        return lease

    def give_back(self, lease: Lease, why: Ended) -> None:
        """Nobody needs it any more: the node is told soon. Once it has ended, nothing happens."""
        if self.lost(lease):
            here = self.of(lease.node)
            here.ended.append(lease.lease_id)
            here.any_ended.set()
            self._metrics.released(why.value)

    def lost(self, lease: Lease) -> bool:
        """The node has it no longer; False if it had ended here before."""
        here = self._of.get(lease.node)
        if here is None or here.living.get(lease.lease_id) is not lease:
            return False
        del here.living[lease.lease_id]
        return True


def _seconds(value: Any) -> float | None:
    """A positive finite number of seconds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(min(value, _LONGEST_S))
