# SPDX-License-Identifier: Apache-2.0
"""The calls about leases that a server passes on to the engine core that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.bidir.connector.scheduler import BidirScheduler

RENEW, RELEASE, READ, TOTALS = "renew", "release", "read", "totals"


def call_leases(
    scheduler: BidirScheduler, word: str, lease_ids: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The answer, and the requests whose blocks are to be freed now.

    renew: seconds left by id, and the lost. release: the ids that were there, and the lost. read:
    the one turn's params, None when it is gone. totals: nothing more than what every answer has.
    """
    kept = scheduler.kept
    if word == RENEW:
        renewed, lost = kept.renew(lease_ids)
        return {"renewed": renewed, "lost": lost}, []
    if word == RELEASE:
        released, ended = kept.release(lease_ids)
        found = set(released)
        return {
            "released": released,
            "lost": [one for one in dict.fromkeys(lease_ids) if one not in found],
        }, ended
    if word == READ:
        params = kept.params(lease_ids[0]) if lease_ids else None
        return {"params": None if params is None else dict(params)}, []
    if word == TOTALS:
        return {}, []
    raise ValueError(f"kv_leases: {word!r} is none of {RENEW}, {RELEASE}, {READ}, {TOTALS}")


def no_leases(word: str, lease_ids: Sequence[str]) -> dict[str, Any]:
    """The same answer of an engine that keeps nothing for anybody."""
    lost = list(dict.fromkeys(lease_ids))
    shapes: dict[str, dict[str, Any]] = {
        RENEW: {"renewed": {}, "lost": lost},
        RELEASE: {"released": [], "lost": lost},
        READ: {"params": None},
    }
    return {**shapes.get(word, {}), "totals": None}
