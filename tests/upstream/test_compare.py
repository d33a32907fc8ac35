"""The comparison with stock notices whatever an upstream test does otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.upstream.compare import list_problems, problems, read_events
from tests.upstream.selection import Difference

FILE = "tests/test_a.py"
ONE = f"{FILE}::test_one"
KNOWN = [Difference(ONE, "it asks for what is wrong", "tests/test_ours.py::test_twin")]


def events(outcomes: dict[str, str], test: str = ONE) -> list[str]:
    phases = [
        {"event": phase, "id": test, "outcome": word, "seconds": 0.1, "text": f"{phase} {word}"}
        for phase, word in outcomes.items()
    ]
    return [json.dumps(event) for event in [{"event": "start", "id": test}, *phases]]


def seen(lines: list[str], known: list[Difference] | None = None) -> tuple[str, ...]:
    return problems(FILE, [ONE], read_events(lines, "ended with exit code 1"), known or [])


PASSED = events({"setup": "passed", "call": "passed", "teardown": "passed"})
FAILED = events({"setup": "passed", "call": "failed", "teardown": "passed"})


def test_a_test_that_passes_as_on_stock_is_no_problem() -> None:
    assert seen(PASSED) == ()


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ({"setup": "passed", "call": "failed", "teardown": "passed"}, "call failed"),
        ({"setup": "failed", "teardown": "passed"}, "setup failed"),
        ({"setup": "passed", "call": "passed", "teardown": "failed"}, "teardown failed"),
        ({"setup": "skipped", "teardown": "passed"}, "skipped"),
        ({"setup": "passed"}, "ended with exit code 1"),
    ],
    ids=["fails", "setup", "teardown", "skipped", "the process died in it"],
)
def test_any_other_end_is_a_problem_that_names_the_test_and_its_message(
    outcomes: dict[str, str], says: str
) -> None:
    (found,) = seen(events(outcomes))
    assert found.startswith(ONE)
    assert says in found


def test_a_test_that_is_gone_is_a_problem() -> None:
    (found,) = seen([])
    assert "not run" in found and ONE in found
    assert "ended with exit code 1" in found


def test_a_file_that_cannot_be_imported_says_why_once() -> None:
    line = json.dumps({"event": "uncollected", "id": FILE, "text": "ImportError: no such name"})
    (found,) = problems(FILE, [ONE, f"{FILE}::test_two"], read_events([line], "ended"), [])
    assert "ImportError: no such name" in found


def test_a_known_difference_may_fail_but_must_not_pass_or_vanish() -> None:
    assert seen(FAILED, KNOWN) == ()
    assert "take it out" in seen(PASSED, KNOWN)[0]
    assert "not run" in seen([], KNOWN)[0]


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        (Difference(f"{FILE}::test_two", "why", "tests/test_ours.py::test_twin"), "no such test"),
        (Difference(ONE, " ", "tests/test_ours.py::test_twin"), "no reason"),
        (Difference(ONE, "why", "tests/test_ours.py::test_gone"), "does not exist"),
        (Difference(ONE, "why", "tests/test_gone.py::test_twin"), "does not exist"),
        (Difference(ONE, "why", "tests/test_ours.py"), "does not exist"),
    ],
)
def test_a_known_difference_needs_an_upstream_test_a_reason_and_a_twin(
    difference: Difference, says: str, tmp_path: Path
) -> None:
    ours = tmp_path / "tests" / "test_ours.py"
    ours.parent.mkdir()
    ours.write_text("class TestAll:\n    def test_in(self): ...\nasync def test_twin(): ...\n")
    stock = {FILE: [ONE]}
    assert list_problems(KNOWN, stock, tmp_path) == ()
    inside = Difference(ONE, "why", "tests/test_ours.py::TestAll::test_in[a]")
    assert list_problems([inside], stock, tmp_path) == ()
    assert says in list_problems([difference], stock, tmp_path)[0]
