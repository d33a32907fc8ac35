"""Which upstream tests are run, and what each is expected to do: the committed lists."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
SELECTION = HERE / "selection.toml"
STOCK = HERE / "stock-0.29.0.txt"
EXPECTED = HERE / "expected.toml"


@dataclass(frozen=True)
class Group:
    """Files of upstream tests that one process runs."""

    name: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """An upstream test that is to fail on our wheel, and the test of ours that stands for it."""

    test: str
    reason: str
    twin: str


def read_groups(path: Path = SELECTION) -> tuple[Group, ...]:
    return tuple(Group(row["name"], tuple(row["files"])) for row in _read(path)["group"])


def read_stock(path: Path = STOCK) -> dict[str, list[str]]:
    """Ids of the tests that pass on the stock wheel, by file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return by_file(line for line in lines if line and not line.startswith("#"))


def by_file(ids: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for test in ids:
        found.setdefault(file_of(test), []).append(test)
    return found


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read_differences(path: Path = EXPECTED) -> tuple[Difference, ...]:
    return tuple(Difference(**row) for row in _read(path)["known_differences"])


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
