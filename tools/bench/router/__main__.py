"""Entry point of `python -m tools.bench.router`."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tools.bench.command import MET, NOT_MET, ended
from tools.bench.errors import BenchError
from tools.bench.router.arguments import Asked, parse
from tools.bench.router.chart import draw
from tools.bench.router.figures import Memory, verdicts
from tools.bench.router.run import run
from tools.bench.router.table import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    asked = parse(given)
    command = "python -m tools.bench.router " + shlex.join(given)
    return ended(
        lambda: _run(asked, command) if asked.settings else _report(asked.json),
        "nothing was written",
    )


def _run(asked: Asked, command: str) -> int:
    assert asked.settings is not None  # main's
    with tempfile.TemporaryDirectory(prefix="bench-router-") as scratch:
        folder = asked.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        data = run(asked.settings, folder.absolute(), command, _say)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return _report(asked.json)


def _report(path: Path) -> int:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        text = report(data)
        memory = Memory(**data["memory"]) if data["memory"] else None
        found = verdicts(data["samples"], memory, data["settings"]["concurrency"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            "no results can be read",
            file=path,
            found=repr(error),
            next_step="python -m tools.bench.router run",
        ) from error
    print(text, end="")
    if find_spec("matplotlib") is None:
        _say("no chart: matplotlib is not installed")
    else:
        draw(data, path.parent)
        _say(f"chart: {path.parent / 'router.svg'}")
    return MET if all(one.met for one in found) else NOT_MET


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
