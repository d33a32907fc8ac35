"""Two real engines that faults are done to: little memory, short times, stops in a read-back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import compared, model_folder, report
from tests.faults.points import FaultPoints
from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster

__all__ = ["compared", "model_folder", "report"]

TTL_S = 4
# Long enough for what a test does to D while a read-back waits.
TIMEOUT_S = 25
# For so long a peer that did not answer is not asked again (questions.py).
SILENCE_S = 5
BLOCKS = 48
IN_ENGINE = Path(__file__).parent / "in_engine"


@pytest.fixture(scope="session")
def points(tmp_path_factory: pytest.TempPathFactory) -> FaultPoints:
    """Where read-backs of `faulty`'s prefill engine can be stopped."""
    return FaultPoints(tmp_path_factory.mktemp("fault-points"))


@pytest.fixture(scope="session")
def faulty(
    model_folder: Path,
    points: FaultPoints,
    tmp_path_factory: pytest.TempPathFactory,
    report: Callable[[str], None],
) -> Iterator[Cluster]:
    """P and D with prefix caches, which a wrong block would poison for later requests."""
    python_path = os.pathsep.join([str(IN_ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ClusterOptions(
        model=model_folder,
        max_model_len=2048,
        forked=True,
        kv_connector_extra_config={
            "decoder_kv_blocks_ttl": TTL_S,
            "kv_lease_duration": TTL_S,
            "read_back_timeout": TIMEOUT_S,
            "kv_recompute_threshold": 0,
        },
        args=("--num-gpu-blocks-override", str(BLOCKS)),
        prefill=RoleOptions(
            args=("--worker-extension-cls", "bidir_fault_points.FaultPoints"),
            env={"PYTHONPATH": python_path, "BIDIR_FAULT_POINTS": str(points.folder)},
        ),
        # The development routes have the one that resets a prefix cache.
        env={"TORCHDYNAMO_DISABLE": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )
    folder = tmp_path_factory.mktemp("fault-logs")
    with cluster(options=options, log_folder=folder, report=report) as running:
        yield running


@pytest.fixture(autouse=True)
def disarmed(points: FaultPoints) -> Iterator[None]:
    """No stop outlives its test."""
    yield
    points.clear()
