"""What each command does; all return an exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tools.bench import base
from tools.bench.about import busy_share, gpus, versions
from tools.bench.arguments import CPU, CUDA, workload_of
from tools.bench.arms import ARMS, DEFAULT, DEFAULT_CPU, Arm, arms_of
from tools.bench.client import Target
from tools.bench.collect import RECORDS, run_folder
from tools.bench.errors import BenchError
from tools.bench.model import TINY, Model, default_shape, find_model, kv_bytes_per_token
from tools.bench.plan import Workload
from tools.bench.progress import Progress
from tools.bench.records import RecordFile, read_records
from tools.bench.remote import RemoteServers
from tools.bench.report import Report, report
from tools.bench.run import (
    Engines,
    Experiment,
    Serving,
    about_run,
    check_plan,
    fresh,
    now,
    run,
    session_of,
    write_about,
)
from tools.bench.servers import Settings, serving
from tools.bench.stock import MULTI_TURN, source_file
from tools.bench.traces import Encode, Replay, read_trace
from tools.cluster.options import Device

Command = Callable[[argparse.Namespace, str], int]


def _run(args: argparse.Namespace, command: str) -> int:
    out = args.out.absolute()
    if args.fresh:
        fresh(out)
    device: Device = args.device if args.device != "auto" else ("cuda" if gpus() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    model = find_model(args.model or _default_model(device, args.tensor_parallel), _scratch(out))
    workload = workload_of(args, CUDA if device == "cuda" else CPU)
    default = DEFAULT if device == "cuda" else DEFAULT_CPU
    arms = arms_of(args.arms.split(",") if args.arms else default)
    experiment = _experiment(args, arms, model, workload, device, out)
    settings = Settings(
        device=device,
        model=model,
        max_model_len=experiment.engines.max_model_len,
        kv_cache_gib=1 if device == "cpu" else None,
        tensor_parallel=args.tensor_parallel,
        backend=args.backend,
        python=args.python,
        engine_args=tuple(args.engine_arg),
    )

    def start(arm: Arm, folder: Path) -> AbstractContextManager[Serving]:
        return serving(arm, settings, folder, _scratch(out), _say)

    run(experiment, start, lambda total, done: Progress(sys.stderr, total, done))
    return _show(report([out], out / "report", command))


def _drive(args: argparse.Namespace, command: str) -> int:
    out = args.out.absolute()
    if args.fresh:
        fresh(out)
    if not args.model:
        raise BenchError("no model is given", expected="--model", next_step="see --help")
    model = find_model(args.model, _scratch(out))
    workload = workload_of(args, CUDA)
    servers = _servers(args)
    experiment = _experiment(args, (ARMS[args.arm],), model, workload, "remote", out, servers)

    @contextmanager
    def start(arm: Arm, folder: Path) -> Iterator[Serving]:
        yield servers

    run(experiment, start, lambda total, done: Progress(sys.stderr, total, done))
    _say(f"now copy the logs of router and P: {out}/logs/router.log, {out}/logs/prefill.log")
    return 0


def _report(args: argparse.Namespace, command: str) -> int:
    return _show(report(args.folders, args.to or args.folders[0] / "report", command))


def _model(args: argparse.Namespace, command: str) -> int:
    model = find_model(args.name, args.folder)
    print(shlex.join([str(model.path), "--dtype", model.dtype, *model.args]))
    return 0


def _base_prepare(args: argparse.Namespace, command: str) -> int:
    script = source_file(MULTI_TURN, args.out / "base", _say) / "benchmark_serving_multi_turn.py"
    folder = args.out / f"workload-{args.length}"
    print(script)
    print(
        base.write_workload(folder, args.length, args.turns, args.conversations, args.output_tokens)
    )
    return 0


def _base_records(args: argparse.Namespace, command: str) -> int:
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    model = find_model(args.model, _scratch(out))
    records = base.read_stats(args.stats, args.arm, args.repeat, args.length)
    servers = _servers(args)
    workload = Workload(lengths=(), turns=0, hold_conversations=0)
    engines = _engines(args, model, "remote", 0, servers)
    arm = ARMS[args.arm]
    experiment = Experiment((arm,), args.repeat + 1, workload, engines, out)
    check_plan(out, experiment.plan())
    file = RecordFile(out / RECORDS)
    before = read_records(file.path) if file.path.exists() else []
    if {record.key for record in before} & {record.key for record in records}:
        raise BenchError(
            "these requests are in the results folder already",
            file=file.path,
            found=f"{args.arm}, repeat {args.repeat}, {args.length} tokens",
            next_step="give another --repeat, or another --out",
        )
    folder = run_folder(out, arm.name, args.repeat)
    folder.mkdir(parents=True, exist_ok=True)
    about = about_run(experiment, arm, args.repeat, servers, folder)
    about["sessions"].append({**session_of(servers, now(), busy_share()), "totals": None})
    write_about(folder, about)
    file.append(records)
    print(f"{len(records)} requests of {args.arm}, repeat {args.repeat}, in {file.path}")
    return 0


def _experiment(
    args: argparse.Namespace,
    arms: tuple[Arm, ...],
    model: Model,
    workload: Workload,
    device: str,
    out: Path,
    servers: RemoteServers | None = None,
) -> Experiment:
    if args.repeats < 1:
        raise BenchError("nothing is to be run", expected="--repeats of 1 or more")
    limit = args.max_model_len or int(model.config.get("max_position_embeddings", 4096))
    replay = Replay(
        limit=args.trace_limit,
        longest=limit,
        time_scale=args.time_scale,
        think_s=args.think,
        tool_s=args.tool_gap,
        seed=workload.seed,
    )
    trace = tuple(read_trace(args.trace, replay, _encode(model))) if args.trace else ()
    draft = Experiment(
        arms, args.repeats, workload, _engines(args, model, device, 0, servers), out, trace
    )
    needed = max((unit.longest for unit in draft.units(0)), default=0)
    if needed == 0:
        raise BenchError("nothing is to be run", expected="--lengths, --turns, --hold or --trace")
    if args.max_model_len and needed > args.max_model_len:
        raise BenchError(
            "prompts are longer than the engines take",
            expected=f"--max-model-len of at least {needed}",
            found=args.max_model_len,
        )
    engines = _engines(args, model, device, args.max_model_len or needed, servers)
    first = getattr(args, "first_repeat", 0)
    return Experiment(arms, args.repeats, workload, engines, out, trace, args.clients, first)


def _engines(
    args: argparse.Namespace,
    model: Model,
    device: str,
    max_model_len: int,
    servers: RemoteServers | None,
) -> Engines:
    config = model.config
    dtype = model.dtype if model.dtype != "auto" else str(config.get("dtype", "auto"))
    asked = {"vllm": servers.version() or None} if servers is not None else None
    return Engines(
        device=device,
        model_name=model.name,
        config=config,
        dtype=dtype,
        token_ids=model.token_ids,
        max_model_len=max_model_len,
        tensor_parallel=args.tensor_parallel,
        kv_bytes_per_token=args.kv_bytes_per_token
        or kv_bytes_per_token(config, model.dtype, args.tensor_parallel),
        versions=versions(args.python) if asked is None else asked,
        note=getattr(args, "note", ""),
    )


def _servers(args: argparse.Namespace) -> RemoteServers:
    target = Target(args.url.rstrip("/"), args.served_name, ARMS[args.arm].links)
    return RemoteServers(target, args.prefill_url.rstrip("/"), args.block_size)


def _encode(model: Model) -> Encode:
    """Text to token ids, by the model's own tokenizer."""

    def encode(text: str) -> list[int]:
        from tokenizers import Tokenizer

        path = model.path / "tokenizer.json"
        if not path.is_file():
            raise BenchError("a trace of texts needs the model's tokenizer", file=path)
        tokenizer = loaded.setdefault("it", Tokenizer.from_file(str(path)))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    loaded: dict[str, Any] = {}
    return encode


def _default_model(device: Device, tensor_parallel: int) -> str:
    if device == "cpu":
        return TINY
    found = gpus()
    memory = [float(line.split(",")[1]) / 1024 for line in found]
    # P and D share GPUs where there are too few.
    engines_per_gpu = 1 if len(found) >= 2 * tensor_parallel else 2
    return default_shape(min(memory) * tensor_parallel / engines_per_gpu)


def _scratch(out: Path) -> Path:
    """What is made on the way, and not part of the results."""
    folder = out.absolute().parent / ".bench-scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _show(made: Report) -> int:
    for line in made.warnings:
        _say(f"warning: {line}")
    if made.unjoined:
        _say(f"{len(made.unjoined)} requests could not be joined: see the report")
    print(made.page)
    return 0 if made.holds else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMANDS: Mapping[str, Command] = {
    "run": _run,
    "drive": _drive,
    "report": _report,
    "model": _model,
    "base-prepare": _base_prepare,
    "base-records": _base_records,
}
