"""Command line and environment of one `vllm serve`. Pure: strings in, strings out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.errors import ClusterError
from tools.cluster.options import ClusterOptions, Device, Role
from tools.cluster.placement import Slot

_GPU_MEMORY_SHARE = 0.85
_IN_ENGINE = Path(__file__).parent / "in_engine"


@dataclass(frozen=True)
class EngineSpec:
    """One engine: what it is, where it runs, and the ports that are reserved for it.

    scratch: folder for the sockets between its processes, which vLLM does not delete; a short
    path, since a socket's path ends at 107 bytes.
    """

    name: str
    role: Role
    device: Device
    tensor_parallel: int
    slot: Slot
    port: int
    side_channel_port: int
    scratch: Path
    options: ClusterOptions


def serve_command(spec: EngineSpec, engine_id: str) -> list[str]:
    """The command line; ``engine_id`` is how the KV connector names the engine to its peers."""
    options, role = spec.options, spec.options.of(spec.role)
    if options.model is None:
        raise ClusterError(f"{spec.name}: no model folder; make one with python -m tools.cluster")
    command = [str(role.python or options.python), "-m", "vllm.entrypoints.cli.main", "serve"]
    command += [str(options.model), "--served-model-name", options.served_model_name]
    command += ["--host", options.host, "--port", str(spec.port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    command += ["--tensor-parallel-size", str(spec.tensor_parallel)]
    if role.data_parallel > 1:
        command += ["--data-parallel-size", str(role.data_parallel)]
    command += ["--enable-prefix-caching" if role.prefix_caching else "--no-enable-prefix-caching"]
    if options.enforce_eager:
        command += ["--enforce-eager"]
    if spec.device == "cuda":
        command += _gpu_memory(spec)
    if options.kv_connector is not None:
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec, engine_id))]
    return [*command, *options.args, *role.args]


def kv_transfer_config(spec: EngineSpec, engine_id: str) -> dict[str, Any]:
    """What `--kv-transfer-config` says, in upstream's names."""
    options, role = spec.options, spec.options.of(spec.role)
    bidirectional = options.bidirectional if role.bidirectional is None else role.bidirectional
    config: dict[str, Any] = {
        "kv_connector": options.kv_connector,
        "kv_role": "kv_producer" if spec.role == "prefill" else "kv_consumer",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": bidirectional,
            **options.kv_connector_extra_config,
            **role.kv_connector_extra_config,
        },
    }
    buffer_device = options.kv_buffer_device or ("cpu" if spec.device == "cpu" else None)
    if buffer_device is not None:
        config["kv_buffer_device"] = buffer_device
    return config


def serve_environment(spec: EngineSpec, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what the engine needs; the options' own entries win over it."""
    env = {
        **base,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(spec.scratch),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.options.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
    }
    if spec.device == "cpu":
        env["OMP_NUM_THREADS"] = "1"
        # The engine is pinned already; by itself vLLM would spread over all cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if spec.options.kv_cache_gib is not None:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.options.kv_cache_gib)
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in spec.slot.gpus)
        if spec.slot.sharers > 1:
            # Between two engines on one GPU, UCX silently reads over TCP without this.
            env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    env |= {**spec.options.env, **spec.options.of(spec.role).env}
    wanted = {
        "patient": spec.options.patient,
        "forked": spec.options.forked and spec.device == "cpu",
    }
    if any(wanted.values()):
        env["ENGINE_PROCESSES"] = ",".join(name for name, on in wanted.items() if on)
        path = [str(_IN_ENGINE), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def _gpu_memory(spec: EngineSpec) -> list[str]:
    args = []
    if spec.slot.sharers > 1:
        share = _GPU_MEMORY_SHARE / spec.slot.sharers
        args += ["--gpu-memory-utilization", f"{share:.3f}"]
    if spec.options.kv_cache_gib is not None:
        args += ["--kv-cache-memory-bytes", str(spec.options.kv_cache_gib * 1024**3)]
    return args
