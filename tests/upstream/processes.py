"""Run groups of upstream tests side by side, each in a pytest process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.compare import Ran, read_events
from tests.upstream.selection import HERE, Group

INSIDE = HERE / "inside"

#: Seconds that a group may take: more than ten times what it needs on a machine of its own.
LIMIT = 900.0

#: Seconds between two lines of progress.
EVERY = 20.0


@dataclass(frozen=True)
class Places:
    """Folders of one run: the extracted tree, HF_HOME, and where logs and events are kept."""

    tree: Path
    hub: Path
    logs: Path


@dataclass(frozen=True)
class _Started:
    group: Group
    process: subprocess.Popen[bytes]
    events: Path
    log: Path


def run_groups(
    groups: Sequence[Group],
    only: Mapping[str, Sequence[str]] | None,
    places: Places,
    say: Callable[[str], None],
    limit: float = LIMIT,
) -> dict[str, Ran]:
    """What each group did, by its name. `only` are the test ids to run, by file; None runs all.

    A process past `limit` seconds is ended, and its tests count as unfinished. None outlives this.
    """
    places.logs.mkdir(parents=True, exist_ok=True)
    total = sum(len(only[file]) for group in groups for file in group.files) if only else 0
    started: list[_Started] = []
    try:
        for group in groups:
            started.append(_start(group, only, places))
        ended = _wait(
            [one.process for one in started], limit, lambda: _progress(started, total, say)
        )
    finally:
        for one in started:
            _end(one.process)
    return {
        one.group.name: read_events(_lines(one.events), f"{how}: {_last(one.log)}")
        for one, how in zip(started, ended, strict=True)
    }


def _start(group: Group, only: Mapping[str, Sequence[str]] | None, places: Places) -> _Started:
    events = places.logs / f"{group.name}.events"
    log = places.logs / f"{group.name}.log"
    events.write_bytes(b"")
    options = [f"--upstream-events={events}"]
    if only is not None:
        chosen = places.logs / f"{group.name}.ids"
        ids = [test for file in group.files for test in only[file]]
        chosen.write_text("\n".join(ids), encoding="utf-8")
        options.append(f"--upstream-only={chosen}")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        # Upstream's own settings, not those of a project in a folder above.
        *("-c", str(places.tree / "pyproject.toml"), "--rootdir", str(places.tree)),
        *("-p", "upstream_report", "--continue-on-collection-errors"),
        *options,
        *group.files,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=places.tree,
            env=_environment(places),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Started(group, process, events, log)


def _environment(places: Places) -> dict[str, str]:
    ours = ("PYTEST_", "VLLM_", "HF_", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    above = kept.get("PYTHONPATH")
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(INSIDE), *([above] if above else [])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HOME": str(places.hub),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(places.logs / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        # Two processes on two cores: more threads would only wait for each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], limit: float, progress: Callable[[], None]
) -> list[str]:
    begun = spoke = time.monotonic()
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now - begun > limit:
            break
        if now - spoke > EVERY:
            progress()
            spoke = now
        time.sleep(0.2)
    progress()
    return [
        f"was ended after {limit:.0f} s" if code is None else f"ended with exit code {code}"
        for code in (process.poll() for process in processes)
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with all that it started, which is in a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _progress(started: Sequence[_Started], total: int, say: Callable[[str], None]) -> None:
    done = sum('"event": "teardown"' in line for one in started for line in _lines(one.events))
    say(f"upstream tests: {done} of {total or 'all'} done")


def _lines(path: Path) -> list[str]:
    """Whole lines only: a process may be writing, or have died while it wrote."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def _last(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
