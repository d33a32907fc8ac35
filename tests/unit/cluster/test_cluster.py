from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

import tools.cluster
from tools.cluster import (
    ClusterError,
    ClusterOptions,
    PortReservations,
    ProcessFailedError,
    RoleOptions,
    cluster,
)
from tools.cluster import guard as guard_module

ROOT = Path(tools.cluster.__file__).parents[2]


def quiet(line: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def options(fake_python: Path, model_folder: Path) -> ClusterOptions:
    return ClusterOptions(model=model_folder, python=fake_python, start_timeout_s=30.0, grace_s=2.0)


def get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def behaving(how: str) -> RoleOptions:
    return RoleOptions(env={"FAKE_ENGINE": how})


def test_engines_serve_and_are_gone_afterwards(options: ClusterOptions, tmp_path: Path) -> None:
    """Inside the block every engine answers at its url; afterwards no process is left."""
    reports: list[str] = []
    logs = tmp_path / "logs"
    with cluster(2, 1, options=options, log_folder=logs, report=reports.append) as running:
        assert [engine.name for engine in running.prefill] == ["prefill-0", "prefill-1"]
        assert [engine.name for engine in running.decode] == ["decode-0"]
        groups = [engine.pid for engine in running.engines]
        for engine in running.engines:
            assert engine.is_alive()
            assert str(engine.port) in get(f"{engine.url}/health")
            assert "fake engine serve" in engine.log_path.read_text(encoding="utf-8")
        ports = {e.port for e in running.engines} | {e.side_channel_port for e in running.engines}
        assert len(ports) == 6
        assert len({engine.engine_id for engine in running.engines}) == 3
    assert [guard_module.members(group) for group in groups] == [[], [], []]
    assert sorted(path.name for path in logs.iterdir()) == [
        "decode-0.log",
        "prefill-0.log",
        "prefill-1.log",
    ]
    assert sum("ready after" in line for line in reports) == 3


def test_each_data_parallel_rank_has_a_side_channel_port(
    options: ClusterOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the ports after the first one, which must be nobody else's."""
    asked: list[int] = []

    def reserve(ports: PortReservations, count: int = 1) -> int:
        asked.append(count)
        return reserve_really(ports, count)

    reserve_really = PortReservations.reserve
    monkeypatch.setattr(PortReservations, "reserve", reserve)
    ranks = replace(options, decode=RoleOptions(data_parallel=3))
    with cluster(options=ranks, log_folder=tmp_path, report=quiet):
        assert asked == [1, 1, 1, 3]


def test_dead_engine_is_reported_at_once(options: ClusterOptions, tmp_path: Path) -> None:
    """An engine that ends during start-up fails the start with its log, long before the limit."""
    begin = time.monotonic()
    failing = replace(options, decode=behaving("die"), start_timeout_s=600.0)
    with (
        pytest.raises(ProcessFailedError) as caught,
        cluster(options=failing, log_folder=tmp_path / "logs", report=quiet),
    ):
        pytest.fail("the cluster must not come up")
    assert time.monotonic() - begin < 60
    assert caught.value.name == "decode-0"
    assert caught.value.log_path == tmp_path / "logs" / "decode-0.log"
    assert "exit status 3" in str(caught.value)
    assert "ValueError: the reason" in caught.value.log_tail


def test_engine_that_never_serves_is_ended(options: ClusterOptions, tmp_path: Path) -> None:
    """An engine that is not healthy in time fails the start, and no engine is left running."""
    failing = replace(options, decode=behaving("never-healthy"), start_timeout_s=3.0)
    with (
        pytest.raises(ProcessFailedError, match="decode-0 was not ready within 3 s"),
        cluster(options=failing, log_folder=tmp_path / "logs", report=quiet),
    ):
        pytest.fail("the cluster must not come up")
    assert _fake_engines(options) == []


def test_engines_end_after_an_exception(options: ClusterOptions, tmp_path: Path) -> None:
    """An exception inside the block passes through, and even a stubborn engine is ended."""
    stubborn = replace(options, decode=behaving("ignore-sigterm"), grace_s=0.5)
    with (
        pytest.raises(KeyboardInterrupt),
        cluster(options=stubborn, log_folder=tmp_path / "logs", report=quiet),
    ):
        raise KeyboardInterrupt
    assert _fake_engines(options) == []


def test_killed_engine_comes_back_at_its_address(options: ClusterOptions, tmp_path: Path) -> None:
    """kill ends an engine at once; restart brings it back under the same url with a new id."""
    with cluster(0, 1, options=options, log_folder=tmp_path / "logs", report=quiet) as running:
        (engine,) = running.decode
        url, pid, engine_id = engine.url, engine.pid, engine.engine_id
        engine.kill()
        assert not engine.is_alive()
        assert guard_module.members(pid) == []
        engine.restart()
        assert engine.url == url and engine.pid != pid and engine.engine_id != engine_id
        fresh = engine.engine_id
        assert fresh in get(f"{url}/health")
        engine.restart(keep_engine_id=True)
        assert engine.engine_id == fresh and fresh in get(f"{url}/health")
        starts = engine.log_path.read_text(encoding="utf-8").count("\n$ ")
        assert starts == 2


@pytest.mark.parametrize("shape", [(0, 0, 1), (-1, 1, 1), (1, 1, 0)])
def test_impossible_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    """A cluster without an engine or without a rank is refused before anything starts."""
    prefill, decode, ranks = shape
    with (
        pytest.raises(ClusterError, match="expected at least one"),
        cluster(prefill, decode, ranks, report=quiet),
    ):
        pytest.fail("the cluster must not come up")


def test_library_imports_no_engine() -> None:
    """Importing the package needs the standard library only."""
    program = (
        "import sys, tools.cluster\n"
        "print([m for m in ('vllm', 'torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_addresses_and_leaves_nothing(
    number: int, options: ClusterOptions, tmp_path: Path
) -> None:
    """``up`` shows url, log and a curl line; Ctrl-C and SIGTERM end every engine, status 130."""
    arguments = ["up", "--model", str(options.model), "--python", str(options.python)]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.cluster", *arguments, "--logs", str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FAKE_ENGINE": "serve"},
    ) as command:
        assert command.stdout is not None
        shown = ""
        while "Ctrl-C ends" not in shown:
            line = command.stdout.readline()
            assert line, command.communicate()
            shown += line
        command.send_signal(number)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "curl -N http://127.0.0.1:" in shown
    assert str(tmp_path / "logs" / "decode-0.log") in shown
    assert "all engines ended" in errors
    assert _fake_engines(options) == []


def _fake_engines(options: ClusterOptions) -> list[int]:
    """Running processes whose command line holds this test's own interpreter."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(options.python).encode() in command and b"serve" in command:
                found.append(int(entry.name))
    return found
