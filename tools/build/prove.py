"""Reopen a finished wheel and check that it is what its manifest says, and nothing else.

Nothing that the build had in memory is trusted: names, hashes and bytes are read back from the
file and compared with the manifest and with the pinned base.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import installer.exceptions
import installer.sources

from tools.build.archive import WheelReader
from tools.build.errors import FetchError, ProofError
from tools.build.hashing import record_hash, sha256_file
from tools.build.manifest import FileClaim, Manifest
from tools.build.record import Row, parse_record
from tools.build.verify import headers


@dataclass(frozen=True)
class Proof:
    """What was checked: numbers of members by kind, all found right."""

    members: int
    untouched: int
    patched: int
    added: int


def prove(wheel: Path, base_wheel: Path, manifest: Manifest) -> Proof:
    """Check `wheel` against its manifest and its base; ProofError lists all that is wrong."""
    problems = list(_whole_file(wheel, manifest))
    try:
        with WheelReader(wheel) as ours, WheelReader(base_wheel) as base:
            record = _record(ours, manifest)
            problems += _labels(ours, manifest)
            problems += _names(ours, record)
            digests, unreadable = _digests(ours)
            problems += unreadable
            problems += _hashes(digests, record)
            problems += _claims(ours, digests, manifest)
            problems += _base(ours, base, manifest)
            problems += _compile(ours, manifest)
            counts = _count(ours, manifest)
        problems += _second_opinion(wheel)
    except FetchError as error:
        problems.append(str(error.subject))
        counts = Proof(0, 0, 0, 0)
    if problems:
        raise ProofError.collect(
            f"error: {wheel.name} is not what it should be",
            problems,
            "do not ship it; build it again",
        )
    return counts


def _whole_file(wheel: Path, manifest: Manifest) -> Iterator[str]:
    if wheel.name != manifest.file:
        yield f"file name {wheel.name} instead of {manifest.file}"
    size, sha256 = wheel.stat().st_size, sha256_file(wheel)
    if (size, sha256) != (manifest.size, manifest.sha256):
        yield (
            f"{size} bytes with sha256 {sha256} instead of "
            f"{manifest.size} bytes with sha256 {manifest.sha256}"
        )


def _dist_info(manifest: Manifest) -> str:
    return f"{manifest.name}-{manifest.version}.dist-info"


def _record(ours: WheelReader, manifest: Manifest) -> list[Row]:
    name = f"{_dist_info(manifest)}/RECORD"
    data = ours.read(name)
    if data is None:
        raise ProofError.collect(f"error: {ours.path.name} has no {name}", ["no RECORD"])
    try:
        return parse_record(data)
    except ValueError as error:
        raise ProofError.collect(
            f"error: {ours.path.name} has a bad RECORD", [str(error)]
        ) from error


def _labels(ours: WheelReader, manifest: Manifest) -> Iterator[str]:
    """Name, version and tag agree in the file name, the folder, METADATA and WHEEL."""
    expected = f"{manifest.name}-{manifest.version}-{manifest.tag}.whl"
    if ours.path.name != expected:
        yield f"file name {ours.path.name} instead of {expected}"
    folders = {name.split("/", 1)[0] for name in ours.members if ".dist-info/" in name}
    if folders != {_dist_info(manifest)}:
        yield f"dist-info folder(s) {sorted(folders)} instead of {_dist_info(manifest)}"
        return
    metadata = headers(ours.read(f"{_dist_info(manifest)}/METADATA") or b"")
    wheel = headers(ours.read(f"{_dist_info(manifest)}/WHEEL") or b"")
    for what, found, value in (
        ("METADATA Name", metadata.get("Name"), manifest.name),
        ("METADATA Version", metadata.get("Version"), manifest.version),
        ("WHEEL Tag", wheel.get("Tag"), manifest.tag),
    ):
        if found != [value]:
            yield f"{what} is {found} instead of {value}"
    if ("cpu" in manifest.version) != (manifest.base.device == "cpu"):
        yield f"version {manifest.version} would make vLLM choose the wrong platform"


def _names(ours: WheelReader, record: list[Row]) -> Iterator[str]:
    """RECORD and members match one to one, both ways."""
    if ours.repeated:
        yield f"{ours.repeated} member name(s) more than once"
    listed = [row.path for row in record]
    for path in sorted(
        {path for path in listed if listed.count(path) > 1}
        if (len(set(listed)) != len(listed))
        else ()
    ):
        yield f"RECORD lists {path} more than once"
    for path in sorted(set(listed) - set(ours.members)):
        yield f"RECORD lists {path}, which is not in the wheel"
    for path in sorted(set(ours.members) - set(listed)):
        yield f"{path} is in the wheel but not in RECORD"


def _digests(ours: WheelReader) -> tuple[dict[str, tuple[bytes, int]], list[str]]:
    """sha256 and size of every member as it unpacks."""
    found: dict[str, tuple[bytes, int]] = {}
    problems: list[str] = []
    for name in ours.members:
        digest, size = hashlib.sha256(), 0
        try:
            for piece in ours.pieces(name):
                digest.update(piece)
                size += len(piece)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            problems.append(f"{name} cannot be unpacked: {error}")
        else:
            found[name] = digest.digest(), size
    return found, problems


def _hashes(digests: dict[str, tuple[bytes, int]], record: list[Row]) -> Iterator[str]:
    for row in record:
        if row.path.endswith(".dist-info/RECORD"):
            if row.hash or row.size:
                yield "RECORD has a hash or size for itself"
        elif row.path in digests:
            digest, size = digests[row.path]
            if (record_hash(digest), str(size)) != (row.hash, row.size):
                yield f"{row.path} does not have the hash and size that RECORD gives"


def _claims(
    ours: WheelReader, digests: dict[str, tuple[bytes, int]], manifest: Manifest
) -> Iterator[str]:
    for claim in manifest.files:
        if claim.path not in ours.members:
            yield f"{claim.path} is in the manifest but not in the wheel"
        elif claim.path in digests and digests[claim.path][0].hex() != claim.after:
            yield f"{claim.path} has not the content that the manifest gives"


def _base(ours: WheelReader, base: WheelReader, manifest: Manifest) -> Iterator[str]:
    """Each member is claimed as ours, or is the base's byte for byte; nothing was lost."""
    if (base.path.stat().st_size, sha256_file(base.path)) != (
        manifest.base.size,
        manifest.base.sha256,
    ):
        yield f"{base.path} is not the base that the manifest names"
        return
    claims = {claim.path: claim for claim in manifest.files}
    theirs = f"{manifest.base.dist_info}/"
    for source in base.members:
        path = source
        if source.startswith(theirs):
            path = f"{_dist_info(manifest)}/{source.removeprefix(theirs)}"
        if path.endswith(".dist-info/RECORD"):
            continue
        if path not in ours.members:
            yield f"{source} of the base is missing"
            continue
        claim = claims.get(path)
        if claim is None or claim.change == "moved":
            if not _same(ours, path, base, source):
                yield f"{path} differs from the base but is not claimed as changed"
        elif claim.change == "added":
            yield f"{path} is claimed as added but the base has it"
        elif hashlib.sha256(base.read(source) or b"").hexdigest() != claim.before:
            yield f"{path}: the base's file is not the one that the manifest gives"
    mine = f"{_dist_info(manifest)}/"
    for path in ours.members:
        source = f"{theirs}{path.removeprefix(mine)}" if path.startswith(mine) else path
        if source not in base.members and path not in claims:
            yield f"{path} is neither the base's nor claimed as added"


def _same(ours: WheelReader, path: str, base: WheelReader, source: str) -> bool:
    mine, theirs = ours.members[path], base.members[source]
    facts = [
        (info.compress_type, info.CRC, info.file_size, info.compress_size, info.external_attr)
        for info in (mine, theirs)
    ]
    return facts[0] == facts[1] and all(
        a == b for a, b in zip_longest(ours.raw(path), base.raw(source))
    )


def _compile(ours: WheelReader, manifest: Manifest) -> Iterator[str]:
    for claim in manifest.files:
        if claim.path.endswith(".py") and claim.path in ours.members:
            try:
                compile(ours.read(claim.path) or b"", claim.path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                yield f"{claim.path} does not compile: {error}"


def _second_opinion(wheel: Path) -> Iterator[str]:
    """What `installer`, the library that installs wheels for others, thinks of it."""
    with installer.sources.WheelFile.open(wheel) as source:
        try:
            source.validate_record()
        except source.validation_error as error:
            yield from (f"installer: {issue}" for issue in error.issues)
        except (installer.exceptions.InstallerError, zipfile.BadZipFile, OSError) as error:
            yield f"installer: {error}"


def _count(ours: WheelReader, manifest: Manifest) -> Proof:
    def number(change: str) -> int:
        return sum(claim.change == change for claim in manifest.files)

    return Proof(
        members=len(ours.members),
        untouched=len(ours.members) - 1 - sum(_is_ours(claim) for claim in manifest.files),
        patched=number("patched"),
        added=number("added"),
    )


def _is_ours(claim: FileClaim) -> bool:
    return claim.change != "moved"
