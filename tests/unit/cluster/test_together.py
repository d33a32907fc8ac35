"""Clusters that are started at the same time, and what is left when one does not come up."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tools.cluster import ClusterOptions, ProcessFailedError, RoleOptions, cluster
from tools.cluster import guard as guard_module
from tools.cluster.together import start_together


@pytest.fixture
def options(fake_python: Path, model_folder: Path) -> ClusterOptions:
    return ClusterOptions(model=model_folder, python=fake_python, start_timeout_s=30.0, grace_s=2.0)


def test_all_run_at_once_and_all_are_gone_afterwards(
    options: ClusterOptions, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        starts = [cluster(1, 0, 1, "cpu", options, tmp_path / name) for name in ("a", "b")]
        started = start_together(stack, starts)
        engines = [engine for one in started for engine in one.engines]
        assert [engine.is_alive() for engine in engines] == [True, True]
        assert len({engine.port for engine in engines}) == 2
        groups = [engine.pid for engine in engines]
    assert [guard_module.members(group) for group in groups] == [[], []]


def test_one_that_fails_ends_those_that_came_up(options: ClusterOptions, tmp_path: Path) -> None:
    dies = replace(options, prefill=RoleOptions(env={"FAKE_ENGINE": "die"}))
    stack = ExitStack()
    good = cluster(0, 1, 1, "cpu", options, tmp_path / "good")
    bad = cluster(1, 0, 1, "cpu", dies, tmp_path / "bad")
    with pytest.raises(ProcessFailedError, match="the reason"), stack:
        start_together(stack, [good, bad])
    (log,) = (tmp_path / "good").glob("*.log")
    text = log.read_text(encoding="utf-8")
    assert "fake engine serve" in text
    port = int(text.split("--port ")[1].split()[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "it serves still"
