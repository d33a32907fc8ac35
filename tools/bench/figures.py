"""The figures of the report as plain data: what the charts draw and the JSON files say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tools.bench.arms import ARMS
from tools.bench.collect import Joined, Run


@dataclass(frozen=True)
class Point:
    """Several values at one place: their median, the lowest, the highest, and how many."""

    x: float
    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Series:
    """One arm's points, by x."""

    arm: str
    title: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Bar:
    """Medians at one prompt length, ms. `transfer` and `checks` are parts of `prefill`.

    checks: HOLD and CONFIRM.
    """

    prompt_tokens: int
    prefill: float
    transfer: float
    checks: float
    count: int

    @property
    def compute(self) -> float:
        return max(0.0, self.prefill - self.transfer - self.checks)


@dataclass(frozen=True)
class Bars:
    arm: str
    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Gaps:
    """Inter-token latency of one arm's streams while D keeps `held` conversations, ms."""

    arm: str
    title: str
    held: int
    median: float
    p99: float
    highest: float
    count: int


@dataclass(frozen=True)
class Row:
    """One line of the table: medians of one arm at one prompt length; ratios are off ÷ this."""

    prompt_tokens: int
    arm: str
    title: str
    ttft_ms: float
    ttft_ratio: float | None
    prefill_ms: float | None
    prefill_ratio: float | None
    transfer_ms: float | None
    tokens_read: float | None
    tokens_computed: float | None
    megabytes: float | None
    count: int


@dataclass(frozen=True)
class Figures:
    """All figures of a report.

    first_turns: TTFT by prompt length where there is nothing to read back, a control: what differs
    there between arms differs for other reasons.
    """

    ttft_by_prompt: tuple[Series, ...]
    prefill_split: tuple[Bars, ...]
    ttft_by_turn: tuple[Series, ...]
    itl_while_held: tuple[Gaps, ...]
    first_turns: tuple[Series, ...]
    table: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        made = asdict(self)
        for series, bars in zip(made["prefill_split"], self.prefill_split, strict=True):
            for bar, source in zip(series["bars"], bars.bars, strict=True):
                bar["compute"] = source.compute
        return made


def figures(runs: Sequence[Run]) -> Figures:
    """Figures of all runs; turns on a changed history are left out of charts of plain ones."""
    arms = [name for name in ARMS if any(run.arm == name for run in runs)]
    joined = {arm: [one for run in runs if run.arm == arm for one in run.joined] for arm in arms}
    sweep = {arm: [one for one in found if by_length(one)] for arm, found in joined.items()}
    plain = {
        arm: [
            one
            for one in found
            if one.record.phase in ("turns", "trace", "base") and not one.record.mutation
        ]
        for arm, found in joined.items()
    }
    return Figures(
        ttft_by_prompt=_series(sweep, by_length),
        prefill_split=tuple(
            bars for arm in ("off", "on") if arm in arms and (bars := _bars(arm, sweep[arm])).bars
        ),
        ttft_by_turn=_series(plain, lambda one: one.record.turn),
        itl_while_held=tuple(gaps for arm in arms for gaps in _gaps(arm, joined[arm])),
        first_turns=_series(
            {
                arm: [one for one in found if one.record.phase == "sweep" and one.record.turn == 1]
                for arm, found in joined.items()
            },
            lambda one: one.record.input_num_tokens,
        ),
        table=tuple(_table(sweep)),
    )


def by_length(one: Joined) -> int:
    """The prompt length that a request is a measurement of; 0 if it is of none.

    A prompt with a history: a sweep's second turn, and later turns of the base release's benchmark,
    whose prompts are about as long as the first.
    """
    record = one.record
    if record.phase == "sweep" and record.turn == 2:
        return record.input_num_tokens
    if record.phase == "base" and record.turn > 1:
        return int(record.unit.rpartition("-")[2])
    return 0


def _series(by_arm: dict[str, list[Joined]], x: Callable[[Joined], int]) -> tuple[Series, ...]:
    made = []
    for arm, found in by_arm.items():
        points = tuple(
            Point(place, median(values), min(values), max(values), len(values))
            for place, ones in _by(found, x)
            if (values := [one.record.ttft_ms for one in ones])
        )
        if points:
            made.append(Series(arm, ARMS[arm].title, points))
    return tuple(made)


def _bars(arm: str, found: Sequence[Joined]) -> Bars:
    bars = []
    for tokens, ones in _by(found, by_length):
        known = [one for one in ones if one.prefill_ms is not None]
        if known:
            bars.append(
                Bar(
                    tokens,
                    median(one.prefill_ms or 0.0 for one in known),
                    median(one.transfer_ms or 0.0 for one in known),
                    median((one.hold_ms or 0.0) + (one.confirm_ms or 0.0) for one in known),
                    len(known),
                )
            )
    return Bars(arm, ARMS[arm].title, tuple(bars))


def _gaps(arm: str, found: Sequence[Joined]) -> Iterable[Gaps]:
    streams = [one for one in found if one.record.phase == "decode"]
    for held, ones in _by(streams, lambda one: one.record.held):
        gaps = sorted(gap for one in ones for gap in one.record.itl_ms)
        if gaps:
            yield Gaps(
                arm,
                ARMS[arm].title,
                held,
                median(gaps),
                gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
                gaps[-1],
                len(gaps),
            )


def _table(sweep: dict[str, list[Joined]]) -> Iterable[Row]:
    lengths: dict[int, dict[str, list[Joined]]] = {}
    for arm, found in sweep.items():
        for tokens, ones in _by(found, by_length):
            lengths.setdefault(tokens, {})[arm] = ones
    for tokens, by_arm in sorted(lengths.items()):
        off = by_arm.get("off", [])
        off_ttft, off_prefill = _middle(off, _ttft), _middle(off, lambda one: one.prefill_ms)
        for arm, ones in by_arm.items():
            ttft = median(one.record.ttft_ms for one in ones)
            prefill = _middle(ones, lambda one: one.prefill_ms)
            moved = _middle(ones, lambda one: one.bytes_moved)
            yield Row(
                tokens,
                arm,
                ARMS[arm].title,
                ttft,
                _ratio(off_ttft, ttft),
                prefill,
                _ratio(off_prefill, prefill),
                _middle(ones, lambda one: one.transfer_ms),
                _middle(ones, lambda one: one.tokens_read),
                _middle(ones, lambda one: one.tokens_computed),
                None if moved is None else moved / 1e6,
                len(ones),
            )


def _by(found: Iterable[Joined], x: Callable[[Joined], int]) -> list[tuple[int, list[Joined]]]:
    groups: dict[int, list[Joined]] = {}
    for one in found:
        groups.setdefault(x(one), []).append(one)
    return sorted(groups.items())


def _ttft(one: Joined) -> float:
    return one.record.ttft_ms


def _middle(found: Sequence[Joined], value: Callable[[Joined], float | None]) -> float | None:
    known = [number for one in found if (number := value(one)) is not None]
    return median(known) if known else None


def _ratio(off: float | None, other: float | None) -> float | None:
    return off / other if off and other else None
