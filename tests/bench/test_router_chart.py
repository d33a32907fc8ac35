"""The chart of what a router costs; it needs matplotlib, which the unit tests go without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.test_router_cost import results
from tools.bench.router.chart import draw


@pytest.mark.parametrize("kinds", [["paced"], ["steps", "paced", "saturated"]])
def test_the_chart_has_all_that_was_measured(kinds: list[str], tmp_path: Path) -> None:
    data = results(2.0, 2.0, 120.0)
    data["samples"] = {kind: data["samples"][kind] for kind in kinds}
    draw(data, tmp_path)
    text = (tmp_path / "router.svg").read_text(encoding="utf-8")
    assert text.count(">12.00</text>") == len(kinds), "one label for each bar of the sample proxy"
    assert all(f">{kind}</text>" in text for kind in kinds)
