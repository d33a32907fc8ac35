"""Stand-ins for engines: small stdlib programs that live, die or hang as told."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Runs as `vllm serve` would: finds its port among the arguments, starts a child of its own, and
# behaves as FAKE_ENGINE says.
FAKE_ENGINE = """#!{python} -S
import http.server, os, signal, subprocess, sys, time

behaviour = os.environ.get("FAKE_ENGINE", "serve")
print("fake engine", behaviour, flush=True)
if behaviour == "die":
    print("ValueError: the reason", flush=True)
    sys.exit(3)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
if behaviour == "ignore-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if behaviour == "never-healthy" else 200)
        self.end_headers()
        self.wfile.write(repr(sys.argv).encode())

    def log_message(self, *args):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An executable to be given as the engines' ``python``."""
    return _executable(tmp_path / "fake-python", FAKE_ENGINE.format(python=sys.executable))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Stands for a model; the fake engine does not look at it."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Command line of a Python program given as text."""

    def command(text: str) -> list[str]:
        return [sys.executable, "-S", "-c", text]

    return command


def _executable(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
