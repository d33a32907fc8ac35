# SPDX-License-Identifier: Apache-2.0
"""HOLD, CONFIRM and CLAIM in threads of their own: the engine's step only picks up answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from vllm.bidir.connector import peer
from vllm.bidir.connector.decision import Source
from vllm.bidir.reasons import Reason
from vllm.logger import init_logger

logger = init_logger(__name__)

# A peer that did not answer is not asked again for so long: its silence must not take the
# threads that the answers of others wait for.
SILENCE_S = 5.0
_THREADS = 8
# Handovers are many, and each has a claim; so many peers' may be silent at once.
_CLAIMS = 64
_T = TypeVar("_T")


_SILENCE = (Reason.TIMEOUT, Reason.PEER_GONE)


class Silent:
    """Peers that did not answer lately. Any thread may call."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int], float] = {}

    def __contains__(self, address: tuple[str, int]) -> bool:
        return self._until.get(address, 0.0) > time.monotonic()

    def add(self, address: tuple[str, int]) -> None:
        now = time.monotonic()
        # Addresses come from params: those whose time is over are not kept.
        for other in [one for one, until in list(self._until.items()) if until <= now]:
            self._until.pop(other, None)
        self._until[address] = now + SILENCE_S

    def discard(self, address: tuple[str, int]) -> None:
        self._until.pop(address, None)


class Questions:
    """Asks peers, one thread per question; answers are (request id, answer), in order of coming."""

    def __init__(self, timeout_s: float) -> None:
        self.holds: SimpleQueue[tuple[str, peer.Asked]] = SimpleQueue()
        self.confirms: SimpleQueue[tuple[str, peer.Asked]] = SimpleQueue()
        self.claims: SimpleQueue[tuple[str, peer.Asked]] = SimpleQueue()
        self._timeout_s = timeout_s
        self._holders = ThreadPoolExecutor(_THREADS, thread_name_prefix="bidir_hold")
        # Apart: the holds of silent peers must not delay what is all but done.
        self._confirmers = ThreadPoolExecutor(_THREADS, thread_name_prefix="bidir_confirm")
        # Of handovers, which an engine reads that reads nothing back.
        self._claimers = ThreadPoolExecutor(_CLAIMS, thread_name_prefix="bidir_claim")
        # Apart, too: nobody waits for these.
        self._leavers = ThreadPoolExecutor(1, thread_name_prefix="bidir_let_go")
        self._silent = Silent()
        self._silent_to_leavers = Silent()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._holders.shutdown(wait=False, cancel_futures=True)
        self._confirmers.shutdown(wait=False, cancel_futures=True)
        self._claimers.shutdown(wait=False, cancel_futures=True)
        self._leavers.shutdown(wait=False, cancel_futures=True)

    def hold(self, request_id: str, source: Source) -> None:
        self._holders.submit(_ask, self.holds, request_id, lambda: self._hold(source))

    def _hold(self, source: Source) -> peer.Asked:
        if self.is_silent(source):
            # It has fallen silent while this question waited for a thread.
            return peer.Asked(reason=Reason.PEER_GONE)
        asked = peer.hold(source.host, source.port, source.lease_id, self._timeout_s)
        return replace(asked, source=source)

    def confirm(self, request_id: str, source: Source, epoch: int) -> None:
        timeout = self._timeout_s
        self._confirmers.submit(
            _ask,
            self.confirms,
            request_id,
            lambda: peer.confirm(source.host, source.port, source.lease_id, epoch, timeout),
        )

    def claim(
        self,
        request_id: str,
        address: tuple[str, int],
        token: str,
        reader: str,
        binding: bytes,
        insists: bool = False,
    ) -> None:
        """Ask P at `address` whether the handover with this token stands for this reader, and is
        of what `binding` names.

        One that was lately silent is asked only by who insists.
        """
        self._claimers.submit(
            _ask,
            self.claims,
            request_id,
            lambda: self._claim(address, token, reader, binding, insists),
        )

    def _claim(
        self,
        address: tuple[str, int],
        token: str,
        reader: str,
        binding: bytes,
        insists: bool,
    ) -> peer.Asked:
        if self._closed or (address in self._silent and not insists):
            return peer.Asked(reason=Reason.PEER_GONE, asked=time.monotonic())
        asked = peer.claim(*address, token, reader, binding, self._timeout_s)
        # At once: others wait for these threads.
        self.note(asked)
        return asked

    def let_go(self, source: Source, epoch: int) -> None:
        """End a hold whose blocks are not read, or no longer; what D answers changes nothing.

        An engine that is ending leaves its holds to run out.
        """
        if not self._closed:
            self._leavers.submit(self._let_go, source, epoch)

    def _let_go(self, source: Source, epoch: int) -> None:
        address = (source.host, source.port)
        if address in self._silent or address in self._silent_to_leavers:
            return
        asked = peer.confirm(source.host, source.port, source.lease_id, epoch, self._timeout_s)
        if asked.reason in _SILENCE:
            # Of a peer that was gone then: by now it may be back, and others not wait for it.
            self._silent_to_leavers.add(address)
        else:
            self.note(asked)

    def is_silent(self, source: Source) -> bool:
        """Whether the peer has lately not answered."""
        return (source.host, source.port) in self._silent

    def note(self, asked: peer.Asked) -> None:
        """Remember whether the peer that was asked is there."""
        if asked.address is None:
            return
        if asked.reason in _SILENCE:
            self.not_heard(asked.address)
        else:
            self._silent.discard(asked.address)

    def not_heard(self, address: tuple[str, int]) -> None:
        """The peer did not answer in time."""
        self._silent.add(address)


def _ask(
    answers: SimpleQueue[tuple[str, peer.Asked]],
    request_id: str,
    question: Callable[[], peer.Asked],
) -> None:
    """Runs in a thread. An answer is queued whatever happens: the request waits for it."""
    try:
        asked = question()
    except Exception:
        logger.exception("req=%s: its peer could not be asked", request_id)
        asked = peer.Asked(reason=Reason.PEER_GONE, asked=time.monotonic())
    answers.put((request_id, asked))


def drain(waiting: SimpleQueue[_T]) -> list[_T]:
    """All that has arrived, without waiting."""
    arrived: list[_T] = []
    while True:
        try:
            arrived.append(waiting.get_nowait())
        except Empty:
            return arrived
