"""What a stream costs, and how many there can be, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.charts import draw_one
from tools.bench.router.arms import DIRECT
from tools.bench.router.figures import Rows, Span

NAME = "router"
_LOOKS = {"steps": ("#009E73", "..."), "paced": ("#0072B2", ""), "saturated": ("#E69F00", "///")}


def draw(data: Mapping[str, Any], folder: Path) -> None:
    """Write `router.svg` and `router.png` into an existing folder."""
    draw_one(folder, NAME, data["samples"], _both)


def _both(figure: Any, samples: Mapping[str, Mapping[str, Rows]]) -> None:
    cost, most = figure.subplots(ncols=2)
    between = [arm for arm in next(iter(samples.values())) if arm != DIRECT]
    width = 0.8 / len(samples)
    drawn = []
    for number, (kind, arms) in enumerate(samples.items()):
        shift = (number - (len(samples) - 1) / 2) * width
        places = [place + shift for place in range(len(between))]
        found = [[one["cpu_ms_per_stream"] for one in arms[arm]] for arm in between]
        drawn.append(_bars(cost, places, found, kind, "{:.2f}", width))
    cost.set_title("CPU per streamed request")
    cost.set_ylabel("ms")
    cost.set_xticks(range(len(between)), between)
    cost.grid(visible=False, axis="x")
    cost.legend(drawn, list(samples), frameon=False)
    kind = list(samples)[-1]
    arms = samples[kind]
    found = [[one["streams_per_s"] for one in rows] for rows in arms.values()]
    _bars(most, list(range(len(arms))), found, kind, "{:,.0f}", 0.4)
    most.set_title(f"Streams per second, {kind}")
    most.set_ylabel("streams/s")
    most.set_xticks(range(len(arms)), list(arms))
    most.grid(visible=False, axis="x")


def _bars(
    axes: Any,
    places: Sequence[float],
    found: Sequence[Sequence[float]],
    kind: str,
    text: str,
    width: float,
) -> Any:
    """Medians, with a line from the lowest to the highest."""
    spans = [Span.of(values) for values in found]
    colour, hatch = _LOOKS[kind]
    bars = axes.bar(
        places,
        [span.median for span in spans],
        0.95 * width,
        color=colour,
        hatch=hatch,
        edgecolor="black",
        linewidth=0.6,
        yerr=[
            [span.median - span.low for span in spans],
            [span.high - span.median for span in spans],
        ],
        capsize=3,
    )
    axes.bar_label(bars, fmt=text, padding=3, fontsize=8)
    return bars
