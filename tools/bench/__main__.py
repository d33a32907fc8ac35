"""Entry point of `python -m tools.bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from tools.bench.arguments import parser
from tools.bench.command import ended
from tools.bench.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(given)
    command = "python -m tools.bench " + shlex.join(given)
    return ended(
        lambda: COMMANDS[args.command](args, command),
        "the same command goes on with what is left",
    )


if __name__ == "__main__":
    sys.exit(main())
