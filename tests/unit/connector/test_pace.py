"""A READ may take its bytes by the peer's measured rate, with slack, and at least a floor."""

from __future__ import annotations

import pytest
from vllm.bidir.connector.pace import SLACK, UNKNOWN_MB_S, Pace


def test_a_peer_never_read_from_is_taken_for_slow() -> None:
    assert Pace(2.0).bound("d", 3500.0) == SLACK * 3500.0 / UNKNOWN_MB_S


def test_the_bound_follows_the_measured_rate() -> None:
    pace = Pace(0.0)
    pace.measured("d", megabytes=1000.0, seconds=0.5)
    assert pace.bound("d", 4000.0) == pytest.approx(SLACK * 2.0)
    for _ in range(50):
        pace.measured("d", megabytes=1000.0, seconds=2.0)
    assert pace.bound("d", 4000.0) == pytest.approx(SLACK * 8.0, rel=0.01)
    assert pace.bound("other", 100.0) == SLACK * 100.0 / UNKNOWN_MB_S


def test_a_small_read_has_the_floor() -> None:
    pace = Pace(2.0)
    pace.measured("d", megabytes=1000.0, seconds=0.1)
    assert pace.bound("d", 1.0) == 2.0


def test_what_measures_nothing_changes_nothing() -> None:
    pace = Pace(0.0)
    pace.measured("d", 0.0, 1.0)
    pace.measured("d", 1.0, 0.0)
    assert pace.bound("d", 100.0) == SLACK * 100.0 / UNKNOWN_MB_S


def test_an_engine_that_is_gone_is_forgotten() -> None:
    pace = Pace(0.0)
    pace.measured("d", 1.0, 1.0)
    pace.forget("d")
    pace.forget("d")
    assert pace.bound("d", 100.0) == SLACK * 100.0 / UNKNOWN_MB_S
