"""Pytest plugin for the process that runs the base release's tests.

It narrows the run to the chosen test ids and writes one JSON line for each event, so that a process
which hangs or dies still leaves behind what it had done and which test it was in. It imports
nothing of ours: only this folder is put on that process's path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

#: Lines of a failure that are kept; the end of a traceback says what went wrong.
TAIL = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--upstream-events", type=Path, help="file that gets the JSON lines")
    parser.addoption("--upstream-only", type=Path, help="file with the test ids to run")


def pytest_configure(config: pytest.Config) -> None:
    events: Path | None = config.getoption("--upstream-events")
    if events is not None:
        config.pluginmanager.register(_Events(events))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # The base's own mark: no full garbage collection (0.5 s) after tests that own no device.
        item.add_marker("skip_global_cleanup")
    chosen: Path | None = config.getoption("--upstream-only")
    if chosen is None:
        return
    wanted = set(chosen.read_text(encoding="utf-8").splitlines())
    unwanted = [item for item in items if item.nodeid not in wanted]
    config.hook.pytest_deselected(items=unwanted)
    items[:] = [item for item in items if item.nodeid in wanted]


class _Events:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_sessionstart(self) -> None:
        import vllm

        self._write(event="vllm", version=vllm.__version__, file=vllm.__file__)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(event="uncollected", id=report.nodeid, text=_tail(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is reported as skipped; an unexpected pass of it as passed.
        self._write(
            event=report.when,
            id=report.nodeid,
            outcome=report.outcome,
            seconds=round(report.duration, 3),
            text=_tail(report.longreprtext) if report.failed else "",
        )


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL:])
