"""Runs arms in turns, repeat after repeat, and goes on where an interruption has left off.

Each arm of each repeat gets engines of its own, so that none profits from what another has left in
a cache, and how engines happen to start counts as part of the spread.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.bench.about import busy_share, hardware
from tools.bench.arms import Arm, order
from tools.bench.client import Target
from tools.bench.collect import ABOUT, RECORDS, run_folder
from tools.bench.drive import Driver, Where
from tools.bench.errors import BenchError
from tools.bench.plan import Talk, Unit, Workload, units, with_mutations
from tools.bench.progress import Progress
from tools.bench.prompts import Words
from tools.bench.records import RecordFile, write_whole

PLAN = "plan.json"


class Serving(Protocol):
    """A running arm, as `servers.Servers` and `remote.RemoteServers` are."""

    @property
    def target(self) -> Target: ...
    def block_size(self) -> int: ...
    def totals(self) -> dict[str, float] | None: ...
    def commands(self) -> dict[str, list[str]]: ...
    def environment(self) -> dict[str, dict[str, str]]: ...
    def connectors(self) -> dict[str, dict[str, Any]]: ...
    def check_alive(self) -> None: ...


Start = Callable[[Arm, Path], AbstractContextManager[Serving]]


@dataclass(frozen=True)
class Engines:
    """What is known of the engines before they start, and goes into the report."""

    device: str
    model_name: str
    config: dict[str, Any]
    dtype: str
    token_ids: tuple[int, ...]
    max_model_len: int
    tensor_parallel: int
    kv_bytes_per_token: int
    versions: dict[str, str | None]
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """What is run, into the results folder `out`.

    trace: conversations, replayed by `clients` at a time. first_repeat: number of the first repeat.
    """

    arms: tuple[Arm, ...]
    repeats: int
    workload: Workload
    engines: Engines
    out: Path
    trace: tuple[Talk, ...] = ()
    clients: int = 1
    first_repeat: int = 0

    def units(self, repeat: int) -> list[Unit]:
        share, seed = self.workload.mutate_share, f"{self.workload.seed}-{repeat}"
        talks = [
            with_mutations(talk, share, f"{seed}-{number}")
            for number, talk in enumerate(self.trace)
        ]
        return units(self.workload, repeat, talks)

    def plan(self) -> dict[str, Any]:
        """What must be the same for records to belong together."""
        return {
            "workload": self.workload.as_json(),
            "trace": hashlib.sha256(repr(self.trace).encode()).hexdigest() if self.trace else None,
            "clients": self.clients,
            "device": self.engines.device,
            "model": self.engines.config,
            "dtype": self.engines.dtype,
            "max_model_len": self.engines.max_model_len,
            "tensor_parallel": self.engines.tensor_parallel,
        }


def run(
    experiment: Experiment,
    start: Start,
    progress: Callable[[int, int], Progress],
    busy: Callable[[], float] = busy_share,
) -> None:
    """Run what is not there yet; `busy` tells what others take of the machine.

    BenchError, or ClusterError of engines, ends it early; then, as after KeyboardInterrupt, the
    same call goes on with what is left.
    """
    out = experiment.out
    out.mkdir(parents=True, exist_ok=True)
    check_plan(out, experiment.plan())
    records = RecordFile(out / RECORDS)
    turns = order(experiment.arms, experiment.repeats, experiment.first_repeat)
    planned = [(arm, repeat, unit) for repeat, arm in turns for unit in experiment.units(repeat)]
    done = records.resume((arm.name, repeat, unit) for arm, repeat, unit in planned)
    requests = sum(unit.requests for _, _, unit in planned)
    left = sum(u.requests for arm, repeat, u in planned if (arm.name, repeat, u.name) not in done)
    bar = progress(requests, requests - left)
    for repeat, arm in turns:
        pending = [
            unit for unit in experiment.units(repeat) if (arm.name, repeat, unit.name) not in done
        ]
        if pending:
            _run_arm(experiment, arm, repeat, pending, start, records, bar, busy)


def fresh(out: Path) -> None:
    """Forget the results in a folder; BenchError for a folder that is not one of results."""
    if not out.exists():
        return
    if any(out.iterdir()) and not (out / PLAN).exists():
        raise BenchError(
            "this folder is not deleted: it is not one of results",
            file=out,
            expected=f"a {PLAN} in it, or no folder",
            found=sorted(path.name for path in out.iterdir())[:5],
        )
    shutil.rmtree(out)


def check_plan(out: Path, plan: dict[str, Any]) -> None:
    """Note what is run; BenchError if the folder's records are of something else."""
    path = out / PLAN
    if not path.exists():
        write_whole(path, json.dumps(plan, indent=1) + "\n")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError("a plan cannot be read", file=path, found=error) from error
    for name, value in plan.items():
        if before.get(name) != value:
            raise BenchError(
                f"the results there were made with another {name.replace('_', ' ')}",
                file=path,
                expected=before.get(name),
                found=value,
                next_step="choose another folder (--out), or begin anew (--fresh)",
            )


def _run_arm(
    experiment: Experiment,
    arm: Arm,
    repeat: int,
    pending: Sequence[Unit],
    start: Start,
    records: RecordFile,
    bar: Progress,
    busy: Callable[[], float],
) -> None:
    folder = run_folder(experiment.out, arm.name, repeat)
    folder.mkdir(parents=True, exist_ok=True)
    begun, taken = now(), busy()
    bar.say(f"{arm.title}, repeat {repeat}: {arm.what}")
    with start(arm, folder) as servers:
        session = session_of(servers, begun, taken)
        about = about_run(experiment, arm, repeat, servers, folder)
        about["sessions"].append(session)
        write_about(folder, about)
        driver = Driver(
            servers.target,
            Words(experiment.engines.token_ids),
            Where(arm.name, repeat, experiment.workload.seed),
            experiment.clients,
        )
        try:
            asyncio.run(_drive(driver, experiment.workload, pending, records, bar, arm.title))
        except BenchError:
            servers.check_alive()
            raise
        session["totals"] = servers.totals()
        write_about(folder, about)


def session_of(servers: Serving, begun: str, taken: float) -> dict[str, Any]:
    """How the engines of a run were started this time."""
    return {
        "begun": begun,
        "busy_share": taken,
        "commands": servers.commands(),
        "environment": servers.environment(),
    }


async def _drive(
    driver: Driver,
    workload: Workload,
    pending: Sequence[Unit],
    records: RecordFile,
    bar: Progress,
    what: str,
) -> None:
    lengths = sorted({min(workload.lengths), max(workload.lengths)}) if workload.lengths else []
    await driver.warm_up(lengths, workload.new_tokens, workload.output_tokens)
    await driver.run(pending, records.append, lambda: bar.advance(what))


def about_run(
    experiment: Experiment, arm: Arm, repeat: int, servers: Serving, folder: Path
) -> dict[str, Any]:
    """What there is to know about a run; sessions before an interruption are kept."""
    path = folder / ABOUT
    sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
    engines = experiment.engines
    return {
        "arm": arm.name,
        "repeat": repeat,
        "front": arm.front,
        "bidirectional": arm.bidirectional,
        "prefill_cache": arm.prefill_cache,
        "must_move": arm.must_move,
        "device": engines.device,
        "note": engines.note,
        "model_name": engines.model_name,
        "model": engines.config,
        "dtype": engines.dtype,
        "max_model_len": engines.max_model_len,
        "tensor_parallel": engines.tensor_parallel,
        "kv_bytes_per_token": engines.kv_bytes_per_token,
        "block_size": servers.block_size(),
        "workload": experiment.workload.as_json(),
        "versions": engines.versions,
        "hardware": hardware(),
        "connectors": servers.connectors(),
        "sessions": sessions,
    }


def write_about(folder: Path, about: dict[str, Any]) -> None:
    write_whole(folder / ABOUT, json.dumps(about, indent=1) + "\n")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
