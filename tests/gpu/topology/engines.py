"""Starts a topology's nodes, each where it was placed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.shapes import Shape
from tests.gpu.topology.placement import Node
from tools.bench.descriptors import ZERO_COPY
from tools.bench.gpu.engines import PLUGIN
from tools.cluster import ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.options import Device
from tools.cluster.together import start_together

# Long beside a conversation, short beside a run.
LEASE_S = 30
# What P keeps for a D that has died is free again after this.
HANDOVER_S = 10
_START_TIMEOUT_S = 400.0
_MODEL_TOKENS = 4096


@dataclass(frozen=True)
class Settings:
    """What all engines share. kv_gib: KV cache of each rank, GiB."""

    shape: Shape
    model: Path
    device: Device
    kv_gib: int = 4
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    """The engines by the names of their nodes, in their order."""

    engines: Mapping[str, Engine]

    @property
    def prefill(self) -> tuple[Engine, ...]:
        return tuple(one for one in self.engines.values() if one.role == "prefill")

    @property
    def decode(self) -> tuple[Engine, ...]:
        return tuple(one for one in self.engines.values() if one.role == "decode")


@contextmanager
def running(settings: Settings, nodes: Sequence[Node], logs: Path) -> Iterator[Running]:
    """All nodes, started together on GPUs and one after the other on a CPU.

    Raises ProcessFailedError when one does not come up.
    """
    with ExitStack() as stack:
        starts = [
            cluster(
                int(node.role == "prefill"),
                int(node.role == "decode"),
                node.tensor_parallel,
                settings.device,
                options(settings, node),
                logs / node.name,
            )
            for node in nodes
        ]
        if settings.device == "cpu":
            started = [stack.enter_context(start) for start in starts]
        else:
            started = start_together(stack, starts)
        engines = [one for each in started for one in each.engines]
        yield Running({node.name: one for node, one in zip(nodes, engines, strict=True)})


def options(settings: Settings, node: Node) -> ClusterOptions:
    """How one node is started."""
    args = [*settings.shape.args, "--load-format", "dummy", "--max-num-seqs", "32"]
    args += ["--enable-prompt-tokens-details"]
    env: dict[str, str] = {}
    if settings.device == "cuda":
        # Only looked at when the engine starts: how much it takes is said in bytes.
        args += ["--gpu-memory-utilization", "0.1"]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.gpus))
    args += settings.engine_args
    role = RoleOptions(data_parallel=node.data_parallel, args=tuple(args), env=env)
    return ClusterOptions(
        model=settings.model,
        served_model_name="m",
        dtype=settings.shape.dtype,
        max_model_len=_MODEL_TOKENS,
        kv_cache_gib=settings.kv_gib,
        kv_connector_extra_config={
            "decoder_kv_lease_duration": LEASE_S,
            "kv_lease_duration": HANDOVER_S,
        },
        prefill=role,
        decode=role,
        env=environment(settings.device),
        start_timeout_s=_START_TIMEOUT_S,
    )


def environment(device: Device) -> dict[str, str]:
    """Of all engines, beside what every cluster has."""
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    env = {
        "PYTHONPATH": path,
        # For /reset_prefix_cache.
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if device == "cuda":
        env |= {ZERO_COPY: "on", "UCX_PROTO_INFO": "y", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        # Where other machines' GPUs hang on the same switch, multicast is not for tests.
        env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}
    return env
