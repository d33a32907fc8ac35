"""Medians, what is required of them, and the tables of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.bench.gpu.rows import Row
from tools.bench.gpu.work import prefill_flops

# Where the requirements hold, tokens of the second turn's prompt.
REQUIRED_AT = 24576
PULL_RATIO = 1 / 4
ENGINE_MS = 3.0
TTFT_OF_STOCK = 0.7
TTFT_OF_RECOMPUTE = 1 / 5
EXCESS = 0.05
Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Spread:
    """Median, lowest, highest, and of how many."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Summary:
    """One arm at one length; times in ms, None where there is no such thing.

    copy_share, matrix_share: of what the GPU can copy and multiply, 0 to 1.
    """

    arm: str
    length: int
    count: int
    ttft: Spread
    prefill: Spread
    compute: Spread
    pull: Spread | None
    checks: Spread | None
    post: Spread | None
    engine: Spread | None
    handover: Spread | None
    descriptors: float | None
    gb_per_s: float | None
    copy_share: float | None
    tflop_per_s: float | None
    matrix_share: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Required:
    """One requirement: met, not met, or None where something was not measured."""

    what: str
    met: bool | None
    figures: str

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: "not known"}[self.met]
        return f"{verdict:<9}  {self.what}: {self.figures}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def summaries(
    rows: Sequence[Row],
    config: Mapping[str, Any],
    ceilings: Mapping[str, float | None] | None,
    fp8: bool = False,
) -> list[Summary]:
    """By length and arm, in the order of the rows. `fp8`: whether weights are multiplied in FP8."""
    copy = (ceilings or {}).get("copy_gb_per_s")
    matrix = (ceilings or {}).get("fp8_tflop_per_s" if fp8 else "bfloat16_tflop_per_s")
    groups: dict[tuple[int, str], list[Row]] = {}
    arms = list(dict.fromkeys(row.arm for row in sorted(rows, key=_place)))
    for row in rows:
        if row.counts:
            groups.setdefault((row.length, row.arm), []).append(row)
    found = []
    for (length, arm), ones in sorted(groups.items(), key=lambda g: (g[0][0], arms.index(g[0][1]))):
        ttft, prefill = spread(r.ttft_ms for r in ones), spread(r.prefill_ms for r in ones)
        compute = spread(r.compute_ms for r in ones)
        assert ttft and prefill and compute  # a group has a row, and these are always known
        # What was read back was not computed: no rate of the whole prompt.
        flops = prefill_flops(config, length) if ones[0].kind == "recompute" else None
        tflop = flops / prefill.median / 1e9 if flops else None
        rate = _median(ones, lambda r: r.gb_per_s)
        found.append(
            Summary(
                arm,
                length,
                len(ones),
                ttft,
                prefill,
                compute,
                pull=spread(r.pull_ms for r in ones),
                checks=spread(r.checks_ms for r in ones),
                post=spread(r.post_ms for r in ones),
                engine=spread(r.engine_ms for r in ones),
                handover=spread(r.handover.transfer_ms if r.handover else None for r in ones),
                descriptors=_median(ones, lambda r: r.pull.descriptors if r.pull else None),
                gb_per_s=rate,
                # A copy counts what is read and what is written; so does this share.
                copy_share=2 * rate / copy if rate and copy else None,
                tflop_per_s=tflop,
                matrix_share=tflop / matrix if tflop and matrix else None,
            )
        )
    return found


def required(rows: Sequence[Row], length: int = REQUIRED_AT) -> list[Required]:
    """Read-back against stock's and against recompute, at that length."""

    def of(arm: str, value: Value) -> Spread | None:
        return spread(value(r) for r in rows if r.counts and r.length == length and r.arm == arm)

    ours, stock, plain = "ours read_back", "stock read_back", "ours recompute"
    engine, stock_engine = (of(arm, lambda r: r.engine_ms) for arm in (ours, stock))
    return [
        _ratio(
            "pull, of stock's",
            of(ours, lambda r: r.pull_ms),
            of(stock, lambda r: r.pull_ms),
            PULL_RATIO,
        ),
        Required(
            f"engine thread busy per pull, at most {ENGINE_MS:g} ms",
            None if engine is None else engine.high <= ENGINE_MS,
            f"ours {_shown(engine)}, stock {_shown(stock_engine)}",
        ),
        _ratio("TTFT, of stock's read-back", of(ours, _ttft), of(stock, _ttft), TTFT_OF_STOCK),
        _ratio("TTFT, of recompute", of(ours, _ttft), of(plain, _ttft), TTFT_OF_RECOMPUTE),
    ]


def largest_excess(rows: Sequence[Row]) -> list[Required]:
    """Of each set: how much slower turns were that were offered a read-back, at most.

    Two requirements, since one prompt that is computed may take more than EXCESS longer than the
    next: medians of a length, at the worst length; and single turns, which a median would hide,
    by as much as the slowest recompute is above its own median. Turns that warm up count among the
    single ones, against the recompute that warms up.
    """
    found = []
    for name in dict.fromkeys(row.set_name for row in rows):
        own = [row for row in rows if row.set_name == name and not row.error]
        found += [_medians_excess(name, own), _single_excess(name, own)]
    return found


def table(found: Sequence[Summary]) -> list[str]:
    """Lines for a terminal, ms; medians."""
    head = (
        f"{'tokens':>7} {'arm':16}{'n':>3}{'prefill':>9}{'compute':>9}{'transfer':>9}{'checks':>8}"
        f"  {'pull (range)':22}{'post':>8}{'engine':>8}{'descr.':>8}{'GB/s':>16}{'TFLOP/s':>14}"
        f"{'TTFT':>9}"
    )
    return [head, *(_line(one) for one in found)]


def markdown(found: Sequence[Summary]) -> list[str]:
    """The same as a table for a README."""
    lines = [
        "| prompt | arm | TTFT | prefill | compute | transfer | HOLD, CONFIRM | pull (range) | "
        "posting | engine busy | descriptors | GB/s (of copy) | TFLOP/s (of matrix) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        cells = (
            f"{one.length}",
            one.arm.replace("_", "-"),
            _shown(one.ttft),
            f"{one.prefill.median:.0f}",
            f"{one.compute.median:.0f}",
            _middle(one.pull),
            _middle(one.checks),
            _shown(one.pull),
            _middle(one.post),
            _middle(one.engine),
            "-" if one.descriptors is None else f"{one.descriptors:,.0f}",
            _rate(one.gb_per_s, one.copy_share),
            _rate(one.tflop_per_s, one.matrix_share),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _line(one: Summary) -> str:
    descriptors = "-" if one.descriptors is None else f"{one.descriptors:.0f}"
    return (
        f"{one.length:>7} {one.arm:16}{one.count:>3}{one.prefill.median:>9.1f}"
        f"{one.compute.median:>9.1f}{_middle(one.pull):>9}{_middle(one.checks):>8}"
        f"  {_shown(one.pull):22}{_middle(one.post):>8}{_middle(one.engine):>8}{descriptors:>8}"
        f"{_rate(one.gb_per_s, one.copy_share):>16}{_rate(one.tflop_per_s, one.matrix_share):>14}"
        f"{one.ttft.median:>9.1f}"
    )


def _ratio(what: str, ours: Spread | None, other: Spread | None, most: float) -> Required:
    text = f"{what}: at most {most:g}"
    if ours is None or other is None:
        return Required(text, None, f"ours {_shown(ours)}, other {_shown(other)}")
    ratio = ours.median / other.median
    shown = f"{ratio:.3f} (ours {_shown(ours)}, other {_shown(other)} ms)"
    return Required(text, ratio <= most, shown)


@dataclass(frozen=True)
class _Excess:
    """Of a TTFT over recompute's, both in ms, and whose it is."""

    whose: str
    ttft: float
    base: float

    @property
    def share(self) -> float:
        return self.ttft / self.base - 1

    def __str__(self) -> str:
        return f"{self.share:+.1%} ({self.whose}: {self.ttft:.0f} ms, recompute {self.base:.0f} ms)"


def _medians_excess(name: str, rows: Sequence[Row]) -> Required:
    bases = _medians(rows, "recompute")
    found = [
        _Excess(f"{length} tokens", median, bases[length, False])
        for (length, warm), median in _medians(rows, "read_back").items()
        if not warm and (length, False) in bases
    ]
    what = f"{name}: median TTFT offered a read-back, at most {EXCESS:.0%} above recompute"
    if not found:
        return Required(what, None, "no length has both")
    worst = _largest(found)
    return Required(what, worst.share <= EXCESS, f"{worst}, the worst of {len(found)} lengths")


def _single_excess(name: str, rows: Sequence[Row]) -> Required:
    what = f"{name}: largest excess of a single one, at most {EXCESS:.0%} above recompute's own"
    bases = _medians(rows, "recompute")
    found = [
        (row, _Excess(f"{row.length} tokens, {_when(row)}", row.ttft_ms, base))
        for row in rows
        if (base := bases.get((row.length, row.repeat < 0)))
    ]
    offered = [one for row, one in found if row.kind == "read_back"]
    plain = [one for row, one in found if row.kind == "recompute" and row.counts]
    if not offered or not plain:
        return Required(what, None, "no length has both")
    worst, own = _largest(offered), _largest(plain)
    text = f"{worst}; recompute's own {own}"
    text += "".join(f"; first contact {one}" for row, one in found if row.first_contact)
    return Required(what, worst.share <= own.share + EXCESS, text)


def _medians(rows: Sequence[Row], kind: str) -> dict[tuple[int, bool], float]:
    """Of TTFT, by length and by whether it is of those that warm up."""
    groups: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        if row.kind == kind:
            groups.setdefault((row.length, row.repeat < 0), []).append(row.ttft_ms)
    return {key: statistics.median(values) for key, values in groups.items()}


def _largest(found: Iterable[_Excess]) -> _Excess:
    return max(found, key=lambda one: one.share)


def _when(row: Row) -> str:
    return "warming up" if row.repeat < 0 else f"repeat {row.repeat}"


def _shown(one: Spread | None) -> str:
    return "-" if one is None else f"{one.median:.1f} ({one.low:.1f}..{one.high:.1f})"


def _middle(one: Spread | None) -> str:
    return "-" if one is None else f"{one.median:.1f}"


def _rate(rate: float | None, share: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1f}" + ("" if share is None else f" ({share:.0%})")


def _median(rows: Iterable[Row], value: Value) -> float | None:
    found = spread(value(row) for row in rows)
    return None if found is None else found.median


def _ttft(row: Row) -> float:
    return row.ttft_ms


def _place(row: Row) -> tuple[str, str]:
    """Recompute first, ours before stock."""
    return "" if row.kind == "recompute" else row.kind, row.set_name
