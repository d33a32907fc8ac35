"""What is counted and logged of a decision: where the prompt's tokens came from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.connector.sim import Engine
from tests.connector.test_simulated import finished_turn, numbers


@pytest.mark.parametrize("cached", [0, 160])
def test_a_refused_read_back_counts_what_p_had_and_what_it_computes(
    model: Path, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(cached)
    p, d = Engine(model, "p"), Engine(model, "d")
    params, _ = finished_turn(d, numbers(rng, 300), numbers(rng, 40))
    other = numbers(rng, 400)
    if cached:
        p.run(other[:cached], None)
    counted: list[tuple[object, ...]] = []
    monkeypatch.setattr(p.bidir.stats, "record_refusal", lambda *row: counted.append(row))
    p.run(other, params, source=d)
    assert counted == [("diverged", 0, 400 - cached)]
