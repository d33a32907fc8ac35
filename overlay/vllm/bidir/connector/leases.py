# SPDX-License-Identifier: Apache-2.0
"""D's leases on finished turns: kept while somebody renews them, within a budget of blocks.

Pure logic over a clock. Whoever calls `over`, `reclaim` or `end_all` frees what they name in the
same breath; nobody else keeps a deadline. A hold pins a lease for one reader for a bounded time and
is never broken: whatever ends a lease takes effect when its holds have ended.

    granted --renew--> ... --time is over, release, pressure--> ended      (no hold)
                              '--> ending --last hold has ended--> ended   (under a hold)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

# Looking at all leases costs tens of nanoseconds each: not more often than this per lease.
TICKS = 10


@dataclass(frozen=True)
class LeaseOptions:
    """`duration_s`: how long a lease runs without renewal; `most_s`: how long at most since the
    turn ended; `hold_s`: how long a hold pins it; `budget`: blocks that all leases keep at most."""

    duration_s: float
    most_s: float
    hold_s: float
    budget: int

    @property
    def tick_s(self) -> float:
        """A lease that is over is found within this time."""
        return self.duration_s / TICKS


@dataclass(slots=True)
class _Lease:
    """`over`: when its blocks may go, if nothing else happens. `holds`: when each ends."""

    lease_id: str
    request_id: str
    block_ids: Sequence[int]
    granted: float
    ends: float
    last: float
    over: float
    holds: dict[int, float] = field(default_factory=dict)
    ending: bool = False
    # Others wait for its blocks: it runs out.
    lapses: bool = False

    def settle(self) -> None:
        """Reckon `over` anew."""
        self.over = max(0.0 if self.ending else self.ends, *self.holds.values(), 0.0)

    def is_held(self, now: float) -> bool:
        return any(end > now for end in self.holds.values())


@dataclass(frozen=True)
class Totals:
    """What is kept now, and what has happened since the start. `blocks`: each once, however many
    leases keep it. `oldest_s`: age of the oldest lease, None without any."""

    leases: int
    blocks: int
    holds: int
    budget: int
    oldest_s: float | None
    renewals: int
    refused: int
    reclaimed: int
    expired: int
    released: int


class Leases:
    """All leases of one engine core. Times are seconds of `clock`; not for several threads."""

    def __init__(self, options: LeaseOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self._clock = clock
        # In the order in which they were granted: the oldest is first.
        self._leases: dict[str, _Lease] = {}
        # How many leases keep a block.
        self._keepers: dict[int, int] = {}
        # Those that somebody reads, or did.
        self._held: set[str] = set()
        # Before this time no lease is over, or it is too early to look again.
        self._look = 0.0
        # Blocks that were missing when a turn was refused, since the last renewal.
        self._wanted = 0
        self._renewals = self._refused = self._reclaimed = self._expired = self._released = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease_id: str, request_id: str, block_ids: Sequence[int]) -> bool:
        """Keep a turn that has just ended; False if it does not fit into the budget.

        Then the oldest leases are not renewed any more, as many as it would have needed.
        """
        keepers = self._keepers
        new = sum(block_id not in keepers for block_id in block_ids)
        missing = len(keepers) + new - self.options.budget
        if missing > 0:
            self._refused += 1
            if new <= self.options.budget:
                self._wanted = max(self._wanted, missing)
            return False
        now = self._clock()
        last = now + self.options.most_s
        ends = min(now + self.options.duration_s, last)
        self._look = min(self._look, ends) if self._leases else ends
        self._leases[lease_id] = _Lease(lease_id, request_id, block_ids, now, ends, last, ends)
        for block_id in block_ids:
            keepers[block_id] = keepers.get(block_id, 0) + 1
        return True

    def renew(self, lease_ids: Iterable[str]) -> tuple[dict[str, float], list[str]]:
        """Prolong them: seconds left by id, and those that are gone or about to be.

        One that lapses is answered with what is left of it.
        """
        if self._wanted:
            self._let_lapse()
        now = self._clock()
        ends, leases = now + self.options.duration_s, self._leases
        renewed: dict[str, float] = {}
        lost: list[str] = []
        for lease_id in lease_ids:
            lease = leases.get(lease_id)
            if lease is None or lease.ending or lease.ends <= now:
                lost.append(lease_id)
                continue
            if not lease.lapses:
                lease.ends = ends if ends < lease.last else lease.last
                self._renewals += 1
                if lease.holds:
                    lease.settle()
                else:
                    lease.over = lease.ends
            renewed[lease_id] = lease.ends - now
        return renewed, lost

    def _let_lapse(self) -> None:
        found = 0
        for lease in self._leases.values():
            if found >= self._wanted:
                break
            if not lease.ending:
                lease.lapses = True
            found += len(lease.block_ids)
        self._wanted = 0

    def release(self, lease_ids: Iterable[str]) -> list[str]:
        """End them as soon as nobody reads: those that were there, each once."""
        found = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.ending:
                continue
            lease.ending = True
            lease.settle()
            self._look = min(self._look, lease.over)
            self._released += 1
            found.append(lease_id)
        return found

    def stands(self, lease_id: str) -> bool:
        """Whether it is there and not about to go."""
        lease = self._leases.get(lease_id)
        return lease is not None and not lease.ending and lease.ends > self._clock()

    def hold(self, lease_id: str, token: int) -> bool:
        """Pin it for a reader, who ends that with the same token; False if it does not stand."""
        if not self.stands(lease_id):
            return False
        lease, now = self._leases[lease_id], self._clock()
        lease.holds = {one: end for one, end in lease.holds.items() if end > now}
        lease.holds[token] = now + self.options.hold_s
        lease.settle()
        self._held.add(lease_id)
        return True

    def done(self, lease_id: str, token: int) -> None:
        """A reader has all, or reads no longer."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.holds.pop(token, None) is not None:
            if not lease.holds:
                self._held.discard(lease_id)
            lease.settle()
            self._look = min(self._look, lease.over)

    def over(self) -> list[str]:
        """End those whose time is over: the requests whose blocks are to be freed now."""
        now = self._clock()
        if now < self._look:
            return []
        over = [lease for lease in self._leases.values() if lease.over <= now]
        self._expired += sum(not lease.ending for lease in over)
        ended = [self._end(lease) for lease in over]
        self._look = max(self._first_over(), now + self.options.tick_s)
        return ended

    def _first_over(self) -> float:
        return min((lease.over for lease in self._leases.values()), default=0.0)

    def seconds_left(self) -> float | None:
        """How long an engine at rest may sleep: 0 when a lease is over, None without leases."""
        if not self._leases:
            return None
        now = self._clock()
        if self._look <= now:
            # Renewed since it was looked at last; an engine need not step to find that out.
            self._look = self._first_over()
            self._held = {one for one in self._held if self._leases[one].is_held(now)}
        left = max(0.0, self._look - now)
        # A reader who is done wakes nobody.
        return min(left, self.options.tick_s) if self._held else left

    def reclaimable(self) -> int:
        """Blocks that `reclaim` could make leases let go of, at most."""
        now = self._clock()
        held = {
            block_id
            for lease_id in self._held
            if self._leases[lease_id].is_held(now)
            for block_id in self._leases[lease_id].block_ids
        }
        return len(self._keepers) - len(held)

    def reclaim(self, blocks: int) -> list[str]:
        """End leases without a hold, the oldest first, until they have let go of so many blocks or
        none is left: the requests whose blocks are to be freed now."""
        now = self._clock()
        most = len(self._keepers) - blocks
        ended = []
        for lease in list(self._leases.values()):
            if len(self._keepers) <= most:
                break
            if lease.is_held(now):
                continue
            self._reclaimed += not lease.ending
            ended.append(self._end(lease))
        return ended

    def end_all(self) -> list[str]:
        """What blocks hold is about to lose its meaning: all requests that were kept."""
        return [self._end(lease) for lease in list(self._leases.values())]

    def end(self, lease_id: str) -> None:
        """The blocks of this one are being freed for a reason of their own."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end(lease)

    def _end(self, lease: _Lease) -> str:
        del self._leases[lease.lease_id]
        self._held.discard(lease.lease_id)
        keepers = self._keepers
        for block_id in lease.block_ids:
            if keepers[block_id] == 1:
                del keepers[block_id]
            else:
                keepers[block_id] -= 1
        return lease.request_id

    def totals(self) -> Totals:
        now = self._clock()
        oldest = next(iter(self._leases.values()), None)
        return Totals(
            len(self._leases),
            len(self._keepers),
            sum(end > now for one in self._held for end in self._leases[one].holds.values()),
            self.options.budget,
            None if oldest is None else now - oldest.granted,
            self._renewals,
            self._refused,
            self._reclaimed,
            self._expired,
            self._released,
        )
