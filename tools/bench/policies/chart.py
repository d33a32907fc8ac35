"""TTFT and prefill work of each pair, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.charts import draw_one
from tools.bench.policies.figures import summary
from tools.bench.policies.plan import DECODE, PREFILL, Pair
from tools.bench.policies.table import pairs

NAME = "policies"
# By prefill policy.
_LOOKS = {
    "least-tokens": ("#0072B2", ""),
    "prefix-affine": ("#E69F00", "///"),
    "round-robin": ("#FFFFFF", "..."),
}
_PANELS = (
    ("ttft_p50_ms", "TTFT, median (ms)", 1.0),
    ("ttft_p99_ms", "TTFT, p99 (ms)", 1.0),
    ("p_computed", "P compute (1,000 tokens a pass)", 1e-3),
)


def draw(made: Mapping[str, Any], folder: Path) -> None:
    """Write `policies.svg` and `policies.png` into an existing folder."""
    draw_one(folder, NAME, made, _panels)


def _panels(figure: Any, made: Mapping[str, Any]) -> None:
    there = set(pairs(made))
    drawn: dict[str, Any] = {}
    panels = figure.subplots(1, len(_PANELS))
    for axes, (key, title, factor) in zip(panels, _PANELS, strict=True):
        for number, prefill in enumerate(PREFILL):
            colour, hatch = _LOOKS[prefill]
            found = [
                (place + (number - 1) * 0.27, summary(made, name)[key] * factor)
                for place, decode in enumerate(DECODE)
                if (name := str(Pair(decode, prefill))) in there
            ]
            bars = axes.bar(
                [place for place, _ in found],
                [value for _, value in found],
                0.25,
                color=colour,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.6,
            )
            for bar in bars.patches:
                bar.set_gid(f"{NAME}-{key}-{prefill}")
            if found:
                drawn[prefill] = bars
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(DECODE)), DECODE, fontsize=8, rotation=20)
        axes.grid(visible=False, axis="x")
    figure.legend(
        list(drawn.values()),
        list(drawn),
        title="prefill policy; below each group: decode policy",
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
