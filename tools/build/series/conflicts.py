"""Say where a three-way merge met a conflict: file, hunk, and the lines of all three sides."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from tools.build.patch import FilePatch, Patch
from tools.build.series.scratch import Scratch

_SHOWN_LINES = 20


@dataclass(frozen=True)
class Trees:
    """Both releases' files by path, and the new release's version for messages."""

    old: Mapping[str, bytes]
    new: Mapping[str, bytes]
    to_version: str


@dataclass(frozen=True)
class Block:
    """One block between conflict markers, at 1-based lines `first` to `last` of the file."""

    first: int
    last: int
    found: tuple[bytes, ...]
    expected: tuple[bytes, ...]
    patched: tuple[bytes, ...]


def unmerged(repo: Scratch) -> dict[str, set[int]]:
    """Unmerged paths and which sides each has: 1 before the patch, 2 new release, 3 patched."""
    stages: dict[str, set[int]] = {}
    for record in repo.git("ls-files", "--unmerged", "-z").out.split(b"\0"):
        if record:
            facts, _, path = record.partition(b"\t")
            stages.setdefault(path.decode(), set()).add(int(facts.split()[2]))
    return stages


def describe(
    repo: Scratch, patch: Patch, stages: Mapping[str, set[int]], trees: Trees
) -> list[tuple[str, str]]:
    """Detail rows for an error: every place of conflict, and the lines of the first ones."""
    details: list[tuple[str, str]] = []
    left = _SHOWN_LINES
    for path, sides in sorted(stages.items()):
        if sides != {1, 2, 3}:
            details.append(("file", f"{path}: {_whole_file(path, sides, trees)}"))
            continue
        file = next((file for file in patch.files if file.path == path), None)
        before = split_lines(repo.file(":1", path))
        after = split_lines(repo.file(":3", path))
        blocks = conflict_blocks((repo.root / path).read_bytes())
        for number, block in enumerate(blocks, 1):
            place = (
                f"{path}{_hunk_of(file, block, before, after)}, conflict {number} of "
                f"{len(blocks)} (lines {block.first}-{block.last} of the scratch file)"
            )
            details.append(("file", place))
            if left > 0:
                details += _sides(block, left)
                left -= len(block.expected) + len(block.found) + len(block.patched)
    return details


def _sides(block: Block, limit: int) -> list[tuple[str, str]]:
    return [
        ("expected", _some(block.expected, limit)),
        ("found", _some(block.found, limit)),
        ("patched", _some(block.patched, limit)),
    ]


def conflict_blocks(data: bytes) -> list[Block]:
    """The blocks between conflict markers (git's diff3 style) of a merged file."""
    blocks: list[Block] = []
    sides: list[list[bytes]] = []
    first = 0
    for number, line in enumerate(split_lines(data), 1):
        if line.startswith(b"<<<<<<< ") and not sides:
            first, sides = number, [[]]
        elif sides and _opens(len(sides), line):
            sides.append([])
        elif len(sides) == 3 and line.startswith(b">>>>>>> "):
            found, expected, patched = (tuple(side) for side in sides)
            blocks.append(Block(first, number, found, expected, patched))
            sides = []
        elif sides:
            sides[-1].append(line)
    return blocks


def _opens(side: int, line: bytes) -> bool:
    """Whether a line ends side number `side` of a block and begins the next one."""
    if side == 1:
        return line.startswith(b"||||||| ")
    return side == 2 and line.rstrip(b"\r\n") == b"======="


def _hunk_of(file: FilePatch | None, block: Block, before: list[bytes], after: list[bytes]) -> str:
    """Which hunks of the patch a block belongs to, by where its lines stand on either side."""
    if file is None:
        return ""
    numbers = [
        hunk.number
        for hunk in file.hunks
        if _overlaps(block.expected, before, hunk.start, len(hunk.old))
        and _overlaps(block.patched, after, hunk.new_start, len(hunk.new))
    ]
    if not numbers:
        return ""
    word = "hunk" if len(numbers) == 1 else "hunks"
    return f", {word} {', '.join(map(str, numbers))} of {len(file.hunks)}"


def _overlaps(block: tuple[bytes, ...], lines: list[bytes], start: int, size: int) -> bool:
    if not block:
        return True
    return any(
        tuple(lines[at : at + len(block)]) == block
        for at in range(max(0, start - len(block)), start - 1 + size)
    )


def _whole_file(path: str, sides: set[int], trees: Trees) -> str:
    if 2 not in sides and 1 in sides:
        name = path.rsplit("/", 1)[-1]
        same = [p for p in trees.new if p.endswith(f"/{name}") and p not in trees.old]
        hint = f"; a new file of this name is {', '.join(sorted(same))}" if same else ""
        return f"vllm {trees.to_version} has no such file any more{hint} (git rm it)"
    if sides == {2, 3}:
        return f"vllm {trees.to_version} has added this file too, with another text"
    return f"its folder or name has changed in vllm {trees.to_version}"


def _some(lines: tuple[bytes, ...], limit: int) -> str:
    if not lines:
        return "(no line)"
    # A third of the room for each of the three sides.
    room = max(2, limit // 3)
    text = [line.decode("utf-8", "backslashreplace").rstrip("\n") for line in lines]
    shown = [f'"{line}"'.replace("\r", "\\r") for line in text[:room]]
    if len(text) > room:
        shown.append(f"... and {len(text) - room} more line(s)")
    return "\n".join(shown)


def split_lines(data: bytes) -> list[bytes]:
    """Lines as git counts them: only a line feed ends one."""
    return io.BytesIO(data).readlines()
