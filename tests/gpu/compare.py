"""How far apart two computations of the next token are, and when that is too far.

In bfloat16 two right computations of one prompt differ: another batch shape, another kernel,
another order of sums. So the limit is not a constant: it is taken from pairs of computations
of the same run in which nothing was transferred.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOP = 20
# The largest of some hundred differences of noise is not the largest there can be.
MARGIN = 1.5
# Where two computations agree to the bit, as on one CPU, the last digits of the text remain.
LEAST = 1e-4

LogProbs = Mapping[int, float]


@dataclass(frozen=True)
class Difference:
    """Of two lists of the TOP most probable next tokens.

    overlap: tokens in both. gap: largest difference of log-probabilities (nats); a token that
    one list lacks counts with that list's smallest, which it cannot exceed. rms: root mean square
    of the same differences, which decides, since it varies less than the largest of them.
    """

    overlap: int
    gap: float
    rms: float


def difference(one: LogProbs, other: LogProbs) -> Difference:
    """Symmetric. What is missing or not finite makes gap and rms infinite."""
    if not one or not other or not all(map(math.isfinite, (*one.values(), *other.values()))):
        return Difference(0, math.inf, math.inf)
    both = one.keys() & other.keys()
    gaps = [abs(one[token] - other[token]) for token in both]
    gaps += [max(0.0, one[token] - min(other.values())) for token in one.keys() - both]
    gaps += [max(0.0, other[token] - min(one.values())) for token in other.keys() - both]
    rms = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
    return Difference(len(both), max(gaps), rms)


def limit(noise: Iterable[Difference]) -> float:
    """The rms above which two computations are not of the same prompt."""
    found = [one.rms for one in noise]
    if not found or not all(map(math.isfinite, found)):
        raise ValueError("without finite noise there is nothing to measure by")
    return max(MARGIN * max(found), LEAST)
