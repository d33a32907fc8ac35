"""The charts of given figures: axes, series, and something to see in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.charts import Chart, read_chart
from tests.unit.bench.made import pairs, read, run
from tests.unit.bench.test_policies import ROUND, STICKY, made_of, one_pass
from tools.bench.charts import draw
from tools.bench.figures import figures
from tools.bench.policies.chart import draw as draw_policies

NAMES = ("ttft_by_prompt", "prefill_split", "ttft_by_turn", "itl_while_held")
AXES = {
    "ttft_by_prompt": ("prompt length (tokens)", "TTFT (ms)"),
    "prefill_split": ("prompt length (tokens)", "prefill (ms, median)"),
    "ttft_by_turn": ("turn", "TTFT (ms)"),
    "itl_while_held": (
        "conversations finished on the decode node since warming up",
        "inter-token latency (ms)",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = pairs()
    for arm in ("off", "on"):
        more = [
            read(650, arm=arm, phase="turns", turn=turn, ttft_ms=50.0 * turn) for turn in (1, 2, 3)
        ]
        more += [
            read(650, arm=arm, phase="decode", turn=1, held=held, itl_ms=(5.0, 6.0, 9.0))
            for held in (0, 7)
        ]
        runs.append(run(arm, *more, repeat=3))
    made = tmp_path_factory.mktemp("charts")
    assert tuple(draw(figures(runs), made)) == NAMES
    return made


@pytest.mark.parametrize("name", NAMES)
def test_axes_have_names_and_units_and_the_legend_names_both_arms(folder: Path, name: str) -> None:
    chart = read_chart(folder, name)
    for text in AXES[name]:
        assert text in chart.texts
    assert {"off", "on"} <= set(chart.texts) or {"off", "on (fixed TTL)"} <= set(chart.texts)


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_large_enough_for_print_and_not_empty(folder: Path, name: str) -> None:
    chart = read_chart(folder, name)
    assert chart.size[0] >= 1400 and chart.colours > 20


@pytest.mark.parametrize(("name", "points"), [("ttft_by_prompt", 2), ("ttft_by_turn", 3)])
def test_both_lines_go_through_every_point(folder: Path, name: str, points: int) -> None:
    chart = read_chart(folder, name)
    assert {arm: chart.points[f"{name}-{arm}"] for arm in ("off", "on")} == {
        "off": points,
        "on": points,
    }


def test_the_on_bars_are_split_and_the_off_bars_are_not(folder: Path) -> None:
    points = read_chart(folder, "prefill_split").points
    assert points["prefill_split-on-KV-transfer"] > 0
    assert points["prefill_split-off-compute"] > 0
    assert "prefill_split-off-KV-transfer" not in points
    assert points["prefill_split_zoom-on-KV-transfer"] > 0


def test_nothing_but_colour_tells_no_two_arms_apart() -> None:
    """In black and white a marker, a line or a hatch still does."""
    from tools.bench.arms import ARMS
    from tools.bench.charts import _HATCHES, _STYLES

    assert len(_STYLES) >= len(ARMS) and len(_HATCHES) >= len(ARMS)
    for looks in ([s[0] for s in _STYLES], [s[1] for s in _STYLES], list(_HATCHES)):
        assert len(set(looks)) == len(looks)
    assert len({json.dumps(style[2]) for style in _STYLES}) == len(_STYLES)


def test_the_same_figures_make_the_same_files(folder: Path, tmp_path: Path) -> None:
    draw(figures(pairs()), tmp_path / "a")
    draw(figures(pairs()), tmp_path / "b")
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert draw(figures(pairs()), tmp_path) == ["ttft_by_prompt", "prefill_split"]


def test_a_chart_reader_notices_an_empty_chart(tmp_path: Path) -> None:
    """The checks above can fail: a chart without its series has no points."""
    empty = [one for one in pairs() if one.arm == "on"]
    draw(figures(empty), tmp_path)
    chart: Chart = read_chart(tmp_path, "ttft_by_prompt")
    assert "ttft_by_prompt-off" not in chart.points and "ttft_by_prompt-on" in chart.points


def test_policies_have_a_bar_for_each_pair_that_was_measured(tmp_path: Path) -> None:
    passes = [one_pass(STICKY, 30.0, (300, 100)), one_pass(ROUND, 9.0, (1, 1))]
    draw_policies(made_of(*passes), tmp_path)
    chart = read_chart(tmp_path, "policies")
    assert {"sticky", "least-loaded", "round-robin", "least-tokens"} <= set(chart.texts)
    bars = {name for name in chart.points if name.startswith("policies-ttft_p99_ms")}
    assert bars == {f"policies-ttft_p99_ms-{name}" for name in ("least-tokens", "round-robin")}
