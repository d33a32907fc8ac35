"""Several engines that belong together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

from tools.cluster.command import EngineSpec
from tools.cluster.engine import Engine
from tools.cluster.errors import ClusterError
from tools.cluster.model import make_model
from tools.cluster.options import ClusterOptions, Device, Role
from tools.cluster.placement import Slot, cpu_slots, gpu_slots, visible_gpus
from tools.cluster.ports import PortReservations
from tools.cluster.readiness import Report, to_stderr, wait_until_ready


class Cluster:
    """The running engines. Made by ``cluster``, which also ends them."""

    def __init__(self, engines: list[Engine], log_folder: Path) -> None:
        self.engines = tuple(engines)
        self.log_folder = log_folder

    @property
    def prefill(self) -> tuple[Engine, ...]:
        """The prefill engines, by index."""
        return tuple(engine for engine in self.engines if engine.role == "prefill")

    @property
    def decode(self) -> tuple[Engine, ...]:
        """The decode engines, by index."""
        return tuple(engine for engine in self.engines if engine.role == "decode")


@contextmanager
def cluster(
    prefill: int = 1,
    decode: int = 1,
    tensor_parallel: int = 1,
    device: Device = "cpu",
    options: ClusterOptions | None = None,
    log_folder: Path | None = None,
    report: Report = to_stderr,
) -> Iterator[Cluster]:
    """Start engines, wait until all serve, and end every process on leaving, however it is left.

    Each engine of ``tensor_parallel`` ranks is pinned to its own cores (``cpu``) or GPUs
    (``cuda``); when there are too few they share, and start one after the other. Logs, one file
    per engine, go to ``log_folder``, by default a new temporary folder that is kept.
    Raises ProcessFailedError, with the log's tail, when an engine ends or does not come up.
    """
    if min(prefill, decode) < 0 or prefill + decode == 0 or tensor_parallel < 1:
        raise ClusterError(
            f"prefill={prefill}, decode={decode}, tensor_parallel={tensor_parallel}: "
            "expected at least one engine and at least one rank"
        )
    options = options or ClusterOptions()
    # The engines run in the log folder, so that a relative path would mean something else there.
    folder = (log_folder or Path(tempfile.mkdtemp(prefix="cluster-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-")))
        model = options.model or make_model(scratch / "model")
        options = options.with_model(model.absolute())
        ports = stack.enter_context(PortReservations())
        names: list[tuple[Role, int]] = [("prefill", i) for i in range(prefill)]
        names += [("decode", i) for i in range(decode)]
        slots = _slots(device, len(names), tensor_parallel)
        engines = [
            Engine(
                EngineSpec(
                    name=f"{role}-{index}",
                    role=role,
                    device=device,
                    tensor_parallel=tensor_parallel,
                    slot=slot,
                    port=ports.reserve(),
                    side_channel_port=ports.reserve(options.of(role).data_parallel),
                    scratch=scratch,
                    options=options,
                ),
                folder,
                report,
            )
            for (role, index), slot in zip(names, slots, strict=True)
        ]
        for engine in engines:
            stack.callback(engine.stop)
        stack.callback(_ask_all_to_stop, engines)
        _start(engines, options.start_timeout_s, report)
        yield Cluster(engines, folder)


def _slots(device: Device, engines: int, ranks: int) -> list[Slot]:
    if device == "cpu":
        return cpu_slots(engines, ranks)
    return gpu_slots(engines, ranks, visible_gpus())


def _ask_all_to_stop(engines: list[Engine]) -> None:
    for engine in engines:
        engine.ask_to_stop()


def _start(engines: list[Engine], timeout_s: float, report: Report) -> None:
    """Start wave by wave; the engines of a wave start together."""
    for _, wave in groupby(engines, key=lambda engine: engine.spec.slot.wave):
        starting = list(wave)
        for engine in starting:
            engine.start()
            report(f"{engine.name}: starting at {engine.url}, log {engine.log_path}")
        wait_until_ready(starting, timeout_s, report)
