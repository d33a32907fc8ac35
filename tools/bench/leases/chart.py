"""Throughput and hits of all arms under both loads, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.charts import draw_one
from tools.bench.leases.judge import PHASE_TITLES
from tools.bench.leases.plan import PHASES

NAME = "leases"
_LOOKS = {"fit": ("#0072B2", ""), "full": ("#E69F00", "///")}


def draw(made: Mapping[str, Any], folder: Path) -> None:
    """Write `leases.svg` and `leases.png` into an existing folder."""
    draw_one(folder, NAME, made, _bars)


def _bars(figure: Any, made: Mapping[str, Any]) -> None:
    axes = figure.add_subplot()
    arms = list(made["arms"].values())
    width, drawn = 0.4, []
    for number, phase in enumerate(PHASES):
        places = [place + (number - 0.5) * width for place in range(len(arms))]
        found = [arm["phases"][phase] for arm in arms]
        colour, hatch = _LOOKS[phase]
        bars = axes.bar(
            places,
            [one["load"]["tokens_per_s"] for one in found],
            width * 0.92,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.6,
        )
        for bar in bars.patches:
            bar.set_gid(f"{NAME}-{phase}")
        drawn.append(bars)
        for place, one in zip(places, found, strict=True):
            back = one["back"]
            axes.annotate(
                f"{back['hits']}/{back['turns']}",
                (place, one["load"]["tokens_per_s"]),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.set_title("Running load while conversations rest")
    axes.set_ylabel("tokens/s of the load")
    axes.set_xticks(range(len(arms)), [arm["title"] for arm in arms], fontsize=8)
    axes.grid(visible=False, axis="x")
    figure.legend(
        drawn,
        [PHASE_TITLES[phase] for phase in PHASES],
        title="above each bar: turns read back when the conversations came back",
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
