"""Command line of the demo. Exit status: 0 as promised, 1 failed, 2 usage, 130 interrupted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.cluster.errors import ClusterError
from tools.demo.conversation import MOST_TURNS
from tools.demo.errors import DemoError
from tools.demo.interrupts import Interrupts, end_children
from tools.demo.run import DemoOptions, demo
from tools.demo.screen import Screen

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

EXAMPLE = """example:
  python -m tools.demo --turns 6 --logs build/demo-6

exit status: 0 all as promised; 1 an error, or the texts of the two runs differ;
2 wrong arguments; 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The arguments; all have defaults."""
    made = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description="Start a prefill engine, a decode engine and the router on this machine's "
        "CPU,\nrun one streamed conversation without and with read-back, and compare.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--turns",
        type=_turns,
        default=4,
        help=f"turns of the conversation, 2 to {MOST_TURNS} (default 4)",
    )
    made.add_argument(
        "--logs",
        type=Path,
        default=Path("build/demo"),
        help="folder for the logs (default build/demo)",
    )
    made.add_argument(
        "--model", type=Path, help="model folder (default: a tiny random one is made)"
    )
    made.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="runs its vllm (default: this one)",
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    args = parser().parse_args(arguments)
    options = DemoOptions(args.turns, args.logs.absolute(), args.model, args.python)
    screen = Screen(sys.stdout)
    with Interrupts() as interrupts:
        try:
            as_promised = demo(options, screen, interrupts)
        except (ClusterError, DemoError, OSError) as error:
            screen.clear()
            print(f"error: {error}\n  logs     {options.logs}", file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            interrupts.hold()
        finally:
            end_children()
        if interrupts.asked:
            screen.line("Stopped: engines and router have ended, no process is left.")
            return EXIT_INTERRUPTED
    return 0 if as_promised else EXIT_FAILED


def _turns(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= MOST_TURNS:
        raise argparse.ArgumentTypeError(f"expected 2 to {MOST_TURNS}, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
