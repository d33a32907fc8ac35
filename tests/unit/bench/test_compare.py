"""What speaks against comparing runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.bench.made import about, computed, pairs, read, run
from tools.bench.collect import Joined, Run
from tools.bench.compare import warnings
from tools.bench.prove import prove


def told(runs: list[Run]) -> list[str]:
    return warnings(runs, [prove(one) for one in runs])


def changed(runs: list[Run], arm: str, **values: Any) -> list[Run]:
    return [replace(one, about={**one.about, **values}) if one.arm == arm else one for one in runs]


def test_runs_that_may_be_compared_need_no_warning() -> None:
    assert told(pairs()) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("workload", {"workload": {"lengths": [1]}}),
        ("model", {"model": {"num_hidden_layers": 5}}),
        ("hardware", {"hardware": {**about("on")["hardware"], "cpu": "other"}}),
        ("versions", {"versions": {"vllm": "0.28.0"}}),
        ("tensor parallelism", {"tensor_parallel": 2}),
        ("block size", {"block_size": 16, "kv_bytes_per_token": 8192 * 8}),
    ],
)
def test_arms_that_differ_in_more_than_the_feature_are_named(
    name: str, values: dict[str, Any]
) -> None:
    lines = told(changed(pairs(), "on", **values))
    assert any(line.startswith(f"the runs differ in {name}: off 0 ") for line in lines), lines


@pytest.mark.parametrize("arm", ["off", "on"])
def test_a_missing_leg_is_named(arm: str) -> None:
    lines = told([one for one in pairs() if one.arm != arm])
    assert f"there is no run of the arm {arm!r}: nothing shows what read-back changes" in lines


def test_too_few_repeats_and_unequal_ones_are_named() -> None:
    assert told(pairs(2)) == ["2 repeat(s): at least 3 are needed to see the spread"]
    lines = told(pairs()[:-1])
    assert "the arms were not repeated alike (off: [0, 1, 2]; on: [0, 1])" in lines


def test_missing_requests_are_counted() -> None:
    runs = pairs()
    runs[1] = replace(runs[1], joined=runs[1].joined[:1])
    (line,) = told(runs)
    assert line.startswith("on lacks 1 of 6 requests, such as (0, 'sweep-700', 0, 2)")


def test_a_failed_proof_comes_first() -> None:
    runs = [run("off", computed()), run("on", computed(arm="on"))]
    assert told(runs)[0] == "on, repeat 0 FAILED: nothing moved: no request read any token back"


def test_other_replies_are_counted() -> None:
    runs = pairs()
    one, other = runs[1].joined
    odd = Joined(**{**vars(one), "record": replace(one.record, reply_digest="odd")})
    runs[1] = replace(runs[1], joined=(odd, other))
    assert told(runs) == ["1 of 6 requests had another reply in another arm"]


@pytest.mark.parametrize(("on_ms", "told_so"), [(50.0, True), (95.0, False), (130.0, True)])
def test_first_turns_that_differ_between_off_and_on_are_named(on_ms: float, told_so: bool) -> None:
    """They read nothing back: something else is different."""
    runs = pairs()
    for number, ms in ((0, 100.0), (1, on_ms)):
        arm = runs[number].arm
        first = computed(arm=arm, unit="sweep-700", turn=1, input_num_tokens=646, ttft_ms=ms)
        runs[number] = replace(runs[number], joined=(*runs[number].joined, first))
    lines = [line for line in told(runs) if line.startswith("first turns")]
    assert bool(lines) is told_so
    if lines:
        assert f"took {on_ms / 100:.2f} times as long" in lines[0] and "unlinked" in lines[0]


def test_arms_one_after_the_other_are_named() -> None:
    runs = []
    for one in pairs():
        day = one.repeat + 1 + (10 if one.arm == "on" else 0)
        session = {**one.about["sessions"][0], "begun": f"2026-01-{day:02d}T00:00:00"}
        runs.append(replace(one, about={**one.about, "sessions": [session]}))
    assert told(runs) == ["the arms did not take turns, but ran one after the other: off, on"]


def test_a_busy_machine_and_a_wide_spread_are_named() -> None:
    runs = pairs()
    session = {**runs[0].about["sessions"][0], "busy_share": 0.6}
    runs[0] = replace(runs[0], about={**runs[0].about, "sessions": [session]})
    assert told(runs) == ["off, repeat 0: others took 60% of the machine"]
    slow = read(650, arm="on", repeat=2, unit="sweep-700", ttft_ms=500.0)
    runs = pairs()
    runs[-1] = replace(runs[-1], joined=(runs[-1].joined[0], slow))
    assert any("on: TTFT at 700 tokens spreads from 60 to 500 ms" in line for line in told(runs))
