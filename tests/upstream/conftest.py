"""One run of the upstream tests, shared by all tests of this folder that look at it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.compare import Ran
from tests.upstream.processes import run_groups
from tests.upstream.selection import read_groups, read_stock
from tests.upstream.tree import lay_out
from tools.build.errors import BuildError


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    """What each group of upstream tests did, by the group's name."""
    plugins = request.config.pluginmanager
    terminal: Any = plugins.get_plugin("terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(line)

    try:
        places = lay_out(tmp_path_factory.mktemp("upstream"), say)
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)
    return run_groups(read_groups(), read_stock(), places, say)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line of counts for each upstream file."""
    for word in ("passed", "failed"):
        for report in terminalreporter.getreports(word):
            for name, value in report.user_properties:
                if name == "upstream":
                    terminalreporter.write_line(f"upstream {value}")
