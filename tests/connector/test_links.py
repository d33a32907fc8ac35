"""Slow links: only probes prove them, one warning names the cure, and probes find the end of it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.bidir.connector import links as module
from vllm.bidir.connector.links import (
    LEAST_BACK_OFF_S,
    MOST_BACK_OFF_S,
    SLACK,
    SUSPECT_S,
    Links,
)

# 1000 MB that are computed in 1 s: a link must achieve SLACK times 1000 MB/s.
MEGABYTES, COMPUTE_S = 1000.0, 1.0
NEEDED = SLACK * 1000.0


class Log:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.infos: list[str] = []

    def warning(self, text: str, *values: Any) -> None:
        self.warnings.append(text % values)

    def info(self, text: str, *values: Any) -> None:
        self.infos.append(text % values)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(module, "logger", made)
    return made


@pytest.fixture
def links() -> Links:
    return Links()


def is_slow(links: Links, engine_id: str = "d") -> bool:
    return links.is_slow(engine_id, MEGABYTES, COMPUTE_S)


def probe(links: Links, rate: float | None, now: float) -> None:
    links.probe_started("d")
    if rate is None:
        links.failed("d", now)
    else:
        links.measured("d", rate, now)


def test_reading_must_beat_computing_by_the_slack(links: Links) -> None:
    links.measured("d", NEEDED - 1, 0.0)
    assert is_slow(links)
    links.measured("d", NEEDED, 0.0)
    assert not is_slow(links)
    assert links.is_slow("d", 2 * MEGABYTES, COMPUTE_S)


def test_what_is_not_known_is_not_slow(links: Links) -> None:
    assert not is_slow(links)
    links.achieved("d", 1.0, 100.0)
    assert links.rate("d") is None
    links.measured("d", 1.0, 0.0)
    assert not links.is_slow("d", MEGABYTES, None)
    assert not links.is_slow("d", MEGABYTES, 0.0)
    assert is_slow(links)
    assert not is_slow(links, "other")


def test_a_read_does_not_make_an_unknown_link_slow(links: Links) -> None:
    links.probe_started("d")
    links.failed("d", 0.0)
    links.achieved("d", 1.0, 100.0)
    assert links.rate("d") is None
    assert not is_slow(links)


def test_a_read_only_ever_raises_the_rate(links: Links) -> None:
    links.measured("d", 2000.0, 0.0)
    links.achieved("d", 10.0, 1.0)
    assert links.rate("d") == 2000.0
    links.achieved("d", 5000.0, 1.0)
    assert links.rate("d") == 5000.0
    for megabytes, seconds in [(0.0, 1.0), (1.0, 0.0), (-1.0, -1e-9)]:
        links.achieved("d", megabytes, seconds)
    assert links.rate("d") == 5000.0


def test_a_probe_replaces_the_rate(links: Links) -> None:
    links.measured("d", 2000.0, 0.0)
    links.measured("d", 100.0, 1.0)
    assert links.rate("d") == 100.0
    links.measured("d", 1e9, 2.0)
    assert not is_slow(links)


def test_after_a_failed_probe_nothing_is_known(links: Links) -> None:
    """The peer may be another process; who counts as slow is never asked."""
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    probe(links, None, 1.0)
    assert links.rate("d") is None
    assert not is_slow(links)
    assert links.is_off("d"), "until it is known to be another"
    links.forget("d")
    assert not links.is_off("d")
    links.measured("d", 250.0, 2.0)
    probe(links, None, 3.0)
    assert not links.is_off("d"), "nobody has been refused"


def test_the_first_refusal_warns_and_names_the_cure(links: Links, log: Log) -> None:
    links.measured("d", 250.0, 0.0)
    assert log.warnings == []
    assert is_slow(links) and is_slow(links)
    (warning,) = log.warnings
    assert "engine d is off" in warning
    assert "achieves 0.25 GB/s" in warning and "corresponds to 1 GB/s" in warning
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in warning and "UCX_PROTO_INFO=y" in warning


def test_probes_that_change_nothing_are_silent(links: Links, log: Log) -> None:
    links.measured("d", 250.0, 0.0)
    for number in range(3):
        probe(links, None, 100.0 * number)
        probe(links, 250.0, 100.0 * number)
        assert is_slow(links)
    assert (len(log.warnings), log.infos) == (1, [])


@pytest.mark.parametrize(
    ("rate", "words"), [(NEEDED, "achieves 1.5 GB/s"), (1e9, "achieves 1e+06 GB/s")]
)
def test_a_link_that_improves_says_so_once(links: Links, log: Log, rate: float, words: str) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    probe(links, rate, 1.0)
    probe(links, rate, 2.0)
    (info,) = log.infos
    assert "engine d is on again" in info and words in info
    assert not is_slow(links)
    probe(links, 250.0, 3.0)
    assert is_slow(links)
    assert len(log.warnings) == 2, "a new period"


def test_a_read_that_was_under_way_may_show_that_it_has_improved(links: Links, log: Log) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    links.achieved("d", NEEDED - 1, 1.0)
    assert log.infos == []
    links.achieved("d", NEEDED, 1.0)
    assert len(log.infos) == 1
    assert not is_slow(links)


def test_it_has_improved_when_it_is_fast_enough_for_all_that_was_refused(
    links: Links, log: Log
) -> None:
    links.measured("d", 250.0, 0.0)
    assert links.is_slow("d", 2 * MEGABYTES, COMPUTE_S)
    assert is_slow(links)
    probe(links, NEEDED, 1.0)
    assert log.infos == []
    assert not is_slow(links), "what it is fast enough for is read"
    probe(links, 2 * NEEDED, 2.0)
    assert len(log.infos) == 1
    assert len(log.warnings) == 1


def test_each_peer_has_a_warning_of_its_own(links: Links, log: Log) -> None:
    for engine_id in ("d", "e"):
        links.measured(engine_id, 250.0, 0.0)
        assert is_slow(links, engine_id)
    assert len(log.warnings) == 2


def due(links: Links, since: float) -> float:
    """Seconds after `since` from which on a refusal starts a probe."""
    for seconds in range(1200):
        if links.should_probe("d", since + seconds):
            return float(seconds)
    raise AssertionError("never")


@pytest.mark.parametrize("rate", [250.0, None])
def test_back_off_doubles_with_each_probe_that_changes_nothing(
    links: Links, rate: float | None
) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    now, waits = 0.0, []
    for _ in range(7):
        waits.append(due(links, now))
        now += waits[-1]
        probe(links, rate, now)
        assert is_slow(links) is (rate is not None)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert (waits[0], waits[-1]) == (LEAST_BACK_OFF_S, MOST_BACK_OFF_S)


def test_back_off_is_reset_when_it_has_improved(links: Links) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    probe(links, 250.0, 1.0)
    probe(links, 250.0, 2.0)
    assert due(links, 2.0) == 4 * LEAST_BACK_OFF_S
    probe(links, NEEDED, 3.0)
    probe(links, 250.0, 4.0)
    assert is_slow(links)
    assert due(links, 4.0) == LEAST_BACK_OFF_S


def test_probes_of_a_link_that_is_not_off_cost_no_back_off(links: Links) -> None:
    for now in range(5):
        probe(links, None, now)
        probe(links, 250.0, now)
    assert is_slow(links)
    assert due(links, 4.0) == LEAST_BACK_OFF_S


def test_a_peer_that_stood_still_once_is_not_slow(links: Links) -> None:
    links.measured("d", 2000.0, 0.0)
    links.measured("d", 1.0, 1.0, finished=False)
    assert not is_slow(links)
    links.measured("d", 2000.0, 2.0)
    links.measured("d", 1.0, 3.0, finished=False)
    assert not is_slow(links), "not in a row"
    links.measured("d", 1.0, 4.0, finished=False)
    assert is_slow(links)


def test_a_peer_that_stands_still_is_asked_ever_less_often(links: Links) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    links.measured("d", 1.0, 1.0, finished=False)
    assert due(links, 1.0) == 2 * LEAST_BACK_OFF_S


def test_a_suspect_is_probed_at_most_once_in_a_while(links: Links) -> None:
    assert links.suspect("d", 0.0), "never probed"
    links.measured("d", 2000.0, 0.0)
    assert not links.suspect("d", SUSPECT_S - 0.1)
    assert links.suspect("d", SUSPECT_S)
    probe(links, None, 20.0)
    assert not links.suspect("d", 20.0 + SUSPECT_S - 0.1)
    assert links.suspect("d", 20.0 + SUSPECT_S)


def test_no_probe_starts_while_one_runs(links: Links) -> None:
    links.measured("d", 250.0, 0.0)
    links.probe_started("d")
    assert links.probing("d") and not links.probing("e")
    assert not links.suspect("d", 10_000.0)
    assert not links.should_probe("d", 10_000.0)
    assert links.suspect("e", 10_000.0)
    links.failed("d", 10_000.0)
    assert not links.probing("d")
    links.probe_started("d")
    links.measured("d", 250.0, 20_000.0)
    assert not links.probing("d")
    assert links.suspect("d", 20_000.0 + SUSPECT_S)


def test_an_engine_that_is_gone_takes_its_link_with_it(links: Links, log: Log) -> None:
    links.measured("d", 250.0, 0.0)
    assert is_slow(links)
    probe(links, 250.0, 1.0)
    links.forget("d")
    links.forget("d")
    assert links.rate("d") is None and not is_slow(links)
    links.failed("d", 2.0)
    links.measured("d", 250.0, 3.0)
    assert is_slow(links)
    assert len(log.warnings) == 2
    assert due(links, 3.0) == LEAST_BACK_OFF_S
