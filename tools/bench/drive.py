"""Sends what is planned: live replies go into the history, and each unit gives its records."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tools.bench.client import Reply, Target, complete, new_session
from tools.bench.mutate import mutate
from tools.bench.plan import Talk, Turn, Unit
from tools.bench.prompts import Words, exact
from tools.bench.records import Record

Sink = Callable[[Sequence[Record]], None]
Advance = Callable[[], None]


@dataclass(frozen=True)
class Where:
    """What a run's records are of; `seed` is the same in all arms."""

    arm: str
    repeat: int
    seed: int


@dataclass
class Driver:
    """Runs units against one target.

    Ids of requests and conversations are of this driver alone, so that what was interrupted and
    is run again is not mistaken for it. `clients`: conversations of a trace at a time.
    """

    target: Target
    words: Words
    where: Where
    clients: int = 1
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _sent: int = 0

    async def warm_up(self, lengths: Sequence[int], new_tokens: int, output_tokens: int) -> None:
        """Two turns of each length, unrecorded: first use costs handshakes and allocations."""
        async with new_session() as session:
            for length in lengths:
                first = length - new_tokens - output_tokens
                talk = Talk(tuple(Turn("sweep", n, output_tokens) for n in (first, length)))
                await self._talk(session, f"warm-up-{length}", 0, talk, lambda: None)

    async def run(self, units: Sequence[Unit], sink: Sink, advance: Advance) -> None:
        """Run units in order, traces' side by side; each goes to `sink` when it is whole."""
        async with new_session() as session:
            for unit in units:
                if not _is_trace(unit):
                    sink(await self._unit(session, unit, advance))
            traces = [unit for unit in units if _is_trace(unit)]
            if traces:
                await self._replay(session, traces, sink, advance)

    async def _replay(
        self, session: aiohttp.ClientSession, units: Sequence[Unit], sink: Sink, advance: Advance
    ) -> None:
        free = asyncio.Semaphore(self.clients)
        # After an interruption the first that is left starts at once.
        begin = min(unit.talks[0].start_s for unit in units)

        async def one(unit: Unit) -> None:
            await asyncio.sleep(unit.talks[0].start_s - begin)
            async with free:
                sink(await self._unit(session, unit, advance))

        tasks = [asyncio.create_task(one(unit)) for unit in units]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _unit(
        self, session: aiohttp.ClientSession, unit: Unit, advance: Advance
    ) -> list[Record]:
        records: list[Record] = []
        for number, talk in enumerate(unit.talks):
            records += await self._talk(session, unit.name, number, talk, advance)
        return records

    async def _talk(
        self, session: aiohttp.ClientSession, unit: str, number: int, talk: Talk, advance: Advance
    ) -> list[Record]:
        conversation = f"{self.session_id}-{unit}-{number}"
        history: list[int] = []
        reply: Reply | None = None
        records: list[Record] = []
        for index, turn in enumerate(talk.turns, 1):
            seed = f"{self.where.seed}-{self.where.repeat}-{unit}-{number}-{index}"
            prompt = prompt_of(
                turn, history, len(reply.token_ids) if reply else 0, seed, self.words
            )
            if turn.gap_s:
                await asyncio.sleep(turn.gap_s)
            request_id = self._next_id()
            reply = await complete(
                session, self.target, prompt, turn.output_tokens, request_id, conversation
            )
            advance()
            records.append(
                Record(
                    ttft_ms=reply.ttft_ms,
                    tpot_ms=reply.tpot_ms,
                    latency_ms=reply.latency_ms,
                    start_time_ms=reply.start_ms,
                    input_num_turns=2 * index - 1,
                    input_num_tokens=len(prompt),
                    output_num_tokens=len(reply.token_ids),
                    output_num_chunks=len(reply.arrivals),
                    output_num_first_chunk_tokens=reply.arrivals[0][1],
                    approx_cached_percent=100 * min(1, len(history) / len(prompt)),
                    conversation_id=conversation,
                    client_id=0,
                    request_id=request_id,
                    arm=self.where.arm,
                    repeat=self.where.repeat,
                    unit=unit,
                    talk=number,
                    turn=index,
                    phase=turn.phase,
                    held=turn.held,
                    mutation=turn.mutation,
                    itl_ms=reply.itl_ms if turn.phase == "decode" else (),
                    reply_digest=_digest(reply.token_ids),
                )
            )
            history = [*prompt, *reply.token_ids]
        return records

    def _next_id(self) -> str:
        self._sent += 1
        return f"{self.session_id}-{self._sent:06d}"


def prompt_of(turn: Turn, history: Sequence[int], reply: int, seed: str, words: Words) -> list[int]:
    """A turn's prompt, of exactly the planned length; the last `reply` tokens were generated."""
    length = turn.prompt_tokens
    if not turn.threads:
        return words.of_blocks(turn.blocks, 0, length)
    told = mutate(turn.mutation, history, reply, seed, words.token_ids) if history else []
    missing = length - len(told)
    if turn.blocks:
        fresh = words.of_blocks(turn.blocks, len(told), length)
    elif turn.text:
        # A history that a mutation has shortened is made up before the text, which stays whole.
        padding = words.random(seed, max(0, missing - len(turn.text)))
        fresh = [*padding, *turn.text]
    else:
        fresh = words.random(seed, max(0, missing))
    return exact(told, fresh, length)


def _is_trace(unit: Unit) -> bool:
    return unit.talks[0].turns[0].phase == "trace"


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(token_ids)).encode()).hexdigest()[:16]
