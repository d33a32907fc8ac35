"""Say how far a patch has drifted: what a merge onto another release did to its hunks."""

from __future__ import annotations

from tools.build.patch import FilePatch, Hunk, Patch, parse_diff

CLEAN = "clean"
MOVED = "merged with offset"
DIFFERS = "merged, lines around differ"
PARTLY = "merged, partly taken upstream"


def compare(patch: Patch, diff: bytes) -> tuple[str, str]:
    """How a merged patch differs from the one that went in."""
    files = {file.path: file for file in parse_diff(patch.name, diff)}
    rank = (CLEAN, MOVED, DIFFERS, PARTLY)
    status = CLEAN
    details: list[str] = []
    for old in patch.files:
        found, detail = _compare_file(old, files.pop(old.path, None))
        status = max(status, found, key=rank.index)
        if detail:
            details.append(f"{old.path}: {detail}")
    if files:
        status = max(status, DIFFERS, key=rank.index)
        details += [f"{path}: now changed here" for path in files]
    return status, "\n".join(details)


def _compare_file(old: FilePatch, new: FilePatch | None) -> tuple[str, str]:
    if new is None:
        return PARTLY, "no change is left here (taken upstream, or the file has moved)"
    if _added(old.hunks) != _added(new.hunks):
        return PARTLY, f"{len(old.hunks)} hunk(s) before, {len(new.hunks)} now; compare them"
    moves = sorted({n.start - o.start for o, n in zip(old.hunks, new.hunks, strict=False)})
    if [(h.old, h.new) for h in old.hunks] != [(h.old, h.new) for h in new.hunks]:
        return DIFFERS, f"moved by {_span(moves)}, lines around differ"
    return (MOVED, f"moved by {_span(moves)}") if moves != [0] else (CLEAN, "")


def _added(hunks: tuple[Hunk, ...]) -> list[bytes]:
    """The lines that stand in the hunks' new text more often than in their old text, sorted."""
    lines: list[bytes] = []
    for hunk in hunks:
        left = list(hunk.old)
        for line in hunk.new:
            if line in left:
                left.remove(line)
            else:
                lines.append(line)
    return sorted(lines)


def _span(moves: list[int]) -> str:
    return f"{moves[0]:+d}" if len(moves) == 1 else f"{moves[0]:+d} to {moves[-1]:+d}"
