# SPDX-License-Identifier: Apache-2.0
"""Who is probed, when and in which thread: a peer that is met, and one that looks slow.

Read is the null block, which holds nobody's KV, into the own one. See touch.py for how, and
links.py for what follows from the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.links import Links
from vllm.bidir.connector.touch import Unfinished, measure, touch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.bidir.connector.posting import Descriptors

logger = init_logger(__name__)

# Opening the mapping of a peer's GPU memory has taken up to a second; a handover waits for it.
TOUCH_S = 3.0
MEASURE_S = 2.0
_CLOSE_S = 3.0
_THREADS = 2


class Probes:
    """Probes of this worker's peers. `links` knows what they have shown."""

    def __init__(
        self,
        nixl: Any,
        describe: Callable[[str, float], tuple[Sequence[Descriptors], float] | None],
        prepare: Callable[[], None],
        entry: AbstractContextManager[Any],
    ) -> None:
        """`describe` says what to read from an engine for about so many MB (10^6 bytes), and how
        many they really are; None where blocks do not pair. `prepare` is called first in a thread.
        `entry`: held by who adds a peer to NIXL's agent."""
        self.links = Links()
        self._nixl = nixl
        self._describe = describe
        self._prepare = prepare
        self._entry = entry
        self._unfinished = Unfinished()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bidir_probe")

    def met(self, engine_id: str, measured: bool) -> None:
        """Open the way to an engine that has just been met; `measured`: and see how fast it is.

        Called in the handshake's thread, which waits for it: the first transfer would, and in the
        engine's step. Whatever goes wrong, the engine has been met.
        """
        try:
            found = self._describe(engine_id, 0.0)
            if found is None:
                return
            opened = touch(self._nixl, engine_id, found[0], self._unfinished, TOUCH_S, self._entry)
            if opened and measured:
                self.links.probe_started(engine_id)
                self._measure(engine_id)
        except Exception:
            self.links.failed(engine_id, time.monotonic())
            logger.exception("engine %s could not be probed", engine_id)

    def start(self, engine_id: str) -> None:
        """Measure in a thread of its own."""
        self.links.probe_started(engine_id)
        # Before the thread starts: until it has ended the engine must not be forgotten.
        self._unfinished.enter(engine_id)
        probe = self._threads.submit(self._measure_apart, engine_id)
        # Also of one that is cancelled before its thread has come to it.
        probe.add_done_callback(lambda _: self._unfinished.leave(engine_id))

    def _measure_apart(self, engine_id: str) -> None:
        try:
            self._prepare()
            self._measure(engine_id)
        except Exception:
            self.links.failed(engine_id, time.monotonic())
            logger.exception("engine %s could not be probed", engine_id)

    def _measure(self, engine_id: str) -> None:
        sized = partial(self._describe, engine_id)
        rate = measure(self._nixl, engine_id, sized, self._unfinished, MEASURE_S)
        if rate is None:
            self.links.failed(engine_id, time.monotonic())
            return
        self.links.measured(engine_id, rate.megabytes_per_s, time.monotonic(), rate.finished)
        logger.info(
            "the link to engine %s achieves %.3g GB/s%s",
            engine_id,
            rate.megabytes_per_s / 1e3,
            "" if rate.finished else " at most",
        )

    def engines(self) -> set[str]:
        """Engines that a probe reads from."""
        return self._unfinished.engines()

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        self.links.forget(engine_id)

    def sweep(self, still_runs: Callable[[Any], bool]) -> None:
        """`still_runs` asks NIXL about a probe's transfer, and releases it when it has ended."""
        if len(self._unfinished):
            self._unfinished.sweep(still_runs)

    def close(self) -> list[Any]:
        """End all probes: the transfers that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._unfinished.close(_CLOSE_S)
