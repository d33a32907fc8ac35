from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.cluster.command import EngineSpec, serve_command, serve_environment
from tools.cluster.options import ClusterOptions, RoleOptions
from tools.cluster.placement import Slot


def spec(options: ClusterOptions, **changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        "name": "decode-0",
        "role": "decode",
        "device": "cpu",
        "tensor_parallel": 1,
        "slot": Slot(cores=(0,)),
        "port": 20001,
        "side_channel_port": 20002,
        "scratch": Path("/scratch"),
        "options": options.with_model(Path("/model")),
    }
    return EngineSpec(**{**values, **changes})


def transfer_config(command: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return config


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_engine_is_served_by_the_given_interpreter() -> None:
    """The command runs vllm's command line as a module of the chosen Python."""
    options = ClusterOptions(python=Path("/env/bin/python"), dtype="bfloat16", max_model_len=512)
    command = serve_command(spec(options, tensor_parallel=2), "id")
    start = ["/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/model"]
    assert command[:5] == start
    assert value(command, "--port") == "20001"
    assert value(command, "--dtype") == "bfloat16"
    assert value(command, "--max-model-len") == "512"
    assert value(command, "--tensor-parallel-size") == "2"
    assert "--enforce-eager" in command


def test_connector_is_bidirectional_with_the_given_id() -> None:
    """The KV transfer configuration has upstream's names, the id, and the options' entries."""
    options = ClusterOptions(
        kv_connector_extra_config={"kv_recompute_threshold": 7, "decoder_kv_blocks_ttl": 8},
        decode=RoleOptions(kv_connector_extra_config={"decoder_kv_blocks_ttl": 9}),
    )
    assert transfer_config(serve_command(spec(options), "id-1")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "engine_id": "id-1",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 7,
            "decoder_kv_blocks_ttl": 9,
        },
    }


def test_roles_differ_where_told() -> None:
    """Prefix cache, direction, interpreter, arguments and environment may differ per role."""
    options = ClusterOptions(
        args=("--seed", "1"),
        env={"A": "cluster", "B": "cluster"},
        prefill=RoleOptions(prefix_caching=False, bidirectional=False),
        decode=RoleOptions(python=Path("/other"), args=("--seed", "2"), env={"A": "decode"}),
    )
    prefill = spec(options, role="prefill", name="prefill-0")
    command = serve_command(prefill, "p")
    assert "--no-enable-prefix-caching" in command
    assert transfer_config(command)["kv_connector_extra_config"]["bidirectional_kv_xfer"] is False
    assert serve_environment(prefill, {})["A"] == "cluster"
    command = serve_command(spec(options), "d")
    assert command[0] == "/other"
    assert "--enable-prefix-caching" in command
    assert command[-4:] == ["--seed", "1", "--seed", "2"]
    assert transfer_config(command)["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    env = serve_environment(spec(options), {"A": "outside", "HOME": "/home"})
    assert (env["A"], env["B"], env["HOME"]) == ("decode", "cluster", "/home")


def test_engine_without_connector() -> None:
    """With no connector, no KV transfer configuration is given."""
    assert "--kv-transfer-config" not in serve_command(spec(ClusterOptions(kv_connector=None)), "")


def test_cpu_environment() -> None:
    """A CPU engine computes on one thread and is not spread over cores by vLLM."""
    env = serve_environment(spec(ClusterOptions(kv_cache_gib=3)), {"OMP_NUM_THREADS": "8"})
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "20002"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_cuda_engine_sees_its_gpus_only() -> None:
    """A CUDA engine gets its GPUs and no CPU setting; sharing one limits memory, opens GET."""
    options = ClusterOptions(kv_cache_gib=None)
    alone = spec(options, device="cuda", slot=Slot(gpus=(2, 3)))
    env = serve_environment(alone, {})
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not any(name.startswith(("VLLM_CPU_", "OMP_", "UCX_")) for name in env)
    assert "--gpu-memory-utilization" not in serve_command(alone, "id")
    assert "kv_buffer_device" not in transfer_config(serve_command(alone, "id"))
    shared = spec(options, device="cuda", slot=Slot(gpus=(0,), sharers=2))
    assert float(value(serve_command(shared, "id"), "--gpu-memory-utilization")) < 0.5
    assert serve_environment(shared, {})["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


def test_data_parallel_ranks_stand_behind_one_server() -> None:
    """Of the role that is told so; one rank is no option at all."""
    options = ClusterOptions(decode=RoleOptions(data_parallel=2))
    assert value(serve_command(spec(options), "d"), "--data-parallel-size") == "2"
    prefill = serve_command(spec(options, role="prefill", name="prefill-0"), "p")
    assert "--data-parallel-size" not in prefill


_HOW = """
import multiprocessing, os
os.sched_yield()
print(os.sched_yield.__module__, multiprocessing.get_context("spawn").get_start_method())
"""


@pytest.mark.parametrize(
    ("patient", "forked", "said"),
    [
        (True, False, "sitecustomize spawn"),
        (False, True, "posix fork"),
        (True, True, "sitecustomize fork"),
    ],
)
def test_processes_of_an_engine_wait_asleep_or_are_forked(
    patient: bool, forked: bool, said: str
) -> None:
    """Every Python process of its own, whatever else its path has."""
    options = ClusterOptions(patient=patient, forked=forked, env={"PYTHONPATH": "/mine"})
    env = serve_environment(spec(options), {})
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/mine"]
    told = subprocess.run([sys.executable, "-c", _HOW], env=env, capture_output=True, check=True)
    assert (told.stdout.decode().strip(), told.stderr) == (said, b"")


_WHO_LISTENS = """
import multiprocessing, socket
listener = socket.create_server(("127.0.0.1", 0))
here, there = multiprocessing.Pipe()
child = multiprocessing.get_context("spawn").Process(target=there.recv)
child.start()
socket.create_connection(listener.getsockname()).close()
address = listener.getsockname()
listener.close()
try:
    socket.create_connection(address)
except ConnectionRefusedError:
    print("refused")
here.send("end")
child.join()
print(child.exitcode)
"""


def test_a_forked_process_does_not_keep_the_servers_port_open() -> None:
    env = serve_environment(spec(ClusterOptions(forked=True)), {})
    told = subprocess.run(
        [sys.executable, "-c", _WHO_LISTENS], env=env, capture_output=True, check=True
    )
    assert (told.stdout.decode().split(), told.stderr) == (["refused", "0"], b"")


def test_processes_are_left_alone_unless_asked_for_and_forks_are_on_cpus_only() -> None:
    assert "PYTHONPATH" not in serve_environment(spec(ClusterOptions()), {})
    on_gpu = spec(ClusterOptions(forked=True), device="cuda", slot=Slot(gpus=(0,)))
    assert "PYTHONPATH" not in serve_environment(on_gpu, {})
