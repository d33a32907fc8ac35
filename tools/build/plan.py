"""What goes into the output wheel: every member, where it comes from, and its bytes if new.

Everything that the output depends on is decided here, from bytes to bytes; `write` only lays
it down, and `manifest` and `sbom` only describe it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.build.apply import apply_series
from tools.build.archive import WheelReader
from tools.build.errors import ConfigError, OverlayError
from tools.build.note import add_note
from tools.build.overlay import shadowed
from tools.build.patch import Patch
from tools.build.pins import Base, Label
from tools.build.relabel import (
    NOTICE_FILE,
    merge_entry_points,
    relabel_metadata,
    relabel_wheel,
)

SBOM_NAME = "sboms/vllm-bidir.cdx.json"


@dataclass(frozen=True)
class Member:
    """One member of the output. `source` is the base's member; `data` is None if copied raw."""

    path: str
    change: str
    source: str | None
    data: bytes | None
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """What of ours goes into a wheel."""

    patches: Sequence[Patch]
    overlay: Mapping[str, bytes]
    entry_points: str
    notice: bytes


def plan_members(
    base: Base, label: Label, reader: WheelReader, sources: Sources
) -> tuple[Member, ...]:
    """Members in the order in which they are written, without SBOM and RECORD.

    `change` is one of: untouched, moved (only the dist-info folder's name changes), patched,
    added, rewritten. Raises PatchError, OverlayError or ConfigError.
    """
    release = f"{base.name} {base.version}"
    changed = apply_series(sources.patches, reader.read, release)
    rewritten = _dist_info(base, label, reader, sources)
    members: list[Member] = []
    for name in reader.members:
        if name == f"{base.dist_info}/RECORD":
            continue
        path = name
        if name.startswith(f"{base.dist_info}/"):
            path = label.dist_info + name.removeprefix(base.dist_info)
        if name in changed:
            done = changed[name]
            data = add_note(name, done.data, done.patches)
            members.append(Member(path, "patched", name, data, done.patches))
        elif name in rewritten:
            members.append(Member(path, "rewritten", name, rewritten[name]))
        else:
            members.append(Member(path, "moved" if path != name else "untouched", name, None))
    taken = {member.path for member in members}
    for path, done in changed.items():
        if path not in reader.members:
            members.append(Member(path, "added", None, done.data, done.patches))
            taken.add(path)
    clashes = shadowed(sources.overlay, taken)
    if clashes:
        raise OverlayError(
            "error: the overlay cannot be laid over the patched base",
            [("found", clash) for clash in clashes],
            "move these files to new paths",
        )
    notice = f"{label.dist_info}/licenses/{NOTICE_FILE}"
    if notice in taken:
        raise ConfigError(f"error: the base has a {notice} of its own: merge the two by hand")
    added = {**sources.overlay, notice: sources.notice}
    members += [Member(path, "added", None, data) for path, data in added.items()]
    return tuple(members)


def _dist_info(base: Base, label: Label, reader: WheelReader, sources: Sources) -> dict[str, bytes]:
    def text(name: str) -> bytes:
        data = reader.read(f"{base.dist_info}/{name}")
        if data is None:
            raise ConfigError(f"error: {base.file} has no {base.dist_info}/{name}")
        return data

    rewritten = {
        f"{base.dist_info}/METADATA": relabel_metadata(base, label, text("METADATA")),
        f"{base.dist_info}/WHEEL": relabel_wheel(base, text("WHEEL")),
    }
    if sources.entry_points:
        merged = merge_entry_points(text("entry_points.txt").decode("utf-8"), sources.entry_points)
        rewritten[f"{base.dist_info}/entry_points.txt"] = merged.encode("utf-8")
    return rewritten
