"""Entry point of `python -m tools.bench.policies`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tools.bench.about import versions
from tools.bench.errors import BenchError
from tools.bench.model import TINY, find_model
from tools.bench.policies.chart import NAME, draw
from tools.bench.policies.plan import DECODE, PREFILL, Plan, pairs_of
from tools.bench.policies.run import MARK, RESULTS, Run, run
from tools.bench.policies.servers import serving
from tools.bench.policies.table import text
from tools.cluster import ClusterError
from tools.demo.errors import DemoError
from tools.demo.interrupts import Interrupts, end_children

EXIT_FAILED = 1
EXIT_ENGINE = 2
EXIT_INTERRUPTED = 130

_ABOUT = """Which of the router's policies serve the same load best.

Two P and two D are started once on the CPU. For each pair of policies a router of its own stands
before them, all prefix caches are emptied, and a few clients have the same conversations of mixed
lengths. Each pair has its turn several times.
Exit status: 0 measured, 1 a request or an argument was wrong, 2 an engine failed, 130 interrupted.
"""
_RUN = """examples:
  python -m tools.bench.policies run
  python -m tools.bench.policies run --decode sticky --conversations 10 --passes 1 --out build/quick
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(given)
    with Interrupts() as interrupts:
        try:
            if args.command == "run":
                _run(args, "python -m tools.bench.policies " + shlex.join(given))
            _report(args.out)
            return 0
        except (BenchError, ClusterError, DemoError) as error:
            shown = str(error)
            print(shown if shown.startswith("error: ") else f"error: {shown}", file=sys.stderr)
            return EXIT_ENGINE if isinstance(error, ClusterError) else EXIT_FAILED
        except KeyboardInterrupt:
            interrupts.hold()
            print("\ninterrupted; passes that had ended are in the JSON", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            end_children()


def _run(args: argparse.Namespace, command: str) -> None:
    out: Path = args.out.absolute()
    plan = replace(
        Plan(),
        conversations=args.conversations,
        clients=args.clients,
        passes=args.passes,
        seed=args.seed,
    )
    pairs = pairs_of(args.decode, args.prefill)
    model = find_model(TINY, out / "scratch")
    about = {"command": command, "versions": versions(args.python), "model": model.config}
    what = Run(plan, pairs, out, model.token_ids, args.deadline, about)
    with serving(plan, model, args.python.absolute(), out / "logs", _say) as nodes:
        run(what, nodes, _say)


def _report(out: Path) -> None:
    """Print a run's table and draw its chart."""
    path = out / RESULTS
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError("results cannot be read", file=path, found=error) from error
    if MARK not in made:
        raise BenchError("no results of this benchmark", file=path, expected=MARK)
    print(text(made))
    _say(f"figures: {path}")
    if find_spec("matplotlib") is None:
        _say("no chart: matplotlib is not installed")
    else:
        draw(made, out)
        _say(f"chart: {out / NAME}.svg")


def parser() -> argparse.ArgumentParser:
    """Both commands."""
    plan = Plan()
    top = argparse.ArgumentParser(
        prog="python -m tools.bench.policies",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "run",
        help="measure, and write policies.json",
        description=_ABOUT,
        epilog=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def number(name: str, kind: type, default: float, what: str) -> None:
        one.add_argument(name, type=kind, default=default, help=f"{what} (default {default:g})")

    one.add_argument("--decode", default=",".join(DECODE), help="policies (default %(default)s)")
    one.add_argument("--prefill", default=",".join(PREFILL), help="policies (default %(default)s)")
    number("--conversations", int, plan.conversations, "of a pass")
    number("--clients", int, plan.clients, "conversations at a time")
    number("--passes", int, plan.passes, "of each pair")
    number("--seed", int, plan.seed, "of all prompts")
    number("--deadline", float, 900.0, "s; no pass is begun that would end later")
    one.add_argument("--out", type=Path, default=Path("build/bench-policies"), help="%(default)s")
    one.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="runs engines and router"
    )
    shown = commands.add_parser("report", help="table and chart of a run, again")
    shown.add_argument("out", type=Path, help="--out of a run")
    return top


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
