"""One measurement: so many streams at a time for so many seconds, and what that took."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.bench.cpu import cpu_seconds
from tools.bench.errors import BenchError
from tools.bench.leases.others import busy_seconds
from tools.bench.router.client import Connection, Reply, unchunked
from tools.bench.router.script import prefill_params, request_body

PATH = "/v1/chat/completions"
# Of the machine, what others may take: above it, figures tell of them.
MOST_OTHERS = 0.05
# As long as it is measured at most until there is enough that nothing has disturbed.
_MOST_STRETCH = 5
_SLICE_S = 0.5
# A shorter slice tells nothing.
_LEAST_S = 0.05
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Load:
    """`concurrency` clients, each with a conversation of its own, asking turn after turn.

    `interval_ms` lies between two events of D; with 0 they come as fast as they can be sent. With
    `steps` all streams get their events at the same times, else each by a clock of its own.
    What begins in the first `warm_s` seconds does not count.
    """

    concurrency: int
    chunks: int
    interval_ms: float
    prompt_bytes: int
    seconds: float
    warm_s: float
    steps: bool = False


@dataclass(frozen=True)
class Slice:
    """A stretch of a measurement, by `time.perf_counter`.

    CPU seconds are those of the process in between, and of engines and clients. `others`: share of
    the machine that others took. `yardstick_ms`: how fast it was, None: nobody has looked.
    """

    begin: float
    end: float
    cpu_s: float
    load_s: float
    others: float
    yardstick_ms: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end

    def is_calm(self, most_ms: float) -> bool:
        """Whether it is the machine of a yardstick of at most so long, and ours alone."""
        return self.others <= MOST_OTHERS and (self.yardstick_ms or 0.0) <= most_ms


@dataclass(frozen=True)
class Sample:
    """What one measurement gave. CPU times are those of the process in between, 0 without one.

    `load_share`: of the other core, taken by engines and clients. `undisturbed`: how much of what
    was to be measured that is; in the rest, which is left out, others took the machine, or it was
    slower. `yardstick_ms`: how fast it was, None: nobody has looked.
    """

    streams: int
    seconds: float
    first_ms: tuple[float, ...]
    whole_ms: tuple[float, ...]
    cpu_s: float
    load_share: float
    undisturbed: float = 1.0
    yardstick_ms: float | None = None

    @property
    def streams_per_s(self) -> float:
        return self.streams / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time per stream."""
        return self.cpu_s / self.streams * 1000

    @property
    def share(self) -> float:
        """Of a core, taken by the process in between."""
        return self.cpu_s / self.seconds


class Through:
    """One client that asks whatever listens at a port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: Connection | None = None

    async def __call__(self, body: bytes) -> Reply:
        """The reply, over a new connection if the last has been closed between two turns."""
        if self._connection is None or self._connection.closed:
            self._connection = await Connection.open(_HOST, self._port)
        return await self._connection.post(PATH, body)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class BothLegs:
    """One client that makes the two calls itself: what a turn takes with nothing in between."""

    def __init__(self, prefill_port: int, decode_port: int) -> None:
        self._prefill, self._decode = Through(prefill_port), Through(decode_port)

    async def __call__(self, body: bytes) -> Reply:
        fields = json.loads(body)
        asked = {
            **fields,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": prefill_params(0),
        }
        prefilled = await self._prefill(json.dumps(asked).encode())
        params = json.loads(prefilled.body)["kv_transfer_params"]
        done = await self._decode(json.dumps({**fields, "kv_transfer_params": params}).encode())
        return Reply(prefilled.begun, done.first, done.ended, done.status, done.body)

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


Client = Through | BothLegs


async def measure(
    make_client: Callable[[], Client],
    load: Load,
    between: int | None,
    engines: int,
    busy: Callable[[], float] = busy_seconds,
    yardstick: Callable[[], float | None] = lambda: None,
    calm_ms: float = math.inf,
) -> Sample:
    """Drive the load. `between` and `engines` are process ids; BenchError for a wrong answer.

    `busy`: CPU seconds that everybody has taken of this machine. `yardstick`: how fast it was since
    the last call. It goes on until `load.seconds` of it are calm, five times as long at most.
    """
    loop = asyncio.get_running_loop()
    begin, over = loop.time(), False
    replies: list[Reply] = []

    async def work(number: int) -> None:
        client = make_client()
        body = request_body(
            f"c-{number}", load.chunks, load.interval_ms, load.prompt_bytes, load.steps
        )
        # Spread over the length of one stream, so that they do not all begin at once.
        await asyncio.sleep(number / load.concurrency * load.chunks * load.interval_ms / 1000)
        try:
            while not over:
                reply = await client(body)
                check(reply, load.chunks)
                replies.append(reply)
        finally:
            client.close()

    def taken() -> tuple[float, float, float, float]:
        load_s = cpu_seconds(engines) + cpu_seconds(os.getpid())
        between_s = 0.0 if between is None else cpu_seconds(between)
        return time.perf_counter(), between_s, load_s, busy()

    async def watch() -> list[Slice]:
        nonlocal over
        await asyncio.sleep(begin + load.warm_s - loop.time())
        yardstick()
        found, last, left = list[Slice](), taken(), load.seconds
        deadline = loop.time() + _MOST_STRETCH * load.seconds
        while left > _LEAST_S and loop.time() < deadline:
            await asyncio.sleep(min(_SLICE_S, left))
            now = taken()
            cpu_s, load_s, all_s = (now[index] - last[index] for index in (1, 2, 3))
            others = (all_s - cpu_s - load_s) / (now[0] - last[0]) / (os.cpu_count() or 1)
            one = Slice(last[0], now[0], cpu_s, load_s, others, yardstick())
            found.append(one)
            last = now
            if one.is_calm(calm_ms):
                left -= one.seconds
        over = True
        return found

    *_, slices = await _all([*(work(number) for number in range(load.concurrency)), watch()])
    return of_slices(slices, replies, load.seconds, calm_ms)


def of_slices(
    slices: list[Slice], replies: list[Reply], wanted_s: float, calm_ms: float = math.inf
) -> Sample:
    """What lies in calm slices; in all of them if no stream does."""
    clean = [one for one in slices if one.is_calm(calm_ms)]
    for kept in (clean, slices):
        ended = [reply for reply in replies if any(one.holds(reply.ended) for one in kept)]
        # Latencies only of what has begun in such a slice as well.
        begun = [reply for reply in ended if any(one.holds(reply.begun) for one in kept)]
        if begun:
            break
    else:
        raise BenchError(
            "no stream came to its end in time",
            expected=f"several in {sum(one.seconds for one in slices):g} s",
            next_step="give more --seconds",
        )
    seconds = sum(one.seconds for one in kept)
    looked = [one.yardstick_ms for one in kept if one.yardstick_ms is not None]
    return Sample(
        len(ended),
        seconds,
        tuple((reply.first - reply.begun) * 1000 for reply in begun),
        tuple((reply.ended - reply.begun) * 1000 for reply in begun),
        sum(one.cpu_s for one in kept),
        sum(one.load_s for one in kept) / seconds,
        min(1.0, sum(one.seconds for one in clean) / wanted_s),
        median(looked) if looked else None,
    )


async def _all(work: list[Awaitable[Any]]) -> list[Any]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check(reply: Reply, chunks: int) -> None:
    """Every event has arrived, and the stream has ended; BenchError otherwise."""
    if reply.status != 200:
        raise BenchError(
            f"a request was answered {reply.status}", expected=200, found=reply.body[:300]
        )
    body = unchunked(reply.body)
    events = body.count(b"data: ")
    # One for each chunk, the usage, and the end.
    if events != chunks + 2 or not body.endswith(b"data: [DONE]\n\n"):
        raise BenchError(
            "a stream was not whole", expected=f"{chunks + 2} events", found=f"{events} events"
        )


async def fill(make_client: Callable[[], Client], conversations: int, concurrency: int) -> float:
    """One short turn of each of so many conversations; seconds that it took."""
    numbers = itertools.count()
    begun = time.monotonic()

    async def work() -> None:
        client = make_client()
        try:
            while (number := next(numbers)) < conversations:
                check(await client(request_body(f"conversation-{number:08}", 2, 0, 64)), 2)
        finally:
            client.close()

    await _all([work() for _ in range(concurrency)])
    return time.monotonic() - begun
