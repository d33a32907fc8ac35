# SPDX-License-Identifier: Apache-2.0
"""Ask another engine's side channel one question, and wait a bounded time for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.messages import (
    HoldAnswer,
    MalformedMessageError,
    ask_confirm,
    ask_hold,
    read_confirm,
    read_hold,
)
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import make_zmq_path


@dataclass(frozen=True)
class Asked:
    """What came of a question: `hold` or `stood`, or the reason why there is no answer.

    `address` is whom it was put to; None when it was put to nobody. `source` is what HOLD was
    about.
    """

    hold: HoldAnswer | None = None
    stood: bool = False
    reason: Reason | None = None
    seconds: float = 0.0
    address: tuple[str, int] | None = None
    source: Source | None = None


def hold(host: str, port: int, lease_id: str, timeout_s: float) -> Asked:
    """HOLD. A turn that is gone is Reason.HOLD_LOST."""

    def understand(frame: bytes) -> Asked:
        answer = read_hold(frame)
        return Asked(hold=answer, reason=Reason.HOLD_LOST if answer is None else None)

    return _ask(host, port, ask_hold(lease_id), timeout_s, understand)


def confirm(host: str, port: int, lease_id: str, epoch: int, timeout_s: float) -> Asked:
    """CONFIRM. A hold that did not stand all the time is Reason.HOLD_LOST."""

    def understand(frame: bytes) -> Asked:
        stood = read_confirm(frame)
        return Asked(stood=stood, reason=None if stood else Reason.HOLD_LOST)

    return _ask(host, port, ask_confirm(lease_id, epoch), timeout_s, understand)


_FAILURES = (zmq.ZMQError, MalformedMessageError, ValueError)


def _ask(
    host: str, port: int, message: bytes, timeout_s: float, understand: Callable[[bytes], Asked]
) -> Asked:
    begun = time.monotonic()
    try:
        asked = understand(_exchange(host, port, message, timeout_s))
    except _FAILURES as error:
        asked = Asked(reason=_reason(error))
    return replace(asked, seconds=time.monotonic() - begun, address=(host, port))


def _exchange(host: str, port: int, message: bytes, timeout_s: float) -> bytes:
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as socket:
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        socket.send(message)
        frames: list[bytes] = socket.recv_multipart()
    return frames[0]


def _reason(error: Exception) -> Reason:
    if isinstance(error, zmq.Again):
        return Reason.TIMEOUT
    return Reason.PEER_GONE
