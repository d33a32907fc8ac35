"""Whether runs may be compared, and what speaks against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from tools.bench.collect import Run
from tools.bench.figures import by_length, figures
from tools.bench.prove import Proof

LEAST_REPEATS = 3
_SPREAD = 0.5
# Before the engines start; more is not the noise of a machine at rest.
_BUSY = 0.2
_FIRST_TURNS = 1.2
# What must be the same in all arms: name, and where it lies.
_SAME: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (
    ("workload", lambda about: about["workload"]),
    ("model", lambda about: (about["model"], about["dtype"])),
    ("hardware", lambda about: about["hardware"]),
    ("versions", lambda about: about["versions"]),
    ("tensor parallelism", lambda about: about["tensor_parallel"]),
    ("longest context", lambda about: about["max_model_len"]),
    ("block size", lambda about: about["block_size"]),
)


def warnings(runs: Sequence[Run], proofs: Sequence[Proof]) -> list[str]:
    """What a reader has to know before comparing; none when nothing speaks against it."""
    return [
        *_failed(proofs),
        *_missing(runs),
        *_different(runs),
        *_order(runs),
        *_busy(runs),
        *_spread(runs),
        *_first_turns(runs),
        *_replies(runs),
    ]


def _failed(proofs: Sequence[Proof]) -> Iterator[str]:
    for proof in proofs:
        for problem in proof.problems[:3]:
            yield f"{proof.arm}, repeat {proof.repeat} FAILED: {problem}"


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    names = {run.arm for run in runs}
    for wanted in ("off", "on"):
        if wanted not in names:
            yield f"there is no run of the arm {wanted!r}: nothing shows what read-back changes"
    repeats = {name: {run.repeat for run in runs if run.arm == name} for name in sorted(names)}
    if len({frozenset(found) for found in repeats.values()}) > 1:
        shown = "; ".join(f"{name}: {sorted(found)}" for name, found in repeats.items())
        yield f"the arms were not repeated alike ({shown})"
    fewest = min(map(len, repeats.values()), default=0)
    if fewest < LEAST_REPEATS:
        yield f"{fewest} repeat(s): at least {LEAST_REPEATS} are needed to see the spread"
    requests: dict[str, set[tuple[Any, ...]]] = {}
    for run in runs:
        requests.setdefault(run.arm, set()).update(one.record.key[1:] for one in run.joined)
    everything = set().union(*requests.values()) if requests else set()
    for name, found in sorted(requests.items()):
        if lacks := everything - found:
            yield f"{name} lacks {len(lacks)} of {len(everything)} requests, such as {min(lacks)}"


def _different(runs: Sequence[Run]) -> Iterator[str]:
    for name, value_of in _SAME:
        values: dict[str, list[str]] = {}
        for run in runs:
            value = json.dumps(value_of(run.about), sort_keys=True)
            values.setdefault(value, []).append(f"{run.arm} {run.repeat}")
        if len(values) > 1:
            shown = "; ".join(f"{who[0]} {value[:160]}" for value, who in values.items())
            yield f"the runs differ in {name}: {shown}"


def _order(runs: Sequence[Run]) -> Iterator[str]:
    """Arms that ran one after the other rather than in turns have each had their own weather."""
    begun = sorted((str(run.about["sessions"][0]["begun"]), run.arm) for run in runs)
    blocks = [name for name, _ in groupby(arm for _, arm in begun)]
    if len(runs) > len({run.arm for run in runs}) and len(blocks) == len(set(blocks)) > 1:
        yield f"the arms did not take turns, but ran one after the other: {', '.join(blocks)}"


def _busy(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        busy = max(session["busy_share"] for session in run.about["sessions"])
        if busy > _BUSY:
            yield f"{run.arm}, repeat {run.repeat}: others took {busy:.0%} of the machine"


def _spread(runs: Sequence[Run]) -> Iterator[str]:
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for one in run.joined:
            if tokens := by_length(one):
                found.setdefault((run.arm, tokens), []).append(one.record.ttft_ms)
    for (arm, tokens), values in sorted(found.items()):
        middle = median(values)
        if max(values) - min(values) > _SPREAD * middle and len(values) > 1:
            yield (
                f"{arm}: TTFT at {tokens} tokens spreads from {min(values):.0f} to "
                f"{max(values):.0f} ms around {middle:.0f}"
            )


def _first_turns(runs: Sequence[Run]) -> Iterator[str]:
    """Where nothing can be read back, off and on should take the same time."""
    by_arm = {series.arm: series.points for series in figures(runs).first_turns}
    off = {point.x: point.median for point in by_arm.get("off", ())}
    shares = [p.median / off[p.x] for p in by_arm.get("on", ()) if p.x in off]
    if shares and not 1 / _FIRST_TURNS < median(shares) < _FIRST_TURNS:
        yield (
            f"first turns, which read nothing back, took {median(shares):.2f} times as long with "
            "the feature on as off: the arms differ in more than read-back (compare with the arm "
            "unlinked)"
        )


def _replies(runs: Sequence[Run]) -> Iterator[str]:
    """Equal requests have equal greedy replies, but for near-ties in low precision."""
    replies: dict[tuple[Any, ...], dict[str, str]] = {}
    for run in runs:
        for one in run.joined:
            told = replies.setdefault(one.record.key[1:], {})
            if one.record.reply_digest:
                told[one.record.arm] = one.record.reply_digest
    both = [told for told in replies.values() if len(told) > 1]
    differ = sum(len(set(told.values())) > 1 for told in both)
    if differ:
        yield f"{differ} of {len(both)} requests had another reply in another arm"
