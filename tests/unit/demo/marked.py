"""A command as a process whose descendants can all be found again."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster import guard

_ROOT = Path(guard.__file__).parents[2]
_MARK = "DEMO_TEST_MARK"


@dataclass(frozen=True)
class Marked:
    """A started command. All that descends from it carries ``mark`` in its environment."""

    process: subprocess.Popen[str]
    mark: str

    def running(self) -> list[str]:
        """Command lines of the processes that still run, its own included."""
        return [line for line in map(self._command_line, Path("/proc").iterdir()) if line]

    def _command_line(self, entry: Path) -> str:
        """A marked process's command line; empty for any other. Zombies have no environment."""
        if not entry.name.isdigit():
            return ""
        try:
            environment = (entry / "environ").read_bytes()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return ""
        marked = f"{_MARK}={self.mark}".encode() in environment.split(b"\0")
        return line.decode(errors="replace") if marked else ""


def start(
    arguments: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    module: str = "tools.demo",
) -> Marked:
    """Run ``python -m MODULE`` with these arguments, its output in pipes."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=_ROOT,
        env={**os.environ, **(env or {}), _MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Marked(process, mark)
