# SPDX-License-Identifier: Apache-2.0
"""D's list of finished turns whose blocks it keeps, and what it answers to those who read them.

The scheduler writes it; the side channel's thread reads it. An entry ends before its blocks go
back to the pool, in the same call of the scheduler: so whoever is told, after reading, that the
entry still stands has read what the turn left there.

With leases they say when an entry ends; without, its time is the workers' to watch.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.bidir.connector.leases import Leases, Totals


@dataclass(frozen=True)
class KeptTurn:
    """A finished turn. `block_ids` are logical block ids by position; `digest` names its proof;
    `params` are what a router was told of it."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    valid_tokens: int
    digest: bytes
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hold:
    """What a reader is told about a turn before it reads, and names again when it is done.

    `epoch` is its own with leases, so that one reader does not end another's hold.
    """

    epoch: int
    turn: KeptTurn


class KeptTurns:
    """Kept turns of one engine core. Safe to use from two threads; no call waits for anything
    that takes longer than going through the leases once."""

    def __init__(self, leases: Leases | None = None) -> None:
        self._lock = threading.Lock()
        self._leases = leases
        self._turns: dict[str, KeptTurn] = {}
        self._lease_of: dict[str, str] = {}
        # Random, so that a restarted engine never repeats an epoch.
        self._epoch = secrets.randbits(62)
        self._tokens = itertools.count(secrets.randbits(62))

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def leased(self) -> bool:
        """Whether leases say how long a turn is kept."""
        return self._leases is not None

    @property
    def lease_s(self) -> float | None:
        """Seconds that a lease runs without renewal; None without leases."""
        return None if self._leases is None else self._leases.options.duration_s

    def keep(self, turn: KeptTurn, block_ids: Sequence[int] = ()) -> bool:
        """Keep it, and with leases all of `block_ids`; False if the budget has no room."""
        with self._lock:
            if self._leases is not None and not self._leases.grant(
                turn.lease_id, turn.request_id, block_ids
            ):
                return False
            self._turns[turn.lease_id] = turn
            self._lease_of[turn.request_id] = turn.lease_id
            return True

    def end(self, request_id: str) -> None:
        """The request's blocks are about to be freed."""
        with self._lock:
            lease_id = self._forget(request_id)
            if lease_id is not None and self._leases is not None:
                self._leases.end(lease_id)

    def end_all(self) -> list[str]:
        """What all blocks hold is about to lose its meaning: the requests that were kept."""
        with self._lock:
            request_ids = list(self._lease_of)
            self._turns.clear()
            self._lease_of.clear()
            if self._leases is not None:
                self._leases.end_all()
            self._epoch += 1
            return request_ids

    def _forget(self, request_id: str) -> str | None:
        lease_id = self._lease_of.pop(request_id, None)
        if lease_id is not None:
            del self._turns[lease_id]
        return lease_id

    def hold(self, lease_id: str) -> Hold | None:
        """The turn of a lease, or None when it is gone. With leases it is held until `confirm`."""
        with self._lock:
            turn = self._turns.get(lease_id)
            if turn is None or self._leases is None:
                return None if turn is None else Hold(self._epoch, turn)
            token = next(self._tokens)
            return Hold(token, turn) if self._leases.hold(lease_id, token) else None

    def confirm(self, lease_id: str, epoch: int) -> bool:
        """Whether the turn has stood ever since it was held; the hold has ended.

        A lease id is never used again: with leases, that it is there says so by itself.
        """
        with self._lock:
            if self._leases is None:
                return epoch == self._epoch and lease_id in self._turns
            self._leases.done(lease_id, epoch)
            return lease_id in self._turns

    ############################################################
    # Leases: all of it the scheduler's
    ############################################################

    def over(self) -> list[str]:
        """The requests whose leases are over: their blocks are to be freed now."""
        if not self._turns or self._leases is None:
            return []
        with self._lock:
            return self._ended(self._leases.over())

    def reclaimable(self) -> int:
        """Blocks that `reclaim` could make room for, at most."""
        if not self._turns or self._leases is None:
            return 0
        with self._lock:
            return self._leases.reclaimable()

    def reclaim(self, blocks: int) -> list[str]:
        """The same of those that make room for so many blocks."""
        if not self._turns or self._leases is None:
            return []
        with self._lock:
            return self._ended(self._leases.reclaim(blocks))

    def _ended(self, request_ids: list[str]) -> list[str]:
        for request_id in request_ids:
            self._forget(request_id)
        return request_ids

    def renew(self, lease_ids: Sequence[str]) -> tuple[dict[str, float], list[str]]:
        """Seconds left of those that were prolonged, and those that are lost: all without leases,
        since nothing can be prolonged then."""
        if self._leases is None:
            return {}, list(lease_ids)
        with self._lock:
            return self._leases.renew(lease_ids)

    def release(self, lease_ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """End turns that nobody needs: the ids that were there, and the requests whose blocks are
        to be freed now. Under a hold they are freed when that has ended."""
        with self._lock:
            if self._leases is not None:
                released = self._leases.release(lease_ids)
                return released, self._ended(self._leases.over())
            released = [one for one in dict.fromkeys(lease_ids) if one in self._turns]
            return released, self._ended([self._turns[one].request_id for one in released])

    def params(self, lease_id: str) -> Mapping[str, Any] | None:
        """What a router was told of a turn; None when it is gone, or about to be."""
        with self._lock:
            turn = self._turns.get(lease_id)
            if turn is None or (self._leases is not None and not self._leases.stands(lease_id)):
                return None
            return turn.params

    def seconds_left(self) -> float | None:
        """Until `over` may have something to say; None when there is nothing to wait for."""
        if not self._turns or self._leases is None:
            return None
        with self._lock:
            return self._leases.seconds_left()

    def totals(self) -> Totals:
        """What is kept; without leases only the number of turns is known."""
        if self._leases is None:
            return Totals(len(self._turns), 0, 0, 0, None, 0, 0, 0, 0, 0)
        with self._lock:
            return self._leases.totals()


def new_lease_id(rank: int) -> str:
    """128 random bits with the data-parallel rank that keeps the blocks: `d0-3f9c…`."""
    return f"d{rank}-{secrets.token_hex(16)}"
