"""Check that a file is the base release that a pin names, before anything is made from it."""

from __future__ import annotations

from email.parser import HeaderParser
from pathlib import Path

from tools.build.archive import WheelReader
from tools.build.errors import FetchError
from tools.build.hashing import sha256_file
from tools.build.pins import Base


def verify_file(base: Base, path: Path) -> None:
    """Size and sha256 of `path` are those of the pin; FetchError says expected and found."""
    verify_bytes(path, base.size, base.sha256)


def verify_bytes(path: Path, size: int, sha256: str) -> None:
    """As verify_file, for any pinned download."""
    try:
        found_size = path.stat().st_size
    except OSError as error:
        raise FetchError(
            f"error: cannot read {path}: {error.strerror}", next_step="check the path"
        ) from error
    if found_size != size:
        what = "is cut short" if found_size < size else "is too long"
        raise FetchError(
            f"error: {path} {what}",
            [("expected", f"{size} bytes"), ("found", f"{found_size} bytes")],
            "delete it and download it again",
        )
    found = sha256_file(path)
    if found != sha256:
        raise FetchError(
            f"error: {path} is not the pinned file",
            [("expected", f"sha256 {sha256}"), ("found", f"sha256 {found}")],
            "delete it and download it again; if it is right, somebody changed the release: stop",
        )


def verify_wheel(base: Base, reader: WheelReader) -> None:
    """Inside of the wheel: one dist-info, and name, version and tag as the pin says."""
    problems: list[tuple[str, str]] = []
    if reader.repeated:
        problems.append(("found", f"{reader.repeated} member name(s) more than once"))
    folders = {name.split("/", 1)[0] for name in reader.members if ".dist-info/" in name}
    if folders != {base.dist_info}:
        problems.append(("expected", f"one folder {base.dist_info}"))
        problems.append(("found", ", ".join(sorted(folders)) or "none"))
    else:
        metadata = headers(reader.read(f"{base.dist_info}/METADATA") or b"")
        wheel = headers(reader.read(f"{base.dist_info}/WHEEL") or b"")
        for what, expected, found in (
            ("METADATA Name", [base.name], metadata.get("Name", [])),
            ("METADATA Version", [base.version], metadata.get("Version", [])),
            ("WHEEL Tag", [base.wheel_tag], wheel.get("Tag", [])),
        ):
            if expected != found:
                problems.append(("expected", f"{what}: {expected[0]}"))
                problems.append(("found", f"{what}: {', '.join(found) or 'none'}"))
    if problems:
        raise FetchError(
            f"error: {reader.path} is not what upstream.toml says it is",
            problems,
            "mend the row of this base in upstream.toml",
        )


def headers(data: bytes) -> dict[str, list[str]]:
    """Headers of METADATA or WHEEL (RFC 822 form); a key may occur more than once."""
    message = HeaderParser().parsestr(data.decode("utf-8"), headersonly=True)
    found: dict[str, list[str]] = {}
    for key, value in message.items():
        found.setdefault(key, []).append(str(value).strip())
    return found
