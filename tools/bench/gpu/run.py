"""One run: ceilings, engines, warming up, holding, repeats; its JSON is written after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.about import hardware, versions
from tools.bench.errors import BenchError
from tools.bench.gpu import ceilings
from tools.bench.gpu.client import RequestError
from tools.bench.gpu.counters import kv_capacity
from tools.bench.gpu.engines import Settings, running, telling
from tools.bench.gpu.holding import Held, make_contact, measure_held
from tools.bench.gpu.plan import Plan, SetName, arms, check_kv, check_plan, order
from tools.bench.gpu.rows import Row
from tools.bench.gpu.summary import (
    REQUIRED_AT,
    Required,
    Summary,
    largest_excess,
    required,
    summaries,
    table,
)
from tools.bench.gpu.turns import PairOfNodes, fragment, measure
from tools.bench.model import kv_bytes_per_token
from tools.cluster.options import Device
from tools.demo.errors import DemoError

VERSION = 1
_MOST_ERRORS = 5
Nodes = Mapping[SetName, PairOfNodes]
Say = Callable[[str], None]


@dataclass
class Run:
    """What is measured, and what was found so far. deadline_s: after it no length is begun;
    until_s: the same of the sets that are up, since those that come later have a share of it."""

    settings: Settings
    plan: Plan
    repeats: int
    out: Path
    command: str
    deadline_s: float
    say: Say
    begin: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float | None] | None = None
    until_s: float = 0.0

    @property
    def path(self) -> Path:
        """The JSON of this run."""
        return self.out / f"{self.settings.model.name.rpartition('/')[2]}.json"

    @property
    def errors(self) -> list[str]:
        """Of requests that failed."""
        return [f"{row.arm} {row.length}: {row.error}" for row in self.rows if row.error]

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    def is_over(self) -> bool:
        """Whether nothing new is to be begun with the engines that are up."""
        return self.elapsed() > self.until_s or len(self.errors) >= _MOST_ERRORS


def profile(run: Run) -> int:
    """Measure all, print the tables, write the JSON; 0, or 1 when a request has failed.

    Raises BenchError for what cannot be, and ProcessFailedError for an engine that does not start.
    """
    config = run.settings.model.config
    bytes_per_token = kv_bytes_per_token(config, _kv_dtype(run.settings))
    check_plan(run.plan, int(config["max_position_embeddings"]))
    check_kv(run.plan, bytes_per_token, run.settings.prefill_kv_gib, run.settings.decode_kv_gib)
    if run.path.exists():
        raise BenchError("there are results already", file=run.path, next_step="give another --out")
    run.out.mkdir(parents=True, exist_ok=True)
    run.about = _about(run, bytes_per_token)
    if run.settings.device == "cuda":
        run.ceilings = ceilings.ask(_first_python(run.settings), run.settings.gpus[0])
        run.say(f"ceilings: {run.ceilings}")
    batches = batches_of(run.settings)
    for number, batch in enumerate(batches, 1):
        began = time.monotonic()
        run.until_s = run.deadline_s * number / len(batches)
        with running(batch, run.out / "logs", run.say) as nodes:
            run.about.setdefault("ready_s", []).append(round(time.monotonic() - began, 1))
            try:
                _measure(run, nodes)
            finally:
                _after(run, nodes)
    print("\n".join(result_lines(run)), flush=True)
    return 1 if run.errors or not run.rows else 0


def _measure(run: Run, nodes: Nodes) -> None:
    # First, while D keeps nothing: later it would have to be waited for.
    _hold(run, nodes)
    _write(run)
    for length in run.plan.lengths:
        if run.is_over():
            break
        for arm in arms(list(nodes)):
            _one(run, nodes, arm.set_name, arm.kind, length, -1)
    _write(run)
    for name, pair in nodes.items():
        if run.plan.fragment and not run.is_over():
            began = time.monotonic()
            try:
                fragment(pair, run.plan.fragment, run.settings.seed)
            except (RequestError, DemoError) as error:
                run.say(f"{name}: fragmenting ended early: {error}")
            run.say(f"{name}: {run.plan.fragment} conversations, {time.monotonic() - began:.1f} s")
    _write(run)
    for repeat in range(run.repeats):
        for length in run.plan.lengths:
            if run.is_over():
                run.say(f"ended in repeat {repeat} before {length} tokens: {run.elapsed():.0f} s")
                return
            for arm in order(arms(list(nodes)), repeat):
                _one(run, nodes, arm.set_name, arm.kind, length, repeat)
        _write(run)


def _one(run: Run, nodes: Nodes, name: SetName, kind: Any, length: int, repeat: int) -> None:
    if len(run.errors) >= _MOST_ERRORS:
        return
    row = measure(nodes[name], run.plan, kind, length, repeat)
    row = Row(**{**vars(row), "at_s": round(row.at_s - run.begin, 3) if row.at_s else 0.0})
    run.rows.append(row)
    run.say(f"{run.elapsed():6.1f} s  {progress(row)}")


def _hold(run: Run, nodes: Nodes) -> None:
    already = 0
    for name, pair in nodes.items() if run.plan.hold else ():
        try:
            make_contact(pair, run.plan.hold_tokens)
        except (RequestError, DemoError) as error:
            run.say(f"{name}: no contact between P and D: {error}")
            return
    for held in run.plan.hold:
        for name, pair in nodes.items():
            if run.is_over():
                return
            try:
                found = measure_held(pair, held, already, run.plan.hold_tokens)
            except (RequestError, DemoError) as error:
                run.say(f"{name}: holding {held}: {error}")
                continue
            run.held.append(found)
            run.say(f"{run.elapsed():6.1f} s  {held_line(found)}")
        already = held


def _after(run: Run, nodes: Nodes) -> None:
    """What can only be asked while engines run."""
    for name, pair in nodes.items():
        capacity, block = kv_capacity_or_nothing(pair)
        run.about.setdefault("sets", {})[name] = {
            "kv_tokens": capacity,
            "block_size": block,
            "waited_for_expiry_s": round(pair.kept.waited_s, 1),
            "log": telling((pair.prefill, pair.decode)),
            "prefill_command": published(pair.prefill.process.command),
            "decode_command": published(pair.decode.process.command),
        }
    _write(run)


def published(command: Sequence[str]) -> list[str]:
    """An engine's command line without where things lie on this machine."""
    start = command.index("serve") if "serve" in command else 0
    model = start + 1
    words = [Path(word).name if at == model else word for at, word in enumerate(command)]
    return ["vllm", *words[start:]]


def kv_capacity_or_nothing(pair: PairOfNodes) -> tuple[int, int]:
    """Tokens and block size of D's cache; zeros when D is gone."""
    try:
        return kv_capacity(pair.decode.url)
    except DemoError:
        return 0, 0


def progress(row: Row) -> str:
    """A line about one request."""
    when = "warm-up" if row.repeat < 0 else f"#{row.repeat}"
    head = f"{when:8}{row.length:>6} {row.arm:16}"
    if row.error:
        return f"{head} FAILED: {row.error}"
    text = f"{head} prefill {row.prefill_ms:8.1f}  TTFT {row.ttft_ms:8.1f}"
    if row.pull is not None:
        shown = (("pull", row.pull_ms), ("post", row.post_ms), ("engine", row.engine_ms))
        text += "".join(f"  {name} {value:.1f}" for name, value in shown if value is not None)
        text += f"  {row.pull.descriptors} descriptors  {row.pull.bytes / 1e6:.0f} MB"
        if row.log and row.log.get("outcome") != "read":
            text += f"  {row.log.get('outcome')}: {row.log.get('reason')}"
    return text + ("  first contact" if row.first_contact else "")


def held_line(one: Held) -> str:
    """A line about one D that keeps conversations."""
    return (
        f"{one.set_name:6} {one.held:>3} held  ITL mean {one.itl_mean_ms:.2f}  "
        f"p50 {one.itl_p50_ms:.2f}  p99 {one.itl_p99_ms:.2f} ms  "
        f"engine {one.engine_cpu_percent:.1f} %  API {one.api_cpu_percent:.1f} %  "
        f"KV {one.kv_usage:.1%}{'' if one.kept_all else '  EXPIRED MEANWHILE: raise --ttl'}"
    )


def result_lines(run: Run) -> list[str]:
    """The tables and what is required."""
    lines = table(_summaries(run))
    if run.held:
        lines += ["", "held conversations", *map(held_line, run.held)]
    lines += ["", "required", *(f"  {one}" for one in requirements(run.rows, run.settings))]
    return [*lines, *run.errors, f"{run.path}: {run.elapsed():.0f} s"]


def requirements(rows: Sequence[Row], settings: Settings) -> list[Required]:
    """What this kind of run is to show, with whether it does."""
    if settings.slow_transport:
        return largest_excess(rows)
    if not any(row.length == REQUIRED_AT and row.counts for row in rows):
        return [Required(f"at {REQUIRED_AT} tokens", None, "not measured")]
    return required(rows)


def _summaries(run: Run) -> list[Summary]:
    config = run.settings.model.config
    return summaries(run.rows, config, run.ceilings, "fp8" in run.settings.engine_args)


def _write(run: Run) -> None:
    made = {
        "gpu_profile": VERSION,
        "about": {**run.about, "seconds": round(run.elapsed(), 1)},
        "ceilings": run.ceilings,
        "medians": [one.as_json() for one in _summaries(run)],
        "required": [asdict(one) for one in requirements(run.rows, run.settings)],
        "holding": [one.as_json() for one in run.held],
        "rows": [row.as_json() for row in run.rows],
    }
    partial = run.path.with_suffix(".partial")
    partial.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    partial.replace(run.path)


def _about(run: Run, bytes_per_token: int) -> dict[str, Any]:
    settings = run.settings
    return {
        "command": run.command,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {name: versions(python) for name, python in settings.pythons.items()},
        "hardware": hardware(),
        "model": settings.model.name,
        "shape": settings.model.config,
        "kv_bytes_per_token": bytes_per_token,
        "plan": asdict(run.plan),
        "repeats": run.repeats,
        "device": settings.device,
        "gpus": settings.gpus,
        "kv_gib": {"prefill": settings.prefill_kv_gib, "decode": settings.decode_kv_gib},
        "decode_graphs": settings.decode_graphs,
        "slow_transport": settings.slow_transport,
        "engine_args": settings.engine_args,
        "seed": settings.seed,
    }


def batches_of(settings: Settings) -> list[Settings]:
    """Sets that are up at the same time: on a GPU all, unless they are to be apart; a CPU has not
    the cores for that."""
    if settings.device == "cuda" and not settings.apart:
        return [settings]
    return [
        Settings(**{**vars(settings), "pythons": {name: python}})
        for name, python in settings.pythons.items()
    ]


def _first_python(settings: Settings) -> Path:
    return next(iter(settings.pythons.values()))


def _kv_dtype(settings: Settings) -> str:
    """The KV cache's dtype, in the words of kv_bytes_per_token."""
    given = settings.engine_args
    if "--kv-cache-dtype" in given[:-1]:
        name = given[given.index("--kv-cache-dtype") + 1]
        return "fp8" if name.startswith("fp8") else name
    return settings.model.dtype


def device_of(name: str) -> Device:
    """The device that is meant."""
    return "cpu" if name == "cpu" else "cuda"
