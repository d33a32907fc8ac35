"""What turns count is shown exactly as prometheus_client shows its own."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from vllm.bidir.router.telemetry.tallies import Durations, Tally

BOUNDS = (0.01, 0.5, 1, 120)
SECONDS = (0.0, 0.01, 0.010001, 0.7, 1, 119.9, 121.0)


def shown(registry: CollectorRegistry) -> list[str]:
    """Its text, without the times at which stock metrics were made."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("labels", [("hit", ""), ("miss", 'a "b"\\\n')])
def test_a_tally_is_a_counter(labels: tuple[str, str]) -> None:
    ours, stock = CollectorRegistry(), CollectorRegistry()
    tally = Tally("turns", "Some.", ["outcome", "reason"], ours)
    counter = Counter("turns", "Some.", ["outcome", "reason"], registry=stock)
    assert shown(ours) == shown(stock)
    for by in (1, 3, 0):
        tally.count(*labels, by=by)
        counter.labels(*labels).inc(by)
        assert shown(ours) == shown(stock)
    tally.count("other", "")
    counter.labels("other", "").inc()
    assert shown(ours) == shown(stock)
    assert tally.by_labels[labels] == 4


def test_durations_are_a_histogram() -> None:
    ours, stock = CollectorRegistry(), CollectorRegistry()
    durations = Durations("took", "Some.", BOUNDS, ours)
    histogram = Histogram("took", "Some.", buckets=BOUNDS, registry=stock)
    assert shown(ours) == shown(stock)
    for seconds in SECONDS:
        durations.observe(seconds)
        histogram.observe(seconds)
        assert shown(ours) == shown(stock)


def test_durations_with_a_label_are_one_for_each() -> None:
    ours, stock = CollectorRegistry(), CollectorRegistry()
    durations = Durations("took", "Some.", BOUNDS, ours, "outcome")
    histogram = Histogram("took", "Some.", ["outcome"], buckets=BOUNDS, registry=stock)
    assert shown(ours) == shown(stock)
    for number, seconds in enumerate(SECONDS):
        outcome = ("hit", "miss")[number % 2]
        durations.observe(seconds, outcome)
        histogram.labels(outcome).observe(seconds)
    assert shown(ours) == shown(stock)
