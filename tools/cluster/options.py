"""What a cluster is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RoleOptions:
    """What the engines of one role have for themselves. ``None``: as in ClusterOptions.

    ``data_parallel`` ranks stand behind one server, each with the next side-channel port.
    ``args`` are appended to the command line (the last one wins), ``env`` is laid over the
    environment, ``kv_connector_extra_config`` over the cluster's.
    """

    prefix_caching: bool = True
    data_parallel: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    bidirectional: bool | None = None
    python: Path | None = None


@dataclass(frozen=True)
class ClusterOptions:
    """What all engines of a cluster share.

    model: folder of the model; None makes the tiny one of ``model.py``.
    kv_connector: None starts engines without a KV connector.
    kv_cache_gib: GiB of KV cache per engine (CPU: whole GiB); None leaves it to the engine.
    max_model_len: tokens.
    patient: processes of an engine wait for each other asleep instead of trying again at once;
        for engines that share cores.
    forked: on CPUs an engine forks its processes, as it does on GPUs, instead of having each import
        vLLM anew; it starts in half the time.
    start_timeout_s: seconds that one engine may take until it answers /health.
    grace_s: seconds between SIGTERM and SIGKILL.
    python: interpreter whose vllm is run.
    """

    model: Path | None = None
    served_model_name: str = "tiny"
    dtype: str = "float32"
    enforce_eager: bool = True
    max_model_len: int = 8192
    kv_cache_gib: int | None = 1
    kv_connector: str | None = "NixlConnector"
    kv_buffer_device: str | None = None
    bidirectional: bool = True
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    prefill: RoleOptions = field(default_factory=lambda: RoleOptions(prefix_caching=False))
    decode: RoleOptions = field(default_factory=RoleOptions)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    patient: bool = False
    forked: bool = False
    host: str = "127.0.0.1"
    start_timeout_s: float = 300.0
    grace_s: float = 10.0
    python: Path = field(default_factory=lambda: Path(sys.executable))

    def of(self, role: Role) -> RoleOptions:
        """Options of one role."""
        return self.prefill if role == "prefill" else self.decode

    def with_model(self, model: Path) -> ClusterOptions:
        """The same options with another model folder."""
        return replace(self, model=model)
