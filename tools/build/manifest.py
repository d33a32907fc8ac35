"""The manifest beside the wheel: what it was made from, and each file that differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.build.archive import WheelReader
from tools.build.errors import ConfigError
from tools.build.hashing import sha256_hex
from tools.build.patch import Patch
from tools.build.pins import Base, Label
from tools.build.plan import Member

FORMAT = 1


@dataclass(frozen=True)
class PatchClaim:
    name: str
    sha256: str
    subject: str
    origin: str


@dataclass(frozen=True)
class FileClaim:
    """A member that is not simply the base's. Hashes are hex sha256; None where there is none."""

    path: str
    change: str
    before: str | None
    after: str
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Claims about one output wheel, which `prove` checks against the wheel and the base."""

    file: str
    name: str
    version: str
    tag: str
    size: int
    sha256: str
    base: Base
    patches: tuple[PatchClaim, ...]
    files: tuple[FileClaim, ...]

    def to_json(self) -> str:
        output = {
            key: getattr(self, key) for key in ("file", "name", "version", "tag", "size", "sha256")
        }
        data = {
            "format": FORMAT,
            "output": output,
            "base": asdict(self.base),
            "patches": [asdict(patch) for patch in self.patches],
            "files": [asdict(file) for file in self.files],
        }
        return json.dumps(data, indent=1) + "\n"


def patch_claims(patches: Sequence[Patch]) -> tuple[PatchClaim, ...]:
    return tuple(
        PatchClaim(p.name, p.sha256, p.headers.get("Subject", ""), p.headers.get("Origin", ""))
        for p in patches
    )


def file_claims(reader: WheelReader, members: Sequence[Member]) -> tuple[FileClaim, ...]:
    """One claim per member with bytes of its own, and per member that only moved."""
    claims: list[FileClaim] = []
    for member in members:
        if member.change == "untouched":
            continue
        before = reader.read(member.source) if member.source else None
        after = member.data if member.data is not None else before
        assert after is not None  # a member without data has a source
        claims.append(
            FileClaim(
                member.path,
                member.change,
                None if before is None else sha256_hex(before),
                sha256_hex(after),
                member.patches,
            )
        )
    return tuple(claims)


def make_manifest(
    base: Base,
    label: Label,
    output: tuple[int, str],
    patches: tuple[PatchClaim, ...],
    files: tuple[FileClaim, ...],
) -> Manifest:
    """`output` is size and sha256 of the wheel as written."""
    size, sha256 = output
    file = label.wheel_name(base.tag)
    return Manifest(file, label.name, label.version, base.tag, size, sha256, base, patches, files)


def manifest_path(wheel: Path) -> Path:
    return wheel.with_name(wheel.name.removesuffix(".whl") + ".manifest.json")


def read_manifest(path: Path) -> Manifest:
    """Read a manifest that `to_json` wrote."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']} instead of {FORMAT}")
        return Manifest(
            **data["output"],
            base=Base(**data["base"]),
            patches=tuple(PatchClaim(**row) for row in data["patches"]),
            files=tuple(
                FileClaim(**{**row, "patches": tuple(row["patches"])}) for row in data["files"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"error: {path} is not a manifest of this tool",
            [("found", f"{type(error).__name__}: {error}")],
            "build the wheel again; the manifest is written beside it",
        ) from error
