"""The command line of `python -m tools.bench.router`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tools.bench.command import EXIT_STATUS
from tools.bench.router.arms import ARMS, SHARED
from tools.bench.router.load import Load
from tools.bench.router.run import Settings

_DESCRIPTION = f"""What a router costs, in one run: latency that it adds, CPU per streamed request,
streams per second, and memory. Three arms in turns over the same scripted engines: direct (the
client makes both calls itself), ours, and the base release's sample proxy. Three loads: events in
an engine's steps, by a clock of each stream's own, and without pauses. What is measured has one
core, engines and clients another. No model, no GPU.

{EXIT_STATUS}"""

_EXAMPLE = """example:
  python -m tools.bench.router run --calm 1.3 --json router.json
  python -m tools.bench.router run --repeats 1 --conversations 0
  python -m tools.bench.router run --redis redis://127.0.0.1:6379/9
  python -m tools.bench.router report router.json
"""
_JSON = Path("build/bench/router.json")


@dataclass(frozen=True)
class Asked:
    """What a command line asks for; without settings only the report."""

    settings: Settings | None
    json: Path
    logs: Path | None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.bench.router",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="measure, write JSON, print the tables",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="the interpreter whose router is measured, and that runs the sample proxy "
        "(default: this one)",
    )
    run.add_argument(
        "--arms",
        default=",".join(ARMS),
        help=f"which, separated by commas (default: {','.join(ARMS)})",
    )
    run.add_argument("--repeats", type=_positive, default=7, help="of all arms (default 7)")
    run.add_argument(
        "--concurrency", type=_positive, default=64, help="streams at a time (default 64)"
    )
    run.add_argument(
        "--chunks", type=_positive, default=64, help="events of a stream, at least 2 (default 64)"
    )
    run.add_argument(
        "--interval", type=float, default=20.0, help="ms between two of them (default 20)"
    )
    run.add_argument(
        "--prompt-bytes", type=_positive, default=4096, help="of each request (default 4096)"
    )
    run.add_argument(
        "--turn-tokens",
        type=_positive,
        default=1000,
        help="length of the histories, which sets the size of D's params (default 1000)",
    )
    run.add_argument("--seconds", type=float, default=3.0, help="of each arm and load (default 3)")
    run.add_argument("--warm", type=float, default=1.5, help="seconds before (default 1.5)")
    run.add_argument(
        "--saturated",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="of each arm without pauses between events; 0: none (default 2)",
    )
    run.add_argument(
        "--conversations",
        type=int,
        default=100_000,
        help="whose memory is measured, some minutes; 0: none (default 100000)",
    )
    run.add_argument(
        "--redis",
        metavar="URL",
        help=f'one more arm, "{SHARED}": the state is kept in this Redis; no password in the URL, '
        "which the result shows",
    )
    run.add_argument(
        "--calm",
        type=float,
        default=math.inf,
        metavar="MS",
        help="count only what is measured while a fixed piece of Python takes at most this long "
        "on the router's core, as a run on an idle machine says it: a virtual machine has "
        "neighbours; each measurement goes on until --seconds of it are such, five times as long "
        "at most (default: all counts)",
    )
    run.add_argument("--json", type=Path, default=_JSON, help=f"default {_JSON}")
    run.add_argument("--logs", type=Path, help="keep the logs in this folder (default: nowhere)")
    report = commands.add_parser("report", help="print the tables of a run again")
    report.add_argument("json", type=Path, nargs="?", default=_JSON, help=f"default {_JSON}")
    return made


def parse(given: Sequence[str]) -> Asked:
    """What is asked for; argparse ends the process on a mistake (exit 2)."""
    made = parser()
    args = made.parse_args(given)
    if args.command == "report":
        return Asked(None, args.json, None)
    arms = tuple(name.strip() for name in args.arms.split(","))
    if unknown := [name for name in arms if name not in ARMS]:
        made.error(f"--arms: no such arm: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    if args.redis is not None:
        if urlsplit(args.redis).password is not None:
            made.error("--redis: the result would show the URL's password; name one without")
        arms += (SHARED,)
    if args.chunks < 2:
        made.error("--chunks must be at least 2")
    for flag in ("seconds", "interval", "calm"):
        if getattr(args, flag) <= 0:
            made.error(f"--{flag} must be above 0")
    paced = Load(
        args.concurrency, args.chunks, args.interval, args.prompt_bytes, args.seconds, args.warm
    )
    settings = Settings(
        # Not resolved: a virtual environment's interpreter is a link.
        args.python.absolute(),
        arms,
        args.repeats,
        paced,
        args.saturated,
        args.conversations,
        args.turn_tokens,
        args.redis,
        args.calm,
    )
    return Asked(settings, args.json, args.logs)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
