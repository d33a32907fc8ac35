# SPDX-License-Identifier: Apache-2.0
"""What the link to each peer achieves, and whether reading over it takes longer than computing.

Only a probe's rate may call a link slow. A READ's time holds waits for other READs and for the
engine's step: it proves that the link is at least so fast, never that it is slower. One that looks
slow makes the peer suspect, which asks for a probe.

    unknown --probe--> fast --a read-back is refused--> slow --a probe or a READ is fast--> fast
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from vllm.logger import init_logger

logger = init_logger(__name__)

# A READ is taken to need this much longer than a probe of as many bytes: it has more descriptors,
# and shares the link with others.
SLACK = 1.5
# A suspect peer is probed at most once in so many seconds: a probe takes the link from READs.
SUSPECT_S = 10.0
# A slow peer is probed after so many seconds, twice as many after each probe that changed nothing.
LEAST_BACK_OFF_S = 30.0
MOST_BACK_OFF_S = 600.0
CURE = (
    "for two engines on one host set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on on both; between hosts check "
    "that UCX (or LIBFABRIC) uses the fabric: UCX_PROTO_INFO=y shows it"
)


@dataclass
class _Link:
    """Rates are in MB/s; `needed` is what the fastest refused read-back would have taken.

    unfinished: probes in a row that did not end in time.
    """

    rate: float | None = None
    probing: bool = False
    probed: float | None = None
    unfinished: int = 0
    needed: float | None = None
    back_off_s: float = LEAST_BACK_OFF_S


class Links:
    """Links by engine id. MB are 10^6 bytes, times monotonic seconds as the caller reads them.

    Any thread may call: a handshake's thread measures while the engine's step asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}

    def rate(self, engine_id: str) -> float | None:
        """MB/s; None if unknown."""
        with self._lock:
            link = self._links.get(engine_id)
            return None if link is None else link.rate

    ############################################################
    # Probes
    ############################################################

    def probe_started(self, engine_id: str) -> None:
        """Call it before the probe's thread starts, so that no second one does."""
        with self._lock:
            self._links.setdefault(engine_id, _Link()).probing = True

    def probing(self, engine_id: str) -> bool:
        with self._lock:
            link = self._links.get(engine_id)
            return link is not None and link.probing

    def measured(
        self, engine_id: str, megabytes_per_s: float, now: float, finished: bool = True
    ) -> None:
        """A probe has ended with this rate, which replaces what was known.

        Not `finished` in time: the rate is the most that it can be, and counts when the next probe
        ends so, too. A peer may have stood still for a moment, which is not the link's doing.
        """
        with self._lock:
            link = self._links.setdefault(engine_id, _Link())
            link.probing, link.probed = False, now
            link.unfinished = 0 if finished else link.unfinished + 1
            if link.unfinished != 1:
                link.rate = megabytes_per_s
                self._judge(engine_id, link)
            if link.needed is not None:
                _back_off(link)

    def failed(self, engine_id: str, now: float) -> None:
        """A probe has ended without a rate, and nothing is known any more.

        The peer may be another process by now. That shows when it is asked to hold a turn, and a
        peer that counts as slow is not asked.
        """
        with self._lock:
            link = self._links.get(engine_id)
            if link is None:
                return
            link.probing, link.probed, link.rate = False, now, None
            if link.needed is not None:
                _back_off(link)

    def suspect(self, engine_id: str, now: float) -> bool:
        """A READ took longer than computing would have, or was given up: whether to probe now."""
        with self._lock:
            return _is_due(self._links.get(engine_id), now, SUSPECT_S)

    def should_probe(self, engine_id: str, now: float) -> bool:
        """A read-back was refused as too slow: whether to see now if the link has improved."""
        with self._lock:
            link = self._links.get(engine_id)
            return _is_due(link, now, LEAST_BACK_OFF_S if link is None else link.back_off_s)

    ############################################################
    # Reads
    ############################################################

    def achieved(self, engine_id: str, megabytes: float, seconds: float) -> None:
        """A READ has finished. An unknown rate stays unknown: this is only the least it can be."""
        if megabytes <= 0 or seconds <= 0:
            return
        with self._lock:
            link = self._links.get(engine_id)
            if link is None or link.rate is None:
                return
            link.rate = max(link.rate, megabytes / seconds)
            self._judge(engine_id, link)

    def is_slow(self, engine_id: str, megabytes: float, compute_s: float | None) -> bool:
        """Whether so many MB take longer to read than the `compute_s` seconds of computing them.

        False where either is unknown. The first refusal of a peer is logged as a warning, with the
        cure; the others until it has improved are not.
        """
        if compute_s is None or compute_s <= 0 or megabytes <= 0:
            return False
        with self._lock:
            link = self._links.get(engine_id)
            if link is None or link.rate is None:
                return False
            computing = megabytes / compute_s
            needed = SLACK * computing
            if link.rate >= needed:
                return False
            if link.needed is None:
                logger.warning(
                    "read-back from engine %s is off: its link achieves %.3g GB/s, computing the "
                    "same tokens here corresponds to %.3g GB/s. %s.",
                    engine_id,
                    link.rate / 1e3,
                    computing / 1e3,
                    CURE,
                )
            # The most that was asked: with the least, one that others pass would warn for ever.
            link.needed = max(needed, link.needed or 0.0)
            return True

    def is_off(self, engine_id: str) -> bool:
        """Whether it was slow when it was last timed, and cannot be timed any more."""
        with self._lock:
            link = self._links.get(engine_id)
            return link is not None and link.needed is not None and link.rate is None

    def forget(self, engine_id: str) -> None:
        """The engine is gone; one that comes back under its id is another process."""
        with self._lock:
            self._links.pop(engine_id, None)

    def _judge(self, engine_id: str, link: _Link) -> None:
        """Whether the link's rate ends a slow period."""
        if link.needed is None or link.rate is None or link.rate < link.needed:
            return
        link.needed, link.back_off_s = None, LEAST_BACK_OFF_S
        logger.info(
            "read-back from engine %s is on again: its link achieves %s",
            engine_id,
            f"{link.rate / 1e3:.3g} GB/s",
        )


def _is_due(link: _Link | None, now: float, wait_s: float) -> bool:
    """Whether no probe runs, and the last one ended at least so long ago."""
    if link is None:
        return True
    return not link.probing and (link.probed is None or now - link.probed >= wait_s)


def _back_off(link: _Link) -> None:
    link.back_off_s = min(MOST_BACK_OFF_S, 2 * link.back_off_s)
