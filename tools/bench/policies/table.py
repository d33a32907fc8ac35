"""A run's figures for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.bench.policies.figures import summary

COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("TTFT p50", "ttft_p50_ms", 1, "{:.0f}"),
    ("p99", "ttft_p99_ms", 1, "{:.0f}"),
    ("later turns", "later_ttft_p50_ms", 1, "{:.0f}"),
    ("turn p50", "turn_p50_ms", 1, "{:.0f}"),
    ("p99", "turn_p99_ms", 1, "{:.0f}"),
    ("spread", "spread", 1, "{:.0%}"),
    ("hits", "hit_share", 1, "{:.0%}"),
    ("P computes", "p_computed", 1e-3, "{:.1f}"),
    ("own cache", "p_own_cache", 1e-3, "{:.1f}"),
    ("read back", "p_from_peer", 1e-3, "{:.1f}"),
    ("D reads", "d_from_peer", 1e-3, "{:.1f}"),
    ("P balance", "p_balance", 1, "{:.2f}"),
    ("D balance", "d_balance", 1, "{:.2f}"),
    ("s", "seconds", 1, "{:.1f}"),
)


def pairs(made: Mapping[str, Any]) -> list[str]:
    """The pairs that were measured, in the order of their first pass."""
    return list(dict.fromkeys(one["pair"] for one in made["passes"]))


def text(made: Mapping[str, Any]) -> str:
    """One line for each pair: ms, prompt tokens of a pass, and how even the load was."""
    plan = made["plan"]
    head = (
        f"{plan['conversations']} conversations by {plan['clients']} clients, "
        f"{made['turns']} turns, {plan['passes']} passes; TTFT and turn in ms, tokens in thousands "
        "a pass; balance: share of the busier node"
    )
    names = ("decode + prefill", *(name for name, *_ in COLUMNS))
    lines = [(pair, *_cells(made, pair)) for pair in pairs(made)]
    return "\n".join([head, "", *_markdown([names, *lines])])


def _cells(made: Mapping[str, Any], pair: str) -> list[str]:
    found = summary(made, pair)
    return [form.format(found[key] * factor) for _, key, factor, form in COLUMNS]


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = row
        cells = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
        return f"| {' | '.join(cells)} |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return [line(rows[0]), rule, *map(line, rows[1:])]
