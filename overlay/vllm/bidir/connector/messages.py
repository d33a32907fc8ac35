# SPDX-License-Identifier: Apache-2.0
"""HOLD, CONFIRM and CLAIM on NIXL's side channel: msgpack in, msgpack out, nothing trusted.

P asks D about a read-back, D asks P about a handover:

    HOLD     [HOLD, lease_id]             -> [epoch, engine_id, agents, tp_size, block_ids,
                                              valid_tokens, digest]
    CONFIRM  [CONFIRM, lease_id, epoch]   -> true or false
    CLAIM    [CLAIM, token, reader,
              binding]                    -> seconds for which it stands at the least; 0: it stands;
                                             false: P has handed over something else (binding.py)
    gone, or not understood               -> nil

The base's own message is [GET_META, pp_rank, tp_rank] and is answered as the base answers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from vllm.bidir.connector.handed import HandedOver
from vllm.bidir.connector.kept import KeptTurns
from vllm.bidir.reasons import Reason

HOLD = b"bidir_hold/1"
CONFIRM = b"bidir_confirm/1"
CLAIM = b"bidir_claim/1"
_MAX_LEASE_ID = 64
# Of what a claim names.
MAX_NAME = 256
_MAX_BINDING = 64
_MAX_MESSAGE = 4096

_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode


class HoldAnswer(msgspec.Struct, array_like=True, frozen=True):
    """D's answer to HOLD. `block_ids` are D's own, by position in the turn; `agents` name the
    NIXL agents of the process, by tensor-parallel rank (agents.py)."""

    epoch: int
    engine_id: str
    agents: list[bytes]
    tp_size: int
    block_ids: list[int]
    valid_tokens: int
    digest: bytes


_HOLD_ANSWER = msgspec.msgpack.Decoder(HoldAnswer | None)
_CONFIRM_ANSWER = msgspec.msgpack.Decoder(bool | None)
_CLAIM_ANSWER = msgspec.msgpack.Decoder(float | bool | None)
# What is answered to a claim that does not stand.
_REFUSED: dict[Reason, bool | None] = {Reason.EXPIRED: None, Reason.NOT_HANDED_OVER: False}


class MalformedMessageError(Exception):
    """A side-channel message or answer that this version does not understand."""


def ask_hold(lease_id: str) -> bytes:
    return _encode((HOLD, lease_id))


def ask_confirm(lease_id: str, epoch: int) -> bytes:
    return _encode((CONFIRM, lease_id, epoch))


def ask_claim(token: str, reader: str, binding: bytes) -> bytes:
    return _encode((CLAIM, token, reader, binding))


def read_hold(answer: bytes) -> HoldAnswer | None:
    """D's answer to HOLD, None for gone; MalformedMessageError for anything else."""
    return _decode(_HOLD_ANSWER, answer)


def read_confirm(answer: bytes) -> bool:
    """Whether the hold stood; gone counts as no."""
    return bool(_decode(_CONFIRM_ANSWER, answer))


def read_claim(answer: bytes) -> float | Reason:
    """Seconds for which the handover stands at the least, or why it does not."""
    found = _decode(_CLAIM_ANSWER, answer)
    if found is None:
        return Reason.EXPIRED
    if found is False:
        return Reason.NOT_HANDED_OVER
    if found is True or not 0 <= found < math.inf:
        raise MalformedMessageError(f"{found} s")
    return found


def _decode(decoder: msgspec.msgpack.Decoder[_T], answer: bytes) -> _T:
    try:
        return decoder.decode(answer)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from error


class SideChannel:
    """An engine's answers to all messages of the side channel, as D and as P."""

    def __init__(
        self,
        kept: KeptTurns,
        engine_id: str,
        tp_size: int,
        metadata: Mapping[tuple[int, int], bytes],
        get_meta: bytes,
        clock: Callable[[], float],
        agents: Sequence[bytes] = (),
        handed: HandedOver | None = None,
    ) -> None:
        """`metadata` are the encoded handshake payloads by (pp_rank, tp_rank); `get_meta` is the
        base's word for asking for one; `clock` is the one that stamps block expiry; `agents` are
        this engine's own, by rank."""
        self._kept = kept
        # Not `or`: an empty list is the engine's own all the same.
        self._handed = HandedOver(clock) if handed is None else handed
        self._engine_id = engine_id
        self._tp_size = tp_size
        self._agents = list(agents)
        self._metadata = metadata
        self._get_meta = get_meta
        self._clock = clock

    def answer(self, message: bytes) -> list[bytes]:
        """The frames of the answer; MalformedMessageError when there is none to give."""
        if len(message) > _MAX_MESSAGE:
            raise MalformedMessageError(f"{len(message)} bytes")
        try:
            parts: Any = msgspec.msgpack.decode(message)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedMessageError(str(error)) from error
        if not isinstance(parts, list) or not parts:
            raise MalformedMessageError("not a list")
        word, *rest = parts
        if word == HOLD and len(rest) == 1 and _is_lease(rest[0]):
            return [_encode(self._hold(rest[0]))]
        if word == CONFIRM and len(rest) == 2 and _is_lease(rest[0]) and type(rest[1]) is int:
            return [_encode(self._kept.confirm(rest[0], rest[1]))]
        if word == CLAIM and len(rest) == 3 and _is_binding(rest[2]):
            return self._claim(*rest)
        if word == self._get_meta and len(rest) == 2 and all(type(rank) is int for rank in rest):
            payload = self._metadata.get((rest[0], rest[1]))
            if payload is None:
                raise MalformedMessageError(f"no rank {rest}")
            return [payload, _encode(self._clock())]
        raise MalformedMessageError("unknown word or wrong arguments")

    def _claim(self, token: Any, reader: Any, binding: bytes) -> list[bytes]:
        if not (_is_name(token) and _is_name(reader)):
            raise MalformedMessageError("a claim that names nothing")
        found = self._handed.claim(token, reader, binding)
        return [_encode(_REFUSED[found] if isinstance(found, Reason) else found)]

    def _hold(self, lease_id: str) -> HoldAnswer | None:
        hold = self._kept.hold(lease_id)
        if hold is None:
            return None
        turn = hold.turn
        return HoldAnswer(
            hold.epoch,
            self._engine_id,
            self._agents,
            self._tp_size,
            list(turn.block_ids),
            turn.valid_tokens,
            turn.digest,
        )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME


def _is_binding(value: object) -> bool:
    return isinstance(value, bytes) and len(value) <= _MAX_BINDING


def _is_lease(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_LEASE_ID
