"""Small trees and patch folders for the tests of patch handling."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tools.build.series.export import canonical_diff

HEAD = b"""Subject: Keep the lease
Why: it runs out
 too early
Why-not-overlay: it is one line inside a function
Forwarded: no
Origin: vendor
Drop-when: upstream does it
Test: tests/patches/test_lease.py::test_lease_is_kept
---
"""


def text(count: int = 40, **changed: str) -> bytes:
    """`count` different lines; `line7="x"` replaces the seventh, `line7=""` drops it."""
    lines = {number: f"line {number}\n" for number in range(1, count + 1)}
    for key, value in changed.items():
        lines[int(key.removeprefix("line"))] = f"{value}\n" if value else ""
    return "".join(lines.values()).encode()


@cache
def _diff(before: tuple[tuple[str, bytes], ...], after: tuple[tuple[str, bytes], ...]) -> bytes:
    return canonical_diff(dict(before), dict(after))


def diff_bytes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """The canonical diff; tests ask for the same few again and again."""
    return _diff(tuple(before.items()), tuple(after.items()))


def patch_bytes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    return HEAD + diff_bytes(before, after)


def make_series(
    folder: Path, base: Mapping[str, bytes], *changes: tuple[str, Mapping[str, bytes]]
) -> Path:
    """A patches folder whose patches turn `base` step by step into the given files."""
    state = dict(base)
    for name, after in changes:
        before = {path: state[path] for path in after if path in state}
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(patch_bytes(before, after))
        state.update(after)
    folder.mkdir(exist_ok=True)
    names = "".join(f"{name}\n" for name, _ in changes)
    (folder / "series").write_text(f"# our series\n{names}", encoding="utf-8")
    return folder


def make_wheel(path: Path, tree: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in tree.items():
            archive.writestr(name, data)
        archive.writestr(
            "vllm-2.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"
        )
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below a folder, to show that nothing was written."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
