"""Entry point of `python -m tools.bench.leases`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.bench.about import versions
from tools.bench.command import EXIT_STATUS, MET, NOT_MET, ended
from tools.bench.errors import BenchError
from tools.bench.leases.arms import ARMS, Arm, arms_of
from tools.bench.leases.chart import draw
from tools.bench.leases.judge import judge
from tools.bench.leases.plan import Plan
from tools.bench.leases.run import MARK, RESULTS, Run, run
from tools.bench.leases.servers import Nodes, serving
from tools.bench.leases.table import text
from tools.bench.model import TINY, find_model
from tools.bench.records import write_whole

_ABOUT = f"""What idle conversations cost a busy decode node: kept for nobody, for a fixed time,
or by lease.

Each arm is P, D and the router on the CPU, with little KV memory on D; leases and what they are
held against are up together (six engines, about 15 GB), and their loads alternate. Conversations
take a turn and rest; streams run on D meanwhile; the conversations come back, and it is counted
how many P has read back. First the streams are few enough to fit beside what may be kept, then so
many that they need all memory. The requests are the same in all arms.
{EXIT_STATUS}
"""
_RUN = """examples:
  python -m tools.bench.leases run
  python -m tools.bench.leases run --arms none,leases --seconds 10 --out build/quick
"""
_REPORT = """example:
  python -m tools.bench.leases report build/bench-leases
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(given)

    def work() -> int:
        if args.command == "run":
            _run(args, "python -m tools.bench.leases " + shlex.join(given))
        return _report(args.out)

    return ended(work, "arms that had ended are in the JSON")


def _run(args: argparse.Namespace, command: str) -> None:
    out: Path = args.out.absolute()
    plan = replace(
        Plan(),
        conversations=args.conversations,
        streams_fit=args.streams_fit,
        streams_full=args.streams_full,
        seconds=args.seconds,
        cycles=args.cycles,
        decode_blocks=args.decode_blocks,
        lease_s=args.lease,
        seed=args.seed,
    )
    arms = arms_of(args.arms.split(","))
    plan.check()
    heartbeat = None if args.heartbeat is None else _read(args.heartbeat)
    scratch = out / "scratch"
    model = find_model(TINY, scratch)
    about = {
        "command": command,
        "versions": versions(args.python),
        "model": model.config,
        "heartbeat": heartbeat,
    }

    def start(arm: Arm, folder: Path) -> AbstractContextManager[Nodes]:
        return serving(arm, plan, model, args.python.absolute(), folder, scratch, _say)

    run(Run(plan, arms, out, model.token_ids, args.deadline, about), start, _say)


def _report(out: Path) -> int:
    """Print a run's tables and draw its chart; 0 if all that is required was found."""
    made = _read(out / RESULTS)
    if MARK not in made:
        raise BenchError("no results of this benchmark", file=out / RESULTS, expected=MARK)
    made["required"] = [vars(line) for line in judge(made)]
    write_whole(out / RESULTS, json.dumps(made, indent=1) + "\n")
    print(text(made))
    _say(f"figures: {out / RESULTS}")
    if find_spec("matplotlib") is None:
        _say("no chart: matplotlib is not installed")
    else:
        draw(made, out)
        _say(f"chart: {out / 'leases.svg'}")
    return MET if all(line["met"] for line in made["required"]) else NOT_MET


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError("results cannot be read", file=path, found=error) from error
    return found


def parser() -> argparse.ArgumentParser:
    """Both commands."""
    plan = Plan()
    top = argparse.ArgumentParser(
        prog="python -m tools.bench.leases",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "run",
        help="measure, and write leases.json",
        description=_ABOUT,
        epilog=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def number(name: str, kind: type, default: float, what: str) -> None:
        one.add_argument(name, type=kind, default=default, help=f"{what} (default {default:g})")

    number("--seconds", float, plan.seconds, "s that each of the two loads is measured")
    number("--cycles", int, plan.cycles, "times that a load begins anew, of those seconds in all")
    number("--conversations", int, plan.conversations, "idle ones")
    number("--streams-fit", int, plan.streams_fit, "of the load that fits beside the budget")
    number("--streams-full", int, plan.streams_full, "of the load that needs all memory")
    number("--decode-blocks", int, plan.decode_blocks, f"KV blocks of D, {plan.block_size} tokens")
    number("--lease", float, plan.lease_s, "s of a lease")
    number("--seed", int, plan.seed, "of all prompts")
    number("--deadline", float, 1800.0, "s; no arm is begun that would end later")
    one.add_argument(
        "--arms",
        default=",".join(ARMS),
        help=f"some of {', '.join(ARMS)}, with commas, in the order of running (default all)",
    )
    one.add_argument("--out", type=Path, default=Path("build/bench-leases"), help="%(default)s")
    one.add_argument(
        "--heartbeat", type=Path, help="JSON of tests.connector.bench_heartbeat, for the report"
    )
    one.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="runs engines and router"
    )
    shown = commands.add_parser(
        "report",
        help="tables and chart of a run, again",
        description="The tables and the chart of what `run` has measured, again.",
        epilog=_REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown.add_argument("out", type=Path, help="--out of a run")
    return top


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
