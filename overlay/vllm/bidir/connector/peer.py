# SPDX-License-Identifier: Apache-2.0
"""Ask another engine's side channel one question, and wait a bounded time for the answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.greeting import Greeting, read_greeting
from vllm.bidir.connector.messages import (
    HoldAnswer,
    MalformedMessageError,
    ask_claim,
    ask_confirm,
    ask_hold,
    read_claim,
    read_confirm,
    read_hold,
)
from vllm.bidir.reasons import Reason
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path


@dataclass(frozen=True)
class Asked:
    """What came of a question: `hold`, `stood` or `stands_s`, or the reason why there is no answer.

    `asked` (monotonic seconds) is when it was put, `seconds` how long that took, `address` whom it
    was put to; None when it was put to nobody. `source` is what HOLD was about. `stands_s`: for so
    long from `asked` on, at the least, what was claimed stands; 0: it stood when P answered.
    """

    hold: HoldAnswer | None = None
    stood: bool = False
    stands_s: float | None = None
    reason: Reason | None = None
    asked: float = 0.0
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


def claim(host: str, port: int, token: str, reader: str, binding: bytes, timeout_s: float) -> Asked:
    """CLAIM. A handover that is gone, or another reader's, is Reason.EXPIRED; one of other blocks
    is Reason.NOT_HANDED_OVER."""

    def understand(frame: bytes) -> Asked:
        found = read_claim(frame)
        return Asked(reason=found) if isinstance(found, Reason) else Asked(stands_s=found)

    return _ask(host, port, ask_claim(token, reader, binding), timeout_s, understand)


def greeting(host: str, port: int, handshake: bytes, timeout_s: float) -> Greeting:
    """What is said in answer to this message of the base's that asks for a handshake.

    Raises MalformedMessageError, zmq.ZMQError or OSError.
    """
    return read_greeting(_exchange(host, port, handshake, timeout_s))


_FAILURES = (zmq.ZMQError, MalformedMessageError, ValueError, OSError)
# Of an answer: block ids of a turn of 10 million tokens.
_MAX_ANSWER = 4 << 20


def _ask(
    host: str, port: int, message: bytes, timeout_s: float, understand: Callable[[bytes], Asked]
) -> Asked:
    begun = time.monotonic()
    try:
        asked = understand(_exchange(host, port, message, timeout_s))
    except _FAILURES as error:
        asked = Asked(reason=_reason(error))
    return replace(asked, asked=begun, seconds=time.monotonic() - begun, address=(host, port))


def _exchange(host: str, port: int, message: bytes, timeout_s: float) -> bytes:
    # Here, where only this question waits for it: ZMQ looks names up in a thread that it has once
    # for a context.
    # Of a name the IPv4 address, as the base and the node's own listener take it.
    family = socket.AF_INET6 if is_valid_ipv6_address(host) else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    address = str(found[0][4][0])
    # The process's own context: one for each question costs more than the question.
    with zmq.Context.instance().socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER)
        asking.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        asking.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        asking.setsockopt(zmq.IPV6, is_valid_ipv6_address(address))
        asking.connect(make_zmq_path("tcp", address, port))
        asking.send(message)
        frames: list[bytes] = asking.recv_multipart()
    return frames[0]


def _reason(error: Exception) -> Reason:
    if isinstance(error, zmq.Again):
        return Reason.TIMEOUT
    return Reason.PEER_GONE
