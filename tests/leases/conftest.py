"""Two real engines whose D keeps turns by lease and asks for an API key; routers in front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.conftest import compared, model_folder, report
from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster
from tools.cluster.router import RouterProcess, router

__all__ = ["compared", "model_folder", "report"]

LEASE_S = 6.0
KEY = "key-of-the-engines"
# Of D; a block has 128 tokens on a CPU.
BLOCKS = 48
Route = Callable[..., AbstractContextManager[RouterProcess]]


@pytest.fixture(scope="session")
def leased(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    options = ClusterOptions(
        model=model_folder,
        max_model_len=2048,
        forked=True,
        kv_connector_extra_config={"kv_recompute_threshold": 0},
        prefill=RoleOptions(prefix_caching=False),
        decode=RoleOptions(
            kv_connector_extra_config={
                "decoder_kv_lease_duration": LEASE_S,
                "decoder_kv_lease_budget": 0.6,
            },
            args=("--num-gpu-blocks-override", str(BLOCKS), "--api-key", KEY),
        ),
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("lease-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


@pytest.fixture
def route(leased: Cluster, tmp_path: Path) -> Route:
    """A router that knows the engines' key."""
    key = tmp_path / "key"
    key.write_text(KEY + "\n", encoding="utf-8")

    def start(*args: str) -> AbstractContextManager[RouterProcess]:
        return router(
            leased.prefill,
            leased.decode,
            tmp_path,
            args=("--engine-api-key-file", str(key), *args),
        )

    return start
