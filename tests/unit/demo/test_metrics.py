from __future__ import annotations

from tools.demo.metrics import Reading, Sample

BEFORE = """# HELP reads_total Reads.
# TYPE reads_total counter
reads_total{engine="0",model_name="m"} 3.0
reads_total{engine="1",model_name="m"} 4.0
reads_total_created{engine="0"} 1.7e+09
seconds_sum 0.25
"""
AFTER = """reads_total{engine="0",model_name="m"} 3.0
reads_total{engine="1",model_name="m"} 6.0
reads_total{engine="2",model_name="m"} 1.0
seconds_sum 1.5 1700000000
"""


def test_total_is_over_all_labels() -> None:
    """The samples of one name are summed; names that only begin alike are not among them."""
    assert Reading(BEFORE).total("reads_total") == 7


def test_a_name_never_counted_is_zero() -> None:
    """A counter with labels has no sample before its first use."""
    assert Reading(BEFORE).total("other_total") == 0


def test_growth_is_between_two_readings() -> None:
    """Growth sees new labels, and values with a timestamp behind them."""
    before, after = Reading(BEFORE), Reading(AFTER)
    assert after.growth(before, "reads_total") == 3
    assert after.growth(before, "seconds_sum") == 1.25


def test_grown_names_what_grew_and_by_how_much() -> None:
    """A label set that was not there before grew from zero."""
    grown = Reading(AFTER).grown(Reading(BEFORE), "reads_total")
    assert [(s.label("engine"), s.value) for s in grown] == [("1", 2), ("2", 1)]


def test_labels_may_hold_anything() -> None:
    """Braces, commas and escaped quotes in a value do not end it."""
    (sample,) = Reading('n{a="x},{\\"y",b=""} 1e3').samples
    assert sample == Sample("n", (("a", 'x},{\\"y'), ("b", "")), 1000.0)
    assert sample.label("missing") == ""
