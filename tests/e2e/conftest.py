"""Real engines for the end-to-end tests; one cluster per shape and test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.e2e.oracle import Compared
from tools.cluster import Cluster, ClusterOptions, RoleOptions, cluster, make_model
from tools.cluster.readiness import to_stderr
from tools.cluster.router import RouterProcess, router

WITHOUT_PREFIX_CACHE = RoleOptions(prefix_caching=False)
# Tokens that a read-back must gain in `pair`: more than a block (128), which a proof needs.
THRESHOLD = 130


class Route(Protocol):
    """Starts a router in front of a cluster's engines; ``args`` go to its command line."""

    def __call__(self, engines: Cluster, *args: str) -> AbstractContextManager[RouterProcess]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines of their own come first: `pair` would go on taking cores beside them."""
    items.sort(key=lambda item: "pair" in getattr(item, "fixturenames", ()))


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
def compared(report: Callable[[str], None]) -> Iterator[Compared]:
    """What all tests of this session have compared with a recompute; shown at its end."""
    seen = Compared()
    yield seen
    report(f"oracle: {seen.summary()}")
    seen.check()


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
        forked=True,
        prefill=WITHOUT_PREFIX_CACHE,
        decode=WITHOUT_PREFIX_CACHE,
        # An engine that keeps blocks never sleeps, and would slow down all that runs after it.
        kv_connector_extra_config={
            "decoder_kv_blocks_ttl": 60,
            "kv_recompute_threshold": THRESHOLD,
            "kv_peers": ["127.0.0.1"],
        },
        args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # Else the first request for logprobs waits until a compiler has made a kernel for it.
        env={"TORCHDYNAMO_DISABLE": "1"},
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


@pytest.fixture(scope="session")
def route(tmp_path_factory: pytest.TempPathFactory) -> Route:
    """A router takes a second to start, so that each test can have one that counts from 0."""

    def start(engines: Cluster, *args: str) -> AbstractContextManager[RouterProcess]:
        return router(
            prefill=engines.prefill,
            decode=engines.decode,
            log_folder=tmp_path_factory.mktemp("router-logs"),
            args=args,
            report=lambda line: None,
        )

    return start
