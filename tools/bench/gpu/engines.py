"""Starts the sets of a run: on GPUs all engines at once, each a cluster of its own."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.bench.descriptors import ZERO_COPY
from tools.bench.gpu.client import SERVED_NAME
from tools.bench.gpu.counters import PrefillLog, kv_capacity
from tools.bench.gpu.plan import GIB, Kept, SetName
from tools.bench.gpu.turns import PairOfNodes
from tools.bench.model import Model
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.options import Device
from tools.cluster.together import start_together

# Of UCX. Leaving ZERO_COPY out is not enough: there are hosts where reads stay fast without it.
SLOW_TRANSPORT = {"UCX_TLS": "tcp,cuda_copy,self"}
# Folder of a vLLM plugin that draws weights by a parameter's name: see there.
PLUGIN = Path(__file__).resolve().parents[3] / "tests" / "gpu" / "plugin"
_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
# Free memory that an engine wants to see before it starts; what it takes is said in bytes.
_MEMORY_SHARE = "0.1"
_START_TIMEOUT_S = 300.0
# Of D's cache: blocks that are not full, and those of a turn that is being freed.
_KEPT_SHARE = 0.95
_TELLING = re.compile(r"Using .* backend|zero-copy .*cuda_ipc|software emulation")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What all engines of a run share. `gpus`: P's and D's, one for both if there is one.

    slow_transport: UCX has TCP only, so that reads are slow on any host.
    apart: one set after the other, not all at once, so that none shares GPU and cores with another.
    decode_graphs: D decodes with CUDA graphs. ttl_s: seconds that D keeps a finished turn.
    """

    model: Model
    pythons: dict[SetName, Path]
    device: Device
    max_model_len: int
    prefill_kv_gib: int
    decode_kv_gib: int
    ttl_s: float
    gpus: tuple[str, ...] = ("0",)
    decode_graphs: bool = False
    slow_transport: bool = False
    apart: bool = False
    engine_args: tuple[str, ...] = ()
    seed: int = 0


@contextmanager
def running(settings: Settings, logs: Path, say: Say) -> Iterator[dict[SetName, PairOfNodes]]:
    """All sets, started together; every process has ended on leaving.

    Raises ProcessFailedError when an engine does not come up.
    """
    with ExitStack() as stack:
        starts = [
            (name, start)
            for name in settings.pythons
            for start in _starts(settings, name, logs / name, say)
        ]
        found: dict[SetName, list[Engine]] = {name: [] for name in settings.pythons}
        started = start_together(stack, [start for _, start in starts])
        for (name, _), one in zip(starts, started, strict=True):
            found[name] += one.engines
        yield {name: _pair(settings, name, engines) for name, engines in found.items()}


def telling(engines: Iterable[Engine]) -> list[str]:
    """What the engines' logs say about attention and transport, each line once."""
    found: dict[str, None] = {}
    for engine in engines:
        for line in engine.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            if _TELLING.search(line):
                found[f"{engine.name}: {line.split('] ')[-1].strip()[:160]}"] = None
    return list(found)


def options(settings: Settings, name: SetName) -> ClusterOptions:
    """How the engines of one set are started."""
    cuda = settings.device == "cuda"
    common = (
        "--max-num-seqs",
        "64",
        *(("--gpu-memory-utilization", _MEMORY_SHARE) if cuda else ()),
    )
    decode: tuple[str, ...] = ()
    if cuda and settings.decode_graphs:
        decode = ("--compilation-config", json.dumps(_GRAPHS))
    elif cuda:
        decode = ("--enforce-eager",)
    prefill_memory, decode_memory = (
        _memory(settings.device, gib) for gib in (settings.prefill_kv_gib, settings.decode_kv_gib)
    )
    prefill_gpu, decode_gpu = settings.gpus[0], settings.gpus[-1]
    return ClusterOptions(
        model=settings.model.path,
        served_model_name=SERVED_NAME,
        dtype=settings.model.dtype,
        enforce_eager=not cuda,
        max_model_len=settings.max_model_len,
        kv_cache_gib=None,
        kv_connector_extra_config={"decoder_kv_blocks_ttl": settings.ttl_s},
        prefill=RoleOptions(
            prefix_caching=False,
            args=(*(("--enforce-eager",) if cuda else ()), *prefill_memory[0]),
            env={**prefill_memory[1], **({"CUDA_VISIBLE_DEVICES": prefill_gpu} if cuda else {})},
        ),
        decode=RoleOptions(
            args=(*decode, *decode_memory[0]),
            env={**decode_memory[1], **({"CUDA_VISIBLE_DEVICES": decode_gpu} if cuda else {})},
        ),
        args=(*common, *settings.model.args, *settings.engine_args),
        env=environment(settings),
        start_timeout_s=_START_TIMEOUT_S,
        # As it is given: a wrapper or a link of an environment must stay what it is.
        python=settings.pythons[name].absolute(),
    )


def environment(settings: Settings) -> dict[str, str]:
    """Of all engines, beside what every cluster has."""
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "TRANSFORMERS_OFFLINE": "1", "UCX_PROTO_INFO": "y"}
    if settings.device == "cpu":
        # Compiling takes longer than what it saves here, and wants a compiler.
        return {**env, "TORCHDYNAMO_DISABLE": "1"}
    env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env | (SLOW_TRANSPORT if settings.slow_transport else {ZERO_COPY: "on"})


def _starts(
    settings: Settings, name: SetName, logs: Path, say: Say
) -> list[AbstractContextManager[Cluster]]:
    chosen = options(settings, name)

    def report(line: str) -> None:
        if "starting, " not in line:
            say(f"{name} {line}")

    if settings.device == "cpu":
        # Together, so that each is pinned to cores of its own.
        return [cluster(1, 1, 1, "cpu", chosen, logs, report)]
    return [
        cluster(prefill, decode, 1, "cuda", chosen, logs, report)
        for prefill, decode in ((1, 0), (0, 1))
    ]


def _pair(settings: Settings, name: SetName, engines: Sequence[Engine]) -> PairOfNodes:
    prefill = next(one for one in engines if one.role == "prefill")
    decode = next(one for one in engines if one.role == "decode")
    capacity, _ = kv_capacity(decode.url)
    return PairOfNodes(
        name,
        prefill,
        decode,
        Kept(int(capacity * _KEPT_SHARE), settings.ttl_s),
        PrefillLog(prefill.log_path),
        settings.model.token_ids,
        # Conversations of different sets must not be the same: nothing is shared between them.
        random.Random(f"{settings.seed} {name}"),
    )


def _memory(device: Device, gib: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment that give an engine a KV cache of that size."""
    if device == "cpu":
        return (), {"VLLM_CPU_KVCACHE_SPACE": str(gib)}
    return ("--kv-cache-memory-bytes", str(gib * GIB)), {}
