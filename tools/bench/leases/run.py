"""Runs the arms one after the other, and writes what each has shown as soon as it has ended."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.about import busy_share, hardware
from tools.bench.errors import BenchError
from tools.bench.gpu.client import SERVED_NAME, RequestError
from tools.bench.leases.arms import Arm, groups_of
from tools.bench.leases.load import MOST_OTHERS, Running
from tools.bench.leases.others import Others
from tools.bench.leases.plan import PHASES, Phase, Plan
from tools.bench.leases.servers import Nodes
from tools.bench.leases.totals import lease_totals
from tools.bench.leases.turns import Talks, hits
from tools.bench.prompts import Words
from tools.bench.records import write_whole
from tools.demo.errors import DemoError
from tools.demo.metrics import Reading, read_metrics

RESULTS = "leases.json"
MARK = "bench_leases"
_PREEMPTIONS = "vllm:num_preemptions_total"
_QUEUED = "vllm:request_queue_time_seconds"
_USAGE = "vllm:kv_cache_usage_perc"
# Counters come with a step's end, a moment after its answer.
_SETTLE_S = 0.5

Start = Callable[[Arm, Path], AbstractContextManager[Nodes]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """What is run, into the folder `out`. `deadline_s`: no arm is begun that would end later."""

    plan: Plan
    arms: tuple[Arm, ...]
    out: Path
    token_ids: tuple[int, ...]
    deadline_s: float
    about: Mapping[str, Any]


def run(what: Run, start: Start, say: Say, busy: Callable[[], float] = busy_share) -> Path:
    """Run all arms; the JSON with all figures. BenchError or ClusterError ends it early; what was
    measured until then is in the file."""
    what.plan.check()
    what.out.mkdir(parents=True, exist_ok=True)
    path = what.out / RESULTS
    made: dict[str, Any] = {
        MARK: 1,
        **what.about,
        "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "plan": {**asdict(what.plan), "budget": what.plan.budget},
        "arms": {},
        "left_out": [],
    }
    begun, longest = time.monotonic(), 0.0
    for arms in groups_of(what.arms):
        names = ", ".join(arm.name for arm in arms)
        passed = time.monotonic() - begun
        if passed + longest * len(arms) > what.deadline_s:
            made["left_out"] += [arm.name for arm in arms]
            say(f"{names}: left out, it would end after the deadline")
        else:
            done = len(made["arms"]) + 1
            to = f" to {done + len(arms) - 1}" if len(arms) > 1 else ""
            say(f"{names}: arm {done}{to} of {len(what.arms)}, after {passed:.0f} s")
            made["arms"].update(_run_group(what, arms, start, say, busy))
            longest = max(longest, (time.monotonic() - begun - passed) / len(arms))
        write_whole(path, json.dumps(made, indent=1) + "\n")
    return path


@dataclass(frozen=True)
class _Up:
    """An arm that runs."""

    arm: Arm
    nodes: Nodes
    talks: Talks
    start_s: float
    # What all arms that are up consist of: none of these are others.
    everybody: list[int]


def _run_group(
    what: Run, arms: Sequence[Arm], start: Start, say: Say, busy: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    taken = busy()
    with ExitStack() as stack:
        up: list[_Up] = []
        everybody: list[int] = []
        for arm in arms:
            begun, folder = time.monotonic(), what.out / arm.name
            for log in folder.glob("*.log"):  # an earlier run's
                log.unlink()
            nodes = stack.enter_context(start(arm, folder))
            everybody += [process.pid for process in nodes.processes]
            talks = Talks(what.plan, Words(what.token_ids))
            up.append(_Up(arm, nodes, talks, round(time.monotonic() - begun, 1), everybody))
        try:
            with _on_cores(up[0].nodes.cores):
                phases = _phases(what, up, say)
        except (BenchError, RequestError, DemoError) as error:
            for one in up:
                one.nodes.check_alive()
            raise error if isinstance(error, BenchError) else BenchError(str(error)) from error
        for one in up:
            one.nodes.check_alive()
    return {
        one.arm.name: {
            "title": one.arm.title,
            "busy_share": taken,
            "start_s": one.start_s,
            "commands": one.nodes.commands(),
            "environment": one.nodes.environment,
            "phases": phases[one.arm.name],
        }
        for one in up
    }


def _phases(what: Run, up: Sequence[_Up], say: Say) -> dict[str, dict[Phase, dict[str, Any]]]:
    """Of each arm: a turn of all conversations, then for each phase its load and another turn."""
    firsts = {}
    for one in up:
        one.talks.warm_up(one.nodes.front)
        firsts[one.arm.name] = one.talks.turn(one.nodes.front, 1)
        say(f"{one.arm.name}: {what.plan.conversations} conversations rest after turn 1")
    made: dict[str, dict[Phase, dict[str, Any]]] = {one.arm.name: {} for one in up}
    for turn, phase in enumerate(PHASES, 2):
        for one, found in zip(up, _loads(what, up, phase), strict=True):
            name, load, d = one.arm.name, found["load"], found["decode"]
            made[name][phase] = found
            say(
                f"{name}, {phase}: {load['streams']} streams, {load['seconds']:.0f} s: "
                f"{load['tokens_per_s']:.0f} tokens/s, p99 {load['itl_p99_ms']:.1f} ms, "
                f"{d['preempted']} preempted"
            )
            if load["others"] > MOST_OTHERS:
                say(f"{name}, {phase}: others took {load['others']:.0%} of this machine meanwhile")
            found["back"] = {**_turn(one, turn), "first_turn_ms": firsts[name]}
            back = found["back"]
            say(
                f"{name}, {phase}: {back['hits']} of {back['turns']} turns read back "
                f"{back['missed'] or ''}"
            )
    return made


def _turn(one: _Up, turn: int) -> dict[str, Any]:
    """All of an arm's conversations come back."""
    before = read_metrics(one.nodes.prefill_url)
    turn_ms = one.talks.turn(one.nodes.front, turn)
    time.sleep(_SETTLE_S)
    found, missed = hits(before, read_metrics(one.nodes.prefill_url), one.arm.stock)
    return {
        "turns": one.talks.plan.conversations,
        "hits": found,
        "missed": missed,
        "turn_ms": turn_ms,
    }


def _loads(what: Run, up: Sequence[_Up], phase: Phase) -> list[dict[str, Any]]:
    """A phase's load on all arms, a cycle of each in turns."""
    measured = [_Measured(what, one, phase) for one in up]
    for cycle in range(what.plan.cycles):
        for number in what.plan.order(cycle, len(measured)):
            measured[number].running.cycle(cycle)
    return [one.found() for one in measured]


class _Measured:
    """An arm's load, and what its D counts from here on."""

    def __init__(self, what: Run, one: _Up, phase: Phase) -> None:
        self._url, self._leased = one.nodes.decode_url, one.arm.leased
        self._before = read_metrics(self._url)
        self._kept_before = lease_totals(self._url) if self._leased else None
        self._at_end: list[Reading] = []
        self.running = Running(
            self._url,
            SERVED_NAME,
            Words(what.token_ids),
            what.plan,
            phase,
            Others(one.everybody),
            lambda: self._at_end.append(read_metrics(self._url)),
        )

    def found(self) -> dict[str, Any]:
        last = self._at_end[-1]
        queued = last.growth(self._before, _QUEUED + "_count")
        return {
            "load": asdict(self.running.load()),
            "decode": {
                "preempted": round(last.growth(self._before, _PREEMPTIONS)),
                "queued_ms": 1000 * last.growth(self._before, _QUEUED + "_sum") / max(1.0, queued),
                "usage_at_end": last.total(_USAGE),
                "leases_before": self._kept_before,
                "leases_after": lease_totals(self._url) if self._leased else None,
            },
        }


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep this process, which reads all streams, off D's cores, if there are others."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
