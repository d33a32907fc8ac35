"""Real engines for the end-to-end tests; one cluster per shape and test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster, make_model
from tools.cluster.readiness import to_stderr


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shows a line at once, which pytest would otherwise hold back until a test has failed."""
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        return to_stderr

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            to_stderr(line)

    return show


@pytest.fixture(scope="session")
def pair(
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    report: Callable[[str], None],
) -> Iterator[Cluster]:
    """One prefill and one decode engine on the CPU, bidirectional, without prefix caches.

    Without them a request never meets what an earlier one has left, so that a plain request to
    an engine is an independent oracle for a disaggregated one.
    """
    options = ClusterOptions(
        model=model_folder,
        prefill=RoleOptions(prefix_caching=False),
        decode=RoleOptions(prefix_caching=False),
    )
    with cluster(
        prefill=1,
        decode=1,
        device="cpu",
        options=options,
        log_folder=tmp_path_factory.mktemp("engine-logs"),
        report=report,
    ) as running:
        yield running
