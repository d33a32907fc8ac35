"""The tiny model's configuration, which the simulated engines are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.cluster import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
