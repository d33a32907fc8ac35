"""The shell scripts: what they would start, and what they end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.cluster import guard

SCRIPTS = Path(__file__).resolve().parents[3] / "tools/bench"
NODES = {"P_IP": "10.0.0.1", "D_IP": "10.0.0.2"}


def script(
    name: str, *args: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    where = f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"]
    return subprocess.run(
        [str(SCRIPTS / name), *args],
        env={"PATH": where, "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["serve_pd_multiturn.sh", "run_multiturn_sweep.sh", "cleanup.sh"])
def test_help_names_the_variables_and_has_an_example(name: str) -> None:
    done = script(name, "--help")
    assert done.returncode == 0 and "variables:" in done.stdout and "example" in done.stdout


@pytest.mark.parametrize("gpu", [True, False])
def test_two_engines_on_one_gpu_do_not_fall_back_to_tcp(gpu: bool, tmp_path: Path) -> None:
    if gpu:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    done = script(
        "serve_pd_multiturn.sh", path=tmp_path, ROLE="prefill", MODEL="m", DRY_RUN="1", **NODES
    )
    assert done.returncode == 0, done.stderr
    if gpu or shutil.which("nvidia-smi") is None:
        assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in shlex.split(done.stdout)) is gpu


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("bidir", ["true", "false"])
def test_the_line_that_is_printed_starts_the_node(role: str, bidir: str) -> None:
    done = script(
        "serve_pd_multiturn.sh",
        ROLE=role,
        BIDIR=bidir,
        MODEL="Qwen/Qwen3-32B",
        SERVED_NAME="qwen",
        TP="8",
        BACKEND="LIBFABRIC",
        DRY_RUN="1",
        **NODES,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    own = NODES["P_IP" if role == "prefill" else "D_IP"]
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={own}" in words and "FI_PROVIDER=efa" in words
    start = words.index("vllm")
    assert words[start : start + 5] == [
        "vllm",
        "serve",
        "Qwen/Qwen3-32B",
        "--served-model-name",
        "qwen",
    ]
    assert words[words.index("--tensor-parallel-size") + 1] == "8"
    assert ("--no-enable-prefix-caching" in words) is (role == "prefill")
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": bidir == "true",
            "backends": ["LIBFABRIC"],
        },
    }


def test_ucx_needs_no_provider_and_extra_arguments_come_last() -> None:
    done = script(
        "serve_pd_multiturn.sh",
        ROLE="decode",
        MODEL="m",
        EXTRA_ARGS="--load-format dummy",
        DRY_RUN="1",
        **NODES,
    )
    words = shlex.split(done.stdout)
    assert not any(word.startswith("FI_PROVIDER") for word in words)
    assert words[-2:] == ["--load-format", "dummy"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ROLE": "router"}, "'router'"),
        ({"ROLE": "prefill", "MODEL": "m"}, "P_IP is not set"),
        ({"ROLE": "prefill", **NODES}, "MODEL is not set"),
        ({"ROLE": "prefill", "MODEL": "m", "BIDIR": "yes", **NODES}, "true or false"),
        ({"ROLE": "prefill", "MODEL": "m", "BACKEND": "TCP", **NODES}, "LIBFABRIC or UCX"),
    ],
)
def test_wrong_variables_are_named(variables: dict[str, str], said: str) -> None:
    done = script("serve_pd_multiturn.sh", **variables)
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""
    assert "expected" in done.stderr and "found" in done.stderr


@pytest.mark.parametrize("stubborn", [False, True], ids=["ends", "ignores-SIGTERM"])
def test_cleanup_ends_what_was_started_and_nothing_else(tmp_path: Path, stubborn: bool) -> None:
    """The node with its children; another process by the same name goes on."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fake = tools / "vllm"
    trap = "trap '' TERM" if stubborn else "trap 'kill $child; exit 143' TERM"
    fake.write_text(f"#!/usr/bin/env bash\n{trap}\nsleep 300 &\nchild=$!\nwait\n")
    fake.chmod(0o755)
    other = subprocess.Popen([str(fake)], start_new_session=True)
    node = subprocess.Popen(
        [str(SCRIPTS / "serve_pd_multiturn.sh")],
        env={
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "ROLE": "prefill",
            "MODEL": "m",
            "RUN_DIR": str(tmp_path),
            **NODES,
        },
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        noted = tmp_path / "prefill.pid"
        until(noted.exists)
        assert noted.read_text().strip() == str(node.pid)
        until(lambda: len(group(node.pid)) == 2)
        done = script("cleanup.sh", "server", RUN_DIR=str(tmp_path), GRACE="1")
        assert done.returncode == 0, done.stderr
        assert node.wait(10) == (-signal.SIGKILL if stubborn else 143)
        assert not noted.exists() and other.poll() is None
        assert ("killed" in done.stdout) is stubborn
        assert group(node.pid) == []
    finally:
        for process in (other, node):
            for pid in group(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait(10)


def test_cleanup_leaves_an_id_alone_that_is_somebody_elses_now(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "300"])
    try:
        (tmp_path / "proxy.pid").write_text(f"{other.pid}\n")
        done = script("cleanup.sh", "proxy", RUN_DIR=str(tmp_path))
        assert done.returncode == 0 and "has ended already" in done.stdout
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(10)
    assert "not started here" in script("cleanup.sh", "proxy", RUN_DIR=str(tmp_path)).stdout


def test_the_sweep_runs_the_base_benchmark_once_per_length(tmp_path: Path) -> None:
    """Out of VLLM_SRC; each run is a tenant of its own, and its figures are taken over."""
    done = script(
        "run_multiturn_sweep.sh",
        LEG="on",
        MODEL="m",
        SERVED_NAME="s",
        LENGTHS="2048 4096",
        REPEAT="2",
        BLOCK_SIZE="16",
        OUT=str(tmp_path / "out"),
        VLLM_SRC=str(tmp_path),
        PYTHON=sys.executable,
        DRY_RUN="1",
    )
    assert done.returncode == 0, done.stderr
    bench, taken, *more = map(shlex.split, done.stdout.splitlines())
    assert len(more) == 2
    assert bench[1] == str(tmp_path / "benchmarks/multi_turn/benchmark_serving_multi_turn.py")
    for flag, value in (("--api-key", "on-2-2048"), ("--served-model-name", "s")):
        assert bench[bench.index(flag) + 1] == value
    assert "--send-conversation-id" in bench
    assert taken[taken.index("--block-size") + 1] == "16"
    assert json.loads((tmp_path / "out/workload-4096/workload.json").read_text())
    assert script("run_multiturn_sweep.sh", LEG="both").returncode == 2


def group(leader: int) -> list[int]:
    return guard.members(leader)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
