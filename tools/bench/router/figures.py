"""From samples to what is shown: medians and ranges over the repeats, and what is required."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.bench.router.arms import DIRECT, OURS, SAMPLE
from tools.bench.router.load import Sample

LEAST_CPU_RATIO = 6.0
MOST_ADDED_FIRST_P50_MS = 1.0
MOST_ADDED_FIRST_P99_MS = 5.0
MOST_MEMORY_MB = 120.0
# What the last three are required at.
REQUIRED_CONCURRENCY = 64
REQUIRED_CONVERSATIONS = 100_000


# One mapping (`as_json`) for each repeat.
Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Span:
    """One figure over the repeats: the median, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Span:
        found = sorted(values)
        return cls(median(found), found[0], found[-1])


@dataclass(frozen=True)
class Verdict:
    """One required value: what it is, what was found, and whether it is met."""

    what: str
    required: str
    found: str
    met: bool


@dataclass(frozen=True)
class Memory:
    """Our router with so many conversations remembered. `turn_tokens`: the length of each."""

    conversations: int
    turn_tokens: int
    before_mb: float
    after_mb: float

    @property
    def bytes_each(self) -> float:
        return (self.after_mb - self.before_mb) * 1e6 / self.conversations


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are not above (nearest rank)."""
    found = sorted(values)
    return found[max(1, math.ceil(share * len(found))) - 1]


def as_json(sample: Sample) -> dict[str, Any]:
    """A sample's figures without the single requests."""
    return {
        "streams": sample.streams,
        "seconds": sample.seconds,
        "streams_per_s": sample.streams_per_s,
        "first_p50_ms": quantile(sample.first_ms, 0.5),
        "first_p99_ms": quantile(sample.first_ms, 0.99),
        "whole_p50_ms": quantile(sample.whole_ms, 0.5),
        "whole_p99_ms": quantile(sample.whole_ms, 0.99),
        "cpu_ms_per_stream": sample.cpu_ms,
        "router_core_share": sample.share,
        "load_core_share": sample.load_share,
        "undisturbed": sample.undisturbed,
        "yardstick_ms": sample.yardstick_ms,
    }


def added(arm: Rows, direct: Rows, key: str) -> Span:
    """What an arm adds to the direct one of the same repeat."""
    return Span.of(one[key] - other[key] for one, other in zip(arm, direct, strict=True))


def verdicts(
    samples: Mapping[str, Mapping[str, Rows]], memory: Memory | None, concurrency: int
) -> list[Verdict]:
    """All that is required, as far as it was measured.

    `samples` by kind of load (steps, paced, saturated) and arm.
    """
    found = []
    for kind, arms in samples.items():
        if OURS in arms and SAMPLE in arms:
            found.append(_cpu_ratio(kind, arms[OURS], arms[SAMPLE]))
    for kind, arms in samples.items():
        if kind == "saturated" or OURS not in arms or DIRECT not in arms:
            continue  # what waits for a core that is taken tells of that
        for share, most in (("p50", MOST_ADDED_FIRST_P50_MS), ("p99", MOST_ADDED_FIRST_P99_MS)):
            span = added(arms[OURS], arms[DIRECT], f"first_{share}_ms")
            found.append(
                Verdict(
                    f"added first-byte latency {share}, {concurrency} streams, {kind}",
                    f"<= {most:g} ms at {REQUIRED_CONCURRENCY}",
                    f"{span.median:.2f} ms ({span.low:.2f}-{span.high:.2f})",
                    span.median <= most and concurrency >= REQUIRED_CONCURRENCY,
                )
            )
    if memory is not None:
        found.append(
            Verdict(
                f"memory, {memory.conversations:,} conversations of {memory.turn_tokens:,} tokens",
                f"<= {MOST_MEMORY_MB:g} MB at {REQUIRED_CONVERSATIONS:,}",
                f"{memory.after_mb:.0f} MB ({memory.bytes_each:.0f} bytes each)",
                memory.after_mb <= MOST_MEMORY_MB
                and memory.conversations >= REQUIRED_CONVERSATIONS,
            )
        )
    return found


def _cpu_ratio(kind: str, ours: Rows, sample: Rows) -> Verdict:
    key = "cpu_ms_per_stream"
    ratio = Span.of(other[key] / one[key] for other, one in zip(sample, ours, strict=True))
    return Verdict(
        f"CPU per streamed request, sample proxy / ours, {kind}",
        f">= {LEAST_CPU_RATIO:g}x",
        # Rounded down: what is not met must not look as if it were.
        f"{math.floor(ratio.median * 10) / 10:.1f}x ({ratio.low:.1f}-{ratio.high:.1f})",
        ratio.median >= LEAST_CPU_RATIO,
    )
