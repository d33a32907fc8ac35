"""Starts what an arm consists of: P, a D with little memory, and the router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.bench import arms as bench_arms
from tools.bench.gpu.client import SERVED_NAME
from tools.bench.leases.arms import Arm
from tools.bench.leases.plan import Plan
from tools.bench.leases.turns import Front, LegsFront, RouterFront
from tools.bench.model import Model
from tools.bench.servers import Settings, cluster_options, relative
from tools.cluster import ClusterOptions, ManagedProcess, RoleOptions, cluster
from tools.cluster.command import serve_environment
from tools.cluster.router import router

Say = Callable[[str], None]


@dataclass(frozen=True)
class Nodes:
    """A running arm. `cores`: those that D does not use, for whoever asks it; () if D uses all."""

    front: Front
    prefill_url: str
    decode_url: str
    processes: tuple[ManagedProcess, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[int, ...] = ()

    def commands(self) -> dict[str, list[str]]:
        """Each process's command line, paths relative to the repository."""
        return {one.name: [*map(relative, one.command)] for one in self.processes}

    def check_alive(self) -> None:
        """Raise ProcessFailedError, with its log, if a process has ended."""
        for process in self.processes:
            process.check_alive()


@contextmanager
def serving(
    arm: Arm, plan: Plan, model: Model, python: Path, folder: Path, scratch: Path, say: Say
) -> Iterator[Nodes]:
    """Start an arm, wait until it serves, and end it on leaving. Logs go to `folder`."""
    chosen = options(arm, plan, model, python, scratch, say)
    with ExitStack() as stack:
        engines = stack.enter_context(cluster(1, 1, 1, "cpu", chosen, folder, say))
        (prefill,), (decode,) = engines.prefill, engines.decode
        processes = [engine.process for engine in engines.engines]
        front: Front = LegsFront(prefill.url, decode.url)
        if not arm.stock:
            asked = router(engines.prefill, engines.decode, folder, python=python, report=say)
            running = stack.enter_context(asked)
            processes.append(running.process)
            front = RouterFront(running.url)
        yield Nodes(
            front,
            prefill.url,
            decode.url,
            tuple(processes),
            {
                engine.name: {
                    name: relative(value)
                    for name, value in serve_environment(engine.spec, {}).items()
                }
                for engine in engines.engines
            },
            tuple(set(prefill.spec.slot.cores or ()) - set(decode.spec.slot.cores or ())),
        )


def options(
    arm: Arm, plan: Plan, model: Model, python: Path, scratch: Path, say: Say
) -> ClusterOptions:
    """The engines of an arm; the base release is unpacked below `scratch` if the arm needs it."""
    settings = Settings(
        "cpu",
        model,
        plan.max_model_len,
        kv_cache_gib=1,
        python=python,
        engine_args=("--block-size", str(plan.block_size)),
    )
    like = bench_arms.Arm(arm.name, arm.title, "", bidirectional=arm.bidirectional, stock=arm.stock)
    return replace(
        cluster_options(like, settings, scratch, say),
        served_model_name=SERVED_NAME,
        decode=RoleOptions(
            args=("--num-gpu-blocks-override", str(plan.decode_blocks)),
            kv_connector_extra_config=arm.decode_config(plan),
        ),
    )
