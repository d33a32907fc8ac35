"""Draws the figures, each as SVG and PNG.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; markers, line styles
and hatches carry the same difference, so that it survives a black-and-white print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.arms import ARMS
from tools.bench.figures import Bars, Figures, Gaps, Series

_SIZE = (7.2, 4.6)
_DPI = 200
# By the arm's place in ARMS: colour, marker, line.
_STYLES = (
    ("#D55E00", "s", "--"),
    ("#0072B2", "o", "-"),
    ("#000000", "^", ":"),
    ("#CC79A7", "D", "-."),
    ("#009E73", "v", (0, (5, 1, 1, 1))),
    ("#56B4E9", "X", (0, (3, 1, 1, 1, 1, 1))),
    ("#E69F00", "P", (0, (1, 1))),
)
# Parts of a bar: name, colour, hatch.
_PARTS = (
    ("compute", "#56B4E9", ""),
    ("KV transfer", "#E69F00", "///"),
    ("hold and confirm", "#FFFFFF", "..."),
)
_HATCHES = ("//", "", "xx", "..", "\\\\", "oo", "++")
_SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    # Text stays text: it can be searched, copied and read aloud.
    "svg.fonttype": "none",
    "hatch.linewidth": 0.8,
}

Drawing = Callable[[Any, Any], None]
"""Draws a figure's data into a matplotlib Figure."""


def draw(figures: Figures, folder: Path) -> list[str]:
    """Write `NAME.svg` and `NAME.png` of each figure that has data; return the names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings: tuple[tuple[str, Sequence[Any], Drawing], ...] = (
        ("ttft_by_prompt", figures.ttft_by_prompt, _ttft_by_prompt),
        ("prefill_split", figures.prefill_split, _prefill_split),
        ("ttft_by_turn", figures.ttft_by_turn, _ttft_by_turn),
        ("itl_while_held", figures.itl_while_held, _itl_while_held),
    )
    drawn = []
    for name, data, onto in drawings:
        if data:
            draw_one(folder, name, data, onto)
            drawn.append(name)
    return drawn


def draw_one(folder: Path, name: str, data: Any, onto: Drawing) -> None:
    """Write `NAME.svg` and `NAME.png` of one figure into an existing folder."""
    import matplotlib

    # Needs no display, and is never changed by a user's own settings.
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    # The salt keeps ids of several charts in one page apart, and equal from one run to the next.
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        onto(figure, data)
        for axes in figure.axes:
            axes.set_ylim(bottom=0)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", dpi=_DPI)


def _ttft_by_prompt(figure: Any, data: Sequence[Series]) -> None:
    axes = _lines(figure, data, "ttft_by_prompt")
    axes.set_title("Time to first token of a conversation's second turn")
    axes.set_xlabel("prompt length (tokens)")
    axes.set_xlim(left=0)


def _ttft_by_turn(figure: Any, data: Sequence[Series]) -> None:
    axes = _lines(figure, data, "ttft_by_turn")
    axes.set_title("Time to first token over the turns of a conversation")
    axes.set_xlabel("turn")
    places = sorted({int(point.x) for series in data for point in series.points})
    if len(places) <= 20:
        axes.set_xticks(places)


def draw_lines(folder: Path, name: str, data: Sequence[Series], title: str, y: str) -> None:
    """Write `NAME.svg` and `NAME.png`: something over the prompt's length, by arm."""

    def onto(figure: Any, series: Sequence[Series]) -> None:
        axes = _lines(figure, series, name, y)
        axes.set_title(title)
        axes.set_xlabel("prompt length (tokens)")
        axes.set_xlim(left=0)

    folder.mkdir(parents=True, exist_ok=True)
    draw_one(folder, name, data, onto)


def _lines(figure: Any, data: Sequence[Series], name: str, y: str = "TTFT (ms)") -> Any:
    axes = figure.add_subplot()
    drawn = []
    for series in data:
        colour, marker, line = _style(series.arm)
        container = axes.errorbar(
            [point.x for point in series.points],
            [point.median for point in series.points],
            yerr=[
                [point.median - point.low for point in series.points],
                [point.high - point.median for point in series.points],
            ],
            color=colour,
            marker=marker,
            linestyle=line,
            linewidth=1.8,
            markersize=6,
            capsize=4,
        )
        container.lines[0].set_gid(f"{name}-{series.arm}")
        drawn.append(container.lines[0])
    axes.set_ylabel(y)
    most = max(point.count for series in data for point in series.points)
    _legend(
        figure,
        drawn,
        [series.title for series in data],
        f"median; bars: lowest and highest of {most}",
    )
    return axes


def _prefill_split(figure: Any, data: Sequence[Bars]) -> None:
    """All arms on one scale, and read-back alone on a scale where its parts can be seen."""
    on = [bars for bars in data if bars.arm != "off"]
    if len(data) > len(on) > 0:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _split_bars(right, on, "prefill_split_zoom")
        right.set_title(f"{' and '.join(bars.arm for bars in on)} alone, enlarged")
        right.set_xlabel("prompt length (tokens)")
    else:
        left = figure.add_subplot()
    parts = _split_bars(left, data, "prefill_split")
    left.set_title("Prefill of the second turn")
    left.set_xlabel("prompt length (tokens)")
    left.set_ylabel("prefill (ms, median)")
    _legend(figure, list(parts.values()), list(parts), "")


def _split_bars(axes: Any, data: Sequence[Bars], name: str) -> dict[str, Any]:
    lengths = sorted({bar.prompt_tokens for bars in data for bar in bars.bars})
    width = 0.8 / len(data)
    drawn: dict[str, Any] = {}
    for number, bars in enumerate(data):
        shift = (number - (len(data) - 1) / 2) * width
        places = [lengths.index(bar.prompt_tokens) + shift for bar in bars.bars]
        values = {
            "compute": [bar.compute for bar in bars.bars],
            "KV transfer": [bar.transfer for bar in bars.bars],
            "hold and confirm": [bar.checks for bar in bars.bars],
        }
        bottom = [0.0] * len(places)
        for part, colour, hatch in _PARTS:
            if not any(values[part]):
                continue
            container = axes.bar(
                places,
                values[part],
                width * 0.92,
                bottom=bottom,
                color=colour,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.6,
            )
            for patch in container.patches:
                patch.set_gid(f"{name}-{bars.arm}-{part.replace(' ', '-')}")
            drawn.setdefault(part, container)
            bottom = [below + own for below, own in zip(bottom, values[part], strict=True)]
        for place, top in zip(places, bottom, strict=True):
            label = bars.arm if len(data) > 1 else f"{top:.0f}"
            axes.annotate(
                label,
                (place, top),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.set_xticks(range(len(lengths)), [f"{length}" for length in lengths], fontsize=8)
    axes.grid(visible=False, axis="x")
    return drawn


def _itl_while_held(figure: Any, data: Sequence[Gaps]) -> None:
    axes = figure.add_subplot()
    arms = [arm for arm in ARMS if any(gaps.arm == arm for gaps in data)]
    helds = sorted({gaps.held for gaps in data})
    width = 0.8 / len(arms)
    drawn, titles = [], []
    for number, arm in enumerate(arms):
        own = [gaps for gaps in data if gaps.arm == arm]
        shift = (number - (len(arms) - 1) / 2) * width
        container = axes.bar(
            [helds.index(gaps.held) + shift for gaps in own],
            [gaps.median for gaps in own],
            width * 0.92,
            yerr=[[0.0] * len(own), [gaps.p99 - gaps.median for gaps in own]],
            capsize=4,
            color=_style(arm)[0],
            hatch=_HATCHES[list(ARMS).index(arm)],
            edgecolor="white",
        )
        for patch in container.patches:
            patch.set_gid(f"itl_while_held-{arm}")
        drawn.append(container)
        titles.append(own[0].title)
    axes.set_title("Decode while finished conversations are kept")
    axes.set_xlabel("conversations finished on the decode node since warming up")
    axes.set_ylabel("inter-token latency (ms)")
    axes.set_xticks(range(len(helds)), [str(held) for held in helds])
    axes.grid(visible=False, axis="x")
    _legend(figure, drawn, titles, "median; whisker: 99th percentile")


def _legend(figure: Any, drawn: Sequence[Any], titles: Sequence[str], title: str) -> None:
    """Below the chart, where it covers no data."""
    figure.legend(
        drawn,
        titles,
        title=title,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        handlelength=3.5,
    )


def _style(arm: str) -> tuple[str, str, Any]:
    return _STYLES[list(ARMS).index(arm)]
