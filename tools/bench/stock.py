"""The base release as it is: its Python tree, and its sample proxy."""

from __future__ import annotations

import os
import platform
import zipfile
from collections.abc import Callable
from pathlib import Path

from tools.build.errors import BuildError
from tools.build.fetch import cache_folder, fetch
from tools.build.pins import read_pins
from tools.build.pipeline import Checkout, Options, select
from tools.build.sdist import extract, fetch_sdist

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_PROXY = "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py"
MULTI_TURN = "benchmarks/multi_turn"
Say = Callable[[str], None]

__all__ = ["BuildError", "source_file", "stock_tree"]


def stock_tree(device: str, into: Path, say: Say) -> Path:
    """Unpack the base release: first on the path, it stands in for the one installed here."""
    if into.exists():
        return into
    here = {**os.environ, "DEVICE": device, "ARCH": platform.machine()}
    options = Options.from_environment(here, Path("dist"))
    pins, base, _ = select(Checkout(ROOT), options)
    wheel = fetch(pins, base, options.cache, options.upstream_wheel, say)
    partial = into.with_name(into.name + ".partial")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            partial, [name for name in archive.namelist() if name.startswith("vllm/")]
        )
    partial.rename(into)
    return into


def source_file(wanted: str, into: Path, say: Say) -> Path:
    """A file or folder of the base release's source: of VLLM_SRC, else of the pinned archive."""
    if own := os.environ.get("VLLM_SRC"):
        return Path(own) / wanted
    if not into.exists():
        local = os.environ.get("UPSTREAM_SDIST")
        pin = read_pins(ROOT / "upstream.toml").sdist()
        archive = fetch_sdist(
            pin, cache_folder(dict(os.environ)), Path(local) if local else None, say
        )
        extract(archive, [wanted], into)
    return into / wanted
