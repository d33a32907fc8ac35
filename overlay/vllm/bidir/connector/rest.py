# SPDX-License-Identifier: Apache-2.0
"""How an engine that only keeps blocks for others comes to rest, and when it looks after them.

In the base, a finished request whose blocks are kept counts as work: the engine steps without end.
Here it leaves that condition. A step is due when something may have changed: when a turn's time is
over, and now and then while a reader may have told that it is done. Steps are not cheap for an
engine at rest: a worker that has been woken spins for a second before it sleeps again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

# How often READs that were given up are looked after.
WATCH_S = 2.0
# When it is looked for the answer of a peer that was asked on behalf of nobody who waits.
LOOKS_S = (0.1, 0.5, 2.5)


@dataclass(frozen=True)
class _Wait:
    """Nothing happens before `due`; from then on a step every `interval_s` finds out."""

    due: float
    interval_s: float


class Rest:
    """The finished requests that need no step but a now and then. Times are seconds of `clock`."""

    def __init__(
        self,
        watched: Sized,
        clock: Callable[[], float] = time.perf_counter,
        leases_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Steps are also due while `watched` is not empty, and when a lease is over: `leases_left`
        are the seconds until then."""
        self._watched = watched
        self._clock = clock
        self._leases_left = leases_left
        self._waits: dict[str, _Wait] = {}
        self._leased: set[str] = set()
        self._last_step = 0.0
        self._looks: list[float] = []
        self.stopped = False

    def __len__(self) -> int:
        return 0 if self.stopped else len(self._waits) + len(self._leased)

    def begin(self, request_id: str, due: float, interval_s: float) -> None:
        self._waits[request_id] = _Wait(due, interval_s)

    def begin_lease(self, request_id: str) -> None:
        """Its lease says when its time is over."""
        self._leased.add(request_id)

    def end(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
        self._leased.discard(request_id)

    def look_again(self) -> None:
        """Something is asked in the next step whose answer needs a further one."""
        now = self._clock()
        self._looks = [now + seconds for seconds in (0.0, *LOOKS_S)]

    def stop(self) -> None:
        """From now on what waits for its reader is work, as in the base."""
        self.stopped = True

    def stepped(self) -> None:
        """A step has been scheduled, for whatever reason."""
        self._last_step = self._clock()
        if self._looks:
            self._looks = [one for one in self._looks if one > self._last_step]

    def is_due(self) -> bool:
        """Whether an engine without other work should step now."""
        left = self.seconds_left()
        return left is not None and left <= 0

    def seconds_left(self) -> float | None:
        """Until a step is due; None when an idle engine may sleep until it is asked."""
        times = self._looks[:1]
        times += [max(one.due, self._last_step + one.interval_s) for one in self._waits.values()]
        if self._watched:
            times.append(self._last_step + WATCH_S)
        left = self._leases_left()
        if left is not None:
            times.append(self._clock() + left)
        return max(0.0, min(times) - self._clock()) if times else None
