"""Takes the arms in turns, then counts what our router's memory comes to."""

from __future__ import annotations

import asyncio
import gc
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench.about import busy_share, hardware, versions
from tools.bench.errors import BenchError
from tools.bench.router.arms import OURS, Engines, between, engines
from tools.bench.router.figures import Memory, as_json
from tools.bench.router.load import BothLegs, Client, Load, Through, fill, measure
from tools.bench.router.memory import resident_mb
from tools.bench.router.yardstick import Yardstick
from tools.cluster.readiness import Report

_BUSY = 0.2
_LEAST_UNDISTURBED = 0.5
_FILL_CONCURRENCY = 32
_LEASE_S = 3600.0


@dataclass(frozen=True)
class Settings:
    """One run. `conversations` 0: memory is not measured; `saturated_s` 0: nor is the maximum.

    `redis`: where the state of the arm that shares it goes. `calm_ms`: what counts is measured
    while the yardstick takes no longer.
    """

    python: Path
    arms: tuple[str, ...]
    repeats: int
    paced: Load
    saturated_s: float
    conversations: int
    turn_tokens: int
    redis: str | None = None
    calm_ms: float = math.inf


@dataclass(frozen=True)
class Cores:
    """One core for what is measured, another for engines and clients."""

    between: int
    load: int

    @classmethod
    def choose(cls) -> Cores:
        """The first two that this process may use; BenchError if there is one only."""
        found = sorted(os.sched_getaffinity(0))
        if len(found) < 2:
            raise BenchError(
                "the router needs a core of its own", expected="two cores", found=len(found)
            )
        return cls(found[0], found[1])


def run(settings: Settings, folder: Path, command: str, report: Report) -> dict[str, Any]:
    """Measure everything; the result is what the JSON file holds."""
    cores = Cores.choose()
    busy = busy_share()
    warnings = []
    if busy > _BUSY:
        warnings.append(f"warning: others took {busy:.0%} of the machine when this began")
    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        kind: {arm: [] for arm in settings.arms} for kind in _loads(settings)
    }
    with ExitStack() as stack:
        behind = stack.enter_context(
            engines(cores.load, settings.turn_tokens, _LEASE_S, folder, report)
        )
        for repeat in range(settings.repeats):
            for arm in settings.arms:
                report(f"repeat {repeat + 1} of {settings.repeats}: {arm}")
                for kind, found in _arm(arm, settings, behind, cores, folder, report).items():
                    samples[kind][arm].append(found)
    warnings += [
        f"warning: the machine was calm in {sample['undisturbed']:.0%} of {arm}, {kind}"
        for kind, arms in samples.items()
        for arm, found in arms.items()
        for sample in found
        if sample["undisturbed"] < _LEAST_UNDISTURBED
    ]
    memory = _memory(settings, cores, folder, report) if settings.conversations else None
    return {
        "command": command,
        "versions": versions(settings.python),
        "hardware": hardware(),
        "busy_before": busy,
        "settings": {
            **{key: value for key, value in asdict(settings.paced).items() if key != "steps"},
            "repeats": settings.repeats,
            "saturated_s": settings.saturated_s,
            "turn_tokens": settings.turn_tokens,
            "calm_ms": None if math.isinf(settings.calm_ms) else settings.calm_ms,
        },
        "samples": samples,
        "memory": asdict(memory) if memory else None,
        "warnings": warnings,
    }


def _loads(settings: Settings) -> dict[str, Load]:
    """By the names that the result has for them."""
    paced = settings.paced
    loads = {"steps": replace(paced, steps=True), "paced": paced}
    if settings.saturated_s:
        loads["saturated"] = replace(paced, interval_ms=0.0, seconds=settings.saturated_s)
    return loads


def _arm(
    arm: str, settings: Settings, behind: Engines, cores: Cores, folder: Path, report: Report
) -> dict[str, dict[str, float]]:
    with between(
        arm, settings.python, behind, cores.between, folder, report, settings.redis
    ) as router:

        def client() -> Client:
            if router is None:
                return BothLegs(behind.prefill.port, behind.decode.port)
            return Through(router.port)

        pid = None if router is None else router.process.pid
        found = {}
        for kind, load in _loads(settings).items():
            with _undisturbed(cores.load), closing(Yardstick(cores.between)) as yardstick:
                sample = asyncio.run(
                    measure(
                        client,
                        load,
                        pid,
                        behind.process.pid,
                        yardstick=yardstick.take,
                        calm_ms=settings.calm_ms,
                    )
                )
            found[kind] = as_json(sample)
            if sample.undisturbed < 1:
                report(f"{kind}: the machine was calm for {sample.undisturbed:.0%} of it")
        return found


def _memory(settings: Settings, cores: Cores, folder: Path, report: Report) -> Memory:
    report(f"memory of our router with {settings.conversations:,} conversations")
    with (
        engines(cores.load, settings.turn_tokens, _LEASE_S, folder, report) as behind,
        between(OURS, settings.python, behind, cores.between, folder, report) as router,
    ):
        assert router is not None  # ours is one

        def client() -> Client:
            return Through(router.port)

        before = resident_mb(router.process.pid)
        with _undisturbed(cores.load):
            seconds = asyncio.run(fill(client, settings.conversations, _FILL_CONCURRENCY))
        report(f"filled in {seconds:.0f} s")
        after = resident_mb(router.process.pid)
    return Memory(settings.conversations, settings.turn_tokens, before, after)


@contextmanager
def _undisturbed(core: int) -> Iterator[None]:
    """This process on its core, without pauses of the garbage collector."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, before)
