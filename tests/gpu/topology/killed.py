"""Two P and two D behind the router: a P and then a D end with SIGKILL while clients stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gpu.client import EngineError, leases
from tests.gpu.histories import Conversation, random_conversations, row_conversations
from tests.gpu.measure import Servers, meet
from tests.gpu.topology.engines import Running
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.leases import all_free, nothing_kept
from tests.gpu.topology.load import Load, Sent, by_phase, send, wait_for
from tests.gpu.topology.routed import Nodes, compare, converse
from tools.bench.gpu.counters import kv_capacity
from tools.cluster.router import router

_CLIENTS = 8
_BEFORE = 3
# Turns that the load must get through before, between and after the kills, and when it is given up.
_TURNS, _PHASE_S = 4 * _CLIENTS, 120.0
# Turns of the load whose answers are compared with a recompute.
_LOOKED_AT = 9


def run_killed(
    engines: Running,
    logs: Path,
    randoms: int,
    rng: random.Random,
    findings: Findings,
    in_time: Callable[[], bool],
) -> None:
    """EngineError when a node that runs refuses."""
    for prefill in engines.prefill:
        for decode in engines.decode:
            meet(Servers(prefill.url, decode.url), rng)
    with router(engines.prefill, engines.decode, logs) as running:
        urls = Nodes(
            running.url,
            tuple(one.url for one in engines.prefill),
            tuple(one.url for one in engines.decode),
        )
        _show_every_prefill(urls, rng)
        findings.wanted += _BEFORE
        for conversation in row_conversations(rng)[:_BEFORE]:
            _conversation("all run", conversation, urls, rng, findings)
        sent = _load_and_kill(engines, running.url, rng, findings)
        left = Nodes(running.url, urls.prefill[1:], urls.decode[1:])
        _compare_load(sent, left, findings)
        _, block = kv_capacity(left.decode[0])
        work = [*row_conversations(rng), *random_conversations(rng, randoms, max(80, block))]
        findings.wanted += len(work)
        for conversation in work:
            if not in_time():
                break
            _conversation("two left", conversation, left, rng, findings)
    # Asked to stop, the router gives back what it has kept.
    free = wait_for(lambda: leases(left.decode[0])["leases"] == 0, 5.0)
    findings.check("router gave all back", free, f"{leases(left.decode[0])['leases']} leases left")
    nothing_kept("at the end", left.decode[0], findings)
    # What P has kept for the D that is dead, too.
    all_free((*left.prefill, *left.decode), findings)


def _show_every_prefill(nodes: Nodes, rng: random.Random) -> None:
    """The router offers KV to a P that has told it, with an answer, that it verifies."""
    conversations = random_conversations(rng, 2 * len(nodes.prefill))
    for conversation in conversations:
        turn = Sent(conversation.prompt, 0.0)
        send(nodes.router, conversation.name, turn, 1, last=True)
        if turn.error is not None:
            raise EngineError(f"{nodes.router}: {turn.error}")


def _load_and_kill(
    engines: Running, router_url: str, rng: random.Random, findings: Findings
) -> list[Sent]:
    load = Load(router_url, _CLIENTS, rng.randrange(1 << 30))
    load.start()
    ends: list[float] = []
    for victim in (engines.prefill[0], engines.decode[0]):
        _enough(load)
        ends.append(load.seconds())
        victim.kill()
    _enough(load)
    sent = load.stop()
    phases = by_phase(sent, ends)
    findings.figures["load"] = dict(
        zip(("all run", "one P killed", "one D killed too"), phases, strict=True)
    )
    findings.figures["seconds of kills"] = [round(end, 1) for end in ends]
    errors = sorted({one.error for one in sent if one.error is not None})
    findings.figures["errors"] = errors[:5]
    failed = [one for one in sent if one.outcome == "failed"]
    findings.equal("turns that failed before they began to stream", len(failed), 0)
    for name, phase in findings.figures["load"].items():
        whole, hits = phase.get("whole", 0), phase.get("hits", 0)
        findings.check(f"turns go on, {name}", whole >= _TURNS, f"{whole} whole")
        findings.check(f"hits, {name}", hits > 0, f"{hits} of {whole}")
    return sent


def _enough(load: Load) -> None:
    """Wait until a phase's turns are through; what is missing then is found in the figures."""
    done = len(load.sent) + _TURNS + _CLIENTS
    wait_for(lambda: len(load.sent) >= done, _PHASE_S)


def _compare_load(sent: Sequence[Sent], left: Nodes, findings: Findings) -> None:
    """Answers that clients got while nodes died, beside a recompute."""
    hits = [one for one in sent if one.outcome == "whole" and one.reuse.startswith("hit")]
    step = max(1, len(hits) // _LOOKED_AT)
    for number, one in enumerate(hits[::step][:_LOOKED_AT]):
        findings.cases.append(compare(f"under load, {number}", one, left, 0))
    findings.wanted += _LOOKED_AT


def _conversation(
    when: str, conversation: Conversation, nodes: Nodes, rng: random.Random, findings: Findings
) -> None:
    case = converse(conversation, nodes, rng)
    case.name = f"{case.name}, {when}"
    findings.cases.append(case)
