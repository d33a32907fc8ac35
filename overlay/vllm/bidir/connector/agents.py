# SPDX-License-Identifier: Apache-2.0
"""Which NIXL agents an engine's process has: they name the very memory that a READ would touch.

An engine that restarts keeps its id and often its address, but never its agents. So an engine says
in its params and in its answer to HOLD which ones it has, and whoever reads compares them with
those that it has met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

PARAM = "agents"
_DIGEST_BYTES = 8
_MAX_RANKS = 1024


def digest(agent_metadata: bytes) -> bytes:
    """Names one agent. It distinguishes processes; it is no secret and proves nothing."""
    return hashlib.blake2b(agent_metadata, digest_size=_DIGEST_BYTES).digest()


def to_params(agents: Sequence[bytes]) -> list[str]:
    """As they travel inside kv_transfer_params, by tensor-parallel rank."""
    return [agent.hex() for agent in agents]


def parse_agents(value: object) -> tuple[bytes, ...] | None:
    """The agents named by untrusted params, or None."""
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_RANKS:
        return None
    if not all(isinstance(text, str) and len(text) == 2 * _DIGEST_BYTES for text in value):
        return None
    try:
        return tuple(bytes.fromhex(text) for text in value)
    except ValueError:
        return None


def are_met(met: Mapping[int, bytes], agents: Sequence[bytes]) -> bool:
    """Whether all agents that were met, by rank, are among the engine's own."""
    # A copy: a handshake's thread may be adding a rank.
    ranks = list(met.items())
    return bool(ranks) and all(
        0 <= rank < len(agents) and agents[rank] == agent for rank, agent in ranks
    )
