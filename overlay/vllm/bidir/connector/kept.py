# SPDX-License-Identifier: Apache-2.0
"""D's list of finished turns whose blocks it keeps, and what it answers to those who read them.

The scheduler writes it; the side channel's thread reads it. An entry ends before its blocks go
back to the pool, in the same call of the scheduler: so whoever is told, after reading, that the
entry still stands has read what the turn left there.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class KeptTurn:
    """A finished turn. `block_ids` are logical block ids by position; `digest` names its proof."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    valid_tokens: int
    digest: bytes


@dataclass(frozen=True)
class Hold:
    """What a reader is told about a turn before it reads."""

    epoch: int
    turn: KeptTurn


class KeptTurns:
    """Kept turns of one engine core. Safe to use from two threads; no call waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, KeptTurn] = {}
        self._lease_of: dict[str, str] = {}
        # Random, so that a restarted engine never repeats an epoch.
        self._epoch = secrets.randbits(62)

    def __len__(self) -> int:
        return len(self._turns)

    def keep(self, turn: KeptTurn) -> None:
        with self._lock:
            self._turns[turn.lease_id] = turn
            self._lease_of[turn.request_id] = turn.lease_id

    def end(self, request_id: str) -> None:
        """The request's blocks are about to be freed."""
        with self._lock:
            lease_id = self._lease_of.pop(request_id, None)
            if lease_id is not None:
                del self._turns[lease_id]

    def end_all(self) -> list[str]:
        """What all blocks hold is about to lose its meaning: the requests that were kept."""
        with self._lock:
            request_ids = list(self._lease_of)
            self._turns.clear()
            self._lease_of.clear()
            self._epoch += 1
            return request_ids

    def hold(self, lease_id: str) -> Hold | None:
        """The turn of a lease, or None when it is gone."""
        with self._lock:
            turn = self._turns.get(lease_id)
            return None if turn is None else Hold(self._epoch, turn)

    def confirm(self, lease_id: str, epoch: int) -> bool:
        """Whether the turn has stood ever since it was held."""
        with self._lock:
            return epoch == self._epoch and lease_id in self._turns


def new_lease_id(rank: int) -> str:
    """128 random bits with the data-parallel rank that keeps the blocks: `d0-3f9c…`."""
    return f"d{rank}-{secrets.token_hex(16)}"
