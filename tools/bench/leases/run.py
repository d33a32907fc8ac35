"""Runs the arms one after the other, and writes what each has shown as soon as it has ended."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.about import busy_share, hardware
from tools.bench.errors import BenchError
from tools.bench.gpu.client import SERVED_NAME, RequestError
from tools.bench.leases.arms import Arm
from tools.bench.leases.load import MOST_OTHERS, run_load
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
    for number, arm in enumerate(what.arms, 1):
        passed = time.monotonic() - begun
        if passed + longest > what.deadline_s:
            made["left_out"].append(arm.name)
            say(f"{arm.name}: left out, it would end after the deadline")
        else:
            say(f"{arm.name}: arm {number} of {len(what.arms)}, after {passed:.0f} s")
            made["arms"][arm.name] = _run_arm(what, arm, start, say, busy)
            longest = max(longest, time.monotonic() - begun - passed)
        write_whole(path, json.dumps(made, indent=1) + "\n")
    return path


def _run_arm(
    what: Run, arm: Arm, start: Start, say: Say, busy: Callable[[], float]
) -> dict[str, Any]:
    taken = busy()
    begun, folder = time.monotonic(), what.out / arm.name
    for log in folder.glob("*.log"):  # an earlier run's
        log.unlink()
    with start(arm, folder) as nodes:
        made = {
            "title": arm.title,
            "busy_share": taken,
            "start_s": round(time.monotonic() - begun, 1),
            "commands": nodes.commands(),
            "environment": nodes.environment,
        }
        try:
            with _on_cores(nodes.cores):
                made["phases"] = _phases(what, arm, nodes, say)
        except (BenchError, RequestError, DemoError) as error:
            nodes.check_alive()
            raise error if isinstance(error, BenchError) else BenchError(str(error)) from error
        nodes.check_alive()
    return made


def _phases(what: Run, arm: Arm, nodes: Nodes, say: Say) -> dict[Phase, dict[str, Any]]:
    plan, words = what.plan, Words(what.token_ids)
    talks = Talks(plan, words)
    talks.warm_up(nodes.front)
    first_ms = talks.turn(nodes.front, 1)
    say(f"{arm.name}: {plan.conversations} conversations rest after turn 1")
    made: dict[Phase, dict[str, Any]] = {}
    for turn, phase in enumerate(PHASES, 2):
        made[phase] = _load(plan, words, arm, nodes, phase)
        load, d = made[phase]["load"], made[phase]["decode"]
        say(
            f"{arm.name}, {phase}: {load['streams']} streams, {load['seconds']:.0f} s: "
            f"{load['tokens_per_s']:.0f} tokens/s, p99 {load['itl_p99_ms']:.1f} ms, "
            f"{d['preempted']} preempted"
        )
        if load["others"] > MOST_OTHERS:
            say(f"{arm.name}, {phase}: others took {load['others']:.0%} of this machine meanwhile")
        before = read_metrics(nodes.prefill_url)
        turn_ms = talks.turn(nodes.front, turn)
        time.sleep(_SETTLE_S)
        found, missed = hits(before, read_metrics(nodes.prefill_url), arm.stock)
        made[phase]["back"] = {
            "turns": plan.conversations,
            "hits": found,
            "missed": missed,
            "turn_ms": turn_ms,
            "first_turn_ms": first_ms,
        }
        say(f"{arm.name}, {phase}: {found} of {plan.conversations} turns read back {missed or ''}")
    return made


def _load(plan: Plan, words: Words, arm: Arm, nodes: Nodes, phase: Phase) -> dict[str, Any]:
    url = nodes.decode_url
    before = read_metrics(url)
    kept_before = lease_totals(url) if arm.leased else None
    others = Others([process.pid for process in nodes.processes])
    at_end: list[Reading] = []
    load = run_load(
        url, SERVED_NAME, words, plan, phase, others, lambda: at_end.append(read_metrics(url))
    )
    (after,) = at_end
    queued = after.growth(before, _QUEUED + "_count")
    return {
        "load": asdict(load),
        "decode": {
            "preempted": round(after.growth(before, _PREEMPTIONS)),
            "queued_ms": 1000 * after.growth(before, _QUEUED + "_sum") / max(1.0, queued),
            "usage_at_end": after.total(_USAGE),
            "leases_before": kept_before,
            "leases_after": lease_totals(url) if arm.leased else None,
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
