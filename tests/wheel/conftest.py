"""The CPU wheel that `make` built, and fresh environments to install it into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.build.manifest import Manifest, manifest_path, read_manifest
from tools.build.pipeline import Checkout, Options

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def checkout() -> Checkout:
    return Checkout(ROOT)


@pytest.fixture(scope="session")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("vllm-*+cpu.bidir.*_x86_64.whl"))
    assert len(found) == 1, "build the CPU wheel first: make wheel DEVICE=cpu"
    return found[0]


@pytest.fixture(scope="session")
def manifest(wheel: Path) -> Manifest:
    return read_manifest(manifest_path(wheel))


@pytest.fixture(scope="session")
def cpu_options() -> Options:
    environ = {**os.environ, "DEVICE": "cpu", "ARCH": "x86_64"}
    return Options.from_environment(environ, ROOT / "dist")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An empty environment; the requirements of vllm are seen through a .pth file."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder
