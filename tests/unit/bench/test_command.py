"""The exit status of the benchmarks' commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tools.bench.command import INTERRUPTED, MET, NOT_MEASURED, NOT_MET, ended
from tools.bench.errors import BenchError
from tools.build.errors import BuildError
from tools.cluster import ClusterError


@pytest.mark.parametrize("status", [MET, NOT_MET])
def test_work_that_is_done_says_whether_all_was_met(status: int) -> None:
    assert ended(lambda: status, "nothing") == status


@pytest.mark.parametrize("kind", [BenchError, BuildError, ClusterError])
def test_an_error_is_one_line_and_a_status_of_its_own(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise kind("no such file")

    assert ended(work, "nothing") == NOT_MEASURED
    said = capsys.readouterr().err
    assert said.startswith("error: no such file") and said.count("error: ") == 1


def test_an_interrupt_says_what_is_left_and_no_child_outlives_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def work() -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        children.append(child)
        os.kill(os.getpid(), signal.SIGINT)
        return MET

    assert ended(work, "half of it is in the JSON") == INTERRUPTED
    assert "interrupted; half of it is in the JSON" in capsys.readouterr().err
    assert children[0].wait() == -signal.SIGKILL
