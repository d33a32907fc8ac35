"""Apply patches strictly: the exact bytes at the exact line, all or nothing.

Fuzz and offsets are what let a patch land in a block that merely looks alike, so there are
none here. When a hunk does not fit, the error says what it would have needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tools.build.errors import PatchError
from tools.build.hashing import git_blob
from tools.build.patch import FilePatch, Hunk, Patch

Reader = Callable[[str], bytes | None]

PROTECTED = ("vllm/_version.py", "vllm/platforms/__init__.py")


@dataclass(frozen=True)
class Changed:
    """One file after the whole series: its bytes, and which patches made them."""

    path: str
    data: bytes
    patches: tuple[str, ...]


def is_protected(path: str) -> bool:
    """Files that no patch may touch.

    `vllm.__version__` enters NIXL's compatibility hash, the platform file differs between the
    two bases, and dist-info is the relabelling step's.
    """
    return path in PROTECTED or ".dist-info" in path.split("/", 1)[0]


def apply_series(patches: Iterable[Patch], read: Reader, release: str) -> dict[str, Changed]:
    """Apply all patches in order to the files that `read` gives; return the changed files.

    `read(path)` returns a file of the base or None. `release` is for messages, such as
    "vllm 0.29.0". Raises PatchError, and then nothing was changed anywhere.
    """
    changed: dict[str, Changed] = {}
    for patch in patches:
        staged: dict[str, Changed] = {}
        for file in patch.files:
            before = changed.get(file.path)
            data = before.data if before else read(file.path)
            done = apply_file(patch.name, file, data, release)
            names = (*(before.patches if before else ()), patch.name)
            staged[file.path] = Changed(file.path, done, names)
        changed.update(staged)
    return changed


def apply_file(name: str, file: FilePatch, data: bytes | None, release: str) -> bytes:
    """Apply one file's hunks; blob ids are checked before and after."""
    if is_protected(file.path):
        raise PatchError(
            f"error: patches/{name} touches {file.path}, which no patch may change",
            next_step="docs/patches.md says why; solve it in the overlay",
        )
    if file.adds_file:
        if data is not None:
            raise _failure(name, file, release, [("found", "the base has this file already")])
        data = b""
    elif data is None:
        raise _failure(
            name, file, release, [("found", "no such file in the base")], "check the path"
        )
    elif git_blob(data) == file.after:
        raise _failure(
            name,
            file,
            release,
            [("found", "the file is already as this patch leaves it (applied already)")],
            "drop the patch if the release has taken it: docs/patches.md",
        )
    lines = _split(data)
    out: list[bytes] = []
    at = 0
    for hunk in file.hunks:
        first = hunk.start - 1
        if first < at or tuple(lines[first : first + len(hunk.old)]) != hunk.old:
            raise _mismatch(name, file, hunk, lines, release)
        out += lines[at:first]
        out += hunk.new
        at = first + len(hunk.old)
    out += lines[at:]
    result = b"".join(out)
    if not file.adds_file and git_blob(data) != file.before:
        raise _failure(
            name,
            file,
            release,
            [
                ("expected", f"git blob {file.before} before the patch"),
                ("found", f"git blob {git_blob(data)}: it differs outside the patch's hunks"),
            ],
        )
    if git_blob(result) != file.after:
        raise _failure(
            name,
            file,
            release,
            [
                ("expected", f"git blob {file.after} after the patch"),
                ("found", f"git blob {git_blob(result)}: hunks and `index` line disagree"),
            ],
            "export the patch again: docs/patches.md",
        )
    return result


def _split(data: bytes) -> list[bytes]:
    # A diff knows \n only: a \r belongs to its line, so that CRLF survives.
    pieces = data.split(b"\n")
    lines = [piece + b"\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def _failure(
    name: str,
    file: FilePatch,
    release: str,
    details: list[tuple[str, str]],
    next_step: str = "make refresh TO=<version>, or drop the patch: docs/patches.md",
) -> PatchError:
    return PatchError(
        f"error: patches/{name} does not apply to {release}",
        [("file", file.path), *details],
        next_step,
    )


def _mismatch(
    name: str, file: FilePatch, hunk: Hunk, lines: list[bytes], release: str
) -> PatchError:
    first = hunk.start - 1
    offset = next(
        (
            k
            for k, line in enumerate(hunk.old)
            if first + k >= len(lines) or lines[first + k] != line
        ),
        0,
    )
    at = first + offset
    found = _show(lines[at]) if at < len(lines) else f"the file ends at line {len(lines)}"
    return PatchError(
        f"error: patches/{name} does not apply to {release}",
        [
            ("file", f"{file.path}, hunk {hunk.number} of {len(file.hunks)}, line {at + 1}"),
            ("expected", _show(hunk.old[offset]) if hunk.old else "a shorter file"),
            ("found", found),
            ("nearest", _nearest(hunk, lines)),
        ],
        "make refresh TO=<version>     (or drop the patch if upstream has taken it: "
        "see docs/patches.md)",
    )


def _show(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").rstrip("\n")
    shown = text.replace("\r", "\\r")
    return f'"{shown}"'


def _nearest(hunk: Hunk, lines: list[bytes]) -> str:
    """Where the hunk's block, or one that differs least from it, stands; a diagnosis only."""
    for block, what in ((hunk.old, "the same block"), (hunk.new, "the block as patched")):
        starts = _exact(block, lines)
        if what == "the block as patched" and starts and hunk.new != hunk.old:
            return f"{what} stands at line {starts[0] + 1} (applied already?)"
        if what == "the same block" and starts:
            moved = starts[0] + 1 - hunk.start
            more = f"; it stands at {len(starts)} places" if len(starts) > 1 else ""
            return f"the same block stands at line {starts[0] + 1} (moved by {moved:+d}{more})"
    best, start = max(
        ((_equal(hunk.old, lines, first), first) for first in range(len(lines))),
        default=(0, 0),
        key=lambda pair: (pair[0], -abs(pair[1] + 1 - hunk.start)),
    )
    differ = len(hunk.old) - best
    if best * 2 < len(hunk.old) or not best:
        return "no block in this file looks like it"
    lines_word = "one line differs" if differ == 1 else f"{differ} lines differ"
    return (
        f"a like block stands at line {start + 1} "
        f"(moved by {start + 1 - hunk.start:+d}, {lines_word})"
    )


def _exact(block: tuple[bytes, ...], lines: list[bytes]) -> list[int]:
    if not block:
        return []
    size = len(block)
    return [k for k in range(len(lines) - size + 1) if tuple(lines[k : k + size]) == block]


def _equal(block: tuple[bytes, ...], lines: list[bytes], first: int) -> int:
    return sum(a == b for a, b in zip(block, lines[first : first + len(block)], strict=False))
