"""The clients: each takes the next conversation and has all its turns, until none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from tools.bench.client import Target, complete, new_session
from tools.bench.policies.plan import Plan, Talk
from tools.bench.prompts import Words


@dataclass(frozen=True)
class Turn:
    """One measured turn; `number` from 1, ms as the client sees them."""

    kind: str
    number: int
    prompt_tokens: int
    ttft_ms: float
    turn_ms: float


def run_load(url: str, model: str, words: Words, plan: Plan, name: str) -> list[Turn]:
    """All conversations of the plan through the router at `url`, in the order of their ends.

    `name` is the pass's: its prompts are as long as another's and share nothing with them, so that
    no cache knows them. BenchError for an answer that is not what it must be.
    """
    return asyncio.run(_all(Target(url, model), words, plan, name))


async def _all(target: Target, words: Words, plan: Plan, name: str) -> list[Turn]:
    turns: list[Turn] = []
    waiting = iter(plan.talks())
    async with new_session() as session:
        clients = (
            _client(session, target, words, plan, name, waiting, turns) for _ in range(plan.clients)
        )
        await asyncio.gather(*clients)
    return turns


async def _client(
    session: aiohttp.ClientSession,
    target: Target,
    words: Words,
    plan: Plan,
    name: str,
    waiting: Iterator[Talk],
    turns: list[Turn],
) -> None:
    for talk in waiting:
        history: list[int] = []
        said = f"{name}-{talk.number}"
        for number, (fresh, pause) in enumerate(zip(talk.new_tokens, talk.thinks_s, strict=True)):
            await asyncio.sleep(pause)
            seed = f"{plan.seed}-{said}-{number}"
            prompt = [*history, *words.random(seed, fresh)]
            request = f"{said}-{number}"
            reply = await complete(session, target, prompt, plan.answer_tokens, request, said)
            history = [*prompt, *reply.token_ids]
            turns.append(
                Turn(talk.kind.name, number + 1, len(prompt), reply.ttft_ms, reply.latency_ms)
            )
