"""Runs all pairs over engines that are started once; each pass is written when it has ended."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.bench.about import busy_share, hardware
from tools.bench.policies.figures import Counted, reuse, times
from tools.bench.policies.load import Turn, run_load
from tools.bench.policies.plan import Pair, Plan
from tools.bench.prompts import Words
from tools.bench.records import write_whole
from tools.bench.servers import SERVED_NAME
from tools.demo.metrics import read_metrics

RESULTS = "policies.json"
MARK = "bench_policies"
# Counters come with a step's end, a moment after its answer.
_SETTLE_S = 0.5
Say = Callable[[str], None]


class Nodes(Protocol):
    """The engines. `urls` by name."""

    @property
    def urls(self) -> Mapping[str, str]: ...

    def route(self, pair: Pair) -> AbstractContextManager[str]:
        """A router of its own with these policies, which gives everything back when it ends: its
        url."""

    def forget(self) -> None:
        """Empty all prefix caches, but for blocks that somebody holds; BenchError if one fails."""

    def commands(self) -> dict[str, list[str]]:
        """Each engine's command line."""


@dataclass(frozen=True)
class Run:
    """What is run, into the folder `out`. `deadline_s`: no pass is begun that would end later."""

    plan: Plan
    pairs: tuple[Pair, ...]
    out: Path
    token_ids: tuple[int, ...]
    deadline_s: float
    about: Mapping[str, Any]


def run(what: Run, nodes: Nodes, say: Say, busy: Callable[[], float] = busy_share) -> Path:
    """Run all passes; the JSON with all figures. What was measured before an error is in it."""
    what.out.mkdir(parents=True, exist_ok=True)
    path = what.out / RESULTS
    made: dict[str, Any] = {
        MARK: 1,
        **what.about,
        "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "commands": nodes.commands(),
        "plan": asdict(what.plan),
        "turns": what.plan.turns,
        "passes": [],
        "left_out": [],
    }
    words, begun, longest = Words(what.token_ids), time.monotonic(), 0.0
    _warm_up(what, nodes, words)
    for number, pair in what.plan.order(what.pairs):
        passed = time.monotonic() - begun
        if passed + longest > what.deadline_s:
            made["left_out"].append(f"{pair}, pass {number + 1}")
            say(f"{pair}: pass {number + 1} is left out, it would end after the deadline")
        else:
            made["passes"].append(_pass(what.plan, nodes, words, pair, number, busy()))
            longest = max(longest, time.monotonic() - begun - passed)
            say(_line(made["passes"][-1]))
        write_whole(path, json.dumps(made, indent=1) + "\n")
    return path


def _warm_up(what: Run, nodes: Nodes, words: Words) -> None:
    """Each P meets each D: a first read costs handshakes."""
    few = Plan(clients=4, conversations=10, think_s=(0.0, 0.0), seed=-1)
    for pair in (Pair("round-robin", "round-robin"), Pair("least-loaded", "round-robin")):
        with nodes.route(pair) as url:
            run_load(url, SERVED_NAME, words, few, f"warm-up-{pair.decode}")


def _pass(
    plan: Plan, nodes: Nodes, words: Words, pair: Pair, number: int, taken: float
) -> dict[str, Any]:
    nodes.forget()
    before = _count(nodes.urls)
    with nodes.route(pair) as url:
        begun = time.monotonic()
        turns = run_load(url, SERVED_NAME, words, plan, f"{number}-{pair.decode}-{pair.prefill}")
        seconds = time.monotonic() - begun
        time.sleep(_SETTLE_S)
        counted = reuse(read_metrics(url))
    return {
        "pair": str(pair),
        "number": number + 1,
        "seconds": round(seconds, 3),
        "busy_share": taken,
        "reuse": counted,
        "nodes": _count(nodes.urls).grown(before),
        "turns": _rounded(turns),
    }


def _line(made: Mapping[str, Any]) -> str:
    shown = times([Turn(**turn) for turn in made["turns"]])
    return (
        f"{made['pair']}, pass {made['number']}: {made['seconds']:.1f} s, TTFT p50 "
        f"{shown['ttft_p50_ms']:.0f} ms, p99 {shown['ttft_p99_ms']:.0f} ms"
    )


def _rounded(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [
        {**asdict(turn), "ttft_ms": round(turn.ttft_ms, 2), "turn_ms": round(turn.turn_ms, 2)}
        for turn in turns
    ]


def _count(urls: Mapping[str, str]) -> Counted:
    return Counted({name: read_metrics(url) for name, url in urls.items()})
