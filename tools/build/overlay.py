"""Collect the overlay: new files that are laid over the base, and new entry points."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tools.build.errors import OverlayError
from tools.build.patch import check_path

ENTRY_POINTS = "entry_points.txt"
# The base's package, and modules of ours that must import without it.
PACKAGE, MODULES = "vllm/", "vllm_bidir_"


def read_overlay(folder: Path, taken: Collection[str]) -> dict[str, bytes]:
    """Overlay files by their path in the wheel, sorted.

    `taken` are the base's member names (and files that patches add): an overlay file at, above
    or below one of them is an error, also when only upper and lower case differ. All problems
    are listed in one OverlayError.
    """
    problems: list[str] = []
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in path.parts or name == ENTRY_POINTS or path.is_dir():
            continue
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is not a regular file")
        elif not name.startswith((PACKAGE, MODULES)):
            problems.append(f"{name} is outside {PACKAGE} and is not a {MODULES}* module")
        else:
            check_path(str(folder), name)
            files[name] = path.read_bytes()
    problems += shadowed(files, taken)
    if problems:
        raise OverlayError(
            f"error: {folder} cannot be laid over the base",
            [("found", problem) for problem in problems],
            "move these files to new paths; a change of a base file is a patch (docs/patches.md)",
        )
    return files


def shadowed(files: Collection[str], taken: Collection[str]) -> list[str]:
    """Which overlay paths would replace, or stand in the way of, a base file."""
    owners = {name.lower(): name for name in taken}
    folders = {parent.lower() for name in taken for parent in _parents(name)}
    problems: list[str] = []
    for name in files:
        if name.lower() in owners:
            problems.append(f"{name} shadows the base file {owners[name.lower()]}")
        elif name.lower() in folders:
            problems.append(f"{name} is a folder in the base")
        for parent in _parents(name):
            if parent.lower() in owners:
                problems.append(f"{name} needs a folder where the base has the file {parent}")
    return problems


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]


def read_entry_points(folder: Path) -> str:
    """Text of overlay/entry_points.txt, or nothing."""
    path = folder / ENTRY_POINTS
    return path.read_text(encoding="utf-8") if path.exists() else ""
