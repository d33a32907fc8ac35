"""A run's figures and what is required of them, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tools.bench.leases.judge import LEASES, PHASE_TITLES, base, judge, p99_ms, tokens_per_s
from tools.bench.leases.plan import PHASES, Phase

_HEAD = (
    f"{'':20}{'tokens/s':>9}{'to none':>9}{'ITL p50':>9}{'p99 ms':>8}{'to none':>9}"
    f"{'TTFT p50':>10}{'preempted':>11}{'queued ms':>11}{'hits':>8}{'turn ms':>9}{'others':>8}"
)


def text(made: Mapping[str, Any]) -> str:
    """One table for each phase, then a line for each requirement."""
    plan = made["plan"]
    lines = [
        f"{plan['conversations']} idle conversations on a decode node of {plan['decode_blocks']} "
        f"blocks of {plan['block_size']} tokens; budget of leases {plan['budget']:.1%}",
    ]
    for phase in PHASES:
        lines += ["", *_table(made, phase)]
    lines += ["", *map(str, judge(made))]
    if made["left_out"]:
        lines.append(f"left out, the deadline was near: {', '.join(made['left_out'])}")
    return "\n".join(lines)


def _table(made: Mapping[str, Any], phase: Phase) -> Iterator[str]:
    plan = made["plan"]
    yield f"{PHASE_TITLES[phase]}: {plan['streams_' + phase]} streams, {plan['seconds']:g} s"
    yield _HEAD
    for name, arm in made["arms"].items():
        found = arm["phases"][phase]
        load, decode, back = found["load"], found["decode"], found["back"]
        yield (
            f"{arm['title']:20}{load['tokens_per_s']:9.1f}"
            f"{_to_base(made, name, phase, tokens_per_s):>9}"
            f"{load['itl_p50_ms']:9.1f}{load['itl_p99_ms']:8.1f}"
            f"{_to_base(made, name, phase, p99_ms):>9}"
            f"{load['ttft_p50_ms']:10.0f}{decode['preempted']:11d}{decode['queued_ms']:11.0f}"
            f"{back['hits']:5d}/{back['turns']}{back['turn_ms']:9.0f}"
            f"{load['others']:8.1%}"
        )
    yield from _leases(made, phase)
    for figure, what in ((tokens_per_s, "tokens/s"), (p99_ms, "p99")):
        beside = base(made, LEASES, phase, figure)
        if beside is not None and beside.noise is not None:
            yield f"  noise: {what} of the two runs that keep nothing differ by {beside.noise:.1%}"


def _leases(made: Mapping[str, Any], phase: Phase) -> Iterator[str]:
    for arm in made["arms"].values():
        decode = arm["phases"][phase]["decode"]
        before, after = decode["leases_before"], decode["leases_after"]
        if before is None:
            continue
        ended, expired, refused = (
            after[name] - before[name] for name in ("reclaimed", "expired", "refused")
        )
        yield (
            f"  {arm['title']}: {before['blocks']} blocks kept before the load, {after['blocks']} "
            f"at its end; {ended} ended for want of blocks, {expired} expired, {refused} refused"
        )


def _to_base(
    made: Mapping[str, Any],
    arm: str,
    phase: Phase,
    figure: Callable[[Mapping[str, Any]], float],
) -> str:
    beside = base(made, arm, phase, figure)
    found = figure(made["arms"][arm]["phases"][phase])
    return "-" if beside is None else f"{found / beside.value - 1:+.1%}"
