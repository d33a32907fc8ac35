"""Starts what an arm consists of: engines, and what stands in front of them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.about import connectors
from tools.bench.arms import Arm
from tools.bench.client import Target
from tools.bench.errors import BenchError
from tools.bench.model import Model
from tools.bench.stock import ROOT, SAMPLE_PROXY, source_file, stock_tree
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.command import serve_environment
from tools.cluster.options import Device
from tools.cluster.ports import PortReservations
from tools.cluster.process import ManagedProcess
from tools.cluster.readiness import answers_health, wait_until_ready
from tools.cluster.router import router
from tools.demo.errors import DemoError
from tools.demo.metrics import Reading, read_metrics

SERVED_NAME = "bench"
_START_TIMEOUT_S = 900.0
_HOST = "127.0.0.1"
_BLOCK_SIZE = "vllm:cache_config_info"
# P's own: what it took from peers.
READ_TOKENS = "vllm:external_prefix_cache_hits_total"
READ_BYTES = "vllm:nixl_bytes_transferred_sum"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What all arms of a run share. `engine_args` go to each `vllm serve`."""

    device: Device
    model: Model
    max_model_len: int
    kv_cache_gib: int | None = None
    tensor_parallel: int = 1
    backend: str = "UCX"
    python: Path = field(default_factory=lambda: Path(sys.executable))
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Servers:
    """A running arm."""

    target: Target
    engines: tuple[Engine, ...]
    processes: tuple[ManagedProcess, ...]

    @property
    def prefill(self) -> Engine:
        """The engine that computes prompts."""
        return self.engines[0]

    def block_size(self) -> int:
        """Tokens per KV block of P; BenchError if P does not say."""
        return block_size(self._reading(), self.prefill.url)

    def totals(self) -> dict[str, float]:
        """P's own counts since it started: what it has read from peers."""
        reading = self._reading()
        return {name: reading.total(name) for name in (READ_TOKENS, READ_BYTES)}

    def commands(self) -> dict[str, list[str]]:
        """Each process's command line, paths relative to the repository."""
        return {process.name: [*map(relative, process.command)] for process in self.processes}

    def environment(self) -> dict[str, dict[str, str]]:
        """What each engine's environment has beside that of this process."""
        return {
            engine.name: {
                name: relative(value) for name, value in serve_environment(engine.spec, {}).items()
            }
            for engine in self.engines
        }

    def connectors(self) -> dict[str, dict[str, Any]]:
        """What each engine was told about KV transfer."""
        return {engine.name: connectors(engine.process.command) for engine in self.engines}

    def check_alive(self) -> None:
        """Raise ProcessFailedError, with its log, if a process has ended."""
        for process in self.processes:
            process.check_alive()

    def _reading(self) -> Reading:
        try:
            return read_metrics(self.prefill.url)
        except DemoError as error:
            raise BenchError(str(error)) from error


def relative(text: str) -> str:
    """A word of a command line as it is from within the repository: reports are published."""
    return text.replace(f"{ROOT}/", "")


def block_size(reading: Reading, url: str) -> int:
    """Tokens per KV block of the engine at `url`, by its metrics; BenchError if they lack it."""
    found = [s.label("block_size") for s in reading.samples if s.name == _BLOCK_SIZE]
    sizes = [int(size) for size in found if size.isdigit()]
    if not sizes:
        raise BenchError(
            "the block size is not known",
            file=url + "/metrics",
            expected=f"{_BLOCK_SIZE} with a block_size",
            found=found or "none",
        )
    return sizes[0]


@contextmanager
def serving(
    arm: Arm, settings: Settings, folder: Path, scratch: Path, say: Say
) -> Iterator[Servers]:
    """Start an arm, wait until it serves, and end it on leaving. Logs go to `folder`."""
    options = cluster_options(arm, settings, scratch, say)
    prefill, decode = (1, 1) if arm.disaggregated else (0, 1)
    with ExitStack() as stack:
        engines = stack.enter_context(
            cluster(
                prefill,
                decode,
                settings.tensor_parallel,
                settings.device,
                options,
                log_folder=folder,
                report=say,
            )
        )
        for engine in engines.engines:
            say(f"{engine.name}: {shlex.join(engine.process.command)}")
        processes = [engine.process for engine in engines.engines]
        url = engines.engines[0].url
        if arm.front == "router":
            front = stack.enter_context(
                router(
                    engines.prefill,
                    engines.decode,
                    folder,
                    python=settings.python,
                    report=say,
                )
            )
            processes.append(front.process)
            url = front.url
        elif arm.front == "sample-proxy":
            proxy = stack.enter_context(_sample_proxy(engines, settings, folder, scratch, say))
            processes.append(proxy.process)
            url = proxy.url
        target = Target(url, SERVED_NAME, links=arm.links)
        yield Servers(target, engines.engines, tuple(processes))


def cluster_options(arm: Arm, settings: Settings, scratch: Path, say: Say) -> ClusterOptions:
    """The engines of an arm; the base release is unpacked below `scratch` if the arm needs it."""
    env = {"TORCHDYNAMO_DISABLE": "1"} if settings.device == "cpu" else {}
    if arm.stock:
        tree = stock_tree(settings.device, scratch / f"stock-{settings.device}", say)
        path = [str(tree.absolute()), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return ClusterOptions(
        model=settings.model.path,
        served_model_name=SERVED_NAME,
        dtype=settings.model.dtype,
        enforce_eager=settings.device == "cpu",
        max_model_len=settings.max_model_len,
        kv_cache_gib=settings.kv_cache_gib,
        kv_connector="NixlConnector" if arm.disaggregated else None,
        bidirectional=arm.bidirectional,
        kv_connector_extra_config={"backends": [settings.backend]},
        prefill=RoleOptions(prefix_caching=arm.prefill_cache),
        args=(*settings.model.args, *settings.engine_args),
        env=env,
        start_timeout_s=_START_TIMEOUT_S,
        python=settings.python,
    )


class _Proxy:
    """The base release's sample proxy as a process."""

    def __init__(self, port: int, process: ManagedProcess) -> None:
        self.name = process.name
        self.process = process
        self.port = port
        self.url = f"http://{_HOST}:{port}"

    def is_ready(self) -> bool:
        self.process.check_alive()
        return answers_health(_HOST, self.port)


@contextmanager
def _sample_proxy(
    engines: Cluster, settings: Settings, folder: Path, scratch: Path, say: Say
) -> Iterator[_Proxy]:
    script = source_file(SAMPLE_PROXY, scratch / "sample-proxy", say).absolute()
    with PortReservations() as ports:
        port = ports.reserve()
        command = [str(settings.python), str(script), "--host", _HOST, "--port", str(port)]
        for role, engine in (("prefiller", engines.prefill[0]), ("decoder", engines.decode[0])):
            command += [f"--{role}-host", engine.host, f"--{role}-port", str(engine.port)]
        process = ManagedProcess("proxy", command, folder.absolute() / "proxy.log")
        try:
            process.start()
            proxy = _Proxy(port, process)
            wait_until_ready([proxy], _START_TIMEOUT_S, say)
            yield proxy
        finally:
            process.stop()
