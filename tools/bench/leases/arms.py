"""The arms: how a decode node treats turns that have ended.

Arms are held against those that keep nothing with the same connector. The base's and ours differ
in more than what they keep: NIXL's own thread polls without a pause in the base, and takes half of
a core from an engine that has no other.

What is required of leases is a few percent, and a machine's speed drifts by more than that within a
minute. So these arms are up at the same time, and their loads alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.errors import BenchError
from tools.bench.leases.plan import Plan

# A share of D's blocks that is less than one: every turn is refused.
_NO_BUDGET = 1e-6


@dataclass(frozen=True)
class Arm:
    """stock: the base release, P and D called one after the other. bidirectional: D keeps turns
    for P. leased: by lease, which the router renews; without `keeps` within a budget of nothing.
    beside: the arms that keep nothing, which this one is held against. alternates: its load runs in
    turns with those of the other arms that do, all of them up."""

    name: str
    title: str
    beside: tuple[str, ...]
    stock: bool = False
    bidirectional: bool = True
    leased: bool = False
    keeps: bool = True
    alternates: bool = False

    def decode_config(self, plan: Plan) -> Mapping[str, Any]:
        """What D's connector is told beside what all are."""
        if not self.leased:
            return {}
        return {
            "decoder_kv_lease_duration": plan.lease_s,
            "decoder_kv_lease_budget": plan.budget if self.keeps else _NO_BUDGET,
        }


OURS, STOCK = ("none", "none-again"), ("stock-none",)
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("none", "nothing kept", OURS, leased=True, keeps=False, alternates=True),
        Arm("leases", "leases", OURS, leased=True, alternates=True),
        Arm("none-again", "nothing kept, again", OURS, leased=True, keeps=False, alternates=True),
        Arm("fixed", "fixed TTL", OURS),
        Arm("stock-none", "stock, nothing kept", STOCK, stock=True, bidirectional=False),
        Arm("stock", "stock, fixed TTL", STOCK, stock=True),
    )
}
"""In the order of running."""


def arms_of(names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these names, in this order; BenchError for a name that is none or comes twice."""
    for name in names:
        if name not in ARMS or names.count(name) > 1:
            raise BenchError(
                f"arm {name!r} {'comes twice' if name in ARMS else 'does not exist'}",
                expected=f"each at most once of {', '.join(ARMS)}",
                found=",".join(names),
            )
    return tuple(ARMS[name] for name in names)


def groups_of(arms: Sequence[Arm]) -> tuple[tuple[Arm, ...], ...]:
    """What is up at the same time: those that alternate together, each other arm alone."""
    together = tuple(arm for arm in arms if arm.alternates)
    alone = tuple((arm,) for arm in arms if not arm.alternates)
    return (together, *alone) if together else alone
