"""Two P and two D, started once; a router for each pass."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tools.bench.arms import ARMS
from tools.bench.errors import BenchError
from tools.bench.model import Model
from tools.bench.policies.plan import Pair, Plan
from tools.bench.servers import Settings, cluster_options, relative
from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster
from tools.cluster.router import router

Say = Callable[[str], None]
_RESET_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FourNodes:
    """The engines of a run. Made by `serving`."""

    cluster: Cluster
    python: Path
    folder: Path
    say: Say

    @property
    def urls(self) -> Mapping[str, str]:
        return {engine.name: engine.url for engine in self.cluster.engines}

    @contextmanager
    def route(self, pair: Pair) -> Iterator[str]:
        with router(
            self.cluster.prefill,
            self.cluster.decode,
            self.folder,
            args=pair.args(),
            python=self.python,
            report=lambda line: None,
        ) as running:
            yield running.url

    def forget(self) -> None:
        for engine in self.cluster.engines:
            connection = http.client.HTTPConnection(
                engine.host, engine.port, timeout=_RESET_TIMEOUT_S
            )
            try:
                connection.request("POST", "/reset_prefix_cache")
                status: object = connection.getresponse().status
            except (OSError, http.client.HTTPException) as error:
                status = error
            finally:
                connection.close()
            if status != http.client.OK:
                raise BenchError(
                    "a prefix cache cannot be emptied",
                    file=engine.url + "/reset_prefix_cache",
                    expected="status 200",
                    found=status,
                    next_step=f"see {engine.log_path}",
                )

    def commands(self) -> dict[str, list[str]]:
        return {
            engine.name: [*map(relative, engine.process.command)] for engine in self.cluster.engines
        }


@contextmanager
def serving(plan: Plan, model: Model, python: Path, folder: Path, say: Say) -> Iterator[FourNodes]:
    """Start the engines, wait until they serve, and end them on leaving. Logs go to `folder`."""
    with cluster(2, 2, 1, "cpu", options(plan, model, python, folder, say), folder, say) as four:
        yield FourNodes(four, python, folder, say)


def options(plan: Plan, model: Model, python: Path, folder: Path, say: Say) -> ClusterOptions:
    """As a deployment would have it: all with prefix caches, D with leases."""
    settings = Settings(
        "cpu",
        model,
        plan.max_model_len,
        kv_cache_gib=1,
        python=python,
        engine_args=("--block-size", str(plan.block_size)),
    )
    chosen = cluster_options(ARMS["on"], settings, folder, say)
    return replace(
        chosen,
        prefill=RoleOptions(prefix_caching=True),
        decode=RoleOptions(kv_connector_extra_config={"decoder_kv_lease_duration": plan.lease_s}),
        patient=True,
        # The development routes have the one that empties a prefix cache.
        env={**chosen.env, "VLLM_SERVER_DEV_MODE": "1"},
    )
