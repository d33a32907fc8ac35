"""One P and one D of any number of ranks: histories, forks, leases, a lease that is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.gpu.client import EngineError, decisions, lease_ids, leases, release
from tests.gpu.histories import (
    ROWS,
    Conversation,
    random_conversations,
    row_conversations,
    source,
)
from tests.gpu.measure import (
    Servers,
    first_turn,
    give_back,
    measure,
    meet,
    second_turn,
)
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.leases import all_free, lease_calls, lost_before_the_read, nothing_kept
from tools.bench.gpu.counters import kv_capacity

_FORKS = ("append", "edited_middle")
_UNADDRESSED = 8


def run_pair(
    servers: Servers,
    ranks: int,
    randoms: int,
    rng: random.Random,
    findings: Findings,
    in_time: Callable[[], bool],
) -> None:
    """All of it on each of D's data-parallel `ranks`; EngineError when an engine refuses."""
    places = _places(servers, ranks)
    for where in places:
        meet(where, rng)
    met = decisions(servers.prefill)
    findings.figures["decisions while meeting"] = met
    lease_calls(servers, ranks, rng, findings)
    for where in places:
        lost_before_the_read(where, rng, findings)
    if ranks > 1:
        _every_rank_serves(servers, ranks, rng, findings)
    _, block = kv_capacity(servers.decode)
    work = [
        (where, one)
        for where in places
        for one in (*row_conversations(rng), *random_conversations(rng, randoms, max(80, block)))
    ]
    findings.wanted += len(work) + len(places) * len(_FORKS)
    for where in places:
        _forks(where, rng, findings)
    for number, (where, conversation) in enumerate(work):
        if not in_time():
            break
        # Every other conversation goes on where its turn before has not been.
        here = where if number % 2 else replace(where, answer_rank=_other(where, ranks))
        name = _named(conversation.name, where, ranks)
        try:
            findings.cases.append(replace(measure(conversation, here, rng), name=name))
        except EngineError as error:
            # What the next ones find is worth having, unless the engine has gone.
            findings.check(name, False, str(error))
            leases(servers.decode)
    nothing_kept("at the end", servers.decode, findings)
    all_free((servers.prefill, servers.decode), findings)


def _places(servers: Servers, ranks: int) -> list[Servers]:
    if ranks == 1:
        return [servers]
    return [replace(servers, decode_rank=rank, answer_rank=rank) for rank in range(ranks)]


def _other(where: Servers, ranks: int) -> int | None:
    return None if where.decode_rank is None else (where.decode_rank + 1) % ranks


def _named(name: str, where: Servers, ranks: int) -> str:
    return name if ranks == 1 else f"{name}@{where.decode_rank}"


def _forks(where: Servers, rng: random.Random, findings: Findings) -> None:
    """One kept turn is read for two histories that part after it."""
    new = source(rng)
    turn = first_turn(new(700), 40, where)
    for name in _FORKS:
        conversation = Conversation(f"fork:{name}", turn.prompt, 40, ROWS[name])
        findings.cases.append(second_turn(conversation, turn, where, rng))
    findings.cases[-1].stranded += give_back(where.decode, turn.answer)


def _every_rank_serves(
    servers: Servers, ranks: int, rng: random.Random, findings: Findings
) -> None:
    """Turns that name no rank: the engine spreads them."""
    new = source(rng)
    prompts: Sequence[list[int]] = [new(300) for _ in range(_UNADDRESSED)]
    with ThreadPoolExecutor(_UNADDRESSED) as pool:
        turns = list(pool.map(lambda prompt: first_turn(prompt, 24, servers).answer, prompts))
    kept = lease_ids(*turns)
    by_rank = {one["rank"]: one["leases"] for one in leases(servers.decode)["ranks"]}
    served = len(by_rank) == ranks and all(by_rank.values())
    findings.check("every rank serves", served, f"leases by rank: {by_rank}")
    findings.equal("their leases given back", len(release(servers.decode, kept)), _UNADDRESSED)
