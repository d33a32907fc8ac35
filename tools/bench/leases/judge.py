"""What is required of the arms, and whether it was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tools.bench.leases.arms import ARMS
from tools.bench.leases.load import MOST_OTHERS
from tools.bench.leases.plan import Phase

MOST_WORSE = 0.05
LEAST_HITS = 0.9
MOST_HEARTBEAT_MS = 5.0
LEASES = "leases"
PHASE_TITLES: Mapping[Phase, str] = {
    "fit": "load fits beside the budget",
    "full": "load needs all memory",
}


@dataclass(frozen=True)
class Required:
    """One line: what, what was to be, what was. `met` is None when it was not measured."""

    what: str
    required: str
    found: str
    met: bool | None

    def __str__(self) -> str:
        word = {True: "met", False: "NOT MET", None: "NOT MEASURED"}[self.met]
        return f"{word}: {self.what}: {self.found} (required: {self.required})"


@dataclass(frozen=True)
class Base:
    """A figure of keeping nothing: the mean of its runs, and how far they lie apart, as a share of
    it; None with one run."""

    value: float
    noise: float | None

    def __str__(self) -> str:
        apart = "" if self.noise is None else f", whose two runs differ by {self.noise:.1%}"
        return f"{self.value:.1f} when nothing is kept{apart}"


def tokens_per_s(phase: Mapping[str, Any]) -> float:
    return float(phase["load"]["tokens_per_s"])


def p99_ms(phase: Mapping[str, Any]) -> float:
    return float(phase["load"]["itl_p99_ms"])


def base(
    made: Mapping[str, Any],
    arm: str,
    phase: Phase,
    figure: Callable[[Mapping[str, Any]], float],
) -> Base | None:
    """A figure of the arms that keep nothing, beside this one; None if none has run."""
    arms = made["arms"]
    found = [figure(arms[name]["phases"][phase]) for name in ARMS[arm].beside if name in arms]
    if not found or not mean(found):
        return None
    noise = abs(found[0] - found[1]) / mean(found) if len(found) == 2 else None
    return Base(mean(found), noise)


def judge(made: Mapping[str, Any]) -> list[Required]:
    """All that is required of a run's JSON."""
    return [
        _throughput(made, "fit"),
        _latency(made),
        _hits(made),
        _throughput(made, "full"),
        _heartbeat(made.get("heartbeat")),
    ]


def _throughput(made: Mapping[str, Any], phase: Phase) -> Required:
    limit = 1 - MOST_WORSE
    return _against(
        made,
        phase,
        tokens_per_s,
        f"tokens/s of leases, {PHASE_TITLES[phase]}",
        f"at least {limit:.0%} of keeping nothing",
        lambda share: share >= limit,
    )


def _latency(made: Mapping[str, Any]) -> Required:
    limit = 1 + MOST_WORSE
    return _against(
        made,
        "fit",
        p99_ms,
        f"p99 inter-token ms of leases, {PHASE_TITLES['fit']}",
        f"at most {limit:.0%} of keeping nothing",
        lambda share: share <= limit,
    )


def _against(
    made: Mapping[str, Any],
    phase: Phase,
    figure: Callable[[Mapping[str, Any]], float],
    what: str,
    required: str,
    holds: Callable[[float], bool],
) -> Required:
    beside = base(made, LEASES, phase, figure)
    leases = made["arms"].get(LEASES)
    if beside is None or leases is None:
        return Required(what, required, "-", None)
    found = figure(leases["phases"][phase])
    share = found / beside.value
    text = f"{found:.1f}, {share:.1%} of {beside}"
    compared = [made["arms"].get(name) for name in (LEASES, *ARMS[LEASES].beside)]
    others = max(arm["phases"][phase]["load"]["others"] for arm in compared if arm is not None)
    if others > MOST_OTHERS:
        text += f"; others took up to {others:.0%} of the machine meanwhile: run it again, alone"
        return Required(what, required, text, None)
    return Required(what, required, text, holds(share))


def _hits(made: Mapping[str, Any]) -> Required:
    what, required = f"hits of leases, {PHASE_TITLES['fit']}", f"at least {LEAST_HITS:.0%}"
    leases = made["arms"].get(LEASES)
    if leases is None:
        return Required(what, required, "-", None)
    back = leases["phases"]["fit"]["back"]
    share = back["hits"] / back["turns"]
    return Required(
        what, required, f"{back['hits']} of {back['turns']}, {share:.0%}", share >= LEAST_HITS
    )


def _heartbeat(found: Mapping[str, Any] | None) -> Required:
    required = f"at most {MOST_HEARTBEAT_MS:g} ms of the engine core per interval, median"
    if found is None:
        return Required("a heartbeat for all kept conversations", required, "-", None)
    what = f"a heartbeat for {found['leases']} kept conversations"
    parts = found["parts"]
    p50 = parts["interval"]["p50_ms"]
    text = (
        f"p50 {p50:.2f} ms, max {parts['interval']['max_ms']:.2f} ms; of that the call "
        f"{parts['call']['p50_ms']:.2f} ms, looks for leases that are over "
        f"{parts['looks']['p50_ms']:.2f} ms"
    )
    return Required(what, required, text, p50 <= MOST_HEARTBEAT_MS)
