"""Is verified read-back right over several GPUs? Starts a topology's engines, and compares.

    python -m tests.gpu.topology plan --gpus 0,1
    python -m tests.gpu.topology run tp1-to-tp2 --out results
    python -m tests.gpu.topology report results --to docs/results/multi-gpu

Runs the vllm of this Python and needs no network. Exit status of `run`: 0 right, or skipped where
there are too few GPUs; 1 something is wrong, 2 an engine failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.client import EngineError
from tests.gpu.measure import Servers
from tests.gpu.shapes import SHAPES, write_model
from tests.gpu.topology.engines import Running, Settings, running
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.killed import run_killed
from tests.gpu.topology.pair import run_pair
from tests.gpu.topology.placement import TOPOLOGIES, Node, TooFewGpusError, place, shared
from tests.gpu.topology.report import report
from tests.gpu.topology.result import as_json, environment, judged, told
from tests.gpu.topology.transport import transport
from tools.cluster import ClusterError, ProcessFailedError
from tools.cluster.placement import visible_gpus
from tools.demo.errors import DemoError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _arguments(argv)
    if options.command == "report":
        print(report(options.folders, options.to))
        return 0
    if options.command == "plan":
        print("\n".join(_plan(_gpus(options))))
        return 0
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    topology = TOPOLOGIES[options.topology]
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"topology": topology.name, "about": topology.about}
    path = out / f"{topology.name}.json"
    try:
        nodes = topology.nodes if options.device == "cpu" else place(topology, _gpus(options))
    except TooFewGpusError as error:
        print(f"skipped: {error}")
        path.write_text(json.dumps({**result, "skipped": str(error)}, indent=1) + "\n")
        return 0
    result |= {
        "model": options.model,
        "seed": options.seed,
        "device": options.device,
        "nodes": [asdict(node) for node in nodes],
        "shared": shared(nodes),
        "environment": environment(options.device),
    }
    shape = SHAPES[options.model]
    settings = Settings(
        shape,
        write_model(out / f"model-{options.model}", shape),
        options.device,
        options.kv_gib,
        tuple(options.engine_args),
    )
    findings, errors = Findings(), list[str]()
    logs = out / "logs" / topology.name

    def in_time() -> bool:
        return time.monotonic() < begin + float(options.deadline)

    engine_failed = False
    try:
        with running(settings, nodes, logs) as engines:
            result["ready_s"] = round(time.monotonic() - begin, 1)
            print(f"{topology.name}: engines ready after {result['ready_s']} s", flush=True)
            _measure(options, nodes, engines, logs, findings, in_time)
            transport(engines.engines, options.device == "cuda", findings)
    except (ProcessFailedError, EngineError, DemoError) as error:
        engine_failed = True
        errors.append(str(error)[-4000:])
    result |= judged(findings, errors)
    result["seconds"] = round(time.monotonic() - begin, 1)
    path.write_text(as_json(result, findings.cases), encoding="utf-8")
    print("\n".join([f"== {topology.name}, {result['seconds']} s: {path}", *told(result)]))
    if engine_failed:
        return 2
    return 1 if result["problems"] else 0


def _measure(
    options: argparse.Namespace,
    nodes: Sequence[Node],
    engines: Running,
    logs: Path,
    findings: Findings,
    in_time: Callable[[], bool],
) -> None:
    rng = random.Random(options.seed)
    if len(engines.decode) > 1:
        run_killed(engines, logs, options.random, rng, findings, in_time)
        return
    servers = Servers(engines.prefill[0].url, engines.decode[0].url)
    ranks = next(node.data_parallel for node in nodes if node.role == "decode")
    run_pair(servers, ranks, options.random, rng, findings, in_time)


def _plan(gpus: Sequence[int]) -> list[str]:
    lines = []
    for topology in TOPOLOGIES.values():
        try:
            nodes = place(topology, gpus)
        except TooFewGpusError as error:
            lines.append(f"{topology.name}: skipped, {error}")
            continue
        places = ", ".join(f"{one.name} on {'+'.join(map(str, one.gpus))}" for one in nodes)
        lines.append(f"{topology.name}: {places}{' (shared)' if shared(nodes) else ''}")
    return lines


def _gpus(options: argparse.Namespace) -> list[int]:
    if options.gpus is not None:
        return [int(one) for one in options.gpus.split(",") if one]
    try:
        return visible_gpus()
    except ClusterError:
        return []


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.topology",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="where each topology's nodes would run")
    run = commands.add_parser("run", help="start one, measure, and write its JSON")
    for one in (plan, run):
        one.add_argument("--gpus", help="indexes such as 0,1; default: all that there are")
    run.add_argument("topology", choices=TOPOLOGIES)
    run.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    run.add_argument("--model", choices=sorted(SHAPES), default="small")
    run.add_argument("--random", type=int, default=4, help="random conversations (of each rank)")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--kv-gib", type=int, default=4, help="KV cache of each rank, GiB")
    run.add_argument(
        "--deadline", type=float, default=130, help="seconds until the last one begins"
    )
    run.epilog = "After --: more arguments of vllm serve, such as -- --block-size 128."
    written = commands.add_parser("report", help="summary.json and README.md of runs")
    written.add_argument("folders", type=Path, nargs="+", help="--out of runs")
    written.add_argument("--to", type=Path, required=True, help="folder for the summary")
    # By hand: argparse would take none for a positional that stands before an option.
    given = sys.argv[1:] if argv is None else list(argv)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    if given[end:] and options.command != "run":
        parser.error("only run takes arguments of vllm serve after --")
    options.engine_args = given[end + 1 :]
    return options


if __name__ == "__main__":
    sys.exit(main())
