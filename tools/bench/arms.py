"""The arms of the experiment: what runs, and what has to be true of it.

An arm is one configuration of engines and of what stands in front of them. All arms get the same
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools.bench.errors import BenchError

Front = Literal["router", "sample-proxy", "none"]


@dataclass(frozen=True)
class Arm:
    """One configuration.

    front: what the client talks to; "none" is the engine itself.
    bidirectional: `bidirectional_kv_xfer` on both engines.
    linked: whether requests say which conversation they belong to.
    prefill_cache: whether P keeps a prefix cache; without one, read-back alone is measured.
    stock: run the base release instead of the installed wheel.
    must_move: a run in which no KV was read back has failed.
    """

    name: str
    title: str
    what: str
    front: Front = "router"
    bidirectional: bool = False
    linked: bool = True
    prefill_cache: bool = False
    stock: bool = False
    must_move: bool = False

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on engines of their own."""
        return self.front != "none"

    @property
    def links(self) -> bool:
        """Whether there is somebody who takes a conversation's id, and it is given."""
        return self.linked and self.disaggregated


ARMS = {
    arm.name: arm
    for arm in (
        Arm("off", "off", "P computes every prompt; bidirectional_kv_xfer false, as released"),
        Arm(
            "on",
            "on (fixed TTL)",
            "P reads back what D kept, for decoder_kv_blocks_ttl seconds",
            bidirectional=True,
            must_move=True,
        ),
        Arm(
            "stock",
            "stock 0.29.0, sample proxy",
            "the base release with bidirectional_kv_xfer, behind its own sample proxy",
            front="sample-proxy",
            bidirectional=True,
            stock=True,
        ),
        Arm(
            "cached",
            "off, prefix cache on P",
            "P keeps its own prefix cache: what it has computed, not what D generated",
            prefill_cache=True,
        ),
        Arm(
            "on-cached",
            "on, prefix cache on P",
            "P uses its own prefix cache first, and reads back what is missing",
            bidirectional=True,
            prefill_cache=True,
        ),
        Arm(
            "unlinked",
            "on, turns not linked",
            "the engines of on, but no request names its conversation: P computes every prompt",
            bidirectional=True,
            linked=False,
        ),
        Arm("single", "one engine", "no disaggregation, prefix cache on: the floor", front="none"),
    )
}
DEFAULT = ("off", "on")
# On a CPU the engines of off and on differ in more than read-back: see `unlinked`.
DEFAULT_CPU = ("off", "on", "unlinked")


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


def order(arms: Sequence[Arm], repeats: int, first: int = 0) -> list[tuple[int, Arm]]:
    """(repeat, arm) in the order of running, from repeat `first`: every other goes backwards.

    So no arm always runs first, and a machine that slows down evenly slows all arms down alike.
    """
    return [
        (repeat, arm)
        for repeat in range(first, first + repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]
