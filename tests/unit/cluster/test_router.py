from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tools.cluster import Engine, guard
from tools.cluster.command import EngineSpec
from tools.cluster.errors import ClusterError, ProcessFailedError
from tools.cluster.options import ClusterOptions, Role
from tools.cluster.placement import Slot
from tools.cluster.router import router, router_command

ROOT = Path(__file__).resolve().parents[3]
# The router of this checkout, in an environment without a vllm.
ENV = {"PYTHONPATH": str(ROOT / "overlay")}


def engine(role: Role, port: int, folder: Path) -> Engine:
    """An engine that is never started."""
    return Engine(
        EngineSpec(
            name=f"{role}-{port}",
            role=role,
            device="cpu",
            tensor_parallel=1,
            slot=Slot(),
            port=port,
            side_channel_port=port + 1,
            scratch=folder,
            options=ClusterOptions(),
        ),
        folder,
    )


def test_command_names_every_engine(tmp_path: Path) -> None:
    """Hosts and ports stand in the order of the engines, further arguments at the end."""
    decode = [engine("decode", port, tmp_path) for port in (200, 300)]
    command = router_command(
        Path("py"), 80, [engine("prefill", 100, tmp_path)], decode, ["--max-body", "9"]
    )
    assert " ".join(command) == (
        "py -m vllm_bidir_router --host 127.0.0.1 --port 80"
        " --prefiller-hosts 127.0.0.1 --prefiller-ports 100"
        " --decoder-hosts 127.0.0.1 127.0.0.1 --decoder-ports 200 300 --max-body 9"
    )


def test_it_serves_before_its_engines_and_ends_with_its_block(tmp_path: Path) -> None:
    prefill, decode = engine("prefill", 9, tmp_path), engine("decode", 10, tmp_path)
    with router([prefill], [decode], tmp_path, env=ENV) as running:
        pid = running.process.pid
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{running.url}/metrics") as response:
            assert b"bidir_router_turns" in response.read()
        assert "127.0.0.1:9" in running.log_text
    assert guard.members(pid) == []
    assert running.log_path == tmp_path / "router.log"


def test_a_refused_command_line_is_told_with_the_log(tmp_path: Path) -> None:
    prefill, decode = engine("prefill", 9, tmp_path), engine("decode", 10, tmp_path)
    with (
        pytest.raises(ProcessFailedError, match="--max-body must be between"),
        router([prefill], [decode], tmp_path, args=["--max-body", "0"], env=ENV),
    ):
        pass


def test_no_engine_of_a_role_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match="1 prefill and 0 decode"),
        router([engine("prefill", 9, tmp_path)], [], tmp_path, env=ENV),
    ):
        pass
