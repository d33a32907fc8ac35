# SPDX-License-Identifier: Apache-2.0
"""What an engine's handshake says beyond the base's words: that it answers claims.

Params, which carry what is claimed, come with a request: who leaves the token out must not have D
take this P for a stock one, nor who puts one in a stock P for this, since a message that it does
not know ends a stock node's listener. So an engine says it in its handshake, in a field that the
base's decoder passes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.bidir.connector import agents
from vllm.bidir.connector.messages import MalformedMessageError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

# The form of CLAIM that it answers; see messages.py.
_FORM = 1
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Greeting:
    """Which NIXL agent answers a handshake (agents.py), and whether its engine binds claims."""

    agent: bytes
    binds: bool


class _Payload(msgspec.Struct):
    agent_metadata_bytes: bytes
    bidir_claim: int = 0


class _Metadata(msgspec.Struct):
    agent_metadata: bytes


_PAYLOAD = msgspec.msgpack.Decoder(_Payload)
_METADATA = msgspec.msgpack.Decoder(_Metadata)


def payloads(metadata: Mapping[Any, NixlHandshakePayload]) -> dict[Any, bytes]:
    """The base's payloads as they are sent, by rank, and our word with each."""
    return {
        ranks: _encode({**asdict(payload), "bidir_claim": _FORM})
        for ranks, payload in metadata.items()
    }


def agent_of(metadata: bytes) -> bytes:
    """Digest of the NIXL agent that a payload's `agent_metadata_bytes` are of; msgspec's errors."""
    return agents.digest(_METADATA.decode(metadata).agent_metadata)


def read_greeting(frame: bytes) -> Greeting:
    """Of a payload of any release; MalformedMessageError for what is none."""
    try:
        payload = _PAYLOAD.decode(frame)
        agent = agent_of(payload.agent_metadata_bytes)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedMessageError(str(error)) from error
    return Greeting(agent, payload.bidir_claim >= _FORM)
