"""The table at the end. Pure: turns in, lines out."""

from __future__ import annotations

from collections.abc import Sequence

from tools.demo.measure import Turn

_HEAD = ("turn", "prompt", "read back", "computed", "prefill", "transfer", "TTFT", "was")


def table(turns: Sequence[Turn], nothing: str = "-") -> list[str]:
    """One line per turn below a head; ``nothing`` stands where there was nothing to measure."""
    rows = [_HEAD, *(_row(number, turn, nothing) for number, turn in enumerate(turns, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    widths[-1] = 0
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def milliseconds(seconds: float) -> str:
    """A time with unit; a digit after the point where it would be lost otherwise."""
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 10 else f"{tokens(round(value))} ms"


def tokens(count: int) -> str:
    """A number with a space between the thousands."""
    return f"{count:,}".replace(",", " ")


def series(seconds: Sequence[float]) -> str:
    """Several times under one unit: ``210 / 480 ms``."""
    return " / ".join(milliseconds(s).removesuffix(" ms") for s in seconds) + " ms"


def _row(number: int, turn: Turn, nothing: str) -> tuple[str, ...]:
    reason = f" ({turn.reason.replace('_', ' ')})" if turn.reason else ""
    return (
        str(number),
        tokens(turn.prompt_tokens),
        tokens(turn.read_back_tokens) if turn.read_back_tokens else nothing,
        tokens(turn.computed_tokens),
        milliseconds(turn.prefill_s),
        nothing if turn.transfer_s is None else milliseconds(turn.transfer_s),
        milliseconds(turn.ttft_s),
        turn.outcome + reason,
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    *numbers, last = row
    return [f"{cell:>{width}}" for cell, width in zip(numbers, widths[:-1], strict=True)] + [last]
