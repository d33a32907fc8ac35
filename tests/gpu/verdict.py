"""From figures to right or wrong, a table, and what goes into the JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.gpu.compare import Difference, limit
from tests.gpu.histories import ROWS, counted_wrong
from tests.gpu.measure import Measured

_CHECKS = ("handover", "read_back", "decode", "later_decode", "later_prefill")


@dataclass(frozen=True)
class Verdict:
    """`problems` names everything that is wrong; `limit` is the rms that was allowed."""

    limit: float
    problems: tuple[str, ...]


def judge(cases: Sequence[Measured], wanted: int) -> Verdict:
    """All cases against the noise of all of them; `wanted` is how many there should be."""
    allowed = limit(noise for case in cases for noise in case.noise.values())
    problems = [problem for case in cases for problem in case_problems(case, allowed)]
    if len(cases) < wanted:
        problems.append(f"{len(cases)} of {wanted} conversations were run")
    if not any(case.controls for case in cases):
        problems.append("no control was run")
    return Verdict(allowed, tuple(problems))


def case_problems(case: Measured, allowed: float) -> list[str]:
    """What is wrong with one conversation."""
    found = []
    if case.read != case.expected:
        found.append(f"{case.name}: read {case.read} tokens, expected {case.expected}")
    for name, one in case.checks.items():
        if not one.rms <= allowed:
            found.append(f"{case.name}: {name} differs by {one.rms:.3g} > {allowed:.3g}")
    for name, one in case.controls.items():
        if one.rms <= allowed:
            found.append(f"{case.name}: control {name} not found ({one.rms:.3g})")
    if case.stranded:
        found.append(f"{case.name}: D has lost {case.stranded} turns that it was to keep")
    if case.counted is not None and case.name in ROWS:
        wrong = case.counted.rms > allowed
        if wrong != counted_wrong(case.name, case.block):
            found.append(f"{case.name}: control by count differs by {case.counted.rms:.3g}")
    return found


def table(cases: Sequence[Measured], verdict: Verdict) -> list[str]:
    """One line for each named row, one for all random conversations together, and the noise.

    A cell is overlap, rms and gap.
    """
    head = f"{'history':<20}{'prompt':>7}{'read':>6}{'expect':>7}"
    head += "".join(f"{name:>20}" for name in (*_CHECKS, "another block", "by count"))
    lines = [head + "  verdict"]
    for case in cases:
        if case.name in ROWS:
            lines.append(_line(case, verdict))
    rest = [case for case in cases if case.name not in ROWS]
    if rest:
        lines.append(_summary(rest, verdict))
    noise = [one for case in cases for one in case.noise.values()]
    lines.append(
        f"noise without transfer: {len(noise)} pairs, largest rms {max(n.rms for n in noise):.3f}, "
        f"gap {max(n.gap for n in noise):.3f}, smallest overlap {min(n.overlap for n in noise)}; "
        f"limit of rms {verdict.limit:.4f}"
    )
    return lines


def _line(case: Measured, verdict: Verdict) -> str:
    cells = [*(case.checks.get(name) for name in _CHECKS), case.controls.get("another_block")]
    text = f"{case.name:<20}{case.prompt:>7}{case.read:>6}{case.expected:>7}"
    text += "".join(f"{_cell(one):>20}" for one in (*cells, case.counted))
    return text + ("  WRONG" if case_problems(case, verdict.limit) else "  right")


def _summary(rest: Sequence[Measured], verdict: Verdict) -> str:
    """Largest difference of each check, smallest of the control."""
    wrong = sum(bool(case_problems(case, verdict.limit)) for case in rest)
    text = f"{f'{len(rest)} random, worst':<20}{'':>7}{sum(c.read for c in rest):>6}"
    text += f"{sum(c.expected for c in rest):>7}"
    for name in _CHECKS:
        worst = max((c.checks[name] for c in rest if name in c.checks), key=lambda d: d.rms)
        text += f"{_cell(worst):>20}"
    controls = [c.controls["another_block"] for c in rest if c.controls]
    least = min(controls, key=lambda d: d.rms) if controls else None
    above = sum(c.counted is not None and c.counted.rms > verdict.limit for c in rest)
    counted = f"{above} wrong" if any(c.counted for c in rest) else "-"
    return text + f"{_cell(least):>15}{counted:>20}" + f"  {wrong} wrong"


def _cell(one: Difference | None) -> str:
    return "-" if one is None else f"{one.overlap}/20 {one.rms:.3f} {one.gap:.3f}"


def as_json(
    cases: Sequence[Measured], verdict: Verdict, about: dict[str, Any], errors: Sequence[str]
) -> str:
    """Every figure of the run, one conversation a line."""
    rows = [{**asdict(case), "problems": case_problems(case, verdict.limit)} for case in cases]
    head = {
        "about": about,
        "limit": rounded(verdict.limit),
        "problems": [*verdict.problems, *errors],
    }
    lines = ",\n".join(json.dumps(rounded(row)) for row in rows)
    return json.dumps(head, indent=1)[:-2] + f',\n "cases": [\n{lines}\n]}}\n'


def rounded(value: Any) -> Any:
    """Noise differs in the second digit; five are enough, and keep the file small."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return value
