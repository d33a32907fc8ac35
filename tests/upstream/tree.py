"""Lay out what the upstream tests need: their own files and the models that they name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.upstream.hub import make_hub
from tests.upstream.processes import Places
from tools.build.fetch import cache_folder
from tools.build.pins import read_pins
from tools.build.sdist import extract, fetch_sdist

ROOT = Path(__file__).parents[2]

#: Without `vllm/`, which would be imported in place of the installed wheel.
WANTED = ("tests", "pyproject.toml")


def lay_out(folder: Path, say: Callable[[str], None]) -> Places:
    """Fetch the pinned source distribution (or take UPSTREAM_SDIST) and lay it out in `folder`."""
    pin = read_pins(ROOT / "upstream.toml").sdist()
    local = os.environ.get("UPSTREAM_SDIST")
    cache = cache_folder(dict(os.environ))
    archive = fetch_sdist(pin, cache, Path(local) if local else None, say)
    places = Places(folder / "tree", folder / "hub", folder / "logs")
    extract(archive, WANTED, places.tree)
    make_hub(places.hub)
    return places
