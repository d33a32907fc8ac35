"""Parse patch files: the header that says why, and the diff that says what.

`unidiff` reads the diff; this module adds what it leaves open: bytes instead of text, full
git blob ids, path safety, and refusal of everything that a strict applier cannot check.
A diff is parsed as latin-1, which maps each byte to one character and back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchedFile, PatchSet

from tools.build.errors import ConfigError
from tools.build.hashing import git_blob, sha256_hex

SEPARATOR = b"---\n"
NO_BLOB = "0" * 40
EMPTY_BLOB = git_blob(b"")
_HEADER = re.compile(r"([A-Z][A-Za-z-]*): ?(.*)")
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$", re.MULTILINE)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_REFUSED = ("rename from", "copy from", "old mode", "deleted file mode", "GIT binary patch")


@dataclass(frozen=True)
class Hunk:
    """One hunk: the lines it expects at `start` (1-based) and the lines it leaves there."""

    number: int
    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    new_start: int


@dataclass(frozen=True)
class FilePatch:
    """The change of one file. `before` is NO_BLOB for a file that the patch adds."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]

    @property
    def adds_file(self) -> bool:
        return self.before == NO_BLOB


@dataclass(frozen=True)
class Patch:
    """One file of patches/. `name` is its path relative to patches/, as the series has it."""

    name: str
    headers: Mapping[str, str]
    files: tuple[FilePatch, ...]
    raw: bytes

    @property
    def sha256(self) -> str:
        return sha256_hex(self.raw)


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse one patch file of ours: headers, `---`, then a `--full-index` git diff."""
    head, separator, diff = data.partition(b"\n" + SEPARATOR)
    if not separator:
        raise ConfigError(
            f"error: {name} has no line `---` between its headers and its diff",
            next_step="see docs/patches.md for the form of a patch file",
        )
    files = parse_diff(name, diff)
    for file in files:
        for blob in (file.before, file.after):
            if len(blob) != 40:
                raise ConfigError(
                    f"error: {name} has a short blob id for {file.path}",
                    [("expected", "40 hex digits"), ("found", blob)],
                    "export it with `git diff --full-index`",
                )
    return Patch(name, parse_headers(name, head + b"\n"), files, data)


def parse_headers(name: str, head: bytes) -> dict[str, str]:
    """`Key: value` lines; a continuation line starts with a blank."""
    headers: dict[str, str] = {}
    key = ""
    for line in head.decode("utf-8").splitlines():
        if line.startswith((" ", "\t")) and key:
            headers[key] = f"{headers[key]}\n{line.strip()}".strip()
            continue
        match = _HEADER.fullmatch(line)
        if match is None or match[1] in headers:
            what = "is not a `Key: value` line" if match is None else "repeats a header"
            raise ConfigError(f"error: {name}: {line!r} {what}")
        key = match[1]
        headers[key] = match[2].strip()
    return headers


def parse_diff(name: str, diff: bytes) -> tuple[FilePatch, ...]:
    """Parse a git diff; refuse what is not an exact change of, or addition of, text files."""
    text = diff.decode("latin-1")
    try:
        parsed = PatchSet(text)
    except UnidiffParseError as error:
        raise ConfigError(f"error: {name} is not a well-formed diff: {error}") from error
    if not parsed:
        raise ConfigError(f"error: {name} changes no file")
    if str(parsed) != _HUNK.sub(_full_header, text):
        raise ConfigError(
            f"error: {name} holds text that belongs to no file of its diff",
            next_step="export it again; nothing may stand before, between or after the diffs",
        )
    files = tuple(_file_patch(name, file) for file in parsed)
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        raise ConfigError(f"error: {name} changes the same file twice")
    return files


def _full_header(match: re.Match[str]) -> str:
    # git leaves out a length of 1, unidiff writes it.
    return f"@@ -{match[1]},{match[2] or 1} +{match[3]},{match[4] or 1} @@"


def check_path(name: str, path: str) -> None:
    """Refuse a path that could leave the wheel's root or means different things to others."""
    parts = path.split("/")
    if (
        not path
        or path.startswith("/")
        or "\\" in path
        or ":" in parts[0]
        or any(part in ("", ".", "..") for part in parts)
        or any(ord(char) < 32 or ord(char) == 127 for char in path)
    ):
        raise ConfigError(
            f"error: {name} names an unsafe path",
            [("found", repr(path)), ("expected", "a plain relative path below the wheel's root")],
        )


def _file_patch(name: str, file: PatchedFile) -> FilePatch:
    info = "" if file.patch_info is None else str(file.patch_info)
    path = _plain_path(name, file)
    refused = [word for word in _REFUSED if re.search(rf"^{word}", info, re.MULTILINE)]
    if refused or file.is_binary_file:
        raise ConfigError(
            f"error: {name} does more to {path} than change its text",
            [("found", ", ".join(refused) or "binary change")],
            "a patch may change or add text files only",
        )
    index = _INDEX.search(info)
    if index is None:
        raise ConfigError(f"error: {name} has no `index` line for {path}")
    added = file.source_file == "/dev/null"
    if not file and not (added and EMPTY_BLOB.startswith(index[2])):
        raise ConfigError(f"error: {name} has no hunk for {path}")
    hunks = tuple(_hunk(name, path, number, hunk) for number, hunk in enumerate(file, 1))
    return FilePatch(path, NO_BLOB if added else index[1], index[2], hunks)


def _plain_path(name: str, file: PatchedFile) -> str:
    source, target = file.source_file, file.target_file
    if target == "/dev/null":
        raise ConfigError(f"error: {name} deletes {source}", next_step="a patch may not delete")
    if not target.startswith("b/") or (source != "/dev/null" and source[2:] != target[2:]):
        raise ConfigError(f"error: {name}: {source} -> {target} is not the same file on both sides")
    path = target[2:]
    check_path(name, path)
    return path


def _hunk(name: str, path: str, number: int, hunk: ParsedHunk) -> Hunk:
    old: list[bytes] = []
    new: list[bytes] = []
    last: list[list[bytes]] = []
    for line in hunk:
        if line.line_type == "\\":
            # "No newline at end of file" speaks of the line before it.
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        sides = {" ": [old, new], "-": [old], "+": [new]}.get(line.line_type)
        if sides is None:
            raise ConfigError(f"error: {name}: stray blank line after hunk {number} of {path}")
        for side in sides:
            side.append(line.value.encode("latin-1"))
        last = sides
    start = hunk.source_start
    # An insertion into an empty range names the line before it (unified diff format).
    if not old:
        start += 1
    return Hunk(number, start, tuple(old), tuple(new), hunk.target_start)


def read_series(folder: Path) -> tuple[str, ...]:
    """Names in patches/series, in order; `#` starts a comment."""
    path = folder / "series"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"error: cannot read {path}: {error.strerror}") from error
    names = [name for line in lines if (name := line.split("#", 1)[0].strip())]
    for name in names:
        check_path(str(path), name)
        if names.count(name) > 1:
            raise ConfigError(f"error: {path} lists {name} more than once")
    return tuple(names)


def patch_files(folder: Path) -> set[str]:
    """Names of all patch files that lie below patches/."""
    return {
        PurePosixPath(path.relative_to(folder)).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".patch", ".diff")
    }


def read_patches(folder: Path) -> tuple[Patch, ...]:
    """The whole series, parsed; an unlisted or missing patch file is an error."""
    names = read_series(folder)
    there = patch_files(folder)
    missing = [name for name in names if name not in there]
    unlisted = sorted(there - set(names))
    if missing or unlisted:
        raise ConfigError(
            f"error: {folder / 'series'} and the files below {folder} do not match",
            [("missing", f"{name} is listed but is not there") for name in missing]
            + [("unlisted", f"{name} is there but is not listed") for name in unlisted],
            "list each patch file once in patches/series, or delete it",
        )
    return tuple(parse_patch(name, (folder / name).read_bytes()) for name in names)
