"""Reads a chart's files as a reader would: its texts, its series, its pixels."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Chart:
    """`texts`: all that is written. `points`: of each named series or bar, those of its path.

    `colours`: different ones in the PNG; `size`: its pixels.
    """

    texts: tuple[str, ...]
    points: dict[str, int]
    colours: int
    size: tuple[int, int]


def read_chart(folder: Path, name: str) -> Chart:
    """A chart's SVG and PNG together."""
    from PIL import Image

    root = ET.fromstring((folder / f"{name}.svg").read_text(encoding="utf-8"))
    texts = tuple("".join(one.itertext()).strip() for one in root.iter(f"{_SVG}text"))
    points: dict[str, int] = {}
    for group in root.iter(f"{_SVG}g"):
        gid = group.get("id", "")
        if gid.startswith(name):
            paths = [path.get("d", "") for path in group.findall(f"{_SVG}path")]
            longest = max((path.count("L") + path.count("M") for path in paths), default=0)
            points[gid] = points.get(gid, 0) + longest
    with Image.open(folder / f"{name}.png") as image:
        pixels = image.convert("RGB")
        found = pixels.getcolors(1 << 24)
        return Chart(texts, points, len(found or ()), image.size)
