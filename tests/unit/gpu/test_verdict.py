"""Each kind of wrong figure is named, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.gpu.compare import Difference
from tests.gpu.measure import Measured
from tests.gpu.verdict import as_json, judge, table

SMALL, LARGE = Difference(20, 0.2, 0.1), Difference(3, 4.0, 2.0)
RIGHT = Measured(
    name="edited_middle",
    prompt=840,
    block=16,
    read=400,
    expected=400,
    checks=dict.fromkeys(
        ("handover", "read_back", "decode", "later_decode", "later_prefill"), SMALL
    ),
    noise={"two_pieces": Difference(20, 0.24, 0.12)},
    controls={"another_block": LARGE},
    counted=LARGE,
)


def problems(*cases: Measured) -> tuple[str, ...]:
    return judge(cases, len(cases)).problems


def test_a_right_run_has_no_problems() -> None:
    assert problems(RIGHT, replace(RIGHT, name="3:append", counted=SMALL)) == ()


def test_another_number_of_tokens_read_is_a_problem() -> None:
    (one,) = problems(replace(RIGHT, read=384))
    assert "read 384 tokens, expected 400" in one


def test_each_check_above_the_limit_is_a_problem() -> None:
    for name in RIGHT.checks:
        (one,) = problems(replace(RIGHT, checks={**RIGHT.checks, name: LARGE}))
        assert name in one


def test_a_control_that_passes_is_a_problem() -> None:
    """A comparison that does not find another prompt's block would find no wrong KV either."""
    (one,) = problems(replace(RIGHT, controls={"another_block": SMALL}))
    assert "control another_block" in one
    assert problems(replace(RIGHT, controls={})) == ("no control was run",)


def test_reading_by_count_must_show_and_only_where_it_is_wrong() -> None:
    (one,) = problems(replace(RIGHT, counted=SMALL))
    assert "by count" in one
    assert problems(replace(RIGHT, name="append", counted=SMALL)) == ()
    assert len(problems(replace(RIGHT, name="append", counted=LARGE))) == 1


def test_missing_conversations_are_a_problem() -> None:
    assert judge([RIGHT], 2).problems == ("1 of 2 conversations were run",)


def test_table_and_json_show_every_case() -> None:
    """Named rows have a line of their own, random ones share one with the worst figures."""
    worse = {**RIGHT.checks, "decode": LARGE}
    cases = [RIGHT, replace(RIGHT, name="1:edit"), replace(RIGHT, name="2:edit", checks=worse)]
    verdict = judge(cases, 3)
    lines = table(cases, verdict)
    assert lines[1].startswith("edited_middle") and lines[1].endswith("right")
    assert lines[2].startswith("2 random") and lines[2].endswith("1 wrong")
    assert "3/20 2.000 4.000" in lines[2]
    written = json.loads(as_json(cases, verdict, {"gpu": "H200"}, ["engine died"]))
    assert written["about"] == {"gpu": "H200"}
    assert [case["name"] for case in written["cases"]] == ["edited_middle", "1:edit", "2:edit"]
    assert written["problems"][-1] == "engine died"
    assert written["cases"][2]["problems"]
