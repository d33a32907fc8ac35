"""The running load: streams on D, each a request after the other, measured in slices of time.

On a machine of few cores whatever else runs shows in every figure. So for each slice it is noted
how much of the machine others took, and only those count in which they took next to nothing; the
load goes on until there are enough of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import aiohttp

from tools.bench.client import Target, Watch, complete, new_session
from tools.bench.leases.plan import Phase, Plan
from tools.bench.prompts import Words

# Of the machine, what others may take: above it, figures tell of them.
MOST_OTHERS = 0.05
SLICE_S = 2.0
# A load takes at most so many times as long as is to be measured.
PATIENCE = 3


@dataclass(frozen=True)
class Chunk:
    """Tokens of an answer that came together. Seconds of `time.perf_counter`; `last`: when those
    before them came, None of the first; `sent`: when the request was sent."""

    at: float
    tokens: int
    last: float | None
    sent: float


@dataclass(frozen=True)
class Slice:
    """A stretch of a load; `others`: share of the machine that others took."""

    begin: float
    end: float
    others: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def counts(self) -> bool:
        return self.others <= MOST_OTHERS

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass(frozen=True)
class Load:
    """What a load has come to. Gaps are between chunks of one answer. `slices`: tokens/s and share
    of others of each, those that did not count included; `others`: the mean of those that did. If
    too few do, all are taken."""

    streams: int
    seconds: float
    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    gaps: int
    ttft_p50_ms: float
    ttft_max_ms: float
    others: float
    slices: tuple[tuple[float, float], ...]


@dataclass
class Running:
    """A phase's load on the engine at `url`, cycle by cycle.

    `others` tells what others took of the machine since its last call; `at_end` is called at the
    end of each cycle, while its streams still run.
    """

    url: str
    model: str
    words: Words
    plan: Plan
    phase: Phase
    others: Callable[[], float]
    at_end: Callable[[], Any]
    _chunks: list[Chunk] = field(default_factory=list)
    _slices: list[Slice] = field(default_factory=list)

    def cycle(self, number: int) -> None:
        """Run the streams and measure them once they are warm.

        BenchError for an answer that is not what it must be.
        """
        asyncio.run(_cycle(self, f"{self.phase}-{number}", self._chunks, self._slices))

    def load(self) -> Load:
        """What all cycles have come to."""
        return summary(self._chunks, self._slices, self.plan.streams(self.phase), self.plan.seconds)


def summary(
    chunks: Sequence[Chunk], slices: Sequence[Slice], streams: int, wanted_s: float
) -> Load:
    """The figures of the slices that count, if they make up `wanted_s`; those of nothing are 0."""
    clean = [one for one in slices if one.counts]
    taken = clean if _seconds(clean) >= 0.99 * wanted_s else list(slices)

    def within(at: float | None) -> bool:
        return at is not None and any(one.holds(at) for one in taken)

    found = [chunk for chunk in chunks if within(chunk.at)]
    # A gap counts where it began and ended.
    gaps = sorted(
        (chunk.at - chunk.last) * 1000
        for chunk in found
        if chunk.last is not None and within(chunk.last)
    )
    firsts = [(chunk.at - chunk.sent) * 1000 for chunk in found if chunk.last is None]
    seconds = _seconds(taken)
    return Load(
        streams,
        round(seconds, 3),
        sum(chunk.tokens for chunk in found) / seconds if seconds else 0.0,
        median(gaps) if gaps else 0.0,
        gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] if gaps else 0.0,
        gaps[-1] if gaps else 0.0,
        len(gaps),
        median(firsts) if firsts else 0.0,
        max(firsts, default=0.0),
        mean(one.others for one in taken) if taken else 0.0,
        tuple((round(_rate(chunks, one), 1), round(one.others, 3)) for one in slices),
    )


def _seconds(slices: Sequence[Slice]) -> float:
    return sum(one.seconds for one in slices)


def _rate(chunks: Sequence[Chunk], one: Slice) -> float:
    return sum(chunk.tokens for chunk in chunks if one.holds(chunk.at)) / one.seconds


async def _cycle(what: Running, name: str, chunks: list[Chunk], measured: list[Slice]) -> None:
    plan, wanted = what.plan, what.plan.seconds / what.plan.cycles
    slices: list[Slice] = []
    async with new_session() as session:
        streams = [
            asyncio.create_task(_stream(session, what, f"{name}-{number}", number, chunks))
            for number in range(plan.streams(what.phase))
        ]

        async def go_on(seconds: float) -> float:
            # A stream ends by an error alone.
            done, _ = await asyncio.wait(
                streams, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            for one in done:
                one.result()
            return await asyncio.to_thread(what.others)

        try:
            await go_on(plan.warm_s)
            begin = time.perf_counter()
            while True:
                share = await go_on(min(SLICE_S, wanted))
                slices.append(Slice(begin, time.perf_counter(), share))
                begin = slices[-1].end
                clean = _seconds([one for one in slices if one.counts])
                if clean >= wanted or _seconds(slices) >= PATIENCE * wanted:
                    break
            await asyncio.to_thread(what.at_end)
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    measured += slices


async def _stream(
    session: aiohttp.ClientSession,
    what: Running,
    stream: str,
    number: int,
    chunks: list[Chunk],
) -> None:
    """Request after request. The first ones end one after the other, as later ones do."""
    plan, target = what.plan, Target(what.url, what.model, links=False)
    share = (number + 1) / plan.streams(what.phase)
    for request in itertools.count():
        name = f"{stream}-{request}"
        output = max(1, round(share * plan.output_tokens(name)))
        prompt = what.words.random(f"{plan.seed}-load-{name}", plan.load_prompt)
        watch = watching(chunks, time.perf_counter())
        await complete(session, target, prompt, output, f"load-{name}", "", watch)
        share = 1.0


def watching(chunks: list[Chunk], sent: float) -> Watch:
    """Notes the chunks of a request that is sent at that moment."""
    last: float | None = None

    def watch(at: float, tokens: int) -> None:
        nonlocal last
        chunks.append(Chunk(at, tokens, last, sent))
        last = at

    return watch
