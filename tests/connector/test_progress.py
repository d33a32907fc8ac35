"""NIXL's progress thread waits between two looks, in real agents of the installed NIXL."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector.progress import CPU_DELAY_US, delay_us, waiting_between_looks
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config


def busy_threads(seconds: float = 1.0) -> float:
    """Share of a core that threads other than this one take."""

    def taken() -> int:
        ticks = 0
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != os.getpid():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks

    before = taken()
    time.sleep(seconds)
    return (taken() - before) / os.sysconf("SC_CLK_TCK") / seconds


@pytest.mark.parametrize(("microseconds", "waits"), [(100, True), (0, False)])
def test_the_thread_of_a_real_agent_waits(microseconds: int, waits: bool) -> None:
    before = busy_threads()
    with waiting_between_looks(NixlWrapper, microseconds):
        agent = NixlWrapper(f"test {microseconds}", nixl_agent_config(num_threads=4))
    try:
        assert (busy_threads() - before < 0.3) is waits
    finally:
        del agent


def test_agents_made_afterwards_are_nixls_own() -> None:
    module = __import__(NixlWrapper.__module__, fromlist=["nixlBind"])
    make = module.nixlBind.nixlAgent
    with pytest.raises(RuntimeError), waiting_between_looks(NixlWrapper, 100):
        assert module.nixlBind.nixlAgent is not make
        raise RuntimeError
    assert module.nixlBind.nixlAgent is make


@pytest.mark.parametrize("unknown", [None, SimpleNamespace(__module__="nowhere")])
def test_another_nixl_is_left_as_it_is(unknown: Any, caplog: pytest.LogCaptureFixture) -> None:
    with waiting_between_looks(unknown, 100):
        pass
    assert "left as it is" in caplog.text


def test_it_waits_by_itself_only_where_links_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert delay_us(None) == CPU_DELAY_US
    assert delay_us(0) == 0
    monkeypatch.setattr("vllm.bidir.connector.progress.current_platform.is_cpu", lambda: False)
    assert delay_us(None) == 0
    assert delay_us(50) == 50
