"""How NIXL's agent is configured, in real agents of the installed NIXL."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector.nixl_config import CPU_DELAY_US, configured, delay_us
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
    with configured(NixlWrapper, microseconds):
        agent = NixlWrapper(f"test {microseconds}", nixl_agent_config(num_threads=4))
    try:
        assert (busy_threads() - before < 0.3) is waits
    finally:
        del agent


def test_agents_made_afterwards_are_nixls_own() -> None:
    module = __import__(NixlWrapper.__module__, fromlist=["nixlBind"])
    make = module.nixlBind.nixlAgent
    with pytest.raises(RuntimeError), configured(NixlWrapper, 100):
        assert module.nixlBind.nixlAgent is not make
        raise RuntimeError
    assert module.nixlBind.nixlAgent is make


@pytest.mark.parametrize("microseconds", [0, 100])
def test_threads_may_share_the_agent(microseconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(NixlWrapper.__module__, fromlist=["nixlBind"])
    made: list[Any] = []
    make = module.nixlBind.nixlAgent

    def make_and_note(name: str, config: Any) -> Any:
        made.append(config.syncMode)
        return make(name, config)

    monkeypatch.setattr(module.nixlBind, "nixlAgent", make_and_note)
    with configured(NixlWrapper, microseconds) as done:
        assert not done.shared
        agent = NixlWrapper(f"shared {microseconds}", nixl_agent_config(num_threads=4))
    assert done.shared
    assert [mode == module.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW.value for mode in made] == [True]
    del agent


@pytest.mark.parametrize("unknown", [None, SimpleNamespace(__module__="nowhere")])
def test_another_nixl_is_left_as_it_is(unknown: Any, caplog: pytest.LogCaptureFixture) -> None:
    with configured(unknown, 100) as done:
        pass
    assert not done.shared
    assert "left as it is" in caplog.text


def test_it_waits_by_itself_only_where_links_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert delay_us(None) == CPU_DELAY_US
    assert delay_us(0) == 0
    monkeypatch.setattr("vllm.bidir.connector.nixl_config.current_platform.is_cpu", lambda: False)
    assert delay_us(None) == 0
    assert delay_us(50) == 50
