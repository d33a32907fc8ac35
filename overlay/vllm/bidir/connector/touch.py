# SPDX-License-Identifier: Apache-2.0
"""READs that nobody needs: the first opens the mapping of a peer's memory, others time its link.

They run in a handshake's thread or in one of their own. What NIXL has begun cannot be stopped, and
a handle that goes while its transfer runs blocks or aborts: one that was not waited for is kept
until NIXL has ended it. Until then, and while a thread is reading, its engine must not be
forgotten.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.bidir.connector.posting import Descriptors

logger = init_logger(__name__)

POLL_S = 0.0005
# Sizes of READs that are timed, MB (10^6 bytes): the first, and how much longer each next one is.
FIRST_MB, LONGER, LAST_MB = 4.0, 4, 1024.0
# READs of one size: who waits for Python's lock during one need not during the next.
READS = 2
# A READ's time is known well enough when it took at most so much longer than it took at least.
TIGHT = 1.5
# A link that is so fast, MB/s, need not be known better; nor one that took so long, seconds.
ENOUGH_MB_S = 64_000.0
ENOUGH_S = 0.25
# Below what a clock tells.
_SHORTEST_S = 1e-6
_NO_ENTRY = nullcontext()


class Unfinished:
    """Engines that are being read from here, and transfers that nobody waits for any more.

    Any thread may call; `sweep` and `close` are the worker's own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reading: Counter[str] = Counter()
        self._left: list[tuple[str, Any]] = []
        self._closed = False

    def __len__(self) -> int:
        """Transfers that nobody waits for."""
        with self._changed:
            return len(self._left)

    @property
    def closed(self) -> bool:
        """Whether those that wait should stop waiting."""
        return self._closed

    def enter(self, engine_id: str) -> None:
        """The engine is about to be read from; as many `leave`s must follow.

        `touch` and `measure` do so themselves. Call it also before they are given to a thread, or
        the engine can be forgotten before that thread starts.
        """
        with self._changed:
            self._reading[engine_id] += 1

    def leave(self, engine_id: str) -> None:
        with self._changed:
            self._reading[engine_id] -= 1
            if self._reading[engine_id] <= 0:
                del self._reading[engine_id]
            self._changed.notify_all()

    def add(self, engine_id: str, handle: Any) -> None:
        with self._changed:
            self._left.append((engine_id, handle))

    def engines(self) -> set[str]:
        """Engines that something is being read from."""
        with self._changed:
            return {*self._reading, *(engine_id for engine_id, _ in self._left)}

    def sweep(self, still_runs: Callable[[Any], bool]) -> None:
        """`still_runs` asks NIXL about a transfer, and releases it when it has ended."""
        with self._changed:
            self._left = [one for one in self._left if still_runs(one[1])]

    def close(self, timeout_s: float) -> list[Any]:
        """Have the threads stop, wait for them, and hand over the transfers that still run.

        At most `timeout_s` seconds: opening a mapping, about one, is not interrupted.
        """
        self._closed = True
        with self._changed:
            if not self._changed.wait_for(lambda: not self._reading, timeout_s):
                logger.warning("still reading from %s at shutdown", sorted(self._reading))
            left, self._left = self._left, []
        return [handle for _, handle in left]


@dataclass(frozen=True)
class Rate:
    """What a link has shown to achieve. Not `finished`: a READ did not end within the time given,
    and the rate is the most that it can be, unless the peer stood still for a moment."""

    megabytes_per_s: float
    finished: bool = True


def touch(
    nixl: Any,
    engine_id: str,
    reads: Sequence[Descriptors],
    unfinished: Unfinished,
    timeout_s: float,
    entry: AbstractContextManager[Any] = _NO_ENTRY,
) -> bool:
    """Read once, from all ranks together, and wait until it is done; False if it failed or takes
    longer than `timeout_s`.

    `entry` is held while NIXL takes it over, and opens the way: who would have the agent for
    itself meanwhile, to add a peer, had everybody else wait who asks after a transfer.

    Opening the mapping of GPU memory of another process takes about a second, in the first READ.
    `reads` must go into memory that nobody looks at: it is overwritten, at times long after.
    """
    with _reading(engine_id, unfinished):
        ran = _run(nixl, engine_id, reads, unfinished, timeout_s, entry)
    return ran is not None and ran.done


def measure(
    nixl: Any,
    engine_id: str,
    sized: Callable[[float], tuple[Sequence[Descriptors], float] | None],
    unfinished: Unfinished,
    timeout_s: float,
) -> Rate | None:
    """How fast it comes: READs of growing size, until one is long enough to be timed.

    `sized` says what to read for about so many MB (10^6 bytes), from all ranks together, and how
    many they really are. The time counts from before NIXL is told, since a link that is emulated
    may do its work in there. `timeout_s` is of each READ. None if NIXL failed, if the worker shuts
    down, or if there is nothing to read.
    """
    best, wanted = 0.0, FIRST_MB
    with _reading(engine_id, unfinished):
        while wanted <= LAST_MB:
            found = sized(wanted)
            if found is None:
                return None
            reads, megabytes = found
            for _ in range(READS):
                ran = _run(nixl, engine_id, reads, unfinished, timeout_s)
                if ran is None or unfinished.closed:
                    return None
                if not ran.done:
                    return Rate(megabytes / ran.most_s, False)
                best = max(best, megabytes / max(ran.most_s, _SHORTEST_S))
                if ran.least_s > ENOUGH_S or best >= ENOUGH_MB_S:
                    return Rate(best)
                if ran.most_s <= TIGHT * ran.least_s:
                    return Rate(best)
            wanted *= LONGER
    return Rate(best)


@dataclass(frozen=True)
class _Ran:
    """`least_s`: until the last look that saw it run; `most_s`: until the first that did not.

    A thread waits for Python's lock, tens of milliseconds at a time beside a busy one: so long may
    pass between two looks.
    """

    done: bool
    least_s: float
    most_s: float


@contextmanager
def _reading(engine_id: str, unfinished: Unfinished) -> Iterator[None]:
    unfinished.enter(engine_id)
    try:
        yield
    finally:
        unfinished.leave(engine_id)


class _Together:
    """READs that begin together. `running`: those that NIXL is still at."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._handles: list[Any] = []
        self.running: list[Any] = []
        self.failed = False

    def make(self, reads: Sequence[Descriptors]) -> None:
        for read in reads:
            handle = self._nixl.make_prepped_xfer(
                "READ", read.local_handle, read.local_ids, read.remote_handle, read.remote_ids
            )
            self._handles.append(handle)

    def begin(self) -> None:
        for handle in self._handles:
            self._note(handle, self._nixl.transfer(handle))

    def look(self) -> None:
        """Ask NIXL which have ended. It raises for one that has failed: that has ended, too."""
        for handle in list(self.running):
            self.running.remove(handle)
            self._note(handle, self._nixl.check_xfer_state(handle))

    def _note(self, handle: Any, state: str) -> None:
        if state == "PROC":
            self.running.append(handle)
        elif state != "DONE":
            self.failed = True

    def leave(self, engine_id: str, unfinished: Unfinished) -> None:
        for handle in self._handles:
            if handle in self.running:
                unfinished.add(engine_id, handle)
            else:
                release(self._nixl, handle)


def _run(
    nixl: Any,
    engine_id: str,
    reads: Sequence[Descriptors],
    unfinished: Unfinished,
    timeout_s: float,
    entry: AbstractContextManager[Any] = _NO_ENTRY,
) -> _Ran | None:
    """READs from all ranks at once; None if one failed, or if none was begun because the worker
    shuts down."""
    if unfinished.closed:
        return None
    together = _Together(nixl)
    try:
        with entry:
            together.make(reads)
            began = seen = time.monotonic()
            together.begin()
        while together.running:
            # Before the look: a transfer that is seen running has run until now at the least.
            looked = time.monotonic()
            together.look()
            if not together.running:
                break
            seen = looked
            if unfinished.closed or seen - began > timeout_s:
                return None if together.failed else _Ran(False, seen - began, seen - began)
            time.sleep(POLL_S)
        ended = time.monotonic()
    except Exception as error:
        logger.info("engine %s cannot be read from to see how fast: %s", engine_id, error)
        return None
    finally:
        together.leave(engine_id, unfinished)
    return None if together.failed else _Ran(True, seen - began, ended - began)


def release(nixl: Any, handle: Any) -> None:
    """Let NIXL forget a transfer, whatever it says to that."""
    if handle is None:
        return
    try:
        nixl.release_xfer_handle(handle)
    except Exception as error:
        logger.warning("a READ is not released: %s", error)
