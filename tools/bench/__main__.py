"""Entry point of `python -m tools.bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from tools.bench.arguments import parser
from tools.bench.commands import COMMANDS
from tools.bench.errors import BenchError
from tools.build.errors import BuildError
from tools.cluster import ClusterError
from tools.demo.interrupts import Interrupts, end_children

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(given)
    command = "python -m tools.bench " + shlex.join(given)
    with Interrupts() as interrupts:
        try:
            return COMMANDS[args.command](args, command)
        except (BenchError, BuildError, ClusterError) as error:
            text = str(error)
            print(text if text.startswith("error: ") else f"error: {text}", file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            interrupts.hold()
            print("\ninterrupted; the same command goes on with what is left", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            end_children()


if __name__ == "__main__":
    sys.exit(main())
